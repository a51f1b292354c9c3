"""The cache write on CUDA tensors: bits, codes, widths, large pools."""

import pytest
import torch

from ops_registry.attention.paged_kv_cache_write import PAGED_KV_CACHE_WRITE
from ops_registry.contract import E4M3
from tests import cache_rows
from tests.cache_rows import BF16, F16

WRITE = PAGED_KV_CACHE_WRITE.op
HALF = pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
POOLS = pytest.mark.parametrize("pool_dtype", [BF16, E4M3], ids=str)


@HALF
def test_every_pattern_is_copied(dtype):
    cache_rows.check_copies(WRITE, "cuda", dtype)
    compiled = torch.compile(lambda *args: WRITE(*args), fullgraph=True, dynamic=True)
    cache_rows.check_copies(compiled, "cuda", dtype)


@HALF
@pytest.mark.parametrize("scale", cache_rows.SCALES)
def test_every_pattern_is_stored_as_its_code(dtype, scale):
    cache_rows.check_codes(WRITE, "cuda", dtype, scale)


@HALF
def test_codes_of_many_scales(dtype):
    """Quotients on and beside the ties of e4m3."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        mantissa, exponent = torch.rand(2, generator=generator).tolist()
        scale = (1 + mantissa) * 2.0 ** int(24 * exponent - 12)
        cache_rows.check_codes(WRITE, "cuda", dtype, scale)


@POOLS
@pytest.mark.parametrize("heads, dim", [(1, 1), (3, 3), (5, 80), (1, 257), (9, 576), (8, 128)])
@pytest.mark.parametrize("page_size", [1, 7, 48])
def test_widths_and_page_sizes(heads, dim, page_size, pool_dtype):
    for tokens, offset in ((7, 0), (7, 1), (1000, 0)):
        cache_rows.check_shape(
            WRITE, "cuda", tokens, heads, dim, page_size, pool_dtype, offset=offset
        )


@POOLS
def test_rows_past_two_to_the_31(pool_dtype):
    """A pool whose elements need 64-bit addresses."""
    pages = 2**31 // (16 * 8 * 128) + 2
    k = cache_rows.noise(3, 8, 128, dtype=BF16).cuda().nan_to_num()
    pools = [torch.zeros(pages, 16, 8, 128, dtype=pool_dtype, device="cuda") for _ in range(2)]
    slots = torch.tensor([0, 16 * pages - 1, 16 * pages], device="cuda")
    one = torch.ones(1, device="cuda") if pool_dtype == E4M3 else None
    WRITE(k, k, *pools, slots, one, one)
    for pool in pools:
        wanted = cache_rows.expected(
            torch.zeros(2, 1, 8, 128, dtype=pool_dtype),
            k[:2].cpu(),
            torch.arange(2),
            None if one is None else one.cpu(),
        )
        flat = pool.flatten(0, 1)
        cache_rows.assert_stored(flat[[0, -1]] if one is None else ends(flat), wanted[:, 0])
        assert not flat[1:-1].view(torch.uint8).any()


def ends(rows):
    """The first and last row of e4m3 rows, which have no indexing."""
    return torch.stack([rows[0].view(torch.uint8), rows[-1].view(torch.uint8)]).view(E4M3)
