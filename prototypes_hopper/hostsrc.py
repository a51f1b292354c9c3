import sys; sys.path.insert(0,"proto")
import attention, tilelang, torch
k = tilelang.compile(attention.make(head_dim=128, group=4), target={"kind":"cuda","arch":"sm_90a"}, pass_configs=attention.PASSES)
print(type(k), type(k.adapter))
try:
    print(k.get_host_source())
except Exception as e: print("no host", e)
