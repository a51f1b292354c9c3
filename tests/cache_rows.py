"""What a cache write must store, bit for bit: checks of a write on tensors of any device."""

import torch

from ops_registry.contract import E4M3
from tests import checks, oracle

BF16, F16 = torch.bfloat16, torch.float16
# Ordinary scales, powers of two, and what leaves the range of a division's shortcut.
SCALES = (1.0, 0.5, 3.0, 1e-3, 0.0123, 448.0, 2.0**-64, 2.0**64, 2.0**-65, 1e-38, 3e38)


def noise(*shape, dtype):
    """Random bits."""
    size = dtype.itemsize
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8).view(dtype)


def patterns(dtype, heads, dim):
    """Every 16-bit pattern as [T, heads, dim] rows: NaN payloads, subnormals, both zeros."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    return every.view(-1, heads, dim)


def expected(pool, rows, slots, scale):
    """The pool after the write, by definition."""
    pool = pool.clone()
    flat = pool.flatten(0, 1)
    new = rows if scale is None else oracle.store_e4m3(rows, scale)
    kept = (slots >= 0) & (slots < flat.shape[0])
    flat.view(torch.uint8)[slots[kept]] = new.contiguous().view(torch.uint8)[kept]
    return pool


def assert_stored(actual, wanted):
    """Equal bits; a NaN of an e4m3 pool may have either sign."""
    a, b = checks.bits(actual.cpu()), checks.bits(wanted)
    if actual.dtype == E4M3:
        a, b = (torch.where(x & 0x7F == 0x7F, 0x7F, x) for x in (a, b))
    assert torch.equal(a, b)


def check(write, device, k, v, pools, slots, scales=(None, None)):
    """One write into pools of these contents; rows and pools keep their strides and offsets."""
    wanted = [
        expected(pool, rows, slots, scale)
        for pool, rows, scale in zip(pools, (k, v), scales, strict=True)
    ]
    stores = [pool._base if pool._base is not None else pool for pool in pools]
    views = [
        store.to(device).as_strided(pool.shape, pool.stride(), pool.storage_offset())
        for store, pool in zip(stores, pools, strict=True)
    ]
    there = (None if scale is None else scale.to(device) for scale in scales)
    write(k.to(device), v.to(device), *views, slots.to(device), *there)
    for view, pool in zip(views, wanted, strict=True):
        assert_stored(view, pool)


def some_slots(tokens, rows, skipped=5):
    """Distinct slots in random order, every `skipped`-th -1."""
    slots = torch.randperm(rows)[:tokens]
    slots[::skipped] = -1
    return slots


def check_copies(write, device, dtype, heads=2, dim=64):
    """Every pattern into a pool of random bits."""
    k = patterns(dtype, heads, dim)
    pools = [noise(2 * k.shape[0] // 16, 16, heads, dim, dtype=dtype) for _ in range(2)]
    check(write, device, k, k.flip(0), pools, some_slots(k.shape[0], 2 * k.shape[0]))


def check_codes(write, device, dtype, scale, heads=2, dim=64):
    """Every pattern into an e4m3 pool."""
    k = patterns(dtype, heads, dim)
    pools = [noise(2 * k.shape[0] // 16, 16, heads, dim, dtype=E4M3) for _ in range(2)]
    scales = torch.tensor([scale]), torch.tensor([0.7])
    check(write, device, k, k.flip(0), pools, some_slots(k.shape[0], 2 * k.shape[0]), scales)


def check_shape(write, device, tokens, heads, dim, page_size, pool_dtype, offset=0):
    """Rows of any width, pools that start `offset` elements into their memory."""
    pages = -(-2 * tokens // page_size)
    k, v = (noise(tokens, heads, dim, dtype=BF16) for _ in range(2))
    elements = pages * page_size * heads * dim
    store = noise(1, 2 * elements + offset, dtype=pool_dtype).flatten()
    shape = (pages, page_size, heads, dim)
    pools = [store[start : start + elements].view(shape) for start in (offset, offset + elements)]
    fp8 = pool_dtype == E4M3
    scales = (torch.tensor([0.3]), torch.tensor([2.0])) if fp8 else (None, None)
    check(write, device, k, v, pools, some_slots(tokens, pages * page_size), scales)
