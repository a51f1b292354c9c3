"""Paged multi-head decode beyond the shared harness: lengths, pages, poison, laws, refusals."""

import copy
import pickle

import numpy
import pytest
import torch

from ops_registry.accuracy import FORWARD
from ops_registry.contract import BUILTIN_KERNELS
from ops_registry.errors import GradientError
from tests import checks, oracle
from tests.cases import offsets
from tileops.attention import GQAPagedFwdOp, MHADecodePagedWithKVCacheFwdOp

BF16, F16 = torch.bfloat16, torch.float16
INF, NAN = float("inf"), float("nan")


def inputs(lens=(9, 4, 0), s_q=1, h=3, d=16, ps=4, dtype=F16, tail=0, seed=0):
    """(q, k, v, real_seqlen_kv, block_table) with shuffled pages; tail: unused table columns."""
    draw = torch.Generator().manual_seed(seed)
    counts = [-(-n // ps) for n in lens]
    pages = sum(counts) + 2
    order = torch.randperm(pages, generator=draw).to(torch.int32)
    table = torch.full((len(lens), max(counts, default=0) + tail), -7, dtype=torch.int32)
    for b, count in enumerate(counts):
        table[b, :count], order = order[:count], order[count:]
    shapes = (len(lens), s_q, h, d), (pages * ps, h, d), (pages * ps, h, d)
    q, k, v = (torch.randn(*s, generator=draw).to(dtype) for s in shapes)
    return q, k, v, torch.tensor(lens, dtype=torch.int32), table


def check(args, ps, is_causal=False, what="o"):
    o = MHADecodePagedWithKVCacheFwdOp(ps, is_causal)(*args)
    ref = oracle.mha_decode_paged_fwd(*args, ps, is_causal)
    checks.assert_close(o, ref, FORWARD[o.dtype], what)
    return o


def stale(args, ps, bad):
    q, k, v, lens, table = args
    used = torch.zeros(k.shape[0], dtype=torch.bool)
    for b, n in enumerate(lens.tolist()):
        used[oracle.physical_rows(table[b], n, ps)] = True
    k, v = k.clone(), v.clone()
    k[~used], v[~used] = bad, bad
    return q, k, v, lens, table


# --------------------------------------------------------------------------------- values


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("s_q", [1, 4, 70])
@pytest.mark.parametrize("ps", [1, 7, 16, 544])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_values(is_causal, s_q, ps, dtype):
    args = inputs((0, 1, 3, 65, 300, ps, 2 * ps), s_q, dtype=dtype, ps=ps, tail=2)
    check(stale(args, ps, NAN), ps, is_causal)


@pytest.mark.parametrize("d", [1, 16, 33, 80, 96, 256, 576])
@pytest.mark.parametrize("h", [1, 5, 32])
def test_heads_and_dims(d, h):
    check(inputs((33, 7), 2, h, d, ps=8), 8, True)


@pytest.mark.parametrize("length", [*range(1, 34), 100, 127, 128, 129, 255, 256, 257, 1000])
def test_decode_lengths(length):
    check(inputs((length,), ps=32), 32)


@pytest.mark.parametrize("s_q, ps", [(1, 4), (5, 7)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_reference_serves_the_same_calls(s_q, ps, is_causal):
    args = stale(inputs((9, 2, 0, 31), s_q, ps=ps), ps, NAN)
    op = MHADecodePagedWithKVCacheFwdOp(ps, is_causal)
    kernels = BUILTIN_KERNELS["mha_decode_paged_fwd"]
    (reference,) = (k for k in kernels if k.name == "reference")
    o = torch.empty_like(args[0])
    reference.run(o, op.contract.Call(*op.bound(*args)))
    checks.assert_close(o, oracle.mha_decode_paged_fwd(*args, ps, is_causal), FORWARD[F16])


def test_queries_past_the_keys_are_zero_under_causal_only():
    args = inputs((2, 0), s_q=5)
    o = check(args, 4, is_causal=True)
    assert (o[0, :3] == 0).all()
    assert (o[1] == 0).all()
    o = check(args, 4)
    assert (o[0] != 0).any(-1).all()


def test_many_short_requests():
    args = inputs((1,) * 2049, h=2, d=8, ps=1)
    o = MHADecodePagedWithKVCacheFwdOp(1)(*args)
    assert torch.equal(o[:, 0], args[2][args[4][:, 0].long()])


# ---------------------------------------------------------------------------------- pages


@pytest.mark.parametrize("bad", [NAN, INF])
def test_stale_rows_and_table_tails_change_no_bit(bad):
    args = inputs((13, 16, 5), 2, ps=16, tail=2)
    op = MHADecodePagedWithKVCacheFwdOp(16)
    clean = op(*args)
    q, k, v, lens, table = stale(args, 16, bad)
    for entry in (-1, 2**30, k.shape[0] // 16):
        tails = table.clone()
        tails[:, 1:] = entry
        assert torch.equal(op(q, k, v, lens, tails), clean)


def test_padding_requests_are_zero_and_change_nothing():
    q, k, v, lens, table = inputs((5, 9, 3, 0))
    table[3] = 0
    op = MHADecodePagedWithKVCacheFwdOp(4)
    o = op(q, k, v, lens, table)
    assert (o[3] == 0).all()
    assert torch.equal(o[:3], op(q[:3], k, v, lens[:3], table[:3]))


@pytest.mark.parametrize("page", [-1, 2**30, None])
def test_a_used_page_outside_the_pool_raises(page):
    q, k, v, lens, table = inputs()
    table[0, 2] = k.shape[0] // 4 if page is None else page
    with pytest.raises(IndexError, match="page-table column 2 names page"):
        MHADecodePagedWithKVCacheFwdOp(4)(q, k, v, lens, table)


def test_memory_stays_safe_whatever_the_lengths_hold():
    q, k, v, lens, table = inputs()
    with pytest.raises(
        IndexError, match="needs page-table column 27, but the table has 3 columns"
    ):
        MHADecodePagedWithKVCacheFwdOp(4)(q, k, v, lens + 100, table)
    o = MHADecodePagedWithKVCacheFwdOp(4)(q, k, v, lens - 100, table)
    assert (o == 0).all()


def test_strided_inputs():
    q, k, v, lens, table = inputs((9, 30), 3, ps=6)
    want = check((q, k, v, lens, table), 6, True)
    wide = torch.full((*k.shape[:2], 2 * k.shape[2]), NAN, dtype=F16)
    wide[..., ::2] = k
    packed = torch.stack([v, v], 1)[:, 1]
    q = q.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    o = MHADecodePagedWithKVCacheFwdOp(6, True)(q, wide[..., ::2], packed, lens, table)
    assert o.is_contiguous()
    assert torch.equal(o, want)
    q, k, v, lens, table = inputs((9, 30), 3, ps=6)
    check((q, k[:, :1].expand_as(k), v, lens, table), 6)


# ----------------------------------------------------------------------------------- laws


@pytest.mark.parametrize("is_causal", [False, True])
def test_equals_the_paged_operator(is_causal):
    q, k, v, lens, table = inputs((9, 40, 0), 3, ps=8)
    o = MHADecodePagedWithKVCacheFwdOp(8, is_causal)(q, k, v, lens, table)
    pools = (x.unflatten(0, (-1, 8)) for x in (k, v))
    paged = GQAPagedFwdOp(is_causal)(q.flatten(0, 1), *pools, table, lens, offsets([3, 3, 3]))
    assert torch.equal(o.flatten(0, 1), paged)


def test_empty_calls():
    op = MHADecodePagedWithKVCacheFwdOp(4)
    q, k, v, lens, table = inputs()
    assert op(q[:, :0], k, v, lens, table).shape == (3, 0, 3, 16)
    assert op(q[:0], k, v, lens[:0], table[:0]).shape == (0, 1, 3, 16)
    assert (op(q, k[:0], v[:0], lens * 0, table) == 0).all()
    assert (op(q, k, v, lens * 0, table[:, :0]) == 0).all()


# ------------------------------------------------------------------- gradients and objects


@pytest.mark.parametrize("compiled", [False, True])
def test_backward_is_refused_in_words_when_it_runs(compiled):
    args = inputs()
    op = MHADecodePagedWithKVCacheFwdOp(4)
    want = op(*args)
    fn = torch.compile(op, fullgraph=True) if compiled else op
    o = fn(*(x.requires_grad_() for x in args[:3]), *args[3:])
    assert torch.equal(o, want)
    with pytest.raises(GradientError, match="mha_decode_paged_fwd has no gradient"):
        o.float().sum().backward()


def test_copies_give_the_same_result():
    op, args = MHADecodePagedWithKVCacheFwdOp(4, is_causal=True), inputs(s_q=2)
    want = op(*args)
    for other in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert torch.equal(other(*args), want)
    assert repr(op) == "MHADecodePagedWithKVCacheFwdOp(page_size=4, is_causal=True)"


# ------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "page_size, error, sentence",
    [
        (0, ValueError, "page_size must be a positive integer, got 0"),
        (-4, ValueError, "page_size must be a positive integer, got -4"),
        (True, TypeError, "page_size must be an integer, got a bool"),
        (4.0, TypeError, "page_size must be an integer, got float 4.0"),
    ],
)
def test_page_size(page_size, error, sentence):
    with pytest.raises(error, match=f"mha_decode_paged_fwd: {sentence}"):
        MHADecodePagedWithKVCacheFwdOp(page_size)
    if error is ValueError:
        with pytest.raises(ValueError, match=f"mha_decode_paged_fwd: {sentence}"):
            torch.ops.tileops.mha_decode_paged_fwd(*inputs(), page_size)
    assert MHADecodePagedWithKVCacheFwdOp(numpy.int32(4)).page_size == 4


def bad_tensors():
    q, k, v, lens, table = inputs()
    yield (q[0], k, v, lens, table), r"q must have shape \[B, S_q, H, D\], got \[1, 3, 16\]"
    yield (q, k[:, :2], v, lens, table), r"k must have shape \[N_kv, H, D\] with .*H=3, D=16"
    yield (q, k, v[:-4], lens, table), r"v must have shape \[N_kv, H, D\] with N_kv="
    yield (q, k, v[..., :8], lens, table), "v must have shape"
    yield (q, k, v, lens[:2], table), r"real_seqlen_kv must have shape \[B\] with B=3, got \[2\]"
    yield (q, k, v, lens, table[:2]), r"block_table must have shape \[B, W\] with B=3"
    yield (q[..., :0], k[..., :0], v[..., :0], lens, table), "q must have D > 0, got 0"
    yield (q[:, :, :0], k[:, :0], v[:, :0], lens, table), "q must have H > 0, got 0"
    yield (q, k[:-1], v[:-1], lens, table), "k must have a multiple of page_size=4 rows, got"
    yield (q.float(), k, v, lens, table), "q must be float16 or bfloat16, got float32"
    yield (q, k.bfloat16(), v, lens, table), "k must have the dtype of q, float16, got bfloat16"
    yield (q, k, v.bfloat16(), lens, table), "v must have the dtype of q"
    yield (q, k, v, lens.long(), table), "real_seqlen_kv must be int32, got int64"
    yield (q, k, v, lens, table.long()), "block_table must be int32, got int64"
    yield (q, k, v, lens, table.to("meta")), "block_table must be on the device of q, cpu"


@pytest.mark.parametrize("args, sentence", list(bad_tensors()))
def test_tensor_rules(args, sentence):
    op = MHADecodePagedWithKVCacheFwdOp(4)
    with pytest.raises(ValueError, match=f"mha_decode_paged_fwd: {sentence}"):
        op(*args)
    if "device" not in sentence:
        with pytest.raises(ValueError, match=f"mha_decode_paged_fwd: {sentence}"):
            op(*(x.to("meta") for x in args))


def test_a_non_tensor_is_a_type_error():
    q, k, v, lens, table = inputs()
    with pytest.raises(TypeError, match="block_table must be a torch.Tensor, got list"):
        MHADecodePagedWithKVCacheFwdOp(4)(q, k, v, lens, table.tolist())
