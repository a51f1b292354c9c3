"""Append and attend in aten ops, traceable: the keys of a block come from pool and chunk."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ops_registry.contract import E4M3
from tileops.kernels.attention.gqa_prefill_paged.append import destinations, rotated
from tileops.kernels.common.blockwise import (
    Inputs,
    Load,
    Window,
    attend,
    packed_lengths,
    paged_address,
    take,
)
from tileops.kernels.common.fp8 import store_e4m3
from tileops.kernels.common.gqa_hooks import score_scale, softcap_of
from tileops.kernels.common.pool_rows import scatter_rows


def gqa_prefill_paged_fwd(out: Tensor, call: Any) -> None:
    """q [T_q, H, D]; k_new, v_new [T_q, H_kv, D]; pools [N_kv, H_kv, D]."""
    position, slot = destinations(call)
    k_new, query = call.k_new, None
    inputs: Inputs = {"k": call.k_pages, "v": call.v_pages, "v_new": call.v_new}
    if call.fuse_rope:
        k_new = rotated(call, k_new, position).to(k_new.dtype)

        def query(x: Inputs, b: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
            return rotated(call, rows, positions)

    inputs |= {
        "k_new": k_new,
        "old": call.cache_seqlens.to(torch.int64),
        "starts": call.cu_seqlens_q.to(torch.int64),
        "table": pad(call.block_table, (0, 1), value=-1),
        "block_table": call.block_table,  # for its extents
    }
    fp8 = call.k_pages.dtype == E4M3
    if fp8:
        inputs |= {"k_scale": call.k_scale, "v_scale": call.v_scale}
    o, _ = attend(
        call.q,
        call.cu_seqlens_q,
        pad(inputs["old"], (0, 1)) + packed_lengths(call.cu_seqlens_q),
        inputs,
        appended_rows(call.page_size, fp8),
        Window(call.is_causal),
        scale=score_scale(call),
        heads_kv=k_new.shape[1],
        value_dim=k_new.shape[2],
        softcap=softcap_of(call),
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
        old, start = take(x["old"], b), take(x["starts"], b)
        cached = keys < old
        last = x["table"].shape[1] - 1
        at = torch.where(cached, keys, last * page_size)
        row = torch.where(cached, paged_address(x["table"], b, at, page_size), 0)
        fresh = torch.where(cached, start, start + keys - old)
        return pick(x, "k", cached, row, fresh), pick(x, "v", cached, row, fresh)

    def pick(x: Inputs, name: str, cached: Tensor, row: Tensor, fresh: Tensor) -> Tensor:
        pool = take(x[name], row).to(torch.float32)
        if fp8:
            pool = pool * x[f"{name}_scale"]
        new = take(x[f"{name}_new"], fresh).to(torch.float32)
        return torch.where(cached[:, None, None], pool, new)

    return load
