"""Block selection on the device: a pass for the normalizer, a pass for scores and their best.

A score and its id ride in one int64, the bits of the score above the complement of the id:
integers have a total order, so that the largest keys are exact, equal scores rank by the lower
id, and what was kept merges with the next chunks by a bitonic network. -1 is no candidate.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tileops.kernels.common.device import LOG2E, float32, softmax_step
from tileops.kernels.common.launch import launch, machine, rows
from tileops.kernels.common.machine import configuration
from tileops.kernels.common.triton_nsa import (
    FAR,
    WAYS,
    bits,
    columns,
    largest,
    load_queries,
    merged,
    products,
    shape_class,
    token_tile,
)

KEPT = 1024  # keys that the tokens of a tile keep at most


@triton.jit
def group_scores(
    scores, lse, closed, chunk, TOKENS: tl.constexpr, MEMBERS: tl.constexpr, N: tl.constexpr
):
    """Probabilities summed over the group [TOKENS, N] of logits scores [TOKENS * MEMBERS, N].

    lse, closed [TOKENS * MEMBERS]: base-2 log-sum-exp and number of closed chunks of each row.
    """
    weights = tl.exp2(scores * LOG2E - lse[:, None])
    weights = tl.where(chunk[None, :] < closed[:, None], weights, 0.0)
    return tl.sum(tl.reshape(weights, [TOKENS, MEMBERS, N]), 1)


@triton.jit
def sortable(score, chunk, current):
    """Keys [TOKENS, N] int64 of scores of chunks [N], for tokens whose block is current [TOKENS].

    The first, the previous and the current block score the size of the group in the formula.
    Infinity keeps them first when rounding lifts another block to that.
    """
    chunk = chunk[None, :]
    current = current[:, None]
    forced = (chunk == 0) | (chunk == current - 1) | (chunk == current)
    bits = tl.where(forced, 0x7F800000, score.to(tl.int32, bitcast=True)).to(tl.int64)
    key = (bits << 32) | (0xFFFFFFFF - chunk.to(tl.int64))
    return tl.where(chunk <= current, key, -1)


@triton.jit(do_not_specialize=["tokens", "requests"])
def nsa_topk_kernel(
    q,
    k,
    offsets,
    chunk_offsets,
    block_indices,
    scale,
    tokens,
    requests,
    HEADS_KV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    SELECTED: tl.constexpr,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    MEMBERS: tl.constexpr,
    TOKEN_BITS: tl.constexpr,
    KEEP_BITS: tl.constexpr,
    BLOCK_BITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WAYS: tl.constexpr,
):
    """block_indices of TOKENS tokens and one key/value head, KEEP slots a round.

    MEMBERS, a power of two: rows of a tile per token, at least the heads of a group.
    """
    TOKENS: tl.constexpr = 2**TOKEN_BITS
    KEEP: tl.constexpr = 2**KEEP_BITS
    BLOCK_N: tl.constexpr = 2**BLOCK_BITS
    BLOCK_M: tl.constexpr = TOKENS * MEMBERS
    # As in compressed attention: neighbouring memory side by side, many chunks first.
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // HEADS_KV
    r = tl.program_id(0) % HEADS_KV
    n, first, begin, length = token_tile(offsets, requests, tokens, tile, TOKENS, WAYS)
    # Through loads that load nothing, so that torch does not take the offsets for written: see
    # `attention_kernel`.
    begin = tl.load(offsets, mask=tile < 0, other=begin)
    memory = offsets.to(tl.pointer_type(tl.int64), bitcast=True)
    first = tl.load(memory, mask=tile < 0, other=first)
    if begin >= length:
        return

    row = tl.arange(0, BLOCK_M)
    position = begin + row // MEMBERS
    live = (position < length) & (row % MEMBERS < GROUP)
    head = r * GROUP + row % MEMBERS
    q_row = q + (first + position) * Q_ROW + head * D
    factor = float32(scale)
    queries = load_queries(q_row, live, 0, factor, D, BLOCK_D, True)

    # Closed chunks: of each row, of the last one; blocks up to the current one. Padding has none.
    real = n < requests
    end = tl.minimum(begin + TOKENS, length)
    closed = tl.where(real & live, (position + 1) // SIZE, 0)
    most = tl.where(real, end // SIZE, 0)
    blocks = tl.where(real, (end - 1) // SIZE + 1, 0)
    chunk_first = tl.load(chunk_offsets + n, mask=real, other=0).to(tl.int64)
    k_first = k + chunk_first * K_ROW + r * D

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, most, BLOCK_N):
        chunk = start + tl.arange(0, BLOCK_N)
        k_row = k_first + chunk.to(tl.int64) * K_ROW
        scores = products(
            queries, q_row, live, factor, k_row, chunk < most, D, BLOCK_D, True, True
        )  # fmt: skip
        scores = tl.where(chunk[None, :] < closed[:, None], scores, float("-inf"))
        _, _, top, total = softmax_step(scores, top, total, LOG2E, True)
    lse = top + tl.log2(tl.where(total == 0.0, 1.0, total))

    slot_token = begin + tl.arange(0, TOKENS)
    current = tl.where(real & (slot_token < length), slot_token // SIZE, -1)
    out_row = block_indices + ((first + slot_token) * HEADS_KV + r) * SELECTED
    bound = tl.full([TOKENS], 0x7FFFFFFFFFFFFFFF, tl.int64)
    for filled in range(0, SELECTED, KEEP):
        best = tl.full([TOKENS, KEEP], -1, tl.int64)
        for start in range(0, blocks, BLOCK_N):
            chunk = start + tl.arange(0, BLOCK_N)
            k_row = k_first + chunk.to(tl.int64) * K_ROW
            scores = products(
                queries, q_row, live, factor, k_row, chunk < most, D, BLOCK_D, True, True
            )  # fmt: skip
            score = group_scores(scores, lse, closed, chunk, TOKENS, MEMBERS, BLOCK_N)
            key = sortable(score, chunk, current)
            key = tl.where(key < bound[:, None], key, -1)
            new = largest(key, TOKEN_BITS, BLOCK_BITS, KEEP_BITS)
            best = merged(best, new, TOKEN_BITS, KEEP_BITS)
        slot = filled + KEEP - 1 - tl.arange(0, KEEP)
        ids = tl.where(best < 0, -1, 0xFFFFFFFF - (best & 0xFFFFFFFF)).to(tl.int32)
        keep = (slot_token < length)[:, None] & (slot < SELECTED)[None, :]
        tl.store(out_row[:, None] + slot[None, :], ids, mask=keep)
        bound = tl.min(best, 1)


def nsa_topk(out: Tensor, call: Any) -> None:
    """q [T, H, D]; k_cmp [C, H_kv, D] -> block_indices [T, H_kv, selected_block_num]."""
    (q, q_row), (k, k_row) = map(rows, (call.q, call.k_cmp))
    tokens, heads, dim = q.shape
    heads_kv = k.shape[1]
    group = heads // heads_kv
    shape = shape_class(dim)
    numbers = dict(configuration("nsa_topk", shape, machine(q)))
    block = columns(dim, shape == "wide").block
    block_n = numbers.pop("BLOCK_N")
    keep = min(max(2, triton.next_power_of_2(call.selected_block_num)), block_n)
    # Few enough tokens for their kept keys; a tile of at least 16 rows.
    members = triton.next_power_of_2(group)
    block_m = max(numbers.pop("BLOCK_M"), members)
    per_tile = max(1, min(block_m // members, KEPT // keep))
    members = max(members, 16 // per_tile)
    requests = call.offsets.shape[0] - 1
    launch(
        nsa_topk_kernel,
        ((tokens // per_tile + requests + 1) * heads_kv,),
        q,
        k,
        call.offsets.contiguous(),
        call.chunk_offsets.contiguous(),
        out,
        call.scale,
        tokens,
        requests,
        HEADS_KV=heads_kv,
        GROUP=group,
        D=dim,
        SIZE=min(call.bs, FAR),
        SELECTED=call.selected_block_num,
        Q_ROW=q_row,
        K_ROW=k_row,
        MEMBERS=members,
        TOKEN_BITS=bits(per_tile),
        KEEP_BITS=bits(keep),
        BLOCK_BITS=bits(block_n),
        BLOCK_D=block,
        WAYS=WAYS,
        **numbers,
    )
