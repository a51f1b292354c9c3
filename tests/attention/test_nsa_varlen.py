"""Attention over selected blocks beyond the shared harness: laws, poison, refusals."""

import copy
import pickle

import numpy as np
import pytest
import torch

import tileops
from ops_registry.accuracy import FORWARD
from ops_registry.errors import GradientError
from tests import checks, oracle
from tests.cases import nsa_packing
from tileops.attention import GQAVarlenFwdOp, NSATopKVarlenFwdOp, NSAVarlenFwdOp

BF16, F16 = torch.bfloat16, torch.float16
INF, NAN = float("inf"), float("nan")


def inputs(lens=(9, 0, 21), bs=4, h=4, h_kv=2, d=16, slots=5, dtype=F16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    packing = nsa_packing(list(lens), bs)
    tokens = sum(lens)
    shapes = (tokens, h, d), (tokens, h_kv, d), (tokens, h_kv, d)
    q, k, v = (torch.randn(*s, generator=generator).to(dtype) for s in shapes)
    most = max([0, *lens]) // bs + 2
    blocks = torch.randint(-1, most, (tokens, h_kv, slots), generator=generator)
    counts = torch.randint(-1, slots + 3, (tokens, h_kv), generator=generator)
    metadata = packing["offsets"], packing["token_indices"]
    return q, k, v, blocks.to(torch.int32), counts.to(torch.int32), *metadata


def check(args, is_causal, scale, bs):
    o = NSAVarlenFwdOp(is_causal, scale, bs)(*args)
    expected = oracle.nsa_fwd(*args[:6], is_causal, scale, bs)
    checks.assert_close(o, expected, FORWARD[o.dtype], "o")
    return o


# --------------------------------------------------------------------------------- values


@pytest.mark.parametrize("seed", range(20))
def test_random_calls(seed):
    draw = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=draw))]

    lens = [pick(0, 1, 2, 17, 65) for _ in range(pick(0, 1, 3, 5))]
    bs, h_kv, g = pick(1, 3, 8, 64, 500), pick(1, 2, 3), pick(1, 3, 5)
    args = inputs(
        lens, bs, h_kv * g, h_kv, pick(8, 20, 64), pick(0, 1, 7, 40), pick(F16, BF16), seed
    )
    check(args, pick(True, False), pick(0.05, 0.3, 2.0), bs)


@pytest.mark.parametrize("h, h_kv", [(71, 1), (7, 7), (48, 16)])
def test_groups(h, h_kv):
    check(inputs(h=h, h_kv=h_kv), True, 0.25, 4)


def test_wide_heads():
    check(inputs(d=576), True, 0.05, 4)


@pytest.mark.parametrize("is_causal", [True, False])
def test_all_blocks_selected_is_dense_attention(is_causal):
    lens, bs = (33, 0, 70), 8
    q, k, v, _, _, offsets, tokens = inputs(lens, bs)
    order = torch.randperm(9)
    blocks = order.to(torch.int32).expand(len(q), 2, 9).contiguous()
    counts = torch.full((len(q), 2), 9, dtype=torch.int32)
    o = NSAVarlenFwdOp(is_causal, 0.25, bs)(q, k, v, blocks, counts, offsets, tokens)
    dense = GQAVarlenFwdOp(is_causal=is_causal, sm_scale=0.25)(q, k, v, offsets, offsets)
    checks.assert_close(o, dense, FORWARD[F16])


def test_after_selection():
    lens, bs = (70, 33), 8
    packing = nsa_packing(list(lens), bs)
    q, k, v, *_ = inputs(lens, bs)
    k_cmp = torch.cat(
        [
            torch.stack([c.float().mean(0) for c in request.split(bs)])
            for request in k.split(list(lens))
        ]
    ).to(F16)
    ids = NSATopKVarlenFwdOp(0.25, 4, bs)(q, k_cmp, *packing.values())
    counts = torch.full((len(q), 2), 4, dtype=torch.int32)
    check((q, k, v, ids, counts, packing["offsets"], packing["token_indices"]), True, 0.25, bs)


def test_a_repeated_block_counts_per_occurrence():
    q, k, v, _, _, offsets, tokens = inputs((12,), h=1, h_kv=1)
    blocks = torch.tensor([0, 1, 0], dtype=torch.int32).expand(12, 1, 3).contiguous()
    counts = torch.full((12, 1), 3, dtype=torch.int32)
    o = check((q, k, v, blocks, counts, offsets, tokens), False, 0.25, 4)
    once = NSAVarlenFwdOp(False, 0.25, 4)(q, k, v, blocks, counts - 1, offsets, tokens)
    assert (o - once).abs().max() > 1e-2


def test_counts_are_cut_to_the_slots():
    q, k, v, blocks, _, offsets, tokens = inputs()
    op = NSAVarlenFwdOp(True, 0.25, 4)
    few, many = (torch.full((len(q), 2), n, dtype=torch.int32) for n in (-(2**31), 2**31 - 1))
    assert (op(q, k, v, blocks, few, offsets, tokens) == 0).all()
    all_slots = torch.full((len(q), 2), 5, dtype=torch.int32)
    expected = op(q, k, v, blocks, all_slots, offsets, tokens)
    assert torch.equal(op(q, k, v, blocks, many, offsets, tokens), expected)


def test_sentinels_and_slots_past_the_count_contribute_nothing():
    q, k, v, blocks, _, offsets, tokens = inputs()
    op = NSAVarlenFwdOp(True, 0.25, 4)
    for dead in (-1, -(2**31), 30, 2**29, 2**30, 2**31 - 1):
        sentinels = torch.full_like(blocks, dead)
        counts = torch.full((len(q), 2), 5, dtype=torch.int32)
        assert (op(q, k, v, sentinels, counts, offsets, tokens) == 0).all()
        counts = torch.full((len(q), 2), 3, dtype=torch.int32)
        expected = op(q, k, v, blocks, counts, offsets, tokens)
        changed = blocks.clone()
        changed[..., 3:] = dead
        assert torch.equal(op(q, k, v, changed, counts, offsets, tokens), expected)
        changed = torch.cat([sentinels, blocks[..., :3]], -1)
        o = op(q, k, v, changed, counts + 5, offsets, tokens)
        torch.testing.assert_close(o, expected)


@pytest.mark.parametrize("bs", [2**20, 2**31, 2**62])
def test_a_block_larger_than_every_request(bs):
    q, k, v, *_, offsets, tokens = inputs()
    blocks = torch.tensor([2**31 - 1, 0, 1], dtype=torch.int32).expand(len(q), 2, 3).contiguous()
    counts = torch.full((len(q), 2), 3, dtype=torch.int32)
    o = NSAVarlenFwdOp(True, 0.25, bs)(q, k, v, blocks, counts, offsets, tokens)
    dense = GQAVarlenFwdOp(sm_scale=0.25)(q, k, v, offsets, offsets)
    checks.assert_close(o, dense, FORWARD[F16])


def test_unselected_keys_neighbours_and_padding_rows_do_not_leak():
    q, k, v, _, _, offsets, tokens = inputs((9, 5, 16))
    blocks = torch.tensor([1, 0], dtype=torch.int32).expand(len(q), 2, 2).contiguous()
    counts = torch.full((len(q), 2), 1, dtype=torch.int32)
    op = NSAVarlenFwdOp(True, 0.25, 4)
    before = op(q, k, v, blocks, counts, offsets, tokens)
    selected = torch.zeros(len(q), dtype=torch.bool)
    selected[[4, 5, 6, 7, 13, 18, 19, 20, 21]] = True
    for poison in (NAN, INF):
        k[~selected], v[~selected] = poison, poison
        assert torch.equal(op(q, k, v, blocks, counts, offsets, tokens), before)
    padded = offsets.clone()
    padded[-1] = 25
    o = op(q, k, v, blocks, counts, padded, tokens)
    assert torch.equal(o[:25], before[:25])
    assert (o[25:] == 0).all()


def test_causal_and_not():
    args = inputs()
    assert not torch.equal(check(args, True, 0.25, 4), check(args, False, 0.25, 4))


@pytest.mark.parametrize("lens", [(), (0,), (0, 0)])
def test_nothing_to_do(lens):
    assert NSAVarlenFwdOp(True, 1.0, 4)(*inputs(lens)).shape == (0, 4, 16)


def test_no_query_heads():
    assert NSAVarlenFwdOp(True, 1.0, 4)(*inputs(h=0)).shape == (30, 0, 16)


def test_bad_offsets_stay_inside_memory():
    q, k, v, blocks, counts, offsets, tokens = inputs()
    blocks.zero_()
    counts.fill_(5)
    op = NSAVarlenFwdOp(False, 1.0, 4)
    for bad in ([-8, 9, 9, 30], [0, 9, 9, 5], [-(2**31), 0, 0, 2**31 - 1], [40, 50, 60, 70]):
        try:
            o = op(q, k, v, blocks, counts, torch.tensor(bad, dtype=torch.int32), tokens)
        except IndexError:
            continue
        assert o.isfinite().all()
    blocks.fill_(5)
    with pytest.raises(IndexError):
        op(q, k, v, blocks, counts, torch.tensor([0, 9, 9, 99], dtype=torch.int32), tokens)


def test_autocast_does_not_change_the_arithmetic():
    args = inputs()
    op = NSAVarlenFwdOp(True, 0.25, 4)
    expected = op(*args)
    with torch.autocast("cpu", BF16):
        assert torch.equal(op(*args), expected)


# ------------------------------------------------------------------------------- gradients


def test_a_gradient_is_refused_when_it_is_executed():
    args = inputs()
    args[1].requires_grad_()
    op = NSAVarlenFwdOp(True, 0.25, 4)
    for fn in (op, torch.compile(op, fullgraph=True)):
        o = fn(*args)
        with pytest.raises(GradientError, match="nsa_varlen_fwd has no gradient"):
            o.sum().backward()


# -------------------------------------------------------------------------------- refusals


def rules():
    q, k, v, blocks, counts, offsets, tokens = inputs()
    rest = blocks, counts, offsets, tokens
    yield (q[0], k, v, *rest), r"q must have shape \[T, H, D\]"
    yield (q[..., :8], k, v, *rest), "k must have shape .* with T=30, H_kv=2, D=8"
    yield (q, k[:9], v, *rest), "k must have shape .* with T=30"
    yield (q, k, v[:, :1], *rest), "v must have shape .* with T=30, H_kv=2"
    yield (q, k, v, blocks[:, :1], *rest[1:]), "block_indices must have shape"
    yield (q, k, v, blocks[0], *rest[1:]), "block_indices must have shape"
    yield (q, k, v, blocks, counts[:, :1], offsets, tokens), "block_counts must have shape"
    yield (q, k, v, blocks, counts, offsets[:0], tokens), r"offsets must have shape \[N\+1\]"
    yield (q, k, v, blocks, counts, offsets, tokens[:3]), "token_indices must have shape"
    yield (q[..., :0], k[..., :0], v[..., :0], *rest), "q must have D > 0, got 0"
    yield (q.float(), k, v, *rest), "q must be float16 or bfloat16, got float32"
    yield (q, k.bfloat16(), v, *rest), "k must have the dtype of q"
    yield (q, k, v.bfloat16(), *rest), "v must have the dtype of q"
    yield (q, k, v, blocks.long(), *rest[1:]), "block_indices must be int32, got int64"
    yield (q, k, v, blocks, counts.long(), offsets, tokens), "block_counts must be int32"
    yield (q, k, v, blocks, counts, offsets.long(), tokens), "offsets must be int32"
    yield (q, k, v, blocks, counts, offsets, tokens.long()), "token_indices must be int32"
    yield (q[:, :3], k, v, *rest), "k must have a number of heads that divides the 3 query heads"
    none = k[:, :0], v[:, :0], blocks[:, :0], counts[:, :0]
    yield (q, *none, offsets, tokens), "k must have a number of heads"


@pytest.mark.parametrize("tensors, sentence", list(rules()))
def test_tensor_rules(tensors, sentence):
    op = NSAVarlenFwdOp(True, 0.25, 4)
    with pytest.raises(ValueError, match=f"nsa_varlen_fwd: {sentence}"):
        op(*tensors)
    with pytest.raises(ValueError, match=f"nsa_varlen_fwd: {sentence}"):
        op(*(x.to("meta") for x in tensors))


def test_devices_must_agree():
    args = inputs()
    with pytest.raises(ValueError, match="k must be on the device of q, cpu, got meta"):
        NSAVarlenFwdOp(True, 0.25, 4)(args[0], args[1].to("meta"), *args[2:])


@pytest.mark.parametrize(
    "options, sentence",
    [
        ((True, 0.0, 4), "scale must be finite and > 0, got 0"),
        ((True, NAN, 4), "scale must be finite and > 0, got nan"),
        ((False, 1.0, 0), "block_size must be a positive integer, got 0"),
    ],
)
def test_parameter_rules(options, sentence):
    with pytest.raises(ValueError, match=f"nsa_varlen_fwd: {sentence}"):
        NSAVarlenFwdOp(*options)
    with pytest.raises(ValueError, match=f"nsa_varlen_fwd: {sentence}"):
        torch.ops.tileops.nsa_varlen_fwd(*inputs(), *options)


def test_parameter_types():
    assert NSAVarlenFwdOp(True, np.float64(0.5), np.int32(3)).options() == (True, 0.5, 3)
    with pytest.raises(TypeError, match="is_causal must be a bool, got int 1"):
        NSAVarlenFwdOp(1, 1.0, 4)
    with pytest.raises(TypeError, match="block_size must be an integer, got a bool"):
        NSAVarlenFwdOp(True, 1.0, True)
    args = inputs()
    with pytest.raises(TypeError, match="v must be a torch.Tensor, got NoneType"):
        NSAVarlenFwdOp(True, 1.0, 4)(*args[:2], None, *args[3:])


def test_the_object():
    op = NSAVarlenFwdOp(True, 0.25, 4)
    assert repr(op) == "NSAVarlenFwdOp(is_causal=True, scale=0.25, block_size=4)"
    args = inputs()
    for other in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert torch.equal(other(*args), op(*args))
    assert "builtin/reference: serves" in tileops.explain(op, *args)
