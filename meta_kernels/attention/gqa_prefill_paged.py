"""What a fused append-and-attend requires, what it returns, and what its tensors must hold."""

from typing import Any

import torch

from meta_kernels import checks, contents
from meta_kernels.checks import check_tensors, names, refuse
from ops_registry.attention.gqa_prefill_paged import GQA_PREFILL_PAGED_FWD as OP
from ops_registry.contract import E4M3, HALF_OR_E4M3, Condition


def infer_gqa_prefill_paged_fwd(call: Any) -> torch.Tensor:
    dims = check_tensors(OP, call)
    check_options(OP.name, call)
    checks.check_extent(OP.name, "q", "D", dims["D"])
    checks.check_groups(OP.name, dims["H"], dims["H_kv"], "k_new")
    cache_dtype = call.cache_dtype or call.q.dtype
    if cache_dtype not in (call.q.dtype, E4M3):
        raise refuse(
            OP.name,
            f"cache_dtype must be None, the dtype of q, {names((call.q.dtype,))}, or "
            f"float8_e4m3fn, got {names((cache_dtype,))}",
        )
    if call.k_pages.dtype != cache_dtype:
        raise refuse(
            OP.name,
            f"k_pages must have the cache dtype {names((cache_dtype,))}, "
            f"got {names((call.k_pages.dtype,))}",
        )
    checks.check_multiple(OP.name, "k_pages", dims["N_kv"], "page_size", call.page_size)
    if call.fuse_rope:
        checks.checked_rotary_width(OP.name, call.rotary_dim, dims["D"])
    return call.q.new_empty((dims["T_q"], dims["H"], dims["D"]))


def check_options(op: str, call: Any) -> None:
    """The parameter rules, for a call or an Op."""
    checks.positive(op, "page_size", call.page_size)
    checks.positive(op, "max_seqlen_q", call.max_seqlen_q)
    if call.cache_dtype is not None and call.cache_dtype not in HALF_OR_E4M3:
        raise refuse(
            op, f"cache_dtype must be None or {names(HALF_OR_E4M3)}, got {call.cache_dtype}"
        )
    checks.sm_scale(op, call.sm_scale)
    checks.softcap(op, call.softcap)
    checks.rope_base(op, call.rope_base)
    if call.max_position is not None:
        checks.positive(op, "max_position", call.max_position)
    elif call.fuse_rope:
        raise refuse(op, "max_position must be given with fuse_rope=True, got None")
    if call.rotary_dim is not None:
        if not call.fuse_rope:
            raise refuse(
                op, f"rotary_dim must be None with fuse_rope=False, got {call.rotary_dim}"
            )
        checks.even_width(op, call.rotary_dim)


def contents_gqa_prefill_paged_fwd(call: Any) -> list[Condition]:
    """The rules behind `validate_inputs`."""
    cu = call.cu_seqlens_q.to(torch.int64)
    old = call.cache_seqlens.to(torch.int64)
    new = cu[1:] - cu[:-1]
    total = old + new
    table = call.block_table
    found = []
    if call.k_pages.dtype == E4M3:
        found.append(contents.positive_scale("k_scale", call.k_scale))
        found.append(contents.positive_scale("v_scale", call.v_scale))
    found += contents.offsets("cu_seqlens_q", cu, call.q.shape[0])
    longest = call.max_seqlen_q
    found.append(
        Condition(
            new <= longest,
            f"cu_seqlens_q must give every request at most max_seqlen_q={longest} new tokens",
            new,
        )
    )
    found.append(contents.non_negative("cache_seqlens", old))
    if call.fuse_rope:
        limit = call.max_position
        found.append(
            Condition(
                total <= limit,
                f"cache_seqlens plus the new tokens must be at most max_position={limit}",
                total,
            )
        )
    found.append(
        Condition(
            total <= table.shape[1] * call.page_size,
            "cache_seqlens plus the new tokens must fit the pages of block_table",
            total,
        )
    )
    # A request without new tokens reads no page.
    used = torch.where(new > 0, total, 0)[:, None]
    first = torch.arange(table.shape[1], device=table.device) * call.page_size
    inside = (table >= 0) & (table < call.k_pages.shape[0] // call.page_size)
    found.append(
        Condition(
            inside | (first >= used), "block_table must name pages of the pool where used", table
        )
    )
    return found
