"""The float64 formulas once more, on whole batches at once: fast enough for thousands of calls.

`twin(call)` answers as `Case.expected` does: the outputs, then each mutated argument, in float64
or exactly. It runs on the device of the call and may write to its pools. The loops of
`tests/oracle.py` are what can be read and believed; `tests/test_twins.py` holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ops_registry.contract import E4M3
from tests import oracle
from tests.oracle import F64, INF, f64

TWINS: dict[str, Callable[[Any], Any]] = {}


def twin(call: Any) -> tuple[Tensor, ...]:
    found = TWINS[type(call).__name__.removesuffix("_call")](call)
    return found if isinstance(found, tuple) else (found,)


def of(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    TWINS[fn.__name__] = fn
    return fn


# --------------------------------------------------------------------------- shared pieces


def logits(q: Tensor, k: Tensor, seen: Tensor, scale: float, softcap: float | None) -> Tensor:
    """[B, H_kv, g, M, N] from q [B, M, H, D], k [B, N, H_kv, D], seen [B, 1 or H_kv, M, N]."""
    grouped = q.unflatten(2, (k.shape[2], -1))
    z = scale * torch.einsum("bmrgd,bnrd->brgmn", grouped, k)
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    return z.masked_fill(~seen[:, :, None], -INF)


def log_sum(z: Tensor) -> Tensor:
    """logsumexp over the last axis, -inf where nothing is seen or there is nothing."""
    return torch.nn.functional.pad(z, (0, 1), value=-INF).logsumexp(-1)


def weights_of(z: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax weights [B, H_kv, g, M, N] with sinks, and lse [B, H, M] without them."""
    lse = log_sum(z)
    total = lse
    if sinks is not None:
        total = torch.logaddexp(lse, f64(sinks).view(1, *lse.shape[1:3], 1))
    weights = torch.where(z > -INF, torch.exp(z - total[..., None]), 0.0)
    return weights, lse.flatten(1, 2)


def attend(q, k, v, seen, scale, softcap=None, sinks=None):
    """o [B, M, H, D_v] and lse [B, H, M]; a value that no query sees may be anything."""
    weights, lse = weights_of(logits(q, k, seen, scale, softcap), sinks)
    read = seen.any(2).expand(-1, k.shape[2], -1).transpose(1, 2)[..., None]
    o = torch.einsum("brgmn,bnrd->bmrgd", weights, torch.where(read, v, 0.0))
    return o.flatten(2, 3), lse


def visible(q_lens, kv_lens, rows, columns, is_causal, left, right):
    """2.2 of every request, [B, 1, rows, columns]; q_lens, kv_lens [B]."""
    device = q_lens.device
    i = torch.arange(rows, device=device)[None, :, None]
    j = torch.arange(columns, device=device)[None, None, :]
    q_lens, kv_lens = q_lens[:, None, None], kv_lens[:, None, None]
    position = i + kv_lens - q_lens
    seen = (i < q_lens) & (j < kv_lens)
    if is_causal:
        seen = seen & (j <= position)
    if left >= 0:
        seen = seen & (j >= position - left)
    if right >= 0:
        seen = seen & (j <= position + right)
    return seen[:, None]


def window(call):
    names = "is_causal", "window_size_left", "window_size_right"
    return tuple(getattr(call, name) for name in names)


def rotate(x, positions, cos, sin, layout, back=False):
    """x [B, M, heads, D] at positions [B, M], those outside the tables not at all."""
    half, rows = cos.shape[1], cos.shape[0]
    if not rows:
        return x
    inside = (positions >= 0) & (positions < rows)
    at = positions.clamp(0, rows - 1)
    c, s = f64(cos)[at][:, :, None], f64(sin)[at][:, :, None]
    s = -s if back else s
    first, second = slice(0, half), slice(half, 2 * half)
    if layout != "neox":
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = x[..., first], x[..., second]
    out = x.clone()
    out[..., first], out[..., second] = a * c - b * s, b * c + a * s
    return torch.where(inside[..., None, None], out, x)


def scale_of(call, dim):
    return dim**-0.5 if call.sm_scale is None else call.sm_scale


class Packed:
    """Rows [T, ...] of requests between offsets [B + 1], as [B, longest, ...] and back."""

    def __init__(self, offsets: Tensor) -> None:
        starts = offsets.to(torch.int64)
        self.lens = starts[1:] - starts[:-1]
        longest = int(self.lens.max()) if len(self.lens) else 0
        place = torch.arange(longest, device=offsets.device)
        self.held = place < self.lens[:, None]
        self.rows = torch.where(self.held, starts[:-1, None] + place, 0)
        self.longest = longest

    def gather(self, x: Tensor) -> Tensor:
        """Zeros past the end of a request."""
        if not len(x):
            return x.new_zeros(*self.rows.shape, *x.shape[1:])
        held = self.held.view(*self.held.shape, *[1] * (x.dim() - 1))
        return torch.where(held, x[self.rows], torch.zeros((), dtype=x.dtype, device=x.device))

    def scatter(self, x: Tensor, total: int, fill: float = 0.0) -> Tensor:
        out = x.new_full((total, *x.shape[2:]), fill)
        out[self.rows[self.held]] = x[self.held]
        return out


def per_head(scale: Tensor | None, heads: int) -> Tensor | float:
    """A scale [B, H_kv] or [1] as a factor of [B, M, heads, D]."""
    if scale is None:
        return 1.0
    if scale.dim() == 1:
        return f64(scale)
    return f64(scale).repeat_interleave(heads // scale.shape[1], 1)[:, None, :, None]


def pool_rows(table: Tensor, lens: Tensor, page_size: int) -> Tensor:
    """Pool rows [B, longest] of the logical positions; 0 past a length."""
    longest = int(lens.max()) if len(lens) else 0
    j = torch.arange(longest, device=table.device).expand(len(lens), -1)
    if not longest:
        return j
    pages = table.to(torch.int64).gather(1, (j // page_size).clamp(max=table.shape[1] - 1))
    return torch.where(j < lens[:, None], pages * page_size + j % page_size, 0)


def from_pool(pool: Tensor, rows: Tensor) -> Tensor:
    return f64(pool[rows]) if len(pool) else f64(pool.new_zeros(*rows.shape, *pool.shape[1:]))


# ------------------------------------------------------------------------------ GQA and MHA


def gqa(call, q, k, v, seen, q_at, k_at):
    """Rotation, then attention, of dequantized batches; q_at, k_at: positions."""
    if getattr(call, "rope_cos", None) is not None:
        tables = call.rope_cos, call.rope_sin, call.rope_layout
        q, k = rotate(q, q_at, *tables), rotate(k, k_at, *tables)
    return (
        q,
        k,
        attend(
            q, k, v, seen, scale_of(call, q.shape[-1]), call.softcap, getattr(call, "sinks", None)
        ),
    )


def dequantized(call, q, k, v):
    scales = call.q_scale, call.k_scale, call.v_scale
    return (f64(x) * per_head(s, x.shape[2]) for x, s in zip((q, k, v), scales, strict=True))


def full_lens(call):
    """[B] lengths of the queries and of the keys of a dense call."""
    batch, device = call.q.shape[0], call.q.device
    return tuple(torch.full((batch,), x.shape[1], device=device) for x in (call.q, call.k))


def positions(q_lens, kv_lens, rows, columns):
    device = q_lens.device
    i, j = torch.arange(rows, device=device), torch.arange(columns, device=device)
    return i[None] + (kv_lens - q_lens)[:, None], j[None].expand(len(kv_lens), -1)


@of
def gqa_dense_fwd(call):
    q_lens, kv_lens = full_lens(call)
    shape = call.q.shape[1], call.k.shape[1]
    seen = visible(q_lens, kv_lens, *shape, *window(call))
    q, k, v = dequantized(call, call.q, call.k, call.v)
    return gqa(call, q, k, v, seen, *positions(q_lens, kv_lens, *shape))[2]


@of
def gqa_varlen_fwd(call):
    queries, keys = Packed(call.cu_seqlens_q), Packed(call.cu_seqlens_kv)
    shape = queries.longest, keys.longest
    seen = visible(queries.lens, keys.lens, *shape, *window(call))
    q, k, v = dequantized(
        call, queries.gather(call.q), *(keys.gather(x) for x in (call.k, call.v))
    )
    places = positions(queries.lens, keys.lens, *shape)
    o, lse = gqa(call, q, k, v, seen, *places)[2]
    total = call.q.shape[0]
    return queries.scatter(o, total), queries.scatter(lse.transpose(1, 2), total, -INF).t()


def gradients(call, q, k, v, o, do, lse, seen, q_at, k_at):
    """dq, dk, dv and, per request and head, dsinks [B, H], from the stored o and lse [B, H, M]."""
    sinks = getattr(call, "sinks", None)
    scale, softcap = scale_of(call, q.shape[-1]), call.softcap
    tables = call.rope_cos, call.rope_sin, call.rope_layout
    rotated = call.rope_cos is not None
    if rotated:
        q, k = rotate(q, q_at, *tables), rotate(k, k_at, *tables)
    z = logits(q, k, seen, scale, softcap)
    heads_kv = k.shape[2]
    total = lse.unflatten(1, (heads_kv, -1))
    if sinks is not None:
        sink = f64(sinks).view(1, heads_kv, -1, 1)
        total = torch.logaddexp(total, sink)
    weights = torch.where(z > -INF, torch.exp(z - total[..., None]), 0.0)
    o, do = (x.unflatten(2, (heads_kv, -1)) for x in (o, do))
    delta = (o * do).sum(-1).permute(0, 2, 3, 1)
    dz = weights * (torch.einsum("bmrgd,bnrd->brgmn", do, v) - delta[..., None])
    if softcap:
        dz = dz * torch.where(z > -INF, 1.0 - (z / softcap) ** 2, 0.0)
    grouped = q.unflatten(2, (heads_kv, -1))
    dq = scale * torch.einsum("brgmn,bnrd->bmrgd", dz, k).flatten(2, 3)
    dk = scale * torch.einsum("brgmn,bmrgd->bnrd", dz, grouped)
    dv = torch.einsum("brgmn,bmrgd->bnrd", weights, do)
    if rotated:
        dq, dk = rotate(dq, q_at, *tables, back=True), rotate(dk, k_at, *tables, back=True)
    dsinks = None
    if sinks is not None:
        share = torch.where(total.isfinite(), torch.exp(sink - total), 0.0)
        dsinks = -(share * delta).sum(-1).flatten(1)
    return dq, dk, dv, dsinks


@of
def gqa_dense_bwd(call):
    q_lens, kv_lens = full_lens(call)
    shape = call.q.shape[1], call.k.shape[1]
    seen = visible(q_lens, kv_lens, *shape, *window(call))
    inputs = map(f64, call[:6])
    return gradients(call, *inputs, seen, *positions(q_lens, kv_lens, *shape))[:3]


@of
def gqa_varlen_bwd(call):
    queries, keys = Packed(call.cu_seqlens_q), Packed(call.cu_seqlens_kv)
    shape = queries.longest, keys.longest
    seen = visible(queries.lens, keys.lens, *shape, *window(call))
    q, o, do = (f64(queries.gather(x)) for x in (call.q, call.o, call.do))
    k, v = (f64(keys.gather(x)) for x in (call.k, call.v))
    lse = f64(queries.gather(call.lse.t())).transpose(1, 2)
    places = positions(queries.lens, keys.lens, *shape)
    dq, dk, dv, dsinks = gradients(call, q, k, v, o, do, lse, seen, *places)
    rows, columns = call.q.shape[0], call.k.shape[0]
    total = dq.new_zeros(0) if dsinks is None else dsinks.sum(0)
    return (
        queries.scatter(dq, rows),
        keys.scatter(dk, columns),
        keys.scatter(dv, columns),
        total,
    )


@of
def gqa_paged_fwd(call):
    page_size = call.k_pages.shape[1]
    queries, lens = Packed(call.cu_seqlens_q), call.cache_seqlens.to(torch.int64)
    lens = torch.where(queries.lens > 0, lens, 0)
    rows = pool_rows(call.page_table, lens, page_size)
    shape = queries.longest, rows.shape[1]
    seen = visible(queries.lens, lens, *shape, *window(call))
    k, v = (from_pool(x.flatten(0, 1), rows) for x in (call.k_pages, call.v_pages))
    q, k, v = dequantized(call, queries.gather(call.q), k, v)
    o, _ = gqa(call, q, k, v, seen, *positions(queries.lens, lens, *shape))[2]
    return queries.scatter(o, call.q.shape[0])


@of
def mha_decode_paged_fwd(call):
    lens = call.real_seqlen_kv.to(torch.int64)
    rows = pool_rows(call.block_table, lens, call.page_size)
    q_lens = torch.full_like(lens, call.q.shape[1])
    seen = visible(q_lens, lens, call.q.shape[1], rows.shape[1], call.is_causal, -1, -1)
    k, v = from_pool(call.k, rows), from_pool(call.v, rows)
    return attend(f64(call.q), k, v, seen, call.q.shape[-1] ** -0.5)[0]


@of
def gqa_prefill_paged_fwd(call):
    fp8 = call.k_pages.dtype == E4M3
    new, old = Packed(call.cu_seqlens_q), call.cache_seqlens.to(torch.int64)
    total = torch.where(new.lens > 0, old + new.lens, 0)
    old = torch.where(new.lens > 0, old, 0)
    rows = pool_rows(call.block_table, total, call.page_size)
    j = torch.arange(rows.shape[1], device=rows.device)[None]
    appended = (j >= old[:, None]) & (j < total[:, None])
    q, k_new, v_new = new.gather(call.q), new.gather(call.k_new), new.gather(call.v_new)
    at = old[:, None] + torch.arange(new.longest, device=rows.device)
    if call.fuse_rope:
        longest = rows.shape[1]
        width = call.rotary_dim or q.shape[-1]
        cos, sin = oracle.rope_table(width, longest, call.rope_base)
        tables = cos.to(q.device), sin.to(q.device), "neox"
        q = rotate(f64(q), at, *tables)
        k_new = rotate(f64(k_new), at, *tables).to(k_new.dtype)
    source = (j - old[:, None]).clamp(0, max(new.longest - 1, 0))

    def keys(pool, fresh, scale):
        stored = from_pool(pool, rows) * (f64(scale) if fp8 else 1.0)
        if not new.longest:
            return stored
        index = source[..., None, None].expand(*source.shape, *fresh.shape[2:])
        return torch.where(appended[..., None, None], f64(fresh).gather(1, index), stored)

    k = keys(call.k_pages, k_new, call.k_scale)
    v = keys(call.v_pages, v_new, call.v_scale)
    seen = visible(new.lens, total, new.longest, rows.shape[1], call.is_causal, -1, -1)
    o, _ = attend(f64(q), k, v, seen, scale_of(call, q.shape[-1]), call.softcap)
    if new.longest:
        where = rows.gather(1, at.clamp(max=rows.shape[1] - 1))[new.held]
        for pool, fresh, scale in (
            (call.k_pages, k_new[new.held], call.k_scale),
            (call.v_pages, v_new[new.held], call.v_scale),
        ):
            pool[where] = oracle.store_e4m3(fresh, scale) if fp8 else fresh
    return new.scatter(o, call.q.shape[0]), call.k_pages, call.v_pages


# -------------------------------------------------------------------- latent and sparse ops


@of
def mla_decode_fwd(call):
    q, k = f64(torch.cat([call.q, call.q_pe], -1)), f64(torch.cat([call.k, call.k_pe], -1))
    seen = torch.ones(q.shape[0], 1, 1, k.shape[1], dtype=torch.bool, device=q.device)
    return attend(q[:, None], k, f64(call.k), seen, q.shape[-1] ** -0.5)[0][:, 0]


@of
def dsa_decode_fwd(call):
    batch, queries, heads, width = call.q.shape
    rows, groups = call.kv.shape[1:3]
    ids = call.indices.to(torch.int64)
    position = call.q_start_index_s + torch.arange(queries, device=ids.device)
    live = (ids >= 0) & (ids < rows)
    if call.is_causal:
        live = live & ((ids + 1) * call.stride_kv - 1 <= position[None, :, None, None])
    if not rows or not ids.shape[-1]:
        return torch.zeros(batch, queries, heads, width - call.dim_tail, dtype=F64).to(ids.device)
    b = torch.arange(batch, device=ids.device)[:, None, None, None]
    g = torch.arange(groups, device=ids.device)[None, None, :, None]
    keys = f64(call.kv[b, torch.where(live, ids, 0), g])
    keys = torch.where(live[..., None], keys, 0.0)
    q = f64(call.q).unflatten(2, (groups, -1))
    scale = width**-0.5 if call.sm_scale is None else call.sm_scale
    z = scale * torch.einsum("bsghd,bsgkd->bsghk", q, keys)
    z = z.masked_fill(~live[..., None, :], -INF)
    weights = torch.where(z > -INF, torch.exp(z - log_sum(z)[..., None]), 0.0)
    values = keys[..., : width - call.dim_tail]
    return torch.einsum("bsghk,bsgkd->bsghd", weights, values).flatten(2, 3)


@of
def nsa_compressed_fwd(call):
    tokens, chunks = Packed(call.offsets), Packed(call.chunk_offsets)
    t = torch.arange(tokens.longest, device=call.q.device)[:, None]
    c = torch.arange(chunks.longest, device=call.q.device)[None, :]
    seen = (c < (t + 1) // call.bs)[None] & tokens.held[:, :, None]
    q, k, v = (f64(x) for x in (tokens.gather(call.q), *map(chunks.gather, call[1:3])))
    o, lse = attend(q, k, v, seen[:, None], call.scale)
    total = call.q.shape[0]
    return tokens.scatter(o, total), tokens.scatter(lse.transpose(1, 2), total, -INF).t()


def nsa_scores(call):
    """Importance [T, H_kv, widest] of every block, -inf where it is no candidate (4.9)."""
    tokens, chunks = Packed(call.offsets), Packed(call.chunk_offsets)
    heads_kv = call.k_cmp.shape[1]
    group = call.q.shape[1] // heads_kv
    scaled = (call.q.to(torch.float32) * call.scale).to(call.q.dtype)
    q, k = f64(tokens.gather(scaled)), f64(chunks.gather(call.k_cmp))
    t = torch.arange(tokens.longest, device=q.device)[:, None]
    c = torch.arange(chunks.longest, device=q.device)[None, :]
    current = t // call.bs
    closed = (c < (t + 1) // call.bs)[None] & tokens.held[:, :, None]
    weights, _ = weights_of(logits(q, k, closed[:, None], 1.0, None), None)
    score = weights.sum(2).transpose(1, 2)
    forced = (c == 0) | (c == current) | (c == (current - 1).clamp(min=0))
    score = torch.where(forced[None, :, None], float(group), score)
    score = torch.where((c <= current)[None, :, None], score, -INF)
    return tokens.scatter(score, call.q.shape[0])


@of
def nsa_topk(call):
    score = nsa_scores(call)
    picked = score.new_full((*score.shape[:2], call.selected_block_num), -1, dtype=torch.int32)
    value, order = torch.sort(score, dim=-1, descending=True, stable=True)
    take = min(call.selected_block_num, score.shape[-1])
    picked[..., :take] = torch.where(value > -INF, order, -1)[..., :take].to(torch.int32)
    return picked


def check_nsa_topk(picked: Tensor, score: Tensor, slack: float = 2e-3) -> None:
    """`oracle.check_nsa_topk` on whole tensors: ties and rounding are allowed."""
    if not score.numel():
        assert bool((picked == -1).all())
        return
    width = picked.shape[-1]
    count = (score > -INF).sum(-1, keepdim=True)
    kept = torch.arange(width, device=score.device) < count.clamp(max=width)
    ids = picked.to(torch.int64)
    assert bool((torch.where(kept, 0, ids + 1) == 0).all()), "padding is trailing -1"
    assert bool((~kept | ((ids >= 0) & (ids < count))).all()), "an id that is no candidate"
    place = torch.where(kept, ids, score.shape[-1])
    times = torch.zeros(*score.shape[:-1], score.shape[-1] + 1, device=score.device)
    times.scatter_add_(-1, place, torch.ones_like(place, dtype=times.dtype))
    assert bool((times[..., :-1] <= 1).all()), "an id that is picked twice"
    got = torch.where(kept, score.gather(-1, torch.where(kept, ids, 0)), INF)
    allowed = slack * got.clamp(min=1.0)
    falls = got[..., 1:] <= got[..., :-1] + allowed[..., :-1]
    assert bool((falls | ~kept[..., 1:]).all()), "scores are descending"
    rest = score.masked_fill(times[..., :-1] > 0, -INF).amax(-1)
    bound = got.amin(-1) + torch.where(kept, allowed, 0.0).amax(-1)
    assert bool((rest <= bound).all()), "a better block was left out"


@of
def nsa_varlen_fwd(call):
    tokens = Packed(call.offsets)
    q, k, v = (f64(tokens.gather(x)) for x in call[:3])
    slots = call.block_indices.shape[-1]
    ids = tokens.gather(call.block_indices).to(torch.int64)
    used = tokens.gather(call.block_counts).clamp(0, slots)[..., None]
    blocks = -(-tokens.longest // call.block_size)
    use = (torch.arange(slots, device=ids.device) < used) & (ids >= 0) & (ids < blocks)
    times = q.new_zeros(*ids.shape[:-1], blocks + 1)
    times.scatter_add_(-1, torch.where(use, ids, blocks), q.new_ones(()).expand(ids.shape))
    key = torch.arange(tokens.longest, device=ids.device)
    times = times[..., :-1][..., key // call.block_size] if blocks else times[..., :0]
    limit = tokens.lens[:, None, None]
    if call.is_causal:
        limit = torch.minimum(limit, key[None, :, None] + 1)
    seen = (times > 0) & (key < limit)[:, :, None] & tokens.held[:, :, None, None]
    seen, times = seen.transpose(1, 2), times.transpose(1, 2)[:, :, None]
    z = logits(q, k, seen, call.scale, None) + torch.log(times.clamp(min=1.0))
    weights, _ = weights_of(z, None)
    o = torch.einsum("brgmn,bnrd->bmrgd", weights, v).flatten(2, 3)
    return tokens.scatter(o, call.q.shape[0])


@of
def fp8_lightning_indexer(call):
    q, k, scale = call.index_q, call.index_k, call.index_k_scale
    if q.dtype != E4M3:
        q = oracle.to_e4m3(q.to(torch.float32))
        # On the CPU: on a GPU torch divides by a number as a product with its reciprocal, and a
        # scale that is one unit off rounds keys between two codes to the other one.
        k, scale = (x.to(q.device) for x in oracle.quantize_index_keys(k.cpu()))
    groups = k.shape[2]
    heads = q.shape[2] // groups
    q, k, w = f64(q), f64(k), f64(call.weights)
    total = q.new_zeros(q.shape[0], q.shape[1], k.shape[1], groups)
    for h in range(q.shape[2]):
        product = torch.einsum("bsd,btd->bst", q[:, :, h], k[:, :, h // heads])
        total[..., h // heads] += w[None, :, h, None] * torch.relu(product)
    if scale is not None:
        total = total * f64(scale)[:, None]
    t = torch.arange(k.shape[1], device=q.device)
    inside = (t >= call.cu_seqlen_ks[:, None]) & (t < call.cu_seqlen_ke[:, None])
    return total.masked_fill(~inside[None, :, :, None], -INF)


@of
def paged_kv_cache_write(call):
    kept = call.slot_mapping >= 0
    slots = call.slot_mapping[kept]
    for new, pool, scale in (
        (call.k, call.k_pages, call.k_scale),
        (call.v, call.v_pages, call.v_scale),
    ):
        rows = new[kept]
        pool.flatten(0, 1)[slots] = rows if scale is None else oracle.store_e4m3(rows, scale)
    return call.k_pages, call.v_pages
