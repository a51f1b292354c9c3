"""Tiles of packed and dense tokens: which one a program has, and how a tile lies in memory
that warps add to."""

import triton
import triton.language as tl

from tileops.kernels.common.device import find_request


@triton.jit
def found_tile(
    at, offsets, requests, numerator: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr
):
    """The request and number in it of tile `at` in the order of tokens."""
    b = find_request(offsets, requests + 1, numerator, BLOCK, at, WAYS)
    before = tl.load(offsets + b).to(tl.int64) * numerator // BLOCK + b
    return b, at - before.to(tl.int32)


@triton.jit
def heavy_tile(
    at,
    offsets,
    requests,
    numerator: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAVY: tl.constexpr,
    WAYS: tl.constexpr,
):
    """The request and number in it of tile `at` in the order of falling weights.

    The n tiles of a request weigh 1 to n, the first tile most (HEAVY 1) or the last (HEAVY 2).
    What is past all of them belongs to the padding. At most WAYS requests.
    """
    lane = tl.arange(0, WAYS)
    start = tl.load(offsets + lane, mask=lane < requests, other=0)
    end = tl.load(offsets + lane + 1, mask=lane < requests, other=0)
    count = tl.cdiv((end - start) * numerator, BLOCK)
    # The least weight that at most `at` tiles exceed.
    weight = 0
    top = tl.max(count, 0)
    while weight < top:
        middle = (weight + top) // 2
        if tl.sum(tl.maximum(count - middle, 0), 0) <= at:
            top = middle
        else:
            weight = middle + 1
    order = at - tl.sum(tl.maximum(count - weight, 0), 0)
    chosen = count >= weight
    picked = chosen & (tl.cumsum(chosen.to(tl.int32), 0) == order + 1)
    tile = weight - 1
    if HEAVY == 1:
        tile = tl.sum(tl.where(picked, count, 0), 0) - weight
    b = tl.sum(tl.where(picked, lane, 0), 0)
    return tl.where(weight == 0, requests, b), tl.where(weight == 0, order, tile)


@triton.jit
def seat(
    at,
    dense_b,
    tiles,
    offsets,
    offsets_other,
    requests,
    tokens,
    length,
    length_other,
    numerator: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAVY: tl.constexpr,
    PACKED: tl.constexpr,
    WAYS: tl.constexpr,
):
    """The `at`-th tile: of all packed ones, or of the `tiles` of request dense_b.

    Tiles are BLOCK rows, `numerator` rows a token. HEAVY: 1 where the first tiles of a request
    have most to do, 2 the last, 0 all the same; heavy ones come first.
    Returns the request, the tile's number in it, its first token and length, and the first token
    and length of its other side. Packed tokens past the last request are one more request, whose
    other side is empty.
    """
    if PACKED:
        if HEAVY != 0:
            if requests <= WAYS:
                b, tile = heavy_tile(at, offsets, requests, numerator, BLOCK, HEAVY, WAYS)
            else:
                b, tile = found_tile(at, offsets, requests, numerator, BLOCK, WAYS)
        else:
            b, tile = found_tile(at, offsets, requests, numerator, BLOCK, WAYS)
        real = b < requests
        start = tl.load(offsets + b).to(tl.int64)
        end = tl.load(offsets + b + 1, mask=real, other=0).to(tl.int64)
        end = tl.where(real, end, tokens)
        other = tl.load(offsets_other + b, mask=real, other=0).to(tl.int64)
        other_end = tl.load(offsets_other + b + 1, mask=real, other=0).to(tl.int64)
        return b, tile, start, (end - start).to(tl.int32), other, (other_end - other).to(tl.int32)
    tile = at
    if HEAVY == 2:
        tile = tiles - 1 - at
    first = dense_b.to(tl.int64)
    return dense_b, tile, first * length, length, first * length_other, length_other


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
