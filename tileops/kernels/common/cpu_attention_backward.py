"""Gradients of `cpu_attention.attend` for packed keys: one request at a time, in place.

Five contractions per visible (query, key) pair: the scores again, dv += P^T do, dP = do v^T,
dq += dS k and dk += dS^T q. Scores and dP are float32, since dS = P (dP - delta) cancels; with
long bfloat16 inputs the other three take bfloat16 operands (P and dS rounded once) and add
their products up in float32. KV heads are the outer loop, so that only a few heads' keys and
gradients are held widened at a time.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tileops.kernels.common.cpu_attention import (
    BLOCK_ELEMENTS,
    CAUSAL_ROWS,
    KEY_BLOCK,
    LOG2E,
    TILE_ROWS,
    Bounds,
    Capping,
    Rope,
    Scratch,
    by_group,
    by_head,
    rotate_,
    widen,
)


def attend_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    scale: float,
    is_causal: bool = False,
    left: int = -1,
    right: int = -1,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dsinks: Tensor | None = None,
    rope: Rope | None = None,
    scratch: Scratch | None = None,
) -> None:
    """Fill dq [S_q, H, D], dk [S_kv, H_kv, D] and dv [S_kv, H_kv, D_v]; add to dsinks [H].

    q, k, v, o [S_q, H, D_v], do like o, and lse [H, S_q] (without the sink's share) are the
    forward's, with any strides; the options are those of `attend`. Rows whose lse is -inf
    contribute nothing and get a zero dq. The g query heads of a KV head are summed in float32
    and rounded once. dsinks (float32, given with sinks) is shared by the requests of a call.
    """
    s_q, heads, _ = q.shape
    s_kv, heads_kv, _ = k.shape
    if s_q == 0 or s_kv == 0 or heads == 0:
        for gradient in (dq, dk, dv):
            gradient.zero_()
        return
    scratch = scratch or Scratch()
    group = heads // heads_kv
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows = max(1, min(CAUSAL_ROWS, TILE_ROWS // group, s_q))
    low = torch.bfloat16 if q.dtype == torch.bfloat16 and s_q >= CAUSAL_ROWS else work
    bounds = Bounds.of(s_q, s_kv, is_causal, left, right)
    capping = Capping.of(scale, softcap)
    held = s_kv * max(k.shape[2], v.shape[2])
    together = max(1, min(TILE_ROWS // (rows * group), BLOCK_ELEMENTS // held))
    for h in range(0, heads_kv, together):
        part = slice(h, min(h + together, heads_kv))
        count = part.stop - h
        mine = slice(h * group, part.stop * group)
        shape = (count, s_kv, k.shape[2])
        side = KeySide(
            widen(scratch.take("k", shape, work), k[:, part].transpose(0, 1)),
            scratch.take("k_low", shape, low),
            scratch.take("v", (count, s_kv, v.shape[2]), work),
            scratch.take("dk", shape, work).zero_(),
            scratch.take("dv", (count, s_kv, v.shape[2]), work).zero_(),
        )
        if rope is not None:
            rotate_(side.k, rope.rows(0, s_kv, work))
        side.k_low.copy_(side.k)
        widen(side.v, v[:, part].transpose(0, 1))
        for first in range(0, s_q, rows):
            last = min(first + rows, s_q)
            here = slice(first, last)
            lo, hi = bounds.interval(first, last)
            if lo == hi:
                dq[here, mine].zero_()
                continue
            shape = (count, group * (last - first), k.shape[2])
            tile = RowSide(
                scratch.take("q", shape, work),
                scratch.take("q_low", shape, low),
                scratch.take("do", (*shape[:2], v.shape[2]), work),
                scratch.take("do_low", (*shape[:2], v.shape[2]), low),
                scratch.take("dq", shape, work).zero_(),
                scratch.take("delta", (*shape[:2], 1), work),
                lse[mine, here].to(work, copy=True).reshape(count, -1, 1),
            )
            by_group(tile.q, group).copy_(by_head(q[here, mine], count))
            if rope is not None:
                at = first + bounds.offset
                rotate_(by_group(tile.q, group), rope.rows(at, at + last - first, work))
            tile.q_low.copy_(tile.q)
            by_group(tile.do, group).copy_(by_head(do[here, mine], count))
            tile.do_low.copy_(tile.do)
            product = by_group(tile.do, group) * by_head(o[here, mine], count)
            torch.sum(product, -1, keepdim=True, out=by_group(tile.delta, group))
            if sinks is not None and dsinks is not None:
                _join_sinks(tile, sinks[mine], dsinks[mine])
            # A row without keys has lse = -inf; exp(score - inf) makes its weights zero.
            tile.lse.masked_fill_(tile.lse == -math.inf, math.inf)
            for a in range(lo, hi, KEY_BLOCK):
                b = min(a + KEY_BLOCK, hi)
                edges = bounds.edges(first, last - first, a, b - a)
                _contract(tile, side.cut(a, b), capping, edges, last - first, scratch)
            tile.dq.mul_(scale)
            if rope is not None:
                rotate_(by_group(tile.dq, group), rope.rows(at, at + last - first, work).back())
            by_head(dq[here, mine], count).copy_(by_group(tile.dq, group))
        side.dk.mul_(scale)
        if rope is not None:
            rotate_(side.dk, rope.rows(0, s_kv, work).back())
        dk[:, part].transpose(0, 1).copy_(side.dk)
        dv[:, part].transpose(0, 1).copy_(side.dv)


class KeySide(NamedTuple):
    """Some heads' keys k and values v [heads, n, .], widened; k again as the matmuls with dS
    take it; running gradients."""

    k: Tensor
    k_low: Tensor
    v: Tensor
    dk: Tensor
    dv: Tensor

    def cut(self, start: int, stop: int) -> "KeySide":
        return KeySide(*(x[:, start:stop] for x in self))


class RowSide(NamedTuple):
    """A tile's rows q, do [heads, R, .], widened and as the matmuls with dS and P take them;
    the running gradient; delta and lse [heads, R, 1]."""

    q: Tensor
    q_low: Tensor
    do: Tensor
    do_low: Tensor
    dq: Tensor
    delta: Tensor
    lse: Tensor


def _join_sinks(tile: RowSide, sinks: Tensor, dsinks: Tensor) -> None:
    """Put the sinks [heads * g] into the tile's lse, and their gradient into dsinks."""
    shape = (sinks.shape[0], -1)
    lse, delta = tile.lse.view(shape), tile.delta.view(shape)
    sink = sinks.to(lse.dtype)[:, None]
    torch.logaddexp(lse, sink, out=lse)
    # sink = -inf over a row without keys, and sink = +inf, are inf - inf: no gradient there.
    share = (sink - lse).exp_().masked_fill_(lse.isinf(), 0.0)
    dsinks.sub_((share * delta).sum(1))


def _contract(
    tile: RowSide,
    side: KeySide,
    capping: Capping,
    edges: list[tuple[slice, Tensor]],
    rows: int,
    scratch: Scratch,
) -> None:
    """The five contractions of one tile with one block of keys."""
    shape = (*tile.q.shape[:2], side.k.shape[1])
    weights = scratch.take("weights", shape, tile.q.dtype)
    torch.baddbmm(weights, tile.q, side.k.mT, beta=0, alpha=capping.factor, out=weights)
    slope = capping.apply_(weights, scratch.take("slope", shape, tile.q.dtype))
    weights.sub_((tile.lse * LOG2E).sub_(capping.shift)).exp2_()
    for columns, hidden in edges:
        weights.view(shape[0], -1, rows, shape[2])[..., columns].masked_fill_(hidden, 0.0)
    low = scratch.take("weights_low", shape, tile.do_low.dtype).copy_(weights)
    _add_product(side.dv, low.mT, tile.do_low, scratch)
    product = scratch.take("product", shape, weights.dtype)
    weights.mul_(torch.bmm(tile.do, side.v.mT, out=product).sub_(tile.delta))
    if slope is not None:
        weights.mul_(slope)
    low.copy_(weights)
    _add_product(tile.dq, low, side.k_low, scratch)
    _add_product(side.dk, low.mT, tile.q_low, scratch)


def _add_product(total: Tensor, left: Tensor, right: Tensor, scratch: Scratch) -> None:
    """total += left @ right, the sum in total's dtype."""
    if left.dtype == total.dtype:
        total.baddbmm_(left, right)
    else:
        part = scratch.take("part", total.shape, left.dtype)
        total.add_(torch.bmm(left, right, out=part))
