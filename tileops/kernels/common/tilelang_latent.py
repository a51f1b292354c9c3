"""Launching attention over latent rows on Hopper."""

import math
from typing import Any

import torch
from torch import Tensor

from tileops.kernels.common.recorder import machine
from tileops.kernels.common.tilelang_latent_kernel import HEADS, SLOTS, make
from tileops.kernels.common.tilelang_launch import counter, launch
from tileops.kernels.common.tilelang_limits import ALIGNMENT
from tileops.kernels.common.triton_latent import Limit, combine, schedule

LOG2E = math.log2(math.e)


def queries_by_head(x: Tensor) -> Tensor:
    """x [..., H, D] as [H, tokens, D], or a copy that the copy engine can step through."""
    x = x.flatten(0, -3).transpose(0, 1)
    size = x.element_size()
    aligned = all(step > 0 and step * size % ALIGNMENT == 0 for step in x.stride()[:2])
    if x.stride(2) != 1 or not aligned or x.data_ptr() % ALIGNMENT:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    return x


def attend_latent(
    o: Tensor,
    q: Tensor,
    q_pe: Tensor,
    k: Tensor,
    k_pe: Tensor,
    scale: float,
    *,
    queries: int = 1,
    indices: Tensor | None = None,
    limit: Limit | None = None,
) -> None:
    """Fill o [..., H, 512], contiguous: `triton_latent.attend_latent` says what of.

    q, q_pe [..., H, 512 and 64]; k, k_pe [B, N, H_kv, 512 and 64].
    """
    heads, dim = q.shape[-2:]
    heads_kv = k.shape[2]
    head_blocks = heads // heads_kv // HEADS
    # Blocks of the same rows, side by side, share what they load.
    pair = indices is None and head_blocks % 2 == 0
    processors = machine(q).processors
    if pair:
        processors -= processors % 2
    count = counter(q)
    rows = o.numel() // (heads * dim) * heads_kv
    slots = k.shape[1] if indices is None else indices.shape[-1]
    running = max(processors // head_blocks, 1)
    plan = schedule(rows, slots, SLOTS, running, indices is not None)
    whole = plan.parts == 0
    parts = part_sums = count
    if not whole:
        shape = (plan.parts, 2, head_blocks)
        parts = o.new_empty((*shape, HEADS, dim), dtype=torch.float32)
        part_sums = o.new_empty((*shape, 2, HEADS), dtype=torch.float32)
    items = plan.ranges * head_blocks
    first, phase, stride = limit or Limit(0, 0, 1)
    args: tuple[Any, ...] = (
        queries_by_head(q),
        queries_by_head(q_pe),
        k,
        k_pe,
        count[None] if indices is None else indices.contiguous().view(rows, slots),
        o.view(-1, heads, dim),
        parts,
        part_sums,
        scale * LOG2E,
        rows,
        plan.row_tiles,
        plan.range_tiles,
        items,
        head_blocks,
        queries,
        first,
        phase,
        stride,
        min(items, processors),
    )
    launch(
        make,
        count,
        args,
        dtype=str(q.dtype).removeprefix("torch."),
        gather=indices is not None,
        causal=limit is not None,
        whole=whole,
        pair=pair,
    )
    if not whole:
        combine(o, parts, part_sums, rows, plan, heads_kv)
