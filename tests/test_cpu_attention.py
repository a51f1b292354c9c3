"""The CPU engine against the float64 oracle, block by block."""

import math

import pytest
import torch
from torch import Tensor

from ops_registry import accuracy
from tests import oracle
from tests.checks import assert_close
from tileops.kernels.common import cpu_attention, cpu_attention_backward
from tileops.kernels.common.cpu_attention import (
    E4M3,
    AppendedKeys,
    Bounds,
    LatentKeys,
    PackedKeys,
    PagedKeys,
    Rope,
    Scratch,
    attend,
    widen,
)
from tileops.kernels.common.cpu_attention_backward import attend_backward

NAN, INF = math.nan, math.inf
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SIXTEEN = pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])
CLOSE = accuracy.Tolerance(2e-6, 1e-5, 1e-5)  # float32 all the way


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles so small that short sequences cross every kind of block boundary."""
    sizes = {"SUPER_ROWS": 16, "TILE_ROWS": 32, "CAUSAL_ROWS": 8, "KEY_BLOCK": 12}
    for module in (cpu_attention, cpu_attention_backward):
        for name, value in sizes.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)


def inputs(s_q, s_kv, heads, heads_kv, dim, value_dim=None, dtype=F32):
    q = torch.randn(s_q, heads, dim).to(dtype)
    k = torch.randn(s_kv, heads_kv, dim).to(dtype)
    return q, k, torch.randn(s_kv, heads_kv, value_dim or dim).to(dtype)


def run(q: Tensor, keys, kv_len: int, value_dim: int, dtype=None, **options):
    """attend on outputs full of NaN: whatever is not written shows."""
    dtype = dtype or q.dtype
    o = torch.full((q.shape[0], q.shape[1], value_dim), NAN, dtype=dtype)
    lse = torch.full((q.shape[1], q.shape[0]), NAN, dtype=F64 if dtype == F64 else F32)
    options.setdefault("scale", q.shape[2] ** -0.5)
    attend(o, lse, q, keys, kv_len=kv_len, **options)
    return o, lse


def expected(q, k, v, is_causal=False, left=-1, right=-1, scale=None, rope=None, **options):
    if rope is not None:
        options |= {"rope_cos": rope.cos, "rope_sin": rope.sin, "rope_layout": rope.layout}
    return oracle.gqa_request(
        q, k, v, is_causal, window_size_left=left, window_size_right=right, sm_scale=scale,
        **options,
    )  # fmt: skip


def check(q, k, v, tolerance=CLOSE, lse_tolerance=None, **options):
    o, lse = run(q, PackedKeys(k, v), k.shape[0], v.shape[2], **options)
    want, want_lse = expected(q, k, v, **options)
    assert_close(o, want, tolerance, "o")
    assert_close(lse, want_lse, lse_tolerance or accuracy.LSE[BF16], "lse")


# ----------------------------------------------------------------------------- forward


@SIXTEEN
@pytest.mark.parametrize(
    "s_q, s_kv, heads, heads_kv, dim, value_dim",
    [
        (1, 1, 1, 1, 1, 1),
        (1, 700, 8, 2, 128, 128),  # decode
        (3, 1500, 4, 4, 64, 64),  # more than one key block
        (260, 260, 6, 2, 64, 64),  # g = 3, a last tile of 4 rows
        (130, 1100, 4, 4, 80, 48),
        (9, 33, 71, 1, 64, 64),
        (5, 40, 7, 1, 576, 512),
        (300, 40, 4, 2, 33, 17),  # leading rows see nothing
    ],
)
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
def test_shapes(dtype, s_q, s_kv, heads, heads_kv, dim, value_dim, is_causal):
    tensors = inputs(s_q, s_kv, heads, heads_kv, dim, value_dim, dtype)
    check(*tensors, accuracy.FORWARD[dtype], is_causal=is_causal)


@pytest.mark.parametrize("s_q, s_kv", [(23, 23), (5, 41), (41, 17), (1, 30), (17, 1)])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("left", [-1, 0, 7, 30])
@pytest.mark.parametrize("right", [-1, 0, 5])
def test_windows(small_tiles, s_q, s_kv, is_causal, left, right):
    q, k, v = inputs(s_q, s_kv, 6, 2, 8)
    check(q, k, v, is_causal=is_causal, left=left, right=right)


@pytest.mark.parametrize("s_q, s_kv", [(29, 29), (3, 50), (40, 18)])
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 2.0},
        {"softcap": 1e5},  # larger than the sigmoid form is exact for
        {"softcap": 3.0, "scale": 1.7, "left": 4},
        {"sinks": True, "left": 4},
        {"sinks": True, "softcap": 2.0, "right": 3},
        {"rope": "neox"},
        {"rope": "interleaved", "left": 9, "softcap": 5.0},
    ],
    ids=str,
)
def test_options(small_tiles, s_q, s_kv, options):
    options = dict(options)
    q, k, v = inputs(s_q, s_kv, 6, 3, 10)
    if "sinks" in options:
        options["sinks"] = torch.randn(6)
    if "rope" in options:
        if s_q > s_kv:
            pytest.skip("a rotated query needs a position")
        options["rope"] = Rope(*oracle.rope_table(6, s_kv, 1e4), options["rope"])
    check(q, k, v, is_causal=True, **options)


@SIXTEEN
def test_large_scores_stay_exact(dtype):
    """A matmul that rounded scores to 16 bits would be off by far more than the tolerance."""
    q, k, v = inputs(200, 200, 4, 2, 64, dtype=dtype)
    check(4 * q, 4 * k, v, accuracy.FORWARD[dtype], is_causal=True)


def test_sinks_of_any_size(small_tiles):
    q, k, v = inputs(20, 13, 4, 2, 8)  # the first 7 rows see no key
    for value in (-INF, -1e30, 0.0, 88.0, 1e30, INF):
        sinks = torch.tensor([value, 0.5, value, value])
        o, _ = run(q, PackedKeys(k, v), 13, 8, is_causal=True, sinks=sinks)
        want, _ = expected(q, k, v, is_causal=True, sinks=sinks)
        assert_close(o, want, CLOSE)
        assert (o[:7] == 0).all()
    check(500 * q, 500 * k, v, is_causal=True, sinks=torch.zeros(4))


def test_nothing_to_see():
    q, k, v = inputs(4, 9, 2, 1, 8)
    for kv_len, options in ((0, {}), (9, {"left": 0, "right": 0}), (0, {"softcap": 1.0})):
        here = {"sinks": torch.tensor([-INF, INF])} | options
        o, lse = run(q, PackedKeys(k[:kv_len], v[:kv_len]), kv_len, 8, **here)
        seen = oracle.visible(4, kv_len, False, **options_of(options)).any(1)
        assert (o[~seen] == 0).all()
        assert (lse[:, ~seen] == -INF).all()
        assert not o.isnan().any()
    o, lse = run(q[:0], PackedKeys(k, v), 9, 8)
    assert o.shape == (0, 2, 8)
    assert lse.shape == (2, 0)


def options_of(options):
    return {name: options[name] for name in ("left", "right") if name in options}


def test_any_strides(small_tiles):
    q, k, v = inputs(19, 19, 4, 2, 8, dtype=F16)
    want, want_lse = run(q, PackedKeys(k, v), 19, 8, is_causal=True)

    def strided(x):
        spread = torch.full((x.shape[2] * 2, x.shape[0], x.shape[1]), NAN, dtype=x.dtype)
        view = spread[::2].permute(1, 2, 0)
        view.copy_(x)
        return view

    o = torch.full((8, 4, 19), NAN, dtype=F16).permute(2, 1, 0)
    lse = torch.full((19, 4), NAN).mT
    keys = PackedKeys(strided(k), strided(v))
    attend(o, lse, strided(q), keys, kv_len=19, scale=8**-0.5, is_causal=True)
    assert_close(o, want.double(), accuracy.FORWARD[F16])
    assert_close(lse, want_lse.double(), CLOSE)
    check(q[:, :1].expand(19, 4, 8).float(), k[:1].expand(19, 2, 8).float(), v.float())


def test_blocks_outside_the_window_are_not_loaded():
    class Spy(PackedKeys):
        def block(self, start, stop):
            asked.append((start, stop))
            return super().block(start, stop)

    asked: list[tuple[int, int]] = []
    q, k, v = inputs(1024, 8192, 1, 1, 8)
    run(q, Spy(k, v), 8192, 8, is_causal=True, left=63)
    assert min(start for start, _ in asked) == 8192 - 1024 - 63
    assert sum(stop - start for start, stop in asked) <= 1024 + 2 * 63


def test_edges_touch_only_the_diagonals():
    bounds = Bounds.of(100, 100, True, 31, -1)
    (above, _), (below, _) = bounds.edges(40, 8, 9, 39)
    assert (above, below) == (slice(32, 39), slice(0, 7))
    assert bounds.edges(40, 8, 16, 25) == []


# ----------------------------------------------------------------------------- sources


def pool_of(rows, page_size, table, pages):
    """A pool of NaN that holds `rows` [S_kv, heads, D] at the table's places."""
    pool = torch.full((pages * page_size, *rows.shape[1:]), NAN, dtype=F32).to(rows.dtype)
    places = oracle.physical_rows(table, rows.shape[0], page_size)
    pool[places] = rows
    return pool.unflatten(0, (pages, page_size))


@pytest.mark.parametrize("page_size", [1, 7, 16, 48])
@pytest.mark.parametrize("order", ["random", "run"])
@SIXTEEN
def test_paged(small_tiles, page_size, order, dtype):
    s_kv = 61
    q, k, v = inputs(18, s_kv, 6, 2, 16, 12, dtype)
    used = -(-s_kv // page_size)
    pages = used + 3
    ids = torch.randperm(pages) if order == "random" else torch.arange(2, 2 + used)
    table = torch.full((used + 2,), -(2**31), dtype=torch.int32)
    table[:used] = ids[:used]
    keys = PagedKeys(*(pool_of(x, page_size, table, pages) for x in (k, v)), table)
    options = {"is_causal": True, "softcap": 4.0, "sinks": torch.randn(6)}
    o, lse = run(q, keys, s_kv, 12, **options)
    want, want_lse = run(q, PackedKeys(k, v), s_kv, 12, **options)
    assert torch.equal(o, want)
    assert torch.equal(lse, want_lse)


def test_paged_pool_and_table_of_any_strides(small_tiles):
    q, k, v = inputs(5, 30, 4, 2, 8)
    table = torch.tensor([[3, 0], [4, 0], [1, 0], [2, 0]], dtype=torch.int32)[:, 0]
    pools = [pool_of(x, 8, table, 6) for x in (k, v)]
    spread = [torch.stack((x, x.new_full(x.shape, NAN)), -1)[..., 0] for x in pools]
    o, _ = run(q, PagedKeys(*spread, table), 30, 8, is_causal=True)
    assert_close(o, expected(q, k, v, is_causal=True)[0], CLOSE)


def test_paged_stays_inside_its_pool():
    q, k, v = inputs(1, 40, 2, 1, 8)
    good = torch.tensor([1, 0, 2], dtype=torch.int32)
    pools = [pool_of(x, 16, good, 4) for x in (k, v)]
    for bad in (4, -1, 2**31 - 1):
        table = good.clone()
        table[1] = bad
        with pytest.raises(IndexError, match=f"column 1 names page {bad} of a pool of 4 pages"):
            run(q, PagedKeys(*pools, table), 40, 8)
    with pytest.raises(IndexError, match="column 2, but the table has 2 columns"):
        run(q, PagedKeys(*pools, good[:2]), 40, 8)
    # Pages that left the window may have been given away: their entries are not read.
    table = torch.tensor([-1, 99, 2], dtype=torch.int32)
    o, _ = run(q, PagedKeys(*pools, table), 40, 8, is_causal=True, left=6)
    assert_close(o, expected(q, k, v, is_causal=True, left=6)[0], CLOSE)
    run(q[:0], PagedKeys(*pools, table), 40, 8)


@pytest.mark.parametrize("fp8", [False, True], ids=["16-bit", "e4m3"])
@pytest.mark.parametrize("old", [0, 5, 12, 40])
@SIXTEEN
def test_appended(small_tiles, fp8, old, dtype):
    n, page_size = 21, 8
    q, k, v = inputs(n, n, 4, 2, 16, dtype=dtype)
    _, k_old, v_old = inputs(1, old, 4, 2, 16, dtype=dtype)
    scales = torch.tensor([0.02]), torch.tensor([0.5])
    stored = (k_old, v_old)
    if fp8:
        stored = tuple(oracle.store_e4m3(x, s) for x, s in zip(stored, scales, strict=True))
    table = torch.randperm(9).to(torch.int32)
    pools = [pool_of(x, page_size, table, 9) for x in stored]
    keys = AppendedKeys(PagedKeys(*pools, table, Scratch()), old, k, v, *scales)
    o, _ = run(q, keys, old + n, 16, is_causal=True)
    read = [x.float() * (s if fp8 else 1) for x, s in zip(stored, scales, strict=True)]
    joined = [torch.cat((a.double(), b.double())) for a, b in zip(read, (k, v), strict=True)]
    tolerance = accuracy.FP8_CACHE if fp8 else accuracy.FORWARD
    assert_close(o, expected(q, *joined, is_causal=True)[0], tolerance[dtype])


@SIXTEEN
def test_latent(dtype):
    heads, heads_kv, n = 12, 2, 1100
    q = torch.randn(1, heads, 48 + 16).to(dtype)
    k, k_pe = torch.randn(n, heads_kv, 48).to(dtype), torch.randn(n, heads_kv, 16).to(dtype)
    o, _ = run(q, LatentKeys(k, k_pe), n, 48)
    want, _ = expected(q, torch.cat((k, k_pe), -1), k)
    assert_close(o, want, accuracy.FORWARD[dtype])


def test_fp8_scales_are_exact(small_tiles):
    q, k, v = (oracle.store_e4m3(x, torch.tensor(0.01)) for x in inputs(9, 26, 6, 2, 8))
    scales = {f"{name}_scale": torch.rand(2) / 50 for name in "qkv"}
    rope = Rope(*oracle.rope_table(8, 26, 1e4))
    o, _ = run(q, PackedKeys(k, v), 26, 8, F32, is_causal=True, rope=rope, **scales)
    lifted = oracle.dequantize(q, k, v, *(s[None] for s in scales.values()), 0)
    assert_close(o, expected(*lifted, is_causal=True, rope=rope)[0], CLOSE)
    one, _ = run(q.float(), PackedKeys(k, v), 26, 8, F32, k_scale=torch.tensor([0.5]))
    assert_close(one, expected(q, k.float() / 2, v.float())[0], CLOSE)


def test_widen_knows_every_e4m3_code():
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).reshape(4, 8, 8).transpose(0, 2)
    for dtype in (F32, BF16, F16):
        wide = widen(torch.empty(8, 8, 4, dtype=dtype), codes)
        assert torch.equal(wide.nan_to_num(7.0), codes.to(dtype).nan_to_num(7.0))
        assert torch.equal(torch.signbit(wide), torch.signbit(codes.to(dtype)))


def test_a_rotation_outside_the_tables_is_refused():
    q, k, v = inputs(3, 6, 2, 1, 4)
    for rows, s_kv in ((5, 6), (6, 2)):
        rope = Rope(*oracle.rope_table(4, rows, 1e4))
        with pytest.raises(IndexError, match="rotary rows outside the tables"):
            run(q, PackedKeys(k[:s_kv], v[:s_kv]), s_kv, 4, rope=rope)


# ---------------------------------------------------------------------------- backward


def gradients(q, k, v, do, sinks=None, lse_dtype=F32, **options):
    """attend, then attend_backward into gradients full of NaN."""
    o, lse = run(q, PackedKeys(k, v), k.shape[0], v.shape[2], sinks=sinks, **options)
    filled = [torch.full_like(x, NAN) for x in (q, k, v)]
    dsinks = None if sinks is None else torch.zeros_like(sinks)
    options.setdefault("scale", q.shape[2] ** -0.5)
    attend_backward(*filled, do, q, k, v, o, lse, sinks=sinks, dsinks=dsinks, **options)
    return filled if sinks is None else [*filled, dsinks]


def formula_gradients(q, k, v, do, sinks=None, **options):
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    if sinks is not None:
        options["sinks"] = sinks.detach().double().requires_grad_()
    o, _ = expected(*leaves, **options)
    wanted = leaves if sinks is None else [*leaves, options["sinks"]]
    if not o.requires_grad:
        return [torch.zeros_like(x) for x in wanted]
    found = torch.autograd.grad(o, wanted, do.double(), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, wanted, strict=True)]


def check_backward(q, k, v, tolerance, do=None, **options):
    do = torch.randn(*q.shape[:2], v.shape[2]).to(q.dtype) if do is None else do
    got = gradients(q, k, v, do, **options)
    want = formula_gradients(q, k, v, do, **options)
    for name, a, b in zip(("dq", "dk", "dv", "dsinks"), got, want, strict=False):
        assert_close(a, b, tolerance, name)


BACKWARD_OPTIONS = [
    {},
    {"is_causal": True},
    {"is_causal": True, "left": 5, "scale": 0.7},
    {"left": 3, "right": 2, "softcap": 2.0},
    {"is_causal": True, "softcap": 500.0},
    {"is_causal": True, "sinks": True},
    {"right": 4, "sinks": True, "softcap": 3.0},
    {"is_causal": True, "rope": "neox"},
    {"left": 9, "rope": "interleaved", "sinks": True},
]


@pytest.mark.parametrize("s_q, s_kv", [(21, 21), (6, 33), (30, 13), (1, 17)])
@pytest.mark.parametrize("options", BACKWARD_OPTIONS, ids=str)
def test_backward_options(small_tiles, s_q, s_kv, options):
    options = dict(options)
    if "sinks" in options:
        options["sinks"] = torch.randn(6, dtype=F64)
    if "rope" in options:
        if s_q > s_kv:
            pytest.skip("a rotated query needs a position")
        tables = oracle.rope_table(6, s_kv, 1e4, torch.float64)
        options["rope"] = Rope(*tables, options["rope"])
    q, k, v = inputs(s_q, s_kv, 6, 3, 8, 5, F64)
    check_backward(q, k, v, accuracy.Tolerance(1e-12, 1e-12, 1e-12), **options)


@SIXTEEN
@pytest.mark.parametrize(
    "s_q, s_kv, heads, heads_kv, dim",
    [(200, 200, 8, 2, 64), (140, 1200, 3, 3, 80), (40, 40, 71, 1, 64), (1, 90, 4, 2, 128)],
)
def test_backward_shapes(dtype, s_q, s_kv, heads, heads_kv, dim):
    tensors = inputs(s_q, s_kv, heads, heads_kv, dim, dtype=dtype)
    check_backward(*tensors, accuracy.BACKWARD[dtype], is_causal=True)


def test_gradcheck(small_tiles):
    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, sinks):
            o, lse = run(q, PackedKeys(k, v), k.shape[0], v.shape[2], sinks=sinks, **options)
            ctx.save_for_backward(q, k, v, o, lse, sinks)
            return o

        @staticmethod
        def backward(ctx, do):
            q, k, v, o, lse, sinks = ctx.saved_tensors
            grads = [torch.full_like(x, NAN) for x in (q, k, v)]
            dsinks = torch.zeros_like(sinks)
            attend_backward(
                *grads, do, q, k, v, o, lse, sinks=sinks, dsinks=dsinks, scale=4**-0.5, **options
            )
            return *grads, dsinks

    options = {"is_causal": True, "left": 6, "softcap": 1.5}
    tensors = [x.requires_grad_() for x in inputs(5, 9, 4, 2, 4, 3, F64)]
    sinks = torch.randn(4, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(Attend.apply, (*tensors, sinks))


def test_backward_takes_any_gradient(small_tiles):
    q, k, v = inputs(15, 15, 4, 2, 8, dtype=F64)
    tight = accuracy.Tolerance(1e-12, 1e-12, 1e-12)
    ones = torch.ones(1, 1, 1, dtype=F64).expand(15, 4, 8)
    check_backward(q, k, v, tight, do=ones, is_causal=True)
    turned = torch.randn(8, 4, 15, dtype=F64).permute(2, 1, 0)
    check_backward(q, k, v, tight, do=turned, is_causal=True)


def test_backward_of_rows_without_keys(small_tiles):
    q, k, v = inputs(12, 5, 4, 2, 8)
    do = torch.randn(12, 4, 8)
    sinks = torch.tensor([-INF, INF, 0.3, -2.0])
    dq, dk, dv, dsinks = gradients(q, k, v, do, sinks=sinks, is_causal=True)
    assert (dq[:7] == 0).all()
    assert (dq[:, 1] == 0).all()
    assert not any(x.isnan().any() for x in (dq, dk, dv))
    assert (dsinks[:2] == 0).all()
    assert (dsinks[2:] != 0).all()
    # An lse of -inf given for a row that sees keys silences the row.
    o, lse = run(q, PackedKeys(k, v), 5, 8)
    lse[:, 3] = -INF
    grads = [torch.full_like(x, NAN) for x in (q, k, v)]
    attend_backward(*grads, do, q, k, v, o, lse, scale=8**-0.5)
    assert (grads[0][3] == 0).all()
    assert not any(x.isnan().any() for x in grads)
    for s_q, s_kv in ((0, 5), (12, 0), (0, 0)):
        empty = gradients(q[:s_q], k[:s_kv], v[:s_kv], do[:s_q])
        assert all((x == 0).all() for x in empty)
