import re,sys,subprocess
for name in sys.argv[1:]:
    subprocess.run(["python3","/tmp/hopper/sass.py",name],stdout=open(f"/tmp/hopper/out/{name}.txt","w"))
    ins=[]
    for l in open(f'/tmp/hopper/out/{name}.sass'):
        m=re.match(r"\s*/\*([0-9a-f]+)\*/\s+(.*?);",l)
        if m: ins.append((int(m.group(1),16),m.group(2)))
    i0=next(i for i,(a,t) in enumerate(ins) if 'HGMMA' in t)
    w1=next(i for i in range(i0,len(ins)) if 'WARPGROUP.DEPBAR' in ins[i][1] and '0x1' in ins[i][1])
    w0=next(i for i in range(w1,len(ins)) if 'WARPGROUP.DEPBAR' in ins[i][1] and '0x0' in ins[i][1])
    b=max(i for i in range(i0) if 'BAR.SYNC' in ins[i][1]) if any('0x100' in t for _,t in ins) else i0
    print(name,'turn..QK',i0-b,'QK..wait1',w1-i0,'wait1..wait0',w0-w1)
