"""Random legal calls: first what kernels are compiled for, then everything else.

A key is the part of a call that decides a compilation: heads, dims, dtypes, options, page sizes,
alignment. `draw_key(op, rng)` gives one; `draw_call(op, key, draw)` gives calls of it, of any
lengths, pages, offsets and values. `tolerances(op, key)` is what their outputs are held to.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ops_registry.accuracy import (
    BACKWARD,
    EXACT,
    FORWARD,
    FORWARD_ROPE,
    FP8,
    FP8_CACHE,
    FP8_ROPE,
    INDEXER,
    LSE,
    LSE_ROPE,
    Tolerance,
)
from ops_registry.contract import CONTRACTS, E4M3
from tests import oracle
from tests.cases import gqa_dense, gqa_prefill_paged, gqa_varlen
from tests.gpu import twins
from tests.gpu.hopper_keys import LONG, fewest_rows, on_hopper

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
Key = Mapping[str, Any]
EDGES = (15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513, 1024, 1025)
DIMS = (16, 24, 32, 40, 64, 64, 64, 72, 80, 96, 112, 128, 128, 128, 160, 192, 256, 256)
GROUPS = (1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 12, 16)
TAIL = (-1, 2**30)  # table entries past a request's last page

KEYS: dict[str, Callable[[random.Random], dict[str, Any]]] = {}
CALLS: dict[str, Callable[[Any, Draw], dict[str, Any]]] = {}


class Draw:
    """Sizes from a Python generator, values from one of the device.

    budget: about how many logits a call has.
    """

    def __init__(self, seed: str, device: str = "cpu", budget: int = 1 << 23) -> None:
        self.rng = random.Random(seed)
        self.device, self.budget = device, budget
        self.generator = torch.Generator(device).manual_seed(self.rng.getrandbits(40))

    def length(self, most: int) -> int:
        """A length up to `most`: often next to the edge of a tile, sometimes 0."""
        kind = self.rng.random()
        if kind < 0.1 or most <= 0:
            return 0
        if kind < 0.25:
            return min(self.rng.randint(1, 8), most)
        near = [n for n in EDGES if n <= most]
        if kind < 0.6 and near:
            return self.rng.choice(near)
        return self.rng.randint(1, most)

    def randn(self, *shape: int, dtype: torch.dtype = F32) -> Tensor:
        x = torch.randn(*shape, generator=self.generator, device=self.device)
        return x.to(dtype)

    def scales(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, device=self.device) + 0.5

    def ints(self, values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """int64 in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator, device=self.device)

    def permutation(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self.generator, device=self.device)

    def offsets(self, lens: list[int]) -> Tensor:
        ends = [0]
        for n in lens:
            ends.append(ends[-1] + n)
        return self.ints(ends)

    def batch(self, heads: int, most: int = 9) -> tuple[int, int]:
        """A number of requests, and a longest query times a longest cache for each of them."""
        batch = self.rng.randint(1, most)
        return batch, max(self.budget // (batch * heads), 16)

    def rectangle(self, area: int, most: int = 4096, long: bool = False) -> tuple[int, int]:
        """Bounds of a query length and a cache length: square, or (not long) decoding."""
        side = int(area**0.5)
        queries = side if long else self.rng.choice((1, 4, side, side, side // 4 or 1))
        return queries, min(area // max(queries, 1), most)


def key(fn: Callable[[random.Random], dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    KEYS[fn.__name__.removesuffix("_key")] = fn
    return fn


def call(fn: Callable[[Any, Draw], dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    CALLS[fn.__name__.removesuffix("_call")] = fn
    return fn


def draw_key(op: str, rng: random.Random) -> dict[str, Any]:
    drawn, long = KEYS[op](rng), op in LONG and rng.random() < 0.5
    while long and not on_hopper(op, drawn):
        drawn = KEYS[op](rng)
    return drawn | {"misaligned": rng.random() < 0.15} | ({"long": True} if long else {})


def draw_call(op: str, key: Key, draw: Draw) -> Any:
    """A call of the operator; its read-only tensors start off a boundary if the key says so, and
    are parts of wider ones in some of the long calls."""
    contract = CONTRACTS[op]
    built = CALLS[op](_Names(key), draw)
    move = misaligned if key["misaligned"] else None
    if move is None and key.get("long") and draw.rng.random() < 0.3:
        move = part_of_wider
    for name, spec in contract.tensors.items():
        if move and built.get(name) is not None and not spec.mutated:
            built[name] = move(built[name])
    return contract.Call(**built)


class _Names:
    """A key with its entries as attributes."""

    def __init__(self, key: Key) -> None:
        self.__dict__.update(key)
        self.key = key
        self.long = key.get("long", False)

    def options(self, *names: str) -> dict[str, Any]:
        return {name: self.key[name] for name in names if name in self.key}


def misaligned(x: Tensor) -> Tensor:
    """The same contiguous values, one element past the start of an allocation."""
    room = x.new_zeros(x.numel() + 1)
    there = room[1:].view(x.shape)
    return there.copy_(x)


def part_of_wider(x: Tensor) -> Tensor:
    """The same values of a tensor [..., H, D], as if projected together with other heads."""
    if x.dim() < 3:
        return x
    room = x.new_zeros((*x.shape[:-2], x.shape[-2] + 3, x.shape[-1]))
    return room[..., 1:-2, :].copy_(x)


# ------------------------------------------------------------------------------------ keys


def heads(rng: random.Random) -> dict[str, int]:
    if rng.random() < 0.06:
        return {"heads": 71, "heads_kv": 1}
    heads_kv = rng.choice((1, 1, 2, 3, 4, 8))
    return {"heads": heads_kv * rng.choice(GROUPS), "heads_kv": heads_kv}


def dtype(rng: random.Random) -> dict[str, torch.dtype]:
    return {"dtype": rng.choice((F16, BF16, BF16))}


def scores(rng: random.Random, dim: int) -> dict[str, Any]:
    """Masks, scale and cap."""
    found: dict[str, Any] = {"is_causal": rng.random() < 0.6}
    if rng.random() < 0.35:
        found["window_size_left"] = rng.choice((0, 1, 3, 31, 127, 128, 500))
    if rng.random() < 0.2:
        found["window_size_right"] = rng.choice((0, 2, 40))
    if rng.random() < 0.3:
        found["sm_scale"] = rng.choice((0.6, 1.3)) * dim**-0.5
    if rng.random() < 0.3:
        found["softcap"] = rng.choice((1.5, 20.0))
    return found


def rotation(rng: random.Random, dim: int, share: float = 0.3) -> dict[str, Any]:
    if rng.random() > share or dim % 2:
        return {}
    widths = [None, dim, max(2, dim // 4 * 2)]
    layout = rng.choice(("neox", "interleaved"))
    return {"pos_encoding_mode": "rope", "rotary_dim": rng.choice(widths), "rope_layout": layout}


def gqa_key(rng: random.Random, fp8: float) -> dict[str, Any]:
    dim = rng.choice(DIMS)
    found = heads(rng) | dtype(rng) | {"dim": dim}
    found |= scores(rng, dim) | rotation(rng, dim)
    if rng.random() < fp8:
        found |= {"out_dtype": found["dtype"], "dtype": E4M3}
    return found


@key
def gqa_dense_fwd_key(rng):
    return gqa_key(rng, 0.2)


@key
def gqa_varlen_fwd_key(rng):
    return gqa_key(rng, 0.2) | {"sinks": rng.random() < 0.3}


@key
def gqa_dense_bwd_key(rng):
    return gqa_key(rng, 0.0)


@key
def gqa_varlen_bwd_key(rng):
    return gqa_key(rng, 0.0) | {"sinks": rng.random() < 0.3}


def page_size(rng: random.Random) -> int:
    return rng.choice((1, 3, 7, 8, 16, 16, 16, 24, 32, 48, 64, 64, 128, 256, 544))


@key
def gqa_paged_fwd_key(rng):
    found = gqa_key(rng, 0.15) | {"sinks": rng.random() < 0.3, "page_size": page_size(rng)}
    fp8 = found["dtype"] == E4M3
    found["pool"] = E4M3 if fp8 or rng.random() < 0.2 else found["dtype"]
    if found["pool"] == E4M3:
        found["scales"] = rng.choice(("tensor", "heads"))
    return found


@key
def gqa_prefill_paged_fwd_key(rng):
    dim = rng.choice(DIMS)
    found = heads(rng) | dtype(rng) | {"dim": dim, "page_size": page_size(rng)}
    kept = ("is_causal", "sm_scale", "softcap")
    found |= {n: x for n, x in scores(rng, dim).items() if n in kept}
    if rng.random() < 0.3:
        found["cache_dtype"] = E4M3
    turned = rotation(rng, dim)
    if turned:
        found |= {"fuse_rope": True, "rotary_dim": turned["rotary_dim"], "max_position": 1 << 17}
        found["rope_base"] = rng.choice((10000.0, 500.0))
    return found


@key
def mha_decode_paged_fwd_key(rng):
    shape = {"heads": rng.choice((1, 2, 5, 8, 32)), "dim": rng.choice(DIMS)}
    return dtype(rng) | shape | {"page_size": page_size(rng), "is_causal": rng.random() < 0.5}


@key
def mla_decode_fwd_key(rng):
    heads_kv = rng.choice((1, 1, 1, 2))
    shape = {"heads": heads_kv * rng.choice((1, 3, 16, 64, 128)), "heads_kv": heads_kv}
    return (
        dtype(rng)
        | shape
        | {
            "dim": rng.choice((16, 72, 128, 256, 512, 512)),
            "rotary": rng.choice((0, 6, 32, 64, 64)),
        }
    )


def nsa_key(rng: random.Random) -> dict[str, Any]:
    found = heads(rng) | dtype(rng) | {"dim": rng.choice((16, 24, 64, 96, 128, 128))}
    return found | {
        "block": rng.choice((1, 4, 16, 32, 32, 64, 64, 48)),
        "scale": found["dim"] ** -0.5,
    }


@key
def nsa_compressed_fwd_key(rng):
    found = nsa_key(rng)
    return found | {"value_dim": rng.choice((found["dim"], found["dim"], 40))}


@key
def nsa_topk_key(rng):
    return nsa_key(rng) | {"selected": rng.choice((1, 3, 16, 16, 20))}


@key
def nsa_varlen_fwd_key(rng):
    return nsa_key(rng) | {
        "is_causal": rng.random() < 0.7,
        "slots": rng.choice((0, 1, 5, 16, 16, 40)),
    }


@key
def dsa_decode_fwd_key(rng):
    heads_kv = rng.choice((1, 1, 1, 2))
    shape = {"heads": heads_kv * rng.choice((1, 3, 16, 64, 128)), "heads_kv": heads_kv}
    dims = {"dim": rng.choice((16, 72, 128, 512, 512)), "dim_tail": rng.choice((0, 6, 64, 64))}
    options = {"stride_kv": rng.choice((1, 1, 1, 4)), "is_causal": rng.random() < 0.7}
    if rng.random() < 0.2:
        options["sm_scale"] = 0.08
    return dtype(rng) | shape | dims | options | {"slots": rng.choice((0, 1, 30, 64, 128, 512))}


@key
def fp8_lightning_indexer_key(rng):
    groups = rng.choice((1, 1, 1, 2))
    shape = {"groups": groups, "heads": groups * rng.choice((1, 3, 16, 32, 64))}
    kind = rng.choice((BF16, E4M3, E4M3))
    return shape | {
        "dtype": kind,
        "dim": rng.choice((16, 24, 64, 128, 128, 128)),
        "scaled": kind == E4M3 and rng.random() < 0.7,
        "clean_logits": rng.random() < 0.8,
    }


@key
def paged_kv_cache_write_key(rng):
    found = dtype(rng) | {"heads_kv": rng.choice((1, 2, 3, 4, 8)), "dim": rng.choice(DIMS)}
    pool = E4M3 if rng.random() < 0.4 else found["dtype"]
    return found | {"pool": pool, "page_size": page_size(rng)}


# ----------------------------------------------------------------------------------- calls

SCORES = ("is_causal", "window_size_left", "window_size_right", "sm_scale", "softcap")
ROPE = ("pos_encoding_mode", "rotary_dim", "rope_layout")


def rotary_tables(k, rows: int, draw: Draw) -> dict[str, Tensor]:
    if "pos_encoding_mode" not in k.key:
        return {}
    kind = k.key.get("out_dtype") or k.dtype
    cos, sin = oracle.rope_table(k.rotary_dim or k.dim, rows, 10000.0, kind)
    return {"rope_cos": cos.to(draw.device), "rope_sin": sin.to(draw.device)}


def q_k_v(k, draw: Draw, q_rows: tuple[int, ...], kv_rows: tuple[int, ...]) -> dict[str, Tensor]:
    return {
        "q": draw.randn(*q_rows, k.heads, k.dim, dtype=k.dtype),
        "k": draw.randn(*kv_rows, k.heads_kv, k.dim, dtype=k.dtype),
        "v": draw.randn(*kv_rows, k.heads_kv, k.dim, dtype=k.dtype),
    }


def e4m3_scales(k, draw: Draw, batch: int, *names: str) -> dict[str, Any]:
    if k.dtype != E4M3:
        return {}
    return {name: draw.scales(batch, k.heads_kv) for name in names}


@call
def gqa_dense_fwd_call(k, draw):
    batch, area = draw.batch(k.heads)
    most_q, most_kv = draw.rectangle(area, long=k.long)
    s_q, s_kv = draw.length(most_q) + 128 * k.long, draw.length(most_kv)
    if k.is_causal or "pos_encoding_mode" in k.key:
        s_kv = max(s_q, s_kv)
    return (
        q_k_v(k, draw, (batch, s_q), (batch, s_kv))
        | e4m3_scales(k, draw, batch, "q_scale", "k_scale", "v_scale")
        | rotary_tables(k, s_kv + draw.rng.randint(0, 5), draw)
        | k.options(*SCORES, *ROPE, "out_dtype")
    )


def query_lengths(k, draw: Draw, batch: int, most: int) -> list[int]:
    """Lengths up to `most`; where they are to be long, of enough rows on average."""
    lens = [draw.length(most) for _ in range(batch)]
    missing = -(-(fewest_rows(k.key) * batch - sum(lens)) // batch)
    return [n + missing for n in lens] if k.long and missing > 0 else lens


def request_lengths(k, draw: Draw) -> tuple[list[int], list[int]]:
    """Query and key lengths of a batch; with RoPE no query is before the first key."""
    batch, area = draw.batch(k.heads, 40 if k.long else 9)
    most_q, most_kv = draw.rectangle(area, long=k.long)
    q = query_lengths(k, draw, batch, most_q)
    kv = [draw.length(most_kv) for _ in range(batch)]
    if "pos_encoding_mode" in k.key:
        kv = [max(pair) for pair in zip(q, kv, strict=True)]
    return q, kv


def sinks(k, draw: Draw) -> dict[str, Tensor]:
    if not k.sinks:
        return {}
    drawn = draw.randn(k.heads)
    drawn[draw.rng.randrange(k.heads)] = draw.rng.choice((-torch.inf, torch.inf, 30.0))
    return {"sinks": drawn}


@call
def gqa_varlen_fwd_call(k, draw):
    q, kv = request_lengths(k, draw)
    t_q, t_kv = (sum(lens) + draw.rng.choice((0, 0, 3)) for lens in (q, kv))
    return (
        q_k_v(k, draw, (t_q,), (t_kv,))
        | {"cu_seqlens_q": draw.offsets(q), "cu_seqlens_kv": draw.offsets(kv)}
        | e4m3_scales(k, draw, len(q), "q_scale", "k_scale", "v_scale")
        | rotary_tables(k, max(kv) + draw.rng.randint(0, 5), draw)
        | sinks(k, draw)
        | k.options(*SCORES, *ROPE, "out_dtype")
    )


def backward(op: str, k, draw: Draw) -> dict[str, Any]:
    """A forward call with its o and lse, which the twin forms, and a gradient."""
    built = CALLS[op](k, draw)
    o, lse = twins.twin(CONTRACTS[op].Call(**built))
    return built | {
        "o": o.to(k.dtype),
        "do": draw.randn(*built["q"].shape, dtype=k.dtype),
        "lse": lse.to(F32).contiguous(),
    }


@call
def gqa_dense_bwd_call(k, draw):
    return backward("gqa_dense_fwd", k, draw)


@call
def gqa_varlen_bwd_call(k, draw):
    return backward("gqa_varlen_fwd", k, draw)


def table_of(draw: Draw, lens: list[int], size: int) -> tuple[Tensor, int]:
    """A table of distinct pages with wild entries past each request, and the pages of the pool."""
    counts = [-(-n // size) for n in lens]
    pages = sum(counts) + draw.rng.choice((0, 1, 5))
    width = max(counts, default=0) + draw.rng.choice((0, 0, 1, 9))
    table = draw.ints(TAIL).repeat(len(lens) * width)[: len(lens) * width]
    table = table.reshape(len(lens), width)
    order = draw.permutation(pages).to(torch.int32)
    for b, count in enumerate(counts):
        table[b, :count], order = order[:count], order[count:]
    return table, pages


@call
def gqa_paged_fwd_call(k, draw):
    q, lens = request_lengths(k, draw)
    table, pages = table_of(draw, lens, k.page_size)
    pool = (pages, k.page_size, k.heads_kv, k.dim)
    tokens, batch = sum(q) + draw.rng.choice((0, 0, 3)), len(q)
    found = {
        "q": draw.randn(tokens, k.heads, k.dim, dtype=k.dtype),
        "k_pages": draw.randn(*pool, dtype=k.pool),
        "v_pages": draw.randn(*pool, dtype=k.pool),
        "page_table": table,
        "cache_seqlens": draw.ints(lens),
        "cu_seqlens_q": draw.offsets(q),
    } | e4m3_scales(k, draw, batch, "q_scale")
    if k.pool == E4M3:
        shape = (1,) if k.scales == "tensor" else (batch, k.heads_kv)
        found |= {"k_scale": draw.scales(*shape), "v_scale": draw.scales(*shape)}
    found |= rotary_tables(k, max(lens) + draw.rng.randint(0, 5), draw) | sinks(k, draw)
    return found | k.options(*SCORES, *ROPE, "out_dtype")


@call
def gqa_prefill_paged_fwd_call(k, draw):
    batch, area = draw.batch(k.heads, 40 if k.long else 9)
    most_q, most_kv = draw.rectangle(area, long=k.long)
    new = query_lengths(k, draw, batch, most_q)
    old = [draw.length(most_kv) for _ in range(batch)]
    table, pages = table_of(draw, [a + b for a, b in zip(old, new, strict=True)], k.page_size)
    pool = (pages * k.page_size, k.heads_kv, k.dim)
    stored = k.key.get("cache_dtype") or k.dtype
    tokens = sum(new) + draw.rng.choice((0, 0, 3))
    return {
        "q": draw.randn(tokens, k.heads, k.dim, dtype=k.dtype),
        "k_new": draw.randn(tokens, k.heads_kv, k.dim, dtype=k.dtype),
        "v_new": draw.randn(tokens, k.heads_kv, k.dim, dtype=k.dtype),
        "k_pages": draw.randn(*pool, dtype=stored),
        "v_pages": draw.randn(*pool, dtype=stored),
        "k_scale": draw.scales(1),
        "v_scale": draw.scales(1),
        "cu_seqlens_q": draw.offsets(new),
        "cache_seqlens": draw.ints(old),
        "block_table": table,
        "page_size": k.page_size,
        "max_seqlen_q": max(*new, 1),
    } | k.options(
        "is_causal", "sm_scale", "softcap", "cache_dtype", "fuse_rope", "rotary_dim",
        "max_position", "rope_base",
    )  # fmt: skip


@call
def mha_decode_paged_fwd_call(k, draw):
    batch, area = draw.batch(k.heads)
    queries = draw.rng.choice((0, 1, 1, 1, 2, 5, 17, 70))
    lens = [draw.length(min(area // max(queries, 1), 4096)) for _ in range(batch)]
    table, pages = table_of(draw, lens, k.page_size)
    return {
        "q": draw.randn(batch, queries, k.heads, k.dim, dtype=k.dtype),
        "k": draw.randn(pages * k.page_size, k.heads, k.dim, dtype=k.dtype),
        "v": draw.randn(pages * k.page_size, k.heads, k.dim, dtype=k.dtype),
        "real_seqlen_kv": draw.ints(lens),
        "block_table": table,
    } | k.options("page_size", "is_causal")


@call
def mla_decode_fwd_call(k, draw):
    batch, area = draw.batch(k.heads)
    rows = max(draw.length(min(area, 4096)), int(k.long))
    return {
        "q": draw.randn(batch, k.heads, k.dim, dtype=k.dtype),
        "q_pe": draw.randn(batch, k.heads, k.rotary, dtype=k.dtype),
        "k": draw.randn(batch, rows, k.heads_kv, k.dim, dtype=k.dtype),
        "k_pe": draw.randn(batch, rows, k.heads_kv, k.rotary, dtype=k.dtype),
    }


def nsa_packing(k, draw: Draw, share: int) -> dict[str, Tensor]:
    """Metadata of a batch whose longest request squared over `share` fits the budget."""
    batch, area = draw.batch(k.heads)
    lens = [draw.length(min(int((area * share) ** 0.5), 1500)) for _ in range(batch)]
    tokens = [(n, t) for n, length in enumerate(lens) for t in range(length)]
    return {
        "offsets": draw.offsets(lens),
        "chunk_offsets": draw.offsets([-(-n // k.block) for n in lens]),
        "token_indices": draw.ints(tokens).reshape(-1, 2),
    }


def compressed(k, draw: Draw) -> tuple[dict[str, Tensor], int]:
    packing = nsa_packing(k, draw, k.block)
    tokens, chunks = len(packing["token_indices"]), int(packing["chunk_offsets"][-1])
    found = {
        "q": draw.randn(tokens, k.heads, k.dim, dtype=k.dtype),
        "k_cmp": draw.randn(chunks, k.heads_kv, k.dim, dtype=k.dtype),
    }
    return found | packing | {"scale": k.scale, "bs": k.block}, chunks


@call
def nsa_compressed_fwd_call(k, draw):
    found, chunks = compressed(k, draw)
    return found | {"v_cmp": draw.randn(chunks, k.heads_kv, k.value_dim, dtype=k.dtype)}


@call
def nsa_topk_call(k, draw):
    return compressed(k, draw)[0] | {"selected_block_num": k.selected}


@call
def nsa_varlen_fwd_call(k, draw):
    packing = nsa_packing(k, draw, 1)
    packing.pop("chunk_offsets")
    tokens = len(packing["token_indices"])
    longest = int(torch.diff(packing["offsets"]).max())
    shape = (tokens, k.heads_kv, k.slots)
    ids = draw.integers(-2, longest // k.block + 3, *shape)
    ids[draw.integers(0, 10, *shape) == 0] = 2**31 - 1
    rows = (tokens, k.heads_kv, k.dim)
    return {
        "q": draw.randn(tokens, k.heads, k.dim, dtype=k.dtype),
        "k": draw.randn(*rows, dtype=k.dtype),
        "v": draw.randn(*rows, dtype=k.dtype),
        "block_indices": ids.to(torch.int32),
        "block_counts": draw.integers(-1, k.slots + 2, tokens, k.heads_kv).to(torch.int32),
        **packing,
        "is_causal": k.is_causal,
        "scale": k.scale,
        "block_size": k.block,
    }


@call
def dsa_decode_fwd_call(k, draw):
    batch = draw.rng.randint(1, 4)
    room = draw.budget * 2 // (max(k.slots, 1) * (k.dim + k.dim_tail) * batch)
    queries = max(draw.length(min(max(room // k.heads_kv, 1), 300)), int(k.long))
    rows = max(draw.length(3000), int(k.long))
    width = k.dim + k.dim_tail
    # Distinct rows in random slots, dead values of every kind between them.
    keys = torch.rand(
        batch,
        queries,
        k.heads_kv,
        max(rows, k.slots),
        generator=draw.generator,
        device=draw.device,
    )
    ids = keys.argsort(-1)[..., : k.slots]
    dead = draw.ints((-1, rows, 2**31 - 1, -(2**31)), torch.int64)
    chosen = dead[draw.integers(0, 4, *ids.shape)]
    ids = torch.where((ids >= rows) | (draw.integers(0, 4, *ids.shape) == 0), chosen, ids)
    return {
        "q": draw.randn(batch, queries, k.heads, width, dtype=k.dtype),
        "kv": draw.randn(batch, rows, k.heads_kv, width, dtype=k.dtype),
        "indices": ids.to(torch.int32),
        "q_start_index_s": draw.rng.choice((0, 1, rows, rows * k.stride_kv)),
    } | k.options("dim_tail", "stride_kv", "is_causal", "sm_scale")


@call
def fp8_lightning_indexer_call(k, draw):
    batch, area = draw.batch(k.heads, 3)
    queries, keys = (draw.length(n) for n in draw.rectangle(area))
    starts, ends = draw.integers(-2, keys + 1, queries), draw.integers(-1, keys + 3, queries)
    if not k.clean_logits:
        starts, ends = starts * 0, ends * 0 + keys
    found = {
        "index_q": draw.randn(batch, queries, k.heads, k.dim, dtype=k.dtype),
        "index_k": draw.randn(batch, keys, k.groups, k.dim, dtype=k.dtype),
        "weights": draw.randn(queries, k.heads),
        "cu_seqlen_ks": starts.to(torch.int32),
        "cu_seqlen_ke": ends.to(torch.int32),
        "clean_logits": k.clean_logits,
    }
    if k.scaled:
        found["index_k_scale"] = draw.scales(batch, keys, k.groups)
    return found


@call
def paged_kv_cache_write_call(k, draw):
    tokens = draw.length(3000)
    pages = -(-tokens // k.page_size) + draw.rng.choice((0, 1, 20))
    pool = (pages, k.page_size, k.heads_kv, k.dim)
    slots = draw.permutation(pages * k.page_size)[:tokens]
    slots = torch.where(draw.integers(0, 8, tokens) == 0, -1, slots)
    found = {
        "k": draw.randn(tokens, k.heads_kv, k.dim, dtype=k.dtype),
        "v": draw.randn(tokens, k.heads_kv, k.dim, dtype=k.dtype),
        "k_pages": draw.randn(*pool, dtype=k.pool),
        "v_pages": draw.randn(*pool, dtype=k.pool),
        "slot_mapping": slots,
    }
    if k.pool == E4M3:
        found |= {"k_scale": draw.scales(1), "v_scale": draw.scales(1)}
    return found


# ------------------------------------------------------------------------------ tolerances


def tolerances(op: str, key: Key) -> tuple[Tolerance | None, ...]:
    """One for each entry of `twins.twin`; None is judged otherwise, or not."""
    kind = key.get("out_dtype") or key["dtype"]
    rotated = "pos_encoding_mode" in key or "fuse_rope" in key
    if op.endswith("_bwd"):
        own = (BACKWARD[kind],) * 3
        return own if op == "gqa_dense_bwd" else (*own, gqa_varlen.FLOAT32_SINKS[kind])
    if op == "gqa_prefill_paged_fwd":
        fp8 = key.get("cache_dtype") == E4M3
        row = FP8_CACHE if fp8 else FORWARD_ROPE if rotated else FORWARD
        stored = EXACT if not rotated else None if fp8 else gqa_prefill_paged.STORED[kind]
        return row[kind], stored, EXACT
    if op == "paged_kv_cache_write":
        return EXACT, EXACT
    if op == "nsa_topk":
        return (None,)
    if op == "fp8_lightning_indexer":
        return (INDEXER[F32],)
    if key["dtype"] == E4M3:
        row, lse = (FP8_ROPE, gqa_dense.LSE_FP8) if rotated else (FP8, LSE[kind])
    elif key.get("pool") == E4M3:
        row, lse = FP8_CACHE, None
    else:
        row, lse = (FORWARD_ROPE, LSE_ROPE[kind]) if rotated else (FORWARD, LSE[kind])
    with_lse = op in ("gqa_dense_fwd", "gqa_varlen_fwd", "nsa_compressed_fwd")
    return (row[kind], lse) if with_lse else (row[kind],)
