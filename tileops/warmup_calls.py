"""A small legal call of every operator at the shape of a model, for `tileops.warmup`.

`RECIPES[op]` says which settings of a model decide what is compiled for the operator, and builds
the arguments of calls that launch every kernel that calls of any length launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch

from ops_registry.contract import E4M3

KEYS = 1024  # enough for a machine with idle multiprocessors to split them
# Of a prefill: more rows than the tiles of a decode serve, and too few keys for several parts.
TOKENS = 496
CHUNK = {64: 192}  # tokens of a chunk whose keys are split, by head dim: a tile of them
SHORT = 64  # keys of a latent row, or slots, too few for several parts
SPLIT_ROWS = 1024  # query rows from which a backward splits its walk over them


class Maker:
    """Tensors of zeros on one device: no value decides a compilation, and zeros are legal."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = device

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def ints(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def ones(self, *shape: int) -> torch.Tensor:
        return torch.ones(shape, device=self.device)

    def heads(
        self, *lead: int, heads: Sequence[int], s: SimpleNamespace
    ) -> tuple[torch.Tensor, ...]:
        """Tensors [*lead, heads, D], in the layout that is asked for."""
        if s.layout == "fused":
            rows = self.zeros(*lead, sum(heads), s.head_dim, dtype=s.dtype)
            return rows.split(list(heads), dim=-2)
        return tuple(self.zeros(*lead, h, s.head_dim, dtype=s.dtype) for h in heads)

    def qkv(self, *lead: int, s: SimpleNamespace) -> tuple[torch.Tensor, ...]:
        return self.heads(*lead, heads=(s.heads, s.heads_kv, s.heads_kv), s=s)

    def parts(self, *lead: int, s: SimpleNamespace) -> tuple[torch.Tensor, ...]:
        """The columns of the values and those besides them, in the layout asked for."""
        widths = [s.head_dim, s.dim_tail]
        if s.layout == "fused":
            return self.zeros(*lead, sum(widths), dtype=s.dtype).split(widths, dim=-1)
        return tuple(self.zeros(*lead, width, dtype=s.dtype) for width in widths)


Arguments: TypeAlias = dict[str, Any]
Build: TypeAlias = Callable[[SimpleNamespace, Maker, str], Arguments]


@dataclass(frozen=True)
class Recipe:
    """How calls of one operator are made.

    build: `(settings, maker, phase) -> arguments of the dispatcher operator`.
    phases: the calls that launch different kernels.
    fused_phases: further ones where q, k and v are slices of one projection.
    defaults: the settings it has, at the shape of a model that uses it.
    """

    build: Build
    phases: tuple[str, ...]
    fused_phases: tuple[str, ...]
    defaults: Mapping[str, Any]

    def phases_in(self, layout: str) -> tuple[str, ...]:
        return self.phases + (self.fused_phases if layout == "fused" else ())


RECIPES: dict[str, Recipe] = {}
ONE, BOTH = ("call",), ("decode", "prefill")
# Without a mask, dense requests of one token have a kernel of their own.
SEVERAL = ("decode", "several tokens", "prefill")
# A prefill that splits its keys has a kernel of its own.
DENSE = (*SEVERAL, "short chunk")
# Latent rows that are split, and those that are not, have a kernel of their own.
LATENT_ROWS = ("long rows", "short rows")
# Keys of the projection, or of a cache; a single row of a projection is a tensor of its own.
PROMPTS, SINGLE = ("short prompt", "chunk"), ("decode of one request",)
MODEL: Arguments = {"heads": 32, "heads_kv": 8, "head_dim": 128, "dtype": torch.bfloat16}
NSA: Arguments = MODEL | {"heads": 64, "heads_kv": 4, "block_size": 64}
LATENT: Arguments = MODEL | {"heads": 128, "heads_kv": 1, "head_dim": 512, "dim_tail": 64}
CACHE: Arguments = {"cache_dtype": None, "page_size": 16}
SCORES: Arguments = {
    "is_causal": True,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": None,
}
ROPE: Arguments = {"rope": "none", "rotary_dim": None}


def recipe(
    name: str, phases: tuple[str, ...], defaults: Arguments, fused: tuple[str, ...] = ()
) -> Callable[[Build], Build]:
    def keep(build: Build) -> Build:
        RECIPES[name] = Recipe(build, phases, fused, defaults | {"layout": "separate"})
        return build

    return keep


def output_dtype(s: SimpleNamespace) -> torch.dtype | None:
    return s.out_dtype or (torch.bfloat16 if s.dtype == E4M3 else None)


def scores(s: SimpleNamespace) -> Arguments:
    return {name: getattr(s, name) for name in SCORES}


def rotation(s: SimpleNamespace, make: Maker, out_dtype: torch.dtype) -> Arguments:
    """The tables of a fused rotary embedding, and its options."""
    if s.rope == "none":
        return {"rotary_dim": s.rotary_dim}
    half = (s.rotary_dim or s.head_dim) // 2
    cos, sin = (make.zeros(KEYS, half, dtype=out_dtype) for _ in range(2))
    options = {"pos_encoding_mode": "rope", "rotary_dim": s.rotary_dim, "rope_layout": s.rope}
    return {"rope_cos": cos, "rope_sin": sin, **options}


def scales(s: SimpleNamespace, make: Maker, *names: str, batch: int = 1) -> Arguments:
    """Scales by request and head of float8_e4m3fn tensors."""
    return {n: make.ones(batch, s.heads_kv) for n in names} if s.dtype == E4M3 else {}


def tokens_of(s: SimpleNamespace, phase: str) -> int:
    """Of a request."""
    if phase == "short chunk":
        return min(CHUNK.get(s.head_dim, 128), KEYS)
    if phase in ("prefill", "chunk"):
        return TOKENS
    return 2 if phase in ("short prompt", "several tokens") else 1


def queries_and_keys(
    s: SimpleNamespace, make: Maker, phase: str, *lead: int
) -> tuple[torch.Tensor, ...]:
    """q, k and v [*lead, tokens, heads, D]; in prompts k and v are of a projection, like q."""
    q, k, v = make.qkv(*lead, tokens_of(s, phase), s=s)
    if phase not in ("prefill", "short prompt"):
        k, v = (make.zeros(*lead, KEYS, s.heads_kv, s.head_dim, dtype=s.dtype) for _ in "kv")
    return q, k, v


def batch_of(s: SimpleNamespace, phase: str) -> int:
    """Of dense queries: rows of one request and token have no stride that tells their layout."""
    return 2 if s.layout == "fused" and phase == "decode" else 1


@recipe("gqa_dense_fwd", DENSE, MODEL | SCORES | ROPE | {"out_dtype": None}, PROMPTS + SINGLE)
def gqa_dense_fwd(s: SimpleNamespace, make: Maker, phase: str) -> Arguments:
    batch = batch_of(s, phase)
    q, k, v = queries_and_keys(s, make, phase, batch)
    out = output_dtype(s)
    return {
        **{"q": q, "k": k, "v": v, "out_dtype": out},
        **scales(s, make, "q_scale", "k_scale", "v_scale", batch=batch),
        **scores(s),
        **rotation(s, make, out or s.dtype),
    }


def backward_tokens(s: SimpleNamespace) -> int:
    """The fewest tokens whose gradients are added up from parts, where those of any length are."""
    return -(-SPLIT_ROWS // max(s.heads // s.heads_kv, 1))


@recipe("gqa_dense_bwd", ONE, MODEL | SCORES | ROPE)
def gqa_dense_bwd(s: SimpleNamespace, make: Maker, phase: str) -> Arguments:
    tokens = backward_tokens(s)
    q, k, v = make.qkv(1, tokens, s=s)
    o = make.zeros(1, tokens, s.heads, s.head_dim, dtype=s.dtype)
    lse = make.zeros(1, s.heads, tokens, dtype=torch.float32)
    tensors = {"q": q, "k": k, "v": v, "o": o, "do": o, "lse": lse}
    return {**tensors, **scores(s), **rotation(s, make, s.dtype)}


@recipe(
    "gqa_varlen_fwd",
    BOTH,
    MODEL | SCORES | ROPE | {"sinks": False, "out_dtype": None},
    PROMPTS,
)
def gqa_varlen_fwd(s: SimpleNamespace, make: Maker, phase: str) -> Arguments:
    q, k, v = queries_and_keys(s, make, phase)
    out = output_dtype(s)
    return {
        **{"q": q, "k": k, "v": v, "out_dtype": out},
        **{"cu_seqlens_q": make.ints(0, len(q)), "cu_seqlens_kv": make.ints(0, len(k))},
        **scales(s, make, "q_scale", "k_scale", "v_scale"),
        **scores(s),
        **rotation(s, make, out or s.dtype),
        **sinks(s, make),
    }


def sinks(s: SimpleNamespace, make: Maker) -> Arguments:
    return {"sinks": make.zeros(s.heads, dtype=torch.float32)} if s.sinks else {}


@recipe("gqa_varlen_bwd", ONE, MODEL | SCORES | ROPE | {"sinks": False})
def gqa_varlen_bwd(s: SimpleNamespace, make: Maker, phase: str) -> Arguments:
    tokens = backward_tokens(s)
    q, k, v = make.qkv(tokens, s=s)
    o = make.zeros(tokens, s.heads, s.head_dim, dtype=s.dtype)
    lse = make.zeros(s.heads, tokens, dtype=torch.float32)
    offsets = make.ints(0, tokens)
    return {
        **{"q": q, "k": k, "v": v, "cu_seqlens_q": offsets, "cu_seqlens_kv": offsets},
        **{"o": o, "do": o, "lse": lse},
        **scores(s),
        **rotation(s, make, s.dtype),
        **sinks(s, make),
    }


def pools(s: SimpleNamespace, make: Maker, *shape: int, dtype: torch.dtype) -> Arguments:
    """Two pools of one page, which every entry of a table may name."""
    rows = (*shape, s.heads_kv, s.head_dim)
    return {name: make.zeros(*rows, dtype=dtype) for name in ("k_pages", "v_pages")}


def table(s: SimpleNamespace, make: Maker, tokens: int) -> torch.Tensor:
    return make.zeros(1, -(-tokens // s.page_size), dtype=torch.int32)


@recipe(
    "gqa_paged_fwd",
    BOTH,
    MODEL | CACHE | SCORES | ROPE | {"sinks": False, "out_dtype": None, "kv_scales": "tensor"},
)
def gqa_paged_fwd(s: SimpleNamespace, make: Maker, phase: str) -> Arguments:
    tokens = 1 if phase == "decode" else TOKENS
    out, cache = output_dtype(s), s.cache_dtype or s.dtype
    scale = make.ones(1) if s.kv_scales == "tensor" else make.ones(1, s.heads_kv)
    return {
        "q": make.qkv(tokens, s=s)[0],
        **pools(s, make, 1, s.page_size, dtype=cache),
        "page_table": table(s, make, KEYS),
        "cache_seqlens": make.ints(KEYS),
        "cu_seqlens_q": make.ints(0, tokens),
        "out_dtype": out,
        **scales(s, make, "q_scale"),
        **({"k_scale": scale, "v_scale": scale} if cache == E4M3 else {}),
        **scores(s),
        **rotation(s, make, out or s.dtype),
        **sinks(s, make),
    }


@recipe(
    "gqa_prefill_paged_fwd",
    BOTH,
    MODEL | CACHE | ROPE | {"rope_base": 1e4, "is_causal": True, "softcap": None},
)
def gqa_prefill_paged_fwd(s: SimpleNamespace, make: Maker, phase: str) -> Arguments:
    tokens = 1 if phase == "decode" else TOKENS
    if s.rope == "interleaved":
        raise ValueError("gqa_prefill_paged_fwd: --rope must be none or neox, got interleaved")
    q, k, v = make.qkv(tokens, s=s)
    one = make.ones(1)
    return {
        **{"q": q, "k_new": k, "v_new": v, "k_scale": one, "v_scale": one},
        **pools(s, make, s.page_size, dtype=s.cache_dtype or s.dtype),
        "cu_seqlens_q": make.ints(0, tokens),
        "cache_seqlens": make.ints(KEYS),
        "block_table": table(s, make, KEYS + tokens),
        "max_seqlen_q": tokens,
        **{x: getattr(s, x) for x in ("page_size", "is_causal", "cache_dtype", "softcap")},
        **{"fuse_rope": s.rope == "neox", "rotary_dim": s.rotary_dim},
        **{"rope_base": s.rope_base, "max_position": KEYS + tokens},
    }


@recipe(
    "mha_decode_paged_fwd",
    SEVERAL,
    {x: MODEL[x] for x in ("heads", "head_dim", "dtype")} | {"page_size": 64, "is_causal": False},
    SINGLE,
)
def mha_decode_paged_fwd(s: SimpleNamespace, make: Maker, phase: str) -> Arguments:
    batch, queries = batch_of(s, phase), tokens_of(s, phase)
    k, v = (make.zeros(s.page_size, s.heads, s.head_dim, dtype=s.dtype) for _ in "kv")
    return {
        "q": make.heads(batch, queries, heads=[s.heads] * 3, s=s)[0],
        **{"k": k, "v": v},
        "real_seqlen_kv": make.ints(*[KEYS] * batch),
        "block_table": table(s, make, KEYS).expand(batch, -1).contiguous(),
        "page_size": s.page_size,
        "is_causal": s.is_causal,
    }


def latent_keys(phase: str) -> int:
    return SHORT if phase == "short rows" else KEYS


@recipe("mla_decode_fwd", LATENT_ROWS, LATENT)
def mla_decode_fwd(s: SimpleNamespace, make: Maker, phase: str) -> Arguments:
    q, q_pe = make.parts(1, s.heads, s=s)
    k, k_pe = make.parts(1, latent_keys(phase), s.heads_kv, s=s)
    return {"q": q, "q_pe": q_pe, "k": k, "k_pe": k_pe}


@recipe("dsa_decode_fwd", LATENT_ROWS, LATENT | {"is_causal": True})
def dsa_decode_fwd(s: SimpleNamespace, make: Maker, phase: str) -> Arguments:
    width, keys = s.head_dim + s.dim_tail, latent_keys(phase)
    return {
        "q": make.zeros(1, 1, s.heads, width, dtype=s.dtype),
        "kv": make.zeros(1, keys, s.heads_kv, width, dtype=s.dtype),
        "indices": make.zeros(1, 1, s.heads_kv, keys, dtype=torch.int32),
        "dim_tail": s.dim_tail,
        "stride_kv": 1,
        "q_start_index_s": keys - 1,
        "is_causal": s.is_causal,
    }


def packing(make: Maker, block: int) -> Arguments:
    """One request of TOKENS tokens."""
    return {
        "offsets": make.ints(0, TOKENS),
        "chunk_offsets": make.ints(0, -(-TOKENS // block)),
        "token_indices": make.zeros(TOKENS, 2, dtype=torch.int32),
    }


def chunks(s: SimpleNamespace, make: Maker) -> tuple[torch.Tensor, ...]:
    """Queries, and compressed keys and values."""
    count = -(-TOKENS // s.block_size)
    k, v = (make.zeros(count, s.heads_kv, s.head_dim, dtype=s.dtype) for _ in "kv")
    return make.qkv(TOKENS, s=s)[0], k, v


@recipe("nsa_compressed_fwd", ONE, NSA)
def nsa_compressed_fwd(s: SimpleNamespace, make: Maker, phase: str) -> Arguments:
    q, k, v = chunks(s, make)
    tensors = {"q": q, "k_cmp": k, "v_cmp": v, **packing(make, s.block_size)}
    return tensors | {"scale": s.head_dim**-0.5, "bs": s.block_size}


@recipe("nsa_topk", ONE, NSA | {"selected_block_num": 16})
def nsa_topk(s: SimpleNamespace, make: Maker, phase: str) -> Arguments:
    q, k, _ = chunks(s, make)
    options = {"selected_block_num": s.selected_block_num, "bs": s.block_size}
    tensors = {"q": q, "k_cmp": k, **packing(make, s.block_size)}
    return tensors | {"scale": s.head_dim**-0.5} | options


@recipe("nsa_varlen_fwd", ONE, NSA | {"selected_block_num": 16, "is_causal": True})
def nsa_varlen_fwd(s: SimpleNamespace, make: Maker, phase: str) -> Arguments:
    q, k, v = make.qkv(TOKENS, s=s)
    tensors = packing(make, s.block_size)
    del tensors["chunk_offsets"]
    selected = (TOKENS, s.heads_kv, s.selected_block_num)
    return {
        **{"q": q, "k": k, "v": v, **tensors},
        "block_indices": make.zeros(*selected, dtype=torch.int32),
        "block_counts": make.zeros(*selected[:2], dtype=torch.int32),
        **{"is_causal": s.is_causal, "scale": s.head_dim**-0.5, "block_size": s.block_size},
    }


@recipe(
    "fp8_lightning_indexer",
    ONE,
    MODEL | {"heads": 64, "heads_kv": 1, "dtype": E4M3, "clean_logits": True},
)
def fp8_lightning_indexer(s: SimpleNamespace, make: Maker, phase: str) -> Arguments:
    queries, keys = 16, KEYS
    q, k = make.heads(1, queries, heads=(s.heads, s.heads_kv), s=s)
    if s.layout == "separate":
        k = make.zeros(1, keys, s.heads_kv, s.head_dim, dtype=s.dtype)
    keys = k.shape[1]
    return {
        **{"index_q": q, "index_k": k},
        "weights": make.zeros(queries, s.heads, dtype=torch.float32),
        "cu_seqlen_ks": make.zeros(queries, dtype=torch.int32),
        "cu_seqlen_ke": make.zeros(queries, dtype=torch.int32),
        "index_k_scale": make.ones(1, keys, s.heads_kv) if s.dtype == E4M3 else None,
        "clean_logits": s.clean_logits,
    }


@recipe("paged_kv_cache_write", ONE, MODEL | CACHE)
def paged_kv_cache_write(s: SimpleNamespace, make: Maker, phase: str) -> Arguments:
    tokens, cache = 16, s.cache_dtype or s.dtype
    _, k, v = make.qkv(tokens, s=s)
    one = make.ones(1) if cache == E4M3 else None
    return {
        **{"k": k, "v": v, "k_scale": one, "v_scale": one},
        **pools(s, make, 1, s.page_size, dtype=cache),
        "slot_mapping": make.zeros(tokens, dtype=torch.int64),
    }
