"""What the kernels of native sparse attention share: tiles of tokens, rows, one attention step.

A tile is a few consecutive tokens of one request and the query heads of one key/value head: its
rows are (token, head) pairs, so that the group shares every key that is loaded, and tokens side
by side do. Rows of any group size fill a tile; what does not divide stays empty.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from tileops.kernels.common.device import F32_DOT, dot, find_request, softmax_step
from tileops.kernels.common.launch import padded

WAYS = 32  # requests that a step of the search for a tile's request looks at
FAR = 2**31 - 1  # no request is longer
NARROW = 256  # wider heads are multiplied in parts of PART columns
PART = 128


class Columns(NamedTuple):
    """How a kernel walks the D columns of a row: `parts` blocks of `block`, a power of two."""

    block: int
    parts: int


def columns(dim: int, wide: bool) -> Columns:
    """Columns of a head dim; wide: in parts, since a whole row would be too much at once."""
    block = padded(dim)
    if wide:
        block = min(block, PART)
    return Columns(block, -(-dim // block))


def bits(power: int) -> int:
    """log2 of a power of two."""
    return power.bit_length() - 1


def shape_class(*dims: int) -> str:
    """The shape class of a configuration: of the widest head dim."""
    for limit in (64, 128, NARROW):
        if max(dims) <= limit:
            return f"d{limit}"
    return "wide"


@triton.jit
def token_tile(offsets, requests, tokens, tile, TOKENS: tl.constexpr, WAYS: tl.constexpr):
    """Tile `tile` of TOKENS tokens: request, its first row, position of the tile in it, length.

    Request `requests` is the padding, the rows from the last offset to `tokens`. There are
    tokens // TOKENS + requests + 1 tiles; one that is not needed lies at or past the length.
    """
    n = find_request(offsets, requests + 1, 1, TOKENS, tile, WAYS)
    first = tl.load(offsets + n)
    end = tl.load(offsets + n + 1, mask=n < requests, other=0)
    end = tl.where(n < requests, end, tokens)
    position = (tile - n - first // TOKENS) * TOKENS
    return n, first.to(tl.int64), position.to(tl.int32), (end - first).to(tl.int32)


@triton.jit
def load_rows(row, live, start, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """Columns [start, start + BLOCK_D) of rows behind pointers row [M], 0 past D.

    MASKED: rows that are not live [M] are zeros, and not read.
    """
    column = start + tl.arange(0, BLOCK_D)
    at = row[:, None] + column[None, :]
    if MASKED:
        if D % BLOCK_D == 0:
            return tl.load(at, mask=live[:, None], other=0.0)
        return tl.load(at, mask=live[:, None] & (column < D)[None, :], other=0.0)
    if D % BLOCK_D == 0:
        return tl.load(at)
    return tl.load(at, mask=(column < D)[None, :], other=0.0)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 x in dtype, ties to even; the interpreter's own cast to bfloat16 truncates."""
    if F32_DOT and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def load_queries(
    row, live, start, factor, D: tl.constexpr, BLOCK_D: tl.constexpr, SCALED: tl.constexpr
):
    """Columns of query rows; SCALED: times factor, rounded to their own dtype."""
    queries = load_rows(row, live, start, D, BLOCK_D, True)
    if SCALED:
        queries = rounded(queries.to(tl.float32) * factor, queries.dtype)
    return queries


@triton.jit
def products(
    queries,
    q_row,
    q_live,
    factor,
    k_row,
    k_live,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SCALED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """<q, k> [M, N] in float32 of rows behind pointers q_row [M] and k_row [N].

    queries [M, BLOCK_D]: the rows of q, if they fit one block of columns.
    """
    if D <= BLOCK_D:
        keys = load_rows(k_row, k_live, 0, D, BLOCK_D, MASKED)
        return dot(queries, tl.trans(keys), None)
    scores = tl.zeros([q_row.shape[0], k_row.shape[0]], tl.float32)
    for start in range(0, D, BLOCK_D):
        part = load_queries(q_row, q_live, start, factor, D, BLOCK_D, SCALED)
        keys = load_rows(k_row, k_live, start, D, BLOCK_D, MASKED)
        scores = dot(part, tl.trans(keys), scores)
    return scores


@triton.jit
def attend_block(
    acc,
    top,
    total,
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
    PARTIAL: tl.constexpr,
    LIVE: tl.constexpr,
):
    """One block of keys in the online softmax of acc [M, BLOCK_V], top and total [M].

    seen [M, N]: with PARTIAL, who sees which key. k_live [N]: with LIVE, keys that may be read.
    scale takes <q, k> to base-2 logits. first_column: of the values that acc holds.
    """
    scores = products(queries, q_row, q_live, 1.0, k_row, k_live, D, BLOCK_D, False, LIVE)
    if PARTIAL:
        scores = tl.where(seen, scores, float("-inf"))
    weights, fade, top, total = softmax_step(scores, top, total, scale, PARTIAL)
    values = load_rows(v_row, k_live, first_column, DV, BLOCK_V, LIVE)
    acc = dot(weights.to(values.dtype), values, acc * fade[:, None])
    return acc, top, total


@triton.jit
def store_rows(row, live, start, x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store x [M, BLOCK_D] to columns from `start` on of the live rows behind pointers row [M]."""
    column = start + tl.arange(0, BLOCK_D)
    keep = live[:, None] & (column < D)[None, :]
    tl.store(row[:, None] + column[None, :], x.to(row.dtype.element_ty), mask=keep)


# Sorting networks, over a tensor seen as a hypercube: DIMS axes of two, the bits of a place. They
# are bitonic, and exact for int64 whatever the sign; equal keys are interchangeable.


@triton.jit
def merge_runs(x, DIMS: tl.constexpr, BITS: tl.constexpr, FALLING: tl.constexpr):
    """Sort bitonic runs of 2 ** BITS places of x [2] * DIMS; the last axis is bit 0 of a place.

    FALLING: -1 ascending; DIMS descending; else the bit of a run's place that makes it so.
    """
    if FALLING < 0:
        falling = 0
    elif FALLING == DIMS:
        falling = 1
    else:
        falling = tl.reshape(tl.arange(0, 2), [1] * (DIMS - 1 - FALLING) + [2] + [1] * FALLING)
    for step in tl.static_range(BITS):
        upper = tl.reshape(
            tl.arange(0, 2), [1] * (DIMS - BITS + step) + [2] + [1] * (BITS - 1 - step)
        )
        # The other place of a pair; a sum may wrap, the difference wraps back.
        other = tl.sum(x, DIMS - BITS + step, keep_dims=True) - x
        x = tl.where((x > other) != (upper != falling), other, x)
    return x


@triton.jit
def ascending(x, BITS: tl.constexpr):
    """x [2 ** BITS] sorted."""
    x = tl.reshape(x, [2] * BITS)
    for bits in tl.static_range(1, BITS):
        x = merge_runs(x, BITS, bits, bits)
    return tl.reshape(merge_runs(x, BITS, BITS, -1), [2**BITS])


@triton.jit
def largest(x, ROW_BITS: tl.constexpr, BITS: tl.constexpr, KEEP_BITS: tl.constexpr):
    """The 2 ** KEEP_BITS largest of each row of x [2 ** ROW_BITS, 2 ** BITS], descending."""
    x = tl.reshape(x, [2] * (ROW_BITS + BITS))
    for bits in tl.static_range(1, KEEP_BITS):
        x = merge_runs(x, ROW_BITS + BITS, bits, bits)
    # Runs of KEEP places side by side fall and rise in turn: the larger ones of the pairs are
    # the largest of both runs, and bitonic again.
    for cut in tl.static_range(BITS - KEEP_BITS):
        x = merge_runs(x, ROW_BITS + BITS - cut, KEEP_BITS, KEEP_BITS)
        x = tl.max(x, ROW_BITS + BITS - cut - 1 - KEEP_BITS)
    x = merge_runs(x, ROW_BITS + KEEP_BITS, KEEP_BITS, ROW_BITS + KEEP_BITS)
    return tl.reshape(x, [2**ROW_BITS, 2**KEEP_BITS])


@triton.jit
def merged(x, y, ROW_BITS: tl.constexpr, BITS: tl.constexpr):
    """The 2 ** BITS largest of each row, ascending, of x ascending and y descending."""
    x = tl.reshape(tl.maximum(x, y), [2] * (ROW_BITS + BITS))
    return tl.reshape(merge_runs(x, ROW_BITS + BITS, BITS, -1), [2**ROW_BITS, 2**BITS])
