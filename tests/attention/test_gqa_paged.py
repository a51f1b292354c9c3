"""Paged attention beyond the shared harness: random calls, poison, pages, laws, refusals."""

import copy
import io
import pickle
import random

import numpy
import pytest
import torch

from meta_kernels.attention.gqa_paged import infer_gqa_paged_fwd
from ops_registry.accuracy import FORWARD, FORWARD_ROPE, FP8_CACHE
from ops_registry.contract import BUILTIN_KERNELS, E4M3
from ops_registry.errors import GradientError
from tests import checks, oracle
from tests.cases import offsets
from tileops.attention import GQADenseFwdOp, GQAPagedFwdOp, GQAVarlenFwdOp, PagedKVCacheWriteFwdOp

BF16, F16 = torch.bfloat16, torch.float16
INF, NAN = float("inf"), float("nan")


def inputs(
    q_lens=(3, 1, 0),
    lens=(9, 4, 6),
    h=4,
    h_kv=2,
    d=16,
    ps=4,
    dtype=F16,
    pool_dtype=None,
    tail=0,
    seed=0,
):
    """{argument: tensor} with shuffled pages; tail: table columns past the longest request."""
    draw = torch.Generator().manual_seed(seed)
    counts = [-(-n // ps) for n in lens]
    pages = sum(counts) + 2
    order = torch.randperm(pages, generator=draw).to(torch.int32)
    table = torch.full((len(lens), max(counts, default=0) + tail), -7, dtype=torch.int32)
    for b, count in enumerate(counts):
        table[b, :count], order = order[:count], order[count:]

    def values(*shape, dtype):
        return torch.randn(*shape, generator=draw).to(dtype)

    return {
        "q": values(sum(q_lens), h, d, dtype=dtype),
        "k_pages": values(pages, ps, h_kv, d, dtype=pool_dtype or dtype),
        "v_pages": values(pages, ps, h_kv, d, dtype=pool_dtype or dtype),
        "page_table": table,
        "cache_seqlens": torch.tensor(lens, dtype=torch.int32),
        "cu_seqlens_q": offsets(list(q_lens)),
    }


def scaled(args, per_head, seed=0):
    """The scales of an e4m3 pool, and of q where it is e4m3."""
    draw = torch.Generator().manual_seed(seed)
    own = (args["cache_seqlens"].shape[0], args["k_pages"].shape[2])
    names = ["k_scale", "v_scale"] + (["q_scale"] if args["q"].dtype == E4M3 else [])
    for name in names:
        shape = own if per_head or name == "q_scale" else (1,)
        args[name] = torch.rand(*shape, generator=draw) + 0.3
    return args


def expected(args, **options):
    options = {k: v for k, v in options.items() if k not in ("pos_encoding_mode", "out_dtype")}
    options.pop("rotary_dim", None)
    return oracle.gqa_paged_fwd(**args, **options)


def close(o, ref, row=FORWARD, what="o"):
    checks.assert_close(o, ref, row[o.dtype], what)


def poisoned(args, bad=NAN):
    """The call with `bad` in every pool row that no request's length covers."""
    args = dict(args)
    ps = args["k_pages"].shape[1]
    used = torch.zeros(args["k_pages"].shape[:2].numel(), dtype=torch.bool)
    for b, n in enumerate(args["cache_seqlens"].tolist()):
        used[oracle.physical_rows(args["page_table"][b], n, ps)] = True
    for name in ("k_pages", "v_pages"):
        pool = args[name].clone()
        rows = pool.view(torch.uint8) if pool.dtype == E4M3 else pool
        rows.flatten(0, 1)[~used] = 0x7F if pool.dtype == E4M3 else bad  # 0x7F is NaN
        args[name] = pool
    return args


# --------------------------------------------------------------------------------- values


def random_call(seed):
    """A legal call over every option: tensors, options, accuracy row."""
    pick = random.Random(seed).choice
    rope = pick([False, True])
    batch = pick([0, 1, 3, 6])
    q_lens = [pick([0, 1, 2, 17, 65, 130]) for _ in range(batch)]
    lens = [pick([0, 1, 3, 20, 64, 200]) + (n if rope else 0) for n in q_lens]
    h_kv, g, d = pick([1, 2, 3]), pick([1, 3, 5]), pick([16, 20, 64])
    kind = pick(["16-bit", "e4m3 pool", "e4m3"])
    half = pick([F16, BF16])
    args = inputs(
        q_lens,
        lens,
        h_kv * g,
        h_kv,
        d,
        pick([1, 7, 16, 48]),
        E4M3 if kind == "e4m3" else half,
        None if kind == "16-bit" else E4M3,
        tail=pick([0, 3]),
        seed=seed,
    )
    options = {
        "is_causal": pick([True, False]),
        "window_size_left": pick([-1, 0, 3, 40]),
        "window_size_right": pick([-1, 0, 2, 50]),
        "sm_scale": pick([None, 0.05, 0.7]),
        "softcap": pick([None, 1.0, 30.0]),
        "rope_layout": pick(["neox", "interleaved"]),
    }
    if kind != "16-bit":
        args = scaled(args, pick([True, False]), seed)
    if kind == "e4m3" or pick([True, False]):
        options["out_dtype"] = half
    if rope:
        options |= {"pos_encoding_mode": "rope", "rotary_dim": pick([None, 8, 2])}
        rows = max(lens, default=0) + pick([0, 5])
        tables = oracle.rope_table(options["rotary_dim"] or d, rows, 1000.0, half)
        args |= dict(zip(("rope_cos", "rope_sin"), tables, strict=True))
    if pick([True, False]):
        args["sinks"] = torch.randn(h_kv * g, generator=torch.Generator().manual_seed(seed))
    row = FP8_CACHE if kind != "16-bit" else FORWARD_ROPE if rope else FORWARD
    return args, options, row


@pytest.mark.parametrize("seed", range(40))
def test_random_calls(seed):
    """Every option at random, everything stale poisoned, against the float64 oracle."""
    args, options, row = random_call(seed)
    o = GQAPagedFwdOp(**options)(**poisoned(args))
    close(o, expected(args, **options), row, str(options))


@pytest.mark.parametrize("seed", range(8))
def test_the_reference_serves_the_same_calls(seed):
    args, options, row = random_call(seed)
    close(run_reference(poisoned(args), options), expected(args, **options), row, str(options))


def run_reference(args, options):
    op = GQAPagedFwdOp(**options)
    (reference,) = (k for k in BUILTIN_KERNELS["gqa_paged_fwd"] if k.name == "reference")
    call = op.contract.Call(*op.bound(*(args.get(name) for name in op.contract.tensors)))
    o = infer_gqa_paged_fwd(call)
    reference.run(o, call)
    return o


@pytest.mark.parametrize("h, h_kv", [(3, 1), (71, 1), (7, 7), (48, 8)])
def test_groups(h, h_kv):
    args = inputs((1, 37, 1, 5), (6, 37, 1, 9), h=h, h_kv=h_kv)
    close(GQAPagedFwdOp()(**args), expected(args))


@pytest.mark.parametrize("d", [16, 40, 72, 80, 96, 112, 192, 256, 576, 1, 33])
def test_head_dims(d):
    args = inputs(d=d)
    close(GQAPagedFwdOp()(**args), expected(args))


@pytest.mark.parametrize("ps", [1, 3, 7, 24, 48, 96, 544, 2048])
def test_page_sizes(ps):
    args = inputs((1, 4, 2), (ps + 1, 2 * ps, 5), ps=ps)
    close(GQAPagedFwdOp()(**poisoned(args)), expected(args))


@pytest.mark.parametrize("length", [*range(1, 34), 63, 64, 65, 127, 128, 129, 255, 256, 257, 512])
def test_decode_lengths_on_a_shifted_pool(length):
    args = inputs((1,), (length,), ps=16, h=4, h_kv=1)
    want = GQAPagedFwdOp()(**args)
    for name in ("k_pages", "v_pages"):
        pool = args[name]
        base = torch.empty(pool.numel() + 1, dtype=pool.dtype)
        base[1:] = pool.flatten()
        args[name] = base[1:].view(pool.shape)
    assert torch.equal(GQAPagedFwdOp()(**args), want)
    close(want, expected(args))


def test_a_window_is_inclusive_and_counts_from_each_request():
    d = 4
    args = inputs((4,), (4,), h=1, h_kv=1, d=d, ps=4)
    args["q"] = torch.zeros_like(args["q"])
    page = args["page_table"][0, 0]
    args["v_pages"][page, :, 0] = torch.eye(d).to(F16)
    for left in (0, 1):
        seen = GQAPagedFwdOp(window_size_left=left)(**args)[:, 0] > 0
        assert seen.tolist() == [[i - left <= j <= i for j in range(4)] for i in range(4)]
    args = inputs((1, 1), (5, 200), ps=16)
    close(GQAPagedFwdOp(window_size_left=16)(**args), expected(args, window_size_left=16))


def test_several_query_tokens_with_a_window_at_every_row_and_head():
    for length, pool in ((1025, BF16), (1100, E4M3)):
        args = inputs((8,), (length,), 32, 16, 64, 16, BF16, pool)
        if pool == E4M3:
            args = scaled(args, True)
        o = GQAPagedFwdOp(window_size_left=1023)(**args)
        error = (o.double() - expected(args, window_size_left=1023)).norm(dim=-1)
        assert (error <= FP8_CACHE[BF16].rel_l2 * o.double().norm(dim=-1)).all()


def test_more_queries_than_keys():
    args = inputs((5,), (2,), h=2, h_kv=1)
    o = GQAPagedFwdOp()(**args)
    first = args["v_pages"].flatten(0, 1)[oracle.physical_rows(args["page_table"][0], 2, 4)[0]]
    assert (o[:3] == 0).all()
    assert torch.equal(o[3], first.expand(2, -1))
    args = inputs((6,), (2,))
    options = {"is_causal": False, "window_size_left": 1, "window_size_right": 0}
    o = GQAPagedFwdOp(**options)(**args)
    assert (o[:4] == 0).all()
    close(o, expected(args, **options))


# --------------------------------------------------------------------- sinks, scales, RoPE


def test_sinks_at_the_extremes():
    args = inputs()
    op = GQAPagedFwdOp()
    none = op(**args)
    assert torch.equal(none, op(**args, sinks=torch.full((4,), -INF)))
    assert (op(**args, sinks=torch.full((4,), INF)) == 0).all()
    assert (op(**args, sinks=torch.full((4,), 300.0)) == 0).all()
    for value in (-1e4, 0.0, 5.0):
        args["sinks"] = torch.full((4,), value)
        close(op(**args), expected(args))


def test_rows_without_keys_are_zero_with_every_sink():
    args = inputs((5, 3), (2, 0))
    for sinks in (None, torch.tensor([0.0, -INF, INF, 5.0])):
        args["sinks"] = sinks
        for softcap in (None, 2.0):
            o = GQAPagedFwdOp(softcap=softcap)(**args)
            assert (o[:3] == 0).all()
            assert (o[5:] == 0).all()


@pytest.mark.parametrize("dtype", [F16, E4M3])
def test_sinks_and_softcap_reach_e4m3_pools(dtype):
    args = scaled(inputs(dtype=dtype, pool_dtype=E4M3), False)
    results = []
    for options in ({}, {"softcap": 5.0}, {"softcap": 0.0}):
        for sinks in (None, torch.full((4,), 10.0)):
            args["sinks"] = sinks
            o = GQAPagedFwdOp(out_dtype=F16, **options)(**args)
            close(o, expected(args, **options), FP8_CACHE)
            results.append(o)
    assert torch.equal(results[0], results[4])
    assert not torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_scales_per_request_and_head_from_an_expanded_view():
    args = scaled(inputs(dtype=E4M3, pool_dtype=E4M3), True)
    for name in ("q_scale", "k_scale", "v_scale"):
        args[name] = args[name][:1].expand(3, 2)
    o = GQAPagedFwdOp(out_dtype=BF16)(**args)
    close(o, expected(args), FP8_CACHE)
    for name in ("q_scale", "k_scale", "v_scale"):
        changed = dict(args, **{name: args[name] * 1.5})
        assert not torch.equal(o, GQAPagedFwdOp(out_dtype=BF16)(**changed))


def test_a_zero_scale_gives_a_uniform_softmax():
    args = scaled(inputs(pool_dtype=E4M3), False)
    args["k_scale"] = torch.zeros(1)
    close(GQAPagedFwdOp()(**args), expected(args), FP8_CACHE)


@pytest.mark.parametrize("layout", ["neox", "interleaved"])
def test_the_last_position_uses_the_last_row_of_the_tables(layout):
    args = inputs((2, 1), (30, 1), d=32, ps=7)
    cos, sin = oracle.rope_table(8, 30, 10000.0, F16)
    args |= {"rope_cos": cos, "rope_sin": sin}
    options = {"pos_encoding_mode": "rope", "rotary_dim": 8, "rope_layout": layout}
    close(GQAPagedFwdOp(**options)(**args), expected(args, **options), FORWARD_ROPE)
    args |= {"rope_cos": cos[:29], "rope_sin": sin[:29]}
    with pytest.raises(IndexError, match="rotary rows"):
        GQAPagedFwdOp(**options)(**args)


def test_rope_of_queries_before_the_first_key_is_refused_not_wrapped():
    args = inputs((5,), (2,), d=8)
    cos, sin = oracle.rope_table(8, 9, 10000.0, F16)
    with pytest.raises(IndexError, match="rotary rows"):
        GQAPagedFwdOp(pos_encoding_mode="rope")(**args, rope_cos=cos, rope_sin=sin)


# ---------------------------------------------------------------------------------- pages


@pytest.mark.parametrize("kind", ["16-bit", "e4m3"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_stale_rows_table_tails_and_padding_change_no_bit(kind, bad):
    args = inputs(
        (3, 1, 0), (9, 13, 6), ps=16, pool_dtype=E4M3 if kind == "e4m3" else None, tail=2
    )
    if kind == "e4m3":
        args = scaled(args, False)
    op = GQAPagedFwdOp()
    clean = op(**args)
    dirty = poisoned(args, bad)
    for entry in (-1, 2**30, args["k_pages"].shape[0]):
        table = args["page_table"].clone()
        for b, n in enumerate((9, 13, 6)):
            table[b, -(-n // 16) :] = entry
        dirty["page_table"] = table
        assert torch.equal(op(**dirty), clean)
    padded = torch.cat([args["q"], torch.full_like(args["q"][:2], NAN)])
    o = op(**(dirty | {"q": padded}))
    assert torch.equal(o[:4], clean)
    assert (o[4:] == 0).all()


def test_a_table_may_end_with_the_last_used_page():
    args = inputs((1, 1), (8, 5), ps=4)
    assert args["page_table"].shape[1] == 2
    close(GQAPagedFwdOp()(**args), expected(args))


def test_requests_may_share_pages():
    args = inputs((1, 2), (8, 8))
    args["page_table"][1] = args["page_table"][0]
    close(GQAPagedFwdOp()(**args), expected(args))


@pytest.mark.parametrize("page", [-1, 2**30, None])
def test_a_used_page_outside_the_pool_raises(page):
    args = inputs()
    args["page_table"][0, 1] = args["k_pages"].shape[0] if page is None else page
    before = [args[name].clone() for name in ("k_pages", "v_pages")]
    with pytest.raises(IndexError, match="page-table column 1 names page"):
        GQAPagedFwdOp()(**args)
    with pytest.raises((IndexError, RuntimeError)):
        run_reference(args, {})
    for name, kept in zip(("k_pages", "v_pages"), before, strict=True):
        assert torch.equal(args[name], kept)


def test_a_length_past_the_table_raises():
    args = inputs((1,), (8,), ps=4)
    args["cache_seqlens"] += 1
    with pytest.raises(IndexError, match="page-table column 2"):
        GQAPagedFwdOp()(**args)
    with pytest.raises((IndexError, RuntimeError)):
        run_reference(args, {})


def test_memory_stays_safe_whatever_the_offsets_and_lengths_hold():
    args = inputs((3, 0, 5), (9, 4, 6))
    for bad in ([0, 3, 3, 900], [0, 5, 2, 8], [-4, 3, 3, 8]):
        cu = torch.tensor(bad, dtype=torch.int32)
        with pytest.raises(IndexError, match="cu_seqlens_q must not decrease and stay in"):
            GQAPagedFwdOp()(**args | {"cu_seqlens_q": cu})
    negative = torch.tensor([-5, 4, 6], dtype=torch.int32)
    o = GQAPagedFwdOp()(**args | {"cache_seqlens": negative})
    assert (o[:3] == 0).all()


# ----------------------------------------------------------------------------------- laws


def test_padding_requests_are_zero_and_change_nothing():
    args = inputs((1, 1, 1, 1), (5, 9, 3, 0), ps=4)
    args["page_table"][3] = 0
    o = GQAPagedFwdOp()(**args)
    assert (o[3] == 0).all()
    three = {n: args[n][:3] for n in ("q", "page_table", "cache_seqlens")}
    three["cu_seqlens_q"] = args["cu_seqlens_q"][:4]
    assert torch.equal(o[:3], GQAPagedFwdOp()(**args | three))


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_equals_varlen_on_the_gathered_keys(dtype):
    q_lens, lens = (3, 1, 0, 17), (9, 40, 6, 17)
    args = inputs(q_lens, lens, dtype=dtype, ps=7)
    rows = [
        row
        for b, n in enumerate(lens)
        for row in oracle.physical_rows(args["page_table"][b], n, 7)
    ]
    k, v = (args[name].flatten(0, 1)[rows] for name in ("k_pages", "v_pages"))
    cu_kv = offsets(list(lens))
    packed = GQAVarlenFwdOp(window_size_left=5)(args["q"], k, v, args["cu_seqlens_q"], cu_kv)
    close(GQAPagedFwdOp(window_size_left=5)(**args), packed)


def test_write_then_read_equals_dense():
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(21, 2, 16, generator=generator).to(BF16) for _ in range(2))
    q = torch.randn(21, 4, 16, generator=generator).to(BF16)
    pools = [torch.full((6, 5, 2, 16), NAN, dtype=BF16) for _ in range(2)]
    table = torch.tensor([[4, 0, 5, 1, 3]], dtype=torch.int32)
    at = torch.arange(21)
    slots = table[0].long()[at // 5] * 5 + at % 5
    PagedKVCacheWriteFwdOp()(k, v, *pools, slots)
    lens = torch.tensor([21], dtype=torch.int32)
    read = GQAPagedFwdOp()(q, *pools, table, lens, offsets([21]))
    assert torch.equal(read, GQADenseFwdOp()(q[None], k[None], v[None])[0])


def test_chunks_equal_the_whole():
    args = inputs((20,), (20,), ps=4)
    whole = GQAPagedFwdOp()(**args)
    for start, stop in ((0, 7), (7, 8), (8, 20)):
        part = {
            "q": args["q"][start:stop],
            "cache_seqlens": torch.tensor([stop], dtype=torch.int32),
            "cu_seqlens_q": offsets([stop - start]),
        }
        close(GQAPagedFwdOp()(**args | part), whole[start:stop])


def test_the_future_does_not_reach_a_softcapped_row():
    args = inputs((8,), (8,), ps=8)
    op = GQAPagedFwdOp(softcap=1.0)
    before = op(**args)
    page = args["page_table"][0, 0]
    args["k_pages"][page, 7] += 3
    args["v_pages"][page, 7] -= 2
    assert torch.equal(op(**args)[:7], before[:7])


@pytest.mark.parametrize("threads", [1, 4])
def test_mixed_batches_do_not_depend_on_the_thread_count(threads):
    args = inputs((1, 37, 1, 5), (300, 37, 1, 9), h=48, h_kv=8)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        close(GQAPagedFwdOp()(**args), expected(args))
    finally:
        torch.set_num_threads(before)


def test_one_instance_serves_dtypes_shapes_and_lengths():
    op = GQAPagedFwdOp()
    for dtype, ps, d in ((F16, 4, 16), (BF16, 7, 24), (F16, 1, 8)):
        args = inputs(dtype=dtype, ps=ps, d=d)
        close(op(**args), expected(args))
    for length in (5, 9, 2):
        args["cache_seqlens"] = torch.tensor([length, 4, 6], dtype=torch.int32)
        args["page_table"] = torch.randperm(20)[:9].int().repeat(3, 1)
        close(op(**args), expected(args))


# ------------------------------------------------------------------------------ emptiness


def test_empty_calls():
    nothing = inputs((), ())
    assert GQAPagedFwdOp()(**nothing).shape == (0, 4, 16)
    unasked = inputs((0, 0), (9, 4))
    assert GQAPagedFwdOp()(**unasked).shape == (0, 4, 16)
    uncached = inputs((2, 1), (0, 0))
    assert (GQAPagedFwdOp(is_causal=False)(**uncached) == 0).all()
    headless = inputs(h=4) | {"q": torch.zeros(4, 0, 16, dtype=F16)}
    assert GQAPagedFwdOp()(**headless).shape == (4, 0, 16)
    padding = nothing | {"q": torch.full((3, 4, 16), NAN, dtype=F16)}
    assert (GQAPagedFwdOp()(**padding) == 0).all()
    pageless = uncached | {n: uncached[n][:0] for n in ("k_pages", "v_pages")}
    assert (GQAPagedFwdOp()(**pageless) == 0).all()


# ------------------------------------------------------------------- gradients and objects


@pytest.mark.parametrize("compiled", [False, True])
def test_backward_is_refused_in_words_when_it_runs(compiled):
    args = inputs()
    op = GQAPagedFwdOp()
    want = op(**args)
    fn = torch.compile(op, fullgraph=True) if compiled else op
    for name in ("q", "k_pages", "v_pages"):
        args[name].requires_grad_()
    o = fn(**args)
    assert torch.equal(o, want)
    with pytest.raises(GradientError, match="gqa_paged_fwd has no gradient"):
        o.float().sum().backward()


def test_inputs_may_alias_each_other():
    args = inputs()
    args["v_pages"] = args["k_pages"]
    close(GQAPagedFwdOp()(**args), expected(args))


def copies(op):
    yield copy.deepcopy(op)
    yield pickle.loads(pickle.dumps(op))
    buffer = io.BytesIO()
    torch.save(op, buffer)
    buffer.seek(0)
    yield torch.load(buffer, weights_only=False)


def test_the_op_can_be_copied_before_and_after_a_call():
    op, args = GQAPagedFwdOp(window_size_left=2, softcap=3.0), inputs()
    before = list(copies(op))
    want = op(**args)
    for other in before + list(copies(op)):
        assert torch.equal(other(**args), want)


def test_repr_shows_every_parameter():
    assert repr(GQAPagedFwdOp(softcap=3, target="builtin")) == (
        "GQAPagedFwdOp(is_causal=True, window_size_left=-1, window_size_right=-1, sm_scale=None, "
        "softcap=3.0, out_dtype=None, pos_encoding_mode='none', rotary_dim=None, "
        "rope_layout='neox', target='builtin')"
    )


def test_parameters_are_normalised():
    op = GQAPagedFwdOp(True, numpy.int64(5), numpy.int32(0), numpy.float32(0.5), numpy.int64(2))
    assert [type(x) for x in op.options()[1:5]] == [int, int, float, float]
    close(op(**inputs()), expected(inputs(), window_size_left=5, sm_scale=0.5, softcap=2.0))


# ------------------------------------------------------------------------------- refusals


def bad_parameters():
    yield {"window_size_left": True}, TypeError, "window_size_left must be an integer, got a bool"
    yield {"window_size_right": 1.5}, TypeError, "window_size_right must be an integer, got float"
    yield {"is_causal": 1}, TypeError, "is_causal must be a bool, got int 1"
    yield {"sm_scale": "1"}, TypeError, "sm_scale must be a number, got str '1'"
    yield {"window_size_left": -2}, ValueError, r"window_size_left must be -1 .* got -2"
    yield {"window_size_right": -3}, ValueError, r"window_size_right must be -1 .* got -3"
    for scale in (0.0, -1.0, INF, NAN):
        yield {"sm_scale": scale}, ValueError, f"sm_scale must be finite and > 0, got {scale}"
    for cap in (-1.0, INF, NAN):
        yield {"softcap": cap}, ValueError, f"softcap must be None, 0 or .* got {cap}"
    yield {"pos_encoding_mode": "alibi"}, ValueError, "pos_encoding_mode must be .* got 'alibi'"
    yield {"rope_layout": "gptj"}, ValueError, "rope_layout must be .* got 'gptj'"
    yield {"rotary_dim": 8}, ValueError, "rotary_dim must be None with pos_encoding_mode='none'"
    for width in (0, -2, 7):
        rope = {"pos_encoding_mode": "rope", "rotary_dim": width}
        yield rope, ValueError, f"rotary_dim must be positive and even, got {width}"
    yield {"out_dtype": torch.float32}, ValueError, "out_dtype must be None, float16 or bfloat16"
    yield {"target": "nowhere"}, ValueError, "target must be None or one of .* got 'nowhere'"


@pytest.mark.parametrize("options, error, sentence", list(bad_parameters()))
def test_parameter_rules(options, error, sentence):
    with pytest.raises(error, match=f"gqa_paged_fwd: {sentence}"):
        GQAPagedFwdOp(**options)
    if error is ValueError:
        args = inputs()
        with pytest.raises(ValueError, match=f"gqa_paged_fwd: {sentence}"):
            torch.ops.tileops.gqa_paged_fwd(*args.values(), **options)


def bad_tensors():
    args = inputs(d=16)
    q, k = args["q"], args["k_pages"]
    fp8 = {"k_pages": k.to(E4M3), "v_pages": k.to(E4M3)}
    one = torch.ones(1)
    both = {"k_scale": one, "v_scale": one}
    each = torch.ones(3, 2)
    q8 = fp8 | both | {"q": q.to(E4M3), "q_scale": each}
    f8 = {"out_dtype": F16}
    cos = torch.ones(9, 8, dtype=F16)
    rope = {"pos_encoding_mode": "rope"}
    tables = {"rope_cos": cos, "rope_sin": cos}
    table, lens, cu = args["page_table"], args["cache_seqlens"], args["cu_seqlens_q"]
    yield {"q": q[None]}, {}, r"q must have shape \[T_q, H, D\], got \[1, 4, 4, 16\]"
    yield {"k_pages": k[0]}, {}, r"k_pages must have shape \[NP, PS, H_kv, D\]"
    yield {"k_pages": k[..., :8]}, {}, r"k_pages must have shape .* D=16, got"
    yield {"v_pages": k[:-1]}, {}, "v_pages must have shape"
    yield {"v_pages": k[:, :, :1]}, {}, "v_pages must have shape"
    yield {"page_table": table[0]}, {}, r"page_table must have shape \[B, W\]"
    yield {"cache_seqlens": lens[:2]}, {}, r"cache_seqlens must have shape \[B\] with B=3"
    yield {"cu_seqlens_q": cu[:3]}, {}, r"cu_seqlens_q must have shape \[B\+1\] with B=3"
    empty = {n: args[n][..., :0] for n in ("q", "k_pages", "v_pages")}
    yield empty, {}, "q must have D > 0, got 0"
    yield {n: k[:, :0] for n in ("k_pages", "v_pages")}, {}, "k_pages must have PS > 0, got 0"
    yield {"q": q[:, :3]}, {}, "k_pages must have a number of heads that divides the 3 .* got 2"
    no_heads = {n: k[:, :, :0] for n in ("k_pages", "v_pages")}
    yield no_heads, {}, "k_pages must have a number of heads that divides the 4 .* got 0"
    yield {"q": q.float()}, {}, "q must be float16 or bfloat16 or float8_e4m3fn, got float32"
    yield {"k_pages": k.bfloat16(), "v_pages": k.bfloat16()}, {}, "k_pages must be float16 or"
    yield {"v_pages": k.bfloat16()}, {}, "v_pages must have the dtype of k_pages, float16"
    yield {"q": q.to(E4M3)}, f8, "k_pages must be float8_e4m3fn for a float8_e4m3fn q, got float16"
    yield {"page_table": table.long()}, {}, "page_table must be int32, got int64"
    yield {"cache_seqlens": lens.long()}, {}, "cache_seqlens must be int32, got int64"
    yield {"cu_seqlens_q": cu.long()}, {}, "cu_seqlens_q must be int32, got int64"
    yield {"cu_seqlens_q": cu.to("meta")}, {}, "cu_seqlens_q must be on the device of q, cpu"
    yield {}, {"out_dtype": BF16}, "out_dtype must be None or the dtype of q, float16"
    yield q8, {}, "out_dtype must name float16 or bfloat16 for float8_e4m3fn inputs, got None"
    yield {"q_scale": each}, {}, "q_scale must be None without a float8_e4m3fn q"
    yield {"k_scale": one}, {}, "k_scale must be None without a float8_e4m3fn page pool"
    yield {"v_scale": one}, {}, "v_scale must be None without a float8_e4m3fn page pool"
    yield fp8, {}, "k_scale must be given for a float8_e4m3fn page pool, got None"
    yield fp8 | {"k_scale": one}, {}, "v_scale must be given for a float8_e4m3fn page pool"
    yield fp8 | both | {"q_scale": each}, {}, "q_scale must be None without a float8_e4m3fn q"
    yield q8 | {"q_scale": None}, f8, "q_scale must be given for a float8_e4m3fn q, got None"
    yield q8 | {"q_scale": one}, f8, r"q_scale must have shape \[B, H_kv\], got \[1\]"
    yield q8 | {"q_scale": each.half()}, f8, "q_scale must be float32, got float16"
    yield fp8 | both | {"v_scale": each}, {}, r"v_scale must be float32 \[1\], got .*\[3, 2\]"
    yield fp8 | both | {"k_scale": each}, {}, r"v_scale must be float32 \[3, 2\], got .*\[1\]"
    yield fp8 | both | {"k_scale": torch.ones(2)}, {}, r"k_scale must be float32 \[1\]"
    yield fp8 | both | {"k_scale": one.half()}, {}, "k_scale must be float32"
    yield fp8 | both | {"k_scale": one[0]}, {}, r"k_scale must be float32 \[1\] or \[B, H_kv\]"
    yield tables, {}, "rope_cos must be None with pos_encoding_mode='none'"
    yield {}, rope, "rope_cos must be given with pos_encoding_mode='rope', got None"
    yield {"rope_cos": cos}, rope, "rope_sin must be given with pos_encoding_mode='rope'"
    narrow = {n: cos[:, :4] for n in tables}
    yield narrow, rope, r"rope_cos must have shape \[P, R/2\] with R/2=8, got \[9, 4\]"
    yield tables | {"rope_sin": cos[:5]}, rope, "rope_sin must have the shape of rope_cos"
    yield tables | {"rope_cos": cos.float()}, rope, "rope_cos must have the output dtype float16"
    yield tables, rope | {"rotary_dim": 18}, "rotary_dim must be at most the head dim 16, got 18"
    odd = inputs(d=5)
    odd = {n: odd[n] for n in ("q", "k_pages", "v_pages")}
    yield odd | tables, rope, "rotary_dim must be given for an odd head dim, got D=5"
    yield {"sinks": torch.zeros(4).half()}, {}, "sinks must be float32, got float16"
    yield {"sinks": torch.zeros(3)}, {}, r"sinks must have shape \[H\] with H=4, got \[3\]"


@pytest.mark.parametrize("changes, options, sentence", list(bad_tensors()))
def test_tensor_rules(changes, options, sentence):
    op, args = GQAPagedFwdOp(**options), inputs(d=16) | changes
    with pytest.raises(ValueError, match=f"gqa_paged_fwd: {sentence}"):
        op(**args)
    if "device" not in sentence:
        with pytest.raises(ValueError, match=f"gqa_paged_fwd: {sentence}"):
            op(**{n: x if x is None else x.to("meta") for n, x in args.items()})


@pytest.mark.parametrize("name", ["q", "k_pages", "page_table", "sinks"])
def test_a_non_tensor_is_a_type_error(name):
    with pytest.raises(TypeError, match=f"gqa_paged_fwd: {name} must be a torch.Tensor, got list"):
        GQAPagedFwdOp()(**inputs() | {name: [1.0]})
