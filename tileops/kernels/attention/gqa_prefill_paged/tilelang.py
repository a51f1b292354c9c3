"""Append-prefill on Hopper: the portable kernel stores the new rows, attention follows."""

from typing import Any

from torch import Tensor

from tileops.kernels.common.gqa_hooks import score_scale
from tileops.kernels.common.tilelang_limits import (
    compiler_refusal,
    option_refusal,
    packed_refusal,
    page_refusal,
    tensor_refusal,
)


def gqa_prefill_paged_fwd_refusal(call: Any) -> str | None:
    return (
        option_refusal(call)
        or page_refusal(call.page_size)
        or packed_refusal(call.q, call.cu_seqlens_q, call.block_table.shape[1] * call.page_size)
        or tensor_refusal(call.q, pools=True, k_pages=call.k_pages, v_pages=call.v_pages)
        or compiler_refusal()
    )


def gqa_prefill_paged_fwd(out: Tensor, call: Any) -> None:
    """Append k_new, v_new to the pools and fill o [T_q, H, D]."""
    from tileops.kernels.attention.gqa_prefill_paged.triton import append
    from tileops.kernels.common.tilelang_gqa import Keys, attend
    from tileops.kernels.common.triton_gqa import Scores

    offsets, lengths, table, q, _ = append(call)
    k, v = (x.unflatten(0, (-1, call.page_size)) for x in (call.k_pages, call.v_pages))
    keys = Keys(k, v, lengths, table, appended=True)
    scores = Scores(score_scale(call), call.is_causal, softcap=call.softcap)
    attend(out, None, q, keys, scores, offsets)
