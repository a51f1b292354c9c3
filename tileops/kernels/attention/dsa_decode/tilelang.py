"""Attention over indexed cache rows on Hopper: four warps gather, two groups of them multiply."""

from typing import Any

from torch import Tensor

from tileops.kernels.common.tilelang_limits import (
    compiler_refusal,
    latent_refusal,
    scale_refusal,
)


def dsa_decode_fwd_refusal(call: Any) -> str | None:
    q, tail = call.q, call.dim_tail
    return (
        scale_refusal(call)
        or latent_refusal(q[..., : q.shape[-1] - tail], tail, call.indices.shape[-1], kv=call.kv)
        or compiler_refusal()
    )


def dsa_decode_fwd(out: Tensor, call: Any) -> None:
    """q [B, S, H, W]; kv [B, S_kv, H_kv, W]; indices [B, S, H_kv, K] -> o [B, S, H, D]."""
    from tileops.kernels.common.tilelang_latent import attend_latent
    from tileops.kernels.common.triton_latent import past_rows

    q, kv = call.q, call.kv
    width = q.shape[-1]
    dim = width - call.dim_tail
    attend_latent(
        out,
        q[..., :dim],
        q[..., dim:],
        kv[..., :dim],
        kv[..., dim:],
        width**-0.5 if call.sm_scale is None else call.sm_scale,
        queries=q.shape[1],
        indices=call.indices,
        limit=past_rows(call.q_start_index_s, call.stride_kv) if call.is_causal else None,
    )
