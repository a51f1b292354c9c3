"""Packed prefill on Hopper: one warp finds tiles, one copies them, groups of warps multiply."""

from typing import Any

from torch import Tensor

from tileops.kernels.common.tilelang_limits import (
    compiler_refusal,
    e4m3_refusal,
    option_refusal,
    packed_refusal,
    tensor_refusal,
)


def gqa_varlen_fwd_refusal(call: Any) -> str | None:
    return (
        option_refusal(call)
        or packed_refusal(call.q, call.cu_seqlens_q, call.k.shape[0])
        or tensor_refusal(call.q, k=call.k, v=call.v, e4m3=True)
        or e4m3_refusal(call)
        or compiler_refusal()
    )


def gqa_varlen_fwd(out: tuple[Tensor, Tensor], call: Any) -> None:
    """Fill o [T_q, H, D] and lse [H, T_q]."""
    from tileops.kernels.common.tilelang_gqa import Keys, attend
    from tileops.kernels.common.triton_gqa import scores_of
    from tileops.kernels.common.triton_rope import rotated

    o, lse = out
    q, k = call.q, call.k
    offsets, offsets_kv = call.cu_seqlens_q.contiguous(), call.cu_seqlens_kv.contiguous()
    if call.pos_encoding_mode == "rope":
        q, k = rotated(q, call, offsets, offsets_kv), rotated(k, call, offsets_kv, offsets_kv)
    attend(o, lse, q, Keys(k, call.v, offsets_kv), scores_of(call), offsets)
