"""Compressed attention on the device: a tile of tokens walks the closed chunks of its requests."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tileops.kernels.common.device import LN2, LOG2E, float32, int64, last_not_after
from tileops.kernels.common.launch import launch, machine, rows
from tileops.kernels.common.machine import configuration
from tileops.kernels.common.triton_nsa import (
    FAR,
    WAYS,
    attend_block,
    columns,
    load_queries,
    shape_class,
    store_rows,
)


@triton.jit(do_not_specialize=["tokens", "requests"])
def nsa_compressed_kernel(
    q,
    k,
    v,
    offsets,
    chunk_offsets,
    o,
    lse,
    scale,
    tokens,
    requests,
    HEADS_KV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    SIZE: tl.constexpr,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    MEMBERS: tl.constexpr,
    HEAD_PARTS: tl.constexpr,
    V_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WAYS: tl.constexpr,
):
    """BLOCK_V columns of o, and lse, of BLOCK_M // MEMBERS tokens and MEMBERS heads of a group.

    MEMBERS: min(GROUP, BLOCK_M); HEAD_PARTS and V_PARTS programs share a tile's heads, columns.
    """
    TOKENS: tl.constexpr = BLOCK_M // MEMBERS
    SHARE: tl.constexpr = HEADS_KV * HEAD_PARTS * V_PARTS
    # The programs of a tile run side by side, they read neighbouring memory; the last tiles, of
    # which more have many chunks, run first.
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // SHARE
    share = tl.program_id(0) % SHARE
    v_start = share % V_PARTS * BLOCK_V
    part = share // V_PARTS % HEAD_PARTS
    r = share // (V_PARTS * HEAD_PARTS)
    first = tile.to(tl.int64) * TOKENS
    row = tl.arange(0, BLOCK_M)
    token = first + row // MEMBERS
    member = part * MEMBERS + row % MEMBERS
    live = (row < TOKENS * MEMBERS) & (token < tokens) & (member < GROUP)
    head = r * GROUP + member
    q_row = q + token * Q_ROW + head * D
    # Requested before the search for the tile's requests, mostly one, which takes about as long.
    queries = load_queries(q_row, live, 0, 1.0, D, BLOCK_D, False)
    last = tl.minimum(first + TOKENS, int64(tokens)) - 1
    low = last_not_after(offsets, requests + 1, first, WAYS)
    high = last_not_after(offsets, requests + 1, last, WAYS)
    logits = float32(scale) * LOG2E

    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    # Tokens behind the last request are padding and have no chunks.
    for n in range(low, tl.minimum(high, requests - 1) + 1):
        begin = tl.load(offsets + n).to(tl.int64)
        end = tl.load(offsets + n + 1).to(tl.int64)
        chunk_first = tl.load(chunk_offsets + n).to(tl.int64)
        k_first = k + chunk_first * K_ROW + r * D
        v_first = v + chunk_first * V_ROW + r * DV
        # Closed chunks: of each row, of the last one, and those that every row sees.
        position = (token - begin).to(tl.int32)
        closed = tl.where((token >= begin) & (token < end), (position + 1) // SIZE, 0)
        most = (tl.minimum(last + 1, end) - begin).to(tl.int32) // SIZE
        plain = tl.where(low == high, (first - begin).to(tl.int32) + 1, 0) // SIZE
        plain = plain // BLOCK_N * BLOCK_N
        for start in range(0, plain, BLOCK_N):
            chunk = start + tl.arange(0, BLOCK_N)
            at = chunk.to(tl.int64)
            acc, top, total = attend_block(
                acc, top, total, queries, q_row, live, k_first + at * K_ROW, v_first + at * V_ROW,
                chunk < most, True, logits, v_start, D, DV, BLOCK_D, BLOCK_V, False, False,
            )  # fmt: skip
        for start in range(plain, most, BLOCK_N):
            chunk = start + tl.arange(0, BLOCK_N)
            at = chunk.to(tl.int64)
            acc, top, total = attend_block(
                acc, top, total, queries, q_row, live, k_first + at * K_ROW, v_first + at * V_ROW,
                chunk < most, chunk[None, :] < closed[:, None], logits, v_start, D, DV, BLOCK_D,
                BLOCK_V, True, True,
            )  # fmt: skip

    # Without a closed chunk acc and total are zeros and top is -inf.
    total = tl.where(total == 0.0, 1.0, total)
    store_rows(
        o + (token * (HEADS_KV * GROUP) + head) * DV, live, v_start, acc / total[:, None], DV,
        BLOCK_V,
    )  # fmt: skip
    if v_start == 0:
        at = head.to(tl.int64) * tokens + token
        tl.store(lse + at, (top + tl.log2(total)) * LN2, mask=live)


def nsa_compressed_fwd(out: tuple[Tensor, Tensor], call: Any) -> None:
    """q [T, H, DK]; k_cmp [C, H_kv, DK]; v_cmp [C, H_kv, DV] -> o [T, H, DV], lse [H, T]."""
    o, lse = out
    (q, q_row), (k, k_row), (v, v_row) = map(rows, (call.q, call.k_cmp, call.v_cmp))
    tokens, heads, dim = q.shape
    heads_kv, value_dim = v.shape[1:]
    group = heads // heads_kv
    shape = shape_class(dim, value_dim)
    numbers = configuration("nsa_compressed", shape, machine(q))
    keys, values = (columns(d, shape == "wide") for d in (dim, value_dim))
    members = min(group, numbers["BLOCK_M"])
    head_parts = -(-group // members)
    requests = call.offsets.shape[0] - 1
    of_tile = numbers["BLOCK_M"] // members
    tiles = (tokens + of_tile - 1) // of_tile
    launch(
        nsa_compressed_kernel,
        (tiles * heads_kv * head_parts * values.parts,),
        q,
        k,
        v,
        call.offsets.contiguous(),
        call.chunk_offsets.contiguous(),
        o,
        lse,
        call.scale,
        tokens,
        requests,
        HEADS_KV=heads_kv,
        GROUP=group,
        D=dim,
        DV=value_dim,
        SIZE=min(call.bs, FAR),
        Q_ROW=q_row,
        K_ROW=k_row,
        V_ROW=v_row,
        MEMBERS=members,
        HEAD_PARTS=head_parts,
        V_PARTS=values.parts,
        BLOCK_D=keys.block,
        BLOCK_V=values.block,
        WAYS=WAYS,
        **numbers,
    )
