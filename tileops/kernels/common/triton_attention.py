"""Grouped-query attention on the device: one kernel for dense, packed and paged keys.

A program serves one tile of rows of one KV head of one request. The rows of a tile are (token,
query head) pairs, so that the whole group shares every key that is loaded; a decode step is a
narrow tile, a prefill a wide one. Keys are walked in blocks of BLOCK_N, at most three ranges one
after another: masked at the left window, plain, masked at the diagonal and the end.

Where programs would be too few for the machine, the keys of every tile are split; each part
leaves its normalised output and base-2 log-sum-exp, and `combine_kernel` joins them.
"""

import triton
import triton.language as tl

from tileops.kernels.common.device import (
    LN2,
    LOG2E,
    dot,
    find_request,
    float32,
    softmax_step,
    tanh,
    visible,
)
from tileops.kernels.common.triton_rope import load_rotated_rows, load_rows


@triton.jit
def key_rows(
    start, kv_start, kv_len, table, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, TAIL: tl.constexpr
):
    """Rows [BLOCK_N] int64 of keys start, start + 1, ...; table is that of the request."""
    # No early returns: Triton compiles what follows one even behind a constexpr.
    key = start + tl.arange(0, BLOCK_N)
    if PAGE % BLOCK_N == 0:
        row = first_row(start, kv_start, table, PAGE) + tl.arange(0, BLOCK_N)
    elif TAIL:
        page = tl.load(table + key // PAGE, mask=key < kv_len, other=0)
        row = page.to(tl.int64) * PAGE + key % PAGE
    else:
        row = tl.load(table + key // PAGE).to(tl.int64) * PAGE + key % PAGE
    return row


@triton.jit
def first_row(start, kv_start, table, PAGE: tl.constexpr):
    """The row of key `start`, which begins a block that no page edge divides."""
    if PAGE == 0:
        row = kv_start + start
    else:
        row = tl.load(table + start // PAGE).to(tl.int64) * PAGE + start % PAGE
    return row


@triton.jit
def attend_range(
    acc,
    top,
    total,
    q,
    positions,
    begin,
    end,
    k,
    v,
    head,
    kv_start,
    kv_len,
    table,
    cos,
    sin,
    scale,
    cap,
    k_tiles,
    v_tiles,
    MASKED: tl.constexpr,
    TAIL: tl.constexpr,
    PAGE: tl.constexpr,
    TILES: tl.constexpr,
    HOISTED: tl.constexpr,
    D: tl.constexpr,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    ROTARY: tl.constexpr,
    NEOX: tl.constexpr,
    K8: tl.constexpr,
    V8: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    dtype: tl.constexpr,
):
    """Attend rows q [M, BLOCK_D] at positions [M] to keys [begin, end), BLOCK_N at a time.

    head: the first column of the KV head. scale takes q . k to base-2 logits, or to the argument
    of the cap's tanh; with a cap it is cap that takes tanh to base-2 logits. dtype: of the
    weights and values. MASKED: some row may not see some key. TAIL: keys may lie past kv_len.
    HOISTED: what does not change is kept in registers, of which wide tiles have none to spare.
    """
    for start in tl.range(begin, end, BLOCK_N, disable_licm=HOISTED == 0):
        key = start + tl.arange(0, BLOCK_N)
        stored = key < kv_len
        if TILES:
            row0 = first_row(start, kv_start, table, PAGE).to(tl.int32)
            keys = k_tiles.load([row0, head])
        else:
            row = key_rows(start, kv_start, kv_len, table, BLOCK_N, PAGE, TAIL)
            at = head + row * K_ROW
            if ROTARY > 0:
                keys = load_rotated_rows(
                    k, at, stored, key, cos, sin, D, BLOCK_D, ROTARY, NEOX, K8, NATIVE
                ).to(q.dtype)
            elif K8 and q.dtype == k.dtype.element_ty:
                keys = load_rows(k, at, stored, D, BLOCK_D, q.dtype, False, True, TAIL)
            else:
                keys = load_rows(k, at, stored, D, BLOCK_D, q.dtype, K8, NATIVE, TAIL)
        scores = dot(q, tl.trans(keys), None)
        factor = scale
        if HAS_CAP:
            scores = tanh(scores * scale)
            factor = cap
        if MASKED:
            seen = visible(positions[:, None], key[None, :], kv_len, LEFT, RIGHT)
            scores = tl.where(seen, scores, float("-inf"))
        weights, fade, top, total = softmax_step(scores, top, total, factor, MASKED)
        if TILES:
            values = v_tiles.load([row0, head])
            if TAIL:
                values = tl.where(stored[:, None], values, 0.0)
        else:
            values = load_rows(v, head + row * V_ROW, stored, D, BLOCK_D, dtype, V8, NATIVE, TAIL)
        acc = dot(weights.to(dtype), values, acc * fade[:, None])
    return acc, top, total


@triton.jit
def locate(
    program,
    offsets_q,
    offsets_kv,
    lengths,
    requests,
    tokens,
    length_q,
    length_kv,
    spacing_kv,
    spacing_head,
    tiles,
    section,
    PACKED: tl.constexpr,
    PAGE: tl.constexpr,
    APPENDED: tl.constexpr,
    HEADS_KV: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WAYS: tl.constexpr,
):
    """Tile `program`: request, KV head, first row, first token and its count, first key, count.

    Tiles run backwards: under a causal mask the last ones of a request see most keys.
    """
    if PACKED:
        tile = tiles - 1 - program // HEADS_KV
        r = program % HEADS_KV
        b = find_request(offsets_q, requests + 1, GROUP, BLOCK_M, tile, WAYS)
        # Rows past the last request are padding, a request without keys.
        real = b < requests
        q_start = tl.load(offsets_q + b).to(tl.int64)
        q_end = tl.load(offsets_q + b + 1, mask=real, other=0).to(tl.int64)
        q_end = tl.where(real, q_end, tokens)
        q_len = (q_end - q_start).to(tl.int32)
        tile -= (q_start * GROUP // BLOCK_M).to(tl.int32) + b
        kv_start = q_start * 0
        if PAGE > 0:
            kv_len = tl.load(lengths + b, mask=real, other=0)
            if APPENDED:
                kv_len = tl.where(real, kv_len + q_len, 0)
        else:
            kv_start = tl.load(offsets_kv + b, mask=real, other=0).to(tl.int64)
            kv_len = tl.load(offsets_kv + b + 1, mask=real, other=0) - kv_start.to(tl.int32)
        b = tl.where(real, b, 0)
    else:
        pairs = requests * HEADS_KV
        group = program // (section * tiles)
        pairs_here = tl.minimum(section, pairs - group * section)
        place = program - group * section * tiles
        tile = tiles - 1 - place // pairs_here
        pair = group * section + place % pairs_here
        b = pair // HEADS_KV
        r = pair % HEADS_KV
        q_len = length_q
        q_start = b.to(tl.int64) * length_q
        kv_start = b.to(tl.int64) * spacing_kv + r.to(tl.int64) * spacing_head
        kv_len = tl.load(lengths + b) if PAGE > 0 else length_kv
    return b, r, tile * BLOCK_M, q_start, q_len, kv_start, kv_len


@triton.jit
def normaliser(top, total, sink, HAS_SINK: tl.constexpr):
    """What turns accumulated values into the output, and the base-2 log-sum-exp without sink.

    top, total: as `softmax_step` leaves them; sink: base-2 logits. No key gives 0 and -inf.
    """
    lse = top + tl.log2(total)
    if HAS_SINK:
        peak = tl.maximum(top, sink)
        share = tl.exp2(top - peak)
        mass = total * share + tl.exp2(sink - peak)
        weight = tl.where(sink == float("inf"), 0.0, share / mass)
    else:
        weight = 1.0 / total
    return tl.where(total == 0.0, 0.0, weight), lse


@triton.jit(
    do_not_specialize=[
        "requests",
        "tokens",
        "length_q",
        "length_kv",
        "spacing_kv",
        "spacing_head",
        "width",
        "tiles",
        "programs",
        "section",
        "splits",
    ]
)
def attention_kernel(
    q,
    k,
    v,
    o,
    lse,
    partial_o,
    partial_lse,
    offsets_q,
    offsets_kv,
    lengths,
    table,
    q_scale,
    k_scale,
    v_scale,
    sinks,
    cos,
    sin,
    k_new,
    v_new,
    k_tiles,
    v_tiles,
    o_tiles,
    scale,
    cap,
    requests,
    tokens,
    length_q,
    length_kv,
    spacing_kv,
    spacing_head,
    width,
    tiles,
    programs,
    section,
    splits,
    PACKED: tl.constexpr,
    PAGE: tl.constexpr,
    APPENDED: tl.constexpr,
    FRESH: tl.constexpr,
    HEADS_KV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    K_NEW_ROW: tl.constexpr,
    V_NEW_ROW: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    ROTARY: tl.constexpr,
    NEOX: tl.constexpr,
    Q8: tl.constexpr,
    K8: tl.constexpr,
    V8: tl.constexpr,
    NATIVE: tl.constexpr,
    Q_SCALED: tl.constexpr,
    KV_SCALED: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    TILES: tl.constexpr,
    HOISTED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WAYS: tl.constexpr,
):
    """o, or its parts, for tiles of (token, query head) rows of one KV head.

    tiles: of a request (dense), or of the whole batch (PACKED). programs: tiles of all KV heads.
    section: (request, KV head) pairs whose keys fit the L2 cache together, dense only.
    splits: parts in which the keys of a tile are walked.
    spacing_kv: rows from the first key of a dense request to that of the next.
    HEADS_FIRST: dense rows are of one head; heads begin spacing_head rows apart.
    PACKED: offsets_q [requests + 1] delimits the requests of q [tokens, H, D].
    PAGE: rows of a page behind table [requests, width], 0 for keys without pages: packed behind
        offsets_kv, or dense.
    APPENDED: lengths [requests] of a paged cache do not count the tokens of q.
    FRESH: the keys of q's tokens are in k_new and v_new, not in the pool.
    Q_SCALED: q_scale [requests, HEADS_KV] is there. KV_SCALED: k_scale and v_scale are there,
        1 for [requests, HEADS_KV], 2 for [1].
    ROTARY: keys are rotated as they are read, q is rotated already.
    TILES: k_tiles and v_tiles are descriptors of [BLOCK_N, D] blocks of k and v
        [rows, HEADS_KV * D], o_tiles of [BLOCK_M / GROUP, GROUP, D] blocks of o.
    """
    HEADS: tl.constexpr = HEADS_KV * GROUP
    # Q8 calls multiply in e4m3 where the machine can (a dot of 32 columns or more), else in
    # float16, which holds every code.
    dtype: tl.constexpr = tl.float16 if Q8 else q.dtype.element_ty
    column = tl.arange(0, BLOCK_D)
    item = tl.program_id(0)
    if item >= programs * splits:
        return
    split = item % splits
    b, r, low_row, q_start, q_len, kv_start, kv_len = locate(
        item // splits, offsets_q, offsets_kv, lengths, requests, tokens, length_q, length_kv,
        spacing_kv, spacing_head, tiles, section, PACKED, PAGE, APPENDED, HEADS_KV, GROUP,
        BLOCK_M, WAYS,
    )  # fmt: skip
    # The place through loads that load nothing. torch follows what a store's pointer is made of
    # to learn what a kernel writes, stops at loads and takes every argument of a call for part
    # of its result: it would believe that the offsets are written.
    never = item < 0
    memory = partial_lse.to(tl.pointer_type(tl.int32), bitcast=True)
    b = tl.load(memory, mask=never, other=b)
    r = tl.load(memory, mask=never, other=r)
    low_row = tl.load(memory, mask=never, other=low_row)
    q_start = tl.load(memory.to(tl.pointer_type(tl.int64), bitcast=True), never, q_start)
    if low_row >= q_len * GROUP:
        return
    row = low_row + tl.arange(0, BLOCK_M)
    live = row < q_len * GROUP
    token = row // GROUP
    head = r * GROUP + row % GROUP
    shift = kv_len - q_len
    positions = token + shift
    q_row = q_start + token
    q_at = q_row * Q_ROW + head * D
    if Q8 and K8 and NATIVE and BLOCK_D >= 32:
        queries = load_rows(q, q_at, live, D, BLOCK_D, q.dtype.element_ty, False, True, True)
    else:
        queries = load_rows(q, q_at, live, D, BLOCK_D, dtype, Q8, NATIVE, True)

    logits = float32(scale)
    if Q_SCALED:
        logits *= tl.load(q_scale + b * HEADS_KV + r)
    plain_logits = logits
    value_scale = 1.0
    if KV_SCALED == 1:
        logits *= tl.load(k_scale + b * HEADS_KV + r)
        value_scale = tl.load(v_scale + b * HEADS_KV + r)
    if KV_SCALED == 2:
        logits *= tl.load(k_scale)
        value_scale = tl.load(v_scale)
    cap_logits = float32(cap) * LOG2E
    if HAS_CAP:
        logits /= float32(cap)
        plain_logits /= float32(cap)
    else:
        logits *= LOG2E
        plain_logits *= LOG2E

    # Keys that some row sees, [low, high), and that every row sees, [plain_low, plain_high);
    # blocks from tail_low on reach past the last key.
    first_position = low_row // GROUP + shift
    last_position = tl.minimum((low_row + BLOCK_M - 1) // GROUP, q_len - 1) + shift
    old_len = kv_len
    if FRESH:
        old_len = kv_len - q_len
    if PAGE > 0:
        old_len = tl.minimum(old_len, width * PAGE)  # behind it are other tables, or nothing
    low = 0
    high = old_len
    plain_low = 0
    plain_high = old_len
    if RIGHT >= 0:
        high = tl.minimum(high, last_position + RIGHT + 1)
        plain_high = tl.minimum(plain_high, first_position + RIGHT + 1)
    if LEFT >= 0:
        low = tl.maximum(first_position - LEFT, 0) // BLOCK_N * BLOCK_N
        plain_low = tl.maximum(last_position - LEFT, 0)
    high = tl.maximum(high, low)
    share = tl.cdiv(tl.cdiv(high - low, BLOCK_N), splits) * BLOCK_N
    low = tl.minimum(low + split * share, high)
    high = tl.minimum(low + share, high)
    tail_low = tl.minimum(tl.maximum(old_len // BLOCK_N * BLOCK_N, low), high)
    plain_low = tl.minimum(tl.maximum(tl.cdiv(plain_low, BLOCK_N) * BLOCK_N, low), tail_low)
    plain_high = tl.maximum(plain_high, 0) // BLOCK_N * BLOCK_N
    plain_high = tl.minimum(tl.maximum(plain_high, plain_low), tail_low)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    head_at = r * (0 if HEADS_FIRST else D)
    pages = table + b.to(tl.int64) * width
    if LEFT >= 0:
        acc, top, total = attend_range(
            acc, top, total, queries, positions, low, plain_low, k, v, head_at, kv_start,
            old_len, pages, cos, sin, logits, cap_logits, k_tiles, v_tiles, True, False, PAGE,
            TILES, HOISTED, D, K_ROW, V_ROW, LEFT, RIGHT, HAS_CAP, ROTARY, NEOX, K8, V8, NATIVE,
            BLOCK_D, BLOCK_N, dtype,
        )  # fmt: skip
    acc, top, total = attend_range(
        acc, top, total, queries, positions, plain_low, plain_high, k, v, head_at, kv_start,
        old_len, pages, cos, sin, logits, cap_logits, k_tiles, v_tiles, False, False, PAGE,
        TILES, HOISTED, D, K_ROW, V_ROW, LEFT, RIGHT, HAS_CAP, ROTARY, NEOX, K8, V8, NATIVE,
        BLOCK_D, BLOCK_N, dtype,
    )  # fmt: skip
    if LEFT >= 0 or RIGHT >= 0:
        acc, top, total = attend_range(
            acc, top, total, queries, positions, plain_high, tail_low, k, v, head_at,
            kv_start, old_len, pages, cos, sin, logits, cap_logits, k_tiles, v_tiles, True,
            False, PAGE, TILES, HOISTED, D, K_ROW, V_ROW, LEFT, RIGHT, HAS_CAP, ROTARY, NEOX, K8,
            V8, NATIVE, BLOCK_D, BLOCK_N, dtype,
        )  # fmt: skip
    acc, top, total = attend_range(
        acc, top, total, queries, positions, tail_low, high, k, v, head_at, kv_start, old_len,
        pages, cos, sin, logits, cap_logits, k_tiles, v_tiles, True, True, PAGE, TILES,
        HOISTED, D, K_ROW, V_ROW, LEFT, RIGHT, HAS_CAP, ROTARY, NEOX, K8, V8, NATIVE, BLOCK_D,
        BLOCK_N, dtype,
    )  # fmt: skip
    acc *= value_scale
    if FRESH:
        # The new keys, unquantized: packed like q, the last split takes them.
        new_high = q_len
        if RIGHT >= 0:
            new_high = tl.minimum(last_position - shift + RIGHT + 1, q_len)
        # Padding has no cache to follow: its shift is negative.
        new_high = tl.where((split == splits - 1) & (shift >= 0), new_high, 0)
        acc, top, total = attend_range(
            acc, top, total, queries, token, 0, new_high, k_new, v_new, head_at, q_start,
            q_len, pages, cos, sin, plain_logits, cap_logits, k_tiles, v_tiles, True, True, 0,
            False, HOISTED, D, K_NEW_ROW, V_NEW_ROW, LEFT, RIGHT, HAS_CAP, 0, NEOX, False, False,
            NATIVE, BLOCK_D, BLOCK_N, dtype,
        )  # fmt: skip

    # The rows once more, by a load that the compiler cannot see through: kept from before the
    # loops they would take a hundred registers of every thread.
    row = tl.load(memory, mask=never, other=low_row) + tl.arange(0, BLOCK_M)
    live = row < q_len * GROUP
    token = row // GROUP
    head = r * GROUP + row % GROUP
    q_row = q_start + token
    keep = live[:, None] & (column < D)[None, :]
    out_row = q_row * HEADS + head
    if splits == 1:
        sink = top
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=live, other=0.0) * LOG2E
        weight, mass = normaliser(top, total, sink, HAS_SINKS)
        result = (acc * weight[:, None]).to(o.dtype.element_ty)
        if TILES:
            if low_row + BLOCK_M <= q_len * GROUP:
                first = (q_start + low_row // GROUP).to(tl.int32)
                o_tiles.store(
                    [first, r * GROUP, 0], result.reshape(BLOCK_M // GROUP, GROUP, BLOCK_D)
                )
            else:
                tl.store(o + out_row[:, None] * D + column[None, :], result, mask=keep)
        else:
            tl.store(o + out_row[:, None] * D + column[None, :], result, mask=keep)
        if HAS_LSE:
            if PACKED:
                at = head.to(tl.int64) * tokens + q_row
            else:
                at = (b * HEADS + head).to(tl.int64) * length_q + token
            tl.store(lse + at, mass * LN2, mask=live)
    else:
        weight, mass = normaliser(top, total, top, False)
        part = split.to(tl.int64) * tokens * HEADS + out_row
        tl.store(partial_o + part[:, None] * D + column[None, :], acc * weight[:, None], mask=keep)
        tl.store(partial_lse + part, mass, mask=live)


@triton.jit
def lse_place(token, head, tokens, length_q, PACKED: tl.constexpr, HEADS: tl.constexpr):
    """Where lse [H, tokens], dense [B, H, S_q], has a row."""
    if PACKED:
        place = head * tokens + token
    else:
        place = (token // length_q * HEADS + head) * length_q + token % length_q
    return place


@triton.jit(do_not_specialize=["tokens", "length_q", "splits"])
def combine_kernel(
    partial_o,
    partial_lse,
    o,
    lse,
    sinks,
    tokens,
    length_q,
    splits,
    PACKED: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    LIKE_LSE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One row of o from partial_o [splits, tokens, HEADS, D] and partial_lse, BLOCK_S at once.

    partial_lse: base 2 [splits, tokens, HEADS]; if LIKE_LSE natural, each part ordered as lse is.
    """
    row = tl.program_id(0).to(tl.int64)
    if row >= tokens * HEADS:
        return
    token = row // HEADS
    head = row % HEADS
    first = row
    if LIKE_LSE:
        first = lse_place(token, head, tokens, length_q, PACKED, HEADS)
    column = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    top = float("-inf")
    total = 0.0
    for start in range(0, splits, BLOCK_S):
        part = start + tl.arange(0, BLOCK_S)
        before = part.to(tl.int64) * tokens * HEADS
        logits = tl.load(partial_lse + (before + first), mask=part < splits, other=float("-inf"))
        if LIKE_LSE:
            logits *= LOG2E
        new_top = tl.maximum(top, tl.max(logits, 0))
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(logits - anchor)
        fade = tl.exp2(top - anchor)
        values = tl.load(
            partial_o + (before + row)[:, None] * D + column[None, :],
            mask=(part < splits)[:, None] & (column < D)[None, :],
            other=0.0,
        )
        acc = acc * fade + tl.sum(weights[:, None] * values, 0)
        total = total * fade + tl.sum(weights, 0)
        top = new_top
    sink = top
    if HAS_SINKS:
        sink = tl.load(sinks + head) * LOG2E
    weight, mass = normaliser(top, total, sink, HAS_SINKS)
    tl.store(o + row * D + column, (acc * weight).to(o.dtype.element_ty), mask=column < D)
    if HAS_LSE:
        tl.store(lse + lse_place(token, head, tokens, length_q, PACKED, HEADS), mass * LN2)
