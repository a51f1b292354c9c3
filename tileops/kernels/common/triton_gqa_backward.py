"""Launching the gradients of grouped-query attention: which kernels, in which tiles."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tileops.kernels.common.launch import (
    larger,
    launch,
    machine,
    or_other,
    padded,
    rows,
    smaller,
    together,
)
from tileops.kernels.common.machine import Machine, configuration
from tileops.kernels.common.triton_attention_backward import keys_kernel, queries_kernel
from tileops.kernels.common.triton_backward_rows import finish_kernel, rows_kernel, sinks_kernel
from tileops.kernels.common.triton_gqa import Scores, window_of
from tileops.kernels.common.triton_tiles import places_kernel

ELEMENTS = 8192  # of one program of rows_kernel, where the group is not wider
FINISHED = 32  # rows of one program of finish_kernel, where nothing else decides
SHARES = 1024  # summed at a time
SORTED = 1024  # requests whose tiles are put in the order of their work
SPLIT_ROWS = 512  # a split walks at least so many rows
MAX_SPLITS = 64
ROUNDS = 2  # programs per multiprocessor that even out their unequal work


class Requests(NamedTuple):
    """How tokens belong to `count` requests: behind offsets, or length_q and length_kv each."""

    count: Any
    length_q: Any = 0
    length_kv: Any = 0
    offsets_q: Tensor | None = None
    offsets_kv: Tensor | None = None

    @property
    def packed(self) -> bool:
        return self.offsets_q is not None


class Tiles(NamedTuple):
    """Tiles of the rows of one side of the requests.

    count: as kernels count them, of the batch if packed, else of a request. total: of the batch.
    places: which is which, if packed.
    """

    rows: int
    count: Any
    total: Any
    places: Tensor | None


class Forward(NamedTuple):
    """q, o, do [T_q, H, D], k, v [T_kv, H_kv, D] and the lse; q and k as they were multiplied."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    do: Tensor
    lse: Tensor


def deterministic() -> bool:
    """Whether gradients must be added up in one order."""
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def warps_for(elements: int) -> int:
    """Warps that hold so many elements of a few tensors in their registers."""
    return min(max(elements // 2048, 4), 16)


def splits_wanted(programs: Any, processors: int, walked: Any) -> Any:
    """How many parts the rows of a tile of keys are walked in, to give every processor work."""
    at_most = smaller(MAX_SPLITS, walked // SPLIT_ROWS)
    return larger(smaller(ROUNDS * processors // larger(programs, 1), at_most), 1)


def keys_numbers(device: Machine, block_d: int) -> dict[str, int]:
    """The numbers of keys_kernel; float32 atomics only where their order may vary."""
    numbers = dict(configuration("attention_backward_keys", f"d{block_d}", device))
    if deterministic():
        numbers["FUSED"] = 0
    return numbers


def tiles_of(
    requests: Requests, tokens: Any, queries: bool, rows: int, numerator: int, heavy: str | None
) -> Tiles:
    """Tiles of `rows` rows, `numerator` rows a token, of the tokens of queries or of keys.

    heavy: the end of a request, "first" or "last", whose tiles have most to do.
    """
    own, other = requests.offsets_q, requests.offsets_kv
    length = requests.length_q
    if not queries:
        own, other, length = other, own, requests.length_kv
    if own is None or other is None:
        count = (length * numerator + rows - 1) // rows
        return Tiles(rows, count, count * requests.count, None)
    count = tokens * numerator // rows + requests.count + 1
    places = own.new_empty((count * 6,))
    launch(
        places_kernel,
        (count,),
        own,
        other,
        places,
        requests.count,
        tokens,
        count,
        numerator=numerator,
        BLOCK=rows,
        SORTED=heavy is not None,
        FIRST=heavy == "first",
        WAYS=SORTED,
        warps=4,
        stages=1,
    )
    return Tiles(rows, count, count, places)


@together()
def attend_backward(
    gradients: tuple[Tensor, Tensor, Tensor],
    dsinks: Tensor | None,
    forward: Forward,
    requests: Requests,
    scores: Scores,
) -> None:
    """Fill dq [T_q, H, D], dk and dv [T_kv, H_kv, D], and dsinks [H] where there are sinks.

    With scores.rotary, q and k are the rotated ones, dq and dk those of the unrotated.
    """
    dq, dk, dv = gradients
    q, q_row = rows(forward.q)
    k, k_row = rows(forward.k)
    v, v_row = rows(forward.v)
    do, do_row = rows(forward.do)
    tokens, (heads, dim) = q.shape[0], q.shape[1:]
    tokens_kv, heads_kv = k.shape[:2]
    if heads == 0:
        dk.zero_()
        dv.zero_()
        return
    group = heads // heads_kv
    left, right = window_of(scores)
    ramp = left < 0 <= right
    numbers = keys_numbers(machine(q), padded(dim))
    fused = bool(numbers["FUSED"])

    stats = q.new_empty((2, heads_kv, tokens, group), dtype=torch.float32)
    _rows(stats, dsinks, forward._replace(do=do), requests, scores)

    keys = tiles_of(requests, tokens_kv, False, numbers["BLOCK_N"], 1, "first" if ramp else None)
    splits: Any = 1
    if not deterministic():
        walked = (tokens if requests.packed else requests.length_q) * group
        splits = splits_wanted(keys.total * heads_kv, machine(q).processors, walked)
    split = smaller(splits - 1, 1)  # 1 where there are parts to add up, else 0
    size = tokens_kv * heads_kv * dim
    # Of a size that may be 0 or 1, tracing would ask which: two elements more.
    dk_sum = _sum(q, 1, size) if scores.rotary else _sum(q, split, size * split + 2)
    dv_sum = _sum(q, split, size * split + 2)
    blocks, dq_sum = None, stats
    if fused:
        blocks = tiles_of(requests, tokens, True, numbers["BLOCK_M"], group, None)
        size = blocks.total * heads_kv * blocks.rows * padded(dim)
        dq_sum = _sum(q, 1, size)
    options = {
        "PACKED": requests.packed,
        "HEADS_KV": heads_kv,
        "GROUP": group,
        "D": dim,
        "Q_ROW": q_row,
        "K_ROW": k_row,
        "V_ROW": v_row,
        "DO_ROW": do_row,
        "LEFT": left,
        "RIGHT": right,
        "HAS_CAP": bool(scores.softcap),
        "BLOCK_D": padded(dim),
    }
    launch(
        keys_kernel,
        (keys.total * heads_kv, splits),
        q,
        k,
        v,
        do,
        stats,
        dk,
        dv,
        dk_sum,
        dv_sum,
        dq_sum,
        or_other(keys.places, stats),
        scores.scale,
        scores.softcap or 0.0,
        requests.count,
        tokens,
        requests.length_q,
        requests.length_kv,
        keys.count,
        splits,
        0 if blocks is None else blocks.total,
        WIDE=scores.rotary > 0,
        WARPS=numbers["warps"],
        **options,
        **numbers,
    )
    _finish(dk_sum, dk, keys, requests, scores, active=1 if scores.rotary else split)
    _finish(dv_sum, dv, keys, requests, scores._replace(rotary=0), active=split)
    if blocks is not None:
        _finish(dq_sum, dq, blocks, requests, scores, group=group, warps=numbers["warps"])
        return

    numbers = dict(configuration("attention_backward_queries", f"d{padded(dim)}", machine(q)))
    tiles = tiles_of(requests, tokens, True, numbers["BLOCK_M"], group, "last" if ramp else None)
    if scores.rotary:
        dq_sum = q.new_empty((tokens * heads * dim,), dtype=torch.float32)
    launch(
        queries_kernel,
        (tiles.total * heads_kv,),
        q,
        k,
        v,
        do,
        stats,
        dq_sum if scores.rotary else dq,
        or_other(tiles.places, stats),
        scores.scale,
        scores.softcap or 0.0,
        requests.count,
        tokens,
        requests.length_q,
        requests.length_kv,
        tiles.count,
        **options,
        **numbers,
    )
    if scores.rotary:
        _finish(dq_sum, dq, tiles, requests, scores, group=group)


def _rows(
    stats: Tensor,
    dsinks: Tensor | None,
    forward: Forward,
    requests: Requests,
    scores: Scores,
) -> None:
    """Fill stats [2, H_kv, T_q, g], and dsinks [H]."""
    o, o_row = rows(forward.o)
    do, do_row = rows(forward.do)
    heads_kv, tokens, group = stats.shape[1:]
    dim = o.shape[-1]
    block_g = 1 << (group - 1).bit_length()
    block_t = max(1, ELEMENTS // padded(dim) // block_g)
    blocks = (tokens + block_t - 1) // block_t
    shares = stats
    if dsinks is not None:
        shares = o.new_empty((heads_kv * group * blocks,), dtype=torch.float32)
    launch(
        rows_kernel,
        (blocks * heads_kv,),
        o,
        do,
        forward.lse.contiguous(),
        or_other(scores.sinks, o),
        stats,
        shares,
        or_other(requests.offsets_q, o),
        requests.count,
        tokens,
        requests.length_q,
        blocks,
        PACKED=requests.packed,
        HAS_SINKS=dsinks is not None,
        HEADS_KV=heads_kv,
        GROUP=group,
        D=dim,
        O_ROW=o_row,
        DO_ROW=do_row,
        BLOCK_D=padded(dim),
        BLOCK_G=block_g,
        BLOCK_T=block_t,
        warps=warps_for(block_t * block_g * padded(dim)),
        stages=1,
    )
    if dsinks is not None:
        launch(
            sinks_kernel,
            (heads_kv * group,),
            shares,
            dsinks,
            blocks,
            BLOCK=SHARES,
            warps=4,
            stages=1,
        )


def _finish(
    total: Tensor,
    out: Tensor,
    tiles: Tiles,
    requests: Requests,
    scores: Scores,
    *,
    group: int = 0,
    warps: int = 0,
    active: Any = 1,
) -> None:
    """Fill out [tokens, heads, D], 16-bit, from the float32 total: rotated back and rounded.

    group: query heads of a KV head, where out is the gradient of queries. warps: those of the
    keys_kernel that spread total over tiles, which lacks the scale then. active: 0 where there is
    nothing to do.
    """
    if type(active) is int and active == 0:
        return
    heads, dim = out.shape[1:]
    heads_kv = heads // (group or 1)
    length, length_other = requests.length_q, requests.length_kv
    if not group:
        length, length_other = length_other, length
    block = tiles.rows if warps else min(FINISHED, tiles.rows)
    launch(
        finish_kernel,
        (tiles.total * heads_kv * active, tiles.rows // block),
        total,
        out,
        or_other(scores.cos, total),
        or_other(scores.sin, total),
        or_other(tiles.places, total),
        scores.scale if warps else 1.0,
        requests.count,
        length,
        length_other,
        tiles.count,
        0 if scores.cos is None else scores.cos.shape[0],
        active,
        PACKED=requests.packed,
        QUERIES=bool(group),
        SPREAD=bool(warps),
        HEADS_KV=heads_kv,
        GROUP=group or 1,
        D=dim,
        ROTARY=scores.rotary,
        NEOX=scores.neox,
        BLOCK_D=padded(dim),
        TILE=tiles.rows,
        BLOCK_M=block,
        WARPS=warps or 1,
        warps=warps_for(block * padded(dim)),
        stages=1,
    )


def _sum(like: Tensor, active: Any, size: Any) -> Tensor:
    """float32 zeros to add to; memory of any size where that is not done."""
    if type(active) is int and active == 0:
        return like.new_empty((2,), dtype=torch.float32)
    return like.new_zeros((size,), dtype=torch.float32)
