"""The arithmetic and the memory traffic that a benchmark call cannot do without.

FLOPs are those of the matrix products, 2 per multiply-add, of visible pairs only; bytes are
every element that must move, once. A pool counts the rows that some query sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from benchmarks.inputs import Shape

Work: TypeAlias = tuple[float, float]  # FLOPs, bytes

SIZES = {"bf16": 2, "fp16": 2, "e4m3": 1}


def pairs(s_q: int, s_kv: int, options: Shape) -> int:
    """(query, visible key) pairs of one request: causal ones with any left window, or all."""
    if not options.get("is_causal", True):
        return s_q * s_kv
    left = options.get("window_size_left", -1)
    width = s_kv if left < 0 else left + 1
    first = s_kv - s_q  # the position of the first query
    short = min(max(width - first - 1, 0), s_q)  # queries that see fewer keys than the window
    seen = range(max(first, -1) + 1, first + short + 1)
    return sum(seen) + (s_q - short) * width


def needed(s_q: int, s_kv: int, options: Shape) -> int:
    """Keys of one request that some query sees."""
    left = options.get("window_size_left", -1)
    if s_q == 0:
        return 0
    return s_kv if left < 0 else s_kv - max(0, s_kv - s_q - left)


def closed(length: int, block: int) -> int:
    """(token, chunk that has ended) pairs of one NSA request."""
    full, rest = divmod(length + 1, block)
    return block * full * (full - 1) // 2 + rest * full


def table_bytes(shape: Shape, options: Shape, rows: int) -> int:
    if options.get("pos_encoding_mode", "none") == "none":
        return 0
    return 2 * rows * (options.get("rotary_dim") or shape["dim"])


def dense(shape: Shape, options: Shape) -> Work:
    b, s_q, s_kv, heads, heads_kv, dim = (
        shape[x] for x in ("batch", "s_q", "s_kv", "heads", "heads_kv", "dim")
    )
    size = SIZES[shape["dtype"]]
    keys = needed(s_q, s_kv, options)
    moved = (
        size * (b * s_q * heads * dim + 2 * b * keys * heads_kv * dim) + 2 * b * s_q * heads * dim
    )
    moved += 12 * b * heads_kv if size == 1 else 0
    flops = 4 * b * heads * dim * pairs(s_q, s_kv, options)
    return flops, moved + table_bytes(shape, options, s_kv)


def dense_backward(shape: Shape, options: Shape) -> Work:
    b, s, heads, heads_kv, dim = (shape[x] for x in ("batch", "s", "heads", "heads_kv", "dim"))
    moved = 8 * b * s * (heads + heads_kv) * dim + 4 * b * heads * s
    return 10 * b * heads * dim * pairs(s, s, options), moved


def all_pairs(q_lens: Sequence[int], kv_lens: Sequence[int], options: Shape) -> int:
    return sum(pairs(n, length, options) for n, length in zip(q_lens, kv_lens, strict=True))


def varlen(shape: Shape, options: Shape) -> Work:
    q_lens, kv_lens = shape["q_lens"], shape["kv_lens"]
    heads, heads_kv, dim = shape["heads"], shape["heads_kv"], shape["dim"]
    size, tokens = SIZES[shape["dtype"]], sum(q_lens)
    moved = size * (tokens * heads * dim + 2 * sum(kv_lens) * heads_kv * dim)
    moved += 2 * tokens * heads * dim + 8 * (len(q_lens) + 1)
    moved += 12 * len(q_lens) * heads_kv if size == 1 else 0
    moved += 4 * heads if shape.get("sinks") else 0
    flops = 4 * heads * dim * all_pairs(q_lens, kv_lens, options)
    return flops, moved + table_bytes(shape, options, max(kv_lens))


def paged(shape: Shape, options: Shape) -> Work:
    q_lens, kv_lens, page = shape["q_lens"], shape["kv_lens"], shape["page"]
    heads, heads_kv, dim = shape["heads"], shape["heads_kv"], shape["dim"]
    size, batch = SIZES[shape.get("cache") or shape["dtype"]], len(q_lens)
    rows = [needed(n, length, options) for n, length in zip(q_lens, kv_lens, strict=True)]
    entries = sum(-(-n // page) for n in rows)
    moved = 4 * sum(q_lens) * heads * dim + 2 * size * heads_kv * dim * sum(rows) + 4 * entries
    moved += 4 * batch + 4 * (batch + 1) + (4 * heads if shape.get("sinks") else 0)
    flops = 4 * heads * dim * all_pairs(q_lens, kv_lens, options)
    return flops, moved + table_bytes(shape, options, max(kv_lens))


def append(shape: Shape, options: Shape) -> Work:
    q_lens, old_lens = shape["q_lens"], shape["old_lens"]
    heads, heads_kv, dim = shape["heads"], shape["heads_kv"], shape["dim"]
    lens = [n + old for n, old in zip(q_lens, old_lens, strict=True)]
    tokens, size = sum(q_lens), SIZES[options.get("cache_dtype") or shape["dtype"]]
    row = heads_kv * dim
    moved = (
        4 * tokens * heads * dim + (4 + 2 * size) * tokens * row + 2 * size * row * sum(old_lens)
    )
    moved += 8 * len(q_lens) + 4 + 4 * sum(-(-n // options["page_size"]) for n in lens)
    return 4 * heads * dim * all_pairs(q_lens, lens, options), moved


def mha_decode(shape: Shape, options: Shape) -> Work:
    b, s_q, heads, dim, length = (shape[x] for x in ("batch", "s_q", "heads", "dim", "length"))
    masks = {"is_causal": options.get("is_causal", False)}
    moved = 4 * b * s_q * heads * dim + 4 * heads * dim * b * length
    moved += 4 * b + 4 * b * -(-length // options["page_size"])
    return 4 * heads * dim * b * pairs(s_q, length, masks), moved


def mla_decode(shape: Shape, options: Shape) -> Work:
    b, heads, heads_kv, keys, dim, pe = (
        shape[x] for x in ("batch", "heads", "heads_kv", "keys", "dim", "pe")
    )
    moved = 2 * (b * heads * (2 * dim + pe) + b * keys * heads_kv * (dim + pe))
    return 2 * b * heads * keys * (2 * dim + pe), moved


def dsa_decode(shape: Shape, options: Shape) -> Work:
    """The picks are random: together, many queries reach every row that one may see."""
    b, s, s_kv, heads, dim, picks = (
        shape[x] for x in ("batch", "s", "s_kv", "heads", "dim", "picks")
    )
    tail, first, stride = (options[x] for x in ("dim_tail", "q_start_index_s", "stride_kv"))
    live = [min(picks, s_kv, (first + i + 1) // stride) for i in range(s)]
    rows = b * (min(s_kv, (first + s) // stride) if s > 1 else live[0])
    moved = 2 * b * s * heads * (2 * dim + tail) + 2 * rows * (dim + tail) + 4 * b * s * picks
    return 2 * heads * (2 * dim + tail) * b * sum(live), moved


def metadata(shape: Shape) -> int:
    return 8 * (len(shape["lens"]) + 1) + 8 * sum(shape["lens"])


def nsa_compressed(shape: Shape, options: Shape) -> Work:
    lens, heads, heads_kv, dim = (shape[x] for x in ("lens", "heads", "heads_kv", "dim"))
    tokens, chunks = sum(lens), sum(-(-n // options["bs"]) for n in lens)
    moved = 4 * dim * (tokens * heads + chunks * heads_kv) + 4 * heads * tokens
    scored = sum(closed(n, options["bs"]) for n in lens)
    return 4 * heads * dim * scored, moved + metadata(shape)


def nsa_topk(shape: Shape, options: Shape) -> Work:
    lens, heads, heads_kv, dim = (shape[x] for x in ("lens", "heads", "heads_kv", "dim"))
    tokens, block = sum(lens), options["bs"]
    chunks = sum(-(-n // block) for n in lens)
    moved = 2 * dim * (tokens * heads + chunks * heads_kv)
    moved += 4 * tokens * heads_kv * options["selected_block_num"]
    scored = sum(closed(n, block) + closed(n - 1, block) + n for n in lens)
    return 2 * heads * dim * scored, moved + metadata(shape)


def nsa_sparse(shape: Shape, options: Shape) -> Work:
    lens, heads, heads_kv, dim = (shape[x] for x in ("lens", "heads", "heads_kv", "dim"))
    tokens, block, picks = sum(lens), options["block_size"], shape["selected"]
    moved = 4 * tokens * (heads + heads_kv) * dim + 4 * tokens * heads_kv * (picks + 1)
    moved += 4 * (len(lens) + 1) + 8 * tokens
    scored = sum(
        min(picks - 1, t // block) * block + t % block + 1 for n in lens for t in range(n)
    )
    return 4 * heads * dim * scored, moved


def indexer(shape: Shape, options: Shape) -> Work:
    s, s_kv, heads, dim = (shape[x] for x in ("s", "s_kv", "heads", "dim"))
    size = SIZES[shape["dtype"]]
    moved = size * (s * heads * dim + s_kv * dim) + (4 * s_kv if size == 1 else 0)
    moved += 4 * s * heads + 8 * s + 4 * s * s_kv
    return 2 * heads * dim * pairs(s, s_kv, {}), moved


def cache_write(shape: Shape, options: Shape) -> Work:
    tokens, row = shape["tokens"], shape["heads_kv"] * shape["dim"]
    size = SIZES[shape.get("cache") or shape["dtype"]]
    return 0, 2 * tokens * row * (2 + size) + 8 * tokens


COUNTS: dict[str, Callable[[Shape, Shape], Work]] = {
    "GQADenseFwdOp": dense,
    "GQABwdOp": dense_backward,
    "GQAVarlenFwdOp": varlen,
    "GQAPagedFwdOp": paged,
    "GQAPrefillPagedWithKVCacheFwdOp": append,
    "MHADecodePagedWithKVCacheFwdOp": mha_decode,
    "MLADecodeWithKVCacheFwdOp": mla_decode,
    "DSADecodeWithKVCacheFwdOp": dsa_decode,
    "NSACompressedVarlenFwdOp": nsa_compressed,
    "NSATopKVarlenFwdOp": nsa_topk,
    "NSAVarlenFwdOp": nsa_sparse,
    "FP8LightningIndexerFwdOp": indexer,
    "PagedKVCacheWriteFwdOp": cache_write,
}


def count(op: str, shape: Shape, options: Shape) -> Work:
    return COUNTS[op](shape, options)
