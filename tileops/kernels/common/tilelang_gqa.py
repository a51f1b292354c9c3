"""Launching grouped-query attention on Hopper: which tiles, in which order, for which keys."""

import math


from torch import Tensor

from tileops.kernels.common.launch import machine
from tileops.kernels.common.tilelang_attention import make
from tileops.kernels.common.tilelang_launch import counter, launch
from tileops.kernels.common.triton_gqa import Scores, window_of

LOG2E = math.log2(math.e)
L2_BYTES = 40 * 2**20  # of keys and values that stay in the L2 cache while a section runs
CONSUMERS = {64: 3, 128: 2}  # groups of 64 rows by head dim
MOST_PACKED = 16  # heads of a tile: each is a copy of its own


def packed_heads(group: int, rows: int) -> int:
    """Query heads of one KV head that share a tile: so many tokens less fill it."""
    fitting = (p for p in range(min(group, MOST_PACKED), 0, -1) if group % p == 0)
    return next(p for p in fitting if rows % p == 0 and rows // p % 8 == 0)


def attend(
    o: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Scores,
    *,
    offsets: Tensor | None = None,
    lengths: Tensor | None = None,
    table: Tensor | None = None,
    page: int = 0,
    appended: bool = False,
) -> None:
    """Fill o, shaped like q, and lse, where there is one.

    Dense: q [B, S_q, H, D], k, v [B, S_kv, H_kv, D], lse [B, H, S_q]. Packed: q [T_q, H, D]
    behind offsets [B + 1], k, v [T_kv, H_kv, D] behind `lengths` [B + 1], lse [H, T_q]. Paged: k, v
    pools [N_kv, H_kv, D] of pages of `page` rows behind table [B, W], lengths [B] of them used,
    of `appended` requests without the tokens of q. Metadata is int32 and contiguous.
    """
    heads, dim = q.shape[-2:]
    heads_kv = k.shape[-2]
    group = heads // heads_kv
    consumers = CONSUMERS[dim]
    rows = 64 * consumers
    count = counter(q)
    packed = packed_heads(group, rows) if offsets is not None else 1
    left, right = window_of(scores)
    if offsets is None:
        batch, length = q.shape[:2]
        requests, blocks = batch, -(-length // rows)
        tiles = most = blocks * batch * heads
        element = 2 * k.element_size() * dim * k.shape[1]  # bytes of a KV head
        sections = -(-(batch * heads_kv * element) // L2_BYTES)
        section = -(-(batch * heads_kv) // sections) * group
        offsets = lengths = count
    else:
        assert lengths is not None
        requests, blocks, tiles, section = offsets.shape[0] - 1, 0, 0, 0
        most = (q.shape[0] // (rows // packed) + requests) * (heads // packed)
    scale, cap = scores.scale * LOG2E, 0.0
    if scores.softcap:
        scale, cap = scores.softcap * LOG2E, 2 * scale / scores.softcap
    launch(
        make,
        q,
        (
            q,
            k,
            v,
            o,
            lengths if lse is None else lse.flatten(0, -2),
            offsets,
            lengths,
            count[None] if table is None else table,
            count if scores.sinks is None else scores.sinks,
            count,
            scale,
            cap,
            left,
            right,
            requests,
            blocks,
            tiles,
            section,
            min(machine(q).processors, most),
        ),
        layout="dense" if q.dim() == 4 else "packed" if table is None else "paged",
        dtype=str(q.dtype).removeprefix("torch."),
        head_dim=dim,
        group=group,
        packed_heads=packed,
        page=page,
        appended=appended,
        left=left >= 0,
        right=right >= 0,
        causal=right == 0,
        softcap=bool(scores.softcap),
        sinks=scores.sinks is not None,
        has_lse=lse is not None,
        consumers=consumers,
    )
