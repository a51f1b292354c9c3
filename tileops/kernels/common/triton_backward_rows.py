"""Gradients of grouped-query attention on the device: before and after the contractions.

rows_kernel     stats of the rows, and what the sinks take from each block of tokens
sinks_kernel    the gradient of the sinks from those shares
finish_kernel   float32 gradients scaled, rotated back and rounded
"""

import triton
import triton.language as tl

from tileops.kernels.common.device import LOG2E, float32, int64
from tileops.kernels.common.triton_tiles import gathered, spread_spot, spread_spots


@triton.jit(do_not_specialize=["requests", "tokens", "length_q", "blocks"])
def rows_kernel(
    o,
    grad_o,
    lse,
    sinks,
    stats,
    shares,
    offsets_q,
    requests,
    tokens,
    length_q,
    blocks,
    PACKED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HEADS_KV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    O_ROW: tl.constexpr,
    DO_ROW: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """stats [2, H_kv, tokens, g], levels and deltas, of BLOCK_T tokens of one KV head.

    lse: [H, tokens] (PACKED) or [B, H, length_q], natural, without the sinks' share. A row that
    sees no key gets level +inf, which makes all its weights 0.
    shares [H, blocks]: what a sink's gradient takes from the block, HAS_SINKS.
    """
    program = tl.program_id(0).to(tl.int64)
    if program >= HEADS_KV * blocks:
        return
    r = program % HEADS_KV
    block = program // HEADS_KV
    token = block * BLOCK_T + tl.arange(0, BLOCK_T)
    member = tl.arange(0, BLOCK_G)
    head = r * GROUP + member
    end = int64(tokens)
    if PACKED:
        end = tl.load(offsets_q + requests).to(tl.int64)
    exists = (token < tokens)[:, None] & (member < GROUP)[None, :]
    live = (token < end)[:, None] & exists
    column = tl.arange(0, BLOCK_D)[None, None, :]
    mask = live[:, :, None] & (column < D)
    at = (head * D)[None, :, None] + column
    out = tl.load(o + (token * O_ROW)[:, None, None] + at, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_o + (token * DO_ROW)[:, None, None] + at, mask=mask, other=0.0)
    delta = tl.sum(out * grad.to(tl.float32), 2)

    if PACKED:
        spot = (head * tokens)[None, :] + token[:, None]
    else:
        b = token // length_q
        spot = (b[:, None] * (HEADS_KV * GROUP) + head[None, :]) * length_q
        spot += (token - b * length_q)[:, None]
    natural = tl.load(lse + spot, mask=live, other=float("-inf"))
    level = natural * LOG2E
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=member < GROUP, other=float("-inf"))[None, :] * LOG2E
        level = tl.maximum(level, sink) + tl.log2(1.0 + tl.exp2(-tl.abs(level - sink)))
    level = tl.where(natural == float("-inf"), float("inf"), level)
    row = ((r * tokens + token) * GROUP)[:, None] + member[None, :]
    far = HEADS_KV * GROUP * int64(tokens)
    tl.store(stats + row, level, mask=exists)
    tl.store(stats + far + row, delta, mask=exists)
    if HAS_SINKS:
        share = tl.where(level == float("inf"), 0.0, tl.exp2(sink - level) * delta)
        tl.store(shares + head * blocks + block, tl.sum(share, 0), mask=member < GROUP)


@triton.jit(do_not_specialize=["blocks"])
def sinks_kernel(shares, dsinks, blocks, BLOCK: tl.constexpr):
    """dsinks [H] from shares [H, blocks], a head a program."""
    head = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, blocks, BLOCK):
        block = first + lane
        total += tl.load(shares + head * blocks + block, mask=block < blocks, other=0.0)
    tl.store(dsinks + head, -tl.sum(total, 0))


@triton.jit(
    do_not_specialize=[
        "requests",
        "tokens",
        "length",
        "length_other",
        "tiles",
        "table_rows",
        "active",
    ]
)
def finish_kernel(
    x,
    out,
    cos,
    sin,
    places,
    scale,
    requests,
    length,
    length_other,
    tiles,
    table_rows,
    active,
    PACKED: tl.constexpr,
    QUERIES: tl.constexpr,
    SPREAD: tl.constexpr,
    HEADS_KV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    NEOX: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WARPS: tl.constexpr,
):
    """out [tokens, H_kv * GROUP, D] = x scaled and, with ROTARY, rotated back; none if not active.

    A program has one block of BLOCK_M rows of a tile of TILE rows of one KV head.
    x: float32, laid out like out; SPREAD: in whole tiles as `spread` lays them out.
    QUERIES: positions end where the other side's do; keys begin at 0.
    """
    program = tl.program_id(0)
    pairs = HEADS_KV
    if not PACKED:
        pairs *= requests
    if program >= tiles * pairs * active:
        return
    r = program % HEADS_KV
    if PACKED:
        # In the body: what a function loads, compilers take for what its results point into.
        place = places + (program // pairs).to(tl.int64) * 6
        b = tl.load(place)
        tile = tl.load(place + 1)
        start = tl.load(place + 2).to(tl.int64)
        count = tl.load(place + 3)
        count_other = tl.load(place + 5)
    else:
        b = program % pairs // HEADS_KV
        tile = program // pairs
        start = b.to(tl.int64) * length
        count = length
        count_other = length_other
    first_row = tile * TILE + tl.program_id(1) * BLOCK_M
    if first_row >= count * GROUP:
        return
    lane = tl.arange(0, BLOCK_M)
    row = first_row + lane
    live = row < count * GROUP
    token = start + row // GROUP
    head = r * GROUP + row % GROUP
    if PACKED:
        part = r.to(tl.int64) * tiles + start * GROUP // TILE + b + tile
    else:
        part = (r * requests + b).to(tl.int64) * tiles + tile
    column = tl.arange(0, BLOCK_D)
    keep = live[:, None] & (column < D)[None, :]
    HEADS: tl.constexpr = HEADS_KV * GROUP
    natural = ((token * HEADS + head) * D)[:, None] + column[None, :]
    if SPREAD:
        x += part * (TILE * BLOCK_D)
        lines = tl.load(x + spread_spots(BLOCK_M, BLOCK_D))
        result = gathered(lines, BLOCK_M, BLOCK_D, WARPS)
    else:
        result = tl.load(x + natural, mask=keep, other=0.0)
    if ROTARY > 0:
        HALF: tl.constexpr = ROTARY // 2
        if NEOX:
            first = column < HALF
            partner = tl.where(first, column + HALF, column - HALF)
            frequency = tl.where(first, column, column - HALF)
        else:
            first = column % 2 == 0
            partner = column ^ 1
            frequency = column // 2
        position = row // GROUP
        if QUERIES:
            position += count_other - count
        # Rows without another side are zero, and those past the offsets have no position.
        turned = live & (position >= 0) & (position < table_rows) & (count_other > 0)
        turned = turned[:, None] & (column < ROTARY)[None, :]
        if SPREAD:
            spot = spread_spot(lane[:, None], partner[None, :], BLOCK_M, BLOCK_D, WARPS)
        else:
            spot = ((token * HEADS + head) * D)[:, None] + partner[None, :]
        other = tl.load(x + spot, mask=turned, other=0.0)
        entry = (position.to(tl.int64) * HALF)[:, None] + frequency[None, :]
        c = tl.load(cos + entry, mask=turned, other=1.0).to(tl.float32)
        s = tl.load(sin + entry, mask=turned, other=0.0).to(tl.float32)
        result = result * c + tl.where(first[None, :], other, -other) * s
    result = (result * float32(scale)).to(out.dtype.element_ty)
    tl.store(out + natural, result, mask=keep)
