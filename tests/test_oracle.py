"""Self-check of oracle.py. Run: python -m pytest -q test_oracle.py"""

import importlib.util
import os
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests import oracle as R

F64 = torch.float64
torch.manual_seed(0)
g_ = torch.Generator().manual_seed(1234)


def rn(*s, dt=F64):
    return torch.randn(*s, dtype=F64, generator=g_).to(dt)


def sdpa(q, k, v, mask, scale=None):
    """[B, S, H, D] torch SDPA with an explicit boolean or additive mask."""
    g = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(g, 2), v.repeat_interleave(g, 2)
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale
    )
    return o.transpose(1, 2)


def brute_mask(sq, sk, causal, wl, wr):
    m = torch.zeros(sq, sk, dtype=torch.bool)
    for i in range(sq):
        p = i + sk - sq
        for j in range(sk):
            m[i, j] = (not causal or j <= p) and (wl == -1 or j >= p - wl) and (wr == -1 or j <= p + wr)
    return m


def cu(lens):
    return torch.tensor([0] + list(torch.tensor(lens).cumsum(0)), dtype=torch.int32)


def close(a, b, tol=1e-12):
    torch.testing.assert_close(a.to(F64), b.to(F64), atol=tol, rtol=tol)


@pytest.mark.parametrize("sq,sk,causal,wl,wr,scale", [
    (7, 7, True, -1, -1, None), (5, 11, True, -1, -1, 0.3), (5, 11, False, -1, -1, None),
    (6, 9, True, 2, -1, None), (6, 9, False, 2, 1, None), (9, 4, False, -1, -1, None),
    (1, 13, True, 4, 0, None), (4, 9, True, 0, 5, None)])
def test_dense_vs_sdpa(sq, sk, causal, wl, wr, scale):
    q, k, v = rn(2, sq, 6, 8), rn(2, sk, 2, 8), rn(2, sk, 2, 8)
    m = brute_mask(sq, sk, causal, wl, wr)
    assert torch.equal(m, R.visible(sq, sk, causal, wl, wr))
    assert m.any(1).all()
    o = R.gqa_dense_fwd(q, k, v, is_causal=causal, window_size_left=wl, window_size_right=wr, sm_scale=scale)
    close(o, sdpa(q, k, v, m, scale))


def test_dense_empty_rows_are_zero():
    q, k, v = rn(1, 9, 4, 8), rn(1, 4, 2, 8), rn(1, 4, 2, 8)
    o, lse = R.gqa_dense_fwd(q, k, v, is_causal=False, window_size_left=-1, window_size_right=0, return_lse=True)
    m = brute_mask(9, 4, False, -1, 0)
    dead = ~m.any(1)
    assert dead.sum() == 5 and (o[0, dead] == 0).all() and (lse[0][:, dead] == -float("inf")).all()
    close(o[:, ~dead], sdpa(q[:, ~dead], k, v, m[~dead]))
    assert R.gqa_dense_fwd(q, k[:, :0], v[:, :0], is_causal=False).abs().max() == 0
    assert R.gqa_dense_fwd(q[:, :0], k, v).shape == (1, 0, 4, 8)


def test_softcap_and_lse():
    q, k, v = rn(1, 5, 4, 8), rn(1, 7, 4, 8), rn(1, 7, 4, 8)
    o, lse = R.gqa_dense_fwd(q, k, v, softcap=1.5, return_lse=True)
    z = torch.einsum("bihd,bjhd->bhij", q, k) * 8**-0.5
    z = (1.5 * torch.tanh(z / 1.5)).masked_fill(~brute_mask(5, 7, True, -1, -1), -float("inf"))
    close(o, torch.einsum("bhij,bjhd->bihd", z.softmax(-1), v))
    close(lse, z.logsumexp(-1))
    close(R.gqa_dense_fwd(q, k, v, softcap=0), R.gqa_dense_fwd(q, k, v))


@pytest.mark.parametrize("layout", ["neox", "interleaved"])
@pytest.mark.parametrize("rd", [8, 4])
def test_rope_is_complex_rotation(layout, rd):
    """Pairing checked with complex multiplication; scores depend on the position difference."""
    cos, sin = R.rope_table(rd, 64, 100.0, F64)
    x = rn(5, 2, 8)
    pos = torch.tensor([3, 0, 9, 40, 2])
    y = R.rotate(x, pos, cos, sin, layout)
    a = x[..., : rd // 2] if layout == "neox" else x[..., 0:rd:2]
    b = x[..., rd // 2 : rd] if layout == "neox" else x[..., 1:rd:2]
    f = 100.0 ** (-2 * torch.arange(rd // 2, dtype=F64) / rd)
    w = torch.complex(a, b) * torch.exp(1j * pos[:, None, None] * f)
    ya = y[..., : rd // 2] if layout == "neox" else y[..., 0:rd:2]
    yb = y[..., rd // 2 : rd] if layout == "neox" else y[..., 1:rd:2]
    close(ya, w.real), close(yb, w.imag), close(y[..., rd:], x[..., rd:], 0)
    q, k, v = rn(1, 4, 4, 8), rn(1, 9, 2, 8), rn(1, 9, 2, 8)
    o = R.gqa_dense_fwd(q, k, v, rope_cos=cos, rope_sin=sin, rope_layout=layout)
    qr = R.rotate(q[0], torch.arange(4) + 5, cos, sin, layout)[None]
    kr = R.rotate(k[0], torch.arange(9), cos, sin, layout)[None]
    close(o, sdpa(qr, kr, v, brute_mask(4, 9, True, -1, -1)))
    # shifting every position by the same amount changes nothing
    qs = R.rotate(q[0], torch.arange(4) + 5 + 20, cos, sin, layout)[None]
    ks = R.rotate(k[0], torch.arange(9) + 20, cos, sin, layout)[None]
    close(o, sdpa(qs, ks, v, brute_mask(4, 9, True, -1, -1)))


def test_sinks_equal_an_extra_zero_value_key():
    q, k, v = rn(1, 5, 4, 8), rn(1, 7, 2, 8), rn(1, 7, 2, 8)
    sinks = torch.tensor([0.3, -float("inf"), float("inf"), -2.0], dtype=torch.float32)
    o = R.gqa_varlen_fwd(q[0], k[0], v[0], cu([5]), cu([7]), window_size_left=2, sinks=sinks)
    m = brute_mask(5, 7, True, 2, -1)
    bias = torch.zeros(1, 4, 5, 8, dtype=F64)
    bias[..., :7].masked_fill_(~m, -float("inf"))
    bias[..., 7] = sinks.double()[None, :, None]
    bias[:, 2, :, :7] = -float("inf")
    bias[:, 2, :, 7] = 0.0
    pad = torch.zeros(1, 1, 2, 8, dtype=F64)
    close(o, sdpa(q, torch.cat([k, pad], 1), torch.cat([v, pad], 1), bias)[0])
    assert (o[:, 2] == 0).all()
    close(o[:, 1], R.gqa_varlen_fwd(q[0], k[0], v[0], cu([5]), cu([7]), window_size_left=2)[:, 1])


def test_varlen_equals_dense_per_request():
    ql, kl = [4, 0, 3, 1, 5], [6, 0, 3, 9, 2]  # the last request has more queries than keys
    q, k, v = rn(sum(ql), 4, 8), rn(sum(kl), 2, 8), rn(sum(kl), 2, 8)
    cq, ck = cu(ql), cu(kl)
    for causal in (True, False):
        o = R.gqa_varlen_fwd(q, k, v, cq, ck, is_causal=causal, window_size_left=3, softcap=2.0)
        for b in range(len(ql)):
            sq, sk = slice(cq[b], cq[b + 1]), slice(ck[b], ck[b + 1])
            d = R.gqa_dense_fwd(q[sq][None], k[sk][None], v[sk][None], is_causal=causal, window_size_left=3, softcap=2.0)
            close(o[sq], d[0], 0)
    o = R.gqa_varlen_fwd(q, k, v, cq, ck)
    assert (o[8:11] == 0).all() and (o[11:] != 0).any()


def test_fp8_dequantization():
    q, k, v = (R.to_e4m3(rn(2, s, h, 8, dt=torch.float32)) for s, h in ((3, 4), (5, 2), (5, 2)))
    qs, ks, vs = (torch.rand(2, 2, generator=g_) + 0.5 for _ in range(3))
    o = R.gqa_dense_fwd(q, k, v, qs, ks, vs)
    qd = q.float().double() * qs.double().repeat_interleave(2, 1)[:, None, :, None]
    kd, vd = k.float().double() * ks.double()[:, None, :, None], v.float().double() * vs.double()[:, None, :, None]
    close(o, sdpa(qd, kd, vd, brute_mask(3, 5, True, -1, -1)))


def make_paged(kl, vl, page, dt=F64, stale=float("nan")):
    """Scatter per-request logical rows into a shuffled pool with stale rows elsewhere."""
    need = [-(-len(x) // page) for x in kl]
    width = max(need + [1]) + 1
    perm = torch.randperm(sum(need) + 3, generator=g_).tolist()
    heads, dim = kl[0].shape[1:]
    kp = torch.full((len(perm), page, heads, dim), stale, dtype=F64).to(dt)
    vp = kp.clone()
    table = torch.full((len(kl), width), -7, dtype=torch.int32)
    for b in range(len(kl)):
        for i in range(need[b]):
            table[b, i] = perm.pop()
        for j in range(len(kl[b])):
            kp[table[b, j // page], j % page], vp[table[b, j // page], j % page] = kl[b][j], vl[b][j]
    return kp, vp, table


@pytest.mark.parametrize("page", [1, 3, 4, 16])
def test_paged_equals_varlen(page):
    ql, cl = [4, 0, 3, 1, 2], [6, 5, 3, 17, 0]
    kl, vl = [rn(c, 2, 8) for c in cl], [rn(c, 2, 8) for c in cl]
    kp, vp, table = make_paged(kl, vl, page)
    q = rn(sum(ql), 4, 8)
    cos, sin = R.rope_table(4, 32, 50.0, F64)
    sinks = rn(4, dt=torch.float32)
    for kw in ({}, dict(is_causal=False), dict(window_size_left=2, softcap=3.0), dict(sinks=sinks),
               dict(rope_cos=cos, rope_sin=sin, rope_layout="interleaved")):
        if "rope_cos" in kw:
            ql2, q2 = [4, 0, 3, 1, 0], q[:8]
        else:
            ql2, q2 = ql, q
        o = R.gqa_paged_fwd(q2, kp, vp, table, torch.tensor(cl, dtype=torch.int32), cu(ql2), **kw)
        close(o, R.gqa_varlen_fwd(q2, torch.cat(kl), torch.cat(vl), cu(ql2), cu(cl), **kw), 0)


@pytest.mark.parametrize("dt", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fuse", [False, True])
def test_prefill_append_equals_write_then_paged(dt, fuse):
    page, ql, old = 4, [3, 0, 5, 1], [5, 2, 0, 7]
    kl, vl = [rn(o, 2, 8, dt=dt) for o in old], [rn(o, 2, 8, dt=dt) for o in old]
    # reserve room for the new rows
    kp, vp, table = make_paged([F.pad(x.double(), (0, 0, 0, 0, 0, n)) for x, n in zip(kl, ql)],
                               [F.pad(x.double(), (0, 0, 0, 0, 0, n)) for x, n in zip(vl, ql)], page, dt)
    q, kn, vn = rn(sum(ql), 4, 8, dt=dt), rn(sum(ql), 2, 8, dt=dt), rn(sum(ql), 2, 8, dt=dt)
    cq, cl = cu(ql), torch.tensor(old, dtype=torch.int32)
    one = torch.ones(1)
    pool_k, pool_v = kp.flatten(0, 1).clone(), vp.flatten(0, 1).clone()
    o = R.gqa_prefill_paged_fwd(q, kn, vn, pool_k, pool_v, one, one, cq, cl, table, page,
                                softcap=2.0, fuse_rope=fuse, rope_base=100.0, max_position=32, rotary_dim=4 if fuse else None)
    # the same in two ops
    pos = torch.cat([torch.arange(n) + o_ for n, o_ in zip(ql, old)])
    req = torch.cat([torch.full((n,), b) for b, n in enumerate(ql)])
    slots = table[req, pos // page].long() * page + pos % page
    q2, k2 = q.double(), kn
    if fuse:
        cos, sin = R.rope_table(4, 32, 100.0)
        q2, k2 = R.rotate(q, pos, cos, sin), R.rotate(kn, pos, cos, sin).to(dt)
    wk, wv = kp.clone(), vp.clone()
    R.paged_kv_cache_write(k2, vn, wk, wv, slots)
    assert torch.equal(wk.flatten(0, 1).view(torch.int16), pool_k.view(torch.int16))
    assert torch.equal(wv.flatten(0, 1).view(torch.int16), pool_v.view(torch.int16))
    total = torch.tensor([a + b for a, b in zip(old, ql)], dtype=torch.int32)
    close(o, R.gqa_paged_fwd(q2, wk, wv, table, total, cq, softcap=2.0))


def test_prefill_fp8_cache_attends_unquantized_new_rows():
    page, ql, old = 4, [3, 2], [5, 0]
    ks, vs = torch.tensor([0.02]), torch.tensor([0.05])
    kl, vl = [rn(o, 2, 8, dt=torch.float16) for o in old], [rn(o, 2, 8, dt=torch.float16) for o in old]
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    kp = torch.zeros(16, 2, 8).to(R.E4M3)
    vp = kp.clone()
    for j in range(5):
        kp[R.physical_rows(table[0], 5, page)[j]] = R.store_e4m3(kl[0][j], ks)
        vp[R.physical_rows(table[0], 5, page)[j]] = R.store_e4m3(vl[0][j], vs)
    before = kp.clone()
    q, kn, vn = rn(5, 4, 8, dt=torch.float16), rn(5, 2, 8, dt=torch.float16), rn(5, 2, 8, dt=torch.float16)
    kn[0, 0, 0], kn[0, 0, 1] = 100.0, -100.0
    o = R.gqa_prefill_paged_fwd(q, kn, vn, kp, vp, ks, vs, cu(ql), torch.tensor(old, dtype=torch.int32), table, page)
    rows = R.physical_rows(table[0], 8, page)
    kd = torch.cat([before.float().double()[rows[:5]] * ks.double(), kn[:3].double()])
    vd = torch.cat([vp.float().double()[rows[:5]] * vs.double(), vn[:3].double()])
    close(o[:3], sdpa(q[None, :3].double(), kd[None], vd[None], brute_mask(3, 8, True, -1, -1))[0])
    close(o[3:], sdpa(q[None, 3:].double(), kn[None, 3:].double(), vn[None, 3:].double(), brute_mask(2, 2, True, -1, -1))[0])
    assert kp[rows[5], 0, 0].float() == 448 and kp[rows[5], 0, 1].float() == -448
    untouched = [r for r in range(16) if r not in rows[5:] + R.physical_rows(table[1], 2, page)]
    assert torch.equal(kp[untouched].view(torch.uint8), before[untouched].view(torch.uint8))


@pytest.mark.parametrize("causal", [False, True])
def test_mha_decode_paged(causal):
    page, lens, sq = 4, [9, 1, 0, 4], 3
    kl, vl = [rn(n, 4, 8) for n in lens], [rn(n, 4, 8) for n in lens]
    kp, vp, table = make_paged(kl, vl, page)
    q = rn(4, sq, 4, 8)
    o = R.mha_decode_paged_fwd(q, kp.flatten(0, 1), vp.flatten(0, 1), torch.tensor(lens, dtype=torch.int32), table, page, causal)
    for b, n in enumerate(lens):
        m = brute_mask(sq, n, causal, -1, -1)
        live = m.any(1) if n else torch.zeros(sq, dtype=torch.bool)
        assert (o[b, ~live] == 0).all()
        if live.any():
            close(o[b, live], sdpa(q[b : b + 1, live], kl[b][None], vl[b][None], m[live])[0])
    if causal:
        assert (o[1, :2] == 0).all() and (o[1, 2] != 0).any()


@pytest.mark.parametrize("causal", [False, True])
def test_gqa_bwd_vs_autograd(causal):
    q, k, v = (rn(2, 9, h, 8).requires_grad_() for h in (6, 2, 2))
    o_auto = sdpa(q, k, v, brute_mask(9, 9, causal, -1, -1))
    do = rn(*o_auto.shape)
    grads = torch.autograd.grad(o_auto, (q, k, v), do)
    with torch.no_grad():
        o, lse = R.gqa_dense_fwd(q, k, v, is_causal=causal, return_lse=True)
        close(o, o_auto)
        for mine, ref in zip(R.gqa_bwd(q, k, v, o, do, lse, causal), grads):
            close(mine, ref)
        lse2 = lse.clone()
        lse2[0, 1, 3] = -float("inf")
        dq, _, _ = R.gqa_bwd(q, k, v, o, do, lse2, causal)
        assert (dq[0, 3, 1] == 0).all() and torch.isfinite(dq).all()


def test_mla_vs_sdpa():
    q, qp, k, kp = rn(2, 8, 16), rn(2, 8, 4), rn(2, 11, 2, 16), rn(2, 11, 2, 4)
    o = R.mla_decode_fwd(q, qp, k, kp)
    Q, K = torch.cat([q, qp], -1)[:, None], torch.cat([k, kp], -1)
    close(o, sdpa(Q, K, k, torch.ones(1, 11, dtype=torch.bool), 20**-0.5)[:, 0])


def test_dsa_vs_masked_sdpa():
    b, s, h, hk, d, tail, sk, top = 2, 6, 4, 2, 8, 4, 10, 5
    q, kv = rn(b, s, h, d + tail), rn(b, sk, hk, d + tail)
    for stride, start, causal in ((1, 4, True), (2, 11, True), (3, 0, True), (1, 0, False)):
        idx = torch.stack([torch.randperm(sk + 2, generator=g_)[:top] for _ in range(b * s * hk)]).view(b, s, hk, top).int()
        idx[idx == sk + 1] = -1  # sk and -1 both pad
        o = R.dsa_decode_fwd(q, kv, idx, tail, stride, start, is_causal=causal)
        for g in range(hk):
            m = torch.zeros(b, s, sk + 1, dtype=torch.bool)
            m.scatter_(2, torch.where(idx[:, :, g] < 0, sk, idx[:, :, g]).long(), True)
            m = m[..., :sk]
            if causal:
                pos = torch.arange(s) + start
                m &= (pos[:, None] >= torch.arange(sk)[None, :] * stride + stride - 1)[None]
            live = m.any(-1)
            hs = slice(g * 2, g * 2 + 2)
            ref = sdpa(q[:, :, hs], kv[:, :, g : g + 1], kv[:, :, g : g + 1, :d], (m | ~live[..., None])[:, None])
            ref = ref * live[..., None, None]
            close(o[:, :, hs], ref)


# ------------------------------------------------------------------------- NSA against FLA


def fla_naive(path=os.environ.get("FLA_NSA_NAIVE", "")):
    """fla/ops/nsa/naive.py of an unpacked fla-core wheel, loaded alone; skipped when FLA_NSA_NAIVE does not name it."""
    if not os.path.exists(path):
        pytest.skip("FLA_NSA_NAIVE does not name fla/ops/nsa/naive.py")
    ein = types.ModuleType("einops")
    ein.repeat = lambda x, pattern, g: x.repeat_interleave(g, dim=2)
    utils = types.ModuleType("fla.ops.utils")

    def prepare_chunk_offsets(c, bs):
        n = (c[1:] - c[:-1] + bs - 1) // bs
        return torch.cat([c.new_tensor([0]), n.cumsum(0)])

    utils.prepare_chunk_offsets = prepare_chunk_offsets
    pooling = types.ModuleType("fla.ops.utils.pooling")
    pooling.mean_pooling = None
    for name, mod in {"einops": ein, "fla": types.ModuleType("fla"), "fla.ops": types.ModuleType("fla.ops"),
                      "fla.ops.utils": utils, "fla.ops.utils.pooling": pooling}.items():
        sys.modules.setdefault(name, mod)
    spec = importlib.util.spec_from_file_location("fla_naive", path)
    mod = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mod)
    return mod


def nsa_inputs(lens, bs, heads=4, hk=2, d=8):
    off = cu(lens)
    coff = cu([-(-n // bs) for n in lens])
    t, c = int(off[-1]), int(coff[-1])
    return off, coff, rn(t, heads, d, dt=torch.float32), rn(c, hk, d, dt=torch.float32)


def test_nsa_compressed_vs_fla():
    lens, bs = [13, 3, 17, 4], 4
    off, coff, q, kc = nsa_inputs(lens, bs)
    vc = rn(kc.shape[0], 2, 6, dt=torch.float32)
    o, lse = R.nsa_compressed_fwd(q, kc, vc, off, coff, 0.3, bs)
    fo, flse = fla_naive().naive_nsa_compression(q[None], kc[None], vc[None], bs, 0.3, off.long())
    close(o, fo[0], 1e-5), close(lse.T[torch.isfinite(lse.T)], flse[0][torch.isfinite(flse[0])], 1e-5)
    assert torch.equal(torch.isfinite(lse.T), torch.isfinite(flse[0]))
    assert (o[:3] == 0).all() and (lse[:, :3] == -float("inf")).all() and torch.isfinite(lse[:, 3]).all()


def test_nsa_topk_vs_fla():
    lens, bs, sel = [37, 3, 29, 8], 4, 5
    off, coff, q, kc = nsa_inputs(lens, bs)
    mine = R.nsa_topk(q, kc, off, coff, 0.7, sel, bs)
    fla = fla_naive().naive_nsa_topk(q[None], kc[None], sel, bs, 0.7, off.long())[0].int()
    score = R.nsa_topk_scores(q, kc, off, coff, 0.7, bs)
    R.check_nsa_topk(mine, score, 1e-9)
    # FLA's reference orders -1 inside the list where a non-candidate sorted early; compare sets
    for t in range(q.shape[0]):
        for r in range(2):
            assert set(R.ints(mine[t, r])) - {-1} == set(R.ints(fla[t, r])) - {-1}, (t, r)
    assert R.ints(mine[0, 0]) == [0, -1, -1, -1, -1]
    wide = R.nsa_topk(q, kc, off, coff, 0.7, 40, bs)
    R.check_nsa_topk(wide, score, 1e-9)
    bad = mine.clone()
    bad[36, 0, 0] = bad[36, 0, 1]
    with pytest.raises(AssertionError):
        R.check_nsa_topk(bad, score)


def test_nsa_fwd_vs_fla_and_dense():
    lens, bs, sel = [13, 3, 17], 4, 3
    off = cu(lens)
    t, hk = sum(lens), 2
    q, k, v = rn(t, 4, 8, dt=torch.float32), rn(t, hk, 8, dt=torch.float32), rn(t, hk, 8, dt=torch.float32)
    idx = torch.full((t, hk, sel), -1, dtype=torch.int32)
    pos = torch.cat([torch.arange(n) for n in lens])
    for i in range(t):
        for r in range(hk):
            pick = torch.randperm(int(pos[i]) // bs + 1, generator=g_)[:sel]
            idx[i, r, : len(pick)] = pick.int()
    cnt = torch.full((t, hk), sel, dtype=torch.int32)
    o = R.nsa_fwd(q, k, v, idx, cnt, off, True, 0.3, bs)
    close(o, fla_naive().naive_nsa_selection(q[None], k[None], v[None], idx[None].long(), bs, 0.3, off.long())[0], 1e-5)
    # counts cut the list; -1, past-the-end ids and count 0 give nothing
    cnt2 = torch.randint(0, sel + 1, (t, hk), generator=g_, dtype=torch.int32)
    idx2 = torch.where(torch.arange(sel) < cnt2[..., None], idx, torch.tensor(t, dtype=torch.int32))
    close(R.nsa_fwd(q, k, v, idx, cnt2, off, True, 0.3, bs), R.nsa_fwd(q, k, v, idx2, cnt, off, True, 0.3, bs), 0)
    assert (R.nsa_fwd(q, k, v, torch.full_like(idx, -1), cnt, off, True, 0.3, bs) == 0).all()
    # every block selected: dense attention, causal and not
    full = torch.arange(5, dtype=torch.int32).expand(t, hk, 5)
    n5 = torch.full((t, hk), 5, dtype=torch.int32)
    for causal in (True, False):
        close(R.nsa_fwd(q, k, v, full, n5, off, causal, 0.3, bs),
              R.gqa_varlen_fwd(q, k, v, off, off, is_causal=causal, sm_scale=0.3), 1e-6)


# ------------------------------------------------------------------------------- indexer


def test_indexer():
    b, s, h, d, sk, g = 2, 5, 4, 16, 9, 2
    q, k = rn(b, s, h, d, dt=torch.bfloat16), rn(b, sk, g, d, dt=torch.bfloat16)
    k[0, 3] = 0
    w = rn(s, h, dt=torch.float32)
    ks, ke = torch.tensor([0, 2, 4, 9, 5], dtype=torch.int32), torch.tensor([9, 3, 4, 9, 3], dtype=torch.int32)
    out = R.fp8_lightning_indexer(q, k, w, ks, ke)
    k8, sc = R.quantize_index_keys(k)
    assert (sc[0, 3] == torch.tensor(1e-4) / 448).all() and (k8.float()[0, 3] == 0).all()
    assert k8.float().abs().amax() == 448
    # equal to the FP8 form of the same call
    close(torch.nan_to_num(out, neginf=-1e9), torch.nan_to_num(R.fp8_lightning_indexer(R.to_e4m3(q.float()), k8, w, ks, ke, sc), neginf=-1e9), 0)
    t = torch.arange(sk)
    win = (t >= ks[:, None]) & (t < ke[:, None])
    assert torch.equal(torch.isfinite(out), win[None, :, :, None].expand(b, s, sk, g))
    dots = torch.einsum("bsghd,btgd->bsthg", q.double().view(b, s, g, 2, d), k.double())
    exact = (dots.relu() * w.double().view(s, g, 2).transpose(1, 2)[None, :, None]).sum(3)
    a, e = out[torch.isfinite(out)], exact[torch.isfinite(out)]
    assert 1 - 2 * (a * e).sum() / (a * a + e * e).sum() < 2e-3
    one = R.fp8_lightning_indexer(R.to_e4m3(q.float()), k8, w, ks, ke)
    close(one[..., 0][torch.isfinite(out[..., 0])], (out / sc.double()[:, None])[..., 0][torch.isfinite(out[..., 0])], 1e-12)


# --------------------------------------------------------------------------------- write


def test_write():
    k, v = rn(4, 2, 3, dt=torch.bfloat16), rn(4, 2, 3, dt=torch.bfloat16)
    kp, vp = torch.full((3, 5, 2, 3), 7.0, dtype=torch.bfloat16), torch.full((3, 5, 2, 3), 8.0, dtype=torch.bfloat16)
    R.paged_kv_cache_write(k, v, kp, vp, torch.tensor([11, -1, 0, 4]))
    assert torch.equal(kp[2, 1], k[0]) and torch.equal(kp[0, 0], k[2]) and torch.equal(vp[0, 4], v[3])
    assert (kp.view(15, -1)[[1, 2, 3, 5, 14]] == 7).all()
    x = torch.tensor([449.0, -1e30, float("inf"), -float("inf"), float("nan"), 2**-10, 1.0625, 1.1875]).to(torch.bfloat16).view(1, 1, 8)
    p8 = torch.zeros(1, 2, 1, 8).to(R.E4M3)
    p9 = p8.clone()
    R.paged_kv_cache_write(x, x, p8, p9, torch.tensor([1]), torch.tensor([1.0]), torch.tensor([2.0]))
    got = p8[0, 1, 0].float()
    assert got[:4].tolist() == [448, -448, 448, -448] and torch.isnan(got[4])
    assert got[5:].tolist() == [0.0, 1.0, 1.25]  # ties to even
    assert p9[0, 1, 0].float()[0] == 224 and p9[0, 1, 0].float()[2] == 448


def test_score_counts_match_formula():
    for sq, sk in ((1, 9), (5, 9), (9, 9)):
        n = int(brute_mask(sq, sk, True, -1, -1).sum())
        assert n == sq * sk - sq * (sq - 1) // 2
    for s, w in ((9, 3), (9, 0), (5, 7)):
        w1 = min(w + 1, s)
        assert int(brute_mask(s, s, True, w, -1).sum()) == s * w1 - w1 * (w1 - 1) // 2
    for n, bs in ((13, 4), (3, 4), (16, 4)):
        full, rest = divmod(n + 1, bs)
        closed = bs * full * (full - 1) // 2 + rest * full
        assert closed == sum((t + 1) // bs for t in range(n))
