"""Append-prefill on Hopper: the portable kernel stores the new rows, attention follows.

From a pool that has to be copied first, new keys and values come as `Pools.fresh` says: of an
e4m3 pool as they are, not as they are stored.
"""

from typing import Any

from torch import Tensor

from tileops.kernels.common.gqa_hooks import score_scale
from tileops.kernels.common.tilelang_limits import (
    compiler_refusal,
    copied,
    option_refusal,
    packed_refusal,
    pools_refusal,
)


def gqa_prefill_paged_fwd_refusal(call: Any) -> str | None:
    page, table = call.page_size, call.block_table
    return (
        option_refusal(call)
        or packed_refusal(call.q, call.cu_seqlens_q, table.shape[1] * page)
        or pools_refusal(call.q, call.k_pages, call.v_pages, page, table)
        or compiler_refusal()
    )


def gqa_prefill_paged_fwd(out: Tensor, call: Any) -> None:
    """Append k_new, v_new to the pools and fill o [T_q, H, D]."""
    from tileops.kernels.attention.gqa_prefill_paged.triton import append
    from tileops.kernels.common.tilelang_gqa import Keys, attend
    from tileops.kernels.common.triton_gqa import Scores
    from tileops.kernels.common.triton_widened import Pools, widened

    offsets, lengths, table, q, k_new = append(call)
    k, v = (x.unflatten(0, (-1, call.page_size)) for x in (call.k_pages, call.v_pages))
    if copied(call.q, k, v, call.page_size):
        e4m3 = k.dtype.itemsize == 1
        fresh = (k_new, call.v_new) if e4m3 else None
        pools = Pools(k, v, table, lengths, offsets, fresh, call.k_scale, call.v_scale)
        k, v, table = widened(pools, q.dtype)
    keys = Keys(k, v, lengths, table, appended=True)
    scores = Scores(score_scale(call), call.is_causal, softcap=call.softcap)
    attend(out, None, q, keys, scores, offsets)
