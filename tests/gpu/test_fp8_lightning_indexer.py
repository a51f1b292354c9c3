"""The lightning indexer on CUDA tensors: tiles of every size, decoding, accuracy, addresses."""

import pytest
import torch

from ops_registry.accuracy import INDEXER, Tolerance
from ops_registry.attention.fp8_lightning_indexer import FP8_LIGHTNING_INDEXER
from ops_registry.contract import E4M3
from tests import checks, oracle

INDEX = FP8_LIGHTNING_INDEXER.op
BF16, F32 = torch.bfloat16, torch.float32
INF = float("inf")


def inputs(b, s, s_kv, h, g, d, kind, causal=False):
    """kind: "bf16", or e4m3 keys that are "scaled" or "plain"."""
    dtype = BF16 if kind == "bf16" else E4M3
    q, k = (torch.randn(shape).to(dtype) for shape in ((b, s, h, d), (b, s_kv, g, d)))
    if causal:
        start = torch.zeros(s, dtype=torch.int32)
        end = torch.arange(s_kv - s + 1, s_kv + 1, dtype=torch.int32)
    else:
        start = torch.randint(-2, s_kv + 1, (s,)).to(torch.int32)
        end = torch.randint(-1, s_kv + 3, (s,)).to(torch.int32)
    scale = torch.rand(b, s_kv, g) + 0.1 if kind == "scaled" else None
    return q, k, torch.randn(s, h), start, end, scale


def tolerance(wanted):
    """The bound of semantics: relative L2 of a case.

    e4m3 tensor cores keep fewer bits of a sum than float32, relative to its terms: where those
    of 64 heads cancel, an element is off by a share of the typical logit, not of its own.
    """
    finite = wanted[wanted > -INF]
    typical = finite.square().mean().sqrt().item() if finite.numel() else 0.0
    rel_l2 = INDEXER[F32].rel_l2
    return Tolerance(rel_l2, 10 * rel_l2 * typical, 10 * rel_l2)


def check(args):
    there = [None if x is None else x.cuda() for x in args]
    logits = INDEX(*there)
    wanted = oracle.fp8_lightning_indexer(*args)
    assert torch.equal(logits.cpu() == -INF, wanted == -INF)
    inside = logits > -INF
    checks.assert_close(logits.cpu(), wanted, tolerance(wanted), "logits")
    assert torch.equal(INDEX(*there, False)[inside], logits[inside])


@pytest.mark.parametrize("kind", ["bf16", "scaled", "plain"])
@pytest.mark.parametrize("h, g, d", [(64, 1, 128), (32, 1, 64), (64, 1, 64), (16, 1, 128)])
@pytest.mark.parametrize("s, s_kv", [(1, 3000), (3, 700), (70, 1025), (64, 2048)])
def test_models(h, g, d, s, s_kv, kind):
    check(inputs(1, s, s_kv, h, g, d, kind, causal=True))
    check(inputs(2, s, s_kv, h, g, d, kind))


@pytest.mark.parametrize("kind", ["bf16", "scaled"])
@pytest.mark.parametrize("h", [1, 2, 3, 7, 71, 130, 300])
@pytest.mark.parametrize("g", [1, 3])
def test_heads(h, g, kind):
    check(inputs(2, 21, 300, h * g, g, 48, kind))


@pytest.mark.parametrize("kind", ["bf16", "scaled"])
@pytest.mark.parametrize("d", [1, 8, 16, 20, 32, 80, 96, 200, 256, 257, 512, 576])
def test_dims(d, kind):
    check(inputs(2, 21, 300, 8, 2, d, kind))


def test_positive_weights_add_no_bias():
    """What tensor cores drop of a product is not dropped in one direction too often."""
    args = inputs(1, 64, 2048, 64, 1, 128, "scaled", causal=True)
    args = (args[0], args[1], args[2].abs(), *args[3:])
    logits = INDEX(*(x.cuda() for x in args)).cpu().double()
    wanted = oracle.fp8_lightning_indexer(*args)
    inside = wanted > -INF
    error = (logits - wanted)[inside].mean() / wanted[inside].mean()
    assert error.abs() < 1e-3, error


def test_logits_past_two_to_the_31():
    """More logits than 32 bits count."""
    s, s_kv = 40, 2**31 // 40 + 100
    args = [torch.ones(1, s, 1, 16).to(E4M3), torch.ones(1, s_kv, 1, 16).to(E4M3)]
    args += [torch.arange(s)[:, None].float(), torch.zeros(s), torch.full((s,), s_kv)]
    args = [x.cuda() if x.dtype in (E4M3, F32) else x.to("cuda", torch.int32) for x in args]
    args[3] = args[3].to(torch.int32)
    logits = INDEX(*args)[0, :, :, 0]
    wanted = 16 * torch.arange(s, device="cuda").float()
    assert (logits[:, 0] == wanted).all() and (logits[:, -1] == wanted).all()
    assert (logits[-1] == wanted[-1]).all()
