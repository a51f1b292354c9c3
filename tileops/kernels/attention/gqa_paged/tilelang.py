"""Paged prefill on Hopper: one warp copies pages, groups of warps multiply them."""

from typing import Any

from torch import Tensor

from tileops.kernels.common.tilelang_limits import (
    compiler_refusal,
    copied,
    option_refusal,
    packed_refusal,
    pools_refusal,
)


def gqa_paged_fwd_refusal(call: Any) -> str | None:
    page, table = call.k_pages.shape[1], call.page_table
    rotates = call.pos_encoding_mode == "rope"
    return (
        option_refusal(call)
        or packed_refusal(call.q, call.cu_seqlens_q, table.shape[1] * page)
        or pools_refusal(call.q, call.k_pages, call.v_pages, page, table, rotates)
        or compiler_refusal()
    )


def gqa_paged_fwd(out: Tensor, call: Any) -> None:
    """Fill o [T_q, H, D]."""
    from tileops.kernels.common.tilelang_gqa import Keys, attend
    from tileops.kernels.common.triton_gqa import scores_of
    from tileops.kernels.common.triton_rope import rotated
    from tileops.kernels.common.triton_widened import Pools, widened

    q, offsets, lengths = call.q, call.cu_seqlens_q.contiguous(), call.cache_seqlens.contiguous()
    k, v, table = call.k_pages, call.v_pages, call.page_table.contiguous()
    rotates = call.pos_encoding_mode == "rope"
    if rotates:
        q = rotated(q, call, offsets, None, lengths)
    if copied(call.q, k, v, k.shape[1], rotates):
        pools = Pools(k, v, table, lengths, k_scale=call.k_scale, v_scale=call.v_scale)
        k, v, table = widened(pools, q.dtype, call if rotates else None)
    attend(out, None, q, Keys(k, v, lengths, table), scores_of(call), offsets)
