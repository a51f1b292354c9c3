import numpy as np
f=np.float32
def fma(a,b,c): return f(np.float64(a)*np.float64(b)+np.float64(c)) if False else (np.float64(a)*np.float64(b)+np.float64(c)).astype(f)
for off in (0.0, 37.3):
    x=np.linspace(-119,7.99,2000001).astype(f)
    s=(x+f(off)).astype(f); scale=f(1.0)
    y=np.clip(fma(s, scale/f(128), (f(120)-f(off))/f(128)),0,1).astype(f)
    magic=f(12582912.)
    whole=fma(y,f(128),magic-f(120))
    part=fma(y,f(128),(f(-120)-(whole-magic)).astype(f))
    p=fma(part,f(0.05550410866),f(0.24022650696)); p=fma(p,part,f(0.69314718056)); p=fma(p,part,f(1))
    r=(p.view(np.int32)+(whole.view(np.int32)<<23)).view(f)
    want=np.exp2(s.astype(np.float64)-off)
    print(off, np.abs(r/want-1).max(), part.min(), part.max())
y=np.array([0,1],f)
whole=fma(y,f(128),magic-f(120)); part=fma(y,f(128),(f(-120)-(whole-magic)).astype(f)); print(whole-magic,part)
