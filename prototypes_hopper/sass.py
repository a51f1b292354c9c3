"""Condensed SASS: runs of plain instructions are counted, landmarks are printed."""
import re, subprocess, sys
NV="/work/main/.venv/lib/python3.11/site-packages/triton/backends/nvidia/bin/nvdisasm"
import os
if not os.path.exists(NV): raise SystemExit("no nvdisasm")
name=sys.argv[1]
txt=subprocess.run([NV,"-c",f"/tmp/hopper/out/{name}.cubin"],capture_output=True,text=True).stdout
open(f"/tmp/hopper/out/{name}.sass","w").write(txt)
LAND=re.compile(r"\b(HGMMA|WARPGROUP|DEPBAR|BAR|SYNCS|BRA|BSSY|BSYNC|WARPSYNC|UTMA|USETMAXREG|EXIT|CALL|RET|VOTE|SHFL|LDL|STL|FENCE|ELECT|NANOSLEEP|ERRBAR|MEMBAR|R2UR|CCTL)")
runs={}
def flush():
    global runs
    if runs:
        print("      ", " ".join(f"{k}x{v}" for k,v in sorted(runs.items(),key=lambda t:-t[1])))
        runs={}
n=0
for line in txt.splitlines():
    m=re.match(r"\s*/\*([0-9a-f]+)\*/\s+(.*?);",line)
    lab=re.match(r"(\.L_x_\d+):",line)
    if lab: flush(); print(lab.group(1)); continue
    if not m: continue
    n+=1
    ins=m.group(2)
    op=re.sub(r"^@!?U?P\w+\s+","",ins).split()[0]
    if LAND.search(op) and not op.startswith("SHFL") :
        if op.startswith("R2UR"):
            runs["R2UR"]=runs.get("R2UR",0)+1; continue
        flush(); print(m.group(1), ins[:110])
    else:
        k=".".join(op.split(".")[:2]); runs[k]=runs.get(k,0)+1
flush(); print("instructions",n)
