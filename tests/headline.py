"""Real shapes of every operator, scaled to a sequence length: for memory and for timing.

`call(name, length)` builds a legal call of a dispatcher operator at the head counts, head dims
and page sizes of a model that uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ops_registry.contract import CONTRACTS, E4M3
from tests.cases import offsets

BF16 = torch.bfloat16
BUILDERS: dict[str, Callable[[int], dict[str, Any]]] = {}


def builder(fn: Callable[[int], dict[str, Any]]) -> Callable[[int], dict[str, Any]]:
    BUILDERS[fn.__name__] = fn
    return fn


def call(name: str, length: int) -> Any:
    """A bound call of operator `name` at this length."""
    return CONTRACTS[name].Call(**BUILDERS[name](length))


def noise(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Unit-scale values, cheap to make at any size."""
    block = torch.randn(min(1 << 16, max(1, torch.Size(shape).numel()))).to(dtype)
    count = torch.Size(shape).numel()
    return block.repeat(-(-count // block.numel()))[:count].reshape(shape)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@builder
def gqa_dense_fwd(s: int) -> dict[str, Any]:
    return {"q": noise(1, s, 32, 128), "k": noise(1, s, 8, 128), "v": noise(1, s, 8, 128)}


@builder
def gqa_dense_bwd(s: int) -> dict[str, Any]:
    tensors = gqa_dense_fwd(s)
    return tensors | {
        "o": noise(1, s, 32, 128),
        "do": noise(1, s, 32, 128),
        "lse": torch.full((1, 32, s), 9.0),
    }


@builder
def gqa_varlen_fwd(s: int) -> dict[str, Any]:
    cu = offsets([s // 2, 0, s // 4, s - s // 2 - s // 4])
    tensors = {"q": noise(s, 32, 128), "k": noise(s, 8, 128), "v": noise(s, 8, 128)}
    return tensors | {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}


@builder
def gqa_varlen_bwd(s: int) -> dict[str, Any]:
    return gqa_varlen_fwd(s) | {
        "o": noise(s, 32, 128),
        "do": noise(s, 32, 128),
        "lse": torch.full((32, s), 9.0),
    }


def page_table(batch: int, length: int, page: int) -> torch.Tensor:
    """Distinct pages in random order."""
    width = -(-length // page)
    return torch.randperm(batch * width).to(torch.int32).reshape(batch, width)


@builder
def gqa_paged_fwd(s: int) -> dict[str, Any]:
    batch, page = 8, 16
    return {
        "q": noise(batch, 32, 128),
        "k_pages": noise(batch * s // page, page, 8, 128),
        "v_pages": noise(batch * s // page, page, 8, 128),
        "page_table": page_table(batch, s, page),
        "cache_seqlens": int32(*[s] * batch),
        "cu_seqlens_q": offsets([1] * batch),
    }


@builder
def gqa_prefill_paged_fwd(s: int) -> dict[str, Any]:
    batch, page, new = 4, 64, s // 8
    return {
        "q": noise(batch * new, 32, 128),
        "k_new": noise(batch * new, 8, 128),
        "v_new": noise(batch * new, 8, 128),
        "k_pages": noise(batch * s, 8, 128),
        "v_pages": noise(batch * s, 8, 128),
        "k_scale": torch.ones(1),
        "v_scale": torch.ones(1),
        "cu_seqlens_q": offsets([new] * batch),
        "cache_seqlens": int32(*[s - new] * batch),
        "block_table": page_table(batch, s, page),
        "page_size": page,
        "max_seqlen_q": new,
    }


@builder
def mha_decode_paged_fwd(s: int) -> dict[str, Any]:
    batch, page = 4, 128
    return {
        "q": noise(batch, 1, 32, 128),
        "k": noise(batch * s, 32, 128),
        "v": noise(batch * s, 32, 128),
        "real_seqlen_kv": int32(*[s] * batch),
        "block_table": page_table(batch, s, page),
        "page_size": page,
    }


@builder
def mla_decode_fwd(s: int) -> dict[str, Any]:
    return {
        "q": noise(16, 128, 512),
        "q_pe": noise(16, 128, 64),
        "k": noise(16, s, 1, 512),
        "k_pe": noise(16, s, 1, 64),
    }


def nsa_metadata(s: int, block: int) -> dict[str, torch.Tensor]:
    rows = torch.stack([torch.zeros(s), torch.arange(s)], 1).to(torch.int32)
    return {
        "offsets": int32(0, s),
        "chunk_offsets": int32(0, -(-s // block)),
        "token_indices": rows,
    }


@builder
def nsa_compressed_fwd(s: int) -> dict[str, Any]:
    chunks = -(-s // 64)
    tensors = {
        "q": noise(s, 64, 128),
        "k_cmp": noise(chunks, 4, 128),
        "v_cmp": noise(chunks, 4, 128),
    }
    return tensors | nsa_metadata(s, 64) | {"scale": 128**-0.5, "bs": 64}


@builder
def nsa_topk(s: int) -> dict[str, Any]:
    tensors = {"q": noise(s, 64, 128), "k_cmp": noise(-(-s // 64), 4, 128)}
    options = {"scale": 128**-0.5, "selected_block_num": 16, "bs": 64}
    return tensors | nsa_metadata(s, 64) | options


@builder
def nsa_varlen_fwd(s: int) -> dict[str, Any]:
    current = torch.arange(s) // 64
    picked = (current[:, None] - torch.arange(16)).to(torch.int32)
    metadata = nsa_metadata(s, 64)
    metadata.pop("chunk_offsets")
    return {
        "q": noise(s, 64, 128),
        "k": noise(s, 4, 128),
        "v": noise(s, 4, 128),
        "block_indices": picked[:, None].expand(s, 4, 16).contiguous(),
        "block_counts": (picked >= 0).sum(-1, dtype=torch.int32)[:, None].repeat(1, 4),
        **metadata,
        "is_causal": True,
        "scale": 128**-0.5,
        "block_size": 64,
    }


@builder
def dsa_decode_fwd(s: int) -> dict[str, Any]:
    # A sixteenth of the prefill row's queries: the whole row is minutes on a CPU.
    queries, picks = s // 16, min(2048, s)
    return {
        "q": noise(1, queries, 128, 576),
        "kv": noise(1, s, 1, 576),
        "indices": torch.randint(0, s, (1, queries, 1, picks), dtype=torch.int32),
        "dim_tail": 64,
        "stride_kv": 1,
        "q_start_index_s": s - queries,
    }


@builder
def fp8_lightning_indexer(s: int) -> dict[str, Any]:
    return {
        "index_q": noise(1, s, 64, 128).to(E4M3),
        "index_k": noise(1, s, 1, 128).to(E4M3),
        "weights": torch.randn(s, 64),
        "cu_seqlen_ks": torch.zeros(s, dtype=torch.int32),
        "cu_seqlen_ke": torch.arange(1, s + 1, dtype=torch.int32),
        "index_k_scale": torch.ones(1, s, 1),
    }


@builder
def paged_kv_cache_write(s: int) -> dict[str, Any]:
    pages = 2 * s // 16
    return {
        "k": noise(s, 8, 128),
        "v": noise(s, 8, 128),
        "k_pages": noise(pages, 16, 8, 128),
        "v_pages": noise(pages, 16, 8, 128),
        "slot_mapping": torch.randperm(16 * pages)[:s],
    }
