"""Paged multi-head decode on CPU, request by request on the blocked engine."""

from typing import Any

import torch

from tileops.kernels.common.cpu_attention import PagedKeys, Scratch, attend


def mha_decode_paged_fwd(out: torch.Tensor, call: Any) -> None:
    """q [B, S_q, H, D]; pools [N_kv, H, D]; out [B, S_q, H, D]."""
    k_pages = call.k.unflatten(0, (-1, call.page_size))
    v_pages = call.v.unflatten(0, (-1, call.page_size))
    scratch = Scratch()
    for b, length in enumerate(call.real_seqlen_kv.tolist()):
        attend(
            out[b],
            None,
            call.q[b],
            PagedKeys(k_pages, v_pages, call.block_table[b], scratch),
            kv_len=max(length, 0),
            scale=call.q.shape[-1] ** -0.5,
            is_causal=call.is_causal,
            scratch=scratch,
        )
