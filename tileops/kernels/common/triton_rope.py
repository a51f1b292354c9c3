"""Rotary embedding on the device: rows rotated as they are loaded, or whole tensors before."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tileops.kernels.common.device import e4m3_load, int64, last_not_after
from tileops.kernels.common.launch import e4m3_argument, launch, native_e4m3, padded, rows

ROWS = 32  # (token, head) pairs of one program of the pre-pass
WAYS = 128


@triton.jit
def load_rows(
    x,
    at,
    keep,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    dtype: tl.constexpr,
    E4M3: tl.constexpr,
    NATIVE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """[N, BLOCK_D] of `dtype` at element offsets at [N]; columns from D on are 0.

    MASKED: rows where keep [N] is False are 0 and not read; else keep is not looked at.
    """
    column = tl.arange(0, BLOCK_D)
    pointer = x + at[:, None] + column[None, :]
    mask = (column < D)[None, :]
    if MASKED:
        mask = mask & keep[:, None]
    if E4M3:
        loaded = e4m3_load(pointer, mask, dtype, NATIVE)
    elif MASKED or BLOCK_D != D:
        loaded = tl.load(pointer, mask=mask, other=0.0).to(dtype)
    else:
        loaded = tl.load(pointer).to(dtype)
    return loaded


@triton.jit
def load_rotated_rows(
    x,
    at,
    keep,
    positions,
    cos,
    sin,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTARY: tl.constexpr,
    NEOX: tl.constexpr,
    E4M3: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """float32 [N, BLOCK_D]: the rows at element offsets at [N], rotated to positions [N].

    cos, sin: tables [P, ROTARY / 2]. Rows where keep [N] is False are 0, no table row is read.
    """
    HALF: tl.constexpr = ROTARY // 2
    own = load_rows(x, at, keep, D, BLOCK_D, tl.float32, E4M3, NATIVE, True)
    entry = positions.to(tl.int64)[:, None] * HALF
    if NEOX:
        column = tl.arange(0, BLOCK_D)
        turned = keep[:, None] & (column < ROTARY)[None, :]
        first = column < HALF
        partner = tl.where(first, column + HALF, column - HALF)
        pointer = x + at[:, None] + partner[None, :]
        if E4M3:
            other = e4m3_load(pointer, turned, tl.float32, NATIVE)
        else:
            other = tl.load(pointer, mask=turned, other=0.0).to(tl.float32)
        entry += tl.where(first, column, column - HALF)[None, :]
        c = tl.load(cos + entry, mask=turned, other=1.0).to(tl.float32)
        s = tl.load(sin + entry, mask=turned, other=0.0).to(tl.float32)
        rotated = own * c + tl.where(first[None, :], -other, other) * s
    else:
        # By pairs: a table that is read twice per frequency gets a layout by columns, which
        # Triton 3.6 miscompiles as an operand of a dot.
        pair = tl.arange(0, BLOCK_D // 2)
        turned = keep[:, None] & (pair < HALF)[None, :]
        a, b = tl.split(tl.reshape(own, [at.shape[0], BLOCK_D // 2, 2]))
        c = tl.load(cos + entry + pair[None, :], mask=turned, other=1.0).to(tl.float32)
        s = tl.load(sin + entry + pair[None, :], mask=turned, other=0.0).to(tl.float32)
        first = tl.where(turned, a * c - b * s, a)
        second = tl.where(turned, b * c + a * s, b)
        rotated = tl.reshape(tl.join(first, second), [at.shape[0], BLOCK_D])
    return rotated


@triton.jit
def load_rotated_halves(
    x,
    at,
    keep,
    positions,
    cos,
    sin,
    HALF: tl.constexpr,
    E4M3: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """float32 [N, HALF] twice: `load_rotated_rows` of rows of 2 * HALF columns, all rotated, neox.

    Each number and each entry of the tables is loaded once, not twice.
    """
    a = load_rows(x, at, keep, HALF, HALF, tl.float32, E4M3, NATIVE, True)
    b = load_rows(x, at + HALF, keep, HALF, HALF, tl.float32, E4M3, NATIVE, True)
    entry = positions.to(tl.int64)[:, None] * HALF + tl.arange(0, HALF)[None, :]
    c = tl.load(cos + entry, mask=keep[:, None], other=1.0).to(tl.float32)
    s = tl.load(sin + entry, mask=keep[:, None], other=0.0).to(tl.float32)
    return a * c - b * s, b * c + a * s


@triton.jit(do_not_specialize=["tokens", "requests", "length", "length_kv"])
def rotate_kernel(
    x,
    out,
    cos,
    sin,
    offsets,
    offsets_kv,
    tokens,
    requests,
    length,
    length_kv,
    PACKED: tl.constexpr,
    LENGTHS: tl.constexpr,
    HEADS: tl.constexpr,
    ROW: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTARY: tl.constexpr,
    NEOX: tl.constexpr,
    E4M3: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SEARCH: tl.constexpr,
):
    """out [tokens, HEADS, D] = x rotated to its position in key coordinates.

    LENGTHS: offsets_kv holds the lengths of the keys, [requests], not their offsets.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    token = row // HEADS
    live = token < tokens
    if PACKED:
        # Rows of one program lie in few requests: search for the first, step to the others.
        first = tl.program_id(0).to(tl.int64) * BLOCK_R // HEADS
        last = tl.minimum(first + (BLOCK_R + HEADS - 1) // HEADS, int64(tokens) - 1)
        low = last_not_after(offsets, requests + 1, first, SEARCH)
        high = last_not_after(offsets, requests + 1, last, SEARCH)
        position = token * 0
        for b in range(low, high + 1):
            start = tl.load(offsets + b)
            inside = token >= start
            end = tl.load(offsets + b + 1, mask=b < requests, other=0)
            if LENGTHS:
                kv_len = tl.load(offsets_kv + b, mask=b < requests, other=0)
            else:
                end_kv = tl.load(offsets_kv + b + 1, mask=b < requests, other=0)
                kv_len = end_kv - tl.load(offsets_kv + b, mask=b < requests, other=0)
            shift = kv_len - (end - start)
            # Rows past the last request are padding: any position, nobody reads them.
            position = tl.where(inside, tl.where(b < requests, token - start + shift, 0), position)
    else:
        position = token % tl.maximum(length, 1) + length_kv - length
    live_position = live & (position >= 0)
    at = token * ROW + (row % HEADS) * D
    if NEOX and ROTARY == BLOCK_D:
        HALF: tl.constexpr = ROTARY // 2
        first, second = load_rotated_halves(
            x, at, live_position, position, cos, sin, HALF, E4M3, NATIVE
        )
        to = out + row[:, None] * D + tl.arange(0, HALF)[None, :]
        tl.store(to, first.to(out.dtype.element_ty), mask=live[:, None])
        tl.store(to + HALF, second.to(out.dtype.element_ty), mask=live[:, None])
    else:
        rotated = load_rotated_rows(
            x, at, live_position, position, cos, sin, D, BLOCK_D, ROTARY, NEOX, E4M3, NATIVE
        )
        column = tl.arange(0, BLOCK_D)
        tl.store(
            out + row[:, None] * D + column[None, :],
            rotated.to(out.dtype.element_ty),
            mask=live[:, None] & (column < D)[None, :],
        )


def rotated(
    x: Tensor,
    call: Any,
    offsets: Tensor | None,
    offsets_kv: Tensor | None,
    lengths: Tensor | None = None,
) -> Tensor:
    """x [..., heads, D] rotated as `call` says, 16-bit in the tables' dtype, contiguous.

    Positions count in key coordinates: queries end where the keys end. offsets, offsets_kv:
    int32 [B + 1] of x and of the keys for a packed x [T, heads, D], None for a dense
    x [B, S, heads, D] over keys [B, S_kv, ...]. lengths: of the keys [B], instead of offsets_kv.
    """
    out = x.new_empty(x.shape, dtype=call.rope_cos.dtype)
    heads, dim = x.shape[-2:]
    if heads == 0:
        return out
    packed = offsets is not None
    tokens = x.shape[0] if packed else x.shape[0] * x.shape[1]
    source, row = rows(x)
    block_d = padded(dim)
    launch(
        rotate_kernel,
        ((tokens * heads + ROWS - 1) // ROWS,),
        e4m3_argument(source),
        out,
        call.rope_cos.contiguous(),
        call.rope_sin.contiguous(),
        offsets if packed else out,
        (offsets_kv if lengths is None else lengths) if packed else out,
        tokens,
        offsets.shape[0] - 1 if offsets is not None else 0,
        0 if packed else x.shape[1],
        0 if packed else call.k.shape[1],
        PACKED=packed,
        LENGTHS=lengths is not None,
        HEADS=heads,
        ROW=row,
        D=dim,
        BLOCK_D=block_d,
        ROTARY=call.rotary_dim or dim,
        NEOX=call.rope_layout == "neox",
        E4M3=x.dtype.itemsize == 1,
        NATIVE=native_e4m3(x),
        BLOCK_R=ROWS,
        SEARCH=WAYS,
        warps=4,
        stages=1,
    )
    return out
