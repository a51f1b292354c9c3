"""Paged multi-head decode in aten ops, a block of keys at a time."""

from typing import Any

import torch

from tileops.kernels.common.blockwise import Window, attend, dense_offsets, paged_rows


def mha_decode_paged_fwd(out: torch.Tensor, call: Any) -> None:
    """q [B, S_q, H, D]; pools [N_kv, H, D]; out [B, S_q, H, D]."""
    batch, queries, heads, dim = call.q.shape
    o, _ = attend(
        call.q.flatten(0, 1),
        dense_offsets(batch, queries, call.q.device),
        call.real_seqlen_kv,
        {"k": call.k, "v": call.v, "table": call.block_table},
        paged_rows(call.page_size),
        Window(call.is_causal),
        scale=dim**-0.5,
        heads_kv=heads,
        value_dim=dim,
        block_k=1024,
        sizes=(call.q,),
    )
    out.copy_(o.view(out.shape))
