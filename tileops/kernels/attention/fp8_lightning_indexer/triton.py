"""The lightning indexer on GPUs: products of keys with (query, head) columns.

A program owns some queries and a stretch of keys. The codes of its queries, one column per query
and head, stay in shared memory and their weights in registers; tiles of keys stream past. A
product has keys as rows, so that the sum over heads is a sum over columns, most of which one
thread holds.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops_registry.contract import E4M3
from tileops.kernels.common.device import dot, e4m3_bits, e4m3_load, e4m3_value
from tileops.kernels.common.launch import (
    e4m3_argument,
    larger,
    launch,
    machine,
    native_e4m3,
    padded,
    rows,
    smaller,
)
from tileops.kernels.common.machine import Machine, configuration

MOST_DIM = 256  # columns of a tile of keys; wider heads take several
MOST_QUERIES = 32  # of one program
FEWEST_COLUMNS = 16  # of a product


@triton.jit
def to_codes(x, NATIVE: tl.constexpr):
    """float32 rounded to e4m3, saturating, as operands: e4m3 if NATIVE, else float16."""
    return x.to(tl.float8e4nv) if NATIVE else e4m3_value(e4m3_bits(x)).to(tl.float16)


@triton.jit
def query_codes(
    q,
    row,
    head,
    element,
    real,
    HEADS_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    Q_ROW: tl.constexpr,
    QUANTIZE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Operand [D, columns] of a product: `element` of `head` of `row`; 0 where not real.

    Heads past the last repeat it, and have a weight of 0. They are not zeros: ptxas 12.8 packs
    e4m3 codes of zeros that it knows of with whatever a register holds.
    """
    head = tl.minimum(head, HEADS_GROUP - 1)
    at = row.to(tl.int64)[:, None] * Q_ROW + head[:, None] * DIM + element[None, :]
    mask = real[:, None] & (element < DIM)[None, :]
    if QUANTIZE:
        codes = to_codes(tl.load(q + at, mask=mask, other=0.0).to(tl.float32), NATIVE)
    elif NATIVE:
        codes = tl.load(q + at, mask=mask, other=0.0)
    else:
        codes = e4m3_load(q + at, mask, tl.float16, NATIVE)
    return tl.trans(codes)


@triton.jit
def key_codes(k, at, element, DIM: tl.constexpr, K_ROW: tl.constexpr, BLOCK_D: tl.constexpr):
    """Operand [M, BLOCK_D] of a product: `element` of the rows `at`."""
    pointer = k + (at.to(tl.int64)[:, None] * K_ROW + element[None, :])
    if DIM % BLOCK_D == 0:
        codes = tl.load(pointer)
    else:
        codes = tl.load(pointer, mask=(element < DIM)[None, :], other=0.0)
    return codes


@triton.jit
def half_weights(weights, row, head, real, W_ROW: tl.constexpr):
    """Half the weight [columns] of `head` in `row`, 0 where not real."""
    at = row.to(tl.int64) * W_ROW + head
    return 0.5 * tl.load(weights + at, mask=real, other=0.0)


@triton.jit
def product(keys, queries, IMPRECISE: tl.constexpr):
    """keys [M, D] @ queries [D, N] in float32; see IMPRECISE of the kernel."""
    if IMPRECISE > 0:
        dots = tl.dot(keys, queries, max_num_imprecise_acc=IMPRECISE)
    else:
        dots = dot(keys, queries, None)
    return dots


@triton.jit
def over_heads(dots, half_weight, M: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr):
    """Weighted sums of relu [M, QUERIES] of dots [M, QUERIES * HEADS].

    2 relu(x) = x + |x| keeps NaN, and costs an addition where a maximum runs at half that rate.
    """
    terms = (dots + tl.abs(dots)) * half_weight[None, :]
    return tl.sum(tl.reshape(terms, [M, QUERIES, HEADS]), 2)


@triton.jit
def fill(logits, live, begin, stop, QUERIES: tl.constexpr, GROUPS: tl.constexpr):
    """-inf for keys [begin, stop) of the live rows; logits: pointers to the rows [QUERIES]."""
    BLOCK: tl.constexpr = 2048 // QUERIES
    for start in tl.range(begin, stop, BLOCK):
        t = start + tl.arange(0, BLOCK)
        nothing = tl.full([QUERIES, BLOCK], float("-inf"), tl.float32)
        pointer = logits[:, None] + t.to(tl.int64)[None, :] * GROUPS
        tl.store(pointer, nothing, mask=live[:, None] & (t < stop)[None, :])


@triton.jit
def tile_logits(
    q,
    k,
    weights,
    k_scale,
    t,
    keys,
    row,
    head,
    real,
    q_codes,
    half_weight,
    HEADS_GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    QUANTIZE: tl.constexpr,
    SCALED: tl.constexpr,
    NATIVE: tl.constexpr,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IMPRECISE: tl.constexpr,
):
    """Logits [BLOCK_M, QUERIES] of the keys t, windows aside.

    row, head, real [QUERIES * HEADS]: the columns of a product. q_codes, half_weight: of the
    first HEADS heads and BLOCK_D elements, usually all there are.
    """
    # The rows of a tile past the last key repeat it; their logits are not stored.
    at = tl.minimum(t, keys - 1)
    d = tl.arange(0, BLOCK_D)
    if HEADS_GROUP <= HEADS and DIM <= BLOCK_D:
        dots = product(key_codes(k, at, d, DIM, K_ROW, BLOCK_D), q_codes, IMPRECISE)
        total = over_heads(dots, half_weight, BLOCK_M, QUERIES, HEADS)
    else:
        total = tl.zeros([BLOCK_M, QUERIES], tl.float32)
        for past_heads in tl.range(0, HEADS_GROUP, HEADS):
            h = past_heads + head
            some = real & (h < HEADS_GROUP)
            dots = tl.zeros([BLOCK_M, QUERIES * HEADS], tl.float32)
            for past in tl.range(0, DIM, BLOCK_D):
                e = past + d
                codes = query_codes(q, row, h, e, real, HEADS_GROUP, DIM, Q_ROW, QUANTIZE, NATIVE)
                dots += product(key_codes(k, at, e, DIM, K_ROW, BLOCK_D), codes, IMPRECISE)
            half_weight = half_weights(weights, row, h, some, HEADS_GROUP * GROUPS)
            total += over_heads(dots, half_weight, BLOCK_M, QUERIES, HEADS)
    if SCALED:
        total *= tl.load(k_scale + at.to(tl.int64) * GROUPS)[:, None]
    return total


@triton.jit
def score(
    q,
    k,
    weights,
    starts,
    ends,
    k_scale,
    logits,
    queries,
    keys,
    first,
    begin,
    stop,
    HEADS_GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    QUANTIZE: tl.constexpr,
    SCALED: tl.constexpr,
    CLEAN: tl.constexpr,
    NATIVE: tl.constexpr,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IMPRECISE: tl.constexpr,
):
    """Logits of queries [first, first + QUERIES) with keys [begin, stop).

    Pointers are those of one request and group.
    """
    query = first + tl.arange(0, QUERIES)
    live = query < queries
    low = tl.maximum(tl.load(starts + query, mask=live, other=0), 0)
    high = tl.minimum(tl.load(ends + query, mask=live, other=0), keys)
    out = logits + query.to(tl.int64) * keys * GROUPS
    # Tiles that some query sees, from `seen` on. All queries see all of `inner` tiles, of which
    # `before` lie before.
    some = low < high
    seen = tl.minimum(tl.maximum(tl.min(tl.where(some, low, keys), 0), begin), stop)
    seen = begin + (seen - begin) // BLOCK_M * BLOCK_M
    seen_to = tl.minimum(tl.max(tl.where(some, high, 0), 0), stop)
    tiles = (tl.maximum(seen_to - seen, 0) + BLOCK_M - 1) // BLOCK_M
    before = 0
    inner = tiles
    if CLEAN:
        inner_to = tl.minimum(tl.min(tl.where(live, high, keys), 0), stop)
        before = (tl.maximum(tl.max(low, 0) - seen, 0) + BLOCK_M - 1) // BLOCK_M
        inner = tl.maximum(tl.maximum(inner_to - seen, 0) // BLOCK_M - before, 0)

    column = tl.arange(0, QUERIES * HEADS)
    row = first + column // HEADS
    head = column % HEADS
    real = (row < queries) & (tiles > 0)
    some_head = real & (head < HEADS_GROUP)
    d = tl.arange(0, BLOCK_D)
    q_codes = query_codes(q, row, head, d, real, HEADS_GROUP, DIM, Q_ROW, QUANTIZE, NATIVE)
    half_weight = half_weights(weights, row, head, some_head, HEADS_GROUP * GROUPS)
    if CLEAN:
        fill(out, live, begin, seen, QUERIES, GROUPS)
        fill(out, live, seen + tiles * BLOCK_M, stop, QUERIES, GROUPS)
        for index in tl.range(0, tiles - inner):
            tile = tl.where(index < before, index, index + inner)
            t = seen + tile * BLOCK_M + tl.arange(0, BLOCK_M)
            total = tile_logits(q, k, weights, k_scale, t, keys, row, head, real, q_codes,
                                half_weight, HEADS_GROUP, GROUPS, DIM, Q_ROW, K_ROW, QUANTIZE,
                                SCALED, NATIVE, QUERIES, HEADS, BLOCK_M, BLOCK_D,
                                IMPRECISE)  # fmt: skip
            inside = (t[:, None] >= low[None, :]) & (t[:, None] < high[None, :])
            pointer = out[None, :] + t.to(tl.int64)[:, None] * GROUPS
            total = tl.where(inside, total, float("-inf"))
            tl.store(pointer, total, mask=(t < stop)[:, None] & live[None, :])
    for index in tl.range(0, inner):
        t = seen + (before + index) * BLOCK_M + tl.arange(0, BLOCK_M)
        total = tile_logits(q, k, weights, k_scale, t, keys, row, head, real, q_codes,
                            half_weight, HEADS_GROUP, GROUPS, DIM, Q_ROW, K_ROW, QUANTIZE, SCALED,
                            NATIVE, QUERIES, HEADS, BLOCK_M, BLOCK_D, IMPRECISE)  # fmt: skip
        pointer = out[None, :] + t.to(tl.int64)[:, None] * GROUPS
        tl.store(pointer, total, mask=(t < stop)[:, None] & live[None, :])


@triton.jit(do_not_specialize=["batch", "queries", "keys", "stretch"])
def fp8_lightning_indexer_kernel(
    q,
    k,
    weights,
    starts,
    ends,
    k_scale,
    logits,
    batch,
    queries,
    keys,
    stretch,
    HEADS_GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    QUANTIZE: tl.constexpr,
    SCALED: tl.constexpr,
    CLEAN: tl.constexpr,
    NATIVE: tl.constexpr,
    QUERIES: tl.constexpr,
    FEW: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IMPRECISE: tl.constexpr,
):
    """One program: QUERIES queries of a request and group, `stretch` keys.

    q [batch, queries, GROUPS * HEADS_GROUP, DIM], k [batch, keys, GROUPS, DIM] with row strides
    Q_ROW and K_ROW; weights [queries, GROUPS * HEADS_GROUP]; starts, ends [queries];
    k_scale [batch, keys, GROUPS] if SCALED; logits [batch, queries, keys, GROUPS].
    QUANTIZE: q is 16-bit and k already codes. FEW: at most so many queries take a narrow
    product, so that decoding does not multiply columns of nothing. IMPRECISE: how many products
    a tensor core may add in its own width, 0 is all.
    """
    parts = (keys + stretch - 1) // stretch
    tiles = (queries + QUERIES - 1) // QUERIES
    left = tl.program_id(0)
    if left >= batch * GROUPS * tiles * parts:
        return
    begin = left % parts * stretch
    stop = tl.minimum(begin + stretch, keys)
    left = left // parts
    first = left % tiles * QUERIES
    left = left // tiles
    group = left % GROUPS
    b = (left // GROUPS).to(tl.int64)

    q += b * queries * Q_ROW + group * (HEADS_GROUP * DIM)
    k += b * keys * K_ROW + group * DIM
    weights += group * HEADS_GROUP
    k_scale += b * keys * GROUPS + group
    logits += b * queries * keys * GROUPS + group
    if (FEW < QUERIES) & (queries - first <= FEW):
        score(q, k, weights, starts, ends, k_scale, logits, queries, keys, first, begin, stop,
              HEADS_GROUP, GROUPS, DIM, Q_ROW, K_ROW, QUANTIZE, SCALED, CLEAN, NATIVE,
              FEW, HEADS, BLOCK_M, BLOCK_D, IMPRECISE)  # fmt: skip
    else:
        score(q, k, weights, starts, ends, k_scale, logits, queries, keys, first, begin, stop,
              HEADS_GROUP, GROUPS, DIM, Q_ROW, K_ROW, QUANTIZE, SCALED, CLEAN, NATIVE,
              QUERIES, HEADS, BLOCK_M, BLOCK_D, IMPRECISE)  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def index_keys_kernel(
    k,
    codes,
    scale,
    count,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    K_ROW: tl.constexpr,
    QUANTIZE: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """codes [count, DIM] and scale [count] of keys, whose rows are K_ROW apart for GROUPS keys.

    QUANTIZE: 16-bit keys get their own scales. Else they are e4m3 and become float16, for
    machines without e4m3 products; scale is not written.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    mask = (row < count)[:, None] & (d < DIM)[None, :]
    at = (row // GROUPS * K_ROW + row % GROUPS * DIM)[:, None] + d[None, :]
    if QUANTIZE:
        x = tl.load(k + at, mask=mask, other=0.0).to(tl.float32)
        size = tl.maximum(tl.max(tl.abs(x), 1), 1e-4)
        step = tl.math.div_rn(size, 448.0)
        x *= tl.math.div_rn(1.0, step)[:, None]
        tl.store(scale + row, step, mask=row < count)
        tl.store(codes + (row[:, None] * DIM + d[None, :]), to_codes(x, NATIVE), mask=mask)
    else:
        wide = e4m3_load(k + at, mask, tl.float16, NATIVE)
        tl.store(codes + (row[:, None] * DIM + d[None, :]), wide, mask=mask)


class _Keys(NamedTuple):
    """Codes [B, S_kv, G, D] that products take, their row stride, their scale [B, S_kv, G]."""

    codes: Tensor
    row: int
    scale: Tensor | None


def _keys(call: Any) -> _Keys:
    """The keys as they are if products take them so, else codes made here."""
    k, row = rows(call.index_k)
    quantize = k.dtype != E4M3
    native = native_e4m3(k)
    scale = call.index_k_scale
    if native and not quantize:
        return _Keys(k, row, scale.contiguous() if scale is not None else None)
    batch, keys, groups, dim = k.shape
    codes = k.new_empty(k.shape, dtype=E4M3 if native else torch.float16)
    if quantize:
        scale = k.new_empty((batch, keys, groups), dtype=torch.float32)
    elif scale is not None:
        scale = scale.contiguous()
    numbers = dict(configuration("index_keys", "all", machine(k)))
    block_d = padded(dim)
    block_r = max(1, numbers.pop("ELEMENTS") // block_d)
    count = batch * keys * groups
    launch(
        index_keys_kernel,
        ((count + block_r - 1) // block_r,),
        e4m3_argument(k),
        codes,
        scale if quantize else codes,
        count,
        GROUPS=groups,
        DIM=dim,
        K_ROW=row,
        QUANTIZE=quantize,
        NATIVE=native,
        BLOCK_R=block_r,
        BLOCK_D=block_d,
        **numbers,
    )
    return _Keys(codes, groups * dim, scale)


def _tiles(heads: int, dim: int, columns: int) -> dict[str, int]:
    """The constexprs of one product of at most `columns` columns, unless a query needs more."""
    block = min(1 << (heads - 1).bit_length(), columns)
    queries = max(min(columns // block, MOST_QUERIES), FEWEST_COLUMNS // block)
    return {
        "QUERIES": queries,
        "FEW": max(1, queries // 4, FEWEST_COLUMNS // block),
        "HEADS": block,
        "BLOCK_D": min(max(32, padded(dim)), MOST_DIM),
    }


def _stretch(tiles: Any, keys: Any, numbers: Mapping[str, int], device: Machine) -> Any:
    """Keys of one program: many programs a slot of the machine, but one at least."""
    slots = device.processors * numbers["programs"]
    once = (tiles * keys + slots - 1) // slots
    often = (tiles * keys + 16 * slots - 1) // (16 * slots)
    wanted = larger(smaller(often, numbers["MOST"]), smaller(once, numbers["LEAST"]))
    block = numbers["BLOCK_M"]
    return (larger(wanted, 1) + block - 1) // block * block


def fp8_lightning_indexer(out: Tensor, call: Any) -> None:
    """Fill logits [B, S, S_kv, G]."""
    q, q_row = rows(call.index_q)
    batch, queries, heads, dim = q.shape
    codes, k_row, scale = _keys(call)
    keys, groups = codes.shape[1], codes.shape[2]
    device = machine(q)
    numbers = dict(configuration(NAME, f"d{min(padded(dim), 2 * MOST_DIM)}", device))
    shape = _tiles(heads // groups, dim, numbers.pop("COLUMNS"))
    tiles = batch * groups * ((queries + shape["QUERIES"] - 1) // shape["QUERIES"])
    stretch = _stretch(tiles, keys, numbers, device)
    for name in ("programs", "MOST", "LEAST"):
        del numbers[name]
    launch(
        fp8_lightning_indexer_kernel,
        (tiles * ((keys + stretch - 1) // stretch),),
        e4m3_argument(q),
        codes,
        call.weights.contiguous(),
        call.cu_seqlen_ks.contiguous(),
        call.cu_seqlen_ke.contiguous(),
        scale if scale is not None else out,
        out,
        batch,
        queries,
        keys,
        stretch,
        HEADS_GROUP=heads // groups,
        GROUPS=groups,
        DIM=dim,
        Q_ROW=q_row,
        K_ROW=k_row,
        QUANTIZE=q.dtype != E4M3,
        SCALED=scale is not None,
        CLEAN=call.clean_logits,
        NATIVE=native_e4m3(q),
        **shape,
        **numbers,
    )


NAME = "fp8_lightning_indexer"
