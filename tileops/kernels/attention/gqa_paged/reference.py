"""Paged attention in aten ops, a block of keys at a time; keys are rotated as they are read."""

from typing import Any

import torch

from tileops.kernels.common.blockwise import Window, attend, paged_rows
from tileops.kernels.common.gqa_hooks import hooks_of, score_scale, softcap_of


def gqa_paged_fwd(out: torch.Tensor, call: Any) -> None:
    """q [T_q, H, D]; pools [NP, PS, H_kv, D]; out [T_q, H, D]."""
    page_size, heads_kv, dim = call.k_pages.shape[1:]
    hooks = hooks_of(call)
    pools = {"k": call.k_pages.flatten(0, 1), "v": call.v_pages.flatten(0, 1)}
    o, _ = attend(
        call.q,
        call.cu_seqlens_q,
        call.cache_seqlens,
        {**pools, "table": call.page_table, **hooks.inputs},
        paged_rows(page_size, hooks.key),
        Window(call.is_causal, call.window_size_left, call.window_size_right),
        scale=score_scale(call),
        heads_kv=heads_kv,
        value_dim=dim,
        softcap=softcap_of(call),
        sinks=call.sinks,
        query=hooks.query,
        finish=hooks.finish,
        out_dtype=out.dtype,
    )
    out.copy_(o)
