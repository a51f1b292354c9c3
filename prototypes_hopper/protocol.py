"""Random-order simulation of the kernel's barriers: who waits for what, with which parity.

Each role is a generator that yields a condition to wait for; a scheduler runs a random role whose
condition holds. It checks that every tile read is the one meant and that nobody waits for ever.
"""
import random, sys

class MBar:
    def __init__(self, count): self.count=count; self.pending=count; self.phase=0
    def arrive(self, n=1):
        assert self.pending>=n, "too many arrivals in a phase"
        self.pending-=n
        if self.pending==0: self.pending=self.count; self.phase^=1
    def done(self, parity): return self.phase!=parity      # phase `parity` has completed
class Named:
    def __init__(self,count): self.count=count; self.got=0; self.gen=0
    def arrive(self,n):
        self.got+=n; assert self.got<=self.count, "named barrier overrun"
        if self.got==self.count: self.got=0; self.gen+=1

def run(seed, NW, ST, turns, dynamic, ctas, tiles, blocks, order_bug=False):
    rnd=random.Random(seed)
    counter=[0]; served=[]; roles={}
    def cta_roles(cta):
        q_full=[MBar(1) for _ in range(2)]; q_free=[MBar(NW) for _ in range(2)]
        k_full=[MBar(1) for _ in range(ST)]; k_free=[MBar(4*NW) for _ in range(ST)]
        v_full=[MBar(1) for _ in range(ST)]; v_free=[MBar(4*NW) for _ in range(ST)]
        turn=[Named(256) for _ in range(NW)]
        q_s=[None]*2; k_s=[None]*ST; v_s=[None]*ST; tile_s=[None]*2
        rounds = tiles if dynamic else (tiles-cta+ctas-1)//ctas
        tma=[]  # loads under way
        def load(buf,i,tag,bar):
            buf[i]="loading"
            tma.append((buf,i,tag,bar))
        def copy_engine():
            while True:
                yield lambda: bool(tma)
                j=rnd.randrange(len(tma)); buf,i,tag,bar=tma.pop(j)
                buf[i]=tag; bar.arrive()
        def producer():
            step=0; last=None
            for i in range(rounds+1):
                slot=i%2
                if dynamic:
                    if i==0: tile=cta
                    else:
                        tile=counter[0]+ctas; counter[0]+=1
                        if tile==tiles+ctas-1: counter[0]=0
                else: tile=cta+i*ctas
                if dynamic or i<rounds:
                    yield lambda: q_free[slot].done(((i//2)%2)^1)
                if dynamic:
                    tile_s[slot]=tile
                    if tile>=tiles: q_full[slot].arrive(); break
                elif i>=rounds: break
                load(q_s,slot,tile,q_full[slot])
                for n in range(blocks(tile)):
                    s=step%ST
                    yield lambda: k_free[s].done(((step//ST)%2)^1)
                    load(k_s,s,(tile,n),k_full[s])
                    if step>0:
                        p=(step-1)%ST
                        yield lambda: v_free[p].done((((step-1)//ST)%2)^1)
                        load(v_s,p,last,v_full[p])
                    last=(tile,n); step+=1
            if step>0:
                p=(step-1)%ST
                yield lambda: v_free[p].done((((step-1)//ST)%2)^1)
                load(v_s,p,last,v_full[p])
        def consumer(wg):
            if turns and wg==NW-1: turn[0].arrive(128)
            step=0; count=0; pending=-1; prev=None
            for i in range(rounds+1):
                slot=i%2
                if pending>=0: q_free[pending].arrive(); pending=-1
                if dynamic:
                    yield lambda: q_full[slot].done((i//2)%2)
                    tile=tile_s[slot]
                    if tile>=tiles: break
                else:
                    if i>=rounds: break
                    yield lambda: q_full[slot].done((i//2)%2)
                    tile=cta+i*ctas
                for n in range(blocks(tile)):
                    s=step%ST; r=(step+ST-1)%ST
                    yield lambda: k_full[s].done((step//ST)%2)
                    if turns:
                        g=turn[wg].gen; turn[wg].arrive(128)
                        yield lambda: turn[wg].gen>g
                    assert q_s[slot]==tile and k_s[s]==(tile,n), (q_s,k_s,tile,n)
                    if step>0:
                        yield lambda: v_full[r].done(((step-1)//ST)%2)
                        assert v_s[r]==prev,(v_s,prev)
                    if turns: turn[(wg+1)%NW].arrive(128)
                    if pending>=0: q_free[pending].arrive(); pending=-1
                    yield lambda: True
                    assert q_s[slot]==tile and k_s[s]==(tile,n)
                    k_free[s].arrive(4)
                    yield lambda: True
                    if step>0:
                        assert v_s[r]==prev; v_free[r].arrive(4)
                    if n==0 and i>0:
                        assert q_s[(i-1)%2]==prev[0]
                        served.append((prev[0],wg)); pending=(i-1)%2
                    prev=(tile,n); step+=1
                count=i+1
            if count>0:
                r=(step+ST-1)%ST
                yield lambda: v_full[r].done(((step-1)//ST)%2)
                assert v_s[r]==prev and q_s[(count-1)%2]==prev[0]
                served.append((prev[0],wg))
        roles[(cta,"tma")]=copy_engine(); roles[(cta,"p")]=producer()
        for w in range(NW): roles[(cta,w)]=consumer(w)
    for c in range(ctas): cta_roles(c)
    waits={k:(lambda: True) for k in roles}
    while True:
        live=[k for k in roles if k[1]!="tma"]
        if not live: break
        ready=[k for k in roles if waits[k]()]
        if not ready: raise RuntimeError(f"deadlock {live} seed {seed}")
        k=rnd.choice(ready)
        try: waits[k]=next(roles[k])
        except StopIteration: del roles[k], waits[k]
    assert sorted(served)==sorted((t,w) for t in range(tiles) for w in range(NW)), "tiles"
    assert counter[0]==0

n=0
for seed in range(int(sys.argv[1])):
    rnd=random.Random(seed)
    NW=rnd.choice([2,3,4]); ST=rnd.choice([2,3,4]); ctas_max=rnd.choice([1,2,3,5])
    tiles=rnd.randint(1,12); top=rnd.choice([1,2,5])
    bl=[rnd.randint(1,top) for _ in range(tiles)]
    ctas=min(ctas_max,tiles)
    run(seed,NW,ST,rnd.random()<.7,rnd.random()<.5,ctas,tiles,lambda t:bl[t]); n+=1
print("ok",n)
