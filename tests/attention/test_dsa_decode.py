"""Attention over indexed cache rows beyond the shared harness: laws, poison, refusals."""

import copy
import pickle

import numpy as np
import pytest
import torch

import tileops
from ops_registry.accuracy import FORWARD
from ops_registry.errors import GradientError
from tests import checks, oracle
from tests.cases.dsa_decode import indices
from tileops.attention import DSADecodeWithKVCacheFwdOp, MLADecodeWithKVCacheFwdOp

BF16, F16 = torch.bfloat16, torch.float16
INF, NAN = float("inf"), float("nan")


def inputs(b=2, s=3, s_kv=20, h=4, h_kv=2, d=16, tail=8, slots=12, dtype=F16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (b, s, h, d + tail), (b, s_kv, h_kv, d + tail)
    q, kv = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    return q, kv, indices(generator, b, s, h_kv, s_kv, slots)


def check(args, *options):
    o = DSADecodeWithKVCacheFwdOp(*options)(*args)
    expected = oracle.dsa_decode_fwd(*args, *options)
    checks.assert_close(o, expected, FORWARD[o.dtype], "o")
    return o


# --------------------------------------------------------------------------------- values


@pytest.mark.parametrize("seed", range(20))
def test_random_calls(seed):
    draw = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=draw))]

    h_kv, g, tail = pick(1, 2, 3), pick(1, 3, 5), pick(0, 1, 8, 64)
    args = inputs(
        pick(0, 1, 3),
        pick(0, 1, 2, 17),
        pick(0, 1, 33, 200),
        h_kv * g,
        h_kv,
        pick(1, 20, 64),
        tail,
        pick(0, 1, 7, 300),
        pick(F16, BF16),
        seed,
    )
    options = pick(1, 2, 64), pick(0, 5, 100), pick(None, 0.3), pick(True, False)
    check(args, tail, *options)


@pytest.mark.parametrize("h, h_kv", [(71, 1), (7, 7), (48, 16)])
def test_groups(h, h_kv):
    check(inputs(h=h, h_kv=h_kv), 8, 1, 20)


def test_more_slots_than_a_block_holds():
    check(inputs(b=1, s=2, s_kv=3000, h=2, h_kv=1, slots=2500), 8, 1, 4000)


def test_deepseek_widths():
    check(inputs(b=1, s=2, s_kv=100, h=16, h_kv=1, d=512, tail=64, slots=64), 64, 1, 98)


@pytest.mark.parametrize("stride, start", [(1, 0), (4, 0), (4, 20), (7, 3), (1000, 0)])
def test_stride_and_start(stride, start):
    args = inputs(s=9, slots=24)
    o = check(args, 8, stride, start)
    hidden = [s for s in range(9) if start + s < stride - 1]
    assert (o[:, hidden] == 0).all()


@pytest.mark.parametrize("start, stride", [(2**63 - 1, 1), (2**40, 2**39), (0, 2**62)])
def test_huge_parameters_do_not_overflow(start, stride):
    args = inputs()
    o = check(args, 8, stride, start)
    assert (o == 0).all() == (start == 0)


def test_every_row_selected_is_multi_head_latent_attention():
    q, kv, _ = inputs(b=3, s=1, s_kv=40, h=6, h_kv=2)
    every = torch.arange(40, dtype=torch.int32).expand(3, 1, 2, 40).contiguous()
    o = DSADecodeWithKVCacheFwdOp(8, 1, 0, is_causal=False)(q, kv, every)
    dense = MLADecodeWithKVCacheFwdOp()(
        q[:, 0, :, :16].contiguous(),
        q[:, 0, :, 16:].contiguous(),
        kv[..., :16].contiguous(),
        kv[..., 16:].contiguous(),
    )
    checks.assert_close(o[:, 0], dense, FORWARD[F16])


def test_padding_of_every_kind():
    q, kv, _ = inputs()
    op = DSADecodeWithKVCacheFwdOp(8, 1, 100)
    live = torch.tensor([3, 17, 0], dtype=torch.int32).expand(2, 3, 2, 3)
    expected = op(q, kv, live.contiguous())
    for dead in (-1, 20, 2**30, 2**31 - 1, -(2**31)):
        pad = torch.full((2, 3, 2, 5), dead, dtype=torch.int32)
        torch.testing.assert_close(op(q, kv, torch.cat([live, pad], -1)), expected)
        torch.testing.assert_close(op(q, kv, torch.cat([pad, live], -1)), expected)
        assert (op(q, kv, pad) == 0).all()


def test_rows_that_no_slot_names_are_not_read():
    q, kv, _ = inputs()
    index = torch.tensor([3, -1, 17, 5, 20, 19], dtype=torch.int32).expand(2, 3, 2, 6).contiguous()
    op = DSADecodeWithKVCacheFwdOp(8, 1, 17)
    before = op(q, kv, index)
    unread = [i for i in range(20) if i not in (3, 5, 17, 19)]
    for poison in (NAN, INF):
        kv[:, unread] = poison
        assert torch.equal(op(q, kv, index), before)
    # Row 19 is live for the last query only.
    kv[:, 19] = NAN
    o = op(q, kv, index)
    assert torch.equal(o[:, :2], before[:, :2])


def test_the_tail_is_no_value():
    q, kv, index = inputs()
    o = DSADecodeWithKVCacheFwdOp(8, 1, 100)(q, kv, index)
    assert o.shape == (2, 3, 4, 16)
    q[..., 16:] = 0
    kv[..., 16:] = 7
    check((q, kv, index), 8, 1, 100)


def test_the_default_scale_is_that_of_the_whole_row():
    args = inputs()
    default = DSADecodeWithKVCacheFwdOp(8, 1, 100)(*args)
    assert torch.equal(default, DSADecodeWithKVCacheFwdOp(8, 1, 100, 24**-0.5)(*args))


@pytest.mark.parametrize("sizes", [dict(b=0), dict(s=0), dict(s_kv=0), dict(slots=0), dict(h=0)])
def test_nothing_to_do(sizes):
    args = inputs(**sizes)
    for is_causal in (True, False):
        o = DSADecodeWithKVCacheFwdOp(8, 1, 100, is_causal=is_causal)(*args)
        assert o.shape == (*args[0].shape[:3], 16)
        assert (o == 0).all()


def test_autocast_does_not_change_the_arithmetic():
    args = inputs()
    op = DSADecodeWithKVCacheFwdOp(8, 1, 100)
    expected = op(*args)
    with torch.autocast("cpu", BF16):
        assert torch.equal(op(*args), expected)


# ------------------------------------------------------------------------------- gradients


def test_a_gradient_is_refused_when_it_is_executed():
    args = inputs()
    args[1].requires_grad_()
    op = DSADecodeWithKVCacheFwdOp(8, 1, 100)
    for fn in (op, torch.compile(op, fullgraph=True)):
        o = fn(*args)
        with pytest.raises(GradientError, match="dsa_decode_fwd has no gradient"):
            o.sum().backward()


# -------------------------------------------------------------------------------- refusals


def rules():
    q, kv, index = inputs()
    yield (q[0], kv, index), r"q must have shape \[B, S, H, W\]"
    yield (q, kv[:1], index), r"kv must have shape \[B, S_kv, H_kv, W\] with B=2"
    yield (q, kv[..., :20], index), "kv must have shape"
    yield (q, kv, index[:, :, :1]), r"indices must have shape \[B, S, H_kv, K\] with B=2, S=3"
    yield (q, kv, index[:, :2]), "indices must have shape"
    yield (q, kv, index[..., 0]), "indices must have shape"
    yield (q.float(), kv, index), "q must be float16 or bfloat16, got float32"
    yield (q, kv.bfloat16(), index), "kv must have the dtype of q"
    yield (q, kv, index.long()), "indices must be int32, got int64"
    yield (q[:, :, :3], kv, index), "kv must have a number of heads that divides the 3 query heads"
    yield (q, kv[:, :, :0], index[:, :, :0]), "kv must have a number of heads"
    yield (
        (q[..., :8], kv[..., :8], index),
        "q must have a last extent W > dim_tail=8, got 8",
    )


@pytest.mark.parametrize("tensors, sentence", list(rules()))
def test_tensor_rules(tensors, sentence):
    op = DSADecodeWithKVCacheFwdOp(8, 1, 0)
    with pytest.raises(ValueError, match=f"dsa_decode_fwd: {sentence}"):
        op(*tensors)
    with pytest.raises(ValueError, match=f"dsa_decode_fwd: {sentence}"):
        op(*(x.to("meta") for x in tensors))


def test_devices_must_agree():
    q, kv, index = inputs()
    with pytest.raises(ValueError, match="kv must be on the device of q, cpu, got meta"):
        DSADecodeWithKVCacheFwdOp(8, 1, 0)(q, kv.to("meta"), index)


@pytest.mark.parametrize(
    "options, sentence",
    [
        ((-1, 1, 0), "dim_tail must be at least 0, got -1"),
        ((8, 0, 0), "stride_kv must be at least 1, got 0"),
        ((8, 1, -1), "q_start_index_s must be at least 0, got -1"),
        ((8, 1, 0, 0.0), "sm_scale must be finite and > 0, got 0"),
        ((8, 1, 0, INF), "sm_scale must be finite and > 0, got inf"),
    ],
)
def test_parameter_rules(options, sentence):
    with pytest.raises(ValueError, match=f"dsa_decode_fwd: {sentence}"):
        DSADecodeWithKVCacheFwdOp(*options)
    with pytest.raises(ValueError, match=f"dsa_decode_fwd: {sentence}"):
        torch.ops.tileops.dsa_decode_fwd(*inputs(), *options)


def test_parameter_types():
    op = DSADecodeWithKVCacheFwdOp(np.int64(8), np.int32(1), np.int16(0), np.float32(0.5))
    assert op.options() == (8, 1, 0, 0.5, True)
    with pytest.raises(TypeError, match="dim_tail must be an integer, got a bool"):
        DSADecodeWithKVCacheFwdOp(True, 1, 0)
    with pytest.raises(TypeError, match="stride_kv must be an integer, got float"):
        DSADecodeWithKVCacheFwdOp(8, 1.0, 0)
    with pytest.raises(TypeError, match="sm_scale must be a number, got str"):
        DSADecodeWithKVCacheFwdOp(8, 1, 0, "1")
    with pytest.raises(TypeError, match="is_causal must be a bool, got NoneType"):
        DSADecodeWithKVCacheFwdOp(8, 1, 0, None, None)
    with pytest.raises(TypeError, match="indices must be a torch.Tensor, got list"):
        DSADecodeWithKVCacheFwdOp(8, 1, 0)(*inputs()[:2], [0])


def test_the_object():
    op = DSADecodeWithKVCacheFwdOp(8, 1, 100)
    assert repr(op) == (
        "DSADecodeWithKVCacheFwdOp(dim_tail=8, stride_kv=1, q_start_index_s=100, sm_scale=None, "
        "is_causal=True)"
    )
    args = inputs()
    for other in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert torch.equal(other(*args), op(*args))
    assert "builtin/reference: serves" in tileops.explain(op, *args)
