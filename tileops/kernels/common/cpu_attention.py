"""Blocked attention on CPU tensors: one request at a time, outputs filled in place.

Every operator's ``cpu.py`` describes where its keys live (a key source) and calls `attend`.
The engine runs in eager mode only, hidden from the compiler behind the operator, so it may
read lengths on the host. Letters: S_q query rows, S_kv keys, H query heads, H_kv key/value
heads, g = H / H_kv, D head width, D_v value width, n keys of a block, R = g * rows of a tile.

Numbers: operands are widened to float32 (float64 stays float64). Scores, their maximum, the
sum and the accumulated output are float32; only for bfloat16 outputs and tall tiles are the
weights rounded to bfloat16 for the product with V, where the matmul is twice as fast. Float16
and e4m3 never meet a matmul, since the CPU has no fast one for them.
"""

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
E4M3 = torch.float8_e4m3fn

# Tile sizes found on two AVX-512 cores (1 MiB of L2 each); they bound memory, not results.
SUPER_ROWS = 512  # query rows that share one load of each key block
TILE_ROWS = 512  # R of a score tile: rows times the group, times the heads batched together
CAUSAL_ROWS = 128  # query rows of a tile: the diagonal wastes half of rows**2
KEY_BLOCK = 1024
DECODE_ELEMENTS = 2**19  # K elements widened at once when rows are few: half of the cache
BLOCK_ELEMENTS = 2**22  # K elements widened at once, at most
NARROW_ROWS = 64  # shortest tile for which a bfloat16 product with V pays


class Scratch:
    """Named flat buffers, reused between the blocks and requests of one operator call."""

    def __init__(self) -> None:
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of `shape` with unspecified contents; one live use per name."""
        count = math.prod(shape)
        flat = self._flat.get((name, dtype))
        if flat is None or flat.numel() < count:
            flat = self._flat[name, dtype] = torch.empty(count, dtype=dtype)
        return flat[:count].view(shape)


class Keys(Protocol):
    """Where a request's keys and values live."""

    heads: int

    def block(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys [n, H_kv, D] and values [n, H_kv, D_v] of positions start <= j < stop.

        Any strides; 16-bit, e4m3 (undequantized) or float32. Valid until the next call.
        """
        ...


class PackedKeys:
    """Keys k [S_kv, H_kv, D] and values v [S_kv, H_kv, D_v] that lie in one tensor each."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v, self.heads = k, v, k.shape[1]

    def block(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self.k[start:stop], self.v[start:stop]


class LatentKeys:
    """MLA: keys are rows of k [S_kv, H_kv, D] beside k_pe [S_kv, H_kv, PE]; values are k."""

    def __init__(self, k: Tensor, k_pe: Tensor, scratch: Scratch | None = None) -> None:
        self.k, self.k_pe, self.heads = k, k_pe, k.shape[1]
        self.scratch = scratch or Scratch()

    def block(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        k, k_pe = self.k[start:stop], self.k_pe[start:stop]
        shape = (stop - start, self.heads, k.shape[2] + k_pe.shape[2])
        out = self.scratch.take("latent", shape, k.dtype)
        return torch.cat((k, k_pe), dim=-1, out=out), k


class PagedKeys:
    """Keys of one request in a pool of pages [NP, PS, H_kv, D], values [NP, PS, H_kv, D_v].

    table [W] is the request's row of the page table. Only the entries whose positions a block
    asks for are read; an entry outside the pool, or past the row, is an IndexError. Flat pools
    [N_kv, H_kv, D] come in as `pool.unflatten(0, (-1, page_size))`.
    """

    def __init__(
        self, k_pages: Tensor, v_pages: Tensor, table: Tensor, scratch: Scratch | None = None
    ) -> None:
        self.k_pages, self.v_pages, self.table = k_pages, v_pages, table
        self.page_size, self.heads = k_pages.shape[1], k_pages.shape[2]
        self.scratch = scratch or Scratch()

    def block(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        first, last = start // self.page_size, -(-stop // self.page_size)
        if last > self.table.shape[0]:
            raise IndexError(
                f"position {stop - 1} needs page-table column {last - 1}, "
                f"but the table has {self.table.shape[0]} columns"
            )
        pages = self.table[first:last]
        ids = pages.tolist()
        count = self.k_pages.shape[0]
        for column, page in enumerate(ids, first):
            if not 0 <= page < count:
                raise IndexError(
                    f"page-table column {column} names page {page} of a pool of {count} pages"
                )
        rows = slice(start - first * self.page_size, stop - first * self.page_size)
        run = ids[-1] - ids[0] == len(ids) - 1 and ids == list(range(ids[0], ids[-1] + 1))
        return self._rows("k_pages", pages, ids[0] if run else None, rows), self._rows(
            "v_pages", pages, ids[0] if run else None, rows
        )

    def _rows(self, name: str, pages: Tensor, run: int | None, rows: slice) -> Tensor:
        pool: Tensor = getattr(self, name)
        # Only whole pools flatten without a copy; a strided one goes through the gather.
        if run is not None and pool.stride(0) == pool.stride(1) * self.page_size:
            return pool[run : run + len(pages)].flatten(0, 1)[rows]
        out = self.scratch.take(name, (len(pages), *pool.shape[1:]), pool.dtype)
        return torch.index_select(pool, 0, pages, out=out).flatten(0, 1)[rows]


class AppendedKeys:
    """Old keys in a pool, then this call's own rows: positions j >= old are k_new[j - old].

    k_new [n_new, H_kv, D], v_new [n_new, H_kv, D_v] are used at their own precision; the rows
    of an e4m3 pool are multiplied by k_scale and v_scale ([1], float32). `paged` is never
    asked for a position at or past `old`.
    """

    def __init__(
        self,
        paged: PagedKeys,
        old: int,
        k_new: Tensor,
        v_new: Tensor,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        self.paged, self.old, self.heads = paged, old, paged.heads
        self.new = (k_new, v_new)
        self.scales = (k_scale, v_scale) if paged.k_pages.dtype == E4M3 else (None, None)

    def block(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        new = slice(max(start - self.old, 0), max(stop - self.old, 0))
        if start >= self.old:
            return self.new[0][new], self.new[1][new]
        pages = self.paged.block(start, min(stop, self.old))
        if stop <= self.old and self.scales[0] is None:
            return pages
        k = self._join("k", pages[0], self.new[0][new], self.scales[0])
        return k, self._join("v", pages[1], self.new[1][new], self.scales[1])

    def _join(self, name: str, old: Tensor, rows: Tensor, scale: Tensor | None) -> Tensor:
        dtype = rows.dtype if scale is None else torch.float32
        shape = (old.shape[0] + rows.shape[0], *rows.shape[1:])
        out = self.paged.scratch.take(f"{name}_joined", shape, dtype)
        widen(out[: old.shape[0]], old)
        if scale is not None:
            out[: old.shape[0]].mul_(scale)
        out[old.shape[0] :].copy_(rows)
        return out


class Rope(NamedTuple):
    """Fused rotary embedding: cos and sin [P, rotary_dim / 2], row x for position x."""

    cos: Tensor
    sin: Tensor
    layout: str = "neox"

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> "Rope":
        if start < 0 or stop > self.cos.shape[0]:
            raise IndexError(
                f"positions {start} to {stop - 1} need rotary rows outside the tables, "
                f"which have {self.cos.shape[0]}"
            )
        cos, sin = self.cos[start:stop].to(dtype), self.sin[start:stop].to(dtype)
        return Rope(cos, sin, self.layout)

    def back(self) -> "Rope":
        """The inverse rotation."""
        return self._replace(sin=-self.sin)


def rope_of(call: Any) -> Rope | None:
    """The rotation of an operator call that brings its tables along."""
    if call.pos_encoding_mode == "none":
        return None
    return Rope(call.rope_cos, call.rope_sin, call.rope_layout)


def rotate_(x: Tensor, rope: Rope) -> Tensor:
    """Rotate x [..., n, D] in place; `rope` holds the n rows of its positions in x's dtype."""
    half = rope.cos.shape[1]
    if rope.layout == "neox":
        first, second = x[..., :half], x[..., half : 2 * half]
    else:
        first, second = x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
    turned = (first * rope.cos).addcmul_(second, rope.sin, value=-1)
    second.mul_(rope.cos).addcmul_(first, rope.sin)
    first.copy_(turned)
    return x


def widen(out: Tensor, rows: Tensor) -> Tensor:
    """Copy `rows` into `out`, whose dtype holds each of its values."""
    if rows.dtype == E4M3:
        # The CPU's own e4m3 cast is scalar code; a table lookup is about seven times faster.
        codes = torch.arange(256, dtype=torch.uint8).view(E4M3)
        index = rows.view(torch.uint8).to(torch.int32)
        rows = codes.to(out.dtype).index_select(0, index.flatten()).view(rows.shape)
    return out.copy_(rows)


class Bounds(NamedTuple):
    """The visibility rule of one request, as limits on j - p (None: no limit)."""

    offset: int  # p of query row 0
    kv_len: int
    behind: int | None
    ahead: int | None

    @staticmethod
    def of(s_q: int, kv_len: int, is_causal: bool, left: int, right: int) -> "Bounds":
        ahead = 0 if is_causal else right
        return Bounds(
            kv_len - s_q, kv_len, left if left >= 0 else None, ahead if ahead >= 0 else None
        )

    def interval(self, first: int, last: int) -> tuple[int, int]:
        """Keys lo <= j < hi that some query row of first <= i < last sees."""
        lo, hi = 0, self.kv_len
        if self.behind is not None:
            lo = max(lo, first + self.offset - self.behind)
        if self.ahead is not None:
            hi = min(hi, last + self.offset + self.ahead)
        return lo, max(lo, hi)

    def edges(self, row: int, rows: int, key: int, n: int) -> list[tuple[slice, Tensor]]:
        """Columns of a tile [rows, n] that not every row sees, with what to hide there.

        The tile starts at query row `row` and key `key`; a mask is [rows, columns], True for
        an invisible key. All columns in between are visible to all rows and left alone.
        """
        found = []
        diagonal = row + self.offset - key  # column - row of a query's own position
        if self.ahead is not None:
            above = diagonal + self.ahead + 1
            start = max(above, 0)
            if start < n:
                hidden = torch.ones(rows, n - start, dtype=torch.bool).triu_(above - start)
                found.append((slice(start, n), hidden))
        if self.behind is not None:
            below = diagonal - self.behind - 1
            stop = min(below + rows, n)
            if stop > 0:
                hidden = torch.ones(rows, stop, dtype=torch.bool).tril_(below)
                found.append((slice(0, stop), hidden))
        return found


class Capping(NamedTuple):
    """How scores become base-2 logits: `factor` goes into q, then `apply_` on the product.

    With a softcap c, c * tanh(z / c) = 2c * sigmoid(2z / c) - c, and the sigmoid is five times
    cheaper than the tanh here. The constant is left out of the logits: `shift` (base 2) is
    what has to be added to them. For a large c the two terms would cancel; tanh serves.
    """

    factor: float
    shift: float = 0.0
    height: float | None = None

    @staticmethod
    def of(scale: float, softcap: float | None) -> "Capping":
        if not softcap:
            return Capping(scale * LOG2E)
        if softcap > 256.0:
            return Capping(scale / softcap, 0.0, softcap * LOG2E)
        return Capping(2 * scale / softcap, -softcap * LOG2E, 2 * softcap * LOG2E)

    def apply_(self, scores: Tensor, slope: Tensor | None = None) -> Tensor | None:
        """Cap the product in place; into `slope`, if given, d(logit) / d(uncapped logit)."""
        if self.height is None:
            return None
        if self.shift:
            scores.sigmoid_()
            if slope is not None:  # 1 - tanh**2 = 4 s (1 - s)
                torch.sub(1, scores, out=slope).mul_(scores).mul_(4)
        else:
            scores.tanh_()
            if slope is not None:
                torch.mul(scores, scores, out=slope).neg_().add_(1)
        scores.mul_(self.height)
        return slope


class Tile(NamedTuple):
    """Query rows start <= i < start + rows and what is known of them so far.

    They see keys lo <= j < hi. q [H_kv, R, D] is widened and scaled, R = g * rows with the
    group outermost; acc [H_kv, R, D_v], top and total [H_kv, R, 1] are the running output,
    maximum and sum of the base-2 softmax, unset until the first block.
    """

    start: int
    rows: int
    lo: int
    hi: int
    q: Tensor
    acc: Tensor
    top: Tensor
    total: Tensor


def attend(
    o: Tensor,
    lse: Tensor | None,
    q: Tensor,
    keys: Keys,
    *,
    kv_len: int,
    scale: float,
    is_causal: bool = False,
    left: int = -1,
    right: int = -1,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    rope: Rope | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    scratch: Scratch | None = None,
) -> None:
    """Fill o [S_q, H, D_v] and lse [H, S_q] with the attention of one request.

    q [S_q, H, D] and the keys may have any strides; o and lse are written through theirs.
    Query row i sits at position i + kv_len - S_q. Rows that see no key become 0, their lse
    -inf. lse (float32, or None) is the natural logarithm over the keys, without the sink.

    sinks [H]: logits that join each row's sum. rope: rotates q and keys at their positions, in
    float32. q_scale, k_scale, v_scale [H_kv] or [1] (float32): dequantization, exact, folded
    into q and the result. scratch: pass one object for all requests of a call to reuse memory.
    """
    s_q, heads, width = q.shape
    if s_q == 0 or heads == 0:
        return
    scratch = scratch or Scratch()
    bounds = Bounds.of(s_q, kv_len, is_causal, left, right)
    capping = Capping.of(scale, softcap)
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads_kv, group = keys.heads, heads // keys.heads
    rows = max(1, min(CAUSAL_ROWS, TILE_ROWS // group, s_q))
    span = max(SUPER_ROWS // rows, 1) * rows
    narrow = o.dtype == torch.bfloat16 and rows * group >= NARROW_ROWS
    step = key_block_length(rows * group, heads_kv * width)
    factor: Tensor | float = capping.factor
    for one in (q_scale, k_scale):
        if one is not None:
            factor = factor * one.to(work).view(-1, 1, 1)
    for start in range(0, s_q, span):
        stop = min(start + span, s_q)
        tiles: list[Tile] = []
        for first in range(start, stop, rows):
            last = min(first + rows, stop)
            lo, hi = bounds.interval(first, last)
            if lo == hi:
                o[first:last].zero_()
                if lse is not None:
                    lse[:, first:last].fill_(-math.inf)
                continue
            tall = group * (last - first)
            named = f"{len(tiles)}"
            tile = Tile(
                first,
                last - first,
                lo,
                hi,
                scratch.take("q" + named, (heads_kv, tall, width), work),
                scratch.take("acc" + named, (heads_kv, tall, o.shape[2]), work),
                scratch.take("top" + named, (heads_kv, tall, 1), work),
                scratch.take("total" + named, (heads_kv, tall, 1), work),
            )
            widen(by_group(tile.q, group), by_head(q[first:last], heads_kv))
            tile.q.mul_(factor)
            if rope is not None:
                at = first + bounds.offset
                rotate_(by_group(tile.q, group), rope.rows(at, at + tile.rows, work))
            tiles.append(tile)
        if not tiles:
            continue
        for a in range(min(t.lo for t in tiles), max(t.hi for t in tiles), step):
            b = min(a + step, max(t.hi for t in tiles))
            k_rows, v_rows = keys.block(a, b)
            k = widen(scratch.take("k", (heads_kv, b - a, width), work), k_rows.transpose(0, 1))
            if rope is not None:
                rotate_(k, rope.rows(a, b, work))
            v_shape = (heads_kv, b - a, v_rows.shape[2])
            v = scratch.take("v", v_shape, torch.bfloat16 if narrow else work)
            widen(v, v_rows.transpose(0, 1))
            for tile in tiles:
                lo, hi = max(a, tile.lo), min(b, tile.hi)
                if lo < hi:
                    edges = bounds.edges(tile.start, tile.rows, lo, hi - lo)
                    inside = slice(lo - a, hi - a)
                    fresh = lo == tile.lo
                    absorb(tile, k[:, inside], v[:, inside], fresh, capping, edges, scratch)
        for tile in tiles:
            finish(tile, o, lse, capping, sinks, v_scale)


def key_block_length(tall: int, row_elements: int) -> int:
    """Keys widened at once, for tiles of `tall` rows and `row_elements` numbers in a key row."""
    # Decode is memory-bound: the block should stay in the cache.
    budget = DECODE_ELEMENTS if tall < NARROW_ROWS else BLOCK_ELEMENTS
    return min(KEY_BLOCK, max(64, budget // row_elements))


def by_group(x: Tensor, group: int) -> Tensor:
    """[H_kv, g * rows, C] as [H_kv, g, rows, C]."""
    return x.view(x.shape[0], group, -1, x.shape[2])


def by_head(x: Tensor, heads_kv: int) -> Tensor:
    """[rows, H, C] as [H_kv, g, rows, C]."""
    return x.view(x.shape[0], heads_kv, -1, x.shape[2]).permute(1, 2, 0, 3)


def absorb(
    tile: Tile,
    k: Tensor,
    v: Tensor,
    fresh: bool,
    capping: Capping,
    edges: list[tuple[slice, Tensor]],
    scratch: Scratch,
) -> None:
    """Online softmax: take keys k [H_kv, n, D] and values v [H_kv, n, D_v] into the tile."""
    heads_kv, tall, _ = tile.q.shape
    n = k.shape[1]
    batch = max(1, min(heads_kv, TILE_ROWS // tall))
    for h in range(0, heads_kv, batch):
        part = slice(h, min(h + batch, heads_kv))
        count = part.stop - h
        scores = scratch.take("scores", (count, tall, n), k.dtype)
        torch.bmm(tile.q[part], k[part].mT, out=scores)
        capping.apply_(scores)
        for columns, hidden in edges:
            split = scores.view(count, -1, tile.rows, n)
            split[..., columns].masked_fill_(hidden, -math.inf)
        acc, top, total = tile.acc[part], tile.top[part], tile.total[part]
        if fresh:
            torch.amax(scores, -1, keepdim=True, out=top)
            if edges:  # a row that sees none of these keys: keep -inf - top from being NaN
                top.clamp_(min=torch.finfo(k.dtype).min)
        else:
            higher = torch.maximum(top, scores.amax(-1, keepdim=True))
            shrink = top.sub_(higher).exp2_()
            acc.mul_(shrink)
            total.mul_(shrink)
            top.copy_(higher)
        weights = scores.sub_(top).exp2_()
        if fresh:
            torch.sum(weights, -1, keepdim=True, out=total)
        else:
            total.add_(weights.sum(-1, keepdim=True))
        if v.dtype != weights.dtype:
            weights = scratch.take("weights", weights.shape, v.dtype).copy_(weights)
            product = scratch.take("product", acc.shape, v.dtype)
            torch.bmm(weights, v[part], out=product)
            acc.copy_(product) if fresh else acc.add_(product)
        elif fresh:
            torch.bmm(weights, v[part], out=acc)
        else:
            acc.baddbmm_(weights, v[part])


def finish(
    tile: Tile,
    o: Tensor,
    lse: Tensor | None,
    capping: Capping,
    sinks: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Divide by the sum (a sink's share included) and write the tile's rows of o and lse."""
    heads_kv, group = tile.q.shape[0], tile.q.shape[1] // tile.rows
    span = slice(tile.start, tile.start + tile.rows)
    if lse is not None:
        natural = tile.total.log2().add_(tile.top).add_(capping.shift).mul_(LN2)
        lse[:, span].copy_(natural.view(-1, tile.rows))
    total = tile.total
    if sinks is not None:
        sink = sinks.to(total.dtype).mul(LOG2E).sub_(capping.shift).view(heads_kv, group, 1, 1)
        share = sink.sub(by_group(tile.top, group)).exp2_()
        by_group(total, group).add_(share)
    # A row with keys has a sum of at least 1 (its maximum's own term), an empty one a sum of 0.
    tile.acc.div_(total.clamp_(min=1.0))
    if v_scale is not None:
        tile.acc.mul_(v_scale.to(total.dtype).view(-1, 1, 1))
    by_head(o[span], heads_kv).copy_(by_group(tile.acc, group))
