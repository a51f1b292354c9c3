"""Latent decode on GPUs: the rows of every request are its slots."""

from typing import Any

from torch import Tensor

from tileops.kernels.common.triton_latent import attend_latent, refusal


def mla_decode_fwd(out: Tensor, call: Any) -> None:
    """q [B, H, D], q_pe [B, H, PE]; k [B, N_kv, H_kv, D], k_pe [B, N_kv, H_kv, PE]."""
    scale = (call.q.shape[-1] + call.q_pe.shape[-1]) ** -0.5
    attend_latent("mla_decode", out, call.q, call.q_pe, call.k, call.k_pe, scale)


def mla_decode_fwd_refusal(call: Any) -> str | None:
    group = call.q.shape[1] // call.k.shape[2]
    return refusal(group, call.q.shape[2], call.q_pe.shape[2])
