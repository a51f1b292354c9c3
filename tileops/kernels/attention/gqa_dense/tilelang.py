"""Dense prefill on Hopper: one warp copies tiles, groups of warps multiply them."""

from typing import Any

from torch import Tensor

from tileops.kernels.common.tilelang_limits import (
    compiler_refusal,
    e4m3_refusal,
    length_refusal,
    option_refusal,
    tensor_refusal,
)


def gqa_dense_fwd_refusal(call: Any) -> str | None:
    return (
        option_refusal(call)
        or length_refusal(call.q, call.k.shape[1])
        or tensor_refusal(call.q, k=call.k, v=call.v, e4m3=True)
        or e4m3_refusal(call)
        or compiler_refusal()
    )


def gqa_dense_fwd(out: tuple[Tensor, Tensor], call: Any) -> None:
    """Fill o [B, S_q, H, D] and lse [B, H, S_q]."""
    from tileops.kernels.common.tilelang_gqa import Keys, attend
    from tileops.kernels.common.triton_gqa import scores_of
    from tileops.kernels.common.triton_rope import rotated

    o, lse = out
    q, k = call.q, call.k
    if call.pos_encoding_mode == "rope":
        q, k = rotated(q, call, None, None), rotated(k, call, None, None)
    attend(o, lse, q, Keys(k, call.v), scores_of(call))
