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
    from tileops.kernels.attention.dsa_decode.triton import latent_arguments
    from tileops.kernels.common.tilelang_latent import attend_latent

    latents, options = latent_arguments(call)
    attend_latent(out, *latents, **options)
