"""What a cache write requires; it returns nothing."""

from typing import Any

from meta_kernels.checks import (
    check_extent,
    check_scales,
    check_tensors,
    names,
    refuse,
)
from ops_registry.attention.paged_kv_cache_write import PAGED_KV_CACHE_WRITE as OP
from ops_registry.contract import E4M3


def infer_paged_kv_cache_write(call: Any) -> None:
    dims = check_tensors(OP, call)
    check_extent(OP.name, "k", "D", dims["D"])
    check_extent(OP.name, "k_pages", "PS", dims["PS"])
    if call.k_pages.dtype not in (call.k.dtype, E4M3):
        raise refuse(
            OP.name,
            f"k_pages must be {names((call.k.dtype, E4M3))}, got {names((call.k_pages.dtype,))}",
        )
    fp8 = call.k_pages.dtype == E4M3
    check_scales(
        OP.name, call, {"k_scale": fp8, "v_scale": fp8}, (1,), "a float8_e4m3fn page pool"
    )
