"""Block selection beyond the shared harness: admissible answers, laws, poison, refusals."""

import copy
import pickle

import numpy as np
import pytest
import torch

import tileops
from ops_registry.errors import GradientError
from tests import oracle
from tests.cases import nsa_packing
from tileops.attention import NSATopKVarlenFwdOp

BF16, F16 = torch.bfloat16, torch.float16
INF, NAN = float("inf"), float("nan")


def inputs(lens=(9, 0, 21), bs=4, h=4, h_kv=2, d=16, dtype=F16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    packing = nsa_packing(list(lens), bs)
    shapes = (sum(lens), h, d), (int(packing["chunk_offsets"][-1]), h_kv, d)
    return (*(torch.randn(*s, generator=generator).to(dtype) for s in shapes), *packing.values())


def check(args, scale, selected, bs, fn=None):
    ids = (NSATopKVarlenFwdOp(scale, selected, bs) if fn is None else fn)(*args)
    assert ids.dtype == torch.int32
    assert ids.shape == (args[0].shape[0], args[1].shape[1], selected)
    oracle.check_nsa_topk(ids, oracle.nsa_topk_scores(*args[:4], scale, bs))
    return ids


# --------------------------------------------------------------------------------- values


@pytest.mark.parametrize("seed", range(20))
def test_random_calls(seed):
    draw = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=draw))]

    lens = [pick(0, 1, 2, 17, 65, 130) for _ in range(pick(0, 1, 3, 5))]
    bs, h_kv, g = pick(1, 3, 8, 64, 500), pick(1, 2, 3), pick(1, 3, 5)
    args = inputs(lens, bs, h_kv * g, h_kv, pick(8, 20, 64), pick(F16, BF16), seed)
    check(args, pick(0.05, 0.3, 2.0), pick(1, 2, 3, 16, 40), bs)


def test_compiled():
    args = inputs(dtype=BF16)
    op = NSATopKVarlenFwdOp(0.3, 4, 4)
    ids = check(args, 0.3, 4, 4, torch.compile(op, fullgraph=True, dynamic=True))
    assert torch.equal(ids, op(*args))


@pytest.mark.parametrize("h, h_kv", [(71, 1), (7, 7), (48, 16)])
def test_groups(h, h_kv):
    check(inputs(h=h, h_kv=h_kv), 0.25, 3, 4)


def test_more_blocks_than_are_scored_at_once():
    check(inputs((700,), 1, 2, 1), 0.25, 5, 1)


def test_a_short_request_fills_up_with_minus_one():
    ids = check(inputs((40,), 32), 0.25, 16, 32)
    assert (ids[:32] == torch.tensor([0] + [-1] * 15)).all()
    assert (ids[32:] == torch.tensor([0, 1] + [-1] * 14)).all()


def test_first_previous_and_current_block_come_first():
    ids = check(inputs((90,), 4, d=64), 3.0, 5, 4)
    for t in range(12, 90):
        current = t // 4
        assert set(ids[t, 0, :3].tolist()) == {0, current - 1, current}


def test_equal_scores_keep_the_lower_id():
    args = inputs((40,), 4)
    args[0].zero_()
    ids = NSATopKVarlenFwdOp(1.0, 6, 4)(*args)
    assert (ids[39] == torch.tensor([0, 8, 9, 1, 2, 3])).all()


def test_the_scaled_query_is_rounded_before_the_product():
    args = inputs((200,), 4, h=16, h_kv=1, d=64, dtype=BF16)
    wide = oracle.nsa_topk(args[0].double(), *args[1:4], 1 / 3, 8, 4)
    rounded = oracle.nsa_topk(*args[:4], 1 / 3, 8, 4)
    assert not torch.equal(wide, rounded)
    assert torch.equal(NSATopKVarlenFwdOp(1 / 3, 8, 4)(*args), rounded)


def test_each_request_stands_alone():
    lens, bs = (64, 96, 32), 16
    q, k, offsets, chunk_offsets, tokens = inputs(lens, bs)
    op = NSATopKVarlenFwdOp(0.25, 4, bs)
    ids = op(q, k, offsets, chunk_offsets, tokens)
    for n, length in enumerate(lens):
        rows = slice(offsets[n], offsets[n + 1])
        chunks = slice(chunk_offsets[n], chunk_offsets[n + 1])
        alone = op(q[rows], k[chunks], *nsa_packing([length], bs).values())
        assert torch.equal(ids[rows], alone)


def test_open_chunks_neighbours_and_padding_rows_do_not_leak():
    q, k, offsets, chunk_offsets, tokens = inputs((9, 5, 6))
    op = NSATopKVarlenFwdOp(0.25, 3, 4)
    before = op(q, k, offsets, chunk_offsets, tokens)
    for poison in (NAN, INF):
        # Chunks 2, 4 and 6 are the open ones of the three requests.
        k[[2, 4, 6]] = poison
        assert torch.equal(op(q, k, offsets, chunk_offsets, tokens), before)
    padded = offsets.clone()
    padded[-1] = 16
    ids = op(q, k, padded, chunk_offsets, tokens)
    assert torch.equal(ids[:16], before[:16])
    assert (ids[16:] == -1).all()


@pytest.mark.parametrize("lens", [(), (0,), (0, 0)])
def test_nothing_to_do(lens):
    assert NSATopKVarlenFwdOp(1.0, 3, 4)(*inputs(lens)).shape == (0, 2, 3)


def test_no_query_heads():
    check(inputs(h=0), 1.0, 3, 4)


def test_bad_metadata_stays_inside_memory():
    q, k, offsets, chunk_offsets, tokens = inputs()
    op = NSATopKVarlenFwdOp(1.0, 3, 4)
    for bad in ([-2, 3, 3, 5], [100, 200, 200, 300], [-(2**31), 0, 0, 0]):
        with pytest.raises(IndexError):
            op(q, k, offsets, torch.tensor(bad, dtype=torch.int32), tokens)


# ------------------------------------------------------------------------------- gradients


def test_integers_carry_no_gradient():
    args = inputs()
    args[0].requires_grad_()
    op = NSATopKVarlenFwdOp(0.25, 3, 4)
    for fn in (op, torch.compile(op, fullgraph=True)):
        ids = fn(*args)
        assert not ids.is_floating_point()
        if ids.requires_grad:
            with pytest.raises((GradientError, RuntimeError)):
                ids.sum().backward()


# -------------------------------------------------------------------------------- refusals


def rules():
    q, k, offsets, chunks, tokens = inputs()
    yield (q[0], k, offsets, chunks, tokens), r"q must have shape \[T, H, D\]"
    yield (q[..., :8], k, offsets, chunks, tokens), "k_cmp must have shape .* with"
    yield (q, k, offsets[:0], chunks, tokens), r"offsets must have shape \[N\+1\]"
    yield (q, k, offsets, chunks[:2], tokens), "chunk_offsets must have shape .* with N=3"
    yield (q, k, offsets, chunks, tokens[:3]), "token_indices must have shape .* with T=30"
    yield (q, k, offsets, chunks, tokens[:, :1]), "token_indices must have shape"
    yield (q[..., :0], k[..., :0], offsets, chunks, tokens), "q must have D > 0, got 0"
    yield (q.float(), k, offsets, chunks, tokens), "q must be float16 or bfloat16, got float32"
    yield (q, k.bfloat16(), offsets, chunks, tokens), "k_cmp must have the dtype of q"
    yield (q, k, offsets.long(), chunks, tokens), "offsets must be int32, got int64"
    yield (q, k, offsets, chunks.long(), tokens), "chunk_offsets must be int32, got int64"
    yield (q, k, offsets, chunks, tokens.long()), "token_indices must be int32, got int64"
    yield (q[:, :3], k, offsets, chunks, tokens), "k_cmp must have a number of heads"
    yield (q, k[:, :0], offsets, chunks, tokens), "k_cmp must have a number of heads"


@pytest.mark.parametrize("tensors, sentence", list(rules()))
def test_tensor_rules(tensors, sentence):
    op = NSATopKVarlenFwdOp(0.25, 3, 4)
    with pytest.raises(ValueError, match=f"nsa_topk: {sentence}"):
        op(*tensors)
    with pytest.raises(ValueError, match=f"nsa_topk: {sentence}"):
        op(*(x.to("meta") for x in tensors))


def test_devices_must_agree():
    args = inputs()
    with pytest.raises(ValueError, match="k_cmp must be on the device of q, cpu, got meta"):
        NSATopKVarlenFwdOp(0.25, 3, 4)(args[0], args[1].to("meta"), *args[2:])


@pytest.mark.parametrize(
    "options, sentence",
    [
        ((0.0, 3, 4), "scale must be finite and > 0, got 0"),
        ((-INF, 3, 4), "scale must be finite and > 0, got -inf"),
        ((1.0, 0, 4), "selected_block_num must be a positive integer, got 0"),
        ((1.0, 3, -1), "bs must be a positive integer, got -1"),
    ],
)
def test_parameter_rules(options, sentence):
    with pytest.raises(ValueError, match=f"nsa_topk: {sentence}"):
        NSATopKVarlenFwdOp(*options)
    with pytest.raises(ValueError, match=f"nsa_topk: {sentence}"):
        torch.ops.tileops.nsa_topk(*inputs(), *options)


def test_parameter_types():
    op = NSATopKVarlenFwdOp(np.float64(0.5), np.int32(3), np.int64(4))
    assert op.options() == (0.5, 3, 4)
    assert [type(x) for x in op.options()] == [float, int, int]
    with pytest.raises(TypeError, match="selected_block_num must be an integer, got a bool"):
        NSATopKVarlenFwdOp(1.0, True, 4)
    with pytest.raises(TypeError, match="bs must be an integer, got str"):
        NSATopKVarlenFwdOp(1.0, 3, "4")
    with pytest.raises(TypeError, match="q must be a torch.Tensor, got list"):
        NSATopKVarlenFwdOp(1.0, 3, 4)([], *inputs()[1:])


def test_the_object():
    op = NSATopKVarlenFwdOp(0.25, 3, 4)
    assert repr(op) == "NSATopKVarlenFwdOp(scale=0.25, selected_block_num=3, bs=4)"
    args = inputs()
    for other in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert torch.equal(other(*args), op(*args))
    assert "builtin/reference: serves" in tileops.explain(op, *args)
