"""The cache write on eager CPU tensors: one indexed copy per pool."""

from typing import Any

from tileops.kernels.common.pool_rows import copy_rows


def paged_kv_cache_write(out: None, call: Any) -> None:
    """k, v [T, H_kv, D]; pools [NP, PS, H_kv, D]; slot_mapping [T]."""
    copy_rows(call.k_pages, call.k, call.slot_mapping, call.k_scale)
    copy_rows(call.v_pages, call.v, call.slot_mapping, call.v_scale)
