"""Attention where every query row names its own keys, in aten ops, a block at a time.

The counterpart of `blockwise.attend` for selected blocks and indexed cache rows; its conventions
hold here too: traceable, no branch on contents or sizes, loop bodies that close over nothing.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop_op

from tileops.kernels.common.blockwise import FAR, INF, Inputs, dense_segments, tile_rows, walk

Prepare = Callable[[Inputs, Tensor, Tensor], tuple[Inputs, Tensor]]
"""(inputs, rows [n], live [n]) -> tensors of the tile, and the 0-dim number of its lanes."""

Pick = Callable[[Inputs, Tensor], tuple[Tensor, Tensor]]
"""(tensors of the tile, lanes [L]) -> pool rows [n, H_kv, L] int64, and whether each is seen."""

BLOCK = 2**21  # elements of a float32 block of keys: 8 MiB
TILE = 16  # rows of a tile; more heads or wider rows take fewer


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
) -> Tensor:
    """o [R, H, D_v] in q's dtype; a row that sees no key gives zeros.

    Args:
        q: [R, H, D].
        k, v: pools [N, H_kv, D] and [N, H_kv, D_v]; without v the first D_v columns of k are
            the values. Only seen rows matter, whatever the others hold.
        inputs: what `prepare` reads.
        prepare: called once per tile of rows.
        pick: called per block of lanes. A seen row outside the pool raises.
        scale: of the logits.
    """
    heads, dim, heads_kv = q.shape[1], q.shape[2], k.shape[1]
    group = heads // heads_kv
    lanes = max(16, min(BLOCK // TILE // (heads_kv * dim), 1024))
    tile = tile_rows(q.shape[0], 1, max(2, BLOCK // (heads_kv * dim * lanes)))
    held = {
        **inputs,
        "_q": q,
        "_k": k.reshape(-1, dim),
        "_v": k.reshape(-1, dim) if v is None else v.reshape(-1, value_dim),
        "_lanes": torch.arange(lanes, device=q.device),
        "_heads": torch.arange(heads_kv, device=q.device)[:, None],
    }
    names = []

    def more(at: Tensor, top: Tensor, total: Tensor, acc: Tensor, end: Tensor, *_: Tensor):
        return at < end

    def visit(
        at: Tensor, top: Tensor, total: Tensor, acc: Tensor, end: Tensor, queries: Tensor,
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
        keys = x["_k"].index_select(0, flat).to(torch.float32).reshape(-1, lanes, dim)
        if v is None:
            values = keys[..., :value_dim]
        else:
            values = x["_v"].index_select(0, flat).to(torch.float32)
            values = values.reshape(-1, lanes, value_dim)
        logits = torch.where(seen, torch.bmm(queries, keys.transpose(1, 2)), -INF)
        values = torch.where(seen.transpose(1, 2), values, 0.0)
        new_top = torch.maximum(top, logits.amax(-1, keepdim=True))
        anchor = torch.where(new_top == -INF, 0.0, new_top)
        weight = torch.exp(logits - anchor)
        fade = torch.exp(top - anchor)
        total = total * fade + weight.sum(-1, keepdim=True)
        return at + lanes, new_top, total, acc * fade + torch.bmm(weight, values)

    def step(x: Inputs, b: Tensor, rows: Tensor, local: Tensor, live: Tensor):
        own, end = prepare(x, rows, live)
        own |= {name: x[name] for name in ("_k", "_v", "_lanes", "_heads")}
        names[:] = own
        queries = x["_q"].index_select(0, rows).to(torch.float32) * scale
        queries = queries.reshape(-1, group, dim)
        acc = queries.new_zeros(queries.shape[0], group, value_dim)
        total = queries.new_zeros(queries.shape[0], group, 1)
        _, _, total, acc = while_loop_op(
            more, visit,
            (torch.zeros_like(end), torch.full_like(total, -INF), total, acc),
            (end, queries, *own.values()),
        )
        o = torch.where(total > 0, acc / total, 0.0)
        return (o.reshape(rows.shape[0], heads, value_dim),)

    starts, lengths = dense_segments(1, q.shape[0], q.device)
    with torch.autocast(q.device.type, enabled=False):
        (o,) = walk(
            step, held, starts, lengths, q.shape[0], tile,
            [((heads, value_dim), q.dtype, 0.0)],
        )
    return o


def last_slot(used: Tensor, slots: Tensor) -> Tensor:
    """One past the last used slot of any row, 0-dim; used [n, H_kv, SEL], slots [SEL]."""
    past = torch.where(used, slots + 1, 0).reshape(-1)
    return torch.cat([past.new_zeros(1), past]).amax()
