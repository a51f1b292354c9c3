"""Attention over indexed cache rows on GPUs: a query's indices name its slots."""

from typing import Any

from torch import Tensor

from tileops.kernels.common.triton_latent import attend_latent, past_rows, refusal


def dsa_decode_fwd(out: Tensor, call: Any) -> None:
    """q [B, S, H, W]; kv [B, S_kv, H_kv, W]; indices [B, S, H_kv, K] -> o [B, S, H, D]."""
    latents, options = latent_arguments(call)
    attend_latent("dsa_decode", out, *latents, **options)


def latent_arguments(call: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `attend_latent` takes behind o, by place and by name."""
    q, kv = call.q, call.kv
    width = q.shape[-1]
    dim = width - call.dim_tail
    scale = width**-0.5 if call.sm_scale is None else call.sm_scale
    latents = q[..., :dim], q[..., dim:], kv[..., :dim], kv[..., dim:], scale
    limit = past_rows(call.q_start_index_s, call.stride_kv) if call.is_causal else None
    return latents, {"queries": q.shape[1], "indices": call.indices, "limit": limit}


def dsa_decode_fwd_refusal(call: Any) -> str | None:
    group = call.q.shape[2] // call.kv.shape[2]
    return refusal(group, call.q.shape[3] - call.dim_tail, call.dim_tail)
