"""Gradients of dense GQA on GPUs: requests of one length, laid end to end."""

from typing import Any

from torch import Tensor

from tileops.kernels.common.triton_gqa import scores_of
from tileops.kernels.common.triton_gqa_backward import Forward, Requests, attend_backward
from tileops.kernels.common.triton_rope import rotated


def gqa_dense_bwd(out: tuple[Tensor, Tensor, Tensor], call: Any) -> None:
    """Fill dq [B, S_q, H, D], dk and dv [B, S_kv, H_kv, D]."""
    q, k = call.q, call.k
    if call.pos_encoding_mode == "rope":
        q, k = rotated(q, call, None, None), rotated(k, call, None, None)
    dq, dk, dv = out
    attend_backward(
        (dq.flatten(0, 1), dk.flatten(0, 1), dv.flatten(0, 1)),
        None,
        Forward(
            q.flatten(0, 1),
            k.flatten(0, 1),
            call.v.flatten(0, 1),
            call.o.flatten(0, 1),
            call.do.flatten(0, 1),
            call.lse,
        ),
        Requests(q.shape[0], q.shape[1], k.shape[1]),
        scores_of(call, tables=True),
    )
