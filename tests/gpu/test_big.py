"""Tensors of more than 2^31 elements and batches of more than 65,535 programs.

Each answer is compared with a small call on the last rows, whose own answer other tests check.
They need up to 40 GB of device memory and run in one process.
"""

import pytest
import torch

from ops_registry.accuracy import BACKWARD, FORWARD, INDEXER
from ops_registry.contract import E4M3
from tests import checks
from tests.gpu import twins
from tests.triton_target import kernels
from tileops.attention import (
    DSADecodeWithKVCacheFwdOp,
    FP8LightningIndexerFwdOp,
    GQABwdOp,
    GQADenseFwdOp,
    GQAPagedFwdOp,
    GQAPrefillPagedWithKVCacheFwdOp,
    GQAVarlenFwdOp,
    MHADecodePagedWithKVCacheFwdOp,
    MLADecodeWithKVCacheFwdOp,
    NSACompressedVarlenFwdOp,
    NSATopKVarlenFwdOp,
    NSAVarlenFwdOp,
    PagedKVCacheWriteFwdOp,
)

BF16 = torch.bfloat16
BILLION = 1 << 31
pytestmark = [
    pytest.mark.xdist_group("big"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.mem_get_info()[1] < 60e9,
        reason="needs a device with 60 GB",
    ),
]


def needs(name):
    return pytest.mark.skipif(name not in kernels(), reason=f"{name} has no Triton kernel")


def noise(*shape, dtype=BF16):
    """Random values without a float32 copy of all of them."""
    return torch.empty(shape, dtype=dtype, device="cuda").normal_()


def int32(values):
    return torch.as_tensor(values, dtype=torch.int32, device="cuda")


def same(actual, expected, tolerance=FORWARD[BF16]):
    checks.assert_close(actual, expected, tolerance)


# ------------------------------------------------------------------------------ 64-bit rows


@needs("mla_decode_fwd")
def test_mla_decode():
    batch, rows = 33, 1 << 17
    q, q_pe = noise(batch, 16, 512), noise(batch, 16, 64)
    k, k_pe = noise(batch, rows, 1, 512), noise(batch, rows, 1, 64)
    assert k[32:].storage_offset() >= BILLION
    op = MLADecodeWithKVCacheFwdOp()
    same(op(q, q_pe, k, k_pe)[32:], op(q[32:], q_pe[32:], k[32:].clone(), k_pe[32:].clone()))


@needs("dsa_decode_fwd")
def test_dsa_decode():
    rows = BILLION // 576 + 300
    q, kv = noise(1, 3, 16, 576), noise(1, rows, 1, 576)
    op = DSADecodeWithKVCacheFwdOp(64, 1, rows, is_causal=False)
    last = torch.arange(256, device="cuda").expand(1, 3, 1, -1)
    small = op(q, kv[:, rows - 256 :].clone(), last.to(torch.int32))
    same(op(q, kv, (last + rows - 256).to(torch.int32)), small)


@needs("paged_kv_cache_write")
@pytest.mark.parametrize("dtype", [E4M3, BF16])
def test_write(dtype):
    pages, page, heads, dim = 131073, 16, 8, 128
    pools = [torch.zeros(pages, page, heads, dim, dtype=torch.uint8, device="cuda") for _ in "kv"]
    if dtype == BF16:
        pools = [torch.zeros(pages, page, heads, dim, dtype=BF16, device="cuda") for _ in "kv"]
    else:
        pools = [x.view(E4M3) for x in pools]
    k, v = noise(3, heads, dim), noise(3, heads, dim)
    slots = torch.tensor([2097152, 2097167, 5], device="cuda")
    scales = (torch.ones(1, device="cuda"),) * 2 if dtype == E4M3 else ()
    PagedKVCacheWriteFwdOp()(k, v, *pools, slots, *scales)
    for pool, new in zip(pools, (k, v), strict=True):
        flat = checks.bits(pool.flatten(0, 1))
        written = new.float().to(E4M3) if dtype == E4M3 else new
        assert torch.equal(flat[slots], checks.bits(written))
        flat[slots] = 0
        assert not flat.any()


@needs("gqa_varlen_fwd")
def test_varlen_and_its_gradient():
    """The last of 8193 requests of 64 tokens starts past 2^31 elements of q."""
    tokens, heads = (1 << 19) + 64, 32
    q, k, v = noise(tokens, heads, 128), noise(tokens, 1, 128), noise(tokens, 1, 128)
    cu = torch.arange(0, tokens + 1, 64, dtype=torch.int32, device="cuda")
    do = noise(tokens, heads, 128)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    op = GQAVarlenFwdOp()
    o = op(*leaves, cu, cu)
    o.backward(do)
    tail = [x[-64:].detach().clone().requires_grad_() for x in leaves]
    alone = op(*tail, int32([0, 64]), int32([0, 64]))
    alone.backward(do[-64:])
    same(o[-64:].detach(), alone.detach())
    for whole, part in zip(leaves, tail, strict=True):
        same(whole.grad[-64:], part.grad, BACKWARD[BF16])


@needs("gqa_dense_fwd")
def test_dense():
    s, heads = (1 << 19) + 64, 32
    q, k, v = noise(1, s, heads, 128), noise(1, s, 1, 128), noise(1, s, 1, 128)
    op = GQADenseFwdOp(window_size_left=63)
    tail = [x[:, -256:].clone() for x in (q, k, v)]
    same(op(q, k, v)[:, -64:], op(*tail)[:, -64:])


@needs("gqa_dense_bwd")
def test_dense_gradient():
    """Many short sequences: the last one starts past 2^31 elements."""
    batch, s, heads = (1 << 13) + 1, 64, 32
    q, k, v = noise(batch, s, heads, 128), noise(batch, s, 1, 128), noise(batch, s, 1, 128)
    o, do = noise(batch, s, heads, 128), noise(batch, s, heads, 128)
    lse = torch.full((batch, heads, s), 6.0, device="cuda")
    op = GQABwdOp()
    alone = op(*(x[-1:].clone() for x in (q, k, v, o, do, lse)))
    for whole, part in zip(op(q, k, v, o, do, lse), alone, strict=True):
        same(whole[-1:], part, BACKWARD[BF16])


def last_pages(pages, count):
    return int32([list(range(pages - count, pages))])


@needs("gqa_paged_fwd")
def test_paged():
    pages, page = BILLION // (480 * 512) + 40, 480
    pools = noise(pages, page, 1, 512), noise(pages, page, 1, 512)
    q, lens, cu = noise(5, 4, 512), int32([3 * page + 7]), int32([0, 5])
    op = GQAPagedFwdOp()
    small = op(q, *(x[-4:].clone() for x in pools), int32([[0, 1, 2, 3]]), lens, cu)
    same(op(q, *pools, last_pages(pages, 4), lens, cu), small)


@needs("gqa_prefill_paged_fwd")
def test_prefill_paged():
    page, heads = 64, 8
    pages = BILLION // (page * heads * 128) + 9
    pools = [noise(pages * page, heads, 128) for _ in "kv"]
    q, new = noise(70, 16, 128), noise(70, heads, 128)
    one, old, cu = torch.ones(1, device="cuda"), int32([100]), int32([0, 70])
    op = GQAPrefillPagedWithKVCacheFwdOp(page, 70)
    tails = [x[-3 * page :].clone() for x in pools]
    small = op(q, new, new, *tails, one, one, cu, old, int32([[0, 1, 2]]))
    same(op(q, new, new, *pools, one, one, cu, old, last_pages(pages, 3)), small)
    for pool, tail in zip(pools, tails, strict=True):
        assert torch.equal(checks.bits(pool[-3 * page :]), checks.bits(tail))


@needs("mha_decode_paged_fwd")
def test_mha_decode():
    page, heads = 128, 32
    pages = BILLION // (page * heads * 128) + 9
    pools = [noise(pages * page, heads, 128) for _ in "kv"]
    q, lens = noise(1, 2, heads, 128), int32([300])
    op = MHADecodePagedWithKVCacheFwdOp(page)
    small = op(q, *(x[-3 * page :].clone() for x in pools), lens, int32([[0, 1, 2]]))
    same(op(q, *pools, lens, last_pages(pages, 3)), small)


def nsa_packing(documents, length, block):
    ids, tokens = torch.arange(documents), torch.arange(length)
    pairs = torch.stack(torch.meshgrid(ids, tokens, indexing="ij"), -1).reshape(-1, 2)
    cu = torch.arange(documents + 1) * length
    return int32(cu), int32(cu // block), int32(pairs)


@needs("nsa_varlen_fwd")
def test_native_sparse_attention():
    """All three branches: q of 262,208 tokens and 64 heads has more than 2^31 elements."""
    length, block = 1024, 32
    documents = 257
    tokens, heads, heads_kv = documents * length, 64, 4
    cu, chunk_cu, pairs = nsa_packing(documents, length, block)
    q = noise(tokens, heads, 128)
    k, v = noise(tokens, heads_kv, 128), noise(tokens, heads_kv, 128)
    chunks = int(chunk_cu[-1])
    k_cmp, v_cmp = noise(chunks, heads_kv, 128), noise(chunks, heads_kv, 128)
    last, last_chunks = slice(-length, None), slice(-(length // block), None)
    own_cu, own_chunk_cu, own_pairs = nsa_packing(1, length, block)
    scale = 128**-0.5

    compress = NSACompressedVarlenFwdOp(scale, block)
    o, lse = compress(q, k_cmp, v_cmp, cu, chunk_cu, pairs)
    part_o, part_lse = compress(
        q[last].clone(), k_cmp[last_chunks], v_cmp[last_chunks], own_cu, own_chunk_cu, own_pairs
    )
    same(o[last], part_o)
    same(lse[:, last], part_lse)
    del o, lse

    select = NSATopKVarlenFwdOp(scale, 8, block)
    picked = select(q, k_cmp, cu, chunk_cu, pairs)
    own = q[last].clone(), k_cmp[last_chunks], own_cu, own_chunk_cu, own_pairs
    call = select.contract.Call(*own, scale, 8, block)
    twins.check_nsa_topk(picked[last], twins.nsa_scores(call))

    counts = (picked >= 0).sum(-1, dtype=torch.int32)
    attend = NSAVarlenFwdOp(True, scale, block)
    o = attend(q, k, v, picked, counts, cu, pairs)
    part_o = attend(
        q[last].clone(), k[last], v[last], picked[last], counts[last], own_cu, own_pairs
    )
    same(o[last], part_o)


@needs("fp8_lightning_indexer")
def test_indexer():
    s = 46400
    q, k = noise(1, s, 4, 64).to(E4M3), noise(1, s, 1, 64).to(E4M3)
    weights = torch.randn(s, 4, device="cuda")
    starts, ends = int32(torch.zeros(s)), int32(torch.arange(1, s + 1))
    op = FP8LightningIndexerFwdOp()
    whole = op(q, k, weights, starts, ends)
    tail = slice(46300, None)
    part = op(q[:, tail], k, weights[tail], starts[tail], ends[tail])
    same(whole[:, tail], part, INDEXER[torch.float32])


# -------------------------------------------------------------------------------- many rows


@needs("mha_decode_paged_fwd")
def test_many_requests_of_a_head_each():
    batch, heads = 2049, 32
    q = noise(batch, 1, heads, 64)
    pool = noise(batch, heads, 64)
    table = torch.arange(batch, dtype=torch.int32, device="cuda")[:, None]
    lens = int32(torch.ones(batch))
    o = MHADecodePagedWithKVCacheFwdOp(1)(q, pool, pool, lens, table)
    same(o[:, 0], pool)


@needs("gqa_varlen_fwd")
@pytest.mark.parametrize("requests", [2050, 70_000])
def test_many_requests_of_a_token_each(requests):
    q, v = noise(requests, 32, 64), noise(requests, 2, 64)
    cu = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
    same(GQAVarlenFwdOp()(q, v, v, cu, cu), v.repeat_interleave(16, 1))


@needs("gqa_paged_fwd")
def test_many_paged_requests():
    requests = 70_000
    q, pool = noise(requests, 4, 64), noise(requests, 1, 1, 64)
    table = torch.arange(requests, dtype=torch.int32, device="cuda")[:, None]
    cu = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
    o = GQAPagedFwdOp()(q, pool, pool, table, int32(torch.ones(requests)), cu)
    same(o, pool[:, 0].expand(-1, 4, -1))


@needs("mla_decode_fwd")
def test_many_latent_requests():
    requests = 70_000
    q, q_pe = noise(requests, 16, 64), noise(requests, 16, 16)
    k, k_pe = noise(requests, 1, 1, 64), noise(requests, 1, 1, 16)
    same(MLADecodeWithKVCacheFwdOp()(q, q_pe, k, k_pe), k[:, 0].expand(-1, 16, -1))


@needs("gqa_dense_fwd")
def test_many_dense_requests():
    requests = 70_000
    q, v = noise(requests, 1, 4, 64), noise(requests, 1, 1, 64)
    same(GQADenseFwdOp()(q, v, v), v.expand(-1, -1, 4, -1))


@needs("fp8_lightning_indexer")
def test_many_indexer_requests():
    requests = 70_000
    q, k = noise(requests, 1, 2, 64).to(E4M3), noise(requests, 3, 1, 64).to(E4M3)
    weights = torch.ones(1, 2, device="cuda")
    found = FP8LightningIndexerFwdOp()(q, k, weights, int32([0]), int32([3]))
    product = torch.einsum("bshd,btgd->bsth", q.float(), k.float()).relu().sum(-1)
    same(found[..., 0], product, INDEXER[torch.float32])
