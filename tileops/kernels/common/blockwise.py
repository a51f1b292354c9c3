"""Attention in aten ops, a block at a time: what every operator's reference is built from.

A reference has to be traceable (it is what an AOTInductor package on CPU contains) and still
serve long sequences, so nothing here is as large as S x S and nothing in Python looks at the
contents of a tensor or branches on a size. Three nested loops with data-dependent bounds do it:
frames of packed rows, tiles of one request's rows inside a frame, blocks of visible keys.

The frames exist because a traced while loop cannot write in place: there, every store into a
carried tensor copies it. A tile stores into its frame, which is small. Frames are the steps of a
scan: it carries no result but stacks what its steps return, and torch writes that in place.

Loop bodies must not close over tensors or symbolic sizes: callbacks receive a dict of tensors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.while_loop import while_loop_op
from torch._subclasses.functional_tensor import FunctionalTensor

from ops_registry import tracing

Inputs = dict[str, Tensor]
"""The tensors a callback may read, by name. Names with a leading underscore are the engine's."""

Load = Callable[[Inputs, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(inputs, b [1], keys [n]) -> k [n, H_kv, D], v [n, H_kv, D_v]; keys are always in range."""

Rows = Callable[[Inputs, Tensor, Tensor, Tensor], Tensor]
"""(inputs, b [1], positions [n], rows [n, heads, D]) -> rows of the same shape."""

Step = Callable[[Inputs, Tensor, Tensor, Tensor, Tensor], Sequence[Tensor]]
"""(inputs, b [1], rows [n], local [n], live [n]) -> one [n, *tail] per output of `walk`."""

FRAME_ROWS = 256
FAR = 2**62  # beyond every row and key, and safe to add a block size to
UNBOUNDED = 2**40  # a window no sequence fills; larger ones are cut to it, so sums cannot wrap
INF = float("inf")


class Bounds(Protocol):
    """Which keys a query row sees: the half-open interval [lo, hi), cut to [0, kv_len) later."""

    @property
    def reach(self) -> int | None:
        """The most keys one row can see, when an option bounds it."""

    def __call__(self, local: Tensor, q_len: Tensor, kv_len: Tensor) -> tuple[Tensor, Tensor]:
        """Map a request's query indices [n] and its lengths [1] to lo [n] and hi [n]."""


@dataclass(frozen=True)
class Window:
    """Causal and sliding-window visibility; a bound of -1 is no bound, both are inclusive."""

    is_causal: bool = True
    left: int = -1
    right: int = -1

    @property
    def before(self) -> int:
        """How far behind its own position a row still sees."""
        return UNBOUNDED if self.left < 0 else min(self.left, UNBOUNDED)

    @property
    def after(self) -> int:
        """How far ahead of its own position a row still sees."""
        if self.is_causal:
            return 0
        return UNBOUNDED if self.right < 0 else min(self.right, UNBOUNDED)

    @property
    def reach(self) -> int | None:
        width = self.before + self.after + 1
        return width if width <= UNBOUNDED else None

    def __call__(self, local: Tensor, q_len: Tensor, kv_len: Tensor) -> tuple[Tensor, Tensor]:
        position = local + (kv_len - q_len)
        return position - self.before, position + (self.after + 1)

    def queries(self, key: Tensor, q_len: Tensor, kv_len: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse: the query indices [lo, hi) that see each key [n]."""
        local = key - (kv_len - q_len)
        return local - self.after, local + (self.before + 1)


@dataclass(frozen=True)
class ClosedChunks:
    """NSA compression: token t sees the chunks of `size` tokens that end at or before it."""

    size: int
    reach: int | None = None

    def __call__(self, local: Tensor, q_len: Tensor, kv_len: Tensor) -> tuple[Tensor, Tensor]:
        hi = torch.div(local + 1, self.size, rounding_mode="floor")
        return torch.zeros_like(hi), hi


def dense_offsets(batch: int, length: int, device: torch.device) -> Tensor:
    """Offsets [B + 1] of `batch` requests of one `length`, laid end to end."""
    return torch.arange(batch + 1, dtype=torch.int64, device=device) * length


def packed_lengths(cu_seqlens: Tensor) -> Tensor:
    """Lengths [B + 1] of the requests that offsets [B + 1] delimit; the last is 0 and unused.

    Slicing to [B] would make torch guard on B - 1 when it traces.
    """
    offsets = cu_seqlens.to(torch.int64)
    number = torch.arange(offsets.shape[0], device=offsets.device)
    return offsets.index_select(0, (number + 1).clamp(max=offsets.shape[0] - 1)) - offsets


def packed_rows(key: Rows | None = None, value: Rows | None = None) -> Load:
    """Load from k [T_kv, H_kv, D], v [T_kv, H_kv, D_v], kv_offsets [B + 1] among the inputs.

    `key` and `value` rotate or dequantize a block in the compute dtype.
    """

    def load(x: Inputs, b: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        rows = unwrapped(take(x["kv_offsets"], b).to(torch.int64) + keys)
        return fetch(x, "k", rows, key, b, keys), fetch(x, "v", rows, value, b, keys)

    return load


def paged_rows(page_size: int, key: Rows | None = None, value: Rows | None = None) -> Load:
    """Load from flat pools k [N, H_kv, D], v [N, H_kv, D_v] through table [B, W].

    A used page id outside the pool raises; entries past a request's last page are never read.
    """

    def load(x: Inputs, b: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        rows = paged_address(x["table"], b, keys, page_size)
        return fetch(x, "k", rows, key, b, keys), fetch(x, "v", rows, value, b, keys)

    return load


def paged_address(table: Tensor, b: Tensor, keys: Tensor, page_size: int) -> Tensor:
    """Pool rows [n] of the logical positions keys [n] of request b [1]."""
    column = torch.div(keys, page_size, rounding_mode="floor")
    page = take(take(table, b), column, dim=1)[0].to(torch.int64)
    return torch.where(page < 0, FAR, page * page_size + keys % page_size)  # as `unwrapped`


def unwrapped(rows: Tensor) -> Tensor:
    """The same rows; negative ones raise when they are read. Compiled code would wrap them."""
    return torch.where(rows < 0, FAR, rows)


def fetch(
    x: Inputs, name: str, rows: Tensor, hook: Rows | None, b: Tensor, positions: Tensor
) -> Tensor:
    """Rows of an input in the compute dtype, through `hook` if there is one."""
    block = take(x[name], rows).to(compute_dtype(x["_q"]))
    return block if hook is None else hook(x, b, positions, block)


def take(x: Tensor, index: Tensor, dim: int = 0) -> Tensor:
    """`index_select`, which a compiler also accepts in a branch that an empty x never reaches."""
    size = x.shape[dim]
    if isinstance(size, int) and size == 0:
        shape = [1 if d == dim else n for d, n in enumerate(x.shape)]
        return x.new_zeros(shape).index_select(dim, index.clamp(min=1))
    return x.index_select(dim, index)


def compute_dtype(q: Tensor) -> torch.dtype:
    """Float32, except that float64 tensors (gradcheck) stay float64."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def attend(
    q: Tensor,
    q_offsets: Tensor,
    kv_len: Tensor,
    inputs: Inputs,
    load: Load,
    bounds: Bounds,
    *,
    scale: float,
    heads_kv: int,
    value_dim: int,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    query: Rows | None = None,
    finish: Rows | None = None,
    out_dtype: torch.dtype | None = None,
    block_q: int | None = None,
    block_k: int = 256,
    sizes: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """Attention of packed queries: o [T_q, H, D_v] and natural-log lse [H, T_q] of the keys.

    Args:
        q: [T_q, H, D], any floating dtype.
        q_offsets: [B + 1] ascending row numbers; rows outside every request give 0 and -inf,
            as do rows that see no key.
        kv_len: [B] (a longer tensor serves too, its tail is not read).
        inputs: what the callbacks read, e.g. k, v, kv_offsets or table, cos, sin, scales.
        load: fetches a block of keys and values, see `packed_rows` and `paged_rows`.
        bounds: which keys a row sees; blocks that no row of a tile sees are not visited.
        scale, softcap: of the logits; softcap 0 is none.
        heads_kv, value_dim: H_kv and D_v.
        sinks: [H] natural-log logits that join the denominator and not lse.
        query: rotates or dequantizes q [n, H, D] at key positions [n].
        finish: scales o [n, H, D_v] before it is rounded.
        out_dtype: of o, q's when None. lse is float32 (float64 for a float64 q).
        block_q: rows of a tile; None adapts to the mean request, at a third more compile time.
        block_k: upper limit for the keys of a block.
        sizes: tensors, read or not, whose extents include every symbolic size by itself. Only
            needed where q and inputs have none but products: q4 for q4.reshape(B * S, H, D).
    """
    heads, dim, heads_kv, value_dim = (int(n) for n in (*q.shape[1:], heads_kv, value_dim))
    dtype = compute_dtype(q)
    if not heads:
        rows, out_dtype = q.shape[0], out_dtype or q.dtype
        return q.new_empty(rows, 0, value_dim, dtype=out_dtype), q.new_empty(0, rows, dtype=dtype)
    group = heads // heads_kv
    most = block_q or tile_limit(group)
    tile = block_q or tile_rows(q.shape[0], q_offsets.shape[0] - 1, most)
    block = key_block(heads, heads_kv, max(dim, value_dim), most, block_k, bounds.reach)
    held = {
        **inputs,
        "_q": q,
        "_q_offsets": q_offsets.to(torch.int64, copy=True),
        "_kv_len": kv_len.to(torch.int64, copy=True),
        "_keys": torch.arange(block, device=q.device),
        # Without elements: a compiled loop learns its sizes from the extents of its inputs.
        **{f"_size{i}": x.new_empty(*x.shape, 0) for i, x in enumerate(sizes)},
    }
    if sinks is not None:
        held["_sinks"] = sinks.to(dtype)
    names = tuple(held)

    def more(at: Tensor, top: Tensor, total: Tensor, acc: Tensor, end: Tensor, *_: Tensor):
        return at < end

    def visit(
        at: Tensor,
        top: Tensor,
        total: Tensor,
        acc: Tensor,
        end: Tensor,
        b: Tensor,
        lo: Tensor,
        hi: Tensor,
        queries: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        x = dict(zip(names, tensors, strict=True))
        keys = at + x["_keys"]
        # A lane past the end repeats the last visible key: stale rows are not even read.
        k, v = load(x, b, torch.minimum(keys, end - 1))
        logits = torch.bmm(queries, k.permute(1, 2, 0))
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        seen = (keys >= lo[:, None]) & (keys < hi[:, None])
        logits = torch.where(repeat_rows(seen, group), logits, -INF)
        new_top = torch.maximum(top, logits.amax(-1, keepdim=True))
        anchor = torch.where(new_top == -INF, 0.0, new_top)
        weight = torch.exp(logits - anchor)
        fade = torch.exp(top - anchor)
        total = total * fade + weight.sum(-1, keepdim=True)
        acc = acc * fade + torch.bmm(weight, v.permute(1, 0, 2))
        return at + keys.shape[0], new_top, total, acc

    def step(x: Inputs, b: Tensor, rows: Tensor, local: Tensor, live: Tensor):
        q_len = take(x["_q_offsets"], b + 1) - take(x["_q_offsets"], b)
        kv_len = take(x["_kv_len"], b)
        lo, hi = bounds(local, q_len, kv_len)
        lo, hi, begin, end = visible_range(lo, hi, kv_len, live)
        part = take(x["_q"], rows).to(dtype)
        if query is not None:
            position = torch.where(live[:1], local + (kv_len - q_len), 0)
            part = query(x, b, position, part)
        # Scaled last: torch frees twice what enters a loop as a view of its whole buffer.
        queries = by_group(part, heads_kv) * scale
        acc = queries.new_zeros(heads_kv, queries.shape[1], value_dim)
        total = queries.new_zeros(heads_kv, queries.shape[1], 1)
        _, top, total, acc = while_loop_op(
            more,
            visit,
            (begin, torch.full_like(total, -INF), total, acc),
            (end, b, lo, hi, queries, *x.values()),
        )
        lse = top + torch.log(total)
        denominator = total
        if sinks is not None:
            sink = by_group(x["_sinks"].reshape(1, -1, 1).expand(rows.shape[0], -1, -1), heads_kv)
            peak = torch.maximum(top, sink)
            shrink = torch.exp(top - peak)
            # Equality, not a difference, so that an infinite sink is 1 and not NaN.
            alone = torch.where(sink == peak, 1.0, torch.exp(sink - peak))
            acc, denominator = acc * shrink, total * shrink + alone
        o = by_row(torch.where(top == -INF, 0.0, acc / denominator), group)
        if finish is not None:
            o = finish(x, b, local, o)
        return o, by_row(lse, group).squeeze(-1)

    with torch.autocast(q.device.type, enabled=False):
        o, lse = walk(
            step,
            held,
            q_offsets,
            q.shape[0],
            tile,
            [((heads, value_dim), out_dtype or q.dtype, 0.0), ((heads,), dtype, -INF)],
            frame=FRAME_ROWS if block_q is None else 16 * block_q,
        )
    return o, lse.t().contiguous()


def tile_limit(group: int) -> int:
    """Rows of a full tile: about 128 rows of a matrix product, at least 16."""
    return max(16, 128 // max(group, 1))


def tile_rows(rows: int, requests: int, limit: int) -> int:
    """Rows of a tile: the mean length of a request, from 2 to `limit`; a symbol if a size is.

    At least 2, because tracing would guard on an extent that may be 1. The mean is exact for one
    request and up to a fifteenth too long for many: the divisor must not be 0 without requests,
    and max(requests, 1) would be, since a compiler takes every extent for positive.
    """
    parts = 15 * requests + 1
    mean = (16 * rows + parts - 1) // parts
    return torch.sym_min(torch.sym_max(mean, 2), limit)


def key_block(
    heads: int, heads_kv: int, dim: int, tile: int, limit: int, reach: int | None
) -> int:
    """Keys of a block: 4 MiB of float32 keys, 8 MiB of logits, little more than a window."""
    fits = min(limit, max(64, min(2**20 // (heads_kv * dim), 2**21 // (max(heads, 1) * tile))))
    return fits if reach is None else min(fits, (tile + reach + 15) // 16 * 16)


def visible_range(
    lo: Tensor, hi: Tensor, length: Tensor, live: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cut [lo, hi) to [0, length), nothing for dead rows; also the 0-dim hull [begin, end)."""
    lo = lo.clamp(min=0)
    hi = torch.where(live, torch.minimum(hi, length), 0)
    return lo, hi, torch.where(lo < hi, lo, FAR).amin(), hi.amax()


def by_group(rows: Tensor, heads_kv: int) -> Tensor:
    """[n, H, D] -> [H_kv, n * g, D]: the rows of a group's query heads, one matrix per KV head."""
    n, heads, dim = rows.shape
    grouped = rows.reshape(n, heads_kv, heads // heads_kv, dim).permute(1, 0, 2, 3)
    return grouped.reshape(heads_kv, n * (heads // heads_kv), dim)


def repeat_columns(columns: Tensor, group: int) -> Tensor:
    """[K, n] -> [K, n * g], a column for each query head of the group, in `by_group` order."""
    width, n = columns.shape
    return columns[:, :, None].expand(width, n, group).reshape(width, n * group)


def by_row(grouped: Tensor, group: int) -> Tensor:
    """[H_kv, n * g, D] -> [n, H, D], the inverse of `by_group`."""
    heads_kv, stacked, dim = grouped.shape
    n = stacked // group
    rows = grouped.reshape(heads_kv, n, group, dim).permute(1, 0, 2, 3)
    # Contiguous also with group 1, where a cast would compare strides and guard on n.
    return rows.reshape(n, heads_kv * group, dim).contiguous()


def repeat_rows(rows: Tensor, group: int) -> Tensor:
    """[n, K] -> [n * g, K], a row for each query head of the group, in `by_group` order."""
    n, width = rows.shape
    return rows[:, None, :].expand(n, group, width).reshape(n * group, width)


def walk(
    step: Step,
    inputs: Inputs,
    offsets: Tensor,
    rows: int,
    tile: int,
    outputs: Sequence[tuple[tuple[int, ...], torch.dtype, float]],
    into: Sequence[Tensor] = (),
    frame: int = FRAME_ROWS,
) -> tuple[Tensor, ...]:
    """Run `step` on tiles of each request's packed rows and return the outputs [rows, *tail].

    Args:
        step: gets at most `tile` consecutive rows of request b: row numbers, the same within the
            request, and which are live. Dead lanes repeat a live row, or row 0 if there is none.
        offsets: [B + 1] ascending. Whatever they hold, the walk ends.
        rows: total packed rows; those of no request keep the fill value.
        outputs: (tail shape, dtype, fill value) each.
        into: the tensors [rows, *tail] that an eager walk fills and returns, where a second copy
            of the outputs would be too large. A traced walk returns new ones.
        frame: rows of a frame, of which a traced walk makes a copy for every tile.
    """
    inputs = separate(inputs)
    names, count = tuple(inputs), len(outputs)
    fills = [fill for _, _, fill in outputs]
    device = offsets.device
    offsets = offsets.to(torch.int64, copy=True)

    def in_frame(b: Tensor, cursor: Tensor, *rest: Tensor) -> Tensor:
        edge, offsets = rest[count : count + 2]
        left = (cursor < edge) & (b < offsets.shape[0] - 1)
        return left & (take(offsets, b.reshape(1)).reshape(()) < edge)

    def fill_tile(b: Tensor, cursor: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        parts, (edge, offsets, lanes, *tensors) = rest[:count], rest[count:]
        request = b.reshape(1)
        head, tail = take(offsets, request), take(offsets, request + 1)
        begin = torch.maximum(head, cursor)
        stop = torch.minimum(tail, edge)
        live = begin + lanes < stop
        at = torch.where(live[:1], torch.minimum(begin + lanes, stop - 1), 0)
        local = torch.where(live[:1], at - head, 0)
        found = step(dict(zip(names, tensors, strict=True)), request, at, local, live)
        # Dead lanes land in one spare row past the frame.
        slot = torch.where(live, at % frame, frame)
        stored = [
            store(part, 0, slot, block.to(part.dtype))
            for part, block in zip(parts, found, strict=True)
        ]
        following = begin + lanes.shape[0]
        done = tail <= torch.minimum(following, edge)
        cursor = torch.where(done, torch.maximum(cursor, tail), following)
        return torch.where(done, request + 1, request).reshape(()), cursor.reshape(()), *stored

    def fill_frame(b: Tensor, first: Tensor, edge: Tensor, *shared: Tensor) -> tuple[Tensor, ...]:
        shared, blanks = shared[:-count], shared[-count:]
        parts = [
            blank.new_full((frame + 1, *blank.shape[1:]), fill)
            for blank, fill in zip(blanks, fills, strict=True)
        ]
        b, _, *parts = while_loop_op(in_frame, fill_tile, (b, first, *parts), (edge, *shared))
        return b, *(part[:-1] for part in parts)

    # Without elements: they tell the frames dtype and extents.
    blanks = [torch.empty((0, *tail), dtype=dtype, device=device) for tail, dtype, _ in outputs]
    lanes = torch.arange(tile, device=device)
    shared = (offsets, lanes, *inputs.values(), *blanks)
    eager = type(lanes) is Tensor
    store = Tensor.index_copy_ if eager else Tensor.index_copy
    if not eager:
        frames = stack_frames if tracing.loops_write_in_place() else carry_frames
        return frames(fill_frame, rows, frame, shared, count)
    outs = into or [blank.new_empty(rows, *blank.shape[1:]) for blank in blanks]
    for out, fill in zip(outs, fills, strict=True):
        out.fill_(fill)
    row, b = 0, torch.zeros((), dtype=torch.int64, device=device)
    while row < rows and b < offsets.shape[0] - 1:
        edge = min(row + frame, rows)
        b, *parts = fill_frame(b, b.new_tensor(row), b.new_tensor(edge), *shared)
        for out, part in zip(outs, parts, strict=True):
            out[row:edge] = part[: edge - row]
        row = edge
    return tuple(outs)


Frame = Callable[..., tuple[Tensor, ...]]
"""(state, first row, edge, *shared) -> the next state and [frame, *tail] per output; from 0 on."""


def stack_frames(
    fill_frame: Frame, rows: int, frame: int, shared: Sequence[Tensor], count: int
) -> tuple[Tensor, ...]:
    """The outputs [rows, *tail] of a traced walk, a frame after the other."""

    def fill(state: Tensor, first: Tensor, edge: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        state, *parts = fill_frame(state, first, edge, *given[: len(shared)])
        return state, *(part.clone() for part in parts)

    # At least 2, because tracing would guard on an extent that may be 1.
    frames = torch.sym_max((rows + frame - 1) // frame, 2)
    first = torch.arange(frames, device=shared[0].device) * frame
    edge = torch.clamp(first + frame, max=rows)
    # Inductor computes the extents of the stack from the symbols among a scan's arguments.
    symbols = {str(n): n for x in shared for n in x.shape if isinstance(n, torch.SymInt)}
    state = first.new_zeros(())
    _, *stacked = scan_op(fill, [state], [first, edge], (*shared, *symbols.values()))
    # Not a slice, which would guard on `rows` being at most the rows of the stack.
    return tuple(x.as_strided((rows, *x.shape[2:]), x.stride()[1:]) for x in stacked)


def carry_frames(
    fill_frame: Frame, rows: int, frame: int, shared: Sequence[Tensor], count: int
) -> tuple[Tensor, ...]:
    """`stack_frames` for older torch, with copies of the outputs for every frame."""

    def more(first: Tensor, state: Tensor, *rest: Tensor) -> Tensor:
        return first < rest[0].shape[0] - frame

    def fill(first: Tensor, state: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        outs, given = rest[:count], rest[count:]
        slots, edge = first + torch.arange(frame, device=first.device), first + frame
        limit = torch.full_like(first, outs[0].shape[0] - frame)
        state, *parts = fill_frame(state, first, torch.minimum(edge, limit), *given)
        stored = (out.index_copy(0, slots, part) for out, part in zip(outs, parts, strict=True))
        return edge, state, *stored

    # One frame of slack, so that the last frame is stored like the others.
    outs = [x.new_empty(rows + frame, *x.shape[1:]) for x in shared[-count:]]
    first = torch.zeros((), dtype=torch.int64, device=shared[0].device)
    start = (first, torch.zeros_like(first), *outs)
    _, _, *outs = while_loop_op(more, fill, start, tuple(shared))
    return tuple(out[:rows] for out in outs)


def separate(inputs: Inputs) -> Inputs:
    """While tracing, copies of inputs that share memory (k and v cut from one projection).

    A traced loop refuses arguments that alias each other.
    """
    apart: Inputs = {}
    for name, x in inputs.items():
        shared = isinstance(x, FunctionalTensor) and any(
            x.untyped_storage()._cdata == other.untyped_storage()._cdata
            for other in apart.values()
        )
        apart[name] = x.clone(memory_format=torch.contiguous_format) if shared else x
    return apart
