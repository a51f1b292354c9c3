"""Writing rows into a key/value pool: bit for bit, and nothing outside the named slots.

A slot is a flat row number; slots outside the pool are skipped. Repeated slots leave
unspecified contents in their own row only.
"""

import math

import torch
from torch import Tensor

from ops_registry.tracing import always, view_base
from tileops.kernels.common.fp8 import E4M3, E4M3_MAX

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)  # widest first: fewer copies
CHUNK = 2**18  # numbers quantized at once
FEW = 16  # limits the spare rows of a traced write


def scatter_rows(pool: Tensor, rows: Tensor, slots: Tensor) -> None:
    """pool [..., *tail] <- rows [T, *tail] of its dtype at slots [T] int64; traceable.

    `index_put_` cannot skip, negative indices wrap, and `where` on 16-bit rows would destroy
    NaN payloads once compiled. So a skipped row repeats the first written one (same slot, same
    content), and with none to write row 0 is rewritten with itself.

    A compiler writes in place only into a whole graph input: the index goes into the tensor
    that the pool is a view of, and reaches it without reshaping, or a pool-sized copy appears.
    """
    tail = rows.shape[1:]
    whole, offset = _whole(pool, len(tail))
    extents = whole.shape[: whole.dim() - len(tail)]
    flat = pool.reshape(-1, *tail)
    if always(flat.shape[0] == 0):
        return
    device = rows.device
    none = torch.zeros(1, dtype=torch.int64, device=device)
    written = (slots >= 0) & (slots < flat.shape[0])
    kept = torch.cat([written, none > 0])
    first = torch.cat([written, none == 0]).to(torch.int8).argmax(0, keepdim=True)
    slot = torch.cat([slots, none])
    source = torch.where(kept, torch.arange(rows.shape[0] + 1, device=device), first)
    row = torch.where(kept, slot, slot.index_select(0, first)) + offset
    few, count = _counts(rows.shape[0], flat.shape[0])
    lanes = torch.arange(count, device=device).clamp(max=rows.shape[0])
    row, source = row.index_select(0, lanes), source.index_select(0, lanes)
    index: list[Tensor] = []
    for extent in reversed(extents[1:]):
        index.insert(0, row % extent)
        row = torch.div(row, extent, rounding_mode="floor")
    own = flat.index_select(0, torch.arange(few, device=device))
    whole.index_put_((row, *index), torch.cat([rows, own]).index_select(0, source))


def _counts(rows: int, pool_rows: int) -> tuple[int, int]:
    """Numbers above 0 and above `rows`, which are both 0 for a pool that turns out to be empty.

    Odd arithmetic, because tracing takes an extent for at least 2 where it can: it would bake in
    the answer of a branch, drop a minimum with less, and guard on a result that may be 0 or 1.
    """
    if isinstance(pool_rows, int):
        return 1, rows + 1
    step = 1
    while always(pool_rows >= FEW * step):
        step *= 2
    few = torch.sym_min((pool_rows + step - 1) // step, FEW)
    # At least few * (rows + 1) / few, by a divisor that is never 0.
    return few, few * (2 * (rows + 1) // (2 * few - 1) + 1)


def _whole(pool: Tensor, tail: int) -> tuple[Tensor, int]:
    """The contiguous tensor of the same rows that holds the pool, and the pool's first row."""
    base = view_base(pool)
    row = math.prod(pool.shape[pool.dim() - tail :])
    offset = pool.storage_offset() - base.storage_offset()
    same = base.dim() > tail and all(
        always(a == b)
        for a, b in zip(base.shape[base.dim() - tail :], pool.shape[-tail:], strict=True)
    )
    if same and base.is_contiguous() and always(offset % row == 0):
        return base, offset // row
    return pool, 0


def copy_rows(pool: Tensor, rows: Tensor, slots: Tensor, scale: Tensor | None = None) -> None:
    """pool [..., *tail] <- rows [T, *tail] at slots [T] int64; eager CPU tensors.

    pool: contiguous, of the rows' dtype, or e4m3 with the float32 `scale` [1] that divides.
    """
    tail = rows.shape[1:]
    target = pool.view(math.prod(pool.shape[: pool.dim() - len(tail)]), math.prod(tail))
    kept = (slots >= 0) & (slots < target.shape[0])
    if not kept.all():
        chosen = kept.nonzero().flatten()
        rows, slots = rows.index_select(0, chosen), slots.index_select(0, chosen)
    if not rows.numel():
        return
    source = rows.flatten(1) if scale is None else _quantized(rows.flatten(1), scale)
    source = source.contiguous()
    word = next(w for w in WORDS if _splits_into(target, w) and _splits_into(source, w))
    target.view(word).index_copy_(0, slots, source.view(word))


def _quantized(rows: Tensor, scale: Tensor) -> Tensor:
    """`store_e4m3` of rows [T, n], some at a time: large temporaries cost ten times the work."""
    out = torch.empty(rows.shape, dtype=E4M3)
    step = max(1, CHUNK // rows.shape[1])
    wide = torch.empty(min(step, rows.shape[0]), rows.shape[1], dtype=torch.float32)
    for part, codes in zip(rows.split(step), out.split(step), strict=True):
        quotient = torch.div(part, scale, out=wide[: part.shape[0]])
        codes.copy_(quotient.clamp_(-E4M3_MAX, E4M3_MAX))
    return out


def _splits_into(x: Tensor, word: torch.dtype) -> bool:
    size = x.element_size()
    return x.shape[1] * size % word.itemsize == 0 == x.storage_offset() * size % word.itemsize
