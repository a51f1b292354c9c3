"""Append-prefill on GPUs: one kernel stores (and rotates) the new rows, attention follows.

A 16-bit pool then holds every key. From an e4m3 pool the old keys come quantized and the new
ones as they are, from k_new and v_new or their rotated copy.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tileops.kernels.common.device import int64, last_not_after
from tileops.kernels.common.gqa_hooks import score_scale
from tileops.kernels.common.launch import e4m3_argument, launch, native_e4m3, padded, rows
from tileops.kernels.common.limits import head_dim_refusal
from tileops.kernels.common.triton_append import append_rows
from tileops.kernels.common.triton_gqa import WAYS, Keys, Queries, Scores, attend
from tileops.kernels.common.triton_rope import load_rows

TOKENS = 8  # of one program


@triton.jit
def angles(positions, STEP: tl.constexpr, ROTARY: tl.constexpr, BLOCK_D: tl.constexpr):
    """cos and signed sin [N, BLOCK_D] of neox columns: position * STEP ** frequency.

    float64 up to the angle within a turn: at position 131,072 a float32 angle is 0.035 off.
    """
    HALF: tl.constexpr = ROTARY // 2
    column = tl.arange(0, BLOCK_D)
    frequency = tl.where(column < HALF, column, column - HALF)
    power = tl.full([BLOCK_D], STEP, tl.float64)
    speed = tl.full([BLOCK_D], 1.0, tl.float64)
    for bit in tl.static_range(9):
        speed = tl.where((frequency >> bit) & 1 == 1, speed * power, speed)
        power = power * power
    turns = positions.to(tl.float64)[:, None] * speed[None, :] / 6.283185307179586476925
    turns -= tl.floor(turns)
    angle = (turns * 6.283185307179586476925).to(tl.float32)
    turned = (column < ROTARY)[None, :]
    c = tl.where(turned, tl.cos(angle), 1.0)
    s = tl.where(turned, tl.sin(angle), 0.0)
    return c, tl.where((column < HALF)[None, :], -s, s)


@triton.jit
def turn(x, at, live, c, s, D: tl.constexpr, BLOCK_D: tl.constexpr, ROTARY: tl.constexpr):
    """float32 [N, BLOCK_D]: 16-bit rows at element offsets at [N], rotated by `angles`."""
    HALF: tl.constexpr = ROTARY // 2
    column = tl.arange(0, BLOCK_D)
    partner = tl.where(column < HALF, column + HALF, column - HALF)
    own = load_rows(x, at, live, D, BLOCK_D, tl.float32, False, True, True)
    turned = live[:, None] & (column < ROTARY)[None, :]
    other = tl.load(x + at[:, None] + partner[None, :], mask=turned, other=0.0)
    return own * c + other.to(tl.float32) * s


@triton.jit(do_not_specialize=["tokens", "requests", "width", "pages"])
def append_kernel(
    q,
    k,
    v,
    k_pool,
    v_pool,
    k_scale,
    v_scale,
    offsets,
    lengths,
    table,
    q_out,
    k_out,
    tokens,
    requests,
    width,
    pages,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    E4M3: tl.constexpr,
    NATIVE: tl.constexpr,
    ROTARY: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WAYS: tl.constexpr,
):
    """Append rows k, v [tokens, HEADS_KV, D] to the pools behind `lengths` cached tokens.

    ROTARY > 0: keys are stored rotated, q_out [tokens, HEADS, D] gets the rotated queries and,
    for an e4m3 pool, k_out [tokens, HEADS_KV, D] the rotated keys at 16 bits.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK_T
    token = start + tl.arange(0, BLOCK_T)
    live = token < tokens
    if start >= tokens:
        return
    first = last_not_after(offsets, requests + 1, start, WAYS)
    last = last_not_after(
        offsets, requests + 1, tl.minimum(start + BLOCK_T, int64(tokens)) - 1, WAYS
    )
    position = tl.full([BLOCK_T], -1, tl.int64)
    request = tl.full([BLOCK_T], 0, tl.int64)
    for b in range(first, last + 1):
        begin = tl.load(offsets + b)
        cached = tl.load(lengths + b, mask=b < requests, other=0)
        inside = token >= begin
        # Past the last request there is padding, which is stored nowhere.
        position = tl.where(inside, tl.where(b < requests, token - begin + cached, -1), position)
        request = tl.where(inside, b, request)
    entry = position // PAGE
    kept = live & (position >= 0) & (entry < width)
    page = tl.load(table + request * width + entry, mask=kept, other=-1).to(tl.int64)
    kept = kept & (page >= 0) & (page < pages)
    slot = page * PAGE + position % PAGE
    # Through a load that loads nothing, see `attention_kernel`. Its pointers differ: what comes
    # from equal ones is taken to be equal, whatever `other` is.
    memory = k_scale.to(tl.pointer_type(tl.int64), bitcast=True)
    slot = tl.load(memory + token, mask=token < 0, other=slot)

    column = tl.arange(0, BLOCK_D)
    inside_d = (column < D)[None, :]
    stored = kept[:, None] & inside_d
    if ROTARY > 0:
        c, s = angles(position, STEP, ROTARY, BLOCK_D)
        for head in range(HEADS):
            rotated = turn(q, token * Q_ROW + head * D, live, c, s, D, BLOCK_D, ROTARY)
            at = (token * HEADS + head)[:, None] * D + column[None, :]
            tl.store(q_out + at, rotated.to(q.dtype.element_ty), mask=live[:, None] & inside_d)
    k_divisor = 1.0
    v_divisor = 1.0
    if E4M3:
        k_divisor = tl.load(k_scale)
        v_divisor = tl.load(v_scale)
    for head in range(HEADS_KV):
        at = slot[:, None] * (HEADS_KV * D) + head * D + column[None, :]
        if ROTARY > 0:
            rotated = turn(k, token * K_ROW + head * D, live, c, s, D, BLOCK_D, ROTARY)
            keys = rotated.to(k.dtype.element_ty)
        else:
            keys = load_rows(
                k, token * K_ROW + head * D, live, D, BLOCK_D, k.dtype.element_ty, False, True,
                True,
            )  # fmt: skip
        values = load_rows(
            v, token * V_ROW + head * D, live, D, BLOCK_D, v.dtype.element_ty, False, True, True
        )
        append_rows(k_pool, at, keys, k_divisor, stored, E4M3, NATIVE)
        append_rows(v_pool, at, values, v_divisor, stored, E4M3, NATIVE)
        if E4M3 and ROTARY > 0:
            fresh = (token * HEADS_KV + head)[:, None] * D + column[None, :]
            tl.store(k_out + fresh, keys, mask=live[:, None] & inside_d)


class Appended(NamedTuple):
    """Contiguous metadata, and the queries and new keys [T_q, heads, D], rotated if asked for."""

    offsets: Tensor
    lengths: Tensor
    table: Tensor
    q: Tensor
    k: Tensor


def append(call: Any) -> Appended:
    """Append k_new, v_new to the pools."""
    q, k, v, table = call.q, call.k_new, call.v_new, call.block_table.contiguous()
    offsets, lengths = call.cu_seqlens_q.contiguous(), call.cache_seqlens.contiguous()
    tokens, heads, dim = q.shape
    heads_kv = k.shape[1]
    requests = table.shape[0]
    e4m3 = call.k_pages.dtype.itemsize == 1
    rotary = (call.rotary_dim or dim) if call.fuse_rope else 0
    q_out = q.new_empty(q.shape) if rotary else q
    k_out = k.new_empty(k.shape) if rotary and e4m3 else k
    (q_in, q_row), (k_in, k_row), (v_in, v_row) = rows(q), rows(k), rows(v)
    launch(
        append_kernel,
        ((tokens + TOKENS - 1) // TOKENS,),
        q_in,
        k_in,
        v_in,
        e4m3_argument(call.k_pages),
        e4m3_argument(call.v_pages),
        call.k_scale,
        call.v_scale,
        offsets,
        lengths,
        table,
        q_out,
        k_out,
        tokens,
        requests,
        table.shape[1],
        call.k_pages.shape[0] // call.page_size,
        PAGE=call.page_size,
        HEADS=heads,
        HEADS_KV=heads_kv,
        D=dim,
        BLOCK_D=padded(dim),
        Q_ROW=q_row,
        K_ROW=k_row,
        V_ROW=v_row,
        E4M3=e4m3,
        NATIVE=native_e4m3(q),
        ROTARY=rotary,
        STEP=call.rope_base ** (-2.0 / rotary) if rotary else 0.0,
        BLOCK_T=TOKENS,
        WAYS=WAYS,
        warps=4,
        stages=1,
    )
    return Appended(offsets, lengths, table, q_out, k_out)


def gqa_prefill_paged_fwd(out: Tensor, call: Any) -> None:
    """Append k_new, v_new to the pools and fill o [T_q, H, D]."""
    offsets, lengths, table, q, k = append(call)
    e4m3 = call.k_pages.dtype.itemsize == 1
    attend(
        out,
        None,
        Queries(q, table.shape[0], 0, offsets),
        Keys(
            call.k_pages,
            call.v_pages,
            table.shape[1] * call.page_size,
            page=call.page_size,
            table=table,
            lengths=lengths,
            appended=True,
            fresh=(k, call.v_new) if e4m3 else None,
        ),
        Scores(
            score_scale(call),
            call.is_causal,
            softcap=call.softcap,
            k_scale=call.k_scale if e4m3 else None,
            v_scale=call.v_scale if e4m3 else None,
        ),
    )


gqa_prefill_paged_fwd_refusal = head_dim_refusal
