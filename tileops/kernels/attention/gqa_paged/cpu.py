"""Paged attention on CPU, eager: the blocked engine, one request at a time."""

from typing import Any

import torch

from tileops.kernels.common.cpu_attention import PagedKeys, Scratch, attend, rope_of
from tileops.kernels.common.gqa_hooks import score_scale


def gqa_paged_fwd(out: torch.Tensor, call: Any) -> None:
    """q [T_q, H, D]; pools [NP, PS, H_kv, D]; fill out [T_q, H, D], rows of no request with 0."""
    scale, rope, scratch = score_scale(call), rope_of(call), Scratch()
    offsets = call.cu_seqlens_q.tolist()
    out.zero_()
    for b, length in enumerate(call.cache_seqlens.tolist()):
        rows = query_rows(offsets, b, out.shape[0])
        if rows.start == rows.stop:
            continue
        attend(
            out[rows],
            None,
            call.q[rows],
            PagedKeys(call.k_pages, call.v_pages, call.page_table[b], scratch),
            kv_len=max(length, 0),
            scale=scale,
            is_causal=call.is_causal,
            left=call.window_size_left,
            right=call.window_size_right,
            softcap=call.softcap,
            sinks=call.sinks,
            rope=rope,
            q_scale=of_request(call.q_scale, b),
            k_scale=of_request(call.k_scale, b),
            v_scale=of_request(call.v_scale, b),
            scratch=scratch,
        )


def query_rows(offsets: list[int], b: int, rows: int) -> slice:
    """The query rows of request b; IndexError for rows outside q."""
    start, stop = offsets[b], offsets[b + 1]
    if not 0 <= start <= stop <= rows:
        raise IndexError(
            f"gqa_paged_fwd: cu_seqlens_q must not decrease and stay in [0, {rows}], "
            f"got {start} and {stop} at index {b}"
        )
    return slice(start, stop)


def of_request(scale: torch.Tensor | None, b: int) -> torch.Tensor | None:
    """The [1] or [H_kv] scales of request b."""
    return scale if scale is None or scale.dim() == 1 else scale[b]
