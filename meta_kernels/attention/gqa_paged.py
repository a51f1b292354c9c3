"""What attention over a paged KV cache requires, and its output."""

from typing import Any

import torch

from meta_kernels import checks
from meta_kernels.checks import (
    check_extent,
    check_groups,
    check_rope,
    check_scales,
    check_tensors,
    describe,
    names,
    output_dtype,
    refuse,
)
from ops_registry.attention.gqa_paged import GQA_PAGED_FWD as OP
from ops_registry.contract import E4M3


def infer_gqa_paged_fwd(call: Any) -> torch.Tensor:
    checks.window(OP.name, call.window_size_left, call.window_size_right)
    checks.sm_scale(OP.name, call.sm_scale)
    checks.softcap(OP.name, call.softcap)
    checks.rope(OP.name, call.pos_encoding_mode, call.rotary_dim, call.rope_layout)
    dims = check_tensors(OP, call)
    check_extent(OP.name, "q", "D", dims["D"])
    check_extent(OP.name, "k_pages", "PS", dims["PS"])
    check_groups(OP.name, dims["H"], dims["H_kv"], "k_pages")
    check_pool_dtype(call)
    dtype = output_dtype(OP.name, call.q, call.out_dtype)
    batch, heads_kv = dims["B"], dims["H_kv"]
    check_scales(
        OP.name, call, {"q_scale": call.q.dtype == E4M3}, (batch, heads_kv), "a float8_e4m3fn q"
    )
    check_pool_scales(call, batch, heads_kv)
    check_rope(OP.name, call, dims["D"], dtype)
    return call.q.new_empty(call.q.shape, dtype=dtype)


def check_pool_dtype(call: Any) -> None:
    """Pools hold q's dtype or e4m3."""
    allowed = (E4M3,) if call.q.dtype == E4M3 else (call.q.dtype, E4M3)
    if call.k_pages.dtype not in allowed:
        raise refuse(
            OP.name,
            f"k_pages must be {names(allowed)} for a {names((call.q.dtype,))} q, "
            f"got {names((call.k_pages.dtype,))}",
        )


def check_pool_scales(call: Any, batch: Any, heads_kv: Any) -> None:
    """Scales of an e4m3 pool: both [1] or both [B, H_kv], told apart by rank."""
    fp8 = call.k_pages.dtype == E4M3
    k_scale = call.k_scale
    if fp8 and k_scale is not None and k_scale.dim() not in (1, 2):
        raise refuse(
            OP.name,
            f"k_scale must be float32 [1] or [B, H_kv] with B={batch}, H_kv={heads_kv}, "
            f"got {describe(k_scale)}",
        )
    per_tensor = k_scale is not None and k_scale.dim() == 1
    shape = (1,) if per_tensor else (batch, heads_kv)
    wanted = {"k_scale": fp8, "v_scale": fp8}
    check_scales(OP.name, call, wanted, shape, "a float8_e4m3fn page pool")
