"""Gradients of grouped-query attention on the device: the contractions.

Rows are (token, query head) pairs of one KV head, as in the forward: row i of a request is head
i % GROUP of its token i // GROUP. So a block of rows covers few tokens, a whole group shares the
keys that are loaded, and what the kernels hand each other lies in the order of rows: `stats`
[2, H_kv, T_q, g], the base-2 log-sum-exp that takes a row's scores to weights, its level, and its
delta, <o, do>. `triton_backward_rows` makes them and finishes what is left in float32 here.

    keys_kernel     dk and dv of a tile of keys, walking the rows that see them
    queries_kernel  dq of a tile of rows, walking the keys they see

With FUSED, keys_kernel also adds dq up, by float32 atomics, and queries_kernel has nothing to do:
five contractions a pair instead of seven.
"""

import triton
import triton.language as tl

from tileops.kernels.common.device import LOG2E, dot, float32, int64, tanh, visible
from tileops.kernels.common.triton_rope import load_rows
from tileops.kernels.common.triton_tiles import spread, spread_spots


@triton.jit
def clamp(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


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
def row_values(x, row, BLOCK_M: tl.constexpr, WARPS: tl.constexpr):
    """x [BLOCK_M] of rows [BLOCK_M].

    Loaded with an element for every thread, several times over: of a smaller tile the compiler
    lets every thread copy all that it needs by itself, with the registers that this takes.
    """
    SPARE: tl.constexpr = WARPS * 32 // BLOCK_M
    COPIES: tl.constexpr = 4 if SPARE > 3 else 2 if SPARE > 1 else 1
    copies = tl.load(x + (tl.arange(0, COPIES) * 0)[:, None] + row[None, :])
    copies = tl.trans(copies)
    if COPIES == 4:
        copies, _ = tl.split(tl.reshape(copies, [BLOCK_M, 2, 2]))
    if COPIES > 1:
        copies, _ = tl.split(tl.reshape(copies, [BLOCK_M, 1, 2]))
    return tl.reshape(copies, [BLOCK_M])


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
    grad_o,
    stats,
    far,
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
    EARLY: tl.constexpr,
    EDGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WARPS: tl.constexpr,
):
    """dk, dv [N, BLOCK_D] with the share of one block of a request's rows added.

    q, grad_o, stats and dq begin with the request. EDGE: some rows may not exist, or not see
    every key.
    EARLY: the product for dv runs while dweights do, that for dk while dscores turn into dq's
        operand. Else dv's does the latter, and dk's runs while dq is added.
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
    level = row_values(stats, first + lane, BLOCK_M, WARPS)
    if EDGE:
        level = tl.where(inside, level, float("inf"))
    weights, slope = weights_of(scores, level[None, :], scale, cap, HAS_CAP)
    if EDGE:
        position = (first + lane) // GROUP + shift
        seen = visible(position[None, :], key[:, None], kv_len, LEFT, RIGHT)
        weights = tl.where(seen, weights, 0.0)
    grads = load_rows(
        grad_o + token * DO_ROW, row_offsets(first, lane, GROUP, DO_ROW, D, BLOCK_M), inside,
        D, BLOCK_D, keys.dtype, False, True, False,
    )  # fmt: skip
    low_weights = weights.to(keys.dtype)
    if EARLY:
        dv = dot(low_weights, grads, dv)
    # Deltas are needed no earlier, and registers are short.
    dscores = dot(values, tl.trans(grads), None)
    dscores -= row_values(stats + far, first + lane, BLOCK_M, WARPS)[None, :]
    dscores *= weights
    if HAS_CAP:
        dscores *= slope
    dscores = dscores.to(keys.dtype)
    if EARLY:
        dk = dot(dscores, queries, dk)
    else:
        dv = dot(low_weights, grads, dv)
    if FUSED:
        part = spread(dot(tl.trans(dscores), keys, None), BLOCK_M, BLOCK_D, WARPS)
    if not EARLY:
        dk = dot(dscores, queries, dk)
    if FUSED:
        dq += tl.cast(block, tl.int64) * (BLOCK_M * BLOCK_D)
        tl.atomic_add(dq + spread_spots(BLOCK_M, BLOCK_D), part, sem="relaxed")
    return dk, dv


@triton.jit(
    do_not_specialize=[
        "requests",
        "tokens",
        "length_q",
        "length_kv",
        "tiles",
        "splits",
        "parts",
    ]
)
def keys_kernel(
    q,
    k,
    v,
    grad_o,
    stats,
    dk,
    dv,
    dk_sum,
    dv_sum,
    dq_sum,
    places,
    scale,
    cap,
    requests,
    tokens,
    length_q,
    length_kv,
    tiles,
    splits,
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
    WIDE: tl.constexpr,
    FUSED: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
):
    """dk and dv [tokens_kv, H_kv, D] of one tile of keys of one KV head.

    tiles: of a request (dense), or of the whole batch (PACKED), which places tells apart.
    splits: parts that the rows of a tile are walked in. With more than one, the parts add up in
        dk_sum and dv_sum, float32, and dk and dv are not written. WIDE: dk_sum is in any case.
    FUSED: so do the shares of dq in dq_sum [H_kv, parts, BLOCK_M * BLOCK_D], each part a block of
        rows as `spread` lays it out. They still lack the scale.
    """
    program = tl.program_id(0)
    split = tl.program_id(1)
    pairs = HEADS_KV
    if not PACKED:
        pairs *= requests
    if program >= tiles * pairs:
        return
    r = program % HEADS_KV
    if PACKED:
        # In the body: what a function loads, compilers take for what its results point into.
        place = places + (program // pairs).to(tl.int64) * 6
        b = tl.load(place)
        tile = tl.load(place + 1)
        kv_start = tl.load(place + 2).to(tl.int64)
        kv_len = tl.load(place + 3)
        q_start = tl.load(place + 4).to(tl.int64)
        q_len = tl.load(place + 5)
    else:
        b = program % pairs // HEADS_KV
        # First keys come first: under a causal mask most rows see them.
        tile = program // pairs
        kv_start = b.to(tl.int64) * length_kv
        kv_len = length_kv
        q_start = b.to(tl.int64) * length_q
        q_len = length_q
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
    # The same in blocks of rows, and of them the part of this split.
    low = clamp(low, 0, q_len) * GROUP // BLOCK_M
    high = tl.maximum(tl.cdiv(clamp(high, 0, q_len) * GROUP, BLOCK_M), low)
    share = tl.cdiv(high - low, splits)
    low = tl.minimum(low + split * share, high)
    high = tl.minimum(low + share, high)
    plain_low = clamp(tl.cdiv(clamp(plain_low, 0, q_len) * GROUP, BLOCK_M), low, high)
    plain_high = clamp(clamp(plain_high, 0, q_len) * GROUP // BLOCK_M, plain_low, high)

    logits = float32(scale) * LOG2E
    cap_logits = float32(cap) * LOG2E
    if HAS_CAP:
        logits = float32(scale) / float32(cap)
    q += q_start * Q_ROW + r * GROUP * D
    grad_o += q_start * DO_ROW + r * GROUP * D
    row = (r * int64(tokens) + q_start) * GROUP
    stats += row
    far = HEADS_KV * GROUP * int64(tokens)
    if FUSED:
        part = r * int64(parts)
        if PACKED:
            part += q_start * GROUP // BLOCK_M + b
        else:
            part += b.to(tl.int64) * tl.cdiv(rows, BLOCK_M)
        dq_sum += part * (BLOCK_M * BLOCK_D)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    # Wide heads have no registers left for what does not change in a loop.
    WIDE_HEAD: tl.constexpr = BLOCK_D > 128
    for edge in tl.range(low, high - (plain_high - plain_low), disable_licm=WIDE_HEAD):
        block = tl.where(edge < plain_low, edge, edge + plain_high - plain_low)
        dk_acc, dv_acc = visit_rows(
            dk_acc, dv_acc, keys, values, block, rows, key, kv_len, shift, q, grad_o, stats, far,
            dq_sum, logits, cap_logits, GROUP, D, Q_ROW, DO_ROW, LEFT, RIGHT, HAS_CAP, FUSED,
            EARLY, True, BLOCK_M, BLOCK_D, WARPS,
        )  # fmt: skip
    for block in tl.range(plain_low, plain_high, disable_licm=WIDE_HEAD):
        dk_acc, dv_acc = visit_rows(
            dk_acc, dv_acc, keys, values, block, rows, key, kv_len, shift, q, grad_o, stats, far,
            dq_sum, logits, cap_logits, GROUP, D, Q_ROW, DO_ROW, LEFT, RIGHT, HAS_CAP, FUSED,
            EARLY, False, BLOCK_M, BLOCK_D, WARPS,
        )  # fmt: skip

    column = tl.arange(0, BLOCK_D)
    at = token * (HEADS_KV * D) + r * D
    out = (lane * (HEADS_KV * D))[:, None] + column[None, :]
    keep = stored[:, None] & (column < D)[None, :]
    dk_acc *= float32(scale)
    if splits == 1:
        if WIDE:
            tl.store(dk_sum + at + out, dk_acc, mask=keep)
        else:
            tl.store(dk + at + out, dk_acc.to(dk.dtype.element_ty), mask=keep)
        tl.store(dv + at + out, dv_acc.to(dv.dtype.element_ty), mask=keep)
    else:
        tl.atomic_add(dk_sum + at + out, dk_acc, mask=keep, sem="relaxed")
        tl.atomic_add(dv_sum + at + out, dv_acc, mask=keep, sem="relaxed")


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
        seen = visible(position[:, None], key[None, :], kv_len, LEFT, RIGHT)
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
    grad_o,
    stats,
    dq,
    places,
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
):
    """dq [tokens, H, D] of one tile of rows of one KV head.

    tiles: of a request (dense), or of the whole batch (PACKED), which places tells apart.
    """
    program = tl.program_id(0)
    pairs = HEADS_KV
    if not PACKED:
        pairs *= requests
    if program >= tiles * pairs:
        return
    r = program % HEADS_KV
    if PACKED:
        # In the body: what a function loads, compilers take for what its results point into.
        place = places + (program // pairs).to(tl.int64) * 6
        tile = tl.load(place + 1)
        q_start = tl.load(place + 2).to(tl.int64)
        q_len = tl.load(place + 3)
        kv_start = tl.load(place + 4).to(tl.int64)
        kv_len = tl.load(place + 5)
    else:
        b = program % pairs // HEADS_KV
        # Last rows come first: under a causal mask they see most keys.
        tile = tiles - 1 - program // pairs
        q_start = b.to(tl.int64) * length_q
        q_len = length_q
        kv_start = b.to(tl.int64) * length_kv
        kv_len = length_kv
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
        grad_o + token * DO_ROW + r * GROUP * D,
        row_offsets(first, lane, GROUP, DO_ROW, D, BLOCK_M), live, D, BLOCK_D,
        q.dtype.element_ty, False, True, True,
    )  # fmt: skip
    row = (r * int64(tokens) + q_start) * GROUP + first
    level = tl.load(stats + row + lane, mask=live, other=float("inf"))
    far = HEADS_KV * GROUP * int64(tokens)
    delta = tl.load(stats + far + row + lane, mask=live, other=0.0)

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
