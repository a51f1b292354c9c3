"""Paged GQA on GPUs: keys through the page table, rotated as they are read."""

from typing import Any

from torch import Tensor

from tileops.kernels.common.limits import head_dim_refusal
from tileops.kernels.common.triton_gqa import Keys, Queries, attend, scores_of
from tileops.kernels.common.triton_rope import rotated


def gqa_paged_fwd(out: Tensor, call: Any) -> None:
    """Fill o [T_q, H, D]."""
    page = call.k_pages.shape[1]
    table = call.page_table
    q, offsets, lengths = call.q, call.cu_seqlens_q.contiguous(), call.cache_seqlens.contiguous()
    if call.pos_encoding_mode == "rope":
        q = rotated(q, call, offsets, None, lengths)
    attend(
        out,
        None,
        Queries(q, table.shape[0], 0, offsets),
        Keys(
            call.k_pages.flatten(0, 1),
            call.v_pages.flatten(0, 1),
            table.shape[1] * page,
            page=page,
            table=table,
            lengths=lengths,
        ),
        scores_of(call, tables=True),
    )


gqa_paged_fwd_refusal = head_dim_refusal
