"""Latent decode in aten ops, a block of keys at a time; a row is read once, as key and value."""

from typing import Any

import torch
from torch import Tensor

from tileops.kernels.common.blockwise import (
    Inputs,
    Window,
    attend,
    dense_offsets,
    fetch,
    take,
)


def mla_decode_fwd(out: torch.Tensor, call: Any) -> None:
    """q [B, H, D], q_pe [B, H, PE]; k [B, N_kv, H_kv, D], k_pe [B, N_kv, H_kv, PE]."""
    batch, rows, heads_kv, dim = call.k.shape
    query = torch.cat([call.q, call.q_pe], -1)
    offsets = dense_offsets(batch, rows, call.q.device)
    o, _ = attend(
        query,
        dense_offsets(batch, 1, call.q.device),
        torch.full_like(offsets, rows),
        {"k": call.k.flatten(0, 1), "k_pe": call.k_pe.flatten(0, 1), "kv_offsets": offsets},
        latent_rows,
        Window(is_causal=False),
        scale=query.shape[-1] ** -0.5,
        heads_kv=heads_kv,
        value_dim=dim,
        block_q=1,
        block_k=1024,
        sizes=(call.k,),
    )
    out.copy_(o)


def latent_rows(x: Inputs, b: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The rows as keys [n, H_kv, D + PE] and as values [n, H_kv, D]."""
    rows = take(x["kv_offsets"], b) + keys
    latent, rotated = (fetch(x, name, rows, None, b, keys) for name in ("k", "k_pe"))
    return torch.cat([latent, rotated], -1), latent
