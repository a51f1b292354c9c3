"""Attention over selected blocks on the device: tokens side by side share what they selected.

Loading every token's blocks for itself is bound by the L2 cache, so a tile of a few tokens walks
the union of their selections, each block once. A first kernel makes the unions: for every tile a
list of entries, a block id above a word with a bit for each token that selected it. A block that
a token names twice is in the list twice. Blocks whose keys all tokens of the tile may see come
first, they need no mask but the word. A tile whose union has most of what its tokens selected is
marked as apart, and left to the kernel of `triton_apart.py`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tileops.kernels.attention.nsa_varlen.triton_apart import (
    TOGETHER,
    attend_apart,
    may_be_apart,
)
from tileops.kernels.common.device import LOG2E, float32
from tileops.kernels.common.launch import launch, machine, rows
from tileops.kernels.common.machine import configuration
from tileops.kernels.common.triton_nsa import (
    FAR,
    WAYS,
    ascending,
    attend_block,
    bits,
    columns,
    load_queries,
    shape_class,
    store_rows,
    token_tile,
)

WORD = 32  # bits: tokens of a tile
SLOTS = 16  # of a token are joined at a time where their number is not known
JOINED = 256  # of the tokens of a tile together, where it is
FLAT_SIZE = 256  # larger blocks are walked one by one


@triton.jit
def joined_words(word, block, lane, BITS: tl.constexpr):
    """The bits of word [2 ** BITS] up to each lane of its block; equal blocks are neighbours."""
    for step in tl.static_range(BITS):
        before = tl.maximum(lane - 2**step, 0)
        same = (lane >= 2**step) & (tl.gather(block, before, 0) == block)
        word |= tl.where(same, tl.gather(word, before, 0), 0)
    return word


@triton.jit(do_not_specialize=["tokens", "requests", "slots", "apart"])
def nsa_union_kernel(
    block_indices,
    block_counts,
    offsets,
    entries,
    lengths,
    tokens,
    requests,
    slots,
    apart,
    HEADS_KV: tl.constexpr,
    SIZE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    TOKENS: tl.constexpr,
    ROW_BITS: tl.constexpr,
    SLOT_BITS: tl.constexpr,
    SHORT: tl.constexpr,
    WAYS: tl.constexpr,
):
    """entries [HEADS_KV, T, slots] and lengths [HEADS_KV, T, 2] of a tile of TOKENS tokens.

    A tile's list has the rows of its tokens: from the front the plain blocks, whose keys all of
    them see, from the back the masked ones. lengths, in the first token's row: of either, the
    first -1 where the entries are more than apart / 64 of what the tokens selected.
    There are 2 ** ROW_BITS rows for the tokens; 2 ** SLOT_BITS slots are joined at a time.
    SHORT: a block id and the number of a row fit 30 bits.
    """
    BITS: tl.constexpr = ROW_BITS + SLOT_BITS
    N: tl.constexpr = 2**BITS
    ROWS: tl.constexpr = 2**ROW_BITS
    SLOTS: tl.constexpr = 2**SLOT_BITS
    tile = tl.program_id(0) // HEADS_KV
    r = tl.program_id(0) % HEADS_KV
    n, first, begin, length = token_tile(offsets, requests, tokens, tile, TOKENS, WAYS)
    # Through loads that load nothing, so that torch does not take the offsets for written: see
    # `attention_kernel`.
    begin = tl.load(offsets, mask=tile < 0, other=begin)
    length = tl.load(offsets, mask=tile < 0, other=length)
    memory = offsets.to(tl.pointer_type(tl.int64), bitcast=True)
    first = tl.load(memory, mask=tile < 0, other=first)
    if (begin >= length) | (n >= requests):
        return

    token = tl.arange(0, ROWS)
    position = begin + token
    live = (token < TOKENS) & (position < length)
    place = (first + position) * HEADS_KV + r
    used = tl.load(block_counts + place, mask=live, other=0)
    # Compared as block numbers: a huge id times the block size would overflow.
    if IS_CAUSAL:
        last = position // SIZE
        whole = (begin + 1) // SIZE
    else:
        last = (position * 0 + length - 1) // SIZE
        whole = length // SIZE
    list_row = r.to(tl.int64) * tokens + first + begin
    into = entries + list_row * slots
    room = tl.minimum(TOKENS, length - begin) * slots

    lane = tl.arange(0, N)
    plain = begin * 0
    masked = plain
    selected = plain
    for start in range(0, slots, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        named = live[:, None] & (slot < slots)[None, :] & (slot[None, :] < used[:, None])
        named_at = block_indices + place[:, None] * slots + slot[None, :]
        block = tl.load(named_at, mask=named, other=-1)
        named = (block >= 0) & (block <= last[:, None])
        # Sorted by block, then token.
        if SHORT:
            named_by = tl.where(named, block * ROWS + token[:, None], 0x7FFFFFFF)
        else:
            named_by = tl.where(named, block.to(tl.int64) * ROWS + token[:, None], 2**62)
        named_by = ascending(tl.reshape(named_by, [N]), BITS)
        block = named_by // ROWS
        bit = tl.full([N], 1, tl.int32) << (named_by % ROWS).to(tl.int32)
        is_plain = block < whole
        final = (lane == N - 1) | (tl.gather(block, tl.minimum(lane + 1, N - 1), 0) != block)
        before = tl.maximum(lane - 1, 0)
        same = (lane > 0) & (tl.gather(named_by, before, 0) == named_by)
        waiting = (named_by < (0x7FFFFFFF if SHORT else 2**62)).to(tl.int32)
        selected += tl.sum(waiting, 0)
        left = tl.max(waiting, 0)
        while left > 0:
            # A block that a token names again waits for the next round.
            again = tl.where(same, tl.gather(waiting, before, 0), 0) * waiting
            word = tl.where(waiting > again, bit, 0)
            word = joined_words(word, block, lane, BITS)
            put = final & (word != 0)
            place_here = tl.cumsum(put.to(tl.int32), 0) - 1
            all_here = tl.sum(put.to(tl.int32), 0)
            plain_here = tl.sum((put & is_plain).to(tl.int32), 0)
            at = tl.where(
                is_plain, plain + place_here, room - 1 - masked - place_here + plain_here
            )
            joined = (block.to(tl.int64) << 32) | (word.to(tl.int64) & 0xFFFFFFFF)
            tl.store(into + at, joined, mask=put)
            plain += plain_here
            masked += all_here - plain_here
            waiting = again
            left = tl.max(waiting, 0)
    plain = tl.where((plain + masked) * 64 > selected * apart, -1, plain)
    tl.store(lengths + list_row * 2, plain)
    tl.store(lengths + list_row * 2 + 1, masked)


@triton.jit(do_not_specialize=["tokens", "requests", "slots"])
def nsa_varlen_kernel(
    q,
    k,
    v,
    offsets,
    entries,
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
    FLAT: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    TOKENS: tl.constexpr,
    MEMBERS: tl.constexpr,
    HEAD_PARTS: tl.constexpr,
    V_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WAYS: tl.constexpr,
):
    """BLOCK_V columns of o for TOKENS tokens and MEMBERS heads of a group, keys by tile's list.

    Tiles that are apart are left to `nsa_apart_kernel`.
    FLAT: the keys of a list are walked as one sequence, so that a step may hold several blocks;
    else block by block.
    """
    SHARE: tl.constexpr = HEAD_PARTS * V_PARTS
    # Programs of one key/value head run together, and so do tiles side by side: their keys stay
    # in the cache. The last tiles of a request, which see most, run first.
    per_head = tl.num_programs(0) // HEADS_KV
    r = tl.program_id(0) // per_head
    tile = (per_head - 1 - tl.program_id(0) % per_head) // SHARE
    share = tl.program_id(0) % SHARE
    v_start = share % V_PARTS * BLOCK_V
    part = share // V_PARTS
    n, first, begin, length = token_tile(offsets, requests, tokens, tile, TOKENS, WAYS)
    # Through loads that load nothing, so that torch does not take the offsets for written: see
    # `attention_kernel`.
    begin = tl.load(offsets, mask=tile < 0, other=begin)
    length = tl.load(offsets, mask=tile < 0, other=length)
    memory = offsets.to(tl.pointer_type(tl.int64), bitcast=True)
    first = tl.load(memory, mask=tile < 0, other=first)
    if begin >= length:
        return
    real = n < requests
    list_row = r.to(tl.int64) * tokens + first + begin
    plain = tl.load(lengths + list_row * 2, mask=real, other=0)
    if plain < 0:
        return

    row = tl.arange(0, BLOCK_M)
    token = row // MEMBERS
    position = begin + token
    member = part * MEMBERS + row % MEMBERS
    live = (token < TOKENS) & (position < length) & (member < GROUP)
    head = r * GROUP + member
    q_row = q + (first + position) * Q_ROW + head * D
    queries = load_queries(q_row, live, 0, 1.0, D, BLOCK_D, False)
    # No word has a bit past WORD: dead rows see nothing.
    bit = tl.where(live, tl.full([BLOCK_M], 1, tl.int32) << token, 0)

    blocks = entries + list_row * slots
    masked = tl.load(lengths + list_row * 2 + 1, mask=real, other=0)
    count = plain + masked
    # From the end of the plain blocks to the masked ones.
    gap = tl.minimum(TOKENS, length - begin) * slots - count
    limit = length
    if IS_CAUSAL:
        limit = tl.minimum(begin + TOKENS, length)
    k_first = k + first * K_ROW + r * D
    v_first = v + first * V_ROW + r * D
    logits = float32(scale) * LOG2E

    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if FLAT:
        keys = count * SIZE
        whole = plain * SIZE // BLOCK_N * BLOCK_N
        for start in range(0, whole, BLOCK_N):
            lane = start + tl.arange(0, BLOCK_N)
            entry = tl.load(blocks + lane // SIZE)
            key = (entry >> 32).to(tl.int32) * SIZE + lane % SIZE
            word = entry.to(tl.int32)
            at = key.to(tl.int64)
            seen = (word[None, :] & bit[:, None]) != 0
            acc, top, total = attend_block(
                acc, top, total, queries, q_row, live, k_first + at * K_ROW,
                v_first + at * V_ROW, True, seen, logits, v_start, D, D, BLOCK_D, BLOCK_V, True,
                False,
            )  # fmt: skip
        for start in range(whole, keys, BLOCK_N):
            lane = start + tl.arange(0, BLOCK_N)
            index = lane // SIZE
            index += tl.where(index < plain, 0, gap)
            entry = tl.load(blocks + index, mask=lane < keys, other=0)
            key = (entry >> 32).to(tl.int32) * SIZE + lane % SIZE
            word = entry.to(tl.int32)
            alive = (lane < keys) & (key < limit)
            at = key.to(tl.int64)
            seen = alive[None, :] & ((word[None, :] & bit[:, None]) != 0)
            if IS_CAUSAL:
                seen = seen & (key[None, :] <= position[:, None])
            acc, top, total = attend_block(
                acc, top, total, queries, q_row, live, k_first + at * K_ROW,
                v_first + at * V_ROW, alive, seen, logits, v_start, D, D, BLOCK_D, BLOCK_V, True,
                True,
            )  # fmt: skip
    else:
        for index in range(0, count):
            entry = tl.load(blocks + index + tl.where(index < plain, 0, gap))
            block_first = (entry >> 32).to(tl.int32) * SIZE
            seen_by = (entry.to(tl.int32) & bit) != 0
            stop = block_first + tl.minimum(limit - block_first, SIZE)
            for start in range(block_first, stop, BLOCK_N):
                key = start + tl.arange(0, BLOCK_N)
                alive = key < stop
                at = key.to(tl.int64)
                seen = alive[None, :] & seen_by[:, None]
                if IS_CAUSAL:
                    seen = seen & (key[None, :] <= position[:, None])
                acc, top, total = attend_block(
                    acc, top, total, queries, q_row, live, k_first + at * K_ROW,
                    v_first + at * V_ROW, alive, seen, logits, v_start, D, D, BLOCK_D, BLOCK_V,
                    True, True,
                )  # fmt: skip

    # A row without keys has zeros in acc and total.
    total = tl.where(total == 0.0, 1.0, total)
    o_row = o + ((first + position) * (HEADS_KV * GROUP) + head) * D
    store_rows(o_row, live, v_start, acc / total[:, None], D, BLOCK_V)


def nsa_varlen_fwd(out: Tensor, call: Any) -> None:
    """q, o [T, H, D]; k, v [T, H_kv, D]; block_indices [T, H_kv, SEL]."""
    (q, q_row), (k, k_row), (v, v_row) = map(rows, (call.q, call.k, call.v))
    tokens, heads, dim = q.shape
    heads_kv = k.shape[1]
    group = heads // heads_kv
    slots = call.block_indices.shape[2]
    shape = shape_class(dim)
    numbers = dict(configuration("nsa_varlen", shape, machine(q)))
    walk = columns(dim, shape == "wide")
    # A small group needs few rows for the tokens that are to share their blocks.
    shared = numbers.pop("TOKENS")
    apart = numbers.pop("APART", TOGETHER)
    block_m = min(numbers["BLOCK_M"], max(16, triton.next_power_of_2(shared * group)))
    numbers["BLOCK_M"] = block_m
    members = min(group, block_m)
    per_tile = min(block_m // members, WORD)
    head_parts = -(-group // members)
    requests = call.offsets.shape[0] - 1
    tiles = tokens // per_tile + requests + 1
    offsets = call.offsets.contiguous()
    block_indices = call.block_indices.contiguous()
    block_counts = call.block_counts.contiguous()
    entries = q.new_empty((heads_kv, tokens, slots), dtype=torch.int64)
    lengths = q.new_empty((heads_kv, tokens, 2), dtype=torch.int32)
    size = min(call.block_size, FAR)
    if size > FLAT_SIZE or not may_be_apart(call, size, block_m, per_tile):
        apart = TOGETHER
    union_rows = triton.next_power_of_2(per_tile)
    joined = joined_slots(slots, union_rows)
    launch(
        nsa_union_kernel,
        (tiles * heads_kv,),
        block_indices,
        block_counts,
        offsets,
        entries,
        lengths,
        tokens,
        requests,
        slots,
        apart,
        HEADS_KV=heads_kv,
        SIZE=size,
        IS_CAUSAL=call.is_causal,
        TOKENS=per_tile,
        ROW_BITS=bits(union_rows),
        SLOT_BITS=bits(joined),
        SHORT=size >= 2 * union_rows,
        WAYS=WAYS,
        warps=max(1, union_rows * joined // 64),
        stages=1,
    )
    launch(
        nsa_varlen_kernel,
        (tiles * heads_kv * head_parts * walk.parts,),
        q,
        k,
        v,
        offsets,
        entries,
        lengths,
        out,
        call.scale,
        tokens,
        requests,
        slots,
        HEADS_KV=heads_kv,
        GROUP=group,
        D=dim,
        SIZE=size,
        FLAT=size <= FLAT_SIZE,
        IS_CAUSAL=call.is_causal,
        Q_ROW=q_row,
        K_ROW=k_row,
        V_ROW=v_row,
        TOKENS=per_tile,
        MEMBERS=members,
        HEAD_PARTS=head_parts,
        V_PARTS=walk.parts,
        BLOCK_D=walk.block,
        BLOCK_V=walk.block,
        WAYS=WAYS,
        **numbers,
    )
    if apart == TOGETHER:
        return
    attend_apart(
        q,
        k,
        v,
        offsets,
        block_indices,
        block_counts,
        lengths,
        out,
        call.scale,
        tokens,
        requests,
        slots,
        tiles=tiles,
        HEADS_KV=heads_kv,
        GROUP=group,
        D=dim,
        SIZE=size,
        IS_CAUSAL=call.is_causal,
        Q_ROW=q_row,
        K_ROW=k_row,
        V_ROW=v_row,
        TOKENS=per_tile,
        BLOCK_D=walk.block,
    )


def joined_slots(slots: Any, union_rows: int) -> int:
    """Slots of a token that the union kernel joins at a time."""
    if not isinstance(slots, int):
        return SLOTS
    return min(max(SLOTS, triton.next_power_of_2(slots)), max(SLOTS, JOINED // union_rows))
