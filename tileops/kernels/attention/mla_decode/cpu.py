"""Latent decode on CPU, request by request on the blocked engine."""

from typing import Any

import torch

from tileops.kernels.common.cpu_attention import LatentKeys, Scratch, attend


def mla_decode_fwd(out: torch.Tensor, call: Any) -> None:
    """q [B, H, D], q_pe [B, H, PE]; k [B, N_kv, H_kv, D], k_pe [B, N_kv, H_kv, PE]."""
    query = torch.cat((call.q, call.q_pe), dim=-1)
    scratch = Scratch()
    for b in range(out.shape[0]):
        attend(
            out[b : b + 1],
            None,
            query[b : b + 1],
            LatentKeys(call.k[b], call.k_pe[b], scratch),
            kv_len=call.k.shape[1],
            scale=query.shape[-1] ** -0.5,
            scratch=scratch,
        )
