"""The paged KV cache write: bits, skipped slots, refusals, compilers and packages."""

import copy
import io
import pickle

import pytest
import torch

import tileops
from ops_registry.attention.paged_kv_cache_write import PAGED_KV_CACHE_WRITE
from ops_registry.contract import E4M3
from tests import checks, oracle
from tests.cases.paged_kv_cache_write import CASES
from tileops.attention import PagedKVCacheWriteFwdOp

HALF = (torch.float16, torch.bfloat16)
F16, BF16 = HALF
WRITE = PAGED_KV_CACHE_WRITE.op
H_KV, D, PS = 2, 8, 4


def compiled(fn):
    return torch.compile(fn, fullgraph=True, dynamic=True)


@pytest.fixture(params=["eager", "compiled", "lowered"])
def write(request):
    """The operator; whole in a compiled graph; decomposed as an AOTInductor package has it."""
    if request.param == "eager":
        yield lambda *args: WRITE(*args)
        return
    with checks.lowered() if request.param == "lowered" else checks.fresh_dynamo():
        yield compiled(lambda *args: WRITE(*args))


def patterns(dtype):
    """Every 16-bit pattern as [T, H_kv, D] rows: NaN payloads, subnormals, both zeros."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    return every.view(-1, H_KV, D)


def noise(*shape, dtype):
    """Random bits."""
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8).view(dtype)


def pools(pages, dtype, *, page_size=PS, dim=D):
    return [noise(pages, page_size, H_KV, dim, dtype=dtype) for _ in range(2)]


def written(pool, rows, slots):
    """The pool after the write, by definition."""
    pool = pool.clone()
    flat = pool.flatten(0, 1)
    for row, slot in zip(rows, slots.tolist(), strict=True):
        if 0 <= slot < flat.shape[0]:
            flat[slot] = row
    return pool


def assert_bits(actual, expected):
    assert torch.equal(checks.bits(actual), checks.bits(expected))


def nearest_e4m3(x, scale):
    """e4m3(x / scale) by searching the finite codes, ties to the even code."""
    quotient = x.to(torch.float32) / scale
    magnitude = quotient.abs().to(torch.float64)
    codes = torch.arange(127, dtype=torch.uint8)
    values = codes.view(E4M3).to(torch.float64)
    middle = (values[1:] + values[:-1]) / 2
    code = torch.bucketize(magnitude.clamp(max=448.0), middle)  # a tie stays below
    tie = (code < 126) & (magnitude == middle[code.clamp(max=125)])
    code = torch.where(tie & (code % 2 == 1), code + 1, code)
    code = torch.where(quotient.isnan(), 127, code).to(torch.uint8)
    sign = quotient.signbit() & ~quotient.isnan()
    return torch.where(sign, code | 128, code).view(E4M3)


# ------------------------------------------------------------------------------------ bits


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_every_16_bit_pattern_is_copied_bit_for_bit(write, dtype):
    k = patterns(dtype)
    v = k.flip(0)
    k_pages, v_pages = pools(1200, dtype)
    slots = torch.randperm(4800)[: k.shape[0]]
    slots[5::11] = -1
    wanted = written(k_pages, k, slots), written(v_pages, v, slots)
    write(k, v, k_pages, v_pages, slots)
    assert_bits(k_pages, wanted[0])
    assert_bits(v_pages, wanted[1])


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_every_16_bit_pattern_is_stored_as_the_nearest_e4m3(write, dtype):
    k = patterns(dtype)
    for scales in ((1.0, 0.5), (3.0, 1e-3), (0.0123, 448.0), (3e38, 1e-38)):
        k_scale, v_scale = (torch.tensor([s]) for s in scales)
        k_pages, v_pages = pools(1030, E4M3)
        slots = torch.randperm(4120)[: k.shape[0]]
        before = k_pages.clone(), v_pages.clone()
        write(k, k, k_pages, v_pages, slots, k_scale, v_scale)
        for pool, old, scale in ((k_pages, before[0], k_scale), (v_pages, before[1], v_scale)):
            rows = nearest_e4m3(k, scale)
            nan = rows.view(torch.uint8) & 127 == 127
            got = pool.flatten(0, 1).view(torch.uint8)[slots]
            assert ((got & 127 == 127) == nan).all()
            assert torch.equal(got[~nan], rows.view(torch.uint8)[~nan])
            rest = torch.ones(4120, dtype=torch.bool)
            rest[slots] = False
            assert_bits(pool.flatten(0, 1)[rest], old.flatten(0, 1)[rest])


def test_e4m3_saturates_and_keeps_signs():
    inf = torch.inf
    row = [1e4, -1e4, 448, 449, 464, 465, inf, -inf, torch.nan, 2**-10, 2**-9, -0.0]
    k = torch.tensor(row, dtype=F16).view(1, 1, -1)
    k_pages, v_pages = (torch.zeros(1, 1, 1, 12, dtype=E4M3) for _ in range(2))
    one, half = torch.ones(1), torch.tensor([0.5])
    PagedKVCacheWriteFwdOp()(k, k, k_pages, v_pages, torch.zeros(1, dtype=torch.int64), one, half)
    k_row, v_row = (p.flatten().to(torch.float32) for p in (k_pages, v_pages))
    top = [448, -448, 448, 448, 448, 448, 448, -448, torch.nan]
    wanted = torch.tensor([*top, 0.0, 2**-9, -0.0])
    torch.testing.assert_close(k_row, wanted, rtol=0, atol=0, equal_nan=True)
    assert k_row[-1].signbit()
    wanted = torch.tensor([*top, 2**-9, 2**-8, -0.0])
    torch.testing.assert_close(v_row, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dim", [1, 3, 64, 257])
@pytest.mark.parametrize("pool_dtype", [BF16, E4M3], ids=str)
def test_odd_rows_and_page_sizes(dim, pool_dtype):
    """Rows that are not whole machine words, pools at odd offsets."""
    for page_size in (1, 7, 48):
        k, v = (torch.randn(9, 3, dim).to(BF16) for _ in range(2))
        store = torch.zeros(1 + 2 * 5 * page_size * 3 * dim, dtype=pool_dtype)
        shape = (5, page_size, 3, dim)
        k_pages, v_pages = (p.view(shape) for p in store[1:].chunk(2))
        slots = torch.randint(0, 5 * page_size, (9,)).unique()
        slots = torch.cat([slots, torch.full((9 - len(slots),), -1)])[torch.randperm(9)]
        scales = (torch.tensor([0.3]), torch.tensor([2.0])) if pool_dtype == E4M3 else (None,) * 2
        wanted = [p.clone() for p in (k_pages, v_pages)]
        oracle.paged_kv_cache_write(k, v, *wanted, slots, *scales)
        PagedKVCacheWriteFwdOp()(k, v, k_pages, v_pages, slots, *scales)
        assert_bits(k_pages, wanted[0])
        assert_bits(v_pages, wanted[1])


# ----------------------------------------------------------------------------------- slots


def test_slots_that_write_nothing(write):
    """-1, anything below, anything past the pool; nothing valid; row 0 is an ordinary row."""
    k, v = (torch.randn(6, H_KV, D).to(BF16) for _ in range(2))
    for slots in (
        [-1, -1, -1, -1, -1, -1],
        [-2, -8, -(2**62), 12, 13, 2**62],
        [-1, 0, -12, 12, 11, -1],
        [3, 2, 1, 0, -1, 2**40],
        [-1, -1, -1, -1, -1, 0],
    ):
        slots = torch.tensor(slots)
        k_pages, v_pages = pools(3, BF16)
        wanted = written(k_pages, k, slots), written(v_pages, v, slots)
        write(k, v, k_pages, v_pages, slots)
        assert_bits(k_pages, wanted[0])
        assert_bits(v_pages, wanted[1])


def test_empty_calls(write):
    for tokens, pages in ((0, 3), (5, 0), (0, 0)):
        k = torch.randn(tokens, H_KV, D).to(BF16)
        k_pages, v_pages = pools(pages, BF16)
        before = k_pages.clone(), v_pages.clone()
        slots = torch.full((tokens,), 2, dtype=torch.int64)
        write(k, k, k_pages, v_pages, slots)
        assert_bits(k_pages, before[0])
        assert_bits(v_pages, before[1])


def test_no_heads_write_nothing():
    k, pool = torch.randn(3, 0, D).to(BF16), torch.randn(2, PS, 0, D).to(BF16)
    assert PagedKVCacheWriteFwdOp()(k, k, pool, pool.clone(), torch.arange(3)) is None


def test_strided_slots_and_rows():
    slots = torch.tensor([5, 99, -1, 99, 7, 99])[::2]
    k = torch.randn(H_KV, D, 3).to(BF16).permute(2, 0, 1)
    v = torch.randn(3, 2 * H_KV, D).to(BF16)[:, ::2]
    k_pages, v_pages = pools(2, BF16)
    wanted = written(k_pages, k, slots), written(v_pages, v, slots)
    PagedKVCacheWriteFwdOp()(k, v, k_pages, v_pages, slots)
    assert_bits(k_pages, wanted[0])
    assert_bits(v_pages, wanted[1])


def test_repeated_slots_stay_in_their_row():
    k = torch.randn(4, H_KV, D).to(BF16)
    k_pages, v_pages = pools(2, BF16)
    before = k_pages.clone()
    PagedKVCacheWriteFwdOp()(k, k, k_pages, v_pages, torch.tensor([3, 3, 3, -1]))
    rest = [0, 1, 2, 4, 5, 6, 7]
    assert_bits(k_pages.flatten(0, 1)[rest], before.flatten(0, 1)[rest])


# -------------------------------------------------------------------------------- refusals


def legal(**changes):
    k_pages, v_pages = pools(3, BF16)
    args = {
        "k": torch.randn(5, H_KV, D).to(BF16),
        "v": torch.randn(5, H_KV, D).to(BF16),
        "k_pages": k_pages,
        "v_pages": v_pages,
        "slot_mapping": torch.arange(5),
    }
    return args | changes


def quantized(**changes):
    k_pages, v_pages = pools(3, E4M3)
    scales = {"k_scale": torch.ones(1), "v_scale": torch.ones(1)}
    return legal(k_pages=k_pages, v_pages=v_pages, **scales) | changes


ONE = torch.ones(1)
REFUSED = {
    "rank": (lambda: legal(k=torch.randn(5, D).to(BF16)), "k must have shape"),
    "tokens": (lambda: legal(v=torch.randn(4, H_KV, D).to(BF16)), "v must have shape.*T=5"),
    "short slots": (lambda: legal(slot_mapping=torch.arange(4)), "slot_mapping must have.*T=5"),
    "heads": (lambda: legal(k_pages=torch.zeros(3, PS, 3, D, dtype=BF16)), "k_pages.*H_kv=2"),
    "pools": (lambda: legal(v_pages=torch.zeros(2, PS, H_KV, D, dtype=BF16)), "v_pages.*NP=3"),
    "no dim": (
        lambda: legal(
            k=torch.zeros(5, H_KV, 0, dtype=BF16),
            v=torch.zeros(5, H_KV, 0, dtype=BF16),
            k_pages=torch.zeros(3, PS, H_KV, 0, dtype=BF16),
            v_pages=torch.zeros(3, PS, H_KV, 0, dtype=BF16),
        ),
        "D > 0",
    ),
    "no page": (
        lambda: legal(
            k_pages=torch.zeros(3, 0, H_KV, D, dtype=BF16),
            v_pages=torch.zeros(3, 0, H_KV, D, dtype=BF16),
        ),
        "PS > 0",
    ),
    "dtype": (lambda: legal(k=torch.randn(5, H_KV, D)), "k must be float16 or bfloat16.*float32"),
    "v dtype": (lambda: legal(v=torch.randn(5, H_KV, D).to(F16)), "v must have the dtype of k"),
    "pool dtype": (
        lambda: legal(k_pages=pools(3, F16)[0], v_pages=pools(3, F16)[0]),
        "k_pages must be bfloat16 or float8_e4m3fn, got float16",
    ),
    "v pool dtype": (lambda: legal(v_pages=pools(3, E4M3)[0]), "v_pages must have the dtype"),
    "e5m2": (
        lambda: legal(k_pages=torch.zeros(3, PS, H_KV, D, dtype=torch.float8_e5m2)),
        "k_pages must be",
    ),
    "int32 slots": (
        lambda: legal(slot_mapping=torch.arange(5, dtype=torch.int32)),
        "slot_mapping must be int64, got int32",
    ),
    "device": (lambda: legal(v=legal()["v"].to("meta")), "v must be on the device of k, cpu"),
    "strided pool": (
        lambda: legal(k_pages=torch.zeros(3, PS, D, H_KV, dtype=BF16).mT),
        "k_pages is written in place and must be contiguous",
    ),
    "expanded pool": (
        lambda: legal(v_pages=torch.zeros(1, PS, H_KV, D, dtype=BF16).expand(3, -1, -1, -1)),
        "v_pages is written in place and must be contiguous",
    ),
    "half of a last dim": (
        lambda: legal(k_pages=torch.zeros(3, PS, H_KV, 2 * D, dtype=BF16)[..., :D]),
        "k_pages is written in place and must be contiguous",
    ),
    "scale with 16 bits": (lambda: legal(k_scale=ONE, v_scale=ONE), "k_scale must be None"),
    "one scale with 16 bits": (lambda: legal(v_scale=ONE), "v_scale must be None"),
    "no scales": (lambda: quantized(k_scale=None, v_scale=None), "k_scale must be given"),
    "one scale": (lambda: quantized(v_scale=None), "v_scale must be given"),
    "scale shape": (lambda: quantized(k_scale=torch.ones(2)), "k_scale must have shape"),
    "scale rank": (lambda: quantized(k_scale=torch.tensor(1.0)), "k_scale must have shape"),
    "scale dtype": (lambda: quantized(v_scale=ONE.double()), "v_scale must be float32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_written(name):
    build, match = REFUSED[name]
    args = build()
    before = [args[p].clone() for p in ("k_pages", "v_pages")]
    for call in (PagedKVCacheWriteFwdOp(), WRITE, PAGED_KV_CACHE_WRITE.functional):
        with pytest.raises(ValueError, match=match):
            call(**args)
    for pool, bits in zip(("k_pages", "v_pages"), before, strict=True):
        assert_bits(args[pool], bits)


def test_refused_in_a_compiled_graph():
    args = legal(slot_mapping=torch.arange(5, dtype=torch.int32))
    with checks.fresh_dynamo(), pytest.raises(Exception, match="slot_mapping must be int64"):
        torch.compile(lambda **kw: WRITE(**kw), fullgraph=True, backend="eager")(**args)


def test_wrong_types():
    with pytest.raises(TypeError, match=r"slot_mapping must be a torch\.Tensor, got list"):
        PagedKVCacheWriteFwdOp()(**legal(slot_mapping=[0, 1, 2, 3, 4]))
    with pytest.raises(ValueError, match="target must be None or one of"):
        PagedKVCacheWriteFwdOp(target="nobody")


# ------------------------------------------------------------------- autograd and the class


def test_inputs_that_require_grad():
    """Rows may require grad, the write takes none of it into the pool."""
    args = legal()
    args["k"].requires_grad_()
    args["v_pages"].requires_grad_()
    assert PagedKVCacheWriteFwdOp()(**args) is None
    assert not args["k_pages"].requires_grad and args["v_pages"].grad_fn is None
    assert_bits(args["k_pages"].flatten(0, 1)[:5], args["k"].detach())
    with checks.fresh_dynamo():
        again = legal(k=args["k"])
        torch.compile(PagedKVCacheWriteFwdOp(), fullgraph=True, backend="aot_eager")(**again)
    assert_bits(again["k_pages"].flatten(0, 1)[:5], args["k"].detach())


def test_saved_pools_notice_the_write():
    """Autograd sees that a tensor it saved was overwritten."""
    args = legal()
    before = args["k_pages"]._version
    WRITE(**args)
    assert args["k_pages"]._version > before


def test_copies_of_the_op():
    op = PagedKVCacheWriteFwdOp(target=tileops.BUILTIN)
    buffer = io.BytesIO()
    torch.save(op, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for one in (op, copy.deepcopy(op), pickle.loads(pickle.dumps(op)), loaded):
        args = legal()
        one(**args)
        assert_bits(args["k_pages"].flatten(0, 1)[:5], args["k"])
        assert repr(one) == "PagedKVCacheWriteFwdOp(target='builtin')"
    assert repr(PagedKVCacheWriteFwdOp()) == "PagedKVCacheWriteFwdOp()"


def test_vmap_is_refused():
    args = legal()
    batched = [torch.stack([x, x]) for x in args.values()]
    with pytest.raises(RuntimeError):
        torch.vmap(lambda *a: WRITE(*a))(*batched)


# ---------------------------------------------------------------------------- the pure twin


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 6])
def test_functional_twin(case, size):
    call = case.call(size)
    used = checks.clone(call)
    got = PAGED_KV_CACHE_WRITE.functional(*used)
    checks.check_against(case, got, call)
    for before, after in zip(call, used, strict=True):
        if torch.is_tensor(before):
            assert_bits(before, after)
    assert all(x.is_contiguous() for x in got)
    utils = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    schema = [] if call.k_pages.dtype == E4M3 else ["test_schema"]
    torch.library.opcheck(PAGED_KV_CACHE_WRITE.functional, tuple(used), test_utils=utils + schema)


def test_functional_twin_lowered():
    twin = PAGED_KV_CACHE_WRITE.functional
    with checks.lowered():
        step = compiled(lambda *args: twin(*args))
        for size in (6, 9):
            call = CASES[0].call(size)
            checks.check_against(CASES[0], step(*checks.clone(call)), call)


# ------------------------------------------------------------------------ views and packages


class Cache(torch.nn.Module):
    """One buffer [2, NP, PS, H_kv, D] for keys and values, written through its halves."""

    def forward(self, kv, k, v, slots):
        WRITE(k * 2, v, kv[0], kv[1], slots)
        return kv[0].flatten(0, 1)[:1] + 1


def cache_inputs(pages, tokens):
    kv = noise(2, pages, PS, H_KV, D, dtype=BF16)
    k, v = (noise(tokens, H_KV, D, dtype=BF16) for _ in range(2))
    slots = torch.randperm(pages * PS)[:tokens]
    slots[::3] = -1
    return kv, k.nan_to_num(), v, slots


def largest_allocation(fn):
    """Bytes of the largest CPU allocation that `fn` makes."""
    with torch.profiler.profile(profile_memory=True) as profile:
        fn()
    events = profile.profiler.kineto_results.events()
    return max((e.nbytes() for e in events if e.name() == "[memory]"), default=0)


def check_cache(run):
    """Right at several sizes, in place, and without a buffer as large as a pool."""
    for pages, tokens in ((40, 9), (3, 12), (7, 2)):
        kv, k, v, slots = cache_inputs(pages, tokens)
        wanted = torch.stack([written(kv[0], k * 2, slots), written(kv[1], v, slots)])
        run(kv, k, v, slots)
        assert_bits(kv, wanted)
    inputs = cache_inputs(2000, 6)
    pool = inputs[0][0].numel() * 2
    assert largest_allocation(lambda: run(*inputs)) < pool / 16
    assert largest_allocation(lambda: inputs[0][0].clone()) >= pool  # the profiler sees copies


@pytest.mark.parametrize("context", [checks.fresh_dynamo, checks.lowered])
def test_compiled_pool_views_are_written_in_place(context):
    with context():
        check_cache(torch.compile(Cache(), fullgraph=True, dynamic=True))


@pytest.mark.package
def test_packaged_pool_views_are_written_in_place(tmp_path, monkeypatch):
    pages, tokens = torch.export.Dim("pages", max=1 << 20), torch.export.Dim("T", max=1 << 20)
    program = torch.export.export(
        Cache(),
        cache_inputs(5, 7),
        dynamic_shapes=({1: pages}, {0: tokens}, {0: tokens}, {0: tokens}),
    )
    with torch.no_grad():
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "cache.pt2")
        )
    monkeypatch.setenv("AOTI_RUNTIME_CHECK_INPUTS", "1")
    check_cache(torch._inductor.aoti_load_package(package))
