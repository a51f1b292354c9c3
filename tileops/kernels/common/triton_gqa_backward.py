"""Launching the gradients of grouped-query attention: which kernels, in which tiles."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tileops.kernels.common.launch import larger, launch, machine, padded, rows, smaller
from tileops.kernels.common.machine import Machine, configuration
from tileops.kernels.common.triton_attention_backward import keys_kernel, queries_kernel
from tileops.kernels.common.triton_backward_rows import finish_kernel, rows_kernel, sinks_kernel
from tileops.kernels.common.triton_gqa import FAR, WAYS, Scores
from tileops.kernels.common.triton_tiles import order_kernel

ROWS = 64  # of one program of rows_kernel
FINISHED = 32  # rows of one program of finish_kernel, where nothing else decides
SHARES = 1024  # summed at a time
SORTED = 1024  # requests whose tiles are put in order
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

    def tiles(self, tokens: Any, length: Any, rows: int, block: int) -> tuple[Any, Any]:
        """How many tiles of `block` rows, `rows` a token: as kernels count them (of the batch if
        packed, else of a request), and of the batch."""
        if self.packed:
            tiles = tokens * rows // block + self.count + 1
            return tiles, tiles
        tiles = (length * rows + block - 1) // block
        return tiles, tiles * self.count


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
    tokens, tokens_kv = q.shape[0], k.shape[0]
    heads, dim = q.shape[1:]
    heads_kv = k.shape[1]
    group = heads // heads_kv
    device = machine(q)
    numbers = keys_numbers(device, padded(dim))
    fused, block_m = bool(numbers["FUSED"]), numbers["BLOCK_M"]
    levels = q.new_empty((heads_kv, tokens, group), dtype=torch.float32)
    deltas = torch.empty_like(levels)
    _rows(levels, deltas, dsinks, forward._replace(do=do), requests, scores)

    tiles, all_tiles = requests.tiles(tokens_kv, requests.length_kv, 1, numbers["BLOCK_N"])
    splits: Any = 1
    if not deterministic():
        walked = tokens if requests.packed else requests.length_q
        splits = splits_wanted(all_tiles * heads_kv, device.processors, walked * group)
    split = smaller(splits - 1, 1)  # 1 where there are parts to add up, else 0
    dk_sum = _zeros(q, (tokens_kv if scores.rotary else tokens_kv * split, heads_kv, dim))
    dv_sum = _zeros(q, (tokens_kv * split, heads_kv, dim))
    _, parts = requests.tiles(tokens, requests.length_q, group, block_m)
    dq_sum = levels
    if fused:
        dq_sum = _zeros(q, (heads_kv, parts, block_m * padded(dim)))
    offsets_q, offsets_kv = _or(requests.offsets_q, q), _or(requests.offsets_kv, q)
    left = scores.left if scores.left < FAR else -1
    right = 0 if scores.is_causal else scores.right if scores.right < FAR else -1
    ordered = requests.packed and left < 0 <= right
    options = {
        "PACKED": requests.packed,
        "ORDERED": ordered,
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
        "WAYS": WAYS,
    }
    launch(
        keys_kernel,
        (all_tiles * heads_kv, splits),
        q,
        k,
        v,
        do,
        levels,
        deltas,
        dk_sum if scores.rotary else dk,
        dv,
        dk_sum,
        dv_sum,
        dq_sum,
        offsets_q,
        offsets_kv,
        _order(requests, offsets_kv, tiles, 1, numbers["BLOCK_N"], True) if ordered else q,
        scores.scale,
        scores.softcap or 0.0,
        requests.count,
        tokens,
        tokens_kv,
        requests.length_q,
        requests.length_kv,
        tiles,
        splits,
        parts,
        WARPS=numbers["warps"],
        **options,
        **numbers,
    )
    if scores.rotary:
        _finish(dk_sum, dk, requests, scores, queries=False)
    else:
        _finish(dk_sum, dk, requests, scores, queries=False, active=split)
    _finish(dv_sum, dv, requests, scores._replace(rotary=0), queries=False, active=split)
    if fused:
        _finish(dq_sum, dq, requests, scores, queries=True, spread=numbers)
        return

    numbers = dict(configuration("attention_backward_queries", f"d{padded(dim)}", device))
    tiles, all_tiles = requests.tiles(tokens, requests.length_q, group, numbers["BLOCK_M"])
    if scores.rotary:
        dq_sum = q.new_empty(dq.shape, dtype=torch.float32)
    launch(
        queries_kernel,
        (all_tiles * heads_kv,),
        q,
        k,
        v,
        do,
        levels,
        deltas,
        dq_sum if scores.rotary else dq,
        offsets_q,
        offsets_kv,
        _order(requests, offsets_q, tiles, group, numbers["BLOCK_M"], False) if ordered else q,
        scores.scale,
        scores.softcap or 0.0,
        requests.count,
        tokens,
        requests.length_q,
        requests.length_kv,
        tiles,
        **options,
        **numbers,
    )
    if scores.rotary:
        _finish(dq_sum, dq, requests, scores, queries=True)


def _order(
    requests: Requests, offsets: Tensor, tiles: Any, numerator: int, block: int, first: bool
) -> Tensor:
    """Packed tiles in the order of falling work; first: a request's first ones have most."""
    order = offsets.new_empty((tiles, 2))
    launch(
        order_kernel,
        (tiles,),
        offsets,
        order,
        requests.count,
        tiles,
        numerator=numerator,
        BLOCK=block,
        FIRST=first,
        WAYS=SORTED,
        warps=4,
        stages=1,
    )
    return order


def _rows(
    levels: Tensor,
    deltas: Tensor,
    dsinks: Tensor | None,
    forward: Forward,
    requests: Requests,
    scores: Scores,
) -> None:
    """Fill levels and deltas [H_kv, T_q, g], and dsinks [H]."""
    o, o_row = rows(forward.o)
    do, do_row = rows(forward.do)
    heads_kv, tokens, group = levels.shape
    dim = o.shape[-1]
    block_g = 1 << (group - 1).bit_length()
    block_t = max(1, ROWS // block_g)
    blocks = (tokens + block_t - 1) // block_t
    shares = levels
    if dsinks is not None:
        shares = o.new_empty((heads_kv * group, blocks), dtype=torch.float32)
    launch(
        rows_kernel,
        (blocks * heads_kv,),
        o,
        do,
        forward.lse.contiguous(),
        _or(scores.sinks, o),
        levels,
        deltas,
        shares,
        _or(requests.offsets_q, o),
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
        warps=4,
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
    requests: Requests,
    scores: Scores,
    *,
    queries: bool,
    spread: dict[str, int] | None = None,
    active: Any = 1,
) -> None:
    """Fill out [tokens, heads, D], 16-bit, from the float32 total: rotated back, rounded.

    queries: they are those of queries. spread: total lies as the blocks of keys_kernel with these
    numbers, and lacks the scale. active: 0 where there is nothing to do.
    """
    if type(active) is int and not active:
        return
    tokens, heads, dim = out.shape
    heads_kv, group = heads, 1
    if spread is not None:
        heads_kv = total.shape[0]
        group = heads // heads_kv
    own, other = requests.offsets_q, requests.offsets_kv
    length, length_other = requests.length_q, requests.length_kv
    if not queries:
        own, other, length, length_other = other, own, length_other, length
    block = FINISHED if spread is None else spread["BLOCK_M"]
    tiles, all_tiles = requests.tiles(tokens, length, group, block)
    launch(
        finish_kernel,
        (all_tiles * heads_kv * active,),
        total,
        out,
        _or(scores.cos, out),
        _or(scores.sin, out),
        _or(own, out),
        _or(other, out),
        1.0 if spread is None else scores.scale,
        requests.count,
        tokens,
        length,
        length_other,
        tiles,
        0 if scores.cos is None else scores.cos.shape[0],
        active,
        PACKED=requests.packed,
        QUERIES=queries,
        SPREAD=spread is not None,
        HEADS_KV=heads_kv,
        GROUP=group,
        D=dim,
        ROTARY=scores.rotary,
        NEOX=scores.neox,
        BLOCK_D=padded(dim),
        BLOCK_M=block,
        WARPS=1 if spread is None else spread["warps"],
        WAYS=WAYS,
        warps=4,
        stages=1,
    )


def _zeros(like: Tensor, shape: tuple[Any, ...]) -> Tensor:
    return like.new_zeros(shape, dtype=torch.float32)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A tensor argument that may be absent."""
    return other if tensor is None else tensor.contiguous()
