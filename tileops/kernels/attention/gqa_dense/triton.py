"""Dense GQA on GPUs: requests of one length, laid end to end."""

from typing import Any

from torch import Tensor

from tileops.kernels.attention.gqa_dense.triton_backward import gqa_dense_bwd
from tileops.kernels.common.limits import head_dim_refusal
from tileops.kernels.common.triton_gqa import Queries, attend, dense_keys, scores_of
from tileops.kernels.common.triton_rope import rotated

__all__ = ["gqa_dense_bwd", "gqa_dense_fwd"]

gqa_dense_fwd_refusal = gqa_dense_bwd_refusal = head_dim_refusal


def gqa_dense_fwd(out: tuple[Tensor, Tensor], call: Any) -> None:
    """Fill o [B, S_q, H, D] and lse [B, H, S_q]."""
    o, lse = out
    q, k = call.q, call.k
    if call.pos_encoding_mode == "rope":
        q, k = rotated(q, call, None, None), rotated(k, call, None, None)
    attend(
        o.flatten(0, 1),
        lse,
        Queries(q.flatten(0, 1), q.shape[0], q.shape[1]),
        dense_keys(k, call.v),
        scores_of(call),
    )
