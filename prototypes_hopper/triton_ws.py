"""Triton's own warp specialisation on Hopper, whole blocks masked by arithmetic: check and time.

python triton_ws.py   (a GPU with Triton 3.6)
"""
import statistics, sys, torch, triton, triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

@triton.jit
def fwd(q_desc, k_desc, v_desc, o_desc, lse, scale, S, BATCH, H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WS: tl.constexpr, STAGES: tl.constexpr, TMA_O: tl.constexpr, o):
    bh = tl.program_id(0)
    m = tl.num_programs(1) - 1 - tl.program_id(1)
    b = bh // H
    h = bh % H
    rows = m * BM + tl.arange(0, BM)
    qt = q_desc.load([b * S + m * BM, h * D])
    acc = tl.zeros([BM, D], tl.float32)
    mi = tl.full([BM], float("-inf"), tl.float32)
    li = tl.zeros([BM], tl.float32)
    kv_row = b * S
    col0 = (h // (H // HKV)) * D
    for start in tl.range(0, (m + 1) * BM, BN, warp_specialize=WS, num_stages=STAGES):
        k = k_desc.load([kv_row + start, col0])
        s = tl.dot(qt, k.T)
        s = tl.where(rows[:, None] >= start + tl.arange(0, BN)[None, :], s, float("-inf"))
        mn = tl.maximum(mi, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - mn[:, None])
        a = tl.exp2(mi - mn)
        li = li * a + tl.sum(p, 1)
        acc = acc * a[:, None]
        v = v_desc.load([kv_row + start, col0])
        acc = tl.dot(p.to(tl.bfloat16), v, acc)
        mi = mn
    result = (acc / li[:, None]).to(tl.bfloat16)
    if TMA_O:
        o_desc.store([b * S + m * BM, h * D], result)
    else:
        cols = tl.arange(0, D)
        tl.store(o + (b * S + rows)[:, None].to(tl.int64) * (H * D) + h * D + cols[None, :], result)
    tl.store(lse + bh * S + rows, mi * 0.6931471805599453 + tl.log(li))

def make(B, S, H, HKV, D, BM, BN, WS, warps, stages, tma_o):
    q = torch.randn(B, S, H, D, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(B, S, HKV, D, device="cuda", dtype=torch.bfloat16)
    v = torch.randn(B, S, HKV, D, device="cuda", dtype=torch.bfloat16)
    o = torch.full_like(q, float("nan")); lse = torch.empty(B, H, S, device="cuda")
    def desc(x, rows): return TensorDescriptor(x.view(B * S, -1), [B * S, x.shape[2] * D], [x.shape[2] * D, 1], [rows, D])
    args = (desc(q, BM), desc(k, BN), desc(v, BN), desc(o, BM), lse, 1.4426950408889634 / D ** 0.5, S, B)
    def run():
        fwd[(B * H, S // BM)](*args, H=H, HKV=HKV, D=D, BM=BM, BN=BN, WS=WS, STAGES=stages, TMA_O=tma_o, o=o, num_warps=warps, num_stages=stages)
    return q, k, v, o, run

def check(q, k, v, o, rows=64):
    B, S, H, D = q.shape; g = H // k.shape[2]; worst = 0
    for b, h in ((0, 0), (B - 1, H - 1)):
        for r0 in (0, S // 2, S - rows):
            s = q[b, r0:r0 + rows, h].double() @ k[b, :, h // g].double().T / D ** 0.5
            vis = torch.arange(S, device="cuda")[None] <= torch.arange(r0, r0 + rows, device="cuda")[:, None]
            e = s.masked_fill(~vis, -torch.inf).softmax(-1) @ v[b, :, h // g].double()
            worst = max(worst, ((o[b, r0:r0 + rows, h].double() - e).norm() / e.norm()).item())
    return worst

SHAPES = {"A": (4, 2048, 32, 8, 128), "B": (1, 8192, 32, 8, 128), "C": (2, 8192, 64, 8, 64)}
if __name__ == "__main__":
    for ws, warps, bm, bn, stages, tma_o in [(True, 4, 128, 128, 2, False), (True, 4, 128, 64, 2, False), (True, 4, 128, 64, 3, False), (False, 8, 128, 128, 2, True)]:
        line = f"ws={ws} w{warps} {bm}x{bn} s{stages} tma_o={tma_o}: "
        for name, shape in SHAPES.items():
            try:
                q, k, v, o, run = make(*shape, bm, bn, ws, warps, stages, tma_o)
                run(); torch.cuda.synchronize(); err = check(q, k, v, o)
                g = torch.cuda.CUDAGraph()
                with torch.cuda.graph(g): run()
                ts = []
                for _ in range(30):
                    a, b_ = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    a.record(); g.replay(); b_.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b_))
                t = statistics.median(ts) * 1e-3
                B, S, H, HKV, D = shape
                line += f" {name} {4 * D * B * H * (S * (S + 1) / 2) / t * 1e-12:.0f} TF/s (err {err:.1e})"
            except Exception as e:
                line += f" {name} {type(e).__name__} {str(e)[:60]!r}"
        print(line, flush=True)
