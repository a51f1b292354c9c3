"""Launching the gradients of grouped-query attention: which kernels, in which tiles."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from tileops.kernels.common.launch import launch, machine, rows
from tileops.kernels.common.machine import configuration
from tileops.kernels.common.triton_attention_backward import (
    finish_kernel,
    keys_kernel,
    queries_kernel,
    rows_kernel,
    sinks_kernel,
)

FAR = 2**30  # no sequence is longer: a window this wide is none
ROWS = 64  # of one program of rows_kernel
FINISHED = 32  # rows of one program of finish_kernel, where nothing else decides
SHARES = 1024  # summed at a time
WAYS = 128


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
        """Tiles of `block` rows, `rows` a token: of the batch if packed, else of a request, and
        how often that is needed."""
        if self.packed:
            return tokens * rows // block + self.count + 1, 1
        return (length * rows + block - 1) // block, self.count


class Scores(NamedTuple):
    """The options of the forward, and the tensors they bring along."""

    scale: float
    is_causal: bool
    left: int = -1
    right: int = -1
    softcap: float | None = None
    sinks: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    rotary: int = 0
    neox: bool = True


class Forward(NamedTuple):
    """q, o, do [T_q, H, D], k, v [T_kv, H_kv, D] and the lse; q and k as they were multiplied."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    do: Tensor
    lse: Tensor


def attend_backward(
    gradients: tuple[Tensor, Tensor, Tensor],
    dsinks: Tensor | None,
    forward: Forward,
    requests: Requests,
    scores: Scores,
) -> None:
    """Fill dq [T_q, H, D], dk and dv [T_kv, H_kv, D], and dsinks [H] where there are sinks.

    With scores.rotary, q and k are the rotated ones and dq and dk those of the unrotated.
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
    block_d = max(16, triton.next_power_of_2(dim))
    offsets_q, offsets_kv = _or(requests.offsets_q, q), _or(requests.offsets_kv, q)
    right = scores.right if scores.right < FAR else -1
    common = {
        "PACKED": requests.packed,
        "HEADS_KV": heads_kv,
        "GROUP": group,
        "D": dim,
        "BLOCK_D": block_d,
    }
    contraction = common | {
        "Q_ROW": q_row,
        "K_ROW": k_row,
        "V_ROW": v_row,
        "DO_ROW": do_row,
        "LEFT": scores.left if scores.left < FAR else -1,
        "RIGHT": 0 if scores.is_causal else right,
        "HAS_CAP": bool(scores.softcap),
        "WAYS": WAYS,
    }
    options = scores.scale, scores.softcap or 0.0
    levels = q.new_empty((heads_kv, tokens, group), dtype=torch.float32)
    deltas = torch.empty_like(levels)
    _rows(levels, deltas, dsinks, forward, (do, do_row), requests, scores, common)

    keys = dict(configuration("attention_backward_keys", f"d{block_d}", device))
    fused, block_m = bool(keys["FUSED"]), keys["BLOCK_M"]
    parts, batch = requests.tiles(tokens, requests.length_q, group, block_m)
    wide = q.new_zeros if fused else q.new_empty
    dk_out = q.new_empty(dk.shape, dtype=torch.float32) if scores.rotary else dk
    dq_out = dq
    if fused:
        dq_out = wide((heads_kv, parts * batch, block_m * block_d), dtype=torch.float32)
    elif scores.rotary:
        dq_out = wide(dq.shape, dtype=torch.float32)
    tiles, often = requests.tiles(tokens_kv, requests.length_kv, 1, keys["BLOCK_N"])
    launch(
        keys_kernel,
        (tiles * often * heads_kv,),
        q,
        k,
        v,
        do,
        levels,
        deltas,
        dq_out if fused else levels,
        dk_out,
        dv,
        offsets_q,
        offsets_kv,
        *options,
        requests.count,
        tokens,
        tokens_kv,
        requests.length_q,
        requests.length_kv,
        tiles,
        parts * batch,
        WARPS=keys["warps"],
        **contraction,
        **keys,
    )
    if not fused:
        numbers = configuration("attention_backward_queries", f"d{block_d}", device)
        tiles, often = requests.tiles(tokens, requests.length_q, group, numbers["BLOCK_M"])
        launch(
            queries_kernel,
            (tiles * often * heads_kv,),
            q,
            k,
            v,
            do,
            levels,
            deltas,
            dq_out,
            offsets_q,
            offsets_kv,
            *options,
            requests.count,
            tokens,
            requests.length_q,
            requests.length_kv,
            tiles,
            **contraction,
            **numbers,
        )
    turn = {
        "ROTARY": scores.rotary,
        "NEOX": scores.neox,
        "WAYS": WAYS,
        "warps": 4,
        "stages": 1,
    }
    cos, sin = _or(scores.cos, q), _or(scores.sin, q)
    table_rows = 0 if scores.cos is None else scores.cos.shape[0]
    if dq_out is not dq:
        block = block_m if fused else FINISHED
        tiles, often = requests.tiles(tokens, requests.length_q, group, block)
        launch(
            finish_kernel,
            (tiles * often * heads_kv,),
            dq_out,
            dq,
            cos,
            sin,
            offsets_q,
            offsets_kv,
            scores.scale if fused else 1.0,
            requests.count,
            tokens,
            requests.length_q,
            requests.length_kv,
            tiles,
            table_rows,
            QUERIES=True,
            SPREAD=fused,
            BLOCK_M=block,
            WARPS=keys["warps"],
            **common,
            **turn,
        )
    if dk_out is not dk:
        tiles, often = requests.tiles(tokens_kv, requests.length_kv, 1, FINISHED)
        launch(
            finish_kernel,
            (tiles * often * heads_kv,),
            dk_out,
            dk,
            cos,
            sin,
            offsets_kv,
            offsets_q,
            1.0,
            requests.count,
            tokens_kv,
            requests.length_kv,
            requests.length_q,
            tiles,
            table_rows,
            QUERIES=False,
            SPREAD=False,
            BLOCK_M=FINISHED,
            WARPS=1,
            **(common | {"GROUP": 1}),
            **turn,
        )


def _rows(
    levels: Tensor,
    deltas: Tensor,
    dsinks: Tensor | None,
    forward: Forward,
    gradient: tuple[Tensor, int],
    requests: Requests,
    scores: Scores,
    common: dict[str, Any],
) -> None:
    """Fill levels and deltas [H_kv, T_q, g], and dsinks."""
    o, o_row = rows(forward.o)
    do, do_row = gradient
    heads_kv, tokens, group = levels.shape
    block_g = triton.next_power_of_2(group)
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
        HAS_SINKS=dsinks is not None,
        O_ROW=o_row,
        DO_ROW=do_row,
        BLOCK_G=block_g,
        BLOCK_T=block_t,
        **common,
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


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A tensor argument that may be absent."""
    return other if tensor is None else tensor.contiguous()
