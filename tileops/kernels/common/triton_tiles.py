"""Tiles of packed tokens, and how a tile lies in memory that warps add to."""

import triton
import triton.language as tl

from tileops.kernels.common.device import find_request


@triton.jit
def tile_by_token(
    at, offsets, requests, numerator: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr
):
    """Request and number of tile `at` in the order of tokens, as `find_request` numbers them."""
    b = find_request(offsets, requests + 1, numerator, BLOCK, at, WAYS)
    before = tl.load(offsets + b).to(tl.int64) * numerator // BLOCK + b
    return b, at - before.to(tl.int32)


@triton.jit
def tile_by_weight(
    at,
    offsets,
    requests,
    numerator: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    WAYS: tl.constexpr,
):
    """Request and number of tile `at`, heavy ones first, of at most WAYS requests.

    The n tiles of a request weigh 1 to n, FIRST: the first one most, else the last. Tiles past
    all of them belong to the padding.
    """
    lane = tl.arange(0, WAYS)
    start = tl.load(offsets + lane, mask=lane < requests, other=0).to(tl.int64)
    end = tl.load(offsets + lane + 1, mask=lane < requests, other=0).to(tl.int64)
    count = tl.cdiv((end - start) * numerator, BLOCK).to(tl.int32)
    # The least weight that at most `at` tiles exceed.
    weight = 0
    top = tl.max(count, 0)
    while weight < top:
        middle = (weight + top) // 2
        if tl.sum(tl.maximum(count - middle, 0), 0) <= at:
            top = middle
        else:
            weight = middle + 1
    nth = at - tl.sum(tl.maximum(count - weight, 0), 0)
    chosen = (lane < requests) & (count >= weight)
    picked = chosen & (tl.cumsum(chosen.to(tl.int32), 0) == nth + 1)
    tile = weight - 1
    if FIRST:
        tile = tl.sum(tl.where(picked, count, 0), 0) - weight
    b = tl.sum(tl.where(picked, lane, 0), 0)
    return tl.where(weight == 0, requests, b), tl.where(weight == 0, nth, tile)


@triton.jit(do_not_specialize=["requests", "tokens", "tiles"])
def places_kernel(
    offsets,
    offsets_other,
    places,
    requests,
    tokens,
    tiles,
    numerator: tl.constexpr,
    BLOCK: tl.constexpr,
    SORTED: tl.constexpr,
    FIRST: tl.constexpr,
    WAYS: tl.constexpr,
):
    """places [tiles, 6], of every packed tile: its request and number there, the request's first
    token and length, and first token and length of its other side.

    Tiles are BLOCK rows, `numerator` rows a token. Tokens past the last request are one more,
    whose other side is empty. SORTED: heavy tiles first, as `tile_by_weight` says, unless there
    are more than WAYS requests; else in the order of tokens.
    """
    at = tl.program_id(0)
    if at >= tiles:
        return
    if SORTED:
        if requests <= WAYS:
            b, tile = tile_by_weight(at, offsets, requests, numerator, BLOCK, FIRST, WAYS)
        else:
            b, tile = tile_by_token(at, offsets, requests, numerator, BLOCK, 128)
    else:
        b, tile = tile_by_token(at, offsets, requests, numerator, BLOCK, 128)
    real = b < requests
    start = tl.load(offsets + b)
    end = tl.load(offsets + b + 1, mask=real, other=0)
    end = tl.where(real, end, tokens)
    other = tl.load(offsets_other + b, mask=real, other=0)
    other_end = tl.load(offsets_other + b + 1, mask=real, other=0)
    place = places + at.to(tl.int64) * 6
    tl.store(place, b)
    tl.store(place + 1, tile)
    tl.store(place + 2, start)
    tl.store(place + 3, end - start)
    tl.store(place + 4, other)
    tl.store(place + 5, other_end - other)


@triton.jit
def spread(x, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, WARPS: tl.constexpr):
    """x [BLOCK_M, BLOCK_D] as lines of 128, line i of warp i % WARPS: four elements a lane, as the
    accumulators of warpgroups hold them, so that nothing moves and a warp adds whole lines."""
    ROW_WARPS: tl.constexpr = WARPS if WARPS < BLOCK_M // 16 else BLOCK_M // 16
    COLUMN_WARPS: tl.constexpr = WARPS // ROW_WARPS
    ROW_TILES: tl.constexpr = BLOCK_M // 16 // ROW_WARPS
    COLUMN_TILES: tl.constexpr = BLOCK_D // 16 // COLUMN_WARPS
    x = tl.reshape(x, [ROW_TILES, ROW_WARPS, 2, 8, COLUMN_WARPS, COLUMN_TILES, 2, 4, 2])
    x = tl.permute(x, [0, 2, 5, 4, 1, 3, 7, 6, 8])
    return tl.reshape(x, [BLOCK_M * BLOCK_D // 128, 128])


@triton.jit
def gathered(x, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, WARPS: tl.constexpr):
    """The [BLOCK_M, BLOCK_D] that was `spread`."""
    ROW_WARPS: tl.constexpr = WARPS if WARPS < BLOCK_M // 16 else BLOCK_M // 16
    COLUMN_WARPS: tl.constexpr = WARPS // ROW_WARPS
    ROW_TILES: tl.constexpr = BLOCK_M // 16 // ROW_WARPS
    COLUMN_TILES: tl.constexpr = BLOCK_D // 16 // COLUMN_WARPS
    x = tl.reshape(x, [ROW_TILES, 2, COLUMN_TILES, COLUMN_WARPS, ROW_WARPS, 8, 4, 2, 2])
    x = tl.permute(x, [0, 4, 1, 5, 3, 2, 7, 6, 8])
    return tl.reshape(x, [BLOCK_M, BLOCK_D])


@triton.jit
def spread_spots(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Where a spread tile lies: its lines one after another."""
    line = tl.arange(0, BLOCK_M * BLOCK_D // 128)
    return line[:, None] * 128 + tl.arange(0, 128)[None, :]


@triton.jit
def spread_spot(row, column, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, WARPS: tl.constexpr):
    """Where element (row, column) of a spread tile lies."""
    ROW_WARPS: tl.constexpr = WARPS if WARPS < BLOCK_M // 16 else BLOCK_M // 16
    COLUMNS: tl.constexpr = BLOCK_D // (WARPS // ROW_WARPS)
    warp = column // COLUMNS * ROW_WARPS + row // 16 % ROW_WARPS
    piece = (row // 16 // ROW_WARPS * 2 + row // 8 % 2) * (COLUMNS // 16) + column % COLUMNS // 16
    lane = row % 8 * 4 + column // 2 % 4
    return (piece * WARPS + warp) * 128 + lane * 4 + column // 8 % 2 * 2 + column % 2
