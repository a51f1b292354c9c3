"""Attention over latent rows for sm_90a in TileLang: a group of warps loads, two multiply.

The work is that of `triton_latent.py`: ranges of tiles of 64 slots for blocks of 64 heads, parts
where a row does not end in its range. A tile is key and value at once and is loaded once. The
first consumer group scores a tile, weighs it and holds the left half of the outputs; the second
one takes the weights from shared memory for the right half. The tile has three parts, which are
given back and loaded again as soon as nothing reads them: the tail, of keys alone, and the halves.
The design and its figures: `docs/design/latent-log.md`.
"""

from typing import Any

import tilelang.language as T
from tilelang import tvm

from tileops.kernels.common.tilelang_config import F32, SWIZZLE_128B
from tileops.kernels.common.tilelang_copies import panels, strided
from tileops.kernels.common.tilelang_latent_config import (
    DIM,
    GROUP,
    HEADS,
    ITEM,
    NUMBERS,
    OUTS,
    PANEL,
    PE,
    RANK,
    REGISTERS,
    ROW,
    SCORES,
    SLOTS,
    STAGES,
    UNIT,
    WARP,
    WARPS,
    WEIGHTS,
    Barriers,
    Config,
    Descriptors,
    Held,
    Shared,
    Work,
)
from tileops.kernels.common.tilelang_latent_consumer import consumer
from tileops.kernels.common.tilelang_latent_loader import LOADER, loads
from tileops.kernels.common.tilelang_latent_rows import SOURCE


def make(**options: Any) -> Any:
    """The kernel of (q, q_pe, k, k_pe, indices, o, parts, part_sums, scale, rows, row_tiles,
    range_tiles, items, head_blocks, queries, first, phase, stride, CTAs).

    q, q_pe [H, tokens, 512 and 64]; k, k_pe [B, N, H_kv, 512 and 64], of any strides; o, parts,
    part_sums, the schedule and the limit as in `triton_latent.latent_kernel`, which does the
    same. scale: to base-2 logits. items: ranges times head_blocks, the blocks of 64 heads of a
    KV head. CTAs: programs that share them.
    gather: indices int32 [rows, slots] name the cache rows of a row; else they are all N, and
    indices may be any of that type. causal: the limit applies. whole: each row is in one range;
    parts and part_sums may be any int32 [n].
    pair: two programs side by side serve blocks of the same rows, and each loads half of every
    tile for both; head_blocks and CTAs are even. Not with gather.
    """
    config = Config(**options)
    dtype, gather, whole, pair = config.dtype, config.gather, config.whole, config.pair
    CAUSAL = str(config.causal).lower()
    B, N, HK, H, TOKENS, ROWS, K, P, HB = (
        T.dynamic(n)
        for n in (
            "batch", "rows_kv", "heads_kv", "heads", "tokens", "named", "slots", "ranges", "blocks"
        )
    )  # fmt: skip
    alloc_free = T.alloc_cluster_barrier if pair else T.alloc_barrier
    load_queries, copy_tiles, gather_tiles = loads(config, N, K)
    lead_row, follow_row, store, store_sums = consumer(config, H, HK)

    @T.macro
    def go_on(at, more, work):
        """The next row of the program, if there is one."""
        more[0] = T.call_extern("bool", "attn::next_row", at.data, *work[:-1])

    @T.macro
    def start(at, more, work):
        at[ITEM] = work.cta
        at[RANK] = -1
        go_on(at, more, work)

    @T.macro
    def lead(work, shared, barriers, q_s, results, scale):
        """What the group that scores does."""
        o, parts, part_sums = results
        tx = T.get_thread_binding()
        at = T.alloc_local([NUMBERS], "int32")
        more = T.alloc_local([1], "bool")
        step = T.alloc_local([1], "int32")
        i = T.alloc_local([1], "int32")
        line = T.alloc_local([3], "int32")
        acc_s = T.alloc_local([SCORES], F32)
        acc_o = T.alloc_local([OUTS], F32)
        p = T.alloc_local([WEIGHTS], "uint32")
        m = T.alloc_local([2], F32)
        total = T.alloc_local([2], F32)
        alpha = T.alloc_local([2], F32)
        moved = T.alloc_local([1], "bool")
        fresh = T.alloc_local([1], "bool")
        q_desc = T.alloc_wgmma_desc()
        k_desc = T.alloc_wgmma_desc()
        v_desc = T.alloc_wgmma_desc()
        for desc, x_s, leading in (
            (q_desc, q_s[0, 0, 0], 1),
            (k_desc, shared.tiles[0, 0, 0, 0], 1),
            (v_desc, shared.tiles[0, 0, 0, 0], PANEL // UNIT),
        ):
            T.initialize_wgmma_descriptor(desc, T.access_ptr(x_s, "r"), SWIZZLE_128B, leading, 64)
        descs = Descriptors(q_desc, k_desc, None, v_desc)
        held = Held(acc_s, acc_o, p, m, total, alpha, moved, fresh, line)
        step[0] = 0
        i[0] = 0
        for e in T.unroll(OUTS):
            acc_o[e] = 0
        start(at, more, work)
        while more[0]:
            for e in T.unroll(2):
                m[e] = -T.infinity(F32)
                total[e] = 0
            fresh[0] = True
            T.mbarrier_wait_parity(barriers.q_full[0], i[0] % 2)
            lead_row(step, shared, barriers, descs, held, scale, tx)
            store(acc_o, o, parts, alpha, at, 0, work)
            if not whole:
                store_sums(part_sums, m, total, scale, at, work)
            i[0] = i[0] + 1
            go_on(at, more, work)

    @T.macro
    def follow(work, shared, barriers, results):
        """What the other group does."""
        o, parts, _ = results
        tx = T.get_thread_binding()
        at = T.alloc_local([NUMBERS], "int32")
        more = T.alloc_local([1], "bool")
        step = T.alloc_local([1], "int32")
        i = T.alloc_local([1], "int32")
        acc_o = T.alloc_local([OUTS], F32)
        alpha = T.alloc_local([2], F32)
        fresh = T.alloc_local([1], "bool")
        ended = T.alloc_local([1], "int32")
        p_desc = T.alloc_wgmma_desc()
        v_desc = T.alloc_wgmma_desc()
        for desc, x_s, leading in (
            (p_desc, shared.weights[0, 0, 0, 0], 1),
            (v_desc, shared.tiles[0, 0, 0, 0], PANEL // UNIT),
        ):
            T.initialize_wgmma_descriptor(desc, T.access_ptr(x_s, "r"), SWIZZLE_128B, leading, 64)
        descs = Descriptors(None, None, p_desc, v_desc)
        step[0] = 0
        i[0] = 0
        for e in T.unroll(OUTS):
            acc_o[e] = 0
        start(at, more, work)
        while more[0]:
            follow_row(i[0], step, shared, barriers, descs, acc_o, alpha, fresh, ended, tx)
            store(acc_o, o, parts, alpha, at, 1, work)
            i[0] = i[0] + 1
            go_on(at, more, work)

    @T.prim_func
    def latent(
        q: strided("q", (H, TOKENS, DIM), dtype),
        q_pe: strided("q_pe", (H, TOKENS, PE), dtype),
        k: strided("k", (B, N, HK, DIM), dtype),
        k_pe: strided("k_pe", (B, N, HK, PE), dtype),
        indices: T.Tensor((ROWS, K), "int32"),
        o: T.Tensor((TOKENS, H, DIM), dtype),
        parts: T.Tensor((P,) if whole else (P, 2, HB, HEADS, DIM), "int32" if whole else F32),
        part_sums: T.Tensor((P,) if whole else (P, 2, HB, 2, HEADS), "int32" if whole else F32),
        scale: T.float32,
        rows: T.int32,
        row_tiles: T.int32,
        range_tiles: T.int32,
        items: T.int32,
        head_blocks: T.int32,
        queries: T.int32,
        first: T.int64,
        phase: T.int64,
        stride: T.int64,
        ctas: T.int32,
    ):
        with T.Kernel(ctas, threads=3 * GROUP, cluster_dims=2 if pair else 1) as cta:
            T.import_source(SOURCE)
            q_s = T.alloc_shared(panels(HEADS, DIM + PE, dtype), dtype)
            k_s = T.alloc_shared((STAGES, *panels(SLOTS, DIM + PE, dtype)), dtype)
            p_s = T.alloc_shared((1, *panels(HEADS, SLOTS, dtype)), dtype)
            factors_s = T.alloc_shared((2, HEADS), F32)
            line_s = T.alloc_shared((STAGES + 1, 4), "int32")
            q_full = T.alloc_barrier([1])
            q_free = T.alloc_barrier([WARPS])
            tail_full = T.alloc_barrier([config.tail_loads] * STAGES)
            half_full = T.alloc_barrier([config.half_loads] * (2 * STAGES))
            tail_free = alloc_free([config.takers] * STAGES)
            half_free = alloc_free([config.takers] * (2 * STAGES))
            p_full = T.alloc_barrier([GROUP])
            p_free = T.alloc_barrier([WARPS])
            scored = T.alloc_barrier([WARPS])
            factors_full = T.alloc_barrier([GROUP])
            tx = T.get_thread_binding()
            work = Work(ctas, items, head_blocks, rows, row_tiles, range_tiles, cta)
            shared = Shared(k_s, p_s, factors_s, line_s)
            barriers = Barriers(
                tail_full, half_full, tail_free, half_free, p_full, p_free, scored, factors_full,
                q_full, q_free,
            )  # fmt: skip
            results = (o, parts, part_sums)

            with T.ws(2):
                T.set_max_nreg(REGISTERS[2], 0)
                at = T.alloc_local([NUMBERS], "int32")
                more = T.alloc_local([1], "bool")
                step = T.alloc_local([1], "int32")
                i = T.alloc_local([1], "int32")
                last = T.alloc_local([1], "int32")
                step[0] = 0
                i[0] = 0
                if gather or tx < LOADER + WARP:
                    start(at, more, work)
                    while more[0]:
                        token = T.truncdiv(at[ROW], HK)
                        r = T.truncmod(at[ROW], HK)
                        b = T.truncdiv(token, queries)
                        head = (r * head_blocks + T.truncmod(at[ITEM], head_blocks)) * HEADS
                        T.mbarrier_wait_parity(q_free[0], (i[0] % 2) ^ 1)
                        if tx < LOADER + WARP:
                            load_queries(q, q_pe, q_s, q_full, head, token)
                        i[0] = i[0] + 1
                        if gather:
                            last[0] = T.call_extern(
                                "int32", f"attn::last_row<{CAUSAL}>", T.truncmod(token, queries),
                                first, phase, stride, N,
                            )  # fmt: skip
                            gather_tiles(
                                k, k_pe, indices, shared, barriers, step, at, b, r, last[0], tx
                            )  # fmt: skip
                        else:
                            copy_tiles(k, k_pe, shared, barriers, step, at, b, r, cta % 2)
                        go_on(at, more, work)

            with T.ws(0):
                T.set_max_nreg(REGISTERS[0], 1)
                lead(work, shared, barriers, q_s, results, scale)

            with T.ws(1):
                T.set_max_nreg(REGISTERS[1], 1)
                follow(work, shared, barriers, results)

            if pair:  # neither leaves while the other may write to it
                T.call_intrin("handle", tvm.ir.Op.get("tl.cluster_sync"))

    return latent
