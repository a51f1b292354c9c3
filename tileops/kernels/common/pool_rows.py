"""Writing rows into a key/value pool: bit for bit, and nothing outside the named slots.

A slot is a flat row number; slots outside the pool are skipped. Repeated slots leave
unspecified contents in their own row only.
"""

import torch
from torch import Tensor

WIDE = torch.int64


def scatter_rows(pool: Tensor, rows: Tensor, slots: Tensor) -> None:
    """pool [N, *tail] <- rows [T, *tail] of its dtype at slots [T] int64; traceable.

    `index_put_` cannot skip, negative indices wrap, and `where` on 16-bit rows would destroy
    NaN payloads once compiled. So a skipped row repeats the first written one (same slot, same
    content), and with none to write row 0 is rewritten with itself. Nothing is pool-sized.
    """
    device = rows.device
    none = torch.zeros(1, dtype=torch.int64, device=device)
    written = (slots >= 0) & (slots < pool.shape[0])
    valid = torch.cat([written, none > 0])
    slot = torch.cat([slots, none])
    first = torch.cat([written, none == 0]).to(torch.int8).argmax(0, keepdim=True)
    # An empty pool takes no rows at all: minima of symbols, since a branch would be baked in.
    lanes = rows.shape[0] + 1
    lane = torch.arange(torch.sym_min(lanes, lanes * pool.shape[0]), device=device)
    kept = valid.index_select(0, lane)
    source = torch.where(kept, lane, first)
    target = torch.where(kept, slot.index_select(0, lane), slot.index_select(0, first))
    itself = pool.index_select(0, torch.arange(torch.sym_min(pool.shape[0], 1), device=device))
    pool.index_put_((target,), torch.cat([rows, itself]).index_select(0, source))


def copy_rows(pool: Tensor, rows: Tensor, slots: Tensor) -> None:
    """The same on eager CPU tensors, in one pass over the rows; pool must be contiguous."""
    kept = (slots >= 0) & (slots < pool.shape[0])
    if not kept.all():
        chosen = kept.nonzero().flatten()
        rows, slots = rows.index_select(0, chosen), slots.index_select(0, chosen)
    if not rows.numel():
        return
    target, source = pool.flatten(1), rows.flatten(1).contiguous()
    if all(_splits_into_words(x) for x in (target, source)):
        target, source = target.view(WIDE), source.view(WIDE)
    target.index_copy_(0, slots, source)


def _splits_into_words(x: Tensor) -> bool:
    size = x.element_size()
    return (x.shape[1] * size) % WIDE.itemsize == 0 and (
        x.storage_offset() * size
    ) % WIDE.itemsize == 0
