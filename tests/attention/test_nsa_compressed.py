"""Compressed attention beyond the shared harness: laws, poison, refusals."""

import copy
import pickle

import numpy as np
import pytest
import torch

import tileops
from ops_registry.accuracy import FORWARD, LSE
from ops_registry.errors import GradientError
from tests import checks, oracle
from tests.cases import nsa_packing
from tileops.attention import NSACompressedVarlenFwdOp

BF16, F16 = torch.bfloat16, torch.float16
INF, NAN = float("inf"), float("nan")


def inputs(lens=(9, 0, 5), bs=4, h=4, h_kv=2, dk=16, dv=8, dtype=F16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    packing = nsa_packing(list(lens), bs)
    chunks = int(packing["chunk_offsets"][-1])
    shapes = (sum(lens), h, dk), (chunks, h_kv, dk), (chunks, h_kv, dv)
    return (*(torch.randn(*s, generator=generator).to(dtype) for s in shapes), *packing.values())


def check(args, scale, bs):
    o, lse = NSACompressedVarlenFwdOp(scale, bs)(*args)
    expected = oracle.nsa_compressed_fwd(*args[:5], scale, bs)
    checks.assert_close(o, expected[0], FORWARD[o.dtype], "o")
    checks.assert_close(lse, expected[1], LSE[o.dtype], "lse")
    return o, lse


# --------------------------------------------------------------------------------- values


@pytest.mark.parametrize("seed", range(20))
def test_random_calls(seed):
    draw = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=draw))]

    lens = [pick(0, 1, 2, 17, 65, 130) for _ in range(pick(0, 1, 3, 6))]
    bs, h_kv, g = pick(1, 3, 8, 64, 500), pick(1, 2, 3), pick(1, 3, 5)
    dims = pick(8, 20, 64), pick(1, 24, 65)
    args = inputs(lens, bs, h_kv * g, h_kv, *dims, pick(F16, BF16), seed)
    check(args, pick(0.05, 0.3, 2.0), bs)


@pytest.mark.parametrize("h, h_kv", [(71, 1), (7, 7), (48, 16)])
def test_groups(h, h_kv):
    check(inputs(h=h, h_kv=h_kv), 0.25, 4)


def test_more_chunks_than_a_block_holds():
    check(inputs((700,), 1, 2, 1), 0.25, 1)


def test_tokens_before_the_first_closed_chunk():
    o, lse = check(inputs((9, 3)), 0.25, 4)
    none = [0, 1, 2, 9, 10, 11]
    assert (o[none] == 0).all()
    assert (lse[:, none] == -INF).all()
    assert lse[:, 3:9].isfinite().all()


def test_the_lse_is_a_natural_logarithm():
    args = inputs((8,), 1)
    args[0].zero_()
    _, lse = NSACompressedVarlenFwdOp(1.0, 1)(*args)
    torch.testing.assert_close(lse[0], torch.arange(1, 9).float().log())


def test_each_request_stands_alone():
    lens, bs = (64, 96, 32), 16
    q, k, v, offsets, chunk_offsets, tokens = inputs(lens, bs)
    op = NSACompressedVarlenFwdOp(0.25, bs)
    o, lse = op(q, k, v, offsets, chunk_offsets, tokens)
    for n, length in enumerate(lens):
        rows = slice(offsets[n], offsets[n + 1])
        chunks = slice(chunk_offsets[n], chunk_offsets[n + 1])
        alone = op(q[rows], k[chunks], v[chunks], *nsa_packing([length], bs).values())
        torch.testing.assert_close(o[rows], alone[0])
        torch.testing.assert_close(lse[:, rows], alone[1])


def test_open_chunks_neighbours_and_padding_rows_do_not_leak():
    q, k, v, offsets, chunk_offsets, tokens = inputs((9, 5, 6))
    op = NSACompressedVarlenFwdOp(0.25, 4)
    before = op(q, k, v, offsets, chunk_offsets, tokens)
    for poison in (NAN, INF):
        # Chunks 2, 4 and 6 are the open ones of the three requests.
        k[[2, 4, 6]], v[[2, 4, 6]] = poison, poison
        after = op(q, k, v, offsets, chunk_offsets, tokens)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    k[3], v[3] = NAN, NAN
    o, lse = op(q, k, v, offsets, chunk_offsets, tokens)
    assert torch.equal(o[:9], before[0][:9])
    assert torch.equal(o[14:], before[0][14:])
    padded = offsets.clone()
    padded[-1] = 16
    o, lse = op(q, k, v, padded, chunk_offsets, tokens)
    assert (o[16:] == 0).all()
    assert (lse[:, 16:] == -INF).all()


@pytest.mark.parametrize("lens", [(), (0,), (0, 0)])
def test_nothing_to_do(lens):
    o, lse = NSACompressedVarlenFwdOp(1.0, 4)(*inputs(lens))
    assert o.shape == (0, 4, 8)
    assert lse.shape == (4, 0)


def test_no_query_heads():
    o, lse = NSACompressedVarlenFwdOp(1.0, 4)(*inputs(h=0))
    assert o.shape == (14, 0, 8)
    assert lse.shape == (0, 14)


def test_bad_metadata_stays_inside_memory():
    q, k, v, offsets, chunk_offsets, tokens = inputs()
    for bad in ([-2, 3, 3, 5], [100, 200, 200, 300], [-(2**31), 0, 0, 0]):
        with pytest.raises(IndexError):
            NSACompressedVarlenFwdOp(1.0, 4)(
                q, k, v, offsets, torch.tensor(bad, dtype=torch.int32), tokens
            )


def test_autocast_does_not_change_the_arithmetic():
    args = inputs(dtype=F16)
    op = NSACompressedVarlenFwdOp(0.25, 4)
    expected = op(*args)
    with torch.autocast("cpu", torch.bfloat16):
        got = op(*args)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# ------------------------------------------------------------------------------- gradients


def test_a_gradient_is_refused_when_it_is_executed():
    args = inputs()
    args[0].requires_grad_()
    op = NSACompressedVarlenFwdOp(0.25, 4)
    for fn in (op, torch.compile(op, fullgraph=True)):
        o, _ = fn(*args)
        with pytest.raises(GradientError, match="nsa_compressed_fwd has no gradient"):
            o.sum().backward()


# -------------------------------------------------------------------------------- refusals


def rules():
    q, k, v, offsets, chunks, tokens = inputs()
    yield (q[None], k, v, offsets, chunks, tokens), r"q must have shape \[T, H, DK\]"
    yield (q[..., :8], k, v, offsets, chunks, tokens), "k_cmp must have shape .* with"
    yield (q, k, v[:3], offsets, chunks, tokens), "v_cmp must have shape .* with C=5, H_kv=2"
    yield (q, k, v[:, :1], offsets, chunks, tokens), "v_cmp must have shape"
    yield (q, k, v, offsets[:0], chunks, tokens), r"offsets must have shape \[N\+1\]"
    yield (q, k, v, offsets, chunks[:2], tokens), "chunk_offsets must have shape .* with N=3"
    yield (q, k, v, offsets, chunks, tokens[:3]), "token_indices must have shape .* with T=14"
    yield (q, k, v, offsets, chunks, tokens[:, :1]), "token_indices must have shape"
    yield (q[..., :0], k[..., :0], v, offsets, chunks, tokens), "q must have DK > 0, got 0"
    yield (q, k, v[..., :0], offsets, chunks, tokens), "v_cmp must have DV > 0, got 0"
    yield (q.float(), k, v, offsets, chunks, tokens), "q must be float16 or bfloat16, got float32"
    yield (q, k.bfloat16(), v, offsets, chunks, tokens), "k_cmp must have the dtype of q"
    yield (q, k, v.bfloat16(), offsets, chunks, tokens), "v_cmp must have the dtype of q"
    yield (q, k, v, offsets.long(), chunks, tokens), "offsets must be int32, got int64"
    yield (q, k, v, offsets, chunks.long(), tokens), "chunk_offsets must be int32, got int64"
    yield (q, k, v, offsets, chunks, tokens.long()), "token_indices must be int32, got int64"
    yield (q[:, :3], k, v, offsets, chunks, tokens), "k_cmp must have a number of heads"
    yield (q, k[:, :0], v[:, :0], offsets, chunks, tokens), "k_cmp must have a number of heads"


@pytest.mark.parametrize("tensors, sentence", list(rules()))
def test_tensor_rules(tensors, sentence):
    op = NSACompressedVarlenFwdOp(0.25, 4)
    with pytest.raises(ValueError, match=f"nsa_compressed_fwd: {sentence}"):
        op(*tensors)
    with pytest.raises(ValueError, match=f"nsa_compressed_fwd: {sentence}"):
        op(*(x.to("meta") for x in tensors))


def test_devices_must_agree():
    args = inputs()
    with pytest.raises(ValueError, match="k_cmp must be on the device of q, cpu, got meta"):
        NSACompressedVarlenFwdOp(0.25, 4)(args[0], args[1].to("meta"), *args[2:])


@pytest.mark.parametrize(
    "scale, bs, sentence",
    [
        (0.0, 4, "scale must be finite and > 0, got 0"),
        (-1.0, 4, "scale must be finite and > 0"),
        (INF, 4, "scale must be finite and > 0, got inf"),
        (NAN, 4, "scale must be finite and > 0, got nan"),
        (1.0, 0, "bs must be a positive integer, got 0"),
        (1.0, -4, "bs must be a positive integer, got -4"),
    ],
)
def test_parameter_rules(scale, bs, sentence):
    with pytest.raises(ValueError, match=f"nsa_compressed_fwd: {sentence}"):
        NSACompressedVarlenFwdOp(scale, bs)
    with pytest.raises(ValueError, match=f"nsa_compressed_fwd: {sentence}"):
        torch.ops.tileops.nsa_compressed_fwd(*inputs(), scale, bs)


def test_parameter_types():
    assert NSACompressedVarlenFwdOp(np.float32(0.5), np.int64(4)).options() == (0.5, 4)
    for bad in (dict(scale="1", bs=4), dict(scale=True, bs=4), dict(scale=1.0, bs=True)):
        with pytest.raises(TypeError, match="nsa_compressed_fwd: "):
            NSACompressedVarlenFwdOp(**bad)
    with pytest.raises(TypeError, match=r"bs must be an integer, got float 4\.0"):
        NSACompressedVarlenFwdOp(1.0, 4.0)
    with pytest.raises(TypeError, match="k_cmp must be a torch.Tensor, got NoneType"):
        NSACompressedVarlenFwdOp(1.0, 4)(inputs()[0], None, *inputs()[2:])
    with pytest.raises(ValueError, match="target must be None or one of"):
        NSACompressedVarlenFwdOp(1.0, 4, target="nowhere")


def test_the_object():
    op = NSACompressedVarlenFwdOp(0.25, 4)
    assert repr(op) == "NSACompressedVarlenFwdOp(scale=0.25, bs=4)"
    args = inputs()
    for other in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert torch.equal(other(*args)[0], op(*args)[0])
    assert "builtin/reference: serves" in tileops.explain(op, *args)
