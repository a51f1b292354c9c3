"""Tiles of packed and dense tokens: which one a program has, and how a tile lies in memory
that warps add to."""

import triton
import triton.language as tl

from tileops.kernels.common.device import find_request


@triton.jit
def packed_tile(
    at, offsets, requests, numerator: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr
):
    """The request of tile `at` in the order of tokens, and the tile's number there."""
    b = find_request(offsets, requests + 1, numerator, BLOCK, at, WAYS)
    before = tl.load(offsets + b).to(tl.int64) * numerator // BLOCK + b
    return b, at - before.to(tl.int32)


@triton.jit(do_not_specialize=["requests", "tiles"])
def order_kernel(
    offsets,
    order,
    requests,
    tiles,
    numerator: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    WAYS: tl.constexpr,
):
    """order [tiles, 2]: request and number of each packed tile, the heavy ones first.

    The n tiles of a request weigh 1 to n, FIRST: the first one most, else the last. Tiles past
    all of them belong to the padding. More than WAYS requests are left in the order of tokens.
    """
    at = tl.program_id(0)
    if at >= tiles:
        return
    if requests > WAYS:
        b, tile = packed_tile(at, offsets, requests, numerator, BLOCK, 128)
    else:
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
        b = tl.sum(tl.where(picked, lane, 0), 0)
        tile = weight - 1
        if FIRST:
            tile = tl.sum(tl.where(picked, count, 0), 0) - weight
        if weight == 0:
            b = requests
            tile = nth
    tl.store(order + 2 * at, b)
    tl.store(order + 2 * at + 1, tile)


@triton.jit
def seat(
    at,
    dense_b,
    offsets,
    offsets_other,
    order,
    requests,
    tokens,
    length,
    length_other,
    numerator: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
    ORDERED: tl.constexpr,
    WAYS: tl.constexpr,
):
    """The `at`-th tile: of all packed ones, or of those of request dense_b.

    Tiles are BLOCK rows, `numerator` rows a token. ORDERED: order [tiles, 2] says which packed
    tile is the `at`-th one.
    Returns the request, the tile's number in it, its first token and length, and the first token
    and length of its other side. Packed tokens past the last request are one more request, whose
    other side is empty.
    """
    if PACKED:
        if ORDERED:
            b = tl.load(order + 2 * at)
            tile = tl.load(order + 2 * at + 1)
        else:
            b, tile = packed_tile(at, offsets, requests, numerator, BLOCK, WAYS)
        real = b < requests
        start = tl.load(offsets + b).to(tl.int64)
        end = tl.load(offsets + b + 1, mask=real, other=0).to(tl.int64)
        end = tl.where(real, end, tokens)
        other = tl.load(offsets_other + b, mask=real, other=0).to(tl.int64)
        other_end = tl.load(offsets_other + b + 1, mask=real, other=0).to(tl.int64)
        return b, tile, start, (end - start).to(tl.int32), other, (other_end - other).to(tl.int32)
    first = dense_b.to(tl.int64)
    return dense_b, at, first * length, length, first * length_other, length_other


@triton.jit
def spread(x, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, WARPS: tl.constexpr):
    """x [BLOCK_M, BLOCK_D] as [pieces, WARPS, 128]: four elements a lane, as the accumulators of
    warpgroups hold them, so that nothing moves and a warp adds whole lines."""
    ROW_WARPS: tl.constexpr = min(WARPS, BLOCK_M // 16)
    COLUMN_WARPS: tl.constexpr = WARPS // ROW_WARPS
    ROW_TILES: tl.constexpr = BLOCK_M // 16 // ROW_WARPS
    COLUMN_TILES: tl.constexpr = BLOCK_D // 16 // COLUMN_WARPS
    x = tl.reshape(x, [ROW_TILES, ROW_WARPS, 2, 8, COLUMN_WARPS, COLUMN_TILES, 2, 4, 2])
    x = tl.permute(x, [0, 2, 5, 4, 1, 3, 7, 6, 8])
    return tl.reshape(x, [ROW_TILES * 2 * COLUMN_TILES, WARPS, 128])


@triton.jit
def gathered(x, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, WARPS: tl.constexpr):
    """The [BLOCK_M, BLOCK_D] that was `spread`."""
    ROW_WARPS: tl.constexpr = min(WARPS, BLOCK_M // 16)
    COLUMN_WARPS: tl.constexpr = WARPS // ROW_WARPS
    ROW_TILES: tl.constexpr = BLOCK_M // 16 // ROW_WARPS
    COLUMN_TILES: tl.constexpr = BLOCK_D // 16 // COLUMN_WARPS
    x = tl.reshape(x, [ROW_TILES, 2, COLUMN_TILES, COLUMN_WARPS, ROW_WARPS, 8, 4, 2, 2])
    x = tl.permute(x, [0, 4, 1, 5, 3, 2, 7, 6, 8])
    return tl.reshape(x, [BLOCK_M, BLOCK_D])


@triton.jit
def spread_spots(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, WARPS: tl.constexpr):
    """Where a spread tile lies: [pieces, WARPS, 128], one after another."""
    PIECES: tl.constexpr = BLOCK_M * BLOCK_D // (WARPS * 128)
    line = tl.arange(0, PIECES)[:, None] * WARPS + tl.arange(0, WARPS)[None, :]
    return line[:, :, None] * 128 + tl.arange(0, 128)[None, None, :]


@triton.jit
def spread_spot(row, column, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, WARPS: tl.constexpr):
    """Where element (row, column) of a spread tile lies."""
    ROW_WARPS: tl.constexpr = min(WARPS, BLOCK_M // 16)
    COLUMNS: tl.constexpr = BLOCK_D // (WARPS // ROW_WARPS)
    warp = column // COLUMNS * ROW_WARPS + row // 16 % ROW_WARPS
    piece = (row // 16 // ROW_WARPS * 2 + row // 8 % 2) * (COLUMNS // 16) + column % COLUMNS // 16
    lane = row % 8 * 4 + column // 2 % 4
    return (piece * WARPS + warp) * 128 + lane * 4 + column // 8 % 2 * 2 + column % 2
