"""Gradients of grouped-query attention on the device, from the stored lse.

Rows are (token, query head) pairs of one KV head, as in the forward: row i of a request is head
i % GROUP of token i // GROUP. So a tile of rows covers few tokens, the whole group shares every
key that is loaded, and what the kernels hand each other is dense in the order of rows,
[H_kv, T_q, g]: `total`, the base-2 log-sum-exp that turns scores into weights, and
`delta` = <o, do>.

    rows_kernel     total and delta, and what each row takes from the sinks
    keys_kernel     dk and dv of a tile of keys, walking the rows that see them
    queries_kernel  dq of a tile of rows, walking the keys that they see
    finish_kernel   float32 gradients scaled, rotated back and rounded

With FUSED, keys_kernel also adds up dq, by float32 atomics in the order of rows, and
queries_kernel is not needed: five contractions a pair instead of seven.
"""

import triton
import triton.language as tl

from tileops.kernels.common.device import LOG2E, dot, find_request, tanh, visible
from tileops.kernels.common.triton_rope import load_rotated_rows, load_rows


@triton.jit
def seat(
    at,
    program,
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
    """Which request tile `at` lies in, tiles being BLOCK rows, `numerator` rows a token.

    Returns the tile's number in its request, the request's first token and length, and the
    first token and length of its other side. Packed tokens past the last request are one more
    request, whose other side is empty. Dense tiles of one number come together: program is the
    request.
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
        return tile, start, (end - start).to(tl.int32), other, (other_end - other).to(tl.int32)
    b = program.to(tl.int64)
    return at, b * length, length, b * length_other, length_other


@triton.jit
def row_offsets(
    lane, first, GROUP: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Element offsets of rows first + lane in [tokens, H, D] from row `first` rounded to its token.

    ROW: distance between tokens. Offsets of whole tokens are the same for every tile.
    """
    if BLOCK_M % GROUP == 0:
        return lane // GROUP * ROW + lane % GROUP * D
    row = first % GROUP + lane
    return row // GROUP * ROW + row % GROUP * D


@triton.jit
def weights_of(scores, total, scale, cap, HAS_CAP: tl.constexpr):
    """Softmax weights from raw scores, and the slope of the softcap (1 without one).

    scale takes scores to base-2 logits, or to the argument of the cap's tanh; cap then takes
    tanh to base-2 logits.
    """
    if HAS_CAP:
        bent = tanh(scores * scale)
        return tl.exp2(bent * cap - total), 1.0 - bent * bent
    return tl.exp2(scores * scale - total), 1.0


@triton.jit
def visit_rows(
    dk,
    dv,
    keys,
    values,
    first,
    rows,
    key,
    kv_len,
    shift,
    q,
    do,
    total,
    delta,
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
):
    """dk, dv [N, BLOCK_D] with the share of rows first .. first + BLOCK_M of a request added.

    q, do, total, delta, dq: at the request's first row. EDGE: some rows may not be there, or not
    see every key.
    """
    lane = tl.arange(0, BLOCK_M)
    inside = first + lane < rows
    if EDGE:
        lane = tl.minimum(lane, rows - 1 - first)
    token = (first // GROUP).to(tl.int64)
    queries = load_rows(
        q + token * Q_ROW, row_offsets(lane, first, GROUP, Q_ROW, D, BLOCK_M), inside,
        D, BLOCK_D, keys.dtype, False, True, False,
    )  # fmt: skip
    scores = dot(keys, tl.trans(queries), None)
    if EDGE:
        level = tl.load(total + first + lane, mask=inside, other=float("inf"))
    else:
        level = tl.load(total + first + lane)
    weights, slope = weights_of(scores, level[None, :], scale, cap, HAS_CAP)
    if EDGE:
        position = (first + lane) // GROUP + shift
        seen = visible(position[None, :], key[:, None], kv_len, False, LEFT, RIGHT)
        weights = tl.where(seen, weights, 0.0)
    grads = load_rows(
        do + token * DO_ROW, row_offsets(lane, first, GROUP, DO_ROW, D, BLOCK_M), inside,
        D, BLOCK_D, keys.dtype, False, True, False,
    )  # fmt: skip
    dv = dot(weights.to(keys.dtype), grads, dv)
    dweights = dot(values, tl.trans(grads), None)
    dscores = weights * (dweights - tl.load(delta + first + lane)[None, :])
    if HAS_CAP:
        dscores *= slope
    dscores = dscores.to(keys.dtype)
    dk = dot(dscores, queries, dk)
    if FUSED:
        part = dot(tl.trans(dscores), keys, None)
        column = tl.arange(0, BLOCK_D)
        out = dq + first.to(tl.int64) * D + (tl.arange(0, BLOCK_M) * D)[:, None] + column[None, :]
        tl.atomic_add(out, part, mask=inside[:, None] & (column < D)[None, :], sem="relaxed")
    return dk, dv


@triton.jit(do_not_specialize=["requests", "tokens", "tokens_kv", "length_q", "length_kv", "tiles"])
def keys_kernel(
    q,
    k,
    v,
    do,
    total,
    delta,
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
    WAYS: tl.constexpr,
):
    """dk and dv [tokens_kv, H_kv, D] of one tile of keys of one KV head.

    dq [H_kv, tokens, g, D] float32 gets its share added with FUSED.
    tiles: of a request (dense), or of the whole batch (PACKED).
    """
    program = tl.program_id(0)
    pairs = HEADS_KV
    if not PACKED:
        pairs *= requests
    if program >= tiles * pairs:
        return
    r = program % HEADS_KV
    # Tiles of the first keys come first: under a causal mask most rows see them.
    tile, kv_start, kv_len, q_start, q_len = seat(
        program // pairs, program % pairs // HEADS_KV, offsets_kv, offsets_q, requests, tokens_kv,
        length_kv, length_q, 1, BLOCK_N, PACKED, WAYS,
    )  # fmt: skip
    first_key = tile * BLOCK_N
    if first_key >= kv_len:
        return

    key = first_key + tl.arange(0, BLOCK_N)
    stored = key < kv_len
    lane = tl.arange(0, BLOCK_N)
    token = kv_start + first_key
    keys = load_rows(
        k + token * K_ROW + r * D, lane * K_ROW, stored, D, BLOCK_D, k.dtype.element_ty,
        False, True, True,
    )  # fmt: skip
    values = load_rows(
        v + token * V_ROW + r * D, lane * V_ROW, stored, D, BLOCK_D, k.dtype.element_ty,
        False, True, True,
    )  # fmt: skip

    # The rows that see some key of the tile, [low, high), and that see all, [plain_low, plain_high).
    rows = q_len * GROUP
    shift = kv_len - q_len
    low = 0
    high = q_len
    plain_low = 0
    plain_high = q_len
    if RIGHT >= 0:
        low = tl.minimum(tl.maximum(first_key - RIGHT - shift, 0), q_len)
        plain_low = first_key + BLOCK_N - 1 - RIGHT - shift
    if LEFT >= 0:
        last_key = tl.minimum(first_key + BLOCK_N, kv_len) - 1
        high = tl.minimum(tl.maximum(last_key + LEFT - shift + 1, low), q_len)
        plain_high = tl.minimum(first_key + LEFT - shift + 1, q_len)
    if FUSED:
        # Keys past the end must not reach dq.
        plain_high = tl.where(first_key + BLOCK_N <= kv_len, plain_high, 0)
    low *= GROUP
    high *= GROUP
    plain_low = tl.minimum(tl.maximum(plain_low * GROUP, low), high)
    plain_low = tl.minimum(low + tl.cdiv(plain_low - low, BLOCK_M) * BLOCK_M, high)
    plain_high = tl.maximum(plain_high * GROUP - plain_low, 0) // BLOCK_M * BLOCK_M + plain_low
    plain_high = tl.minimum(plain_high, plain_low + (high - plain_low) // BLOCK_M * BLOCK_M)

    logits = scale.to(tl.float32) * LOG2E
    cap_logits = cap.to(tl.float32) * LOG2E
    if HAS_CAP:
        logits = scale.to(tl.float32) / cap.to(tl.float32)
    head = r * GROUP * D
    first_row = (r * tokens.to(tl.int64) + q_start) * GROUP
    q += q_start * Q_ROW + head
    do += q_start * DO_ROW + head
    total += first_row
    delta += first_row
    dq += first_row * D
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    # Blocks of rows at the edges, before and after the others.
    before = (plain_low - low + BLOCK_M - 1) // BLOCK_M
    after = (high - plain_high + BLOCK_M - 1) // BLOCK_M
    for block in tl.range(0, before + after):
        first = tl.where(block < before, low, plain_high - before * BLOCK_M) + block * BLOCK_M
        dk_acc, dv_acc = visit_rows(
            dk_acc, dv_acc, keys, values, first, rows, key, kv_len, shift, q, do, total, delta,
            dq, logits, cap_logits, GROUP, D, Q_ROW, DO_ROW, LEFT, RIGHT, HAS_CAP, FUSED, True,
            BLOCK_M, BLOCK_D,
        )  # fmt: skip
    for first in tl.range(plain_low, plain_high, BLOCK_M):
        dk_acc, dv_acc = visit_rows(
            dk_acc, dv_acc, keys, values, first, rows, key, kv_len, shift, q, do, total, delta,
            dq, logits, cap_logits, GROUP, D, Q_ROW, DO_ROW, LEFT, RIGHT, HAS_CAP, FUSED, False,
            BLOCK_M, BLOCK_D,
        )  # fmt: skip

    column = tl.arange(0, BLOCK_D)
    at = token * (HEADS_KV * D) + r * D
    out = (lane * (HEADS_KV * D))[:, None] + column[None, :]
    keep = stored[:, None] & (column < D)[None, :]
    dk_acc *= scale.to(tl.float32)
    tl.store(dk + at + out, dk_acc.to(dk.dtype.element_ty), mask=keep)
    tl.store(dv + at + out, dv_acc.to(dv.dtype.element_ty), mask=keep)
