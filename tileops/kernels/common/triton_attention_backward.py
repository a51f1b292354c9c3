"""Gradients of grouped-query attention on the device, from the stored lse.

Rows are (token, query head) pairs of one KV head, as in the forward: row i of a request is head
i % GROUP of its token i // GROUP. So a block of rows covers few tokens, a whole group shares the
keys that are loaded, and what the kernels hand each other is dense in the order of rows,
[H_kv, T_q, g]: `levels`, the base-2 log-sum-exp that takes scores to weights, and `deltas`,
<o, do>.

    rows_kernel     levels and deltas, and what the sinks take from each block of rows
    keys_kernel     dk and dv of a tile of keys, walking the rows that see them
    queries_kernel  dq of a tile of rows, walking the keys they see
    finish_kernel   float32 gradients scaled, rotated back and rounded

With FUSED, keys_kernel also adds dq up, by float32 atomics, and queries_kernel has nothing to do:
five contractions a pair instead of seven.
"""

import triton
import triton.language as tl

from tileops.kernels.common.device import LOG2E, dot, find_request, tanh, visible
from tileops.kernels.common.triton_rope import load_rows


@triton.jit
def seat(
    at,
    dense_b,
    offsets,
    offsets_other,
    requests,
    tokens,
    length,
    length_other,
    numerator: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
    WAYS: tl.constexpr,
):
    """The request that tile `at` lies in, tiles being BLOCK rows, `numerator` rows a token.

    Returns the request, the tile's number in it, its first token and length, and the first token
    and length of its other side. Packed tokens past the last request are one more request, whose
    other side is empty. Dense tiles are numbered by request, which is dense_b.
    """
    if PACKED:
        b = find_request(offsets, requests + 1, numerator, BLOCK, at, WAYS)
        real = b < requests
        start = tl.load(offsets + b).to(tl.int64)
        end = tl.load(offsets + b + 1, mask=real, other=0).to(tl.int64)
        end = tl.where(real, end, tokens)
        other = tl.load(offsets_other + b, mask=real, other=0).to(tl.int64)
        other_end = tl.load(offsets_other + b + 1, mask=real, other=0).to(tl.int64)
        tile = at - (start * numerator // BLOCK).to(tl.int32) - b
        return b, tile, start, (end - start).to(tl.int32), other, (other_end - other).to(tl.int32)
    first = dense_b.to(tl.int64)
    return dense_b, at, first * length, length, first * length_other, length_other


@triton.jit
def row_offsets(
    first, lane, GROUP: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Elements from the token of row `first` to rows first + lane of [tokens, H, D].

    ROW: elements between tokens. With whole tokens to a block they do not depend on first.
    """
    row = lane
    if BLOCK_M % GROUP != 0:
        row += first % GROUP
    return row // GROUP * ROW + row % GROUP * D


@triton.jit
def tile_spot(
    row, column, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, WARPS: tl.constexpr
):
    """Where `spread` puts element (row, column) of a [BLOCK_M, BLOCK_D] tile."""
    ROW_WARPS: tl.constexpr = min(WARPS, BLOCK_M // 16)
    COLUMN_WARPS: tl.constexpr = WARPS // ROW_WARPS
    COLUMNS: tl.constexpr = BLOCK_D // COLUMN_WARPS
    warp = column // COLUMNS * ROW_WARPS + row // 16 % ROW_WARPS
    piece = (row // 16 // ROW_WARPS * 2 + row // 8 % 2) * (COLUMNS // 16) + column % COLUMNS // 16
    lane = row % 8 * 4 + column // 2 % 4
    return (piece * WARPS + warp) * 128 + lane * 4 + column // 8 % 2 * 2 + column % 2


@triton.jit
def spread(x, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, WARPS: tl.constexpr):
    """x [BLOCK_M, BLOCK_D] as [pieces, WARPS, 128]: four elements a lane, as a warpgroup's
    accumulator holds them, so that nothing moves and every warp writes whole lines."""
    ROW_WARPS: tl.constexpr = min(WARPS, BLOCK_M // 16)
    COLUMN_WARPS: tl.constexpr = WARPS // ROW_WARPS
    ROW_TILES: tl.constexpr = BLOCK_M // 16 // ROW_WARPS
    COLUMN_TILES: tl.constexpr = BLOCK_D // 16 // COLUMN_WARPS
    x = tl.reshape(x, [ROW_TILES, ROW_WARPS, 2, 8, COLUMN_WARPS, COLUMN_TILES, 2, 4, 2])
    x = tl.permute(x, [0, 2, 5, 4, 1, 3, 7, 6, 8])
    return tl.reshape(x, [ROW_TILES * 2 * COLUMN_TILES, WARPS, 128])


@triton.jit
def add_part(dq, part, block, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, WARPS: tl.constexpr):
    """Add part [BLOCK_M, BLOCK_D] to block `block` of dq; nothing for a negative one."""
    PIECES: tl.constexpr = BLOCK_M * BLOCK_D // (WARPS * 128)
    spot = tl.arange(0, PIECES)[:, None] * WARPS + tl.arange(0, WARPS)[None, :]
    spot = spot[:, :, None] * 128 + tl.arange(0, 128)[None, None, :]
    spread_part = spread(part, BLOCK_M, BLOCK_D, WARPS)
    dq += block.to(tl.int64) * (BLOCK_M * BLOCK_D)
    tl.atomic_add(dq + spot, spread_part, mask=(spot >= 0) & (block >= 0), sem="relaxed")


@triton.jit
def weights_of(scores, levels, scale, cap, HAS_CAP: tl.constexpr):
    """Softmax weights of raw scores, and the slope of the softcap, 1 without one.

    scale takes scores to base-2 logits, or to the argument of the cap's tanh; it is cap then that
    takes tanh to base-2 logits.
    """
    if HAS_CAP:
        bent = tanh(scores * scale)
        return tl.exp2(bent * cap - levels), 1.0 - bent * bent
    return tl.exp2(scores * scale - levels), 1.0


@triton.jit
def visit_rows(
    dk,
    dv,
    part,
    part_block,
    keys,
    values,
    block,
    rows,
    key,
    kv_len,
    shift,
    q,
    do,
    levels,
    deltas,
    dq,
    scale,
    cap,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    Q_ROW: tl.constexpr,
    DO_ROW: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    FUSED: tl.constexpr,
    EDGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WARPS: tl.constexpr,
):
    """dk, dv [N, BLOCK_D] with the share of one block of a request's rows added.

    q, do, levels, deltas and dq begin with the request. EDGE: some rows may not exist, or not see
    every key.
    """
    first = block * BLOCK_M
    lane = tl.arange(0, BLOCK_M)
    inside = first + lane < rows
    if EDGE:
        lane = tl.minimum(lane, rows - 1 - first)
    token = (first // GROUP).to(tl.int64)
    queries = load_rows(
        q + token * Q_ROW, row_offsets(first, lane, GROUP, Q_ROW, D, BLOCK_M), inside,
        D, BLOCK_D, keys.dtype, False, True, False,
    )  # fmt: skip
    scores = dot(keys, tl.trans(queries), None)
    if EDGE:
        level = tl.load(levels + first + lane, mask=inside, other=float("inf"))
    else:
        level = tl.load(levels + first + lane)
    weights, slope = weights_of(scores, level[None, :], scale, cap, HAS_CAP)
    if EDGE:
        position = (first + lane) // GROUP + shift
        seen = visible(position[None, :], key[:, None], kv_len, False, LEFT, RIGHT)
        weights = tl.where(seen, weights, 0.0)
    grads = load_rows(
        do + token * DO_ROW, row_offsets(first, lane, GROUP, DO_ROW, D, BLOCK_M), inside,
        D, BLOCK_D, keys.dtype, False, True, False,
    )  # fmt: skip
    dv = dot(weights.to(keys.dtype), grads, dv)
    if FUSED:
        add_part(dq, part, part_block, BLOCK_M, BLOCK_D, WARPS)
    dweights = dot(values, tl.trans(grads), None)
    dscores = weights * (dweights - tl.load(deltas + first + lane)[None, :])
    if HAS_CAP:
        dscores *= slope
    dscores = dscores.to(keys.dtype)
    dk = dot(dscores, queries, dk)
    if FUSED:
        part = dot(tl.trans(dscores), keys, None)
    return dk, dv, part


@triton.jit(
    do_not_specialize=["requests", "tokens", "tokens_kv", "length_q", "length_kv", "tiles", "parts"]
)
def keys_kernel(
    q,
    k,
    v,
    do,
    levels,
    deltas,
    dq,
    dk,
    dv,
    offsets_q,
    offsets_kv,
    scale,
    cap,
    requests,
    tokens,
    tokens_kv,
    length_q,
    length_kv,
    tiles,
    parts,
    PACKED: tl.constexpr,
    HEADS_KV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    DO_ROW: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    FUSED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    WAYS: tl.constexpr,
):
    """dk and dv [tokens_kv, H_kv, D] of one tile of keys of one KV head.

    tiles: of a request (dense), or of the whole batch (PACKED).
    FUSED: dq [H_kv, parts, BLOCK_M * BLOCK_D] float32 gets its share added; parts are blocks of
        rows, each laid out by `spread`.
    """
    program = tl.program_id(0)
    pairs = HEADS_KV
    if not PACKED:
        pairs *= requests
    if program >= tiles * pairs:
        return
    r = program % HEADS_KV
    # First keys come first: under a causal mask most rows see them.
    b, tile, kv_start, kv_len, q_start, q_len = seat(
        program // pairs, program % pairs // HEADS_KV, offsets_kv, offsets_q, requests, tokens_kv,
        length_kv, length_q, 1, BLOCK_N, PACKED, WAYS,
    )  # fmt: skip
    first_key = tile * BLOCK_N
    if first_key >= kv_len:
        return

    lane = tl.arange(0, BLOCK_N)
    key = first_key + lane
    stored = key < kv_len
    token = kv_start + first_key
    keys = load_rows(
        k + token * K_ROW + r * D, lane * K_ROW, stored, D, BLOCK_D, k.dtype.element_ty,
        False, True, True,
    )  # fmt: skip
    values = load_rows(
        v + token * V_ROW + r * D, lane * V_ROW, stored, D, BLOCK_D, k.dtype.element_ty,
        False, True, True,
    )  # fmt: skip

    # Tokens that see some key of the tile, [low, high), and every key, [plain_low, plain_high).
    rows = q_len * GROUP
    shift = kv_len - q_len
    low = 0
    high = q_len
    plain_low = 0
    plain_high = q_len
    if RIGHT >= 0:
        low = first_key - RIGHT - shift
        plain_low = first_key + BLOCK_N - 1 - RIGHT - shift
    if LEFT >= 0:
        high = tl.minimum(first_key + BLOCK_N, kv_len) + LEFT - shift
        plain_high = first_key + LEFT - shift + 1
    if FUSED:
        # Keys past the end must not reach dq.
        plain_high = tl.where(first_key + BLOCK_N <= kv_len, plain_high, 0)
    # The same in blocks of rows.
    low = clamp(low, 0, q_len) * GROUP // BLOCK_M
    high = tl.maximum(tl.cdiv(clamp(high, 0, q_len) * GROUP, BLOCK_M), low)
    plain_low = clamp(tl.cdiv(clamp(plain_low, 0, q_len) * GROUP, BLOCK_M), low, high)
    plain_high = clamp(clamp(plain_high, 0, q_len) * GROUP // BLOCK_M, plain_low, high)

    logits = scale.to(tl.float32) * LOG2E
    cap_logits = cap.to(tl.float32) * LOG2E
    if HAS_CAP:
        logits = scale.to(tl.float32) / cap.to(tl.float32)
    q += q_start * Q_ROW + r * GROUP * D
    do += q_start * DO_ROW + r * GROUP * D
    row = (r * tokens.to(tl.int64) + q_start) * GROUP
    if FUSED:
        part = r * parts.to(tl.int64)
        if PACKED:
            part += q_start * GROUP // BLOCK_M + b
        else:
            part += b.to(tl.int64) * tl.cdiv(rows, BLOCK_M)
        dq += part * (BLOCK_M * BLOCK_D)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    part = 0
    if FUSED:
        part = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    part_block = tl.full([], -1, tl.int32)
    for edge in tl.range(low, high - (plain_high - plain_low)):
        block = tl.where(edge < plain_low, edge, edge + plain_high - plain_low)
        dk_acc, dv_acc, part = visit_rows(
            dk_acc, dv_acc, part, part_block, keys, values, block, rows, key, kv_len, shift, q, do, levels + row,
            deltas + row, dq, logits, cap_logits, GROUP, D, Q_ROW, DO_ROW, LEFT, RIGHT, HAS_CAP,
            FUSED, True, BLOCK_M, BLOCK_D, WARPS,
        )  # fmt: skip
        part_block = block
    for block in tl.range(plain_low, plain_high):
        dk_acc, dv_acc, part = visit_rows(
            dk_acc, dv_acc, part, part_block, keys, values, block, rows, key, kv_len, shift, q, do, levels + row,
            deltas + row, dq, logits, cap_logits, GROUP, D, Q_ROW, DO_ROW, LEFT, RIGHT, HAS_CAP,
            FUSED, False, BLOCK_M, BLOCK_D, WARPS,
        )  # fmt: skip
        part_block = block
    if FUSED:
        add_part(dq, part, part_block, BLOCK_M, BLOCK_D, WARPS)

    column = tl.arange(0, BLOCK_D)
    at = token * (HEADS_KV * D) + r * D
    out = (lane * (HEADS_KV * D))[:, None] + column[None, :]
    keep = stored[:, None] & (column < D)[None, :]
    dk_acc *= scale.to(tl.float32)
    tl.store(dk + at + out, dk_acc.to(dk.dtype.element_ty), mask=keep)
    tl.store(dv + at + out, dv_acc.to(dv.dtype.element_ty), mask=keep)


@triton.jit
def clamp(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)
