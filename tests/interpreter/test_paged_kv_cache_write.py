"""The cache write's kernel: bits, codes, slots, widths, strides."""

import pytest
import torch

from ops_registry.attention.paged_kv_cache_write import PAGED_KV_CACHE_WRITE
from ops_registry.contract import E4M3
from tests import cache_rows
from tests.cache_rows import BF16, F16

HALF = pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
POOLS = pytest.mark.parametrize("pool_dtype", [BF16, E4M3], ids=str)


@pytest.fixture
def write(target):
    def call(k, v, k_pages, v_pages, slots, k_scale=None, v_scale=None):
        PAGED_KV_CACHE_WRITE.op(k, v, k_pages, v_pages, slots, k_scale, v_scale, target)

    return call


@HALF
def test_every_pattern_is_copied(write, dtype):
    cache_rows.check_copies(write, "cpu", dtype)


@HALF
@pytest.mark.parametrize("scale", cache_rows.SCALES)
def test_every_pattern_is_stored_as_its_code(write, dtype, scale):
    if dtype == BF16 and scale < 1e-30:
        pytest.skip("the interpreter misreads bfloat16 subnormals, which count here")
    cache_rows.check_codes(write, "cpu", dtype, scale)


@POOLS
@pytest.mark.parametrize("heads, dim", [(1, 1), (3, 3), (5, 80), (1, 257), (9, 576)])
@pytest.mark.parametrize("page_size", [1, 7, 48])
def test_widths_and_page_sizes(write, heads, dim, page_size, pool_dtype):
    cache_rows.check_shape(write, "cpu", 7, heads, dim, page_size, pool_dtype, offset=1)


@pytest.mark.parametrize(
    "slots",
    [
        [-1] * 6,
        [-2, -8, -(2**62), 12, 13, 2**62],
        [-1, 0, -12, 12, 11, -1],
        [3, 2, 1, 0, -1, 2**40],
    ],
)
def test_slots_outside_the_pool_write_nothing(write, slots):
    k, v = (cache_rows.noise(6, 2, 16, dtype=BF16) for _ in range(2))
    pools = [cache_rows.noise(3, 4, 2, 16, dtype=BF16) for _ in range(2)]
    cache_rows.check(write, "cpu", k, v, pools, torch.tensor(slots))


@POOLS
def test_rows_of_wider_tensors(write, pool_dtype):
    """k and v as parts of one projection, at different distances from row to row."""
    rows = cache_rows.noise(9, 6, 24, dtype=BF16)
    v = cache_rows.noise(9, 3, 24, dtype=BF16)[:, 1:]
    pools = [cache_rows.noise(5, 4, 2, 24, dtype=pool_dtype) for _ in range(2)]
    fp8 = pool_dtype == E4M3
    scales = (torch.tensor([0.3]), torch.tensor([2.0])) if fp8 else (None, None)
    slots = cache_rows.some_slots(9, 20)
    cache_rows.check(write, "cpu", rows[:, 2:4], v, pools, slots, scales)


@pytest.mark.parametrize("tokens, pages", [(0, 3), (5, 0), (0, 0)])
def test_nothing_to_write(write, tokens, pages):
    k = cache_rows.noise(tokens, 2, 16, dtype=BF16)
    pools = [cache_rows.noise(pages, 4, 2, 16, dtype=BF16) for _ in range(2)]
    cache_rows.check(write, "cpu", k, k, pools, torch.full((tokens,), 2))
