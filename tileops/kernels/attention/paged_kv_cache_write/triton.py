"""The cache write on GPUs: one launch moves the new rows of both pools as vectors."""

import math
from typing import Any

import triton
import triton.language as tl

from ops_registry.contract import E4M3
from tileops.kernels.common.launch import e4m3_argument, launch, machine, native_e4m3, rows
from tileops.kernels.common.machine import configuration
from tileops.kernels.common.triton_append import append_rows


@triton.jit(do_not_specialize=["tokens", "pool_rows"])
def paged_kv_cache_write_kernel(
    k,
    v,
    k_pages,
    v_pages,
    slots,
    k_scale,
    v_scale,
    tokens,
    pool_rows,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    VECTORS: tl.constexpr,
    WIDTH: tl.constexpr,
    E4M3: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK vectors of k and the same of v, counted over all tokens.

    k, v [tokens, VECTORS * WIDTH], K_ROW and V_ROW elements from row to row; pools
    [pool_rows, VECTORS * WIDTH]; slots [tokens].
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    token = start // VECTORS
    vector = (start - token * VECTORS).to(tl.int32) + tl.arange(0, BLOCK)
    token += vector // VECTORS
    column = (vector % VECTORS * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
    inside = token < tokens
    # Rows are read before their slots are known: waiting costs more than a skipped row.
    new_k = tl.load(k + (token[:, None] * K_ROW + column), mask=inside[:, None], other=0.0)
    new_v = tl.load(v + (token[:, None] * V_ROW + column), mask=inside[:, None], other=0.0)
    slot = tl.load(slots + token, mask=inside, other=-1)
    written = ((slot >= 0) & (slot < pool_rows))[:, None]
    at = slot[:, None] * (VECTORS * WIDTH) + column
    # Without E4M3 the scales are placeholders, not read.
    append_rows(k_pages, at, new_k, tl.load(k_scale) if E4M3 else 1.0, written, E4M3, NATIVE)
    append_rows(v_pages, at, new_v, tl.load(v_scale) if E4M3 else 1.0, written, E4M3, NATIVE)


def paged_kv_cache_write(out: None, call: Any) -> None:
    """k, v [T, H_kv, D]; pools [NP, PS, H_kv, D]; slot_mapping [T]."""
    row = call.k.shape[1] * call.k.shape[2]
    if row == 0:
        return
    (k, k_row), (v, v_row) = rows(call.k), rows(call.v)
    fp8 = call.k_pages.dtype == E4M3
    numbers = dict(configuration(NAME, "e4m3" if fp8 else "16bit", machine(k)))
    width = math.gcd(row, numbers.pop("WIDTH"))
    vectors = row // width
    block = numbers["BLOCK"]
    tokens = k.shape[0]
    launch(
        paged_kv_cache_write_kernel,
        ((tokens * vectors + block - 1) // block,),
        k,
        v,
        e4m3_argument(call.k_pages),
        e4m3_argument(call.v_pages),
        call.slot_mapping.contiguous(),
        call.k_scale if fp8 else call.slot_mapping,
        call.v_scale if fp8 else call.slot_mapping,
        tokens,
        call.k_pages.shape[0] * call.k_pages.shape[1],
        K_ROW=k_row,
        V_ROW=v_row,
        VECTORS=vectors,
        WIDTH=width,
        E4M3=fp8,
        NATIVE=fp8 and native_e4m3(k),
        **numbers,
    )


NAME = "paged_kv_cache_write"
