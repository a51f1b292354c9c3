"""Append and attend on eager CPU tensors, one request at a time."""

from typing import Any

from torch import Tensor

from ops_registry.contract import E4M3
from tileops.kernels.attention.gqa_prefill_paged.append import destinations, rotated
from tileops.kernels.common.cpu_attention import (
    AppendedKeys,
    PagedKeys,
    Scratch,
    attend,
)
from tileops.kernels.common.gqa_hooks import score_scale
from tileops.kernels.common.pool_rows import copy_rows


def gqa_prefill_paged_fwd(out: Tensor, call: Any) -> None:
    """q [T_q, H, D]; k_new, v_new [T_q, H_kv, D]; pools [N_kv, H_kv, D].

    The pools are written last, so that a bad page id leaves them as they were.
    """
    position, slot = destinations(call)
    k_new, v_new = call.k_new, call.v_new
    if call.fuse_rope:
        k_new = rotated(call, k_new, position).to(k_new.dtype)
    pages = (call.k_pages.shape[0] // call.page_size, call.page_size)
    k_pages, v_pages = (pool.unflatten(0, pages) for pool in (call.k_pages, call.v_pages))
    total = call.q.shape[0]
    edges = [min(max(edge, 0), total) for edge in call.cu_seqlens_q.tolist()]
    scratch = Scratch()
    done = 0
    for b, old in enumerate(call.cache_seqlens.tolist()):
        rows = slice(max(edges[b], done), edges[b + 1])
        if rows.start >= rows.stop:
            continue
        out[done : rows.start].zero_()
        done = rows.stop
        q = call.q[rows]
        if call.fuse_rope:
            q = rotated(call, q, position[rows])
        paged = PagedKeys(k_pages, v_pages, call.block_table[b], scratch)
        attend(
            out[rows],
            None,
            q,
            AppendedKeys(paged, old, k_new[rows], v_new[rows], call.k_scale, call.v_scale),
            kv_len=old + q.shape[0],
            scale=score_scale(call),
            is_causal=call.is_causal,
            softcap=call.softcap,
            scratch=scratch,
        )
    out[done:].zero_()
    fp8 = call.k_pages.dtype == E4M3
    copy_rows(call.k_pages, k_new, slot, call.k_scale if fp8 else None)
    copy_rows(call.v_pages, v_new, slot, call.v_scale if fp8 else None)
