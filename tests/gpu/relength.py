"""Other lengths in tensors of the same shapes: what changes between replays of one graph.

`relengthened(call)` permutes the requests of a packed or paged call, each with its table, and
shortens some caches. The values of `tests/gpu/test_graphs.py` come from another seed.
"""

from collections.abc import Callable
from typing import Any

import torch

from tests import oracle
from tests.cases import nsa_packing, offsets

CHANGES: dict[str, Callable[[Any, torch.Generator], dict[str, torch.Tensor]]] = {}


def relengthened(call: Any, seed: int) -> Any:
    """A legal call of the same shapes with other lengths; itself where it has none."""
    name = type(call).__name__.removesuffix("_call")
    if name not in CHANGES:
        return call
    changed = CHANGES[name](call, torch.Generator().manual_seed(seed))
    return call._replace(**{n: x.to(call[0].device) for n, x in changed.items()})


def of(fn: Callable[..., dict[str, torch.Tensor]]) -> Callable[..., dict[str, torch.Tensor]]:
    CHANGES[fn.__name__] = fn
    return fn


def lens_of(cu: torch.Tensor) -> list[int]:
    return torch.diff(cu).tolist()


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@of
def gqa_varlen_fwd(call, generator):
    q, kv = lens_of(call.cu_seqlens_q), lens_of(call.cu_seqlens_kv)
    order = torch.randperm(len(q), generator=generator).tolist()
    return {
        "cu_seqlens_q": offsets([q[b] for b in order]),
        "cu_seqlens_kv": offsets([kv[b] for b in order]),
    }


@of
def gqa_paged_fwd(call, generator):
    q, lens = lens_of(call.cu_seqlens_q), oracle.ints(call.cache_seqlens)
    order = torch.randperm(len(q), generator=generator).tolist()
    rotated = call.rope_cos is not None
    shorter = [max(lens[b] - 3, q[b] if rotated else 0, 0) for b in order]
    kept = [min(lens[b], n) for b, n in zip(order, shorter, strict=True)]
    return {
        "cu_seqlens_q": offsets([q[b] for b in order]),
        "cache_seqlens": int32(kept),
        "page_table": call.page_table.cpu()[order],
    }


@of
def gqa_prefill_paged_fwd(call, generator):
    new, old = lens_of(call.cu_seqlens_q), oracle.ints(call.cache_seqlens)
    order = torch.randperm(len(new), generator=generator).tolist()
    return {
        "cu_seqlens_q": offsets([new[b] for b in order]),
        "cache_seqlens": int32([max(old[b] - 3, 0) for b in order]),
        "block_table": call.block_table.cpu()[order],
    }


@of
def mha_decode_paged_fwd(call, generator):
    lens = oracle.ints(call.real_seqlen_kv)
    order = torch.randperm(len(lens), generator=generator).tolist()
    return {
        "real_seqlen_kv": int32([max(lens[b] - 3, 0) for b in order]),
        "block_table": call.block_table.cpu()[order],
    }


def nsa(call, generator):
    lens = lens_of(call.offsets)
    order = torch.randperm(len(lens), generator=generator).tolist()
    bs = getattr(call, "bs", None) or call.block_size
    packing = nsa_packing([lens[n] for n in order], bs)
    return {name: x for name, x in packing.items() if name in call._fields}


CHANGES |= {name: nsa for name in ("nsa_compressed_fwd", "nsa_topk", "nsa_varlen_fwd")}
