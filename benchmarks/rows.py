"""The rows of the GPU benchmark, as data, and how to build and call one.

    row = find("dense-causal-fwd-b1-s8192-d128")
    tensors = row.build("cuda")
    call = row.ours(tensors)

The rows of tier "peers" are those whose speed is set against the peers' published figures; tier
"headline" adds option rows and the model shapes of every operator. Dtype, layout and metadata
are in `shape`; `options` are the arguments of the Op class.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks import inputs, work
from benchmarks.inputs import DTYPES, Shape, Tensors
from benchmarks.peers import ours
from ops_registry import accuracy

PEERS, HEADLINE = "peers", "headline"
TOPK_SLACK = 2e-3  # how much better an omitted NSA block may score, of the group size


@dataclass(frozen=True)
class Row:
    """One call of one operator."""

    name: str
    op: str
    shape: Shape
    options: Shape = field(default_factory=dict)
    tier: str = HEADLINE

    @property
    def tolerance(self) -> float:
        """The largest relative L2 error of a figure that is reported."""
        dtype = DTYPES[self.options.get("out_dtype") or self.shape["dtype"]]
        fused = self.options.get("fuse_rope") or "pos_encoding_mode" in self.options
        cache = self.options.get("cache_dtype") or self.shape.get("cache")
        if self.op == "PagedKVCacheWriteFwdOp":
            return 0.0
        if self.op == "NSATopKVarlenFwdOp":
            return TOPK_SLACK
        if self.op == "FP8LightningIndexerFwdOp":
            found = accuracy.INDEXER[torch.float32]
        elif self.op == "GQABwdOp":
            found = accuracy.BACKWARD[dtype]
        elif self.shape["dtype"] == "e4m3":
            found = accuracy.FP8[dtype]
        elif cache == "e4m3":
            found = accuracy.FP8_CACHE[dtype]
        else:
            found = (accuracy.FORWARD_ROPE if fused else accuracy.FORWARD)[dtype]
        assert found.rel_l2 is not None
        return found.rel_l2

    @property
    def flops(self) -> float:
        return work.count(self.op, self.shape, self.options)[0]

    @property
    def bytes(self) -> float:
        return work.count(self.op, self.shape, self.options)[1]

    @property
    def eight_bit(self) -> bool:
        """Whether its matrix products may run at the FP8 rate."""
        return self.shape["dtype"] == "e4m3" or self.op == "FP8LightningIndexerFwdOp"

    def build(self, device: torch.device | str, seed: int = 0) -> Tensors:
        """The tensors, by the names of the Op class's forward."""
        return inputs.build(self.op, self.shape, self.options, device, seed)

    def ours(self, tensors: Tensors) -> Callable[[], Any]:
        """Our call on these tensors."""
        return ours(self.op, self.shape, self.options, tensors)


def heads(query: int, kv: int, dim: int, dtype: str = "bf16") -> Shape:
    return {"heads": query, "heads_kv": kv, "dim": dim, "dtype": dtype}


LLAMA_8B, LLAMA_70B = heads(32, 8, 128), heads(64, 8, 128)
QWEN_30B, GPT_OSS, GEMMA2 = heads(32, 4, 128), heads(64, 8, 64), heads(16, 8, 256)
GEMMA2_SCORES: Shape = {"softcap": 50.0, "sm_scale": 1 / 16}
WINDOW_128: Shape = {"window_size_left": 127}
LATENT: Shape = {"dim": 512, "pe": 64, "dtype": "bf16"}
ROPE: Shape = {"pos_encoding_mode": "rope"}


def dense(name: str, b: int, s_q: int, s_kv: int, model: Shape, tier: str, **options: Any) -> Row:
    shape = {"batch": b, "s_q": s_q, "s_kv": s_kv} | model
    return Row(f"dense-{name}", "GQADenseFwdOp", shape, options, tier)


def square(b: int, s: int, model: Shape, tier: str) -> Row:
    return dense(f"causal-fwd-b{b}-s{s}-d{model['dim']}", b, s, s, model, tier)


def backward(name: str, b: int, s: int, model: Shape, tier: str, causal: bool = True) -> Row:
    mask = "causal" if causal else "noncausal"
    options = {} if causal else {"is_causal": False}
    shape = {"batch": b, "s": s} | model
    return Row(f"dense-{mask}-bwd-{name}", "GQABwdOp", shape, options, tier)


def varlen(
    name: str,
    q_lens: Sequence[int],
    model: Shape,
    tier: str,
    kv_lens: Sequence[int] | None = None,
    sinks: bool = False,
    **options: Any,
) -> Row:
    lens = {"q_lens": list(q_lens), "kv_lens": list(kv_lens or q_lens)}
    shape = lens | model | ({"sinks": True} if sinks else {})
    return Row(f"varlen-{name}", "GQAVarlenFwdOp", shape, options, tier)


def paged(
    name: str,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    page: int,
    model: Shape,
    tier: str,
    sinks: bool = False,
    cache: str | None = None,
    **options: Any,
) -> Row:
    shape = {"q_lens": list(q_lens), "kv_lens": list(kv_lens), "page": page} | model
    shape |= {"sinks": True} if sinks else {}
    shape |= {"cache": cache} if cache else {}
    return Row(f"paged-{name}", "GQAPagedFwdOp", shape, options, tier)


def append(
    name: str,
    q_lens: Sequence[int],
    old_lens: Sequence[int],
    page: int,
    model: Shape,
    tier: str,
    **options: Any,
) -> Row:
    shape = {"q_lens": list(q_lens), "old_lens": list(old_lens)} | model
    options = {"page_size": page, "max_seqlen_q": max(q_lens)} | options
    if options.get("fuse_rope"):
        ends = (n + old for n, old in zip(q_lens, old_lens, strict=True))
        options["max_position"] = max(ends)
    return Row(f"append-prefill-{name}", "GQAPrefillPagedWithKVCacheFwdOp", shape, options, tier)


def mha(
    name: str,
    b: int,
    length: int,
    page: int,
    count: int,
    dim: int,
    tier: str,
    dtype: str = "bf16",
    s_q: int = 1,
    **options: Any,
) -> Row:
    shape = {"batch": b, "s_q": s_q, "length": length, "heads": count, "dim": dim, "dtype": dtype}
    op = "MHADecodePagedWithKVCacheFwdOp"
    return Row(f"mha-decode-{name}", op, shape, {"page_size": page} | options, tier)


def mla(name: str, b: int, keys: int, count: int, tier: str) -> Row:
    shape = {"batch": b, "heads": count, "heads_kv": 1, "keys": keys} | LATENT
    return Row(f"mla-decode-{name}", "MLADecodeWithKVCacheFwdOp", shape, {}, tier)


def dsa(name: str, b: int, s: int, s_kv: int, count: int, tier: str) -> Row:
    shape = {"batch": b, "s": s, "s_kv": s_kv, "heads": count, "dim": 512, "picks": 2048}
    options = {"dim_tail": 64, "stride_kv": 1, "q_start_index_s": s_kv - s}
    return Row(
        f"dsa-{name}", "DSADecodeWithKVCacheFwdOp", shape | {"dtype": "bf16"}, options, tier
    )


def nsa(name: str, lens: Sequence[int], model: Shape, block: int, tier: str) -> list[Row]:
    """The three operators of one layer, 16 blocks selected."""
    shape, scale = {"lens": list(lens)} | model, model["dim"] ** -0.5
    chunked, picks = {"scale": scale, "bs": block}, {"selected_block_num": 16}
    sparse = {"is_causal": True, "scale": scale, "block_size": block}
    return [
        Row(f"nsa-compressed-{name}", "NSACompressedVarlenFwdOp", shape, chunked, tier),
        Row(f"nsa-topk-{name}", "NSATopKVarlenFwdOp", shape, chunked | picks, tier),
        Row(f"nsa-sparse-{name}", "NSAVarlenFwdOp", shape | {"selected": 16}, sparse, tier),
    ]


def indexer(
    name: str, s: int, s_kv: int, tier: str, count: int = 64, dim: int = 128, dtype: str = "e4m3"
) -> Row:
    shape = {"s": s, "s_kv": s_kv, "heads": count, "dim": dim, "dtype": dtype}
    return Row(f"indexer-{name}", "FP8LightningIndexerFwdOp", shape, {}, tier)


def write(
    name: str,
    tokens: int,
    heads_kv: int,
    dim: int,
    page: int,
    tier: str,
    dtype: str = "bf16",
    cache: str | None = None,
) -> Row:
    shape: Shape = {"tokens": tokens, "heads_kv": heads_kv, "dim": dim, "page": page}
    shape |= {"dtype": dtype} | ({"cache": cache} if cache else {})
    return Row(f"cache-write-{name}", "PagedKVCacheWriteFwdOp", shape, {}, tier)


# Cheap to compile first: a run that ends early has seen more operators.
AGAINST_PEERS = [
    square(4, 2048, LLAMA_8B, PEERS),
    square(1, 8192, LLAMA_8B, PEERS),
    square(2, 8192, GPT_OSS, PEERS),
    backward("b4-s2048-d128", 4, 2048, LLAMA_8B, PEERS),
    backward("b1-s8192-d128", 1, 8192, LLAMA_8B, PEERS),
    backward("b2-s8192-d64", 2, 8192, GPT_OSS, PEERS),
    varlen("4x2048-d128", [2048] * 4, LLAMA_8B, PEERS),
    paged("prefill-b8-q512-l4096-ps64", [512] * 8, [4096] * 8, 64, LLAMA_8B, PEERS),
    dense("decode-b32-s4096-d128", 32, 1, 4096, LLAMA_8B, PEERS),
    dense("decode-b4-s32768-h64-d128", 4, 1, 32768, LLAMA_70B, PEERS),
    dense("decode-b1-s131072-d128", 1, 1, 131072, QWEN_30B, PEERS),
    paged("decode-b32-l4096-ps64", [1] * 32, [4096] * 32, 64, LLAMA_8B, PEERS),
    paged("decode-b128-l8192-ps64", [1] * 128, [8192] * 128, 64, LLAMA_8B, PEERS),
    mha("b16-l2048-h32-d64", 16, 2048, 128, 32, 64, PEERS),
    mla("b32-n4096-h128", 32, 4096, 128, PEERS),
    mla("b128-n8192-h128", 128, 8192, 128, PEERS),
    dsa("s4096-kv8192-k2048-h128", 1, 4096, 8192, 128, PEERS),
    *nsa("8x1k", [1024] * 8, heads(32, 2, 128, "fp16"), 32, PEERS),
    indexer("s4096-kv32768-h64-d128", 4096, 32768, PEERS),
    write("t8192-h8-d128", 8192, 8, 128, 16, PEERS),
    write("t8192-h8-d128-fp8", 8192, 8, 128, 16, PEERS, cache="e4m3"),
]

CHUNKS = [512] * 8
OPTIONS = [
    square(1, 16384, LLAMA_70B, HEADLINE),
    square(1, 512, LLAMA_8B, HEADLINE),
    dense(
        "noncausal-fwd-b4-s4096-d128", 4, 4096, 4096, heads(32, 32, 128), HEADLINE, is_causal=False
    ),
    dense("gemma2-9b-8k", 1, 8192, 8192, GEMMA2, HEADLINE, window_size_left=4095, **GEMMA2_SCORES),
    dense("chunk-b1-q128-s2048-d128", 1, 128, 2048, LLAMA_8B, HEADLINE),
    dense(
        "fp8-b1-s8192-d128",
        1,
        8192,
        8192,
        LLAMA_8B | {"dtype": "e4m3"},
        HEADLINE,
        out_dtype="bf16",
    ),
    varlen("gpt-oss-120b-4x2k", [2048] * 4, GPT_OSS, HEADLINE, sinks=True, **WINDOW_128),
    varlen(
        "ragged-h64-d128",
        [1, 17, 1000, 0, 3078],
        LLAMA_70B,
        HEADLINE,
        kv_lens=[1024, 17, 1000, 512, 4096],
    ),
    paged("prefill-b8-q512-l4096-ps16", CHUNKS, [4096] * 8, 16, LLAMA_8B, HEADLINE),
    paged("prefill-b1-q128-l2048-ps64", [128], [2048], 64, LLAMA_8B, HEADLINE),
    append("b8-q512-l4096-ps64", CHUNKS, [3584] * 8, 64, LLAMA_8B, HEADLINE),
    append("b8-q512-l4096-ps64-rope", CHUNKS, [3584] * 8, 64, LLAMA_8B, HEADLINE, fuse_rope=True),
    append("b8-q512-l4096-ps16", CHUNKS, [3584] * 8, 16, LLAMA_8B, HEADLINE),
    append("b1-q128-l2048-ps64", [128], [1920], 64, LLAMA_8B, HEADLINE),
    paged(
        "decode-fp8cache-b32-l4096-ps64",
        [1] * 32,
        [4096] * 32,
        64,
        LLAMA_8B,
        HEADLINE,
        cache="e4m3",
    ),
]

FP16 = {"dtype": "fp16"}
MODELS = [
    mha("llama2-7b-b16-4k", 16, 4096, 128, 32, 128, HEADLINE, "fp16"),
    mha("llama2-7b-b1-32k", 1, 32768, 128, 32, 128, HEADLINE, "fp16"),
    mha("gemma-7b-b8-8k", 8, 8192, 64, 16, 256, HEADLINE),
    mha("opt-1.3b-b64-2k", 64, 2048, 128, 32, 64, HEADLINE, "fp16"),
    mha("llama2-7b-spec4-b16-4k", 16, 4096, 128, 32, 128, HEADLINE, "fp16", 4, is_causal=True),
    backward("llama3-8b-b2-4k", 2, 4096, LLAMA_8B, HEADLINE),
    backward("llama3-70b-b1-4k", 1, 4096, LLAMA_70B, HEADLINE),
    backward("qwen3-30b-a3b-b2-4k", 2, 4096, QWEN_30B, HEADLINE),
    backward("gpt-oss-d64-b2-4k", 2, 4096, GPT_OSS, HEADLINE),
    backward("llama3-8b-b2-2k", 2, 2048, LLAMA_8B, HEADLINE, causal=False),
    dense("llama3-70b-prefill-8k", 1, 8192, 8192, LLAMA_70B, HEADLINE),
    dense("qwen3-30b-a3b-chunk", 4, 1024, 8192, QWEN_30B | FP16, HEADLINE),
    dense("decode-llama3-8b-b32-8k", 32, 1, 8192, LLAMA_8B | FP16, HEADLINE),
    paged("decode-llama3-8b-b64-4k", [1] * 64, [4096] * 64, 16, LLAMA_8B, HEADLINE),
    paged("decode-llama3-70b-b16-8k", [1] * 16, [8192] * 16, 64, LLAMA_70B, HEADLINE),
    paged("decode-qwen3-30b-a3b-b1-128k", [1], [131072], 64, QWEN_30B, HEADLINE),
    paged("llama3-8b-mixed-step", [1024] + [1] * 31, [4096] * 32, 16, LLAMA_8B, HEADLINE),
    paged(
        "decode-gpt-oss-120b-b128-8k",
        [1] * 128,
        [8192] * 128,
        16,
        GPT_OSS,
        HEADLINE,
        sinks=True,
        **WINDOW_128,
    ),
    paged("prefill-llama3-8b-rope-chunk", CHUNKS, [4096] * 8, 64, LLAMA_8B, HEADLINE, **ROPE),
    append("llama3-8b-8x512-prefix4k", CHUNKS, [4096] * 8, 64, LLAMA_8B | FP16, HEADLINE),
    append(
        "qwen3-30b-a3b-8x1k-prefix32k",
        [1024] * 8,
        [32768] * 8,
        64,
        QWEN_30B,
        HEADLINE,
        fuse_rope=True,
        rope_base=1e6,
    ),
    append(
        "llama3-70b-mixed",
        [256, 512, 1024, 128],
        [4096, 8192, 2048, 16384],
        64,
        LLAMA_70B,
        HEADLINE,
    ),
    append("gemma2-9b-4x512", [512] * 4, [4096] * 4, 64, GEMMA2, HEADLINE, **GEMMA2_SCORES),
    append("llama3-8b-fp8cache", CHUNKS, [4096] * 8, 64, LLAMA_8B, HEADLINE, cache_dtype="e4m3"),
    varlen("qwen3-32b-8x1k", [1024] * 8, LLAMA_70B, HEADLINE, **ROPE),
    varlen("gemma3-27b-2x8k", [8192] * 2, heads(32, 16, 128), HEADLINE, window_size_left=1023),
    varlen(
        "llama3-8b-fp8-4x2k", [2048] * 4, LLAMA_8B | {"dtype": "e4m3"}, HEADLINE, out_dtype="bf16"
    ),
    mla("ds-v3-b16-4k", 16, 4096, 128, HEADLINE),
    mla("ds-v3-b4-32k", 4, 32768, 128, HEADLINE),
    mla("ds-v3-tp8-b64-8k", 64, 8192, 16, HEADLINE),
    mla("ds-v3-b1-128k", 1, 131072, 128, HEADLINE),
    *nsa("27b-8x4k", [4096] * 8, heads(64, 4, 128), 64, HEADLINE),
    *nsa("27b-1x32k", [32768], heads(64, 4, 128), 64, HEADLINE),
    *nsa("ragged", [257, 767, 3072, 4096], heads(32, 2, 128), 32, HEADLINE),
    *nsa("d64-4x8k", [8192] * 4, heads(32, 2, 64), 32, HEADLINE),
    dsa("ds-v32-prefill-4k", 1, 4096, 4096, 128, HEADLINE),
    dsa("ds-v32-prefill-4k-of-32k", 1, 4096, 32768, 128, HEADLINE),
    dsa("ds-v32-prefill-4k-of-128k", 1, 4096, 131072, 128, HEADLINE),
    dsa("ds-v32-decode-b64-32k", 64, 1, 32768, 128, HEADLINE),
    dsa("ds-v32-tp8-2k-of-32k", 1, 2048, 32768, 16, HEADLINE),
    indexer("ds-v32-4k", 4096, 4096, HEADLINE),
    indexer("ds-v32-4k-of-128k", 4096, 131072, HEADLINE),
    indexer("ds-v32-decode-128k", 1, 131072, HEADLINE),
    indexer("bf16-h32-d64-8k", 8192, 8192, HEADLINE, 32, 64, "bf16"),
    write("llama3-8b-decode-256", 256, 8, 128, 16, HEADLINE),
    write("qwen3-235b-fp8-4k", 4096, 4, 128, 16, HEADLINE, cache="e4m3"),
    write("gpt-oss-120b-prefill-16k", 16384, 8, 64, 16, HEADLINE),
    write("gemma2-9b-8k", 8192, 8, 256, 64, HEADLINE, "fp16"),
]

ROWS = [*AGAINST_PEERS, *OPTIONS, *MODELS]
BY_NAME = {row.name: row for row in ROWS}


def find(name: str) -> Row:
    return BY_NAME[name]


def select(patterns: Sequence[str] = (), tier: str = "all") -> list[Row]:
    """The rows of a tier whose name fits one of the patterns (a glob, or a part of it)."""
    kept = [row for row in ROWS if tier in ("all", row.tier)]
    if not patterns:
        return kept
    return [
        row for row in kept if any(fnmatch.fnmatch(row.name, p) or p in row.name for p in patterns)
    ]
