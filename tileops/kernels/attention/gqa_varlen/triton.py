"""Packed GQA on GPUs: requests behind offsets, found by every tile for itself."""

from typing import Any

from torch import Tensor

from tileops.kernels.attention.gqa_varlen.triton_backward import gqa_varlen_bwd
from tileops.kernels.common.limits import head_dim_refusal
from tileops.kernels.common.triton_gqa import Keys, Queries, attend, scores_of
from tileops.kernels.common.triton_rope import rotated

__all__ = ["gqa_varlen_bwd", "gqa_varlen_fwd"]

gqa_varlen_fwd_refusal = gqa_varlen_bwd_refusal = head_dim_refusal


def gqa_varlen_fwd(out: tuple[Tensor, Tensor], call: Any) -> None:
    """Fill o [T_q, H, D] and lse [H, T_q]."""
    o, lse = out
    q, k = call.q, call.k
    offsets_q, offsets_kv = call.cu_seqlens_q.contiguous(), call.cu_seqlens_kv.contiguous()
    if call.pos_encoding_mode == "rope":
        q, k = rotated(q, call, offsets_q, offsets_kv), rotated(k, call, offsets_kv, offsets_kv)
    attend(
        o,
        lse,
        Queries(q, offsets_q.shape[0] - 1, 0, offsets_q),
        Keys(k, call.v, k.shape[0], offsets=offsets_kv),
        scores_of(call),
    )
