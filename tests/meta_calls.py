"""Calls of every operator at the heads, dims and options of real models, on meta tensors.

They hold no data, so that a launcher can be recorded at full size on any machine
(`tileops.kernels.common.recorder.recording`). `CALLS[name]` lists (variant, call) of a dispatcher
operator, the plainest call first.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

import tileops  # noqa: F401  registers the operators
from ops_registry.contract import CONTRACTS, E4M3

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
I32, I64 = torch.int32, torch.int64
S = 4096
CAUSAL_WINDOW = {"window_size_left": 127}
GEMMA = {"window_size_left": 4095, "softcap": 50.0, "sm_scale": 1 / 16}
ROPE = {"pos_encoding_mode": "rope"}

CALLS: dict[str, list[tuple[str, Any]]] = {}


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def add(name: str, variant: str, **arguments: Any) -> None:
    CALLS.setdefault(name, []).append((variant, CONTRACTS[name].Call(**arguments)))


def scales(batch: int, heads_kv: int, *names: str) -> dict[str, torch.Tensor]:
    return {name: meta(batch, heads_kv, dtype=F32) for name in names}


def tables(rows: int, dim: int, dtype: torch.dtype = BF16) -> dict[str, torch.Tensor]:
    return {name: meta(rows, dim // 2, dtype=dtype) for name in ("rope_cos", "rope_sin")}


def dense(variant, s_q=S, heads=32, heads_kv=8, dim=128, dtype=BF16, **options):
    batch = 2
    kv = meta(batch, S, heads_kv, dim, dtype=dtype)
    if dtype == E4M3:
        options |= scales(batch, heads_kv, "q_scale", "k_scale", "v_scale")
    add(
        "gqa_dense_fwd",
        variant,
        q=meta(batch, s_q, heads, dim, dtype=dtype),
        k=kv,
        v=kv,
        **options,
    )


def dense_backward(variant, heads=32, heads_kv=8, dim=128, dtype=BF16, **options):
    q, kv = meta(2, S, heads, dim, dtype=dtype), meta(2, S, heads_kv, dim, dtype=dtype)
    lse = meta(2, heads, S, dtype=F32)
    add("gqa_dense_bwd", variant, q=q, k=kv, v=kv, o=q, do=q, lse=lse, **options)


def varlen(variant, heads=32, heads_kv=8, dim=128, dtype=BF16, batch=4, **options):
    kv, cu = meta(S, heads_kv, dim, dtype=dtype), meta(batch + 1, dtype=I32)
    if dtype == E4M3:
        options |= scales(batch, heads_kv, "q_scale", "k_scale", "v_scale")
    q = meta(S, heads, dim, dtype=dtype)
    tensors = {"q": q, "k": kv, "v": kv, "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    add("gqa_varlen_fwd", variant, **tensors, **options)


def varlen_backward(variant, heads=32, heads_kv=8, dim=128, dtype=BF16, **options):
    q, kv, cu = (
        meta(S, heads, dim, dtype=dtype),
        meta(S, heads_kv, dim, dtype=dtype),
        meta(5, dtype=I32),
    )
    tensors = {"q": q, "k": kv, "v": kv, "cu_seqlens_q": cu, "cu_seqlens_kv": cu, "o": q, "do": q}
    add("gqa_varlen_bwd", variant, **tensors, lse=meta(heads, S, dtype=F32), **options)


def paged(
    variant, tokens, heads=32, heads_kv=8, dim=128, page=16, dtype=BF16, pool=None, **options
):
    batch = 8
    pages = meta(batch * S // page, page, heads_kv, dim, dtype=pool or dtype)
    if dtype == E4M3:
        options |= scales(batch, heads_kv, "q_scale")
    if pool == E4M3:
        options |= scales(batch, heads_kv, "k_scale", "v_scale")
    add(
        "gqa_paged_fwd",
        variant,
        q=meta(tokens, heads, dim, dtype=dtype),
        k_pages=pages,
        v_pages=pages,
        page_table=meta(batch, S // page, dtype=I32),
        cache_seqlens=meta(batch, dtype=I32),
        cu_seqlens_q=meta(batch + 1, dtype=I32),
        **options,
    )


def prefill(
    variant, heads=32, heads_kv=8, dim=128, page=64, dtype=BF16, tokens=8 * 512, **options
):
    batch = 8
    new = meta(tokens, heads_kv, dim, dtype=dtype)
    pool = meta(batch * S, heads_kv, dim, dtype=options.get("cache_dtype") or dtype)
    one = meta(1, dtype=F32)
    add(
        "gqa_prefill_paged_fwd",
        variant,
        q=meta(tokens, heads, dim, dtype=dtype),
        k_new=new,
        v_new=new,
        k_pages=pool,
        v_pages=pool,
        k_scale=one,
        v_scale=one,
        cu_seqlens_q=meta(batch + 1, dtype=I32),
        cache_seqlens=meta(batch, dtype=I32),
        block_table=meta(batch, S // page, dtype=I32),
        page_size=page,
        max_seqlen_q=512,
        **options,
    )


def mha(variant, queries=1, heads=32, dim=128, page=128, dtype=F16, **options):
    batch = 16
    pool = meta(batch * S, heads, dim, dtype=dtype)
    add(
        "mha_decode_paged_fwd",
        variant,
        q=meta(batch, queries, heads, dim, dtype=dtype),
        k=pool,
        v=pool,
        real_seqlen_kv=meta(batch, dtype=I32),
        block_table=meta(batch, S // page, dtype=I32),
        page_size=page,
        **options,
    )


def mla(variant, batch=16, heads=128, rotary=64):
    add(
        "mla_decode_fwd",
        variant,
        q=meta(batch, heads, 512),
        q_pe=meta(batch, heads, rotary),
        k=meta(batch, S, 1, 512),
        k_pe=meta(batch, S, 1, rotary),
    )


def nsa(variant, requests=8, heads=64, heads_kv=4, dim=128, block=64, dtype=BF16):
    chunks = S // block
    q, kv = meta(S, heads, dim, dtype=dtype), meta(S, heads_kv, dim, dtype=dtype)
    cu, tokens = meta(requests + 1, dtype=I32), meta(S, 2, dtype=I32)
    compressed = meta(chunks, heads_kv, dim, dtype=dtype)
    packing = {"offsets": cu, "chunk_offsets": cu, "token_indices": tokens}
    scale, slots = dim**-0.5, 16
    add(
        "nsa_compressed_fwd",
        variant,
        q=q,
        k_cmp=compressed,
        v_cmp=compressed,
        **packing,
        scale=scale,
        bs=block,
    )
    add(
        "nsa_topk",
        variant,
        q=q,
        k_cmp=compressed,
        **packing,
        scale=scale,
        selected_block_num=slots,
        bs=block,
    )
    add(
        "nsa_varlen_fwd",
        variant,
        q=q,
        k=kv,
        v=kv,
        block_indices=meta(S, heads_kv, slots, dtype=I32),
        block_counts=meta(S, heads_kv, dtype=I32),
        offsets=cu,
        token_indices=tokens,
        is_causal=True,
        scale=scale,
        block_size=block,
    )


def dsa(variant, queries=S, batch=1, heads=128, slots=2048, **options):
    add(
        "dsa_decode_fwd",
        variant,
        q=meta(batch, queries, heads, 576),
        kv=meta(batch, 8 * S, 1, 576),
        indices=meta(batch, queries, 1, slots, dtype=I32),
        dim_tail=64,
        stride_kv=1,
        q_start_index_s=7 * S,
        **options,
    )


def indexer(variant, queries=S, heads=64, dim=128, dtype=E4M3, **options):
    keys = 8 * S
    if dtype == E4M3:
        options["index_k_scale"] = meta(1, keys, 1, dtype=F32)
    add(
        "fp8_lightning_indexer",
        variant,
        index_q=meta(1, queries, heads, dim, dtype=dtype),
        index_k=meta(1, keys, 1, dim, dtype=dtype),
        weights=meta(queries, heads, dtype=F32),
        cu_seqlen_ks=meta(queries, dtype=I32),
        cu_seqlen_ke=meta(queries, dtype=I32),
        **options,
    )


def write(variant, tokens=S, heads_kv=8, dim=128, page=16, dtype=BF16, pool=None):
    rows, pages = (
        meta(tokens, heads_kv, dim, dtype=dtype),
        meta(S, page, heads_kv, dim, dtype=pool or dtype),
    )
    one = meta(1, dtype=F32) if pool == E4M3 else None
    tensors = {
        "k": rows,
        "v": rows,
        "k_pages": pages,
        "v_pages": pages,
        "k_scale": one,
        "v_scale": one,
    }
    add("paged_kv_cache_write", variant, **tensors, slot_mapping=meta(tokens, dtype=I64))


dense("causal")
dense("d64", heads=64, dim=64)
dense("d256", heads=16, dim=256, **GEMMA)
dense("decode", s_q=1, dtype=F16)
dense("rope", **tables(S, 128), **ROPE)
dense("e4m3", dtype=E4M3, out_dtype=BF16)
dense("full", dtype=F16, is_causal=False)

dense_backward("causal")
dense_backward("d64", heads=64, dim=64)
dense_backward("d256", heads=16, dim=256, **GEMMA)
dense_backward("rope", **tables(S, 128), **ROPE)

sinks = {"sinks": meta(64, dtype=F32)}
varlen("causal")
varlen("d64-window-sinks", heads=64, dim=64, **CAUSAL_WINDOW, **sinks)
varlen("rope", heads=64, **tables(S, 128), **ROPE)
varlen("e4m3", dtype=E4M3, out_dtype=BF16)

varlen_backward("causal")
varlen_backward("d64-window-sinks", heads=64, dim=64, **CAUSAL_WINDOW, **sinks)

paged("decode", 8)
paged("mixed", 8 + 1023)
paged("d64-window-sinks", 8, heads=64, dim=64, **CAUSAL_WINDOW, **sinks)
paged("rope-chunk", 8 * 512, page=64, **tables(S, 128), **ROPE)
paged("rope-decode", 8, heads=128, page=64, **tables(S, 128), **ROPE)
paged("e4m3-pool", 8, pool=E4M3)
paged("e4m3", 8 * 512, dtype=E4M3, pool=E4M3, out_dtype=BF16)

prefill("fp16", dtype=F16)
prefill("rope", heads_kv=4, fuse_rope=True, rope_base=1e6, max_position=33792)
prefill("d256-softcap", heads=16, dim=256, softcap=50.0, sm_scale=1 / 16)
prefill("e4m3-pool", dtype=F16, cache_dtype=E4M3)
prefill("e4m3-pool-decode", tokens=8, heads=24, cache_dtype=E4M3)
prefill("e4m3-pool-speculation", tokens=32, heads=96, dim=112, page=16, cache_dtype=E4M3)

mha("d128")
mha("d256", heads=16, dim=256, page=64, dtype=BF16)
mha("d64", dim=64)
mha("causal", queries=4, is_causal=True)

mla("h128")
mla("h16", heads=16)
mla("no-rotary", rotary=0)

nsa("h64")
nsa("fp16-block32", heads=32, heads_kv=2, block=32, dtype=F16)
nsa("d64", heads=32, heads_kv=2, dim=64, block=32)
nsa("long-d64", requests=1, heads=32, heads_kv=2, dim=64, block=32)

dsa("prefill")
dsa("decode", queries=1, batch=64)
dsa("h16", queries=2048, heads=16)

indexer("e4m3")
indexer("decode", queries=1)
indexer("bf16", heads=32, dim=64, dtype=BF16)

write("bf16")
write("e4m3", heads_kv=4, pool=E4M3)
write("d64", tokens=4 * S, dim=64)
write("fp16-d256", dim=256, page=64, dtype=F16)


def every_call() -> list[tuple[str, str, Any]]:
    """(operator, variant, call), the operators in order of definition."""
    found = ((name, *pair) for name in CONTRACTS for pair in CALLS.get(name, ()))
    return list(itertools.chain(found))
