"""Gradients of packed attention in aten ops, a block at a time, from the stored lse.

Two passes recompute the weights: dk and dv walk over tiles of keys and visit the queries that
see them, dq walks over tiles of queries and visits the keys they see. So each pass carries a
block of what it sums, a group's query heads are summed in float32, and every result is rounded
once. Traceable like `blockwise`, on which it stands.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop_op

from tileops.kernels.common.blockwise import (
    INF,
    Inputs,
    Window,
    by_group,
    by_row,
    compute_dtype,
    key_block,
    repeat_columns,
    repeat_rows,
    take,
    tile_limit,
    visible_range,
    walk,
)
from tileops.kernels.common.rope import rope_rows, rotate, rotate_back


class Rope(NamedTuple):
    """A fused rotation: tables [P, R/2] and the layout of the pairs."""

    cos: Tensor
    sin: Tensor
    layout: str = "neox"


def rope_of(call: Any) -> Rope | None:
    """The rotation of an operator call that brings its tables along."""
    if call.pos_encoding_mode == "none":
        return None
    return Rope(call.rope_cos, call.rope_sin, call.rope_layout)


def attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    do: Tensor,
    lse: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    window: Window,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    rope: Rope | None = None,
    block_q: int | None = None,
    block_k: int = 128,
    sizes: tuple[Tensor, ...] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq [T_q, H, D], dk [T_kv, H_kv, D], dv [T_kv, H_kv, D_v] and dsinks [H].

    Args:
        q, k, v, o, do: [T_q, H, D], [T_kv, H_kv, D], [T_kv, H_kv, D_v], [T_q, H, D_v] twice.
        lse: [H, T_q] natural log over the keys, without the sink's share. Rows at -inf, and rows
            and keys of no request, give and get nothing.
        q_offsets, kv_offsets: [B + 1] ascending.
        scale, softcap, sinks, rope: those of the forward; q and k come unrotated.
        block_q, block_k: rows of a tile of queries and of keys.
        sizes: as in `attend`.

    dsinks is float32 (float64 for float64 tensors), empty without sinks.
    """
    heads, dim, heads_kv, value_dim = (int(n) for n in (*q.shape[1:], k.shape[1], v.shape[2]))
    dtype = compute_dtype(q)
    if heads == 0:
        return q, torch.zeros_like(k), torch.zeros_like(v), q.new_empty((0,), dtype=dtype)
    group = heads // heads_kv
    tile = block_q or tile_limit(group)
    keys_seen = key_block(heads, heads_kv, max(dim, value_dim), tile, 2 * block_k, window.reach)

    with torch.autocast(q.device.type, enabled=False):
        delta = o.to(dtype, copy=True).mul_(do).sum(-1)
        lse = lse.to(dtype)
        total = lse if sinks is None else torch.logaddexp(lse, sinks.to(dtype)[:, None])
        # An infinite total makes every weight of a row without keys, or of no request, 0.
        row = torch.arange(q.shape[0], device=q.device)
        total = torch.where((lse == -INF) | (row >= q_offsets.amax()), INF, total)
        held = {
            "q": q,
            "k": k,
            "v": v,
            "do": do,
            "delta": delta,
            "total": total.t().contiguous(),
            "q_offsets": q_offsets.to(torch.int64, copy=True),
            "kv_offsets": kv_offsets.to(torch.int64, copy=True),
            "query_lanes": torch.arange(tile, device=q.device),
            "key_lanes": torch.arange(keys_seen, device=q.device),
            **{f"size{i}": x.new_empty(*x.shape, 0) for i, x in enumerate(sizes)},
        }
        if rope is not None:
            held |= {"cos": rope.cos, "sin": rope.sin}
        names = tuple(held)
        layout = "" if rope is None else rope.layout

        def turned(x: Inputs, name: str, rows: Tensor, positions: Tensor) -> Tensor:
            """Rows [n, heads, D] of q or k in the compute dtype, rotated at their positions."""
            block = take(x[name], rows).to(dtype)
            if not layout:
                return block
            cos, sin = rope_rows(x["cos"], positions), rope_rows(x["sin"], positions)
            return rotate(block, cos, sin, layout)

        def unturned(x: Inputs, grad: Tensor, positions: Tensor) -> Tensor:
            if not layout:
                return grad
            cos, sin = rope_rows(x["cos"], positions), rope_rows(x["sin"], positions)
            return rotate_back(grad, cos, sin, layout)

        def weights(score: Tensor, seen: Tensor, total: Tensor) -> tuple[Tensor, Tensor | None]:
            """The forward's weights, and the slope of its softcap."""
            slope = None
            if softcap:
                bent = torch.tanh(score / softcap)
                score, slope = softcap * bent, 1 - bent * bent
            return torch.exp(torch.where(seen, score, -INF) - total), slope

        def query_side(x: Inputs, rows: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
            """Scaled queries, do, total and delta of rows [n], each [H_kv, n * g, ...]."""
            return (
                by_group(turned(x, "q", rows, positions) * scale, heads_kv),
                by_group(take(x["do"], rows).to(dtype), heads_kv),
                by_group(take(x["total"], rows)[:, :, None], heads_kv),
                by_group(take(x["delta"], rows)[:, :, None], heads_kv),
            )

        def extents(x: Inputs, b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            """Of request b: first query row, queries, first key row, keys; each [1]."""
            first_q, first_k = take(x["q_offsets"], b), take(x["kv_offsets"], b)
            q_len = take(x["q_offsets"], b + 1) - first_q
            return first_q, q_len, first_k, take(x["kv_offsets"], b + 1) - first_k

        def more(at: Tensor, *rest: Tensor) -> Tensor:
            return at < rest[-len(names) - 1]

        def visit_queries(
            at: Tensor,
            dk: Tensor,
            dv: Tensor,
            b: Tensor,
            lo: Tensor,
            hi: Tensor,
            key: Tensor,
            value: Tensor,
            end: Tensor,
            *tensors: Tensor,
        ) -> tuple[Tensor, ...]:
            x = dict(zip(names, tensors, strict=True))
            first_q, q_len, _, kv_len = extents(x, b)
            local = at + x["query_lanes"]
            seen = (local >= lo[:, None]) & (local < hi[:, None])
            known = torch.minimum(local, end - 1)
            query, grad, total, delta = query_side(x, first_q + known, known + (kv_len - q_len))
            score = torch.bmm(key, query.transpose(1, 2))
            weight, slope = weights(score, repeat_columns(seen, group), total.transpose(1, 2))
            dweight = torch.bmm(value, grad.transpose(1, 2))
            dscore = weight * (dweight - delta.transpose(1, 2))
            if slope is not None:
                dscore = dscore * slope
            following = at + local.shape[0]
            return following, dk + torch.bmm(dscore, query), dv + torch.bmm(weight, grad)

        def key_tile(x: Inputs, b: Tensor, rows: Tensor, local: Tensor, live: Tensor):
            _, q_len, _, kv_len = extents(x, b)
            lo, hi = window.queries(local, q_len, kv_len)
            lo, hi, begin, end = visible_range(lo, hi, q_len, live)
            key = turned(x, "k", rows, local).permute(1, 0, 2).contiguous()
            value = take(x["v"], rows).to(dtype).permute(1, 0, 2).contiguous()
            _, dk, dv = while_loop_op(
                more,
                visit_queries,
                (begin, torch.zeros_like(key), torch.zeros_like(value)),
                (b, lo, hi, key, value, end, *x.values()),
            )
            return unturned(x, dk.permute(1, 0, 2), local), dv.permute(1, 0, 2)

        def visit_keys(
            at: Tensor,
            dq: Tensor,
            b: Tensor,
            lo: Tensor,
            hi: Tensor,
            query: Tensor,
            grad: Tensor,
            total: Tensor,
            delta: Tensor,
            end: Tensor,
            *tensors: Tensor,
        ) -> tuple[Tensor, ...]:
            x = dict(zip(names, tensors, strict=True))
            _, _, first_k, _ = extents(x, b)
            local = at + x["key_lanes"]
            seen = (local >= lo[:, None]) & (local < hi[:, None])
            known = torch.minimum(local, end - 1)
            key = turned(x, "k", first_k + known, known).permute(1, 0, 2)
            value = take(x["v"], first_k + known).to(dtype).permute(1, 2, 0)
            score = torch.bmm(query, key.transpose(1, 2))
            weight, slope = weights(score, repeat_rows(seen, group), total)
            dscore = weight * (torch.bmm(grad, value) - delta)
            if slope is not None:
                dscore = dscore * slope
            return at + local.shape[0], dq + torch.bmm(dscore, key)

        def query_tile(x: Inputs, b: Tensor, rows: Tensor, local: Tensor, live: Tensor):
            _, q_len, _, kv_len = extents(x, b)
            lo, hi, begin, end = visible_range(*window(local, q_len, kv_len), kv_len, live)
            position = torch.where(live[:1], local + (kv_len - q_len), 0)
            query, grad, total, delta = query_side(x, rows, position)
            _, dq = while_loop_op(
                more,
                visit_keys,
                (begin, torch.zeros_like(query)),
                (b, lo, hi, query, grad, total, delta, end, *x.values()),
            )
            return [unturned(x, by_row(dq * scale, group), position)]

        dk, dv = walk(
            key_tile,
            held,
            kv_offsets,
            k.shape[0],
            block_k,
            [((heads_kv, dim), k.dtype, 0.0), ((heads_kv, value_dim), v.dtype, 0.0)],
        )
        [dq] = walk(query_tile, held, q_offsets, q.shape[0], tile, [((heads, dim), q.dtype, 0.0)])
        if sinks is None:
            return dq, dk, dv, delta.new_empty(0)
        share = torch.exp(sinks.to(dtype)[:, None] - total) * delta.t()
        # An infinite total: a row without keys, or a sink that takes everything.
        return dq, dk, dv, -torch.where(total == INF, 0.0, share).sum(-1)
