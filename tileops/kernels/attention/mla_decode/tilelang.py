"""Latent decode on Hopper: a warp copies tiles of the cache, two groups of warps multiply them."""

from typing import Any

from torch import Tensor

from tileops.kernels.common.tilelang_limits import compiler_refusal, latent_refusal


def mla_decode_fwd_refusal(call: Any) -> str | None:
    return (
        latent_refusal(call.q, call.q_pe.shape[2], call.k.shape[1], k=call.k, k_pe=call.k_pe)
        or compiler_refusal()
    )


def mla_decode_fwd(out: Tensor, call: Any) -> None:
    """q [B, H, D], q_pe [B, H, PE]; k [B, N_kv, H_kv, D], k_pe [B, N_kv, H_kv, PE]."""
    from tileops.kernels.common.tilelang_latent import attend_latent

    scale = (call.q.shape[-1] + call.q_pe.shape[-1]) ** -0.5
    attend_latent(out, call.q, call.q_pe, call.k, call.k_pe, scale)
