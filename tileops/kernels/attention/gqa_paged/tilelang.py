"""Paged prefill on Hopper: one warp copies pages, groups of warps multiply them."""

from typing import Any

from torch import Tensor

from tileops.kernels.common.tilelang_limits import (
    compiler_refusal,
    option_refusal,
    packed_refusal,
    page_refusal,
    tensor_refusal,
)


def gqa_paged_fwd_refusal(call: Any) -> str | None:
    page = call.k_pages.shape[1]
    if call.pos_encoding_mode != "none":
        return "does not rotate the keys of a cache, got pos_encoding_mode='rope'"
    return (
        option_refusal(call)
        or page_refusal(page)
        or packed_refusal(call.q, call.cu_seqlens_q, call.page_table.shape[1] * page)
        or tensor_refusal(call.q, pools=True, k_pages=call.k_pages, v_pages=call.v_pages)
        or compiler_refusal()
    )


def gqa_paged_fwd(out: Tensor, call: Any) -> None:
    """Fill o [T_q, H, D]."""
    from tileops.kernels.common.tilelang_gqa import Keys, attend
    from tileops.kernels.common.triton_gqa import scores_of

    lengths, table = call.cache_seqlens.contiguous(), call.page_table.contiguous()
    keys = Keys(call.k_pages, call.v_pages, lengths, table)
    attend(out, None, call.q, keys, scores_of(call), call.cu_seqlens_q.contiguous())
