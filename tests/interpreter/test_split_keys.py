"""Parts of dense keys joined into one result, each part a request as on Hopper."""

import pytest
import torch

from ops_registry.accuracy import FORWARD, LSE
from tests import checks
from tests.interpreter.harness import doubled
from tileops.kernels.common.triton_gqa import join

F16, F32, F64 = torch.float16, torch.float32, torch.float64
BATCH, TOKENS, HEADS = 2, 5, 3


def attention(scores, v):
    """o [B, S_q, H, D] and lse [B, H, S_q] of scores [B, H, S_q, keys]; no key: 0 and -inf."""
    lse = scores.logsumexp(-1)
    weights = torch.where(lse.isinf()[..., None], 0, (scores - lse[..., None]).exp())
    return (weights @ v).transpose(1, 2), lse


def drawn(keys, dim, seen, seed):
    """Scores of rows that see `seen` of the keys, at most, and values."""
    generator = torch.Generator().manual_seed(seed)
    scores = 4 * torch.randn(BATCH, HEADS, TOKENS, keys, generator=generator, dtype=F64)
    first = torch.randint(0, keys, (BATCH, 1, TOKENS, 1), generator=generator)
    key = torch.arange(keys)
    scores.masked_fill_((key < first) | (key >= first + seen), float("-inf"))
    return scores, torch.randn(BATCH, HEADS, keys, dim, generator=generator, dtype=F64)


def parts_of(scores, v, splits, dtype):
    """Of even shares of the keys, as a request each writes them."""
    found = []
    for x in range(splits):
        begin, end = (scores.shape[-1] * n // splits for n in (x, x + 1))
        if begin == end:
            found.append((v.new_zeros(BATCH, TOKENS, HEADS, v.shape[-1]), _nothing(scores)))
        else:
            found.append(attention(scores[..., begin:end], v[..., begin:end, :]))
    o, lse = zip(*found, strict=True)
    return torch.cat(o).to(dtype), torch.cat(lse).to(F32)


def _nothing(scores):
    return torch.full(scores.shape[:-1], float("-inf"), dtype=F64)


def joined(parts, splits, sinks=None, with_lse=True, dim=64):
    o = parts[0].new_empty(BATCH * TOKENS, HEADS, dim)
    lse = torch.empty(BATCH, HEADS, TOKENS) if with_lse else None
    join(
        o, lse, *parts, sinks, BATCH * TOKENS, TOKENS, splits,
        packed=False, like_lse=True, at_once=8, warps=1,
    )  # fmt: skip
    return o.view(BATCH, TOKENS, HEADS, dim), lse


@pytest.mark.parametrize("dtype", [F16, torch.bfloat16])
@pytest.mark.parametrize("splits, keys", [(2, 100), (4, 90), (8, 300), (9, 300), (20, 12)])
@pytest.mark.parametrize("dim, seen", [(64, 1000), (128, 30)])
def test_parts_of_keys(dtype, splits, keys, dim, seen):
    """More parts than are joined at once, and parts that a row sees nothing of, or no row."""
    scores, v = drawn(keys, dim, seen, splits + dim)
    o, lse = joined(parts_of(scores, v, splits, dtype), splits, dim=dim)
    expected_o, expected_lse = attention(scores, v)
    checks.assert_close(o, expected_o, doubled(FORWARD[dtype]))
    checks.assert_close(lse, expected_lse, LSE[dtype])


@pytest.mark.parametrize("with_lse", [True, False])
def test_sinks_count_in_the_join_alone(with_lse):
    scores, v = drawn(200, 64, 50, 0)
    sinks = torch.tensor([1.5, float("-inf"), float("inf")])
    o, lse = joined(parts_of(scores, v, 3, F16), 3, sinks, with_lse)
    alone, expected_lse = attention(scores, v)
    share = 1 / (1 + (sinks.to(F64)[:, None] - expected_lse).exp())
    checks.assert_close(o, alone * share.transpose(1, 2)[..., None], FORWARD[F16])
    if lse is not None:
        checks.assert_close(lse, expected_lse, LSE[F16])


@pytest.mark.parametrize("sink", [None, 0.0, float("-inf")])
def test_rows_without_keys(sink):
    scores, v = drawn(64, 64, 1000, 0)
    scores[0, :, 2] = scores[1, 1] = float("-inf")
    sinks = None if sink is None else torch.full((HEADS,), sink)
    o, lse = joined(parts_of(scores, v, 4, F16), 4, sinks)
    empty = scores.isinf().all(-1)
    assert empty.sum() == HEADS + TOKENS and not o.transpose(1, 2)[empty].any()
    assert torch.equal(lse.isinf(), empty) and (lse[empty] < 0).all() and o.isfinite().all()
