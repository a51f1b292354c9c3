"""The lightning indexer's kernel: heads, dims, windows, stretches of keys, quantization."""

import pytest
import torch

from ops_registry.accuracy import INDEXER
from ops_registry.attention.fp8_lightning_indexer import FP8_LIGHTNING_INDEXER
from ops_registry.contract import E4M3
from tests import checks, oracle
from tileops.kernels.common.machine import overriding

BF16, F32 = torch.bfloat16, torch.float32
INF, NAN = float("inf"), float("nan")
SMALL = {
    "BLOCK_M": 16, "COLUMNS": 16, "IMPRECISE": 0, "MOST": 48, "LEAST": 32,
    "programs": 1, "warps": 4, "stages": 1,
}  # fmt: skip


@pytest.fixture
def small():
    """Tiles so small that a call of few heads and keys takes many of them."""
    with overriding("fp8_lightning_indexer", SMALL):
        yield


@pytest.fixture
def indexer(target):
    def call(*args, clean=True):
        return FP8_LIGHTNING_INDEXER.op(*args, clean, target)

    return call


def inputs(b=2, s=5, s_kv=40, h=4, g=2, d=16, kind="scaled"):
    """kind: "bf16", or e4m3 keys that are "scaled" or "plain"."""
    dtype = BF16 if kind == "bf16" else E4M3
    q, k = (torch.randn(shape).to(dtype) for shape in ((b, s, h, d), (b, s_kv, g, d)))
    start = torch.randint(-2, s_kv + 1, (s,)).to(torch.int32)
    end = torch.randint(-1, s_kv + 3, (s,)).to(torch.int32)
    scale = torch.rand(b, s_kv, g) + 0.1 if kind == "scaled" else None
    return q, k, torch.randn(s, h), start, end, scale


def windows(args, start, end):
    """The same call with these windows."""
    made = [torch.tensor(x, dtype=torch.int32).expand(args[0].shape[1]) for x in (start, end)]
    return (*args[:3], *made, args[5])


def check(indexer, args):
    """Clean logits against the oracle; the others agree with them inside the windows."""
    logits = indexer(*args)
    checks.assert_close(logits, oracle.fp8_lightning_indexer(*args), INDEXER[F32], "logits")
    inside = logits > -INF
    assert torch.equal(indexer(*args, clean=False)[inside], logits[inside])
    return logits


@pytest.mark.parametrize("heads", [1, 3, 7, 16, 71, 130])
@pytest.mark.parametrize("kind", ["bf16", "scaled"])
def test_heads(indexer, heads, kind):
    check(indexer, inputs(h=heads, g=1, kind=kind))
    check(indexer, inputs(b=1, h=3 * heads, g=3, kind=kind))


@pytest.mark.parametrize("heads", [5, 16, 21])
@pytest.mark.parametrize("kind", ["bf16", "plain"])
def test_more_heads_than_a_product_holds(indexer, small, heads, kind):
    check(indexer, inputs(h=2 * heads, g=2, d=20, kind=kind))


@pytest.mark.parametrize("dim", [1, 8, 20, 80, 128, 200, 257, 576])
@pytest.mark.parametrize("kind", ["bf16", "scaled"])
def test_dims(indexer, dim, kind):
    check(indexer, inputs(d=dim, kind=kind))


@pytest.mark.parametrize("queries", [1, 2, 5, 17])
@pytest.mark.parametrize("keys", [1, 15, 16, 17, 49, 100])
def test_counts(indexer, small, queries, keys):
    args = inputs(1, queries, keys, g=1)
    check(indexer, args)
    assert check(indexer, windows(args, 0, keys)).isfinite().all()


def test_long_stretches(indexer):
    """Several tiles of keys, in windows that hold them whole and in part."""
    args = inputs(1, 6, 700, 8, 1, 32)
    check(indexer, args)
    check(indexer, windows(args, [0, 3, 64, 65, 0, 130], [700, 699, 640, 512, 511, 690]))
    check(indexer, windows(args, 0, [695, 696, 697, 698, 699, 700]))


def test_windows_are_cut_and_inverted_ones_are_empty(indexer, small):
    args = inputs(1, 8, 20)
    start = [0, -5, 3, 19, 20, 7, -(2**31), 5]
    end = [20, 4, 99, 20, 25, 7, 2**31 - 1, 2]
    inside = (check(indexer, windows(args, start, end)) > -INF).sum((0, 2, 3)).tolist()
    assert inside == [2 * n for n in (20, 4, 17, 1, 0, 0, 20, 0)]


def test_keys_outside_the_windows_do_not_leak(indexer, small):
    args = windows(inputs(1, 4, 256), 100, 120)
    wanted = check(indexer, args)
    k, scale = args[1].clone(), args[5].clone()
    k.view(torch.uint8)[:, :100] = 0x7F
    k.view(torch.uint8)[:, 120:] = 0xFF
    scale[:, :100], scale[:, 120:] = NAN, INF
    assert torch.equal(indexer(args[0], k, *args[2:5], scale), wanted)


@pytest.mark.parametrize("kind", ["bf16", "plain"])
def test_nan_of_a_key_stays_with_it(indexer, kind):
    args = windows(inputs(1, 3, 40, kind=kind), 0, 40)
    wanted = indexer(*args)
    args[1][0, 7, 1, 3] = NAN
    got = indexer(*args)
    assert got[0, :, 7, 1].isnan().all()
    got[0, :, 7, 1] = wanted[0, :, 7, 1]
    assert torch.equal(got, wanted)


def test_quantization(indexer):
    """Saturating queries, keys of all sizes, keys of zeros: as the codes by definition."""
    q, k, weights, start, end, _ = windows(inputs(kind="bf16", d=64), 0, 40)
    q[:, 0] *= 1000
    k *= 2.0 ** torch.randint(-30, 10, k.shape[:3]).to(BF16)[..., None]
    k[:, 5] = 0
    logits = indexer(q, k, weights, start, end, None)
    codes, scale = oracle.quantize_index_keys(k)
    wanted = indexer(oracle.to_e4m3(q.float()), codes, weights, start, end, scale)
    torch.testing.assert_close(logits, wanted, rtol=1e-6, atol=0)


def test_rows_of_wider_tensors(indexer):
    """Queries and keys as parts of one projection; transposed scales and weights."""
    args = inputs(2, 6, 6, 4, 2, 32)
    joint = torch.randn(2, 6, 9, 32).to(E4M3)
    scale = args[5].transpose(1, 2).contiguous().transpose(1, 2)
    weights = args[2].t().contiguous().t()
    check(indexer, (joint[:, :, 1:5], joint[:, :, 5:7], weights, *args[3:5], scale))
    check(indexer, (*(x.to(BF16) for x in (joint[:, :, 1:5], joint[:, :, 5:7])), *args[2:5], None))


@pytest.mark.parametrize("sizes", [dict(b=0), dict(s=0), dict(s_kv=0)])
@pytest.mark.parametrize("kind", ["bf16", "scaled"])
def test_nothing_to_do(indexer, sizes, kind):
    args = inputs(**sizes, kind=kind)
    shape = (args[0].shape[0], args[0].shape[1], args[1].shape[1], 2)
    assert indexer(*args).shape == shape
