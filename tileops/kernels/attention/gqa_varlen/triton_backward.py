"""Gradients of packed GQA on GPUs: requests behind offsets, found by every tile for itself."""

from typing import Any

from torch import Tensor

from tileops.kernels.common.triton_gqa import scores_of
from tileops.kernels.common.triton_gqa_backward import Forward, Requests, attend_backward
from tileops.kernels.common.triton_rope import rotated


def gqa_varlen_bwd(out: tuple[Tensor, Tensor, Tensor, Tensor], call: Any) -> None:
    """Fill dq [T_q, H, D], dk and dv [T_kv, H_kv, D], dsinks [H] or empty."""
    q, k = call.q, call.k
    offsets_q, offsets_kv = call.cu_seqlens_q.contiguous(), call.cu_seqlens_kv.contiguous()
    if call.pos_encoding_mode == "rope":
        q, k = rotated(q, call, offsets_q, offsets_kv), rotated(k, call, offsets_kv, offsets_kv)
    dq, dk, dv, dsinks = out
    attend_backward(
        (dq, dk, dv),
        None if call.sinks is None else dsinks,
        Forward(q, k, call.v, call.o, call.do, call.lse),
        Requests(offsets_q.shape[0] - 1, 0, 0, offsets_q, offsets_kv),
        scores_of(call, tables=True),
    )
