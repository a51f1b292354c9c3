"""Block selection in aten ops: a pass for the normalizer, a pass for scores and their top-k.

Scores and ids ride in one int64, score bits above the complement of the id: integers have a
total order, so a plain top-k of what was kept and the next block is exact, ranks equal scores by
the lower id, and one tensor carries all of it. -1 is no candidate.
"""

from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop_op

from tileops.kernels.common.blockwise import (
    INF,
    Inputs,
    by_group,
    key_block,
    take,
    tile_limit,
    tile_rows,
    unwrapped,
    walk,
)

LOW = 2**32  # ids are below


def nsa_topk(out: Tensor, call: Any) -> None:
    """q [T, H, D]; k_cmp [C, H_kv, D] -> block_indices [T, H_kv, selected_block_num]."""
    q, k = call.q, call.k_cmp
    heads, dim, heads_kv = (int(n) for n in (*q.shape[1:], k.shape[1]))
    group, width, size = heads // heads_kv, call.selected_block_num, call.bs
    limit = tile_limit(group)
    tile = tile_rows(q.shape[0], call.offsets.shape[0] - 1, limit)
    block = key_block(heads, heads_kv, dim, limit, 256, None)
    inputs = {
        "q": q,
        "k": k,
        "chunk_start": call.chunk_offsets.to(torch.int64),
        "lanes": torch.arange(block, device=q.device),
    }

    def logits(
        at: Tensor, lanes: Tensor, queries: Tensor, closed: Tensor, start: Tensor, k: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Block numbers [L] and logits [H_kv, n, g, L], -inf where not closed."""
        chunk = at + lanes
        row = unwrapped(start + torch.minimum(chunk, closed.amax() - 1).clamp(min=0))
        keys = take(k, row).to(torch.float32).permute(1, 2, 0)
        z = torch.bmm(queries.to(torch.float32), keys)
        z = z.reshape(heads_kv, closed.shape[0], group, block)
        return chunk, torch.where(chunk < closed[:, None, None], z, -INF)

    def unread(
        at: Tensor, top: Tensor, total: Tensor, queries: Tensor, closed: Tensor, *_: Tensor
    ):
        return at < closed.amax()

    def normalize(
        at: Tensor,
        top: Tensor,
        total: Tensor,
        queries: Tensor,
        closed: Tensor,
        start: Tensor,
        k: Tensor,
        lanes: Tensor,
    ) -> tuple[Tensor, ...]:
        _, z = logits(at, lanes, queries, closed, start, k)
        new_top = torch.maximum(top, z.amax(-1, keepdim=True))
        anchor = torch.where(new_top == -INF, 0.0, new_top)
        total = total * torch.exp(top - anchor) + torch.exp(z - anchor).sum(-1, keepdim=True)
        return at + block, new_top, total

    def unranked(at: Tensor, best: Tensor, count: Tensor, *_: Tensor):
        return at < count.amax()

    def rank(
        at: Tensor,
        best: Tensor,
        count: Tensor,
        lse: Tensor,
        queries: Tensor,
        closed: Tensor,
        start: Tensor,
        k: Tensor,
        lanes: Tensor,
    ) -> tuple[Tensor, ...]:
        chunk, z = logits(at, lanes, queries, closed, start, k)
        current = count[:, None] - 1
        forced = (chunk == 0) | (chunk == current - 1) | (chunk == current)
        # Forced blocks score g in the formula. Infinity keeps them first when rounding lifts
        # another block to g.
        score = torch.where(forced, INF, torch.exp(z - lse).sum(2))
        key = score.view(torch.int32).to(torch.int64) * LOW + (LOW - 1 - chunk)
        key = torch.where(chunk <= current, key, -1)
        best = torch.cat([best, key], -1).topk(width, -1).values
        return at + block, best

    def step(x: Inputs, b: Tensor, rows: Tensor, local: Tensor, live: Tensor):
        closed = torch.where(live, torch.div(local + 1, size, rounding_mode="floor"), 0)
        count = torch.where(live, torch.div(local, size, rounding_mode="floor") + 1, 0)
        start = take(x["chunk_start"], b)
        # In q's dtype up to the loops: a compiler drops a rounding that it sees undone. Scaled
        # last: torch frees twice what enters a loop as a view of its whole buffer.
        queries = by_group(take(x["q"], rows).to(torch.float32), heads_kv)
        queries = (queries * call.scale).to(q.dtype)
        sums = (heads_kv, rows.shape[0], group, 1)
        total = torch.zeros(sums, dtype=torch.float32, device=q.device)
        at = torch.zeros((), dtype=torch.int64, device=q.device)
        shared = (queries, closed, start, x["k"], x["lanes"])
        _, top, total = while_loop_op(
            unread, normalize, (at, torch.full_like(total, -INF), total), shared
        )
        best = torch.full((heads_kv, rows.shape[0], width), -1, device=q.device)
        lse = top + torch.log(total)
        _, best = while_loop_op(unranked, rank, (at, best), (count, lse, *shared))
        ids = torch.where(best < 0, -1, LOW - 1 - best % LOW)
        # Cast before the transpose: a cast compares strides and would guard on n.
        return (ids.to(torch.int32).transpose(0, 1),)

    with torch.autocast(q.device.type, enabled=False):
        (ids,) = walk(
            step, inputs, call.offsets, q.shape[0], tile, [((heads_kv, width), torch.int32, -1)]
        )
    out.copy_(ids)
