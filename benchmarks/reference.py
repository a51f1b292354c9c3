"""What a benchmark call must give: the formula in float64, beside the timing, on its device.

`expect(op, shape, options, tensors)` evaluates the formula at the whole key length for some
query rows (the first, the last and random ones) of some requests, and returns a `Check`. Its
`error` is the relative L2 error, of the worst request where requests are packed; NaN never
passes. Only torch is imported here: the processes of the peers check themselves with it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from benchmarks.inputs import E4M3, Shape, Tensors, rope_tables

ROWS = 256  # query rows checked in a call, at least one in each request that is checked
REQUESTS = 16
E4M3_MAX = 448.0
NAN_CODE = 0x7F  # of e4m3

Measure: TypeAlias = Callable[[Any], float]


def tensors_of(outputs: Any) -> list[Tensor]:
    if outputs is None:
        return []
    return [outputs] if isinstance(outputs, Tensor) else [x for x in outputs if x is not None]


def spoil(x: Tensor) -> None:
    """Overwrite with what no kernel gives."""
    if x.dtype == E4M3:
        x.view(torch.uint8).fill_(NAN_CODE)
    else:
        x.fill_(float("nan") if x.dtype.is_floating_point else -7)


@dataclass(frozen=True)
class Check:
    """error: of a call's outputs. written: (pool, rows) the call must write."""

    error: Measure
    written: tuple[tuple[Tensor, Tensor], ...] = ()

    def poison(self, outputs: Any) -> None:
        """Before the call that will be checked: nothing of an earlier one may pass for it."""
        for x in tensors_of(outputs):
            spoil(x)
        for pool, rows in self.written:
            codes = pool.view(torch.uint8) if pool.dtype == E4M3 else pool
            codes[rows] = NAN_CODE if pool.dtype == E4M3 else float("nan")


# ------------------------------------------------------------------------------ pieces


def lift(x: Tensor) -> Tensor:
    return x.float().double() if x.dtype == E4M3 else x.double()


def relative(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||; of a zero `want`, 0 if equal."""
    size = float(want.norm())
    gap = float((lift(got) - want).norm())
    return gap / size if size else (0.0 if gap == 0 else float("inf"))


def at_rows(pool: Tensor, rows: Tensor) -> Tensor:
    """pool[rows], of any dtype: not every torch indexes e4m3."""
    return pool.view(torch.uint8)[rows].view(E4M3) if pool.dtype == E4M3 else pool[rows]


def whole(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def some(total: int, count: int, device: torch.device) -> Tensor:
    """Sorted positions in [0, total): the ends and random ones, about `count` of them."""
    if total <= count:
        return torch.arange(total, device=device)
    generator = torch.Generator().manual_seed(total)
    picked = torch.randint(total, (count,), generator=generator)
    picked[:2] = torch.tensor([0, total - 1])[:count]
    return picked.unique().to(device)


def rotate(x: Tensor, at: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """x [n, heads, D] at positions `at` [n]; columns past the tables' width pass through."""
    half = cos.shape[1]
    c, s = cos[at].double()[:, None], sin[at].double()[:, None]
    neox = layout == "neox"
    first = slice(0, half) if neox else slice(0, 2 * half, 2)
    second = slice(half, 2 * half) if neox else slice(1, 2 * half, 2)
    out = lift(x).clone()
    a, b = out[..., first].clone(), out[..., second].clone()
    out[..., first] = a * c - b * s
    out[..., second] = b * c + a * s
    return out


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    at: Tensor,
    scale: float,
    options: Shape,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [n, H, D] at key positions `at` [n] over k, v [S, H_kv, D]; float64 [n, H, D_v]."""
    count, heads, _ = q.shape
    group = heads // k.shape[1]
    key, position = torch.arange(len(k), device=q.device), at[:, None]
    hidden = torch.zeros(count, len(k), dtype=torch.bool, device=q.device)
    left, right = (options.get(f"window_size_{side}", -1) for side in ("left", "right"))
    if options.get("is_causal", True):
        hidden |= key > position
    if left >= 0:
        hidden |= key < position - left
    if right >= 0:
        hidden |= key > position + right
    cap = options.get("softcap") or 0.0
    o = torch.zeros(count, heads, v.shape[-1], dtype=torch.float64, device=q.device)
    for r in range(k.shape[1]):
        own = slice(r * group, (r + 1) * group)
        z = (lift(q[:, own]).flatten(0, 1) @ lift(k[:, r]).T).mul_(scale).view(count, group, -1)
        if cap:
            z = z.div_(cap).tanh_().mul_(cap)
        z.masked_fill_(hidden[:, None], -torch.inf)
        sink = None if sinks is None else sinks[own].double()[None, :, None]
        o[:, own] = softmax_times(z, lift(v[:, r]), sink)
    return o


def softmax_times(z: Tensor, v: Tensor, sink: Tensor | None = None) -> Tensor:
    """softmax(z [..., j]) @ v [j, D], a sink in the denominator, rows without a key zero."""
    peak = z.amax(-1, keepdim=True)
    if sink is not None:
        peak = torch.maximum(peak, sink)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    p = z.sub_(peak).exp_()
    total = p.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink - peak).exp()
    return (p @ v) / total.masked_fill(total == 0, 1.0)


def physical(table: Tensor, start: int, stop: int, page: int) -> Tensor:
    """Pool rows of a request's logical positions [start, stop)."""
    at = torch.arange(start, stop, device=table.device)
    return table[at // page].long() * page + at % page


# -------------------------------------------------------------------- requests of GQA


@dataclass(frozen=True)
class Request:
    """One request: query rows of the packed output, and how to get its keys and values.

    first: index of its first row in the packed queries. past: keys before the first query.
    """

    first: int
    length: int
    past: int
    keys: Callable[[], tuple[Tensor, Tensor]]
    q_scale: Tensor | None = None  # [H_kv]


def check_requests(
    q: Tensor,
    requests: list[Request],
    options: Shape,
    tables: tuple[Tensor, Tensor] | None = None,
    sinks: Tensor | None = None,
    rotate_keys: bool = True,
) -> Measure:
    """Of packed q [T, H, D]: some rows of some requests."""
    live = [r for r in requests if r.length]
    live = [live[i] for i in some(len(live), REQUESTS, torch.device("cpu")).tolist()]
    scale = options.get("sm_scale") or q.shape[-1] ** -0.5
    layout = options.get("rope_layout", "neox")
    found = []
    for request in live:
        k, v = request.keys()
        rows = some(request.length, max(1, ROWS // len(live)), q.device)
        x, at = lift(q[request.first + rows]), request.past + rows
        if request.q_scale is not None:
            group = q.shape[1] // k.shape[1]
            x = x * request.q_scale.double().repeat_interleave(group)[:, None]
        if tables is not None:
            x = rotate(x, at, *tables, layout)
            if rotate_keys:
                k = rotate(k, torch.arange(len(k), device=k.device), *tables, layout)
        found.append((request.first + rows, attend(x, k, v, at, scale, options, sinks)))

    def error(o: Tensor) -> float:
        packed = o.reshape(-1, *o.shape[-2:])
        if not whole(packed):
            return float("nan")
        every = torch.cat([rows for rows, _ in found])
        wants = torch.cat([want for _, want in found])
        worst = [relative(packed[rows], want) for rows, want in found]
        return max([relative(packed[every], wants), *worst])

    return error


def scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    """x [S, H_kv, D] times a scale of its heads or of the tensor."""
    return x if scale is None else lift(x) * scale.double().reshape(-1, 1)


def tables_of(tensors: Tensors) -> tuple[Tensor, Tensor] | None:
    return (tensors["rope_cos"], tensors["rope_sin"]) if "rope_cos" in tensors else None


def dense(shape: Shape, options: Shape, t: Tensors) -> Check:
    batch, s_q, s_kv = t["q"].shape[0], t["q"].shape[1], t["k"].shape[1]

    def of(name: str, b: int) -> Tensor | None:
        return t[name][b] if name in t else None

    def request(b: int) -> Request:
        def keys() -> tuple[Tensor, Tensor]:
            k, v = (scaled(t[x][b], of(f"{x}_scale", b)) for x in "kv")
            return k, v

        return Request(b * s_q, s_q, s_kv - s_q, keys, of("q_scale", b))

    q = t["q"].flatten(0, 1)
    return Check(check_requests(q, [request(b) for b in range(batch)], options, tables_of(t)))


def varlen(shape: Shape, options: Shape, t: Tensors) -> Check:
    requests, first, start = [], 0, 0
    for b, (n, length) in enumerate(zip(shape["q_lens"], shape["kv_lens"], strict=True)):

        def keys(b: int = b, rows: slice = slice(start, start + length)) -> tuple[Tensor, Tensor]:
            k_scale, v_scale = (t[x][b] if x in t else None for x in ("k_scale", "v_scale"))
            return scaled(t["k"][rows], k_scale), scaled(t["v"][rows], v_scale)

        q_scale = t["q_scale"][b] if "q_scale" in t else None
        requests.append(Request(first, n, length - n, keys, q_scale))
        first, start = first + n, start + length
    return Check(check_requests(t["q"], requests, options, tables_of(t), t.get("sinks")))


def paged(shape: Shape, options: Shape, t: Tensors) -> Check:
    k_pool, v_pool = t["k_pages"].flatten(0, 1), t["v_pages"].flatten(0, 1)
    requests, first = [], 0
    for b, (n, length) in enumerate(zip(shape["q_lens"], shape["kv_lens"], strict=True)):

        def keys(b: int = b, length: int = length) -> tuple[Tensor, Tensor]:
            rows = physical(t["page_table"][b], 0, length, shape["page"])
            k_scale, v_scale = t.get("k_scale"), t.get("v_scale")
            return scaled(at_rows(k_pool, rows), k_scale), scaled(at_rows(v_pool, rows), v_scale)

        requests.append(Request(first, n, length - n, keys))
        first += n
    return Check(check_requests(t["q"], requests, options, tables_of(t), t.get("sinks")))


def mha_decode(shape: Shape, options: Shape, t: Tensors) -> Check:
    s_q, length = shape["s_q"], shape["length"]

    def request(b: int) -> Request:
        def keys() -> tuple[Tensor, Tensor]:
            rows = physical(t["block_table"][b], 0, length, options["page_size"])
            return t["k"][rows], t["v"][rows]

        return Request(b * s_q, s_q, length - s_q, keys)

    masks = {"is_causal": options.get("is_causal", False)}
    q = t["q"].flatten(0, 1)
    return Check(check_requests(q, [request(b) for b in range(shape["batch"])], masks))


def stored(new: Tensor, pool: Tensor, scale: Tensor) -> Tensor:
    """What a pool keeps of 16-bit rows."""
    if pool.dtype != E4M3:
        return new
    return (new.float() / scale.float()).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def mismatch(got: Tensor, want: Tensor) -> float:
    """0 if the bits are equal, the share of elements that differ otherwise."""
    kind = torch.uint8 if got.element_size() == 1 else torch.int16
    return float((got.contiguous().view(kind) != want.contiguous().view(kind)).double().mean())


def append(shape: Shape, options: Shape, t: Tensors) -> Check:
    """The output, and the rows written: bit for bit, but for keys the operator rotates."""
    page, fused = options["page_size"], options.get("fuse_rope", False)
    q_lens, old_lens = shape["q_lens"], shape["old_lens"]
    lens = [n + old for n, old in zip(q_lens, old_lens, strict=True)]
    k_new, v_new, tables = t["k_new"], t["v_new"], None
    if fused:
        width = options.get("rotary_dim") or shape["dim"]
        base = options.get("rope_base", 1e4)
        tables = rope_tables(width, max(lens), torch.float32, k_new.device, base)
        at = torch.cat([torch.arange(old, end) for old, end in zip(old_lens, lens, strict=True)])
        k_new = rotate(k_new, at.to(k_new.device), *tables, "neox").to(k_new.dtype)
    eight = t["k_pages"].dtype == E4M3
    requests, first, rows = [], 0, []
    for b, (n, old) in enumerate(zip(q_lens, old_lens, strict=True)):

        def keys(b: int = b, old: int = old, new: slice = slice(first, first + n)) -> Any:
            past = physical(t["block_table"][b], 0, old, page)
            k = scaled(at_rows(t["k_pages"], past), t["k_scale"] if eight else None)
            v = scaled(at_rows(t["v_pages"], past), t["v_scale"] if eight else None)
            return torch.cat([lift(k), lift(k_new[new])]), torch.cat([lift(v), lift(v_new[new])])

        requests.append(Request(first, n, old, keys))
        rows.append(physical(t["block_table"][b], old, old + n, page))
        first += n
    slots = torch.cat(rows)
    output = check_requests(t["q"], requests, options, tables, rotate_keys=False)

    def error(o: Tensor) -> float:
        k, v = at_rows(t["k_pages"], slots), at_rows(t["v_pages"], slots)
        if mismatch(v, stored(v_new, v, t["v_scale"])):
            return float("inf")
        want = stored(k_new, k, t["k_scale"])
        if not fused:
            return float("inf") if mismatch(k, want) else output(o)
        return max(relative(k, lift(want)), output(o))

    return Check(error, ((t["k_pages"], slots), (t["v_pages"], slots)))


# ------------------------------------------------------------------- gradients, MLA, DSA


def dense_backward(shape: Shape, options: Shape, t: Tensors) -> Check:
    """dq, dk and dv of the first and the last (request, KV head)."""
    q, k, v, o, do, lse = (t[x] for x in ("q", "k", "v", "o", "do", "lse"))
    batch, s, heads, dim = q.shape
    heads_kv, scale, step = k.shape[2], dim**-0.5, 512
    group, causal = heads // heads_kv, options.get("is_causal", True)
    found = []
    for b, r in sorted({(0, 0), (batch - 1, heads_kv - 1)}):
        own = slice(r * group, (r + 1) * group)
        key, value = k[b, :, r].double(), v[b, :, r].double()
        dk, dv = torch.zeros_like(key), torch.zeros_like(value)
        dq = torch.zeros(s, group, dim, dtype=torch.float64, device=q.device)
        for start in range(0, s, step):
            rows = slice(start, min(start + step, s))
            seen = rows.stop if causal else s
            x, grad = (y[b, rows, own].double().transpose(0, 1) for y in (q, do))  # [g, n, D]
            p = (scale * x @ key[:seen].T - lse[b, own, rows].double()[..., None]).exp_()
            if causal:
                at = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
                p.masked_fill_(torch.arange(seen, device=q.device) > at, 0.0)
            delta = (grad * o[b, rows, own].double().transpose(0, 1)).sum(-1, keepdim=True)
            ds = p * (grad @ value[:seen].T - delta)
            dq[rows] = (scale * ds @ key[:seen]).transpose(0, 1)
            dk[:seen] += scale * torch.einsum("gij,gid->jd", ds, x)
            dv[:seen] += torch.einsum("gij,gid->jd", p, grad)
        found.append((b, r, own, dq, dk, dv))

    def error(gradients: tuple[Tensor, Tensor, Tensor]) -> float:
        if not all(whole(x) for x in gradients):
            return float("nan")
        got_q, got_k, got_v = gradients
        worst = 0.0
        for b, r, own, dq, dk, dv in found:
            pairs = ((got_q[b, :, own], dq), (got_k[b, :, r], dk), (got_v[b, :, r], dv))
            worst = max([worst, *(relative(got, want) for got, want in pairs)])
        return worst

    return Check(error)


def mla_decode(shape: Shape, options: Shape, t: Tensors) -> Check:
    scale = (t["q"].shape[-1] + t["q_pe"].shape[-1]) ** -0.5
    picked = some(t["q"].shape[0], REQUESTS, t["q"].device)
    wants, masks = [], {"is_causal": False}
    for b in picked.tolist():
        q = torch.cat([t["q"][b], t["q_pe"][b]], -1)[None]
        k = torch.cat([t["k"][b], t["k_pe"][b]], -1)
        at = torch.zeros(1, dtype=torch.int64, device=q.device)
        wants.append(attend(q, k, t["k"][b], at, scale, masks)[0])

    def error(o: Tensor) -> float:
        if not whole(o):
            return float("nan")
        return max(relative(o[b], x) for b, x in zip(picked.tolist(), wants, strict=True))

    return Check(error)


def dsa_decode(shape: Shape, options: Shape, t: Tensors) -> Check:
    q, kv, indices = t["q"], t["kv"], t["indices"]
    batch, s, heads, width = q.shape
    dim, first = width - options["dim_tail"], options["q_start_index_s"]
    scale = options.get("sm_scale") or width**-0.5
    picked, wants = some(batch * s, 64, q.device), []
    for row in picked.tolist():
        b, i = divmod(row, s)
        ids = indices[b, i, 0].long()
        dead = (ids < 0) | (ids >= kv.shape[1])
        if options.get("is_causal", True):
            dead |= (ids + 1) * options["stride_kv"] - 1 > first + i
        keys = kv[b, ids[~dead], 0].double()
        if len(keys):
            wants.append(softmax_times(scale * q[b, i].double() @ keys.T, keys[:, :dim]))
        else:
            wants.append(torch.zeros(heads, dim, dtype=torch.float64, device=q.device))
    want = torch.stack(wants)

    def error(o: Tensor) -> float:
        return relative(o.flatten(0, 1)[picked], want) if whole(o) else float("nan")

    return Check(error)


# --------------------------------------------------------------------------------- NSA


def tokens_of(t: Tensors, count: int = 128) -> Iterable[tuple[int, int, int]]:
    """(row, request, position) of some tokens."""
    metadata = t["token_indices"]
    rows = some(len(metadata), count, metadata.device)
    for row, pair in zip(rows.tolist(), metadata[rows].tolist(), strict=True):
        yield row, *pair


def by_group(q: Tensor, heads_kv: int) -> Tensor:
    """One token's query heads [H, D] as [H_kv, g, D]."""
    return q.view(heads_kv, -1, q.shape[-1])


def nsa_compressed(shape: Shape, options: Shape, t: Tensors) -> Check:
    q, k, v, starts = t["q"], t["k_cmp"], t["v_cmp"], t["chunk_offsets"].tolist()
    rows, outs, sums = [], [], []
    for row, request, position in tokens_of(t):
        closed = (position + 1) // options["bs"]
        chunk = slice(starts[request], starts[request] + closed)
        x = by_group(q[row].double(), k.shape[1])
        z = options["scale"] * x @ k[chunk].double().permute(1, 2, 0)
        o = torch.zeros(*x.shape[:2], v.shape[-1], dtype=torch.float64, device=q.device)
        lse = torch.full(x.shape[:2], -torch.inf, dtype=torch.float64, device=q.device)
        if closed:
            lse = torch.logsumexp(z, -1)
            o = softmax_times(z, v[chunk].double().transpose(0, 1))
        rows.append(row)
        outs.append(o.flatten(0, 1))
        sums.append(lse.flatten())
    want, sums_want = torch.stack(outs), torch.stack(sums)

    def error(outputs: tuple[Tensor, Tensor | None]) -> float:
        o, lse = outputs
        if not whole(o):
            return float("nan")
        if lse is not None:
            got = lse.T[rows].double()
            near = (got == sums_want) | ((got - sums_want).abs() <= 1e-3 + 1e-4 * sums_want.abs())
            if not bool(near.all()):
                return float("inf")
        return relative(o[rows], want)

    return Check(error)


def nsa_topk(shape: Shape, options: Shape, t: Tensors) -> Check:
    """The error is the most by which a kept block is worse than a later or omitted one."""
    q, k, starts = t["q"], t["k_cmp"], t["chunk_offsets"].tolist()
    heads_kv, group = k.shape[1], q.shape[1] // k.shape[1]
    found = []
    for row, request, position in tokens_of(t):
        closed, current = (position + 1) // options["bs"], position // options["bs"]
        scaled_q = (q[row].float() * options["scale"]).to(q.dtype)
        keys = k[starts[request] : starts[request] + closed].double()
        z = by_group(scaled_q.double(), heads_kv) @ keys.permute(1, 2, 0)
        score = torch.zeros(heads_kv, current + 1, dtype=torch.float64, device=q.device)
        if current:
            score[:, :current] = torch.softmax(z, -1)[..., :current].sum(1)
        score[:, [0, max(current - 1, 0), current]] = float(group)
        found.append((row, score))

    def gap(ids: Tensor, score: Tensor) -> float:
        kept = min(len(ids), len(score))
        chosen = ids[:kept].long()
        legal = (chosen >= 0) & (chosen < len(score))
        if not bool(legal.all()) or bool((ids[kept:] != -1).any()):
            return float("inf")
        if len(chosen.unique()) != kept:
            return float("inf")
        values, omitted = score[chosen], score.clone()
        omitted[chosen] = -torch.inf
        following = torch.cat([values[1:], omitted.amax(0, keepdim=True)])
        return float(((following - values).clamp(min=0) / values.clamp(min=1)).max())

    def error(picked: Tensor) -> float:
        return max(gap(picked[row, r], s[r]) for row, s in found for r in range(heads_kv))

    return Check(error)


def nsa_sparse(shape: Shape, options: Shape, t: Tensors) -> Check:
    q, k, v, block = t["q"], t["k"], t["v"], options["block_size"]
    starts = t["offsets"].tolist()
    rows, wants = [], []
    for row, request, position in tokens_of(t):
        end = starts[request + 1] - starts[request]
        limit = position + 1 if options["is_causal"] else end
        x, outs = by_group(q[row].double(), k.shape[1]), []
        for r in range(k.shape[1]):
            ids = t["block_indices"][row, r, : int(t["block_counts"][row, r])].long()
            keys = (ids[:, None] * block + torch.arange(block, device=q.device)).flatten()
            keys = starts[request] + keys[(keys >= 0) & (keys < limit)]
            if len(keys):
                z = options["scale"] * x[r] @ k[keys, r].double().T
                outs.append(softmax_times(z, v[keys, r].double()))
            else:
                outs.append(torch.zeros_like(x[r]))
        rows.append(row)
        wants.append(torch.cat(outs))
    want = torch.stack(wants)

    def error(o: Tensor) -> float:
        return relative(o[rows], want) if whole(o) else float("nan")

    return Check(error)


# ----------------------------------------------------------------- indexer, cache write


def quantized(index_k: Tensor) -> tuple[Tensor, Tensor]:
    """The e4m3 codes and scales that a bf16 call makes of its keys.

    Quotients in float64, then rounded: on a GPU torch multiplies by the reciprocal of a number,
    and every other scale is off by a bit, which moves one code in a thousand.
    """
    x = index_k.float()
    scale = (x.abs().amax(-1).clamp(min=1e-4).double() / E4M3_MAX).float()
    factor = scale.double().reciprocal().float()
    return (x * factor[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3), scale


def indexer(shape: Shape, options: Shape, t: Tensors) -> Check:
    q, k, scale = t["index_q"], t["index_k"], t.get("index_k_scale")
    if q.dtype != E4M3:
        q = q.float().clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
        k, scale = quantized(k)
    keys = lift(k[0, :, 0])
    factor = torch.ones(len(keys), device=q.device) if scale is None else scale[0, :, 0]
    picked = some(q.shape[1], 48, q.device)
    wants = []
    for s in picked.tolist():
        z = lift(q[0, s]) @ keys.T
        wants.append((t["weights"][s].double() @ z.relu_()) * factor.double())
    want = torch.stack(wants)
    at = torch.arange(len(keys), device=q.device)
    starts, ends = t["cu_seqlen_ks"][picked, None], t["cu_seqlen_ke"][picked, None]
    seen = (at >= starts) & (at < ends)

    def error(logits: Tensor) -> float:
        got = logits[0, picked, :, 0]
        clean = not bool(torch.isnan(logits).any()) and bool((got[~seen] == -torch.inf).all())
        if options.get("clean_logits", True) and not clean:
            return float("nan")
        return relative(got[seen], want[seen])

    return Check(error)


def cache_write(shape: Shape, options: Shape, t: Tensors) -> Check:
    """The share of written elements that differ, or inf if another row changed."""
    slots = t["slot_mapping"]
    pools = [(t[f"{x}_pages"].flatten(0, 1), t[x], t.get(f"{x}_scale")) for x in "kv"]
    free = torch.ones(len(pools[0][0]), dtype=torch.bool, device=slots.device)
    free[slots] = False
    kept = [at_rows(pool, free) for pool, _, _ in pools]
    one = torch.ones(1, device=slots.device)

    def error(_: Any) -> float:
        worst = 0.0
        for (pool, new, scale), before in zip(pools, kept, strict=True):
            if mismatch(at_rows(pool, free), before):
                return float("inf")
            want = stored(new, pool, one if scale is None else scale)
            worst = max(worst, mismatch(at_rows(pool, slots), want))
        return worst

    return Check(error, tuple((pool, slots) for pool, _, _ in pools))


EXPECTED: dict[str, Callable[[Shape, Shape, Tensors], Check]] = {
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


def expect(op: str, shape: Shape, options: Shape, tensors: Tensors) -> Check:
    """What a call of `op` on these tensors must give."""
    with torch.no_grad():
        return EXPECTED[op](shape, options, tensors)
