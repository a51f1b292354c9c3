"""Paged multi-head decode on GPUs: dense queries, keys through the block table."""

from typing import Any

from torch import Tensor

from tileops.kernels.common.limits import head_dim_refusal
from tileops.kernels.common.triton_gqa import Keys, Queries, Scores, attend


def mha_decode_paged_fwd(out: Tensor, call: Any) -> None:
    """Fill o [B, S_q, H, D]."""
    q, table = call.q, call.block_table
    attend(
        out.flatten(0, 1),
        None,
        Queries(q.flatten(0, 1), q.shape[0], q.shape[1]),
        Keys(
            call.k,
            call.v,
            table.shape[1] * call.page_size,
            page=call.page_size,
            table=table,
            lengths=call.real_seqlen_kv,
        ),
        Scores(q.shape[-1] ** -0.5, call.is_causal),
    )


mha_decode_paged_fwd_refusal = head_dim_refusal
