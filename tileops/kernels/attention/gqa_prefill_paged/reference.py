"""Append and attend in aten ops, traceable: the keys of a block come from pool and chunk."""

from typing import Any

import torch
from torch import Tensor

from ops_registry.contract import E4M3
from tileops.kernels.attention.gqa_prefill_paged.append import (
    destinations,
    frequencies,
    rotated,
)
from tileops.kernels.common import blockwise
from tileops.kernels.common.blockwise import FAR, Inputs, Load
from tileops.kernels.common.fp8 import store_e4m3
from tileops.kernels.common.pool_rows import scatter_rows


def gqa_prefill_paged_fwd(out: Tensor, call: Any) -> None:
    """q [T_q, H, D]; k_new, v_new [T_q, H_kv, D]; pools [N_kv, H_kv, D]."""
    position, slot = destinations(call)
    start, length = blockwise.packed_segments(call.cu_seqlens_q)
    old = call.cache_seqlens.to(torch.int64)
    k_new = call.k_new
    inputs: Inputs = {"k": call.k_pages, "v": call.v_pages, "v_new": call.v_new}
    query = None
    if call.fuse_rope:
        inputs["frequency"] = frequencies(call)
        k_new = rotated(k_new, position, inputs["frequency"]).to(k_new.dtype)

        def query(x: Inputs, b: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
            return rotated(rows, positions, x["frequency"])

    inputs |= {"k_new": k_new, "start": start, "old": old}
    inputs["table"] = torch.nn.functional.pad(call.block_table, (0, 1), value=-1)
    fp8 = call.k_pages.dtype == E4M3
    if fp8:
        inputs |= {"k_scale": call.k_scale, "v_scale": call.v_scale}
    o, _ = blockwise.attend(
        call.q,
        start,
        length,
        old + length,
        inputs,
        appended_rows(call.page_size, fp8),
        blockwise.Window(call.is_causal),
        scale=call.q.shape[2] ** -0.5 if call.sm_scale is None else call.sm_scale,
        heads_kv=call.k_new.shape[1],
        value_dim=call.v_new.shape[2],
        softcap=call.softcap or 0.0,
        query=query,
    )
    out.copy_(o)
    for new, pool, scale in (
        (k_new, call.k_pages, call.k_scale),
        (call.v_new, call.v_pages, call.v_scale),
    ):
        scatter_rows(pool, store_e4m3(new, scale) if fp8 else new, slot)


def appended_rows(page_size: int, fp8: bool) -> Load:
    """Load positions j < old [B] from the pools k, v, later ones from k_new, v_new [T_q, ...].

    A used page id outside the pool raises. The table has a last column of -1 past its pages.
    """

    def load(x: Inputs, b: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        old, start = x["old"].index_select(0, b), x["start"].index_select(0, b)
        cached = keys < old
        last = x["table"].shape[1] - 1
        column = torch.div(keys, page_size, rounding_mode="floor").clamp(max=last)
        column = torch.where(cached, column, last)
        page = x["table"].index_select(0, b).index_select(1, column)[0].to(torch.int64)
        row = torch.where(page < 0, FAR, page * page_size + keys % page_size)
        row = torch.where(cached, row, 0)
        fresh = torch.where(cached, start, start + keys - old)
        return pick(x, "k", cached, row, fresh), pick(x, "v", cached, row, fresh)

    def pick(x: Inputs, name: str, cached: Tensor, row: Tensor, fresh: Tensor) -> Tensor:
        pool = x[name].index_select(0, row).to(torch.float32)
        if fp8:
            pool = pool * x[f"{name}_scale"]
        new = x[f"{name}_new"].index_select(0, fresh).to(torch.float32)
        return torch.where(cached[:, None, None], pool, new)

    return load
