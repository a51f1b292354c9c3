"""Launching grouped-query attention: which tiles, how many splits, for which keys."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ops_registry import tracing
from tileops.kernels.common.gqa_hooks import score_scale
from tileops.kernels.common.launch import (
    e4m3_argument,
    larger,
    launch,
    machine,
    native_e4m3,
    or_other,
    padded,
    rows,
    smaller,
)
from tileops.kernels.common.machine import Machine, configuration
from tileops.kernels.common.triton_attention import attention_kernel, combine_kernel

FAR = 2**30  # no sequence is longer: a window this wide is none
L2_BYTES = 2**25  # of keys and values that stay in the L2 cache while a section runs
SPLIT_KEYS = 256  # a split has at least so many keys
MAX_SPLITS = 128
WAYS = 128
COMBINED = 64  # splits joined at a time, where their rows are at most 128 wide


class Queries(NamedTuple):
    """Rows q [tokens, H, D] of requests: packed behind offsets, or `length` tokens each."""

    q: Tensor
    requests: Any
    length: Any
    offsets: Tensor | None = None


class Keys(NamedTuple):
    """Keys and values by request.

    Packed k, v [T_kv, H_kv, D] behind offsets; or dense, `length` each, that begin `spacing` rows
    apart; or pools [N_kv, H_kv, D] of pages of `page` rows behind table [B, W], lengths [B] of
    them used.
    heads, row: of dense k and v that are read as they lie, whatever their shape says: H_kv heads
        in rows `row` elements apart. apart: those of a head, which begin `spacing_head` rows from
        those of the one before.
    appended: lengths do not count the tokens of q.
    fresh: the keys and values of q's tokens, packed like q, where the pool's are not to be used.
    """

    k: Tensor
    v: Tensor
    length: Any
    spacing: Any = 0
    spacing_head: Any = 0
    heads: int = 0
    row: int = 0
    apart: bool = False
    offsets: Tensor | None = None
    page: int = 0
    table: Tensor | None = None
    lengths: Tensor | None = None
    appended: bool = False
    fresh: tuple[Tensor, Tensor] | None = None


def dense_keys(k: Tensor, v: Tensor) -> Keys:
    """Dense k, v [B, S_kv, H_kv, D], as they lie where their rows are evenly spaced.

    So the filled part of a longer cache, cache[:, :S_kv], is not copied, nor is a view of a cache
    [B, H_kv, S, D]. A traced program has to know the spacing without a guard.
    """
    batch, length, heads, dim = k.shape
    between, row, head, element = k.stride()
    traced = tracing.traced(k)
    even = isinstance(row, int) and row >= dim and (traced or k.numel() > 0)
    even = even and all(
        tracing.always(a == b) for a, b in zip(k.stride(), v.stride(), strict=True)
    )
    even = even and tracing.always(element == 1) and tracing.always(between % row == 0)
    apart = not (tracing.always(head == dim) and row >= heads * dim)
    if not even or (apart and not tracing.always(head % row == 0)):
        return Keys(k.flatten(0, 1), v.flatten(0, 1), length, length)
    spacing, spacing_head = between // row, head // row if apart else 0
    if not traced:  # tensor descriptors ask for the rows there are
        count = (batch - 1) * spacing + (heads - 1) * spacing_head + length
        shape = count, 1 if apart else heads, dim
        k, v = (x.as_strided(shape, (row, dim, 1)) for x in (k, v))
    return Keys(k, v, length, spacing, spacing_head, heads, row, apart)


class Scores(NamedTuple):
    """The options of a row; scales as `attention_kernel` wants them."""

    scale: float
    is_causal: bool
    left: int = -1
    right: int = -1
    softcap: float | None = None
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    sinks: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    rotary: int = 0
    neox: bool = True


def _some(scale: Tensor | None) -> Tensor | None:
    """Scales [B, H_kv], or of one request where there are none: rows behind the last read them."""
    if scale is None or type(scale.shape[0]) is not int or scale.shape[0] > 0:
        return scale
    return scale.new_ones((1, *scale.shape[1:]))


def scores_of(call: Any, tables: bool = False) -> Scores:
    """The options of a call with windows, softcap and caller-given rotary tables.

    tables: the kernel rotates, and needs them; else what it is given is rotated already.
    """
    rotates = tables and call.pos_encoding_mode == "rope"
    return Scores(
        score_scale(call),
        call.is_causal,
        call.window_size_left,
        call.window_size_right,
        call.softcap,
        **{name: _some(getattr(call, name, None)) for name in ("q_scale", "k_scale", "v_scale")},
        sinks=getattr(call, "sinks", None),
        cos=call.rope_cos if rotates else None,
        sin=call.rope_sin if rotates else None,
        rotary=(call.rotary_dim or call.q.shape[-1]) if rotates else 0,
        neox=call.rope_layout == "neox",
    )


def window_of(scores: Scores) -> tuple[int, int]:
    """The left and right window, -1 for none; a causal mask is a right window of 0."""
    left, right = (x if x < FAR else -1 for x in (scores.left, scores.right))
    return left, 0 if scores.is_causal else right


def tiles_wanted(small: Any, limit: Any) -> list[tuple[str, Any]]:
    """[(shape of tiles, 1 or 0)]: narrow ones for at most `limit` rows, else wide ones.

    A traced program holds both and switches by arithmetic; eager launches one.
    """
    if isinstance(small, int) and isinstance(limit, int):
        return [("narrow", 1)] if small <= limit else [("wide", 1)]
    narrow = smaller(larger(limit + 1 - small, 0), 1)
    return [("narrow", narrow), ("wide", 1 - narrow)]


def window_for(scores: Scores, queries: Queries) -> tuple[int, int]:
    """`window_of`, but causal for one token a request.

    It is the last one and sees the same keys: one kernel serves both. Packed requests may have
    more tokens, and so may a length that is traced.
    """
    left, right = window_of(scores)
    alone = type(queries.length) is int and queries.length == 1
    return left, 0 if alone else right


def keys_seen(window: tuple[int, int], block_m: int, keys: Any) -> Any:
    """The most of its keys that a tile of block_m rows sees: no more, whatever its group."""
    left, right = window
    return keys if left < 0 or right < 0 else smaller(keys, left + right + block_m)


def splits_wanted(programs: Any, slots: int, keys: Any) -> Any:
    """How many parts each tile's keys are walked in, to give every slot of the machine work.

    1 for no programs: of two shapes in a traced program the idle one has nothing to join.
    """
    wanted = slots // larger(programs, 1) * smaller(programs, 1)
    return larger(smaller(wanted, most_splits(keys)), 1)


def even_splits(programs: Any, slots: int, keys: Any) -> Any:
    """`splits_wanted`, or twice as many and one more where that takes at least 1/8 less time.

    A wave of programs takes the time of one of them, however few it has. 320 programs in 264
    slots are two waves that last as long as all the keys of a tile; in three parts, they are
    four that last a third as long.
    """
    few = splits_wanted(programs, slots, keys)
    many = 2 * few + 1
    # Both in few * many-ths of the time that one program takes for all its keys.
    time_few = (programs * few + slots - 1) // slots * many
    time_many = (programs * many + slots - 1) // slots * few
    saved = larger(time_few - time_many, 0)
    uneven = smaller(8 * saved // larger(time_few, 1), 1)
    return larger(smaller(few + uneven * (few + 1), most_splits(keys)), 1)


def most_splits(keys: Any) -> Any:
    """As many as have SPLIT_KEYS keys each."""
    return smaller(MAX_SPLITS, (keys + SPLIT_KEYS - 1) // SPLIT_KEYS)


def busy_tiles(tokens: Any, requests: Any, group: int, block_m: int) -> Any:
    """How many narrow tiles of a packed batch have rows, where no request is without tokens.

    There may be one more for every request and one for padding: a decode step of one request
    launches two, and splits that count both leave half of the machine idle.
    """
    return larger(smaller(tokens, requests), (tokens * group + block_m - 1) // block_m)


def numbers_for(
    shape: str,
    device: Machine,
    dim: int,
    group: int,
    rotated: bool = False,
    paged_e4m3: bool = False,
) -> Mapping[str, int]:
    """Tile sizes, warps, stages and programs per multiprocessor.

    programs_paged, where it is there: programs with pages, whose table takes one of the stages.
    shape: "narrow", "wide" through tensor descriptors, or wide through "pointers".
    rotated: keys are rotated as they are read.
    paged_e4m3: keys of one byte in pages: `stages_paged_e4m3`, where it is there, has as many
        bytes on their way as `stages` of two.
    """
    numbers = configuration(f"attention_{shape}", f"d{padded(dim)}", device)
    if shape != "narrow":
        return numbers
    # Four tokens of a request fit a tile of at most 64 rows, so that speculated tokens share
    # the keys; a wide group at least shares them among its heads.
    heads = padded(group)
    wanted = max(min(4 * (1 << (group - 1).bit_length()), 64), heads)
    fitting = {"BLOCK_M": min(max(16, wanted), numbers["BLOCK_M"])}
    if rotated:  # the other half of every key and the tables take room too
        fitting["BLOCK_N"] = max(16, numbers["BLOCK_N"] // 2)
    if paged_e4m3:
        fitting["stages"] = numbers.get("stages_paged_e4m3") or numbers["stages"]
    return {**numbers, **fitting}


def tileable(x: Tensor, row: int) -> bool:
    """Whether rows x [N, heads, D], `row` elements apart, can move through tensor descriptors.

    Traced programs use pointers: Inductor re-emits kernels without descriptors it did not make.
    """
    dim = x.shape[-1]
    if tracing.traced(x) or dim != padded(dim) or x.dtype.itemsize != 2:
        return False
    if not 0 < x.shape[0] < 2**31:  # rows are int32 coordinates
        return False
    return row % 8 == 0 and (x.is_meta or x.data_ptr() % 16 == 0)


def attend(o: Tensor, lse: Tensor | None, queries: Queries, keys: Keys, scores: Scores) -> None:
    """Fill o [tokens, H, D] and lse ([H, tokens], dense [B, H, S_q]), where there is one."""
    q = queries.q
    tokens = q.shape[0]
    heads, dim = q.shape[1:]
    if heads == 0:
        return
    heads_kv = keys.heads or keys.k.shape[1]
    group = heads // heads_kv
    device = machine(q)
    packed = queries.offsets is not None
    k, v = ((x, keys.row) if keys.row else rows(x) for x in (keys.k, keys.v))
    wide = numbers_for("wide", device, dim, group)
    fits = wide["BLOCK_M"] % group == 0 and keys.page % wide["BLOCK_N"] == 0 and not scores.rotary
    if not (fits and tileable(*k) and tileable(*v) and tileable(o, heads * dim)):
        wide = numbers_for("pointers", device, dim, group)
    # Rows of 16 bits beside them, new ones, would take twice the room.
    paged_e4m3 = keys.table is not None and keys.k.dtype.itemsize == 1 and not keys.fresh
    narrow = numbers_for("narrow", device, dim, group, scores.rotary > 0, paged_e4m3)
    narrow_rows = narrow["BLOCK_M"]
    if packed:
        small, limit = tokens, queries.requests * max(narrow_rows // group, 1)
    else:
        small, limit = queries.length * group, narrow_rows
    window = window_for(scores, queries)
    for shape, active in tiles_wanted(small, limit):
        numbers = wide if shape == "wide" else narrow
        block_m = numbers["BLOCK_M"]
        if packed:
            tiles = (tokens * group // block_m + queries.requests + 1) * active
            programs = busy = tiles * heads_kv
            if shape == "narrow":
                busy = busy_tiles(tokens, queries.requests, group, block_m) * heads_kv * active
        else:
            tiles = (queries.length * group + block_m - 1) // block_m * active
            programs = busy = tiles * heads_kv * queries.requests
        resident = numbers.get("programs_paged") if keys.page else None
        slots = device.processors * (resident or numbers["programs"])
        seen = keys_seen(window, block_m, keys.length)
        wanted = even_splits if shape == "narrow" else splits_wanted
        splits = wanted(busy, slots, seen)
        _launch(o, lse, queries, keys, k, v, scores, window, numbers, tiles, programs, splits)


def _launch(
    o: Tensor,
    lse: Tensor | None,
    queries: Queries,
    keys: Keys,
    strided_k: tuple[Tensor, int],
    strided_v: tuple[Tensor, int],
    scores: Scores,
    window: tuple[int, int],
    numbers: Mapping[str, int],
    tiles: Any,
    programs: Any,
    splits: Any,
) -> None:
    q, q_row = rows(queries.q)
    (k, k_row), (v, v_row) = strided_k, strided_v
    tokens, (heads, dim) = q.shape[0], q.shape[1:]
    heads_kv = keys.heads or k.shape[1]
    fresh = keys.fresh is not None
    (k_new, k_new_row), (v_new, v_new_row) = strided_k, strided_v
    if keys.fresh is not None:
        (k_new, k_new_row), (v_new, v_new_row) = map(rows, keys.fresh)
    packed = queries.offsets is not None
    block_d = padded(dim)
    # [splits, tokens, H, D] and [splits, tokens, H], next to nothing with one split; flat, and
    # never empty, since torch guards on whether a tensor has elements.
    parted = splits * smaller(splits - 1, 1) * tokens * heads
    partial_o = q.new_empty((larger(parted * dim, 16),), dtype=torch.float32)
    partial_lse = q.new_empty((larger(parted, 16),), dtype=torch.float32)
    left, right = window
    sinks = scores.sinks
    element = k.dtype.itemsize * 2 * dim
    section = larger(L2_BYTES // larger(keys.length * element, 1), 1)
    kv_scaled = 0 if scores.k_scale is None else 2 if scores.k_scale.dim() == 1 else 1
    q8 = e4m3_argument(q)
    block_m, block_n = numbers["BLOCK_M"], numbers["BLOCK_N"]
    group = heads // heads_kv
    tiled = numbers["TILES"] == 1
    tiles_of = (q8, q8, q8)
    if tiled:
        wide = k.shape[1] * dim
        tiles_of = (
            TensorDescriptor(k, [k.shape[0], wide], [k_row, 1], [block_n, dim]),
            TensorDescriptor(v, [v.shape[0], wide], [v_row, 1], [block_n, dim]),
            TensorDescriptor(
                o, [tokens, heads, dim], [heads * dim, dim, 1], [block_m // group, group, dim]
            ),
        )
    launch(
        attention_kernel,
        (programs * splits,),
        q8,
        e4m3_argument(k),
        e4m3_argument(v),
        o,
        q8 if lse is None else lse,
        partial_o,
        partial_lse,
        or_other(queries.offsets, q8),
        or_other(keys.offsets, q8),
        or_other(keys.lengths, q8),
        or_other(keys.table, q8),
        or_other(scores.q_scale, q8),
        or_other(scores.k_scale, q8),
        or_other(scores.v_scale, q8),
        or_other(sinks, q8),
        or_other(scores.cos, q8),
        or_other(scores.sin, q8),
        k_new if fresh else q8,
        v_new if fresh else q8,
        *tiles_of,
        scores.scale,
        scores.softcap or 0.0,
        queries.requests,
        tokens,
        queries.length,
        keys.length,
        keys.spacing,
        keys.spacing_head,
        0 if keys.table is None else keys.table.shape[1],
        tiles,
        programs,
        section,
        splits,
        PACKED=packed,
        PAGE=keys.page,
        APPENDED=keys.appended,
        FRESH=fresh,
        HEADS_KV=heads_kv,
        GROUP=group,
        D=dim,
        Q_ROW=q_row,
        K_ROW=k_row,
        V_ROW=v_row,
        K_NEW_ROW=k_new_row,
        V_NEW_ROW=v_new_row,
        LEFT=left,
        RIGHT=right,
        HAS_CAP=bool(scores.softcap),
        HAS_SINKS=sinks is not None,
        HAS_LSE=lse is not None,
        ROTARY=scores.rotary,
        NEOX=scores.neox,
        Q8=queries.q.dtype.itemsize == 1,
        K8=keys.k.dtype.itemsize == 1,
        V8=keys.v.dtype.itemsize == 1,
        NATIVE=native_e4m3(q),
        Q_SCALED=scores.q_scale is not None,
        KV_SCALED=kv_scaled,
        BLOCK_D=block_d,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        HEADS_FIRST=keys.apart,
        TILES=tiled,
        HOISTED=numbers.get("HOISTED") or 0,
        WAYS=WAYS,
        warps=numbers["warps"],
        stages=numbers["stages"],
        registers=numbers.get("registers"),
    )
    if isinstance(splits, int) and splits == 1:
        return
    # Traced with one split there is nothing to combine: the grid is empty.
    combined = tokens * smaller(splits - 1, 1)
    join(o, lse, partial_o, partial_lse, sinks, combined, queries.length, splits, packed=packed)


def join(
    o: Tensor,
    lse: Tensor | None,
    partial_o: Tensor,
    partial_lse: Tensor,
    sinks: Tensor | None,
    tokens: Any,
    length: Any,
    splits: Any,
    *,
    packed: bool,
    like_lse: bool = False,
    at_once: int = COMBINED,
    warps: int = 4,
) -> None:
    """Fill o [tokens, H, D] and lse, where there is one, from `splits` parts of the keys.

    partial_o [splits, tokens, H, D]; partial_lse [splits, tokens, H] to base 2, or natural
    logarithms [splits, *lse.shape] (`like_lse`). length: of dense queries.
    """
    heads, dim = o.shape[-2:]
    block_d = padded(dim)
    launch(
        combine_kernel,
        (tokens * heads,),
        partial_o,
        partial_lse,
        o,
        partial_o if lse is None else lse,
        or_other(sinks, partial_o),
        tokens,
        length,
        splits,
        PACKED=packed,
        HEADS=heads,
        D=dim,
        HAS_SINKS=sinks is not None,
        HAS_LSE=lse is not None,
        LIKE_LSE=like_lse,
        BLOCK_D=block_d,
        BLOCK_S=min(at_once, 128 * at_once // block_d),
        warps=warps,
        stages=2,
    )
