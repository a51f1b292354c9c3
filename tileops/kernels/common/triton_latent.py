"""Attention over latent rows, key and value at once: the device code of MLA and DSA decode.

A row of queries, one token and one KV head, walks its slots in tiles of BLOCK_N; a slot is a
cache row itself or names one. The tiles of all rows, end to end, are cut into ranges of equal
length; a program serves one range for BLOCK_H heads. The programs of one range run side by side
and share what they load in the L2 cache. A row inside one range is written at once; of any other
each range leaves a part, and `combine_parts_kernel` joins them.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ops_registry import tracing
from tileops.kernels.common.device import LOG2E, dot, float32, int64, integer
from tileops.kernels.common.launch import larger, launch, machine, padded, smaller
from tileops.kernels.common.machine import configuration
from tileops.kernels.common.triton_rope import load_rows

VECTOR = 8  # 16-bit elements of one load
WIDTHS = (144, 320, 576, 1152)  # padded columns of a key that have configurations
TILES = 4  # of a range at least: a part is not worth less
WAVES = 4  # ranges per program slot from which whole rows balance by themselves
COMBINED = 4  # heads that a program joins
SCAN = 1024  # names that a program looks at in one step
FAR = 2**31  # no index names a row so far, no query stands there


# -------------------------------------------------------------------------------- device code


@triton.jit
def live_span(names, begin, end, last, SCAN: tl.constexpr):
    """Of slots [begin, end): the first dead one, the end of the live ones, a name that is live."""
    dense = end
    live_end = begin
    safe = last
    for start in range(begin, end, SCAN):
        slot = start + tl.arange(0, SCAN)
        name = tl.load(names + slot, mask=slot < end, other=-1)
        live = (name >= 0) & (name <= last)
        dense = tl.minimum(dense, tl.min(tl.where(live, end, slot), 0))
        live_end = tl.maximum(live_end, tl.max(tl.where(live, slot + 1, begin), 0))
        safe = tl.minimum(safe, tl.min(tl.where(live, name, last), 0))
    return dense, live_end, safe


@triton.jit
def hide_dead(scores, names, slot, end, last, GATHER: tl.constexpr):
    """scores [M, N] with -inf for the slots [N] that are dead or past the end."""
    live = slot < end
    if GATHER:
        name = tl.load(names + slot, mask=live, other=-1)
        live = (name >= 0) & (name <= last)
    return tl.where(live[None, :], scores, float("-inf"))


@triton.jit
def load_block(tiles, request, start, column, N: tl.constexpr, COLUMNS: tl.constexpr):
    """[N, COLUMNS] through a descriptor; rows past the end are 0."""
    block = tiles.load([request.to(tl.int32), start, column.to(tl.int32)])
    return tl.reshape(block, [N, COLUMNS])


@triton.jit
def attend_tile(scores, latent, acc, top, total, MASKED: tl.constexpr):
    """One tile of an online softmax in base 2.

    scores: [M, N] logits, -inf where unseen. latent: [N, BLOCK_D] values.
    total: [M, N], sums of weights by column: their sum over a row can wait for the end.
    MASKED: a tile may show nothing to queries that have seen nothing yet.
    """
    new_top = tl.maximum(top, tl.max(scores, 1))
    anchor = new_top
    if MASKED:
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - anchor[:, None])
    fade = tl.exp2(top - anchor)
    total = total * fade[:, None] + weights
    acc = dot(weights.to(latent.dtype), latent, acc * fade[:, None])
    return acc, new_top, total


@triton.jit(
    do_not_specialize=[
        "rows",
        "slots",
        "row_tiles",
        "range_tiles",
        "queries",
        "kv_rows",
        "k_batch",
        "k_pe_batch",
        "limit_first",
        "limit_phase",
        "limit_stride",
    ]
)
def latent_kernel(
    q,
    q_pe,
    k,
    k_pe,
    indices,
    o,
    parts,
    part_sums,
    k_tiles,
    k_pe_tiles,
    scale,
    rows,
    slots,
    row_tiles,
    range_tiles,
    queries,
    kv_rows,
    k_batch,
    k_pe_batch,
    limit_first,
    limit_phase,
    limit_stride,
    GATHER: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HEADS_KV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PE: tl.constexpr,
    Q_ROW: tl.constexpr,
    Q_HEAD: tl.constexpr,
    Q_PE_ROW: tl.constexpr,
    Q_PE_HEAD: tl.constexpr,
    K_ROW: tl.constexpr,
    K_HEAD: tl.constexpr,
    K_UNIT: tl.constexpr,
    K_PE_ROW: tl.constexpr,
    K_PE_HEAD: tl.constexpr,
    K_PE_UNIT: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    SCAN: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_PE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
    TILES: tl.constexpr,
):
    """o [tokens, H, D] of rows (token, KV head), or parts of it, for one range of tiles.

    A row has `slots` slots in `row_tiles` tiles, at least one. With GATHER slot i of a row names
    cache row indices[row, i], live in [0, kv_rows) and, if causal, below
    limit_first + (s + limit_phase) // limit_stride for query s of `queries`; without, it is
    cache row i. Batch strides of the caches are in units of K_UNIT and K_PE_UNIT elements.

    parts: [ranges, 2, HEAD_BLOCKS, BLOCK_H, D] sums of weighted values, place 1 for a row that
        begins in the range.
    part_sums: [ranges, 2, HEAD_BLOCKS, 2, BLOCK_H] their base-2 anchors and sums of weights.
    EARLY: the next tile is requested before this one's softmax, not after it.
    TILES: k_tiles and k_pe_tiles are descriptors of [1, BLOCK_N, D] and [1, BLOCK_N, PE] blocks of
        k and k_pe [B, N, columns of all heads]; not with GATHER.
    """
    block = tl.program_id(0) % HEAD_BLOCKS
    part_range = (tl.program_id(0) // HEAD_BLOCKS).to(tl.int64)
    first = part_range * range_tiles
    stop = tl.minimum(first + range_tiles, int64(rows) * row_tiles)
    dtype: tl.constexpr = q.dtype.element_ty
    PARTIAL: tl.constexpr = GROUP % BLOCK_H != 0
    heads = tl.arange(0, BLOCK_H)
    member = block * BLOCK_H + heads
    present = member < GROUP
    lane = tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_D)
    to_logits = float32(scale) * LOG2E
    slots = integer(slots)

    for rank in range(first // row_tiles, (stop + row_tiles - 1) // row_tiles):
        # The last rows, which may see most, run first.
        row = int64(rows) - 1 - rank
        token = row // HEADS_KV
        r = row % HEADS_KV
        tile_begin = tl.maximum(first - rank * row_tiles, 0)
        tile_end = tl.minimum(stop - rank * row_tiles, row_tiles)
        begin = (tile_begin * BLOCK_N).to(slots.dtype)
        end = tl.minimum(tile_end * BLOCK_N, slots).to(slots.dtype)
        dense = end

        head = r * GROUP + member
        q_row = q + token * Q_ROW
        query = load_rows(q_row, head * Q_HEAD, present, D, BLOCK_D, dtype, False, False, PARTIAL)
        if PE:
            q_pe_row = q_pe + token * Q_PE_ROW
            query_pe = load_rows(
                q_pe_row, head * Q_PE_HEAD, present, PE, BLOCK_PE, dtype, False, False, PARTIAL
            )
        request = token // queries
        k_first = k + request * k_batch * K_UNIT + r * K_HEAD
        k_pe_first = k_pe + request * k_pe_batch * K_PE_UNIT + r * K_PE_HEAD
        names = indices + row * slots
        limit = int64(kv_rows)
        if IS_CAUSAL:
            past = (token % queries + limit_phase) // limit_stride
            limit = tl.minimum(limit, past + limit_first)
        last = tl.minimum(limit - 1, 2**31 - 1).to(tl.int32)
        if GATHER:
            dense, end, safe = live_span(names, begin, end, last, SCAN)
            # One tile ahead, so that rows are requested without waiting for their names.
            name = tl.load(names + begin + lane, mask=begin + lane < end, other=-1)

        acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
        top = tl.full([BLOCK_H], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
        for start in tl.range(begin, end, BLOCK_N, disable_licm=True):
            slot = start + lane
            if GATHER:
                at = tl.where((name >= 0) & (name <= last), name, safe).to(tl.int64)
                after = slot + BLOCK_N
                name = tl.load(names + after, mask=after < end, other=-1)
            else:
                at = tl.minimum(slot, slots - 1).to(tl.int64)
            # A dead slot holds a row that the query sees elsewhere: finite times 0, or no loss.
            if TILES:
                latent = load_block(k_tiles, request, start, r * K_HEAD, BLOCK_N, BLOCK_D)
            else:
                latent = load_rows(
                    k_first, at * K_ROW, slot, D, BLOCK_D, dtype, False, False, False
                )
            scores = dot(query, tl.trans(latent), None) * to_logits
            if PE:
                if TILES:
                    tail = load_block(k_pe_tiles, request, start, r * K_PE_HEAD, BLOCK_N, BLOCK_PE)
                else:
                    tail = load_rows(
                        k_pe_first, at * K_PE_ROW, slot, PE, BLOCK_PE, dtype, False, False, False
                    )
                # Two products and a sum: chained products would be computed by every warp group.
                scores += dot(query_pe, tl.trans(tail), None) * to_logits
            if EARLY:
                if start < end:
                    if start + BLOCK_N > dense:
                        scores = hide_dead(scores, names, slot, end, last, GATHER)
                    acc, top, total = attend_tile(scores, latent, acc, top, total, GATHER)
            else:
                if start + BLOCK_N > dense:
                    scores = hide_dead(scores, names, slot, end, last, GATHER)
                acc, top, total = attend_tile(scores, latent, acc, top, total, GATHER)

        sums = tl.sum(total, 1)
        kept = present[:, None] & (column < D)[None, :]
        if (tile_begin == 0) & (tile_end == row_tiles):
            value = acc / tl.where(sums == 0.0, 1.0, sums)[:, None]
            o_row = o + token * (HEADS_KV * GROUP * D)
            tl.store(o_row + head[:, None] * D + column[None, :], value.to(dtype), mask=kept)
        else:
            place = part_range * 2 + tl.where(tile_begin == 0, 1, 0)
            place = place * HEAD_BLOCKS + block
            at_part = parts + place * (BLOCK_H * D)
            tl.store(at_part + heads[:, None] * D + column[None, :], acc, mask=kept)
            at_sums = part_sums + place * (2 * BLOCK_H)
            tl.store(at_sums + heads, top)
            tl.store(at_sums + BLOCK_H + heads, sums)


@triton.jit(do_not_specialize=["rows", "row_tiles", "range_tiles"])
def combine_parts_kernel(
    parts,
    part_sums,
    o,
    rows,
    row_tiles,
    range_tiles,
    HEADS_KV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,
):
    """HEADS heads of the row that begins in a range and ends in a later one, if there is one."""
    CHUNKS: tl.constexpr = BLOCK_H // HEADS
    chunk = tl.program_id(0) % CHUNKS
    block = tl.program_id(0) // CHUNKS % HEAD_BLOCKS
    part_range = (tl.program_id(0) // (CHUNKS * HEAD_BLOCKS)).to(tl.int64)
    first = part_range * range_tiles
    stop = tl.minimum(first + range_tiles, int64(rows) * row_tiles)
    rank = stop // row_tiles
    if (rank * row_tiles == stop) | (rank * row_tiles < first):
        return

    heads = chunk * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK_D)
    kept = (block * BLOCK_H + heads < GROUP)[:, None] & (column < D)[None, :]
    acc = tl.zeros([HEADS, BLOCK_D], tl.float32)
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    for part in range(part_range, ((rank + 1) * row_tiles - 1) // range_tiles + 1):
        place = part * 2 + tl.where(part == part_range, 1, 0)
        place = place * HEAD_BLOCKS + block
        at_sums = part_sums + place * (2 * BLOCK_H)
        part_top = tl.load(at_sums + heads)
        part_total = tl.load(at_sums + BLOCK_H + heads)
        at_part = parts + place * (BLOCK_H * D)
        part_acc = tl.load(at_part + heads[:, None] * D + column[None, :], mask=kept, other=0.0)
        new_top = tl.maximum(top, part_top)
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        fade = tl.exp2(top - anchor)
        weight = tl.exp2(part_top - anchor)
        acc = acc * fade[:, None] + part_acc * weight[:, None]
        total = total * fade + part_total * weight
        top = new_top

    value = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    row = int64(rows) - 1 - rank
    head = row % HEADS_KV * GROUP + block * BLOCK_H + heads
    o_row = o + row // HEADS_KV * (HEADS_KV * GROUP * D)
    at = o_row + head[:, None] * D + column[None, :]
    tl.store(at, value.to(o.dtype.element_ty), mask=kept)


# --------------------------------------------------------------------------------- launching


class Limit(NamedTuple):
    """Cache rows that query s may see: first + (s + phase) // stride of them."""

    first: int
    phase: int
    stride: int


def past_rows(start: int, stride: int) -> Limit:
    """(start + s + 1) // stride, for every query s < FAR right below FAR and free of overflow."""
    first, rest = divmod(start + 1, stride)
    wait = min(stride - rest, FAR)  # queries that see no more than `first` rows
    stride = min(stride, FAR)
    return Limit(min(first, FAR), stride - wait, stride)


class Strided(NamedTuple):
    """A tensor [..., H, D] with static strides of its rows and heads, in elements."""

    x: Tensor
    row: int
    head: int


class Cache(NamedTuple):
    """A tensor [B, N, H, D] with static strides, and that of its batch in units of elements."""

    x: Tensor
    row: int
    head: int
    batch: Any
    unit: int


def dense_columns(x: Tensor) -> bool:
    """Whether columns of x [..., H, D] are dense, rows and heads a static distance apart."""
    static = isinstance(x.stride(-3), int) and isinstance(x.stride(-2), int)
    return static and tracing.always(x.stride(-1) == 1)


def strided(x: Tensor) -> Strided:
    """x [..., H, D], or a copy, as rows of one stride."""
    even = all(
        tracing.always(x.stride(axis) == x.stride(axis + 1) * x.shape[axis + 1])
        for axis in range(x.dim() - 3)
    )
    if not (even and dense_columns(x)):
        x = x.contiguous()
    return Strided(x, x.stride(-3), x.stride(-2))


def cache(x: Tensor) -> Cache:
    """x [B, N, H, D], or a copy."""
    if not dense_columns(x):
        x = x.contiguous()
    # In units of a vector, so that the kernel knows that rows are aligned.
    unit = VECTOR if tracing.always(x.stride(0) % VECTOR == 0) else 1
    return Cache(x, x.stride(1), x.stride(2), x.stride(0) // unit, unit)


def block_of(keys: Cache, block_n: int) -> TensorDescriptor:
    """A descriptor of blocks of rows of one request and the columns of one head."""
    x = keys.x
    batch, rows, heads, dim = x.shape
    columns = (heads - 1) * keys.head + dim
    strides = [x.stride(0), keys.row, 1]
    return TensorDescriptor(x, [batch, rows, columns], strides, [1, block_n, dim])


def tileable(keys: Cache) -> bool:
    """Whether rows can be moved through a tensor descriptor.

    Traced programs use pointers: Inductor re-emits kernels without descriptors it did not make.
    """
    x = keys.x
    dim = x.shape[-1]
    if tracing.traced(x) or dim != padded(dim) or not (x.numel() and x.shape[1] < 2**31):
        return False
    even = keys.unit == VECTOR and keys.row % VECTOR == 0 and keys.head % VECTOR == 0
    return even and x.stride(0) > 0 and keys.row > 0 and x.data_ptr() % 16 == 0


def shape_class(group: int, dim: int, pe: int) -> str | None:
    """The configuration for these dims, None if they are too large."""
    width = padded(dim) + (padded(pe) if pe else 0)
    fitting = [w for w in WIDTHS if w >= width]
    return f"w{fitting[0]}h{16 if group <= 16 else 64}" if fitting else None


def refusal(group: int, dim: int, pe: int) -> str | None:
    if shape_class(group, dim, pe) is None:
        return (
            f"serves keys of at most {WIDTHS[-1]} columns, the {dim} of the values and the {pe} "
            "more each padded to a power of two"
        )
    return None


class Schedule(NamedTuple):
    """Tiles of a row and of a range, ranges, and a bound of the ranges that leave parts."""

    row_tiles: Any
    range_tiles: Any
    ranges: Any
    parts: int


def schedule(rows: Any, slots: Any, block_n: int, running: int, uneven: bool) -> Schedule:
    """Ranges for a machine that runs `running` of them at once.

    One range each, all equal; but where rows are many and uneven, ranges are whole rows, which
    the machine balances.
    """
    row_tiles = larger((slots + block_n - 1) // block_n, 1)
    tiles = rows * row_tiles
    even = larger((tiles + running - 1) // running, smaller(row_tiles, TILES))
    many = smaller(rows // (WAVES * running), 1) if uneven else 0
    range_tiles = even + many * (row_tiles - even)
    ranges = (tiles + range_tiles - 1) // range_tiles
    parts = running  # not a symbol, which would guard the shape of what it sizes
    if isinstance(ranges, int):
        parts = ranges if range_tiles % row_tiles else 0
    return Schedule(row_tiles, range_tiles, ranges, parts)


def attend_latent(
    name: str,
    o: Tensor,
    q: Tensor,
    q_pe: Tensor,
    k: Tensor,
    k_pe: Tensor,
    scale: float,
    *,
    queries: Any = 1,
    indices: Tensor | None = None,
    limit: Limit | None = None,
) -> None:
    """Fill o [..., H, D], contiguous.

    Args:
        name: of the configurations.
        q, q_pe: [..., H, D] and [..., H, PE], `queries` tokens per request.
        k, k_pe: [B, N, H_kv, D] and [B, N, H_kv, PE].
        indices: [..., H_kv, K], the cache rows of every token; None is all N.
        limit: the cache rows that exist for a query; None is all.
    """
    heads, dim = q.shape[-2:]
    pe = q_pe.shape[-1]
    heads_kv = k.shape[2]
    group = heads // heads_kv
    if heads == 0:
        return
    query, keys = strided(q), cache(k)
    query_pe, keys_pe = (strided(q_pe), cache(k_pe)) if pe else (query, keys)
    shape = shape_class(group, dim, pe)
    assert shape is not None
    device = machine(q)
    numbers = dict(configuration(name, shape, device))
    block_h, block_n = numbers["BLOCK_H"], numbers["BLOCK_N"]
    head_blocks = -(-group // block_h)
    running = max(device.processors * numbers.pop("programs") // head_blocks, 1)
    tokens = o.numel() // (heads * dim)
    rows = tokens * heads_kv
    slots = k.shape[1] if indices is None else indices.shape[-1]
    plan = schedule(rows, slots, block_n, running, indices is not None)
    parts = o.new_empty((plan.parts, 2, head_blocks, block_h, dim), dtype=torch.float32)
    part_sums = o.new_empty((plan.parts, 2, head_blocks, 2, block_h), dtype=torch.float32)
    first, phase, stride = limit or Limit(0, 0, 1)
    tiled = numbers.pop("TILES") == 1 and indices is None and all(map(tileable, (keys, keys_pe)))
    blocks = [block_of(x, block_n) for x in (keys, keys_pe)] if tiled else [query.x, query.x]
    launch(
        latent_kernel,
        (plan.ranges * head_blocks,),
        query.x,
        query_pe.x,
        keys.x,
        keys_pe.x,
        query.x if indices is None else indices.contiguous(),
        o,
        parts,
        part_sums,
        *blocks,
        scale,
        rows,
        slots,
        plan.row_tiles,
        plan.range_tiles,
        queries,
        k.shape[1],
        keys.batch,
        keys_pe.batch,
        first,
        phase,
        stride,
        GATHER=indices is not None,
        IS_CAUSAL=limit is not None,
        HEADS_KV=heads_kv,
        GROUP=group,
        D=dim,
        PE=pe,
        Q_ROW=query.row,
        Q_HEAD=query.head,
        Q_PE_ROW=query_pe.row,
        Q_PE_HEAD=query_pe.head,
        K_ROW=keys.row,
        K_HEAD=keys.head,
        K_UNIT=keys.unit,
        K_PE_ROW=keys_pe.row,
        K_PE_HEAD=keys_pe.head,
        K_PE_UNIT=keys_pe.unit,
        HEAD_BLOCKS=head_blocks,
        SCAN=SCAN,
        BLOCK_D=padded(dim),
        BLOCK_PE=padded(pe) if pe else 16,
        TILES=tiled,
        **numbers,
    )
    combine(o, parts, part_sums, rows, plan, heads_kv)


def combine(
    o: Tensor, parts: Tensor, part_sums: Tensor, rows: Any, plan: Schedule, heads_kv: int
) -> None:
    """Join the parts of rows that are in several ranges."""
    heads, dim = o.shape[-2:]
    head_blocks, block_h = parts.shape[2:4]
    launch(
        combine_parts_kernel,
        (plan.parts * head_blocks * (block_h // COMBINED),),
        parts,
        part_sums,
        o,
        rows,
        plan.row_tiles,
        plan.range_tiles,
        HEADS_KV=heads_kv,
        GROUP=heads // heads_kv,
        D=dim,
        HEAD_BLOCKS=head_blocks,
        BLOCK_H=block_h,
        BLOCK_D=padded(dim),
        HEADS=COMBINED,
        warps=4,
        stages=1,
    )
