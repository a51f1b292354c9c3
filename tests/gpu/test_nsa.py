"""Native sparse attention on CUDA tensors: models, tiles of every kind, accuracy, addresses."""

import pytest
import torch

from ops_registry.accuracy import FORWARD, LSE
from ops_registry.attention.nsa_compressed import NSA_COMPRESSED_FWD
from ops_registry.attention.nsa_topk import NSA_TOPK
from ops_registry.attention.nsa_varlen import NSA_VARLEN_FWD
from tests import checks, oracle
from tests.cases import nsa_packing

BF16, F16 = torch.bfloat16, torch.float16
INF = float("inf")
SELECTED = 16


def cuda(*tensors):
    return tuple(x.cuda() for x in tensors)


def inputs(lens, bs, h, h_kv, d, dtype, dv=None):
    """q, k, v, then a key and a value for every chunk, then the metadata; dv: of the last."""
    packing = nsa_packing(list(lens), bs)
    tokens, chunks = sum(lens), int(packing["chunk_offsets"][-1])
    shapes = (tokens, h, d), (tokens, h_kv, d), (tokens, h_kv, d)
    shapes += (chunks, h_kv, d), (chunks, h_kv, dv or d)
    return (*(torch.randn(s).to(dtype) for s in shapes), *packing.values())


def check_compressed(q, k, v, offsets, chunks, tokens, bs):
    scale = q.shape[2] ** -0.5
    o, lse = NSA_COMPRESSED_FWD.op(*cuda(q, k, v, offsets, chunks, tokens), scale, bs)
    wanted = oracle.nsa_compressed_fwd(q, k, v, offsets, chunks, scale, bs)
    checks.assert_close(o.cpu(), wanted[0], FORWARD[q.dtype], "o")
    checks.assert_close(lse.cpu(), wanted[1], LSE[q.dtype], "lse")


def check_topk(q, k, offsets, chunks, tokens, bs, selected=SELECTED):
    scale = q.shape[2] ** -0.5
    ids = NSA_TOPK.op(*cuda(q, k, offsets, chunks, tokens), scale, selected, bs).cpu()
    oracle.check_nsa_topk(ids, oracle.nsa_topk_scores(q, k, offsets, chunks, scale, bs))
    return ids


def check_selected(q, k, v, ids, counts, offsets, tokens, bs, causal=True):
    scale = q.shape[2] ** -0.5
    o = NSA_VARLEN_FWD.op(*cuda(q, k, v, ids, counts, offsets, tokens), causal, scale, bs)
    wanted = oracle.nsa_fwd(q, k, v, ids, counts, offsets, causal, scale, bs)
    checks.assert_close(o.cpu(), wanted, FORWARD[q.dtype], "o")


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("h, h_kv, d, bs", [(64, 4, 128, 64), (32, 2, 128, 32), (32, 2, 64, 32)])
@pytest.mark.parametrize("lens", [(700, 0, 257), (1400,)])
def test_models(lens, h, h_kv, d, bs, dtype):
    """The three branches one after another, as a model calls them."""
    q, k, v, k_cmp, v_cmp, offsets, chunks, tokens = inputs(lens, bs, h, h_kv, d, dtype)
    check_compressed(q, k_cmp, v_cmp, offsets, chunks, tokens, bs)
    ids = check_topk(q, k_cmp, offsets, chunks, tokens, bs)
    counts = torch.full(ids.shape[:2], SELECTED, dtype=torch.int32)
    check_selected(q, k, v, ids, counts, offsets, tokens, bs)


@pytest.mark.parametrize("group", [1, 2, 3, 7, 8, 16, 48, 71, 128, 130, 300])
@pytest.mark.parametrize("bs", [3, 32])
def test_groups(group, bs):
    q, k, v, k_cmp, v_cmp, offsets, chunks, tokens = inputs((150, 1, 0, 40), bs, group, 1, 64, F16)
    check_compressed(q, k_cmp, v_cmp, offsets, chunks, tokens, bs)
    ids = check_topk(q, k_cmp, offsets, chunks, tokens, bs, 8)
    counts = torch.randint(-1, 10, ids.shape[:2], dtype=torch.int32)
    check_selected(q, k, v, ids, counts, offsets, tokens, bs)


@pytest.mark.parametrize("d, dv", [(1, 1), (8, 48), (20, 20), (96, 80), (192, 128), (256, 256),
                                   (257, 16), (512, 512), (576, 512)])  # fmt: skip
def test_dims(d, dv):
    bs = 16
    q, k, v, k_cmp, v_cmp, offsets, chunks, tokens = inputs((130, 61), bs, 8, 2, d, F16, dv)
    check_compressed(q, k_cmp, v_cmp, offsets, chunks, tokens, bs)
    ids = check_topk(q, k_cmp, offsets, chunks, tokens, bs, 4)
    counts = torch.full(ids.shape[:2], 4, dtype=torch.int32)
    check_selected(q, k, v, ids, counts, offsets, tokens, bs)


@pytest.mark.parametrize("selected", [1, 2, 3, 16, 31, 32, 33, 64, 100, 300])
def test_widths(selected):
    q, _, _, k_cmp, _, offsets, chunks, tokens = inputs((500, 70), 2, 8, 2, 64, BF16)
    check_topk(q, k_cmp, offsets, chunks, tokens, 2, selected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("slots", [1, 5, 16, 40, 70, 300])
@pytest.mark.parametrize("bs", [1, 5, 64, 300, 2**40])
def test_any_selection(slots, bs, causal):
    """Unsorted ids with repetitions and sentinels, counts past the slots."""
    q, k, v, *_, offsets, _, tokens = inputs((330, 0, 61), bs, 6, 2, 64, F16)
    ids = torch.randint(-2, 331 // min(bs, 331) + 3, (391, 2, slots)).to(torch.int32)
    ids[torch.rand(ids.shape) < 0.1] = 2**31 - 1
    counts = torch.randint(-1, slots + 2, (391, 2)).to(torch.int32)
    check_selected(q, k, v, ids, counts, offsets, tokens, bs, causal)


def test_rows_far_into_memory():
    """The last of many requests, at elements past 2 ** 31, as if it were alone."""
    lens, bs, d = [1024] * 256 + [64], 64, 128
    packing = {name: x.cuda() for name, x in nsa_packing(lens, bs).items()}
    tokens, chunks = sum(lens), int(packing["chunk_offsets"][-1])
    q = torch.randn(tokens, 64, d, dtype=BF16, device="cuda")
    k, v = (torch.randn(tokens, 4, d, dtype=BF16, device="cuda") for _ in range(2))
    compressed = [torch.randn(chunks, 4, d, dtype=BF16, device="cuda") for _ in range(2)]
    alone = {name: x.cuda() for name, x in nsa_packing([64], bs).items()}
    o, lse = NSA_COMPRESSED_FWD.op(q, *compressed, *packing.values(), d**-0.5, bs)
    last = NSA_COMPRESSED_FWD.op(q[-64:], *(x[-1:] for x in compressed), *alone.values(), 1.0, bs)
    assert o[-64:-1].count_nonzero() == 0 and (lse[:, -64:-1] == -INF).all()
    torch.testing.assert_close(o[-1:], last[0][-1:])
    del o, lse
    ids = NSA_TOPK.op(q, compressed[0], *packing.values(), d**-0.5, 2, bs)
    assert (ids[-64:] == torch.tensor([0, -1], device="cuda")).all()
    counts = torch.full((tokens, 4), 2, dtype=torch.int32, device="cuda")
    rest = packing["offsets"], packing["token_indices"], True, d**-0.5, bs
    o = NSA_VARLEN_FWD.op(q, k, v, ids, counts, *rest)
    rest = alone["offsets"], alone["token_indices"], True, d**-0.5, bs
    own = NSA_VARLEN_FWD.op(q[-64:], k[-64:], v[-64:], ids[-64:], counts[-64:], *rest)
    torch.testing.assert_close(o[-64:], own)
