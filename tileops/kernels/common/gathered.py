"""Attention where every query row names its own keys, in aten ops, a block at a time.

The counterpart of `blockwise.attend` for selected blocks and indexed cache rows; its conventions
hold here too: traceable, no branch on contents or sizes, loop bodies that close over nothing.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop_op

from tileops.kernels.common.blockwise import (
    FAR,
    INF,
    Inputs,
    dense_offsets,
    take,
    tile_rows,
    walk,
)

Prepare = Callable[[Inputs, Tensor, Tensor], tuple[Inputs, Tensor]]
"""(inputs, rows [n], live [n]) -> tensors of the tile, and the 0-dim number of its lanes."""

Pick = Callable[[Inputs, Tensor], tuple[Tensor, Tensor]]
"""(tensors of the tile, lanes [L]) -> pool rows [n, H_kv, L] int64, and whether each is seen."""

BLOCK = 2**21  # elements of a float32 block of keys: 8 MiB
TILE = 8  # rows of a tile, if so many fit in a block


def attend_gathered(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    inputs: Inputs,
    prepare: Prepare,
    pick: Pick,
    *,
    scale: float,
    value_dim: int,
    sizes: Sequence[Tensor] = (),
    out: Tensor,
) -> None:
    """Fill out [R, H, D_v], contiguous; a row that sees no key gives zeros.

    Args:
        q: [R, H, D].
        k, v: pools [N, H_kv, D] and [N, H_kv, D_v]; without v the first D_v columns of k are
            the values. Only seen rows matter, whatever the others hold.
        inputs: what `prepare` reads; tensors of the tile that it makes must be no views.
        sizes: as for `blockwise.attend`.
        prepare: called once per tile of rows.
        pick: called per block of lanes. A seen row outside the pool raises.
        scale: of the logits.
    """
    heads, dim, heads_kv = (int(n) for n in (*q.shape[1:], k.shape[1]))
    group = heads // heads_kv
    lanes = max(16, min(BLOCK // TILE // (heads_kv * max(dim, value_dim)), 1024))
    tile = tile_rows(q.shape[0], 1, TILE)
    held = {
        **inputs,
        "_q": q,
        "_k": k.reshape(-1, dim),
        "_lanes": torch.arange(lanes, device=q.device),
        "_heads": torch.arange(heads_kv, device=q.device).reshape(-1, 1),
        **{f"_size{i}": x.new_empty(*x.shape, 0) for i, x in enumerate(sizes)},
    }
    if v is not None:
        held["_v"] = v.reshape(-1, value_dim)
    shared = [name for name in ("_k", "_v", "_lanes", "_heads") if name in held]
    names: list[str] = []

    def more(at: Tensor, top: Tensor, total: Tensor, acc: Tensor, end: Tensor, *_: Tensor):
        return at < end

    def visit(
        at: Tensor,
        top: Tensor,
        total: Tensor,
        acc: Tensor,
        end: Tensor,
        queries: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        x = dict(zip(names, tensors, strict=True))
        lane = at + x["_lanes"]
        row, seen = pick(x, lane)
        seen = seen & (lane < end)
        # Unseen lanes read row 0. Compiled indexing counts negative ids from the end: raise.
        flat = torch.where(row < 0, FAR, row * heads_kv + x["_heads"])
        flat = torch.where(seen, flat, 0).reshape(-1)
        seen = seen.reshape(-1, 1, lanes)
        keys = take(x["_k"], flat).reshape(-1, lanes, dim)
        # What is not seen weighs 0, which does not silence a NaN: zero those values, before they
        # are widened.
        if v is None:
            keys = torch.where(seen.transpose(1, 2), keys, 0.0).to(torch.float32)
            values = keys[..., :value_dim]
        else:
            values = take(x["_v"], flat).reshape(-1, lanes, value_dim)
            values = torch.where(seen.transpose(1, 2), values, 0.0).to(torch.float32)
            keys = keys.to(torch.float32)
        logits = torch.where(seen, torch.bmm(queries, keys.transpose(1, 2)), -INF)
        new_top = torch.maximum(top, logits.amax(-1, keepdim=True))
        anchor = torch.where(new_top == -INF, 0.0, new_top)
        weight = torch.exp(logits - anchor)
        fade = torch.exp(top - anchor)
        total = total * fade + weight.sum(-1, keepdim=True)
        return at + lanes, new_top, total, acc * fade + torch.bmm(weight, values)

    def step(x: Inputs, b: Tensor, rows: Tensor, local: Tensor, live: Tensor):
        own, end = prepare(x, rows, live)
        own |= {name: x[name] for name in shared}
        names[:] = own
        # Scaled last: torch frees twice what enters a loop as a view of its whole buffer.
        stacked = (rows.shape[0] * heads_kv, group, dim)
        queries = take(x["_q"], rows).to(torch.float32).reshape(stacked) * scale
        acc = queries.new_zeros(queries.shape[0], group, value_dim)
        total = queries.new_zeros(queries.shape[0], group, 1)
        _, top, total, acc = while_loop_op(
            more,
            visit,
            (torch.zeros_like(end), torch.full_like(total, -INF), total, acc),
            (end, queries, *own.values()),
        )
        o = torch.where(top == -INF, 0.0, acc / total)
        return (o.reshape(rows.shape[0], heads, value_dim),)

    offsets = dense_offsets(1, q.shape[0], q.device)
    with torch.autocast(q.device.type, enabled=False):
        (o,) = walk(
            step,
            held,
            offsets,
            q.shape[0],
            tile,
            [((heads, value_dim), q.dtype, 0.0)],
            into=(out,),
            frame=8 * TILE,
        )
    if o is not out:
        out.copy_(o)


def last_slot(used: Tensor, slots: Tensor) -> Tensor:
    """One past the last used slot of any row, 0-dim; used [n, H_kv, SEL], slots [SEL]."""
    past = torch.where(used, slots + 1, 0).reshape(-1)
    return torch.cat([past.new_zeros(1), past]).amax()
