"""The lightning indexer in aten ops: tiles of queries, blocks of the keys in their windows.

Products are float32 of exact e4m3 values: there is no float8 matmul on CPU.
"""

from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop_op

from tileops.kernels.common.blockwise import (
    INF,
    Inputs,
    by_group,
    dense_offsets,
    take,
    tile_rows,
    visible_range,
    walk,
)
from tileops.kernels.common.fp8 import E4M3, E4M3_MAX, load_e4m3, store_e4m3

BLOCK = 1024  # keys
HEAD_ROWS = 256  # rows of a tile, times heads


def fp8_lightning_indexer(out: Tensor, call: Any) -> None:
    """index_q [B, S, H, D]; index_k [B, S_kv, G, D] -> logits [B, S, S_kv, G]."""
    q, k = call.index_q, call.index_k
    batch, length, heads = q.shape[:3]
    keys, groups = k.shape[1], k.shape[2]
    tile = tile_rows(length, 1, max(4, HEAD_ROWS // max(heads, 1)))
    inputs = {
        "q": q.flatten(0, 1),
        "k": k.flatten(0, 1),
        "weights": call.weights,
        "ks": call.cu_seqlen_ks.to(torch.int64),
        "ke": call.cu_seqlen_ke.to(torch.int64),
        "first": torch.arange(batch, device=q.device) * keys,
        "length": torch.zeros(1, dtype=torch.int64, device=q.device) + keys,
        "lanes": torch.arange(BLOCK, device=q.device),
        "columns": torch.arange(keys, device=q.device),
        # Without elements: a compiled loop learns its sizes from the extents of its inputs.
        "sizes": q.new_empty(*q.shape, 0),
    }
    if call.index_k_scale is not None:
        inputs["scale"] = call.index_k_scale.flatten(0, 1)
    names = tuple(inputs)

    def more(at: Tensor, logits: Tensor, end: Tensor, *_: Tensor):
        return at < end

    def visit(
        at: Tensor,
        logits: Tensor,
        end: Tensor,
        b: Tensor,
        lo: Tensor,
        hi: Tensor,
        queries: Tensor,
        weights: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        x = dict(zip(names, tensors, strict=True))
        column = at + x["lanes"]
        # A lane past the end repeats the last key; its logit lands outside every window.
        rows = take(x["first"], b) + torch.minimum(column, end - 1)
        key, scale = load_keys(x, rows)
        dots = torch.bmm(by_group(load_e4m3(queries), groups), key.permute(1, 2, 0))
        weights = by_group(weights[:, :, None], groups)
        stacked = (groups, queries.shape[0], heads // groups, BLOCK)
        dots = (torch.relu(dots) * weights).reshape(stacked)
        total = dots.sum(2)
        if scale is not None:
            total = total * scale.t()[:, None, :]
        seen = (column >= lo[:, None]) & (column < hi[:, None])
        total = torch.where(seen, total, -INF).permute(1, 2, 0)
        # Eagerly in place; a traced loop may not write into what it carries.
        store = Tensor.index_copy_ if type(logits) is Tensor else Tensor.index_copy
        return at + BLOCK, store(logits, 1, column, total)

    def step(x: Inputs, b: Tensor, rows: Tensor, local: Tensor, live: Tensor):
        lo, hi = take(x["ks"], local), take(x["ke"], local)
        lo, hi, begin, end = visible_range(lo, hi, x["length"], live)
        # Still codes: torch frees twice what enters a loop as a view of its whole buffer.
        queries = take(x["q"], rows)
        if queries.dtype != E4M3:
            queries = store_e4m3(queries)
        weights = take(x["weights"], local)
        # As many spare columns as a block, for the lanes past the last key.
        spare = x["columns"].shape[0] + BLOCK
        logits = weights.new_full((rows.shape[0], spare, groups), -INF)
        _, logits = while_loop_op(
            more, visit, (begin, logits), (end, b, lo, hi, queries, weights, *x.values())
        )
        return (logits[:, : x["columns"].shape[0]],)

    rows = out.flatten(0, 1)
    with torch.autocast(q.device.type, enabled=False):
        (logits,) = walk(
            step,
            inputs,
            dense_offsets(batch, length, q.device),
            batch * length,
            tile,
            [((keys, groups), torch.float32, -INF)],
            into=(rows,),
            frame=64,
        )
    if logits is not rows:
        rows.copy_(logits)


def load_keys(x: Inputs, rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """Codes [n, G, D] as float32 and their scale [n, G], if any; bfloat16 keys get one."""
    key = take(x["k"], rows).to(torch.float32)
    if x["k"].dtype == E4M3:
        return key, take(x["scale"], rows) if "scale" in x else None
    scale = key.abs().amax(-1).clamp(min=1e-4) / E4M3_MAX
    return load_e4m3(store_e4m3(key * scale.reciprocal()[..., None])), scale
