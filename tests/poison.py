"""Calls whose unread memory holds NaN: stale pool rows, padding, rows that nothing selects.

`poisoned(call)` is a legal call with the same answer. Written by reading the lengths, tables and
ids of a call, operator by operator.
"""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

from ops_registry.contract import E4M3
from tests import oracle

NAN_BYTE = 0x7F  # NaN of float8_e4m3fn, a finite 16-bit value elsewhere

POISON: dict[str, Callable[[Any], dict[str, torch.Tensor]]] = {}


def poisoned(call: Any) -> Any:
    """The call with NaN wherever its answer does not depend on the value."""
    name = type(call).__name__.removesuffix("_call")
    changed = POISON[name](call) if name in POISON else {}
    return call._replace(**changed)


def of(fn: Callable[[Any], dict[str, torch.Tensor]]) -> Callable[[Any], dict[str, torch.Tensor]]:
    POISON[fn.__name__] = fn
    return fn


@contextmanager
def memory():
    """Fresh memory holds NaN, integers their largest value: what a kernel leaves out shows."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def outside(x: torch.Tensor, used: Any, axis: int = 0) -> torch.Tensor:
    """A copy of x with NaN in the rows of `axis` that `used` does not name."""
    kept = torch.zeros(x.shape[axis], dtype=torch.bool)
    kept[torch.as_tensor(list(used), dtype=torch.int64)] = True
    shape = [-1 if i == axis else 1 for i in range(x.dim())]
    kept = kept.to(x.device).view(shape).expand_as(x)
    if x.dtype == E4M3:
        stale = x.view(torch.uint8).masked_fill(~kept, NAN_BYTE)
        return stale.view(E4M3)
    return torch.where(kept, x, torch.full_like(x, torch.nan))


def tables(call: Any, longest: int) -> dict[str, torch.Tensor]:
    """Rotary tables with NaN past the longest request."""
    if call.rope_cos is None:
        return {}
    names = ("rope_cos", "rope_sin")
    return {name: outside(getattr(call, name), range(longest)) for name in names}


def pool_rows(table: torch.Tensor, lens: list[int], page_size: int) -> list[int]:
    return [
        row
        for b, length in enumerate(lens)
        for row in oracle.physical_rows(table[b], length, page_size)
    ]


@of
def gqa_dense_fwd(call):
    return tables(call, call.k.shape[1])


@of
def gqa_dense_bwd(call):
    return tables(call, call.k.shape[1])


def packed(call):
    """Rows of packed tensors past the last offsets, and the tables."""
    ends = call.cu_seqlens_q, call.cu_seqlens_kv
    q_end, kv_end = (oracle.ints(x)[-1] for x in ends)
    lens = [torch.diff(x).max().item() if len(x) > 1 else 0 for x in ends]
    return {
        "q": outside(call.q, range(q_end)),
        "k": outside(call.k, range(kv_end)),
        "v": outside(call.v, range(kv_end)),
        **tables(call, max(lens)),
    }


@of
def gqa_varlen_fwd(call):
    return packed(call)


@of
def gqa_varlen_bwd(call):
    end = oracle.ints(call.cu_seqlens_q)[-1]
    return packed(call) | {
        "o": outside(call.o, range(end)),
        "do": outside(call.do, range(end)),
        "lse": outside(call.lse, range(end), axis=1),
    }


@of
def gqa_paged_fwd(call):
    """A request without queries is not read; nor is anything past a length."""
    cu, lens = oracle.ints(call.cu_seqlens_q), oracle.ints(call.cache_seqlens)
    read = [n if cu[b] < cu[b + 1] else 0 for b, n in enumerate(lens)]
    pages, page_size = call.k_pages.shape[:2]
    used = pool_rows(call.page_table, read, page_size)

    def pool(x):
        return outside(x.flatten(0, 1), used).view(x.shape)

    return {
        "q": outside(call.q, range(cu[-1])),
        "k_pages": pool(call.k_pages),
        "v_pages": pool(call.v_pages),
        **tables(call, max(read, default=0)),
    }


@of
def gqa_prefill_paged_fwd(call):
    """What an append overwrites is stale before it; padding rows of the new tokens too."""
    cu, old = oracle.ints(call.cu_seqlens_q), oracle.ints(call.cache_seqlens)
    read = [n if cu[b] < cu[b + 1] else 0 for b, n in enumerate(old)]
    used = pool_rows(call.block_table, read, call.page_size)
    rows = range(cu[-1])
    return {
        **{name: outside(getattr(call, name), rows) for name in ("q", "k_new", "v_new")},
        "k_pages": outside(call.k_pages, used),
        "v_pages": outside(call.v_pages, used),
    }


@of
def mha_decode_paged_fwd(call):
    used = pool_rows(call.block_table, oracle.ints(call.real_seqlen_kv), call.page_size)
    return {"k": outside(call.k, used), "v": outside(call.v, used)}


def closed(call):
    """The compressed rows whose chunk is whole: the others are never read."""
    starts, rows = oracle.ints(call.chunk_offsets), []
    for n, (begin, end) in oracle.nsa_requests(call.offsets):
        rows += range(starts[n], starts[n] + (end - begin) // call.bs)
    return rows


@of
def nsa_compressed_fwd(call):
    used = closed(call)
    return {"k_cmp": outside(call.k_cmp, used), "v_cmp": outside(call.v_cmp, used)}


@of
def nsa_topk(call):
    return {"k_cmp": outside(call.k_cmp, closed(call))}


@of
def dsa_decode_fwd(call):
    """Cache rows that no live slot of their request and head names."""
    ids = call.indices.to(torch.int64)
    rows = call.kv.shape[1]
    position = call.q_start_index_s + torch.arange(ids.shape[1], device=ids.device)
    live = (ids >= 0) & (ids < rows)
    if call.is_causal:
        live &= (ids + 1) * call.stride_kv - 1 <= position[None, :, None, None]
    b, _, g, _ = live.nonzero(as_tuple=True)
    used = torch.zeros(call.kv.shape[:3], dtype=torch.bool, device=ids.device)
    used[b, ids[live], g] = True
    return {"kv": call.kv.masked_fill(~used[..., None], torch.nan)}


@of
def fp8_lightning_indexer(call):
    """Keys that no window holds."""
    rows = call.index_k.shape[1]
    windows = zip(oracle.ints(call.cu_seqlen_ks), oracle.ints(call.cu_seqlen_ke), strict=True)
    used = {t for begin, end in windows for t in range(max(begin, 0), min(end, rows))}
    found = {"index_k": outside(call.index_k, used, axis=1)}
    if call.index_k_scale is not None:
        found["index_k_scale"] = outside(call.index_k_scale, used, axis=1)
    return found


@of
def paged_kv_cache_write(call):
    """Rows that are skipped, and every row of the pools."""
    kept = [n for n, slot in enumerate(oracle.ints(call.slot_mapping)) if slot >= 0]

    def pool(x):
        return outside(x, ())

    return {
        "k": outside(call.k, kept),
        "v": outside(call.v, kept),
        "k_pages": pool(call.k_pages),
        "v_pages": pool(call.v_pages),
    }
