"""The cache write in aten ops, traceable."""

from typing import Any

from tileops.kernels.common.fp8 import store_e4m3
from tileops.kernels.common.pool_rows import scatter_rows


def paged_kv_cache_write(out: None, call: Any) -> None:
    """k, v [T, H_kv, D]; pools [NP, PS, H_kv, D]; slot_mapping [T]."""
    for rows, pool, scale in (
        (call.k, call.k_pages, call.k_scale),
        (call.v, call.v_pages, call.v_scale),
    ):
        new = rows if scale is None else store_e4m3(rows, scale)
        scatter_rows(pool, new, call.slot_mapping)
