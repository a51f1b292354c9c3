"""Latent decode beyond the shared harness: shapes, laws, layouts, refusals."""

import copy
import pickle

import pytest
import torch

from ops_registry.accuracy import FORWARD
from ops_registry.contract import BUILTIN_KERNELS
from ops_registry.errors import GradientError
from tests import checks, oracle
from tileops.attention import (
    DSADecodeWithKVCacheFwdOp,
    GQADenseFwdOp,
    MLADecodeWithKVCacheFwdOp,
)

BF16, F16 = torch.bfloat16, torch.float16


def inputs(b=2, n=9, h=4, h_kv=1, d=32, pe=8, dtype=F16, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = (b, h, d), (b, h, pe), (b, n, h_kv, d), (b, n, h_kv, pe)
    return tuple(torch.randn(*s, generator=draw).to(dtype) for s in shapes)


def check(args):
    o = MLADecodeWithKVCacheFwdOp()(*args)
    checks.assert_close(o, oracle.mla_decode_fwd(*args), FORWARD[o.dtype])
    return o


# --------------------------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("h, h_kv", [(1, 1), (16, 1), (64, 1), (128, 1), (71, 1), (6, 2), (5, 5)])
@pytest.mark.parametrize("n", [1, 63, 130])
def test_values(dtype, h, h_kv, n):
    check(inputs(n=n, h=h, h_kv=h_kv, dtype=dtype))


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("n", [1, 1025, 2049])
def test_the_deepseek_shape(dtype, n):
    check(inputs(2, n, 16, 1, 512, 64, dtype))


@pytest.mark.parametrize("d, pe", [(512, 0), (16, 0), (1, 1), (33, 7), (24, 64), (576, 64)])
def test_dims(d, pe):
    check(inputs(d=d, pe=pe, n=40, h_kv=2))


@pytest.mark.parametrize("h_kv, pe", [(1, 8), (2, 0)])
def test_the_reference_serves_the_same_calls(h_kv, pe):
    args = inputs(3, 70, 4, h_kv, 32, pe)
    op = MLADecodeWithKVCacheFwdOp()
    (reference,) = (k for k in BUILTIN_KERNELS["mla_decode_fwd"] if k.name == "reference")
    o = torch.empty_like(args[0])
    reference.run(o, op.contract.Call(*op.bound(*args)))
    checks.assert_close(o, oracle.mla_decode_fwd(*args), FORWARD[F16])


def test_large_logits_do_not_overflow():
    q, q_pe, k, k_pe = inputs(n=50)
    check((q * 200, q_pe, k * 20, k_pe))


def test_empty_calls():
    op = MLADecodeWithKVCacheFwdOp()
    assert (op(*inputs(n=0)) == 0).all()
    assert op(*inputs(b=0)).shape == (0, 4, 32)
    assert op(*inputs(b=0, n=0)).shape == (0, 4, 32)
    assert op(*inputs(h=0)).shape == (2, 0, 32)


# ----------------------------------------------------------------------- laws and layouts


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
def test_strided_inputs(layout):
    args = tuple(checks.relayout(x, layout) for x in inputs())
    o = MLADecodeWithKVCacheFwdOp()(*args)
    assert o.is_contiguous()
    assert torch.equal(o, MLADecodeWithKVCacheFwdOp()(*(x.contiguous() for x in args)))


def test_views_of_one_joint_cache():
    """The usual cache row is latent and rotated part side by side."""
    q, q_pe, k, k_pe = inputs()
    joint = torch.cat([k, k_pe], -1)
    o = MLADecodeWithKVCacheFwdOp()(q, q_pe, joint[..., :32], joint[..., 32:])
    assert torch.equal(o, MLADecodeWithKVCacheFwdOp()(q, q_pe, k, k_pe))


def test_without_a_rotated_part_it_is_dense_attention_with_k_as_v():
    q, q_pe, k, k_pe = inputs(pe=0, h_kv=2)
    dense = GQADenseFwdOp(is_causal=False)(q[:, None], k, k)[:, 0]
    assert torch.equal(MLADecodeWithKVCacheFwdOp()(q, q_pe, k, k_pe), dense)


def test_equals_the_sparse_operator_on_all_rows():
    q, q_pe, k, k_pe = inputs(h_kv=2)
    indices = torch.arange(9, dtype=torch.int32).expand(2, 1, 2, 9)
    sparse = DSADecodeWithKVCacheFwdOp(8, 1, 0, is_causal=False)
    o = sparse(torch.cat([q, q_pe], -1)[:, None], torch.cat([k, k_pe], -1), indices)
    checks.assert_close(
        MLADecodeWithKVCacheFwdOp()(q, q_pe, k, k_pe), o[:, 0].double(), FORWARD[F16]
    )


def test_requests_are_independent():
    args = inputs(b=3)
    whole = MLADecodeWithKVCacheFwdOp()(*args)
    for b in range(3):
        alone = MLADecodeWithKVCacheFwdOp()(*(x[b : b + 1] for x in args))
        assert torch.equal(whole[b], alone[0])


# ------------------------------------------------------------------- gradients and objects


@pytest.mark.parametrize("compiled", [False, True])
def test_backward_is_refused_in_words_when_it_runs(compiled):
    args, op = inputs(), MLADecodeWithKVCacheFwdOp()
    want = op(*args)
    fn = torch.compile(op, fullgraph=True) if compiled else op
    o = fn(*(x.requires_grad_() for x in args))
    assert torch.equal(o, want)
    with pytest.raises(GradientError, match="mla_decode_fwd has no gradient"):
        o.float().sum().backward()


def test_copies_give_the_same_result():
    op, args = MLADecodeWithKVCacheFwdOp(target="builtin"), inputs()
    want = op(*args)
    for other in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert torch.equal(other(*args), want)
    assert repr(op) == "MLADecodeWithKVCacheFwdOp(target='builtin')"


# ------------------------------------------------------------------------------- refusals


def bad_tensors():
    q, q_pe, k, k_pe = inputs()
    yield (q[None], q_pe, k, k_pe), r"q must have shape \[B, H, D\], got \[1, 2, 4, 32\]"
    yield (q, q_pe[:1], k, k_pe), r"q_pe must have shape \[B, H, PE\] with B=2, H=4"
    yield (q, q_pe, k[..., :8], k_pe), r"k must have shape \[B, N_kv, H_kv, D\] with .*D=32"
    yield (q, q_pe, k[:1], k_pe), r"k must have shape \[B, N_kv, H_kv, D\] with B=2"
    yield (q, q_pe, k, k_pe[:, :-1]), r"k_pe must have shape .* with B=2, N_kv=9, H_kv=1, PE=8"
    yield (q, q_pe, k, k_pe[..., :4]), r"k_pe must have shape .* with B=2, N_kv=9, H_kv=1, PE=8"
    yield (q[..., :0], q_pe, k[..., :0], k_pe), "q must have D > 0, got 0"
    yield (q, q_pe, k[:, :, :0], k_pe[:, :, :0]), "k must have a number of heads that divides"
    three = k.expand(-1, -1, 3, -1), k_pe.expand(-1, -1, 3, -1)
    yield (q, q_pe, *three), "k must have a number of heads that divides the 4 .* got 3"
    yield (q.float(), q_pe, k, k_pe), "q must be float16 or bfloat16, got float32"
    for i, name in ((1, "q_pe"), (2, "k"), (3, "k_pe")):
        args = [q, q_pe, k, k_pe]
        args[i] = args[i].bfloat16()
        yield tuple(args), f"{name} must have the dtype of q, float16, got bfloat16"
    yield (q, q_pe, k, k_pe.to("meta")), "k_pe must be on the device of q, cpu, got meta"


@pytest.mark.parametrize("args, sentence", list(bad_tensors()))
def test_tensor_rules(args, sentence):
    with pytest.raises(ValueError, match=f"mla_decode_fwd: {sentence}"):
        MLADecodeWithKVCacheFwdOp()(*args)
    if "device" not in sentence:
        with pytest.raises(ValueError, match=f"mla_decode_fwd: {sentence}"):
            MLADecodeWithKVCacheFwdOp()(*(x.to("meta") for x in args))


def test_a_non_tensor_is_a_type_error():
    q, q_pe, k, _ = inputs()
    with pytest.raises(TypeError, match="mla_decode_fwd: k_pe must be a torch.Tensor, got None"):
        MLADecodeWithKVCacheFwdOp()(q, q_pe, k, None)
