"""The paged prefill that appends to its cache: values, bits, refusals, safety, compilers."""

import contextlib
import copy
import io
import itertools
import math
import pickle

import numpy as np
import pytest
import torch

import tileops
from ops_registry.accuracy import FORWARD, FORWARD_ROPE, FP8_CACHE
from ops_registry.attention.gqa_prefill_paged import GQA_PREFILL_PAGED_FWD
from ops_registry.contract import E4M3
from ops_registry.errors import GradientError
from tests import checks, oracle
from tests.cases import offsets
from tests.cases.gqa_prefill_paged import CASES
from tileops.attention import (
    GQAPagedFwdOp,
    GQAPrefillPagedWithKVCacheFwdOp,
    PagedKVCacheWriteFwdOp,
)
from tileops.kernels.attention.gqa_prefill_paged import reference

Op = GQAPrefillPagedWithKVCacheFwdOp
PREFILL = GQA_PREFILL_PAGED_FWD.op
F16, BF16 = torch.float16, torch.bfloat16
ONE = torch.ones(1)


def through_reference(*args):
    """The kernel of packages, run eagerly."""
    call = GQA_PREFILL_PAGED_FWD.Call(*args)
    out = call.q.new_full(call.q.shape, torch.nan)
    reference.gqa_prefill_paged_fwd(out, call)
    return out


def arguments(
    new,
    old,
    *,
    dtype=BF16,
    heads=4,
    heads_kv=2,
    dim=16,
    page_size=4,
    cache_dtype=None,
    spare_pages=2,
    spare_columns=2,
    padding=0,
):
    """Tensors of a call; whatever must not be read is NaN or a page far outside the pool."""
    counts = [-(-(c + n) // page_size) for c, n in zip(old, new, strict=True)]
    tokens, pages = sum(new) + padding, sum(counts) + spare_pages
    width = max(counts, default=0) + spare_columns
    table = torch.full((len(new), width), 2**30, dtype=torch.int32)
    order = torch.randperm(pages).to(torch.int32)
    for b, count in enumerate(counts):
        table[b, :count], order = order[:count], order[count:]
    pools = []
    for _ in range(2):
        pool = torch.full((pages * page_size, heads_kv, dim), torch.nan, dtype=dtype)
        pool = pool.to(cache_dtype or dtype)
        for b, c in enumerate(old):
            rows = oracle.physical_rows(table[b], c, page_size)
            pool[rows] = torch.randn(c, heads_kv, dim).to(pool.dtype)
        pools.append(pool)
    q, k, v = (torch.randn(tokens, h, dim).to(dtype) for h in (heads, heads_kv, heads_kv))
    for x in (q, k, v):
        x[sum(new) :] = torch.nan
    return {
        "q": q,
        "k_new": k,
        "v_new": v,
        "k_pages": pools[0],
        "v_pages": pools[1],
        "k_scale": torch.tensor([0.75]),
        "v_scale": torch.tensor([1.5]),
        "cu_seqlens_q": offsets(new),
        "cache_seqlens": torch.tensor(old, dtype=torch.int32),
        "block_table": table,
    }


def pools_of(args):
    return args["k_pages"], args["v_pages"]


def assert_bits(actual, expected):
    assert torch.equal(checks.bits(actual), checks.bits(expected))


def assert_pools(args, before):
    for pool, bits in zip(pools_of(args), before, strict=True):
        assert_bits(pool, bits)


def clone(args):
    return {name: x.clone() for name, x in args.items()}


def check(args, run=None, *, page_size=4, rotated_atol=None, **options):
    """o and both pools against the oracle; `run` replaces the operator."""
    op = Op(page_size, 4096, **options)
    used, wanted = clone(args), clone(args)
    o = run(*used.values(), *op.options()) if run else op(**used)
    ref = oracle.gqa_prefill_paged_fwd(
        *wanted.values(),
        page_size,
        **{
            name: getattr(op, name)
            for name in ("is_causal", "sm_scale", "softcap", "fuse_rope", "rope_base")
        },
        max_position=op.max_position,
        rotary_dim=op.rotary_dim,
    )
    dtype, fp8 = args["q"].dtype, args["k_pages"].dtype == E4M3
    row = FP8_CACHE if fp8 else FORWARD_ROPE if op.fuse_rope else FORWARD
    checks.assert_close(o, ref, row[dtype], "o")
    cu = args["cu_seqlens_q"].tolist()
    for a, b in itertools.pairwise(cu):
        checks.assert_close(o[a:b], ref[a:b], row[dtype], "o of one request")
    assert_bits(used["v_pages"], wanted["v_pages"])
    if not op.fuse_rope:
        assert_bits(used["k_pages"], wanted["k_pages"])
    elif not fp8:
        atol = {F16: 4e-3, BF16: 3e-2}[dtype]
        got, ref_k = used["k_pages"].double(), wanted["k_pages"].double()
        torch.testing.assert_close(got, ref_k, atol=atol, rtol=atol, equal_nan=True)
    else:  # the rotated key may round either way: neighbouring codes
        got, ref_k = (checks.bits(x["k_pages"]).to(torch.int16) for x in (used, wanted))
        assert ((got - ref_k).abs() <= 1).all()
        assert (got != ref_k).float().mean() < 0.02
    return o


# ---------------------------------------------------------------------------------- values


@pytest.mark.parametrize("run", [None, through_reference], ids=["cpu", "reference"])
@pytest.mark.parametrize("page_size", [1, 7, 48])
def test_page_sizes_and_groups(run, page_size):
    """Appends that start, end and stay inside a page; decode, empty and pure prefill requests."""
    new, old = [5, 0, 1, 50, 1, 7], [0, 9, 6, 20, 48, 41]
    for heads, heads_kv, dim in ((3, 3, 16), (6, 2, 40), (71, 1, 24)):
        shape = {"heads": heads, "heads_kv": heads_kv, "dim": dim, "page_size": page_size}
        check(arguments(new, old, **shape), run, page_size=page_size)


@pytest.mark.parametrize("run", [None, through_reference], ids=["cpu", "reference"])
@pytest.mark.parametrize("seed", range(12))
def test_random_calls(run, seed):
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    batch = rng.integers(1, 6)
    new, old = rng.integers(0, 40, batch).tolist(), rng.integers(0, 90, batch).tolist()
    heads_kv, page_size = int(rng.choice([1, 2, 3])), int(rng.choice([1, 3, 16, 24]))
    fp8, rope = bool(rng.random() < 0.4), bool(rng.random() < 0.5)
    dim = int(rng.choice([16, 34, 64, 128]))
    args = arguments(
        new,
        old,
        dtype=F16 if seed % 2 else BF16,
        heads=heads_kv * int(rng.choice([1, 3, 4])),
        heads_kv=heads_kv,
        dim=dim,
        page_size=page_size,
        cache_dtype=E4M3 if fp8 else None,
        padding=int(rng.integers(0, 3)),
    )
    options = {"is_causal": bool(rng.random() < 0.7), "cache_dtype": E4M3 if fp8 else None}
    if rng.random() < 0.5:
        options["sm_scale"] = float(rng.uniform(0.05, 0.5))
    if rng.random() < 0.5:
        options["softcap"] = float(rng.uniform(1.0, 20.0))
    if rope:
        options |= {"fuse_rope": True, "max_position": 256, "rope_base": 500.0}
        options["rotary_dim"] = int(rng.choice([2, 8, dim])) if rng.random() < 0.6 else None
    check(args, run, page_size=page_size, **options)


@pytest.mark.parametrize("dim", [1, 33, 80, 257, 576])
def test_head_dims(dim):
    check(arguments([9, 1], [12, 30], dim=dim, page_size=16), page_size=16)
    check(arguments([9, 1], [12, 30], dim=dim, cache_dtype=E4M3), cache_dtype=E4M3)


@pytest.mark.parametrize("old", [15, 16, 31, 32, 63, 64, 127, 128, 1023])
def test_one_token_at_every_boundary(old):
    check(arguments([1], [old], page_size=16, spare_columns=0), page_size=16)


def test_mixed_prefill_and_decode_batch():
    args = arguments([1, 37, 1, 5], [60, 0, 300, 11], heads=48, heads_kv=8, page_size=16)
    check(args, page_size=16)


def test_longer_than_a_block():
    """Several query tiles and key blocks, the pages in any order."""
    args = arguments([300, 2], [1500, 700], heads=2, heads_kv=1, dim=8, page_size=24)
    check(args, page_size=24)
    check(args, through_reference, page_size=24)


def test_large_pages():
    for page_size in (544, 4096):
        check(arguments([3, 700], [page_size - 2, 0], page_size=page_size), page_size=page_size)


def test_one_instance_serves_several_dtypes_and_shapes():
    op = Op(4, 64)
    for dtype, dim in ((F16, 16), (BF16, 24), (F16, 8)):
        args = arguments([3, 2], [5, 0], dtype=dtype, dim=dim)
        assert op(**args).dtype == dtype


def test_write_then_read_gives_the_same():
    """On a 16-bit pool: this operator is the cache write followed by paged attention."""
    for page_size in (1, 5, 16):
        args = arguments([5, 1, 0, 30], [0, 17, 4, 3], dtype=F16, page_size=page_size)
        used = clone(args)
        o = Op(page_size, 64)(**used)
        pools = [p.unflatten(0, (-1, page_size)).clone() for p in pools_of(args)]
        cu, old = args["cu_seqlens_q"], args["cache_seqlens"]
        slots = [
            oracle.physical_rows(
                args["block_table"][b], int(old[b] + cu[b + 1] - cu[b]), page_size
            )[int(old[b]) :]
            for b in range(4)
        ]
        slots = torch.tensor([slot for rows in slots for slot in rows])
        PagedKVCacheWriteFwdOp()(args["k_new"], args["v_new"], *pools, slots)
        total = old + cu[1:] - cu[:-1]
        read = GQAPagedFwdOp()(args["q"], *pools, args["block_table"], total, cu)
        checks.assert_close(o, read.double(), FORWARD[F16])
        for pool, written in zip(pools_of(used), pools, strict=True):
            assert_bits(pool, written.flatten(0, 1))


def test_new_tokens_are_not_read_back_quantized():
    """A fresh request over an e4m3 pool attends like one over a 16-bit pool, bit for bit."""
    args = arguments([40], [0], cache_dtype=E4M3)
    plain = args | {
        name: torch.zeros(args[name].shape, dtype=BF16) for name in ("k_pages", "v_pages")
    }
    for run in (lambda *a: PREFILL(*a), through_reference):
        quantized = run(*clone(args).values(), *Op(4, 64, cache_dtype=E4M3).options())
        assert_bits(quantized, run(*clone(plain).values(), *Op(4, 64).options()))


def test_scales_are_ignored_for_16_bit_pools():
    args = arguments([4, 3], [2, 9])
    o = Op(4, 64, validate_inputs=True)(**clone(args))
    odd = args | {"k_scale": torch.tensor([torch.nan]), "v_scale": torch.tensor([-torch.inf])}
    assert_bits(Op(4, 64, validate_inputs=True)(**clone(odd)), o)


def test_stored_bits_keep_nan_payloads_and_zeros():
    """V is copied bit for bit whatever it holds, and so is K without RoPE."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(BF16)
    new = every.view(-1, 2, 64)
    args = arguments([512], [3], dim=64, page_size=16) | {"k_new": new, "v_new": new.flip(0)}
    Op(16, 512)(**args)
    rows = oracle.physical_rows(args["block_table"][0], 515, 16)[3:]
    assert_bits(args["k_pages"][rows], new)
    assert_bits(args["v_pages"][rows], new.flip(0))


def test_angles_at_far_positions():
    """At position 131072 float32 angles are off by 3.5e-2; float64 ones are not."""
    old = 131_000
    args = arguments([64], [0], dtype=F16, heads=1, heads_kv=1, dim=64, page_size=64)
    args["cache_seqlens"] = torch.tensor([old], dtype=torch.int32)
    table = torch.full((1, 2100), -1, dtype=torch.int32)
    table[0, : old // 64] = 2
    table[0, old // 64 : old // 64 + 2] = torch.tensor([3, 0])
    args["block_table"] = table
    args["k_pages"], args["v_pages"] = (torch.zeros(4 * 64, 1, 64, dtype=F16) for _ in range(2))
    Op(64, 64, fuse_rope=True, rope_base=1e6, max_position=1 << 18)(**args)
    rows = [int(table[0, x // 64]) * 64 + x % 64 for x in range(old, old + 64)]
    wanted = torch.empty(64, 64, dtype=torch.float64)
    for i in range(64):
        for f in range(32):
            angle = (old + i) * 1e6 ** (-2 * f / 64)
            a, b = (float(args["k_new"][i, 0, c]) for c in (f, f + 32))
            wanted[i, f] = a * math.cos(angle) - b * math.sin(angle)
            wanted[i, f + 32] = b * math.cos(angle) + a * math.sin(angle)
    got = args["k_pages"][rows, 0].double()
    torch.testing.assert_close(got, wanted, atol=1e-3, rtol=1e-3)


def test_strided_inputs():
    args = arguments([6, 3], [5, 0])
    wanted = clone(args)
    o = Op(4, 64)(**wanted)
    strided = {}
    for name, x in args.items():
        strided[name] = x if name in ("k_pages", "v_pages") else checks.relayout(x, "sliced")
    for name in ("q", "k_new", "v_new", "block_table"):
        strided[name] = checks.relayout(args[name], "transposed")
    assert_bits(Op(4, 64)(**strided), o)
    assert_pools(strided, pools_of(wanted))


# ------------------------------------------------------------------------- empties, padding


@pytest.mark.parametrize("run", [lambda *a: PREFILL(*a), through_reference])
def test_empty_calls(run):
    options = Op(4, 64, fuse_rope=True, max_position=64).options()
    for new, old in (([], []), ([0, 0], [5, 0]), ([0], [0])):
        args = arguments(new, old)
        before = [p.clone() for p in pools_of(args)]
        assert run(*args.values(), *options).shape == (0, 4, 16)
        assert_pools(args, before)


@pytest.mark.parametrize("run", [lambda *a: PREFILL(*a), through_reference])
def test_rows_of_no_request_are_zero_and_stored_nowhere(run):
    args = arguments([3, 2], [4, 0], padding=3)
    padded, exact = clone(args), arguments([], [])
    exact = clone(args) | {n: args[n][:5] for n in ("q", "k_new", "v_new")}
    o = run(*padded.values(), *Op(4, 64).options())
    assert (o[5:] == 0).all() and not o.isnan().any()
    wanted = run(*exact.values(), *Op(4, 64).options())
    checks.assert_close(o[:5], wanted.double(), FORWARD[BF16])
    assert_pools(padded, pools_of(exact))
    nobody = clone(args) | {
        "cu_seqlens_q": offsets([]),
        "cache_seqlens": torch.zeros(0, dtype=torch.int32),
        "block_table": torch.zeros(0, 2, dtype=torch.int32),
    }
    assert (run(*nobody.values(), *Op(4, 64).options()) == 0).all()
    assert_pools(nobody, pools_of(args))


def test_stale_rows_and_tails_change_nothing():
    """The same call over zeros, NaN and infinity in every row that holds no token."""
    args = arguments([5, 1], [6, 13], page_size=16, cache_dtype=E4M3)
    options = Op(16, 64, cache_dtype=E4M3).options()
    for run in (lambda *a: PREFILL(*a), through_reference):
        poisoned = clone(args)
        clean = clone(args)
        for pool in pools_of(clean):
            pool.copy_(pool.float().nan_to_num(0.0).to(pool.dtype))
        o = run(*poisoned.values(), *options)
        assert_bits(run(*clean.values(), *options), o)
        assert not o.isnan().any()


# ---------------------------------------------------------------------------- memory safety


def guarded(args):
    """The call on pools that lie inside larger buffers; returns a check of the surroundings."""
    frames = []
    for name in ("k_pages", "v_pages"):
        pool = args[name]
        frame = torch.full((pool.shape[0] + 64, *pool.shape[1:]), 7.0).to(pool.dtype)
        frame[32:-32] = pool
        args[name] = frame[32:-32]
        frames.append(frame)

    def intact():
        for frame in frames:
            assert (frame[:32].float() == 7).all() and (frame[-32:].float() == 7).all()

    return intact


@pytest.mark.parametrize("run", [lambda *a: PREFILL(*a), through_reference])
@pytest.mark.parametrize("page", [-1, -(2**31), 9, 2**31 - 1])
@pytest.mark.parametrize("cache_dtype", [None, E4M3], ids=str)
def test_bad_page_ids(run, page, cache_dtype):
    """Read: raises and leaves the pools alone. Written: skipped, page 0 stays as it was."""
    options = Op(4, 64, cache_dtype=cache_dtype).options()
    args = arguments([3, 2], [5, 4], cache_dtype=cache_dtype, spare_pages=5)  # 9 pages
    args["block_table"] = torch.tensor([[1, 2, -1], [3, 4, -1]], dtype=torch.int32)
    for pool in pools_of(args):
        pool.copy_(torch.randn(pool.shape).to(pool.dtype))
    intact = guarded(args)
    before = [p.clone() for p in pools_of(args)]
    args["block_table"][1, 0] = page
    with pytest.raises((IndexError, RuntimeError)):
        run(*args.values(), *options)
    assert_pools(args, before)
    args["block_table"][1] = torch.tensor([3, page, page])  # only the new tokens' page
    good = clone(args)
    good["block_table"][1, 1] = 8
    o, wanted = run(*args.values(), *options), run(*good.values(), *options)
    assert_bits(o, wanted)
    for pool, expected, old in zip(pools_of(args), pools_of(good), before, strict=True):
        expected[32:36] = old[32:36]
        assert_bits(pool, expected)
    intact()


@pytest.mark.parametrize("run", [lambda *a: PREFILL(*a), through_reference])
def test_tokens_past_the_table_are_dropped(run):
    """30 + 4 tokens in two pages of 16, and one request that is full already."""
    for new, old in ((4, 30), (1, 32), (40, 0)):
        args = arguments([new], [0], page_size=16, spare_pages=3, spare_columns=0)
        args["cache_seqlens"] = torch.tensor([old], dtype=torch.int32)
        args["block_table"] = torch.tensor([[3, 1]], dtype=torch.int32)
        args["k_pages"], args["v_pages"] = (torch.randn(64, 2, 16).to(BF16) for _ in range(2))
        intact = guarded(args)
        expected = [p.clone() for p in pools_of(args)]
        rows = oracle.physical_rows(args["block_table"][0], 32, 16)[old:]
        for pool, fresh in zip(expected, ("k_new", "v_new"), strict=True):
            pool[rows] = args[fresh][: len(rows)]
        run(*args.values(), *Op(16, 64).options())
        assert_pools(args, expected)
        intact()


@pytest.mark.parametrize("run", [lambda *a: PREFILL(*a), through_reference])
@pytest.mark.parametrize(
    "changes",
    [
        {"cu_seqlens_q": [0, 9, 5]},
        {"cu_seqlens_q": [0, 3, 50]},
        {"cu_seqlens_q": [-4, 2, 5]},
        {"cu_seqlens_q": [5, 0, 5]},
        {"cu_seqlens_q": [2**31 - 1, -(2**31), 5]},
        {"cache_seqlens": [-3, 2]},
        {"cache_seqlens": [2**31 - 1, 2]},
        {"cache_seqlens": [-(2**31), 2]},
    ],
)
def test_malformed_metadata_stays_inside_the_pools(run, changes):
    args = arguments([3, 2], [5, 4])
    for name, values in changes.items():
        args[name] = torch.tensor(values, dtype=torch.int32)
    intact = guarded(args)
    with contextlib.suppress(IndexError, RuntimeError, ValueError):
        run(*args.values(), *Op(4, 64, fuse_rope=True, max_position=64).options())
    intact()


def test_empty_pool_and_table():
    args = arguments([3], [0])
    for name in ("k_pages", "v_pages"):
        args[name] = args[name][:0]
    o = Op(4, 64)(**args)
    assert not o.isnan().any() and (o != 0).any()
    args["block_table"] = args["block_table"][:, :0]
    assert_bits(Op(4, 64)(**args), o)


# -------------------------------------------------------------------------------- refusals


def legal(**changes):
    return arguments([3, 2], [4, 0]) | changes


def rows(n, heads=2, dim=16, dtype=BF16):
    return torch.zeros(n, heads, dim, dtype=dtype)


REFUSED = {
    "rank": (lambda: legal(q=rows(5)[0]), {}, "q must have shape"),
    "tokens": (lambda: legal(k_new=rows(4)), {}, "k_new must have shape.*T_q=5"),
    "v like k": (lambda: legal(v_new=rows(5, dim=8)), {}, "v_new must have shape"),
    "v heads": (lambda: legal(v_new=rows(5, heads=1)), {}, "v_new must have shape"),
    "pool heads": (lambda: legal(k_pages=rows(16, heads=1)), {}, "k_pages must have shape"),
    "pools": (lambda: legal(v_pages=rows(12)), {}, "v_pages must have shape"),
    "whole pages": (
        lambda: legal(k_pages=rows(18), v_pages=rows(18)),
        {},
        "k_pages must have a multiple of page_size=4 rows, got 18",
    ),
    "groups": (lambda: legal(q=rows(5, heads=3)), {}, "divides the 3 query heads, got 2"),
    "no kv heads": (
        lambda: legal(
            **{n: rows(5, heads=0) for n in ("k_new", "v_new")},
            **{n: rows(16, heads=0) for n in ("k_pages", "v_pages")},
        ),
        {},
        "divides the 4 query heads, got 0",
    ),
    "no dim": (
        lambda: legal(
            q=rows(5, 4, 0),
            **{n: rows(5, 2, 0) for n in ("k_new", "v_new")},
            **{n: rows(16, 2, 0) for n in ("k_pages", "v_pages")},
        ),
        {},
        "D > 0",
    ),
    "dtype": (lambda: legal(q=rows(5, 4, dtype=torch.float32)), {}, "q must be float16 or bf"),
    "k dtype": (lambda: legal(k_new=rows(5, dtype=F16)), {}, "k_new must have the dtype of q"),
    "pool dtype": (
        lambda: legal(k_pages=rows(16, dtype=F16), v_pages=rows(16, dtype=F16)),
        {},
        "k_pages must have the cache dtype bfloat16, got float16",
    ),
    "unannounced e4m3": (
        lambda: arguments([3], [0], cache_dtype=E4M3),
        {},
        "k_pages must have the cache dtype bfloat16, got float8_e4m3fn",
    ),
    "announced e4m3": (
        lambda: legal(),
        {"cache_dtype": E4M3},
        "k_pages must have the cache dtype float8_e4m3fn, got bfloat16",
    ),
    "mixed pools": (
        lambda: legal(v_pages=legal()["v_pages"].to(E4M3)),
        {},
        "v_pages must have the dtype of k_pages",
    ),
    "other 16 bits": (
        lambda: legal(),
        {"cache_dtype": F16},
        "cache_dtype must be None, the dtype of q, bfloat16, or float8_e4m3fn, got float16",
    ),
    "scale missing": (lambda: legal(k_scale=None), {}, "k_scale must be a"),
    "scale shape": (lambda: legal(k_scale=torch.ones(2)), {}, "k_scale must have shape"),
    "scale dtype": (lambda: legal(v_scale=ONE.half()), {}, "v_scale must be float32"),
    "offsets length": (
        lambda: legal(cu_seqlens_q=offsets([5])),
        {},
        "cache_seqlens must have shape.*B=1",
    ),
    "no offsets": (
        lambda: legal(cu_seqlens_q=offsets([])[:0]),
        {},
        "cu_seqlens_q must have shape",
    ),
    "offsets dtype": (
        lambda: legal(cu_seqlens_q=offsets([3, 2]).long()),
        {},
        "cu_seqlens_q must be int32, got int64",
    ),
    "lengths dtype": (
        lambda: legal(cache_seqlens=torch.zeros(2)),
        {},
        "cache_seqlens must be int32",
    ),
    "table dtype": (
        lambda: legal(block_table=torch.zeros(2, 3, dtype=torch.int64)),
        {},
        "block_table must be int32, got int64",
    ),
    "table rows": (
        lambda: legal(block_table=torch.zeros(3, 3, dtype=torch.int32)),
        {},
        "block_table must have shape.*B=2",
    ),
    "device": (lambda: legal(v_scale=ONE.to("meta")), {}, "v_scale must be on the device of q"),
    "strided pool": (
        lambda: legal(k_pages=torch.zeros(16, 16, 2, dtype=BF16).mT),
        {},
        "k_pages is written in place and must be contiguous",
    ),
    "expanded pool": (
        lambda: legal(v_pages=rows(1).expand(legal()["k_pages"].shape)),
        {},
        "v_pages is written in place and must be contiguous",
    ),
    "rotary_dim": (
        lambda: legal(),
        {"fuse_rope": True, "max_position": 64, "rotary_dim": 18},
        "rotary_dim must be at most the head dim 16, got 18",
    ),
    "odd rope": (
        lambda: arguments([3], [0], dim=15),
        {"fuse_rope": True, "max_position": 64},
        "rotary_dim must be given for an odd head dim, got D=15",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_written(name):
    build, options, match = REFUSED[name]
    args = build()
    op = Op(4, 64, **options)
    before = [p.clone() for p in pools_of(args)]
    error = TypeError if args["k_scale"] is None else ValueError
    with pytest.raises(error, match=match):
        op(**args)
    if error is ValueError:
        for raw in (PREFILL, GQA_PREFILL_PAGED_FWD.functional):
            with pytest.raises(ValueError, match=match):
                raw(*args.values(), *op.options())
    assert_pools(args, before)


@pytest.mark.parametrize(
    "args, options, error, match",
    [
        ((0, 1), {}, ValueError, "page_size must be a positive integer, got 0"),
        ((-4, 1), {}, ValueError, "page_size must be a positive integer"),
        ((4, 0), {}, ValueError, "max_seqlen_q must be a positive integer, got 0"),
        ((4, 1), {"sm_scale": 0.0}, ValueError, "sm_scale must be finite and > 0"),
        ((4, 1), {"sm_scale": float("nan")}, ValueError, "sm_scale must be finite"),
        ((4, 1), {"softcap": -1.0}, ValueError, "softcap must be"),
        ((4, 1), {"softcap": float("inf")}, ValueError, "softcap must be"),
        ((4, 1), {"cache_dtype": torch.float32}, ValueError, "cache_dtype must be None or"),
        ((4, 1), {"cache_dtype": "fp8"}, ValueError, "cache_dtype must be None or"),
        ((4, 1), {"fuse_rope": True}, ValueError, "max_position must be given"),
        ((4, 1), {"max_position": 0}, ValueError, "max_position must be a positive"),
        ((4, 1), {"rotary_dim": 8}, ValueError, "rotary_dim must be None"),
        ((4, 1), {"rope_base": 0.0}, ValueError, "rope_base must be finite and > 0"),
        ((4, 1), {"rope_base": float("inf")}, ValueError, "rope_base must be finite"),
        ((4.0, 1), {}, TypeError, "page_size must be an integer"),
        ((True, 1), {}, TypeError, "page_size must be an integer, got a bool"),
        ((4, "1"), {}, TypeError, "max_seqlen_q must be an integer"),
        ((4, 1), {"is_causal": 1}, TypeError, "is_causal must be a bool"),
        ((4, 1), {"validate_inputs": None}, TypeError, "validate_inputs must be a bool"),
        ((4, 1), {"rope_base": "10"}, TypeError, "rope_base must be a number"),
        ((4, 1), {"target": "nobody"}, ValueError, "target must be None or one of"),
    ],
)
def test_parameters(args, options, error, match):
    with pytest.raises(error, match=match):
        Op(*args, **options)


@pytest.mark.parametrize("rotary_dim", [0, -2, 7])
def test_rotary_dim(rotary_dim):
    with pytest.raises(ValueError, match="rotary_dim must be positive and even"):
        Op(4, 1, fuse_rope=True, max_position=9, rotary_dim=rotary_dim)


# ------------------------------------------------------------------------- validate_inputs


FP8 = {"cache_dtype": E4M3}
ROPE = {"fuse_rope": True, "max_position": 8}
CONTENTS = {
    "k_scale": (FP8, {"k_scale": [0.0]}, r"k_scale must be finite and > 0 \(index 0, got 0.0\)"),
    "v_scale": (FP8, {"v_scale": [-1.0]}, r"v_scale must be finite and > 0"),
    "nan scale": (FP8, {"v_scale": [float("nan")]}, "v_scale must be finite and > 0"),
    "inf scale": (FP8, {"k_scale": [float("inf")]}, "k_scale must be finite and > 0"),
    "max_position": (
        ROPE,
        {"cache_seqlens": [4, 7]},
        r"cache_seqlens plus the new tokens must be at most max_position=8 \(index 1, got 9\)",
    ),
    "start": ({}, {"cu_seqlens_q": [1, 3, 5]}, r"cu_seqlens_q must start at 0 \(index 0, got 1\)"),
    "order": ({}, {"cu_seqlens_q": [0, 6, 5]}, r"cu_seqlens_q must not decrease \(index 2"),
    "end": ({}, {"cu_seqlens_q": [0, 3, 4]}, r"cu_seqlens_q must end at .* \(index 2, got 4\)"),
    "longest": ({}, {"cu_seqlens_q": [0, 0, 5]}, r"max_seqlen_q=4 new tokens \(index 1, got 5\)"),
    "negative": ({}, {"cache_seqlens": [4, -1]}, r"cache_seqlens must be >= 0 \(index 1, got -1"),
    "capacity": ({}, {"cache_seqlens": [14, 0]}, r"fit the pages of block_table \(index 0"),
    "page": (
        {},
        {"block_table": [[0, 1, 9, 9], [16, 9, 9, 9]]},
        r"block_table must name pages of the pool where used \(index \[1, 0\], got 16\)",
    ),
    "negative page": (
        {},
        {"block_table": [[0, -1, 9, 9], [2, 9, 9, 9]]},
        r"index \[0, 1\], got -1",
    ),
}


def validated(name):
    """The op, and arguments that break the named rule only."""
    options, changes, match = CONTENTS[name]
    args = arguments([3, 2], [4, 0], cache_dtype=options.get("cache_dtype"))
    for key, values in changes.items():
        args[key] = torch.tensor(values, dtype=args[key].dtype)
    return Op(4, 4, validate_inputs=True, **options), args, match


@pytest.mark.parametrize("name", CONTENTS)
def test_contents_are_validated_eagerly(name):
    op, args, match = validated(name)
    before = [p.clone() for p in pools_of(args)]
    with pytest.raises(ValueError, match=match):
        op(**args)
    with pytest.raises(ValueError, match=match):
        GQA_PREFILL_PAGED_FWD.functional(*args.values(), *op.options())
    assert_pools(args, before)


def test_valid_contents_pass():
    """Unused table entries, requests without tokens and full pages are all right."""
    args = arguments([4, 0, 2], [4, 3, 0], spare_columns=0)
    args["block_table"][1] = -7  # nothing of that request is read
    Op(4, 4, validate_inputs=True, fuse_rope=True, max_position=8)(**args)
    Op(4, 4, validate_inputs=True)(**arguments([], []))


@pytest.mark.parametrize(
    "context, names",
    [(checks.fresh_dynamo, ("v_scale", "page")), (checks.lowered, ("max_position",))],
)
def test_contents_are_validated_when_compiled(context, names):
    """The same sentences as run-time errors, and nothing is written."""
    for name in names:
        op, args, match = validated(name)
        before = [p.clone() for p in pools_of(args)]
        opening = match.split(r" \(")[0]
        with context():
            step = torch.compile(lambda *a, op=op: PREFILL(*a, *op.options()), fullgraph=True)
            with pytest.raises(RuntimeError, match=opening):
                step(*args.values())
            assert_pools(args, before)


# ------------------------------------------------------------------- autograd and the class


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_gradient_is_refused_when_it_is_executed(backend):
    args = arguments([3, 2], [4, 0])
    args["q"].requires_grad_()
    args["k_new"].requires_grad_()
    with checks.fresh_dynamo():
        op = Op(4, 64)
        o = (torch.compile(op, backend=backend, fullgraph=True) if backend else op)(**args)
        assert o.requires_grad and not any(p.requires_grad for p in pools_of(args))
        with pytest.raises(GradientError, match="gqa_prefill_paged_fwd has no gradient"):
            o.sum().backward()


def test_copies_of_the_op():
    op = Op(
        np.int64(4),
        np.int32(64),
        cache_dtype=E4M3,
        sm_scale=np.float32(0.5),
        fuse_rope=True,
        max_position=np.int64(99),
        target=tileops.BUILTIN,
    )
    shown = (
        "GQAPrefillPagedWithKVCacheFwdOp(page_size=4, max_seqlen_q=64, is_causal=True, "
        "cache_dtype=torch.float8_e4m3fn, sm_scale=0.5, softcap=None, fuse_rope=True, "
        "rope_base=10000.0, max_position=99, rotary_dim=None, validate_inputs=False, "
        "target='builtin')"
    )
    buffer = io.BytesIO()
    torch.save(op, buffer)
    buffer.seek(0)
    args = arguments([3, 2], [4, 0], cache_dtype=E4M3)
    o = op(**clone(args))
    loaded = torch.load(buffer, weights_only=False)
    for one in (copy.deepcopy(op), pickle.loads(pickle.dumps(op)), loaded):
        assert repr(one) == shown
        assert_bits(one(**clone(args)), o)


# ---------------------------------------------------------------------------- the pure twin


@pytest.mark.parametrize("case", CASES, ids=str)
def test_functional_twin(case):
    twin = GQA_PREFILL_PAGED_FWD.functional
    for size in (0, 6):
        call = case.call(size)
        used = checks.clone(call)
        got = twin(*used)
        checks.check_against(case, got, call)
        for before, after in zip(call, used, strict=True):
            if torch.is_tensor(before):
                assert_bits(before, after)
    utils = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    schema = [] if call.k_pages.dtype == E4M3 else ["test_schema"]
    torch.library.opcheck(twin, tuple(used), test_utils=utils + schema)


@pytest.mark.package
def test_functional_twin_lowered():
    twin = GQA_PREFILL_PAGED_FWD.functional
    case = CASES[1]  # validated
    with checks.lowered():
        step = torch.compile(lambda *args: twin(*args), fullgraph=True, dynamic=True)
        call = case.call(6)
        checks.check_against(case, step(*checks.clone(call)), call)
        broken = checks.clone(call)
        broken.cache_seqlens[0] = -1
        with pytest.raises(RuntimeError, match="cache_seqlens must be >= 0"):
            step(*broken)


def test_functional_twin_validates_when_compiled():
    op, args, match = validated("page")
    with checks.fresh_dynamo():
        twin = GQA_PREFILL_PAGED_FWD.functional
        step = torch.compile(lambda *a: twin(*a, *op.options()), fullgraph=True)
        with pytest.raises(RuntimeError, match=match.split(r" \(")[0]):
            step(*args.values())


# ------------------------------------------------------------------------ views and packages


class Cache(torch.nn.Module):
    """One buffer [2, N, H_kv, D] for keys and values, given by its halves."""

    def forward(self, q, k, v, kv, scale, cu, old, table):
        op = Op(4, 64, validate_inputs=True)
        args = (q * 2, k, v, kv[0], kv[1], scale, scale, cu, old, table)
        return PREFILL(*args, *op.options()) + 1


def cache_call(new, old, spare_pages=2):
    args = arguments(new, old, spare_pages=spare_pages)
    kv = torch.stack(pools_of(args))
    rest = [args[n] for n in ("cu_seqlens_q", "cache_seqlens", "block_table")]
    return args, (args["q"], args["k_new"], args["v_new"], kv, ONE, *rest)


def check_cache(run):
    """Right in place at several sizes, refused in place, and no buffer as large as a pool."""
    for new, old in (([5, 2], [9, 0]), ([1, 30, 2], [8, 0, 50]), ([7, 3], [0, 2])):
        args, inputs = cache_call(new, old)
        wanted = clone(args)
        ref = Op(4, 64)(**wanted | {"q": wanted["q"] * 2})
        o = run(*inputs)
        checks.assert_close(o, ref.double() + 1, FORWARD[BF16])
        for half, pool in zip(inputs[3], pools_of(wanted), strict=True):
            assert_bits(half, pool)
    args, inputs = cache_call([5, 2], [9, 0])
    inputs[6][1] = 1000
    with pytest.raises(RuntimeError, match="must fit the pages of block_table"):
        run(*inputs)
    assert_bits(inputs[3], torch.stack(pools_of(args)))
    _, inputs = cache_call([5, 2], [9, 0], spare_pages=20_000)
    pool = inputs[3][0].numel() * 2
    with torch.profiler.profile(profile_memory=True) as profile:
        run(*inputs)
    events = profile.profiler.kineto_results.events()
    assert max(e.nbytes() for e in events if e.name() == "[memory]") < pool / 2


def test_compiled_pool_views_are_written_in_place():
    with checks.fresh_dynamo():
        check_cache(torch.compile(Cache(), fullgraph=True, dynamic=True))


@pytest.mark.package
def test_packaged_pool_views_are_written_in_place(tmp_path, monkeypatch):
    tokens, batch, width, pages = (
        torch.export.Dim(name, max=1 << 20) for name in ("T_q", "B", "W", "pages")
    )
    row = {0: tokens}
    program = torch.export.export(
        Cache(),
        cache_call([5, 2], [9, 0])[1],
        dynamic_shapes=(
            row,
            row,
            row,
            {1: 4 * pages},
            None,
            {0: batch + 1},
            {0: batch},
            {0: batch, 1: width},
        ),
    )
    with torch.no_grad():
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "cache.pt2")
        )
    monkeypatch.setenv("AOTI_RUNTIME_CHECK_INPUTS", "1")
    check_cache(torch._inductor.aoti_load_package(package))
