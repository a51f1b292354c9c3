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

from tileops.kernels.common.device import LOG2E, dot, find_request, float32, tanh, visible
from tileops.kernels.common.triton_rope import load_rows


@triton.jit
def clamp(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


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
def tile_spot(row, column, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, WARPS: tl.constexpr):
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
def weights_of(scores, levels, scale, cap, HAS_CAP: tl.constexpr):
    """Softmax weights of raw scores, and the slope of the softcap, 1 without one.

    scale takes scores to base-2 logits, or to the argument of the cap's tanh; it is cap then that
    takes tanh to base-2 logits.
    """
    if HAS_CAP:
        bent = tanh(scores * scale)
        slope = 1.0 - bent * bent
        logits = bent * cap
    else:
        slope = 1.0
        logits = scores * scale
    return tl.exp2(logits - levels), slope


@triton.jit
def visit_rows(
    dk,
    dv,
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
    token = tl.cast(first // GROUP, tl.int64)
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
    dweights = dot(values, tl.trans(grads), None)
    dscores = weights * (dweights - tl.load(deltas + first + lane)[None, :])
    if HAS_CAP:
        dscores *= slope
    dscores = dscores.to(keys.dtype)
    dk = dot(dscores, queries, dk)
    if FUSED:
        part = spread(dot(tl.trans(dscores), keys, None), BLOCK_M, BLOCK_D, WARPS)
        PIECES: tl.constexpr = BLOCK_M * BLOCK_D // (WARPS * 128)
        spot = tl.arange(0, PIECES)[:, None] * WARPS + tl.arange(0, WARPS)[None, :]
        spot = spot[:, :, None] * 128 + tl.arange(0, 128)[None, None, :]
        tl.atomic_add(
            dq + tl.cast(block, tl.int64) * (BLOCK_M * BLOCK_D) + spot, part, sem="relaxed"
        )
    return dk, dv


@triton.jit(
    do_not_specialize=[
        "requests",
        "tokens",
        "tokens_kv",
        "length_q",
        "length_kv",
        "tiles",
        "parts",
    ]
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

    logits = float32(scale) * LOG2E
    cap_logits = float32(cap) * LOG2E
    if HAS_CAP:
        logits = float32(scale) / float32(cap)
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
    for edge in tl.range(low, high - (plain_high - plain_low)):
        block = tl.where(edge < plain_low, edge, edge + plain_high - plain_low)
        dk_acc, dv_acc = visit_rows(
            dk_acc, dv_acc, keys, values, block, rows, key, kv_len, shift, q, do, levels + row,
            deltas + row, dq, logits, cap_logits, GROUP, D, Q_ROW, DO_ROW, LEFT, RIGHT, HAS_CAP,
            FUSED, True, BLOCK_M, BLOCK_D, WARPS,
        )  # fmt: skip
    for block in tl.range(plain_low, plain_high):
        dk_acc, dv_acc = visit_rows(
            dk_acc, dv_acc, keys, values, block, rows, key, kv_len, shift, q, do, levels + row,
            deltas + row, dq, logits, cap_logits, GROUP, D, Q_ROW, DO_ROW, LEFT, RIGHT, HAS_CAP,
            FUSED, False, BLOCK_M, BLOCK_D, WARPS,
        )  # fmt: skip

    column = tl.arange(0, BLOCK_D)
    at = token * (HEADS_KV * D) + r * D
    out = (lane * (HEADS_KV * D))[:, None] + column[None, :]
    keep = stored[:, None] & (column < D)[None, :]
    dk_acc *= float32(scale)
    tl.store(dk + at + out, dk_acc.to(dk.dtype.element_ty), mask=keep)
    tl.store(dv + at + out, dv_acc.to(dv.dtype.element_ty), mask=keep)


@triton.jit
def visit_keys(
    dq,
    queries,
    grads,
    level,
    delta,
    position,
    block,
    kv_len,
    k,
    v,
    scale,
    cap,
    D: tl.constexpr,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    EDGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """dq [M, BLOCK_D] with the share of one block of a request's keys added.

    k, v begin with the request. EDGE: some keys may not exist, or not be seen by every row.
    """
    first = block * BLOCK_N
    lane = tl.arange(0, BLOCK_N)
    key = first + lane
    if EDGE:
        lane = tl.minimum(lane, kv_len - 1 - first)
    token = tl.cast(first, tl.int64)
    keys = load_rows(
        k + token * K_ROW, lane * K_ROW, key >= 0, D, BLOCK_D, queries.dtype, False, True, False
    )
    scores = dot(queries, tl.trans(keys), None)
    weights, slope = weights_of(scores, level[:, None], scale, cap, HAS_CAP)
    if EDGE:
        seen = visible(position[:, None], key[None, :], kv_len, False, LEFT, RIGHT)
        weights = tl.where(seen, weights, 0.0)
    values = load_rows(
        v + token * V_ROW, lane * V_ROW, key >= 0, D, BLOCK_D, queries.dtype, False, True, False
    )
    dscores = weights * (dot(grads, tl.trans(values), None) - delta[:, None])
    if HAS_CAP:
        dscores *= slope
    return dot(dscores.to(queries.dtype), keys, dq)


@triton.jit(do_not_specialize=["requests", "tokens", "length_q", "length_kv", "tiles"])
def queries_kernel(
    q,
    k,
    v,
    do,
    levels,
    deltas,
    dq,
    offsets_q,
    offsets_kv,
    scale,
    cap,
    requests,
    tokens,
    length_q,
    length_kv,
    tiles,
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
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WAYS: tl.constexpr,
):
    """dq [tokens, H, D] of one tile of rows of one KV head.

    tiles: of a request (dense), or of the whole batch (PACKED).
    """
    program = tl.program_id(0)
    pairs = HEADS_KV
    if not PACKED:
        pairs *= requests
    if program >= tiles * pairs:
        return
    r = program % HEADS_KV
    # Last rows come first: under a causal mask they see most keys.
    _, tile, q_start, q_len, kv_start, kv_len = seat(
        tiles - 1 - program // pairs, program % pairs // HEADS_KV, offsets_q, offsets_kv, requests,
        tokens, length_q, length_kv, GROUP, BLOCK_M, PACKED, WAYS,
    )  # fmt: skip
    first = tile * BLOCK_M
    rows = q_len * GROUP
    if first >= rows:
        return

    lane = tl.arange(0, BLOCK_M)
    live = first + lane < rows
    token = q_start + first // GROUP
    shift = kv_len - q_len
    position = (first + lane) // GROUP + shift
    queries = load_rows(
        q + token * Q_ROW + r * GROUP * D, row_offsets(first, lane, GROUP, Q_ROW, D, BLOCK_M),
        live, D, BLOCK_D, q.dtype.element_ty, False, True, True,
    )  # fmt: skip
    grads = load_rows(
        do + token * DO_ROW + r * GROUP * D, row_offsets(first, lane, GROUP, DO_ROW, D, BLOCK_M),
        live, D, BLOCK_D, q.dtype.element_ty, False, True, True,
    )  # fmt: skip
    row = (r * tokens.to(tl.int64) + q_start) * GROUP + first
    level = tl.load(levels + row + lane, mask=live, other=float("inf"))
    delta = tl.load(deltas + row + lane, mask=live, other=0.0)

    # Keys that some row sees, [low, high), and that every row sees, [plain_low, plain_high).
    first_position = first // GROUP + shift
    last_position = tl.minimum((first + BLOCK_M - 1) // GROUP, q_len - 1) + shift
    low = 0
    high = kv_len
    plain_low = 0
    plain_high = kv_len
    if RIGHT >= 0:
        high = last_position + RIGHT + 1
        plain_high = first_position + RIGHT + 1
    if LEFT >= 0:
        low = first_position - LEFT
        plain_low = last_position - LEFT
    # The same in blocks of keys.
    low = clamp(low, 0, kv_len) // BLOCK_N
    high = tl.maximum(tl.cdiv(clamp(high, 0, kv_len), BLOCK_N), low)
    plain_low = clamp(tl.cdiv(clamp(plain_low, 0, kv_len), BLOCK_N), low, high)
    plain_high = clamp(clamp(plain_high, 0, kv_len) // BLOCK_N, plain_low, high)

    logits = float32(scale) * LOG2E
    cap_logits = float32(cap) * LOG2E
    if HAS_CAP:
        logits = float32(scale) / float32(cap)
    k += kv_start * K_ROW + r * D
    v += kv_start * V_ROW + r * D
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for block in tl.range(plain_low, plain_high):
        acc = visit_keys(
            acc, queries, grads, level, delta, position, block, kv_len, k, v, logits, cap_logits,
            D, K_ROW, V_ROW, LEFT, RIGHT, HAS_CAP, False, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    for edge in tl.range(low, high - (plain_high - plain_low)):
        block = tl.where(edge < plain_low, edge, edge + plain_high - plain_low)
        acc = visit_keys(
            acc, queries, grads, level, delta, position, block, kv_len, k, v, logits, cap_logits,
            D, K_ROW, V_ROW, LEFT, RIGHT, HAS_CAP, True, BLOCK_N, BLOCK_D,
        )  # fmt: skip

    column = tl.arange(0, BLOCK_D)
    at = token * (HEADS_KV * GROUP * D) + r * GROUP * D
    out = row_offsets(first, lane, GROUP, HEADS_KV * GROUP * D, D, BLOCK_M)
    acc *= float32(scale)
    tl.store(
        dq + at + out[:, None] + column[None, :],
        acc.to(dq.dtype.element_ty),
        mask=live[:, None] & (column < D)[None, :],
    )


@triton.jit(do_not_specialize=["requests", "tokens", "length_q", "blocks"])
def rows_kernel(
    o,
    do,
    lse,
    sinks,
    levels,
    deltas,
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
    """levels and deltas [H_kv, tokens, g] of BLOCK_T tokens of one KV head.

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
    end = tokens.to(tl.int64)
    if PACKED:
        end = tl.load(offsets_q + requests).to(tl.int64)
    exists = (token < tokens)[:, None] & (member < GROUP)[None, :]
    live = (token < end)[:, None] & exists
    column = tl.arange(0, BLOCK_D)[None, None, :]
    mask = live[:, :, None] & (column < D)
    at = (head * D)[None, :, None] + column
    out = tl.load(o + (token * O_ROW)[:, None, None] + at, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(do + (token * DO_ROW)[:, None, None] + at, mask=mask, other=0.0).to(tl.float32)
    delta = tl.sum(out * grad, 2)

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
    tl.store(levels + row, level, mask=exists)
    tl.store(deltas + row, delta, mask=exists)
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


@triton.jit
def partial_spot(
    row, column, part, token, head, HEADS: tl.constexpr, D: tl.constexpr,
    SPREAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Where float32 gradients lie: in parts that `spread` laid out, or as [tokens, HEADS, D]."""
    if SPREAD:
        spot = tile_spot(row[:, None], column[None, :], BLOCK_M, BLOCK_D, WARPS)
        return part * (BLOCK_M * BLOCK_D) + spot
    return ((token * HEADS + head) * D)[:, None] + column[None, :]


@triton.jit(
    do_not_specialize=["requests", "tokens", "length", "length_other", "tiles", "table_rows"]
)
def finish_kernel(
    x,
    out,
    cos,
    sin,
    offsets,
    offsets_other,
    scale,
    requests,
    tokens,
    length,
    length_other,
    tiles,
    table_rows,
    PACKED: tl.constexpr,
    QUERIES: tl.constexpr,
    SPREAD: tl.constexpr,
    HEADS_KV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    NEOX: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WARPS: tl.constexpr,
    WAYS: tl.constexpr,
):
    """out [tokens, H_kv * GROUP, D] = x scaled and, with ROTARY, rotated back.

    QUERIES: positions end where the other side's do; keys begin at 0.
    """
    program = tl.program_id(0)
    pairs = HEADS_KV
    if not PACKED:
        pairs *= requests
    if program >= tiles * pairs:
        return
    r = program % HEADS_KV
    at = program // pairs
    b, tile, start, count, _, count_other = seat(
        at, program % pairs // HEADS_KV, offsets, offsets_other, requests, tokens, length,
        length_other, GROUP, BLOCK_M, PACKED, WAYS,
    )  # fmt: skip
    lane = tl.arange(0, BLOCK_M)
    row = tile * BLOCK_M + lane
    live = row < count * GROUP
    token = start + row // GROUP
    head = r * GROUP + row % GROUP
    if PACKED:
        part = r.to(tl.int64) * tiles + at
    else:
        part = (r * requests + b).to(tl.int64) * tiles + tile
    column = tl.arange(0, BLOCK_D)
    keep = live[:, None] & (column < D)[None, :]
    HEADS: tl.constexpr = HEADS_KV * GROUP
    own_spot = partial_spot(
        lane, column, part, token, head, HEADS, D, SPREAD, BLOCK_M, BLOCK_D, WARPS
    )
    result = tl.load(x + own_spot, mask=keep, other=0.0)
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
        turned = live & (position >= 0) & (position < table_rows)
        turned = turned[:, None] & (column < ROTARY)[None, :]
        other_spot = partial_spot(
            lane, partner, part, token, head, HEADS, D, SPREAD, BLOCK_M, BLOCK_D, WARPS
        )
        other = tl.load(x + other_spot, mask=turned, other=0.0)
        entry = (position.to(tl.int64) * HALF)[:, None] + frequency[None, :]
        c = tl.load(cos + entry, mask=turned, other=1.0).to(tl.float32)
        s = tl.load(sin + entry, mask=turned, other=0.0).to(tl.float32)
        result = result * c + tl.where(first[None, :], other, -other) * s
    result = (result * float32(scale)).to(out.dtype.element_ty)
    tl.store(out + ((token * HEADS + head) * D)[:, None] + column[None, :], result, mask=keep)
