"""Launching grouped-query attention on Hopper: which tiles, in which order, for which keys."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tileops.kernels.common.recorder import machine
from tileops.kernels.common.tilelang_attention import make
from tileops.kernels.common.tilelang_launch import counter, launch
from tileops.kernels.common.triton_gqa import Scores, join, window_of
from tileops.kernels.common.triton_widened import widened_values

LOG2E = math.log2(math.e)
L2_BYTES = 40 * 2**20  # of keys and values that stay in the L2 cache while they are in use
NARROW = 256  # a left window of fewer keys is cheaper in small blocks
MOST_PACKED = 16  # heads of a tile: each is a copy of its own
PART = 256  # keys of the shortest parts: with fewer, joining them takes what they save
JOINED = 8  # parts joined at a time, by a warp


class Keys(NamedTuple):
    """Keys and values by request, int32 metadata.

    Dense k, v [B, S_kv, H_kv, D]; packed [T_kv, H_kv, D] behind `lengths` [B + 1]; or pools
    [N, page, H_kv, D] behind table [B, W], lengths [B] of their rows used, the tokens of q not
    among them if `appended`. Of any strides that `tensor_refusal` lets pass.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor | None = None
    table: Tensor | None = None
    appended: bool = False


class Tiles(NamedTuple):
    """Groups of 64 rows, keys of a block, blocks under way."""

    consumers: int
    block_n: int
    stages: int


def tiles_for(dim: int, layout: str, page: int, left: int) -> Tiles:
    """The fastest by docs/design/hopper-log.md; a block of keys is whole pages, or in one."""
    if dim == 256:
        return Tiles(2, 64, 2)
    if dim == 64:
        return Tiles(3, 64, 4) if 0 <= left < NARROW and page <= 64 else Tiles(3, 128, 2)
    return Tiles(3, 80, 2) if layout == "packed" else Tiles(2, 128, 2)


def packed_heads(group: int, rows: int) -> int:
    """Query heads of one KV head that share a tile: so many tokens less fill it."""
    fitting = (p for p in range(min(group, MOST_PACKED), 0, -1) if group % p == 0)
    return next(p for p in fitting if rows % p == 0 and rows // p % 8 == 0)


def keys_of_a_tile(tokens: int, keys: int, rows: int, window: tuple[int, int]) -> int:
    """The most of a dense request's keys that a tile of so many rows sees."""
    left, right = window
    if left < 0:
        return keys
    return min(keys, left + (tokens if right < 0 else min(tokens, rows + right)))


def splits_for(tiles: int, keys: int, block_n: int, processors: int) -> int:
    """Parts that the keys of each tile are walked in, all of them at once.

    keys: of the longest tile, in blocks of block_n.
    """
    most = min(processors // tiles, keys // PART)
    if most < 2:
        return 1
    blocks = -(-keys // block_n)
    longest = -(-blocks // most)
    return -(-blocks // longest)


def attend(
    o: Tensor,
    lse: Tensor | None,
    q: Tensor,
    keys: Keys,
    scores: Scores,
    offsets: Tensor | None = None,
) -> None:
    """Fill o, shaped like q, and lse, where there is one.

    Dense: q [B, S_q, H, D], lse [B, H, S_q]. Packed or paged keys: q [T_q, H, D] behind
    offsets int32 [B + 1], lse [H, T_q]. Values of e4m3 are widened first: their product takes
    weights of 16 bits.
    """
    k, v, table = keys.k, keys.v, keys.table
    heads, dim = q.shape[-2:]
    heads_kv = k.shape[-2]
    group = heads // heads_kv
    layout = "dense" if offsets is None else "packed" if table is None else "paged"
    page = k.shape[1] if layout == "paged" else 0
    left, right = window_of(scores)
    tiles = tiles_for(dim, layout, page, left)
    rows = 64 * tiles.consumers
    packed = 1 if offsets is None else packed_heads(group, rows)
    count = counter(q)
    e4m3 = q.dtype == torch.float8_e4m3fn
    element = (k.dtype.itemsize + 2) * heads_kv * dim  # bytes of a key and its value
    processors, splits = machine(q).processors, 1
    if offsets is None:
        requests, blocks = q.shape[0], -(-q.shape[1] // rows)
        all_tiles = blocks * requests * heads
        in_l2 = L2_BYTES // (element // heads_kv * k.shape[1]) or 1  # KV heads
        sections = -(-(requests * heads_kv) // in_l2)
        section = -(-(requests * heads_kv) // sections) * group
        longest = keys_of_a_tile(q.shape[1], k.shape[1], rows, (left, right))
        if not (e4m3 and o.dtype == torch.float16):  # which a part may leave and the whole not
            splits = splits_for(all_tiles, longest, tiles.block_n, processors)
        all_tiles *= splits
        offsets = lengths = count
    else:
        assert keys.lengths is not None
        lengths = keys.lengths
        requests, blocks = offsets.shape[0] - 1, 0
        rows_kv = k.shape[0] if table is None else table.numel() * page
        section = int(rows_kv * element <= L2_BYTES)
        all_tiles = (q.shape[0] // (rows // packed) + requests + 1) * (heads // packed)
    scale, cap = scores.scale * LOG2E, 0.0
    if scores.softcap:
        scale, cap = scores.softcap * LOG2E, 2 * scale / scores.softcap
    o_parts, lse_parts, sinks = o, lse, scores.sinks
    if splits > 1:  # each part of the keys is a request of its own
        o_parts = o.new_empty((splits * requests, *o.shape[1:]))
        lse_parts = o.new_empty((splits * requests, heads, q.shape[1]), dtype=torch.float32)
        sinks = None
    of_heads = count if sinks is None else sinks.contiguous()
    if e4m3:
        assert scores.q_scale is not None and scores.k_scale is not None
        assert scores.v_scale is not None
        v, of_heads = widened_values(v, scores.q_scale, scores.k_scale, scores.v_scale)
    launch(
        make,
        count,
        (
            q,
            k,
            v,
            o_parts,
            lengths if lse_parts is None else lse_parts.flatten(0, -2),
            offsets,
            lengths,
            count[None] if table is None else table,
            of_heads,
            count,
            scale,
            cap,
            left,
            right,
            requests,
            blocks,
            all_tiles,
            section,
            splits,
            min(processors, all_tiles),
        ),
        layout=layout,
        dtype=str(q.dtype).removeprefix("torch."),
        head_dim=dim,
        group=group,
        packed_heads=packed,
        split=splits > 1,
        page=page,
        appended=keys.appended,
        left=left >= 0,
        right=right >= 0,
        causal=right == 0,
        softcap=bool(scores.softcap),
        sinks=sinks is not None,
        has_lse=lse_parts is not None,
        out_dtype=str(o.dtype).removeprefix("torch.") if e4m3 else "",
        **tiles._asdict(),
    )
    if lse_parts is not None and splits > 1:
        join(
            o.flatten(0, 1),
            lse,
            o_parts,
            lse_parts,
            scores.sinks,
            requests * q.shape[1],
            q.shape[1],
            splits,
            packed=False,
            like_lse=True,
            at_once=JOINED,
            warps=1,
        )
