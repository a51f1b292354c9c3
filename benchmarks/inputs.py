"""The tensors of a benchmark call, the same in every process that asks with the same seed.

`build(op, shape, options, device)` gives the tensors of one operator by the names its `forward`
has. Only torch is imported here: the processes of the peers build their inputs with it too.
`shape` and `options` are plain data, so that they travel as JSON; a dtype is one of DTYPES.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Shape: TypeAlias = dict[str, Any]
Tensors: TypeAlias = dict[str, Tensor]

E4M3 = torch.float8_e4m3fn
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": E4M3}
CODE_SCALE = 2.0**-6  # of e4m3 tensors: unit-scale values use most of the format's range


class Maker:
    """Random tensors from one generator, in the order they are asked for."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def noise(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Unit-scale values; e4m3 codes of them over CODE_SCALE."""
        kind = torch.bfloat16 if dtype == E4M3 else dtype
        x = torch.randn(*shape, generator=self.generator, device=self.device, dtype=kind)
        return (x / CODE_SCALE).clamp(-448, 448).to(E4M3) if dtype == E4M3 else x

    def scales(self, *shape: int) -> Tensor:
        """float32 dequantization scales about CODE_SCALE."""
        x = torch.rand(*shape, generator=self.generator, device=self.device)
        return CODE_SCALE * (0.75 + 0.5 * x)

    def sinks(self, heads: int) -> Tensor:
        return torch.randn(heads, generator=self.generator, device=self.device)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, device=self.device)

    def permutation(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self.generator, device=self.device)

    def ints(self, values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def offsets(self, lens: Sequence[int]) -> Tensor:
        """int32 prefix sums, [len(lens) + 1]."""
        ends = [0]
        for length in lens:
            ends.append(ends[-1] + length)
        return self.ints(ends)

    def table(self, lens: Sequence[int], page: int) -> tuple[Tensor, int]:
        """A page table of distinct pages in random order, and the pages of the pool."""
        width = max(-(-length // page) for length in lens)
        pages = len(lens) * width
        return self.permutation(pages).to(torch.int32).view(len(lens), width), pages


def rope_tables(
    width: int, rows: int, dtype: torch.dtype, device: torch.device, base: float = 1e4
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [rows, width / 2] of float64 angles."""
    half = width // 2
    frequency = base ** (-torch.arange(half, dtype=torch.float64, device=device) / half)
    angle = torch.outer(torch.arange(rows, dtype=torch.float64, device=device), frequency)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _rope(shape: Shape, options: Shape, rows: int, make: Maker) -> Tensors:
    if options.get("pos_encoding_mode", "none") == "none":
        return {}
    dtype = DTYPES[options.get("out_dtype") or shape["dtype"]]
    width = options.get("rotary_dim") or shape["dim"]
    cos, sin = rope_tables(width, rows, dtype, make.device)
    return {"rope_cos": cos, "rope_sin": sin}


def dense(shape: Shape, options: Shape, make: Maker) -> Tensors:
    b, dtype = shape["batch"], DTYPES[shape["dtype"]]
    kv = (b, shape["s_kv"], shape["heads_kv"], shape["dim"])
    tensors = {
        "q": make.noise(b, shape["s_q"], shape["heads"], shape["dim"], dtype=dtype),
        "k": make.noise(*kv, dtype=dtype),
        "v": make.noise(*kv, dtype=dtype),
    }
    if dtype == E4M3:
        tensors |= {f"{x}_scale": make.scales(b, shape["heads_kv"]) for x in "qkv"}
    return tensors | _rope(shape, options, shape["s_kv"], make)


def dense_backward(shape: Shape, options: Shape, make: Maker) -> Tensors:
    """o and lse are those of a float32 forward of the same q, k and v."""
    square = shape | {"s_q": shape["s"], "s_kv": shape["s"]}
    tensors = dense(square, options, make)
    q, k, v = (tensors[x] for x in "qkv")
    causal = options.get("is_causal", True)
    o = torch.empty_like(q)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], device=q.device)
    group, scale, step = q.shape[2] // k.shape[2], q.shape[-1] ** -0.5, 1024
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            key, value = k[b, :, h // group].float(), v[b, :, h // group].float()
            for start in range(0, q.shape[1], step):
                rows = slice(start, min(start + step, q.shape[1]))
                seen = rows.stop if causal else q.shape[1]
                z = scale * q[b, rows, h].float() @ key[:seen].T
                if causal:
                    at = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
                    z.masked_fill_(torch.arange(seen, device=q.device) > at, -torch.inf)
                lse[b, h, rows] = torch.logsumexp(z, -1)
                o[b, rows, h] = (torch.softmax(z, -1) @ value[:seen]).to(q.dtype)
    return tensors | {"o": o, "do": make.noise(*q.shape, dtype=q.dtype), "lse": lse}


def varlen(shape: Shape, options: Shape, make: Maker) -> Tensors:
    q_lens, kv_lens, dtype = shape["q_lens"], shape["kv_lens"], DTYPES[shape["dtype"]]
    kv = (sum(kv_lens), shape["heads_kv"], shape["dim"])
    tensors = {
        "q": make.noise(sum(q_lens), shape["heads"], shape["dim"], dtype=dtype),
        "k": make.noise(*kv, dtype=dtype),
        "v": make.noise(*kv, dtype=dtype),
        "cu_seqlens_q": make.offsets(q_lens),
        "cu_seqlens_kv": make.offsets(kv_lens),
    }
    if dtype == E4M3:
        tensors |= {f"{x}_scale": make.scales(len(q_lens), shape["heads_kv"]) for x in "qkv"}
    if shape.get("sinks"):
        tensors["sinks"] = make.sinks(shape["heads"])
    return tensors | _rope(shape, options, max(kv_lens), make)


def paged(shape: Shape, options: Shape, make: Maker) -> Tensors:
    q_lens, kv_lens, dtype = shape["q_lens"], shape["kv_lens"], DTYPES[shape["dtype"]]
    cache = DTYPES[shape.get("cache") or shape["dtype"]]
    table, pages = make.table(kv_lens, shape["page"])
    pool = (pages, shape["page"], shape["heads_kv"], shape["dim"])
    tensors = {
        "q": make.noise(sum(q_lens), shape["heads"], shape["dim"], dtype=dtype),
        "k_pages": make.noise(*pool, dtype=cache),
        "v_pages": make.noise(*pool, dtype=cache),
        "page_table": table,
        "cache_seqlens": make.ints(kv_lens),
        "cu_seqlens_q": make.offsets(q_lens),
    }
    if cache == E4M3:
        tensors |= {"k_scale": make.scales(1), "v_scale": make.scales(1)}
    if shape.get("sinks"):
        tensors["sinks"] = make.sinks(shape["heads"])
    return tensors | _rope(shape, options, max(kv_lens), make)


def append(shape: Shape, options: Shape, make: Maker) -> Tensors:
    q_lens, old_lens, dtype = shape["q_lens"], shape["old_lens"], DTYPES[shape["dtype"]]
    cache = DTYPES[options.get("cache_dtype") or shape["dtype"]]
    lens = [n + old for n, old in zip(q_lens, old_lens, strict=True)]
    table, pages = make.table(lens, options["page_size"])
    new = (sum(q_lens), shape["heads_kv"], shape["dim"])
    pool = (pages * options["page_size"], shape["heads_kv"], shape["dim"])
    return {
        "q": make.noise(sum(q_lens), shape["heads"], shape["dim"], dtype=dtype),
        "k_new": make.noise(*new, dtype=dtype),
        "v_new": make.noise(*new, dtype=dtype),
        "k_pages": make.noise(*pool, dtype=cache),
        "v_pages": make.noise(*pool, dtype=cache),
        "k_scale": make.scales(1),
        "v_scale": make.scales(1),
        "cu_seqlens_q": make.offsets(q_lens),
        "cache_seqlens": make.ints(old_lens),
        "block_table": table,
    }


def mha_decode(shape: Shape, options: Shape, make: Maker) -> Tensors:
    b, dtype, page = shape["batch"], DTYPES[shape["dtype"]], options["page_size"]
    table, pages = make.table([shape["length"]] * b, page)
    pool = (pages * page, shape["heads"], shape["dim"])
    return {
        "q": make.noise(b, shape["s_q"], shape["heads"], shape["dim"], dtype=dtype),
        "k": make.noise(*pool, dtype=dtype),
        "v": make.noise(*pool, dtype=dtype),
        "real_seqlen_kv": make.ints([shape["length"]] * b),
        "block_table": table,
    }


def mla_decode(shape: Shape, options: Shape, make: Maker) -> Tensors:
    b, dtype = shape["batch"], DTYPES[shape["dtype"]]
    kv = (b, shape["keys"], shape["heads_kv"])
    return {
        "q": make.noise(b, shape["heads"], shape["dim"], dtype=dtype),
        "q_pe": make.noise(b, shape["heads"], shape["pe"], dtype=dtype),
        "k": make.noise(*kv, shape["dim"], dtype=dtype),
        "k_pe": make.noise(*kv, shape["pe"], dtype=dtype),
    }


def dsa_decode(shape: Shape, options: Shape, make: Maker) -> Tensors:
    """A query picks rows it may see at random, all of them where they are few; S_kv pads."""
    b, s, s_kv, picks = shape["batch"], shape["s"], shape["s_kv"], shape["picks"]
    dtype, width = DTYPES[shape["dtype"]], shape["dim"] + options["dim_tail"]
    stride, first = options["stride_kv"], options["q_start_index_s"]
    indices = torch.full((b, s, 1, picks), s_kv, dtype=torch.int32, device=make.device)
    last = (torch.arange(s_kv, device=make.device) + 1) * stride - 1
    take, step = min(picks, s_kv), max(1, (1 << 26) // s_kv)
    for row in range(b):
        for start in range(0, s, step):
            stop = min(start + step, s)
            at = first + torch.arange(start, stop, device=make.device)[:, None]
            rank = make.uniform(stop - start, s_kv).masked_fill_(last > at, -1.0)
            value, order = rank.topk(take, dim=1)
            indices[row, start:stop, 0, :take] = torch.where(value >= 0, order, s_kv).int()
    return {
        "q": make.noise(b, s, shape["heads"], width, dtype=dtype),
        "kv": make.noise(b, s_kv, 1, width, dtype=dtype),
        "indices": indices,
    }


def nsa_packing(lens: Sequence[int], block: int, make: Maker) -> Tensors:
    """offsets, chunk_offsets and token_indices of a ragged batch."""
    request = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens))
    position = torch.cat([torch.arange(n) for n in lens])
    return {
        "offsets": make.offsets(lens),
        "chunk_offsets": make.offsets([-(-n // block) for n in lens]),
        "token_indices": torch.stack([request, position], 1).int().to(make.device),
    }


def nsa_compressed(shape: Shape, options: Shape, make: Maker) -> Tensors:
    dtype, block = DTYPES[shape["dtype"]], options["bs"]
    chunks = sum(-(-n // block) for n in shape["lens"])
    q = make.noise(sum(shape["lens"]), shape["heads"], shape["dim"], dtype=dtype)
    k, v = (make.noise(chunks, shape["heads_kv"], shape["dim"], dtype=dtype) for _ in "kv")
    return {"q": q, "k_cmp": k, "v_cmp": v} | nsa_packing(shape["lens"], block, make)


def nsa_topk(shape: Shape, options: Shape, make: Maker) -> Tensors:
    tensors = nsa_compressed(shape, options, make)
    del tensors["v_cmp"]
    return tensors


def nsa_sparse(shape: Shape, options: Shape, make: Maker) -> Tensors:
    """The first, the previous and the current block, and random ones between them."""
    lens, heads_kv, picks = shape["lens"], shape["heads_kv"], shape["selected"]
    dtype, block = DTYPES[shape["dtype"]], options["block_size"]
    packing = nsa_packing(lens, block, make)
    current = packing["token_indices"][:, 1] // block
    ids = torch.arange(-(-max(lens) // block), device=make.device)
    rank = make.uniform(len(current), heads_kv, len(ids))
    at = current[:, None, None]
    rank = torch.where((ids == 0) | (ids == at) | (ids == at - 1), rank + 1, rank)
    value, order = rank.masked_fill(ids > at, -1.0).topk(min(picks, len(ids)), dim=-1)
    chosen = torch.full((*rank.shape[:2], picks), -1, dtype=torch.int32, device=make.device)
    chosen[..., : order.shape[-1]] = torch.where(value >= 0, order, -1).int()
    kv = (len(current), heads_kv, shape["dim"])
    return {
        "q": make.noise(len(current), shape["heads"], shape["dim"], dtype=dtype),
        "k": make.noise(*kv, dtype=dtype),
        "v": make.noise(*kv, dtype=dtype),
        "block_indices": chosen,
        "block_counts": (chosen >= 0).sum(-1, dtype=torch.int32),
        "offsets": packing["offsets"],
        "token_indices": packing["token_indices"],
    }


def indexer(shape: Shape, options: Shape, make: Maker) -> Tensors:
    s, s_kv, dtype = shape["s"], shape["s_kv"], DTYPES[shape["dtype"]]
    tensors = {
        "index_q": make.noise(1, s, shape["heads"], shape["dim"], dtype=dtype),
        "index_k": make.noise(1, s_kv, 1, shape["dim"], dtype=dtype),
        "weights": make.uniform(s, shape["heads"]) - 0.5,
        "cu_seqlen_ks": torch.zeros(s, dtype=torch.int32, device=make.device),
        "cu_seqlen_ke": (torch.arange(s, device=make.device) + s_kv - s + 1).int(),
    }
    if dtype == E4M3:
        tensors["index_k_scale"] = make.scales(1, s_kv, 1)
    return tensors


def cache_write(shape: Shape, options: Shape, make: Maker) -> Tensors:
    """Distinct slots in random order in a pool of twice the rows."""
    tokens, page, dtype = shape["tokens"], shape["page"], DTYPES[shape["dtype"]]
    cache = DTYPES[shape.get("cache") or shape["dtype"]]
    pages = -(-2 * tokens // page)
    row = (shape["heads_kv"], shape["dim"])
    tensors = {
        "k": make.noise(tokens, *row, dtype=dtype),
        "v": make.noise(tokens, *row, dtype=dtype),
        "k_pages": make.noise(pages, page, *row, dtype=cache),
        "v_pages": make.noise(pages, page, *row, dtype=cache),
        "slot_mapping": make.permutation(pages * page)[:tokens].contiguous(),
    }
    if cache == E4M3:
        tensors |= {"k_scale": make.scales(1), "v_scale": make.scales(1)}
    return tensors


BUILDERS: dict[str, Callable[[Shape, Shape, Maker], Tensors]] = {
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


def build(
    op: str, shape: Shape, options: Shape, device: torch.device | str, seed: int = 0
) -> Tensors:
    """The tensors of one call of `op`, by the names of its forward's arguments."""
    with torch.no_grad():
        return BUILDERS[op](shape, options, Maker(torch.device(device), seed))
