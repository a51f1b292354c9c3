"""Paged attention on CPU, request by request on the blocked engine."""

from typing import Any

import torch

from tileops.kernels.common.cpu_attention import PagedKeys, Rope, Scratch, attend


def gqa_paged_fwd(out: torch.Tensor, call: Any) -> None:
    """q [T_q, H, D]; pools [NP, PS, H_kv, D]; out [T_q, H, D]."""
    offsets, lengths = call.cu_seqlens_q.tolist(), call.cache_seqlens.tolist()
    scale = call.q.shape[-1] ** -0.5 if call.sm_scale is None else call.sm_scale
    rope = None
    if call.pos_encoding_mode == "rope":
        rope = Rope(call.rope_cos, call.rope_sin, call.rope_layout)
    scratch = Scratch()
    done = 0
    for b, length in enumerate(lengths):
        start, stop = max(offsets[b], done), min(offsets[b + 1], out.shape[0])
        if start >= stop:
            continue
        out[done:start].zero_()
        done = stop
        attend(
            out[start:stop],
            None,
            call.q[start:stop],
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
    out[done:].zero_()


def of_request(scale: torch.Tensor | None, b: int) -> torch.Tensor | None:
    """The [1] or [H_kv] scales of request b."""
    return scale if scale is None or scale.dim() == 1 else scale[b]
