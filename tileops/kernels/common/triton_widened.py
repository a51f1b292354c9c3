"""Keys and values copied for kernels that read 16-bit blocks: widened, rotated, page after page.

For what such a kernel cannot do as it reads: values and pools of e4m3, keys of a cache that are
rotated when they are read, pages that are no whole part of its blocks.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tileops.kernels.common.launch import e4m3_argument, launch, native_e4m3, padded, rows
from tileops.kernels.common.tilelang_limits import ROWS_COPIED
from tileops.kernels.common.triton_rope import (
    load_rotated_halves,
    load_rotated_rows,
    load_rows,
)

BLOCK = 32  # (row, head) pairs of a program


@triton.jit(do_not_specialize=["width", "width_out"])
def widen_kernel(
    k_pool,
    v_pool,
    k_scale,
    v_scale,
    k_new,
    v_new,
    cos,
    sin,
    offsets,
    lengths,
    table,
    k_out,
    v_out,
    table_out,
    width,
    width_out,
    PAGE: tl.constexpr,
    ROWS_OUT: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    K_PAGE: tl.constexpr,
    K_ROW: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_PAGE: tl.constexpr,
    V_ROW: tl.constexpr,
    V_HEAD: tl.constexpr,
    K_NEW: tl.constexpr,
    V_NEW: tl.constexpr,
    APPENDED: tl.constexpr,
    FRESH: tl.constexpr,
    SCALES: tl.constexpr,
    ROTARY: tl.constexpr,
    NEOX: tl.constexpr,
    E4M3: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """k_out, v_out [B * width_out, ROWS_OUT, HEADS, D]: the rows of the requests in order.

    table_out [B, width_out]: their pages. Strides of pools by page, row and head, and of k_new,
    v_new by token. Request b has lengths[b] keys in the pools behind table [B, width]; APPENDED:
    and those of offsets[b] to offsets[b + 1], with FRESH in k_new, v_new. SCALES: how many
    numbers of k_scale, v_scale a request has, 0 for one of all. ROTARY > 0: keys are turned to
    their positions by tables cos, sin. Rows behind a request are left as they are.
    """
    PER_PAGE: tl.constexpr = ROWS_OUT * HEADS // BLOCK
    program = tl.program_id(0).to(tl.int64)
    page_out = program // PER_PAGE
    b = page_out // width_out
    if program % PER_PAGE == 0:
        tl.store(table_out + page_out, page_out.to(tl.int32))
    old = tl.load(lengths + b)
    total = old
    begin = 0
    if APPENDED:
        begin = tl.load(offsets + b)
        total += tl.load(offsets + b + 1) - begin
        if not FRESH:
            old = total
    pair = program % PER_PAGE * BLOCK + tl.arange(0, BLOCK)
    head = pair % HEADS
    position = page_out % width_out * ROWS_OUT + pair // HEADS
    if page_out % width_out * ROWS_OUT + program % PER_PAGE * BLOCK // HEADS >= total:
        return
    entry = position // PAGE
    stored = (position < old) & (entry < width)
    page = tl.load(table + b * width + entry, mask=stored, other=0).to(tl.int64)
    row = position % PAGE
    k_at = page * K_PAGE + row * K_ROW + head * K_HEAD
    v_at = page * V_PAGE + row * V_ROW + head * V_HEAD
    column = tl.arange(0, BLOCK_D)
    place = (program * BLOCK + tl.arange(0, BLOCK))[:, None] * D
    live = (position < total)[:, None]
    kept = live & (column < D)[None, :]
    k_factor = 1.0
    values = load_rows(v_pool, v_at, stored, D, BLOCK_D, tl.float32, E4M3, NATIVE, True)
    if E4M3:
        which = b * SCALES + tl.minimum(head, tl.maximum(SCALES - 1, 0))
        k_factor = tl.load(k_scale + which)[:, None]
        values *= tl.load(v_scale + which)[:, None]
    if FRESH:
        fresh = (position >= old) & (position < total)
        token = begin + position - old
        new_values = load_rows(
            v_new, token * V_NEW + head * D, fresh, D, BLOCK_D, tl.float32, False, True, True
        )
        values = tl.where(fresh[:, None], new_values, values)
    tl.store(v_out + place + column[None, :], values.to(v_out.dtype.element_ty), mask=kept)
    if NEOX and ROTARY == BLOCK_D:
        HALF: tl.constexpr = ROTARY // 2
        first, second = load_rotated_halves(
            k_pool, k_at, stored, position, cos, sin, HALF, E4M3, NATIVE
        )
        to = k_out + place + tl.arange(0, HALF)[None, :]
        tl.store(to, (first * k_factor).to(k_out.dtype.element_ty), mask=live)
        tl.store(to + HALF, (second * k_factor).to(k_out.dtype.element_ty), mask=live)
    else:
        if ROTARY > 0:
            keys = load_rotated_rows(
                k_pool, k_at, stored, position, cos, sin, D, BLOCK_D, ROTARY, NEOX, E4M3, NATIVE
            )
        else:
            keys = load_rows(k_pool, k_at, stored, D, BLOCK_D, tl.float32, E4M3, NATIVE, True)
        if E4M3:
            keys *= k_factor
        if FRESH:
            new_keys = load_rows(
                k_new, token * K_NEW + head * D, fresh, D, BLOCK_D, tl.float32, False, True, True
            )
            keys = tl.where(fresh[:, None], new_keys, keys)
        tl.store(k_out + place + column[None, :], keys.to(k_out.dtype.element_ty), mask=kept)


class Pools(NamedTuple):
    """Pools [N, page, H_kv, D] of any strides whose last is 1, behind contiguous metadata.

    table [B, W]; lengths [B]: keys of each request. offsets [B + 1]: the tokens in them of a call
    that appends, which lengths do not count; fresh: those tokens' keys and values, [T, H_kv, D],
    where they are read instead of the pools. Scales, of e4m3 pools: [1] or [B, H_kv].
    """

    k: Tensor
    v: Tensor
    table: Tensor
    lengths: Tensor
    offsets: Tensor | None = None
    fresh: tuple[Tensor, Tensor] | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


def widened(pools: Pools, dtype: torch.dtype, rope: Any = None) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [B * W', 128, H_kv, D] of a 16-bit dtype and their table [B, W'].

    rope: a call whose tables rotate the keys, to their positions in the request.
    """
    k, table = pools.k, pools.table
    page, heads, dim = k.shape[1:]
    requests, width = table.shape
    width_out = -(-width * page // ROWS_COPIED)
    shape = (requests * width_out, ROWS_COPIED, heads, dim)
    k_out, v_out = (k.new_empty(shape, dtype=dtype) for _ in range(2))
    table_out = table.new_empty((requests, width_out))
    e4m3 = k.dtype.itemsize == 1
    scales = [x.contiguous() if e4m3 and x is not None else k_out for x in pools[-2:]]
    (k_new, k_new_row), (v_new, v_new_row) = (rows(x) for x in pools.fresh or (k_out, v_out))
    rotary = 0 if rope is None else rope.rotary_dim or dim
    launch(
        widen_kernel,
        (shape[0] * ROWS_COPIED * heads // BLOCK,),
        e4m3_argument(k),
        e4m3_argument(pools.v),
        *scales,
        k_new,
        v_new,
        rope.rope_cos.contiguous() if rotary else k_out,
        rope.rope_sin.contiguous() if rotary else k_out,
        table if pools.offsets is None else pools.offsets,
        pools.lengths,
        table,
        k_out,
        v_out,
        table_out,
        width,
        width_out,
        PAGE=page,
        ROWS_OUT=ROWS_COPIED,
        HEADS=heads,
        D=dim,
        BLOCK_D=padded(dim),
        **dict(zip(("K_PAGE", "K_ROW", "K_HEAD"), k.stride(), strict=False)),
        **dict(zip(("V_PAGE", "V_ROW", "V_HEAD"), pools.v.stride(), strict=False)),
        K_NEW=k_new_row,
        V_NEW=v_new_row,
        APPENDED=pools.offsets is not None,
        FRESH=pools.fresh is not None,
        SCALES=heads if e4m3 and scales[0].dim() == 2 else 0,
        ROTARY=rotary,
        NEOX=bool(rotary) and rope.rope_layout == "neox",
        E4M3=e4m3,
        NATIVE=native_e4m3(k),
        BLOCK=BLOCK,
        warps=4,
        stages=1,
    )
    return k_out, v_out, table_out


@triton.jit(do_not_specialize=["count", "scales"])
def widen_values_kernel(
    v,
    out,
    q_scale,
    k_scale,
    v_scale,
    factors,
    count,
    scales,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROW: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [count, D]: rows of e4m3 v, HEADS of them every ROW numbers; factors [2, scales]."""
    program = tl.program_id(0).to(tl.int64)
    row = program * BLOCK + tl.arange(0, BLOCK)
    live = row < count
    at = row // HEADS * ROW + row % HEADS * D
    values = load_rows(v, at, live, D, BLOCK_D, tl.float16, True, NATIVE, True)
    column = tl.arange(0, BLOCK_D)
    kept = live[:, None] & (column < D)[None, :]
    tl.store(out + row[:, None] * D + column[None, :], values, mask=kept)
    which = program * BLOCK + tl.arange(0, BLOCK)
    while program * BLOCK < scales:  # each program so many, the first ones of a short v the rest
        given = which < scales
        scores = tl.load(q_scale + which, mask=given) * tl.load(k_scale + which, mask=given)
        tl.store(factors + which, scores, mask=given)
        tl.store(factors + scales + which, tl.load(v_scale + which, mask=given), mask=given)
        program += tl.num_programs(0)
        which += tl.num_programs(0) * BLOCK


def widened_values(
    v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """float16 v [..., H_kv, D] of e4m3 v, and float32 [2, B, H_kv]: the factors of the scores and
    of the values, from scales [B, H_kv]."""
    heads, dim = v.shape[-2:]
    out = v.new_empty(v.shape, dtype=torch.float16)
    factors = q_scale.new_empty((2, *q_scale.shape))
    source, row = rows(v)
    count = v.numel() // dim
    launch(
        widen_values_kernel,
        (-(-count // BLOCK),),
        e4m3_argument(source),
        out,
        q_scale.contiguous(),
        k_scale.contiguous(),
        v_scale.contiguous(),
        factors,
        count,
        q_scale.numel(),
        HEADS=heads,
        D=dim,
        BLOCK_D=padded(dim),
        ROW=row,
        NATIVE=native_e4m3(v),
        BLOCK=BLOCK,
        warps=4,
        stages=1,
    )
    return out, factors
