"""Dense prefill on Hopper: one warp copies tiles, groups of warps multiply them."""

from typing import Any

from torch import Tensor

from tileops.kernels.common.gqa_hooks import score_scale
from tileops.kernels.common.tilelang_limits import (
    compiler_refusal,
    length_refusal,
    option_refusal,
    tensor_refusal,
)


def gqa_dense_fwd_refusal(call: Any) -> str | None:
    return (
        option_refusal(call)
        or length_refusal(call.q.shape[1], "S_q")
        or tensor_refusal(call.q, k=call.k, v=call.v)
        or compiler_refusal()
    )


def gqa_dense_fwd(out: tuple[Tensor, Tensor], call: Any) -> None:
    """Fill o [B, S_q, H, D] and lse [B, H, S_q]."""
    from tileops.kernels.common.tilelang_attention import Keys, Queries, Scores, attend

    o, lse = out
    q = call.q
    attend(
        o.flatten(0, 1),
        lse,
        Queries(q.flatten(0, 1), None, q.shape[0], q.shape[1]),
        Keys(call.k, call.v),
        Scores(score_scale(call), call.is_causal),
    )
