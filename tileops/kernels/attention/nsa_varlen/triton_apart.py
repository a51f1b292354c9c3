"""Attention over selected blocks, token by token: for tiles whose tokens share few of them.

Such a tile's union is nearly as long as the selections together, and every step over it multiplies
the rows of tokens that did not select the block. One warp for one token has a small tile of rows,
so that many programs share a multiprocessor and keep its loads under way.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ops_registry import tracing
from tileops.kernels.common.device import LOG2E, float32
from tileops.kernels.common.launch import launch, machine
from tileops.kernels.common.machine import configuration
from tileops.kernels.common.triton_nsa import (
    WAYS,
    attend_block,
    load_queries,
    shape_class,
    store_rows,
    token_tile,
)

ROWS = 16  # heads of a token at a time: the least that a product has
TOGETHER = 64  # as APART: no tile is apart, since no union is longer than the selections
# In a request of fewer blocks per selection, neighbours share most of what they select: looking
# for tiles that are apart costs more than the few there are would gain.
LONG = 8
LEAST_SIZE = 16  # a smaller block would leave most of a step without keys
WIDEST = 64  # at 128 columns the two kernels gained nothing, wider heads were not tried


def may_be_apart(call: Any, size: int, block_m: int, per_tile: int) -> bool:
    """Whether tiles can gain by a walk token by token; with traced sizes, for any of them.

    A step over a union of no more rows than ROWS costs no more than a step of one token.
    """
    tokens, _, dim = call.q.shape
    if dim > WIDEST or size < LEAST_SIZE or per_tile == 1 or block_m <= ROWS:
        return False
    slots, requests = call.block_indices.shape[2], call.offsets.shape[0] - 1
    short = tokens < LONG * slots * size * requests
    return not tracing.always(short)


@triton.jit(do_not_specialize=["tokens", "requests", "slots"])
def nsa_apart_kernel(
    q,
    k,
    v,
    offsets,
    block_indices,
    block_counts,
    lengths,
    o,
    scale,
    tokens,
    requests,
    slots,
    HEADS_KV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WAYS: tl.constexpr,
):
    """o of BLOCK_M heads of a group for the tokens of a tile in turn, if `lengths` has -1 for it.

    A step takes BLOCK_N keys of one block, whose id is loaded a step ahead: it is a scalar, so
    that addresses are one base and constants.
    """
    PARTS: tl.constexpr = (SIZE + BLOCK_N - 1) // BLOCK_N
    # In the order of `nsa_varlen_kernel`.
    per_head = tl.num_programs(0) // HEADS_KV
    r = tl.program_id(0) // per_head
    tile = (per_head - 1 - tl.program_id(0) % per_head) // HEAD_PARTS
    part = tl.program_id(0) % HEAD_PARTS
    n, first, begin, length = token_tile(offsets, requests, tokens, tile, TOKENS, WAYS)
    # Through loads that load nothing, so that torch does not take the offsets for written: see
    # `attention_kernel`.
    begin = tl.load(offsets, mask=tile < 0, other=begin)
    length = tl.load(offsets, mask=tile < 0, other=length)
    memory = offsets.to(tl.pointer_type(tl.int64), bitcast=True)
    first = tl.load(memory, mask=tile < 0, other=first)
    if (begin >= length) | (n >= requests):
        return
    list_row = r.to(tl.int64) * tokens + first + begin
    if tl.load(lengths + list_row * 2) >= 0:
        return

    member = part * BLOCK_M + tl.arange(0, BLOCK_M)
    live = member < GROUP
    head = r * GROUP + member
    k_first = k + first * K_ROW + r * D
    v_first = v + first * V_ROW + r * D
    lane = tl.arange(0, BLOCK_N)
    logits = float32(scale) * LOG2E
    for position in range(begin, tl.minimum(begin + TOKENS, length)):
        q_row = q + (first + position) * Q_ROW + head * D
        queries = load_queries(q_row, live, 0, 1.0, D, BLOCK_D, False)
        place = (first + position) * HEADS_KV + r
        ids = block_indices + place * slots
        used = tl.minimum(tl.maximum(tl.load(block_counts + place), 0), slots)
        limit = length
        if IS_CAUSAL:
            limit = position + 1
        last = (limit - 1) // SIZE
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        block = tl.load(ids, mask=used > 0, other=-1)
        for step in range(0, used * PARTS):
            # Compared as block numbers: a huge id times the block size would overflow.
            named = (block >= 0) & (block <= last)
            inside = step % PARTS * BLOCK_N
            start = tl.where(named, block * SIZE + inside, 0)
            room = tl.where(named, limit - start, 0)
            if SIZE % BLOCK_N != 0:
                room = tl.minimum(room, SIZE - inside)
            following = (step + 1) // PARTS
            block = tl.load(ids + following, mask=following < used, other=-1)
            alive = lane < room
            at = start.to(tl.int64)
            acc, top, total = attend_block(
                acc, top, total, queries, q_row, live, k_first + at * K_ROW + lane * K_ROW,
                v_first + at * V_ROW + lane * V_ROW, alive, alive[None, :], logits, 0, D, D,
                BLOCK_D, BLOCK_D, True, True,
            )  # fmt: skip
        # A row without keys has zeros in acc and total.
        total = tl.where(total == 0.0, 1.0, total)
        o_row = o + ((first + position) * (HEADS_KV * GROUP) + head) * D
        store_rows(o_row, live, 0, acc / total[:, None], D, BLOCK_D)


def attend_apart(
    q: Tensor, *args: Any, tiles: Any, HEADS_KV: int, GROUP: int, D: int, **constexprs: Any
) -> None:
    """Launch the kernel for the tiles of all key/value heads; the rest are its arguments."""
    numbers = configuration("nsa_varlen_apart", shape_class(D), machine(q))
    head_parts = -(-GROUP // ROWS)
    launch(
        nsa_apart_kernel,
        (tiles * HEADS_KV * head_parts,),
        q,
        *args,
        HEADS_KV=HEADS_KV,
        GROUP=GROUP,
        D=D,
        HEAD_PARTS=head_parts,
        BLOCK_M=ROWS,
        WAYS=WAYS,
        **constexprs,
        **numbers,
    )
