"""Compressed attention on the device: a tile of tokens walks the closed chunks of its requests."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tileops.kernels.common.device import LN2, LOG2E, dot, float32, int64, last_not_after
from tileops.kernels.common.launch import launch, machine, rows
from tileops.kernels.common.machine import configuration
from tileops.kernels.common.triton_nsa import (
    FAR,
    WAYS,
    attend_block,
    columns,
    load_rows,
    products,
    shape_class,
)


@triton.jit
def steps(index, STEP: tl.constexpr):
    """Offsets index [N] * STEP inside a tile of N rows, index < N.

    In 32 bits where a sum of two of them fits: loads then take what they add as a constant.
    """
    if index.shape[0] * STEP < 2**30:
        return index * STEP
    else:
        return index.to(tl.int64) * STEP


@triton.jit
def closed_chunks(first, left, token, begin, end, SIZE: tl.constexpr):
    """Of the request [begin, end): closed chunks that each row [M] sees, that any row sees.

    The tile is the tokens [first, first + left), token [M] in it.
    """
    position = (first - begin).to(tl.int32) + token
    inside = (position >= 0) & (position < (end - begin).to(tl.int32))
    most = (tl.minimum(first + left, end) - begin).to(tl.int32) // SIZE
    return tl.where(inside, (position + 1) // SIZE, 0), most


@triton.jit
def first_block(
    queries,
    q_row,
    q_live,
    k_row,
    v_row,
    k_live,
    seen,
    scale,
    first_column,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """acc [M, BLOCK_V], top and total [M] of one block of keys: see `attend_block`.

    There is nothing to fade, and the values are asked for before the first product.
    """
    values = load_rows(v_row, k_live, first_column, DV, BLOCK_V, True)
    scores = products(queries, q_row, q_live, 1.0, k_row, k_live, D, BLOCK_D, False, True)
    scores = tl.where(seen, scores, float("-inf"))
    top = tl.max(scores, 1) * scale
    anchor = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(scores * scale - anchor[:, None])
    return dot(weights.to(values.dtype), values, None), top, tl.sum(weights, 1)


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
    FIRST: tl.constexpr,
):
    """BLOCK_V columns of o, and lse, of BLOCK_M // MEMBERS tokens and MEMBERS heads of a group.

    MEMBERS: min(GROUP, BLOCK_M); HEAD_PARTS and V_PARTS programs share a tile's heads, columns.
    FIRST: the first block of keys is no part of a loop. Its tiles of q, k and v then have shared
    memory of their own, too much for wide heads.
    """
    TOKENS: tl.constexpr = BLOCK_M // MEMBERS
    SHARE: tl.constexpr = HEADS_KV * HEAD_PARTS * V_PARTS
    # The programs of a tile run side by side, they read neighbouring memory; the last tiles, of
    # which more have many chunks, run first.
    place = tl.num_programs(0) - 1 - tl.program_id(0)
    tile = place // SHARE
    share = place % SHARE
    v_start = share % V_PARTS * BLOCK_V
    part = share // V_PARTS % HEAD_PARTS
    r = share // (V_PARTS * HEAD_PARTS)
    head = r * GROUP + part * MEMBERS
    first = tile.to(tl.int64) * TOKENS
    left = tl.minimum(int64(tokens) - first, TOKENS).to(tl.int32)
    # Rows are (head, token): tokens are neighbours in lse, so its stores touch fewer sectors.
    row = tl.arange(0, BLOCK_M)
    token, member = row % TOKENS, row // TOKENS
    live = (token < left) & (member < tl.minimum(GROUP - part * MEMBERS, MEMBERS))

    # The request of the first token, mostly of all. The loop of the search ends what the compiler
    # can move: what is loaded before it is also waited for before it. So the search comes first,
    # its loads mostly hit, and then q, k and v are in flight together.
    n = last_not_after(offsets, requests + 1, first, WAYS)
    # Tokens behind the last request are padding and have no chunks.
    known = n < requests
    begin = tl.load(offsets + n, mask=known, other=0).to(tl.int64)
    end = tl.load(offsets + n + 1, mask=known, other=0).to(tl.int64)
    chunk_first = tl.load(chunk_offsets + n, mask=known, other=0).to(tl.int64)
    q_row = q + (first * Q_ROW + head * D) + (steps(token, Q_ROW) + steps(member, D))
    queries = load_rows(q_row, live, 0, D, BLOCK_D, True)
    logits = float32(scale) * LOG2E

    lane = tl.arange(0, BLOCK_N)
    k_at, v_at = steps(lane, K_ROW), steps(lane, V_ROW)
    k_first = k + (chunk_first * K_ROW + r * D)
    v_first = v + (chunk_first * V_ROW + r * DV)
    closed, most = closed_chunks(first, left, token, begin, end, SIZE)
    # Chunks of whole blocks that every row sees.
    last = first + left - 1
    plain = tl.where(end > last, (first - begin).to(tl.int32) + 1, 0) // SIZE
    plain = plain // BLOCK_N * BLOCK_N
    if FIRST:
        acc, top, total = first_block(
            queries, q_row, live, k_first + k_at, v_first + v_at, lane < most,
            lane[None, :] < closed[:, None], logits, v_start, D, DV, BLOCK_D, BLOCK_V,
        )  # fmt: skip
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    done = BLOCK_N if FIRST else 0
    for start in range(done, plain, BLOCK_N):
        at = int64(start)
        acc, top, total = attend_block(
            acc, top, total, queries, q_row, live, k_first + at * K_ROW + k_at,
            v_first + at * V_ROW + v_at, True, True, logits, v_start, D, DV, BLOCK_D, BLOCK_V,
            False, False,
        )  # fmt: skip
    done = tl.maximum(plain, done)

    # What is left of this request, and the others that begin in the tile.
    high = n
    if known & (end <= last):
        high = last_not_after(offsets, requests + 1, last, WAYS)
    for m in range(tl.where(done < most, n, n + 1), tl.minimum(high, requests - 1) + 1):
        if m > n:
            begin = tl.load(offsets + m).to(tl.int64)
            end = tl.load(offsets + m + 1).to(tl.int64)
            chunk_first = tl.load(chunk_offsets + m).to(tl.int64)
            done = 0
        k_first = k + (chunk_first * K_ROW + r * D)
        v_first = v + (chunk_first * V_ROW + r * DV)
        closed, most = closed_chunks(first, left, token, begin, end, SIZE)
        for start in range(done, most, BLOCK_N):
            at = int64(start)
            acc, top, total = attend_block(
                acc, top, total, queries, q_row, live, k_first + at * K_ROW + k_at,
                v_first + at * V_ROW + v_at, start + lane < most,
                (start + lane)[None, :] < closed[:, None], logits, v_start, D, DV, BLOCK_D,
                BLOCK_V, True, True,
            )  # fmt: skip

    # Without a closed chunk acc and total are zeros and top is -inf.
    total = tl.where(total == 0.0, 1.0, total)
    # One division a row, not one an element.
    x = acc * (1.0 / total)[:, None]
    o_first = o + (first * (HEADS_KV * GROUP * DV) + head * DV)
    at = steps(token, HEADS_KV * GROUP * DV) + steps(member, DV)
    column = v_start + tl.arange(0, BLOCK_V)
    keep = live[:, None] & (column < DV)[None, :]
    tl.store(o_first + (at[:, None] + column[None, :]), x.to(o.dtype.element_ty), mask=keep)
    if v_start == 0:
        lse_first = lse + (head.to(tl.int64) * tokens + first)
        lse_at = member.to(tl.int64) * tokens + token
        tl.store(lse_first + lse_at, (top + tl.log2(total)) * LN2, mask=live)


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
