"""Paged caches copied to 16-bit pages: what is widened, rotated and put in order."""

from types import SimpleNamespace

import pytest
import torch

from tileops.kernels.common.rope import rope_rows, rotate
from tileops.kernels.common.tilelang_limits import ROWS_COPIED
from tileops.kernels.common.triton_widened import Pools, widened, widened_values

F16, F32, E4M3 = torch.float16, torch.float32, torch.float8_e4m3fn
HEADS, DIM, WIDTH = 3, 64, 5
LENGTHS = (0, 1, 70, 128, 200)  # of requests; the longest may not fit the table


def made(page, dtype, seed=0, together=False):
    """Pools with NaN in every row that nobody reads, and what each request has in them."""
    generator = torch.Generator().manual_seed(seed)
    width = max(WIDTH, -(-max(LENGTHS) // page))
    count = len(LENGTHS) * width
    shape = (count + 2, 2, page, HEADS, DIM)
    both = torch.randn(shape, generator=generator).to(dtype)
    k, v = both.unbind(1) if together else (x.contiguous() for x in both.unbind(1))
    table = torch.randperm(count + 2, generator=generator)[:count].int().view(len(LENGTHS), width)
    used = torch.zeros(count + 2, page, dtype=torch.bool)
    rows = []
    for request, length in enumerate(LENGTHS):
        at = torch.arange(length)
        pages, inside = table[request, at // page].long(), at % page
        used[pages, inside] = True
        rows.append((k[pages, inside].to(F32), v[pages, inside].to(F32)))
        table[request, -(-length // page) :] = -123456
    for x in (k, v):
        codes = x.view(torch.uint8) if dtype == E4M3 else x
        codes[~used] = 0x7F if dtype == E4M3 else torch.nan
    return Pools(k, v, table, torch.tensor(LENGTHS, dtype=torch.int32)), rows


def judge(found, expected, tolerance=0.0):
    """Keys and values of each request, read through the new table, in 16-bit pages."""
    k, v, table = found
    assert k.shape[1:] == v.shape[1:] == (ROWS_COPIED, HEADS, DIM)
    assert table.unique().numel() == table.numel() == k.shape[0]
    for request, both in enumerate(expected):
        at = torch.arange(len(both[0]))
        pages = table[request, at // ROWS_COPIED].long()
        for x, rows in zip((k, v), both, strict=True):
            torch.testing.assert_close(
                x[pages, at % ROWS_COPIED].to(F32), rows, rtol=tolerance, atol=tolerance
            )


@pytest.mark.parametrize("page", [1, 20, 64, 192])
@pytest.mark.parametrize("together", [False, True])
def test_order(page, together):
    pools, rows = made(page, F16, page, together)
    judge(widened(pools, F16), rows)


@pytest.mark.parametrize("shape", [(1,), (len(LENGTHS), HEADS)])
def test_scales_of_e4m3(shape):
    pools, rows = made(16, E4M3)
    k_scale, v_scale = torch.rand(shape) + 0.1, torch.rand(shape) + 0.1
    found = widened(pools._replace(k_scale=k_scale, v_scale=v_scale), F16)
    whole = [x.expand(len(LENGTHS), HEADS) for x in (k_scale, v_scale)]
    expected = [
        [x * scale[request, :, None] for x, scale in zip(both, whole, strict=True)]
        for request, both in enumerate(rows)
    ]
    judge(found, expected, 1e-3)


@pytest.mark.parametrize("dtype", [F16, E4M3])
@pytest.mark.parametrize("layout, rotary", [("neox", None), ("neox", 32), ("interleaved", 48)])
def test_keys_are_turned_to_their_positions(dtype, layout, rotary):
    pools, rows = made(20, dtype)
    half = (rotary or DIM) // 2
    angle = torch.rand(max(LENGTHS), half) * 6
    rope = SimpleNamespace(
        rope_cos=angle.cos().half(), rope_sin=angle.sin().half(), rotary_dim=rotary,
        rope_layout=layout,
    )  # fmt: skip
    scale = torch.ones(1) if dtype == E4M3 else None
    found = widened(pools._replace(k_scale=scale, v_scale=scale), F16, rope)
    expected = []
    for k, v in rows:
        tables = (rope_rows(x, torch.arange(len(k))) for x in (rope.rope_cos, rope.rope_sin))
        expected.append((rotate(k, *tables, layout), v))
    judge(found, expected, 4e-3)


@pytest.mark.parametrize("dtype", [F16, E4M3])
def test_appended_tokens_count(dtype):
    """Those of an e4m3 cache come as they are; of another from the pools, where they are."""
    pools, rows = made(20, dtype)
    new = torch.tensor([0, 1, 3, 128, 37], dtype=torch.int32)
    offsets = torch.cat([new.new_zeros(1), new.cumsum(0)]).int()
    pools = pools._replace(offsets=offsets, lengths=pools.lengths - new)
    if dtype == E4M3:
        k, v = torch.randn(2, int(offsets[-1]) + 3, HEADS, DIM).half()
        wide = torch.stack((k, k, v), 1)[:, ::2]  # rows of a wider tensor
        ones = torch.ones(1)
        pools = pools._replace(fresh=wide.unbind(1), k_scale=ones, v_scale=ones)
        for request, both in enumerate(rows):
            begin, end = offsets[request : request + 2].tolist()
            for x, fresh in zip(both, (k, v), strict=True):
                x[len(x) - (end - begin) :] = fresh[begin:end]
    judge(widened(pools, F16), rows)


@pytest.mark.parametrize("shape", [(1, 1, 1, 64), (2, 50, 3, 128), (77, 5, 64), (2, 9, 4, 48)])
@pytest.mark.parametrize("requests", [0, 1, 2, 300])
def test_values_and_factors(shape, requests):
    v = torch.randn(shape).to(E4M3)
    wide = torch.stack((v.view(torch.uint8),) * 2, -3).view(E4M3)[..., 1, :, :]
    scales = torch.randn(3, requests, shape[-2])
    for x in (v, wide):
        values, factors = widened_values(x, *scales)
        assert torch.equal(values, v.to(F16))
        assert torch.equal(factors, torch.stack((scales[0] * scales[1], scales[2])))
