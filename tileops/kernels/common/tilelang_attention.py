"""Grouped-query attention for sm_90a in TileLang: one warp copies, groups of warps multiply.

A persistent program takes tiles (rows of one request and one or several heads of one KV head)
from a counter. Its producer warp finds them and requests their rows from the copy engine; two or
three consumer groups of 64 rows each run the products of one block of keys while the exponentials
of another are computed. The design and what each part brought: `docs/design/hopper-log.md`.
"""

from typing import Any

import tilelang.language as T

from tileops.kernels.common.tilelang_config import (
    BLOCKS,
    F32,
    FIRST,
    HEAD,
    KEYS,
    LENGTH,
    NUMBERS,
    REGISTERS,
    REQUEST,
    ROW,
    SWIZZLE_128B,
    TARGET,
    Config,
    device,
)
from tileops.kernels.common.tilelang_consumer import Sizes, consumer
from tileops.kernels.common.tilelang_copies import copies, panels, strided
from tileops.kernels.common.tilelang_rows import SOURCE

FOREVER = 2**30
FLAG = ("false", "true")
LEAD = 3  # blocks before the end of a tile's copies the next one is asked for


def make(**options: Any) -> Any:
    """The kernel of (q, k, v, o, lse, offsets, lengths, table, of_heads, counter, scale, cap,
    left, right, requests, blocks, tiles, section, splits, CTAs).

    layout: "dense": q, o [B, S_q, H, D]; k, v [B, S_kv, H_kv, D]; lse [B, H, S_q].
        "packed": q, o [T_q, H, D]; k, v [T_kv, H_kv, D]; lse [H, T_q]; request b has the queries
        offsets[b] to offsets[b + 1] and the keys lengths[b] to lengths[b + 1]. "paged": k, v are
        pools [N, page, H_kv, D] behind table [B, W]; lengths [B] keys, the queries of an
        `appended` request not counted. Other metadata: any tensor of its dtype.
    group: H / H_kv. packed_heads: query heads of one KV head in a tile (not dense).
    split: dense, each tile in `splits` parts, which share its keys: o [splits * B, S_q, H, D] and
        lse [splits * B, H, S_q] take part by part what attention to those keys alone gives.
    left, right: whether that window applies, of `left` and `right` keys; causal: right is 0.
    counter [1] int32: zero before a launch, and after it.
    scale: log2(e) / sqrt(D), or the cap times log2(e) with softcap, where cap is
        2 log2(e) / (sqrt(D) cap). of_heads: with `sinks` [H] float32, natural logits; with q and
        k of e4m3 (then v is float16, o of `out_dtype`, D 128, keys not paged) float32
        [2, B, H_kv]: what their scores are multiplied by, and what the values are.
    requests: B. Dense: blocks of ceil(S_q / (64 consumers)) rows, B * H times as many tiles
        (parts of tiles, if split), in sections of so many of the B * H heads. Else section says
        whether requests are served together (see `packed_tile`). CTAs: programs that share them.
    block_n: keys of a block. consumers: groups of 64 rows. stages: blocks under way.
    """
    config = Config(**options)
    consumer_regs, producer_regs = REGISTERS[config.consumers]
    D, G, P = config.head_dim, config.group, config.packed_heads
    BN, BM, NW, ST, PER = (
        config.block_n, config.block_m, config.consumers, config.stages, config.tokens
    )  # fmt: skip
    DENSE, PAGED, E4M3, split = config.dense, config.paged, config.e4m3, config.split
    dtype, sinks, has_lse = config.dtype, config.sinks, config.has_lse
    S_REGS, O_REGS, P_REGS = config.s_registers, config.o_registers, config.p_registers
    SETS, QS, LINES = config.sets, config.q_slots, config.lines
    PAGE = config.page or BN
    B, SQ, SK, TQ, TK, N, H, HK, W = (
        T.dynamic(n)
        for n in (
            "batch", "seq_q", "seq_kv", "rows_q", "rows_kv", "pages", "heads", "heads_kv", "width"
        )
    )  # fmt: skip
    TARGETS = T.dynamic("targets") if split else B  # requests of o and lse
    NO, NL, NT, NS, REQUESTS = (
        T.dynamic(n) for n in ("offsets_len", "lengths_len", "tables", "of_heads_len", "scaled")
    )
    Q_SHAPE, KV_SHAPE, O_SHAPE, LSE_SHAPE = (
        ((B, SQ, H, D), (B, SK, HK, D), (TARGETS, SQ, H, D), (TARGETS * H, SQ))
        if DENSE
        else ((TQ, H, D), (N, PAGE, HK, D) if PAGED else (TK, HK, D), (TQ, H, D), (H, TQ))
    )
    OF_HEADS = (H,) if sinks else (2, REQUESTS, HK) if E4M3 else (NS,)
    THREADS = 128 * (NW + 1)
    FLAGS = f"{PER}, {BN}, {FLAG[config.left]}, {FLAG[config.right]}"
    load_queries, load_keys, send_tile = copies(config)
    take_block, finish = consumer(config, Sizes(SQ, TQ, H), send_tile)

    @T.macro
    def plan(tile_s, line, number, state, offsets, lengths, requests, blocks, tiles, section,
             splits, w_left, w_right, more):  # fmt: skip
        """The tile of that number into a line of tile_s; whether there is one."""
        if split:
            more[0] = T.call_extern(
                "bool", f"attn::part_of_tile<{FLAGS}>", T.access_ptr(tile_s[line, 0], "rw"),
                number, tiles, blocks, section, H, SQ, SK, w_left, w_right, requests, splits,
            )  # fmt: skip
        elif DENSE:
            more[0] = T.call_extern(
                "bool", f"attn::equal_tile<{FLAGS}>", T.access_ptr(tile_s[line, 0], "rw"), number,
                tiles, blocks, section, H, SQ, SK, w_left, w_right,
            )  # fmt: skip
        else:
            more[0] = T.call_extern(
                "bool",
                f"attn::packed_tile<{FLAGS}, {FLAG[PAGED]}, {FLAG[config.appended]}>",
                T.access_ptr(tile_s[line, 0], "rw"), number, state.data,
                T.access_ptr(offsets[0], "r"), T.access_ptr(lengths[0], "r"), TQ, requests,
                section, T.truncdiv(H, P), w_left, w_right,
            )  # fmt: skip

    @T.macro
    def copy_tiles(q, x, table, q_s, x_s, tile_s, asked, tile_full, q_barriers, full, free):
        """What a copying warp does: keys or values of all tiles, with keys also the queries."""
        b = T.alloc_var("int32")
        h = T.alloc_var("int32")
        length = T.alloc_var("int32")
        keys = T.alloc_var("int32")
        first = T.alloc_var("int32")
        count = T.alloc_var("int32")
        step = T.alloc_var("int32")
        slot = T.alloc_var("int32")
        row = T.alloc_local([1], "int32")
        step = 0
        row[0] = 0
        for i in T.unroll(FOREVER, unroll_factor=1):
            line = i % LINES
            T.mbarrier_wait_parity(tile_full[line], (i // LINES) % 2)
            count = tile_s[line, BLOCKS]
            if q is not None:
                slot = i % QS
                T.mbarrier_wait_parity(q_barriers[1][slot], ((i // QS) % 2) ^ 1)
                if count == 0:
                    if T.shuffle_elect(32):
                        T.mbarrier_arrive(q_barriers[0][slot])
            if count == 0:
                T.loop_break()
            b = tile_s[line, REQUEST]
            h = tile_s[line, HEAD]
            length = tile_s[line, LENGTH]
            first = tile_s[line, FIRST]
            keys = tile_s[line, KEYS]
            if q is not None:
                load_queries(q, q_s, q_barriers[0], slot, tile_s[line, ROW], b, h)
            h = T.truncdiv(h * P, G)
            for n in T.unroll(count, unroll_factor=1):
                s = step % ST
                if PAGED:  # the lane's page
                    row[0] = T.call_extern(
                        "int32", f"attn::page_of<{BN}, {PAGE}>", T.access_ptr(table[0, 0], "r"), W,
                        b, first + n, length, N,
                    )  # fmt: skip
                else:
                    row[0] = keys + (first + n) * BN
                if q is not None:
                    if n == T.max(count - LEAD, 0):
                        if T.shuffle_elect(32):
                            T.mbarrier_arrive(asked[0])
                T.mbarrier_wait_parity(free[s], ((step // ST) % 2) ^ 1)
                load_keys(x, x_s, full, s, row[0], b, h, first + n)
                step = step + 1

    @T.prim_func
    def gqa_forward(
        q: strided("q", Q_SHAPE, dtype),
        k: strided("k", KV_SHAPE, dtype),
        v: strided("v", KV_SHAPE, config.v_dtype),
        o: T.Tensor(O_SHAPE, config.o_dtype),
        lse: T.Tensor(LSE_SHAPE if has_lse else (NL,), F32 if has_lse else "int32"),
        offsets: T.Tensor((NO,), "int32"),
        lengths: T.Tensor((NL,), "int32"),
        table: T.Tensor((NT, W), "int32"),
        of_heads: T.Tensor(OF_HEADS, F32 if sinks or E4M3 else "int32"),
        counter: T.Tensor((1,), "int32"),
        scale: T.float32,
        cap: T.float32,
        w_left: T.int32,
        w_right: T.int32,
        requests: T.int32,
        blocks: T.int32,
        tiles: T.int32,
        section: T.int32,
        splits: T.int32,
        ctas: T.int32,
    ):
        with T.Kernel(ctas, threads=THREADS) as cta:
            T.import_source(SOURCE)
            q_s = T.alloc_shared((QS, *panels(BM, D, dtype)), dtype)
            k_s = T.alloc_shared((ST, *panels(BN, D, dtype)), dtype)
            v_s = T.alloc_shared((ST, *panels(BN, D, config.v_dtype)), config.v_dtype)
            # Tiles of o on their way.
            o_s = q_s
            if E4M3:
                o_s = T.alloc_shared((1, *panels(BM, D, config.o_dtype)), config.o_dtype)
            tile_s = T.alloc_shared((LINES, NUMBERS if split else TARGET), "int32")
            asked = T.alloc_barrier([1])
            tile_full = T.alloc_barrier([32] * LINES)
            q_full = T.alloc_barrier([1] * QS)
            q_free = T.alloc_barrier([config.q_takers] * QS)
            k_full = T.alloc_barrier([1] * ST)
            k_free = T.alloc_barrier([4 * NW] * ST)
            v_full = T.alloc_barrier([1] * ST)
            v_free = T.alloc_barrier([4 * NW] * ST)
            tx = T.get_thread_binding()

            with T.ws(NW):
                T.set_max_nreg(producer_regs, 0)
                if tx >= 128 * NW + 96:  # the warp that finds tiles
                    number = T.alloc_var("int32")
                    more = T.alloc_local([1], "bool")
                    state = T.alloc_local([2], "int32")
                    state[0] = 0
                    state[1] = 0
                    number = cta
                    i = T.alloc_var("int32")
                    i = 0
                    more[0] = True
                    while more[0]:  # a serial loop would be unrolled
                        line = i % LINES
                        if i > 0:  # as late as possible: the last tiles go to who is free first
                            T.mbarrier_wait_parity(asked[0], (i - 1) % 2)
                            number = T.call_extern(
                                "int32", "attn::next_number", T.access_ptr(counter[0], "rw"), ctas
                            )
                        plan(tile_s, line, number, state, offsets, lengths, requests, blocks,
                             tiles, section, splits, w_left, w_right, more)  # fmt: skip
                        if not more[0]:
                            if tx % 32 == 0:
                                tile_s[line, BLOCKS] = 0
                        T.mbarrier_arrive(tile_full[line])
                        i = i + 1
                    device(
                        "close_counter",
                        T.access_ptr(counter[0], "rw"),
                        number,
                        tiles if DENSE else state[1],
                        ctas,
                    )
                if tx < 128 * NW + 32:
                    copy_tiles(
                        q, k, table, q_s, k_s, tile_s, asked, tile_full, (q_full, q_free),
                        k_full, k_free,
                    )  # fmt: skip
                elif tx < 128 * NW + 64:
                    copy_tiles(
                        None, v, table, None, v_s, tile_s, asked, tile_full, None, v_full, v_free
                    )

            with T.ws(*range(NW)):
                T.set_max_nreg(consumer_regs, 1)
                acc_s = T.alloc_local([S_REGS], F32)
                acc_o = T.alloc_local([O_REGS], F32)
                p = T.alloc_local([SETS * P_REGS], "uint32")
                out = T.alloc_local([O_REGS // 2], "uint32")
                m = T.alloc_local([2], F32)
                total = T.alloc_local([2], F32)
                alpha = T.alloc_local([2], F32)
                m_old = T.alloc_local([2], F32)
                total_old = T.alloc_local([2], F32)
                row_lse = T.alloc_local([2], F32)
                factors = T.alloc_local([2], F32)
                token = T.alloc_local([2], "int32")  # of the thread's rows, counted in the tile
                i = T.alloc_local([1], "int32")  # tile
                n = T.alloc_local([1], "int32")  # block of it
                step = T.alloc_local([1], "int32")
                blocks_ = T.alloc_local([1], "int32")
                first = T.alloc_local([1], "int32")
                shift = T.alloc_local([1], "int32")
                length = T.alloc_local([1], "int32")
                # The values seen of the block whose weights p holds.
                first_old = T.alloc_local([1], "int32")
                end_old = T.alloc_local([1], "int32")
                fresh = T.alloc_local([1], "bool")  # p belongs to the first block of its tile
                pending = T.alloc_local([1], "int32")  # q slot of a store under way, or -1
                q_desc = T.alloc_wgmma_desc()
                k_desc = T.alloc_wgmma_desc()
                v_desc = T.alloc_wgmma_desc()
                for desc, x_s, leading in (
                    (q_desc, q_s, 1), (k_desc, k_s, 1), (v_desc, v_s, config.kv_panel >> 4)
                ):  # fmt: skip
                    T.initialize_wgmma_descriptor(
                        desc, T.access_ptr(x_s[0, 0, 0, 0], "r"), SWIZZLE_128B, leading, 64
                    )
                wg = T.shfl_sync(tx // 128, 0)
                row = wg * 64 + (tx % 128) // 32 * 16 + tx % 32 // 4  # first of the thread's two
                # The tokens of a group's rows, counted in the tile; heads may share a group.
                group_low = wg * 64 if P == 1 else 0
                group_high = wg * 64 + 63 if P == 1 else PER - 1
                step[0] = 0
                fresh[0] = True
                first_old[0] = 0
                end_old[0] = BN
                pending[0] = -1
                for e in T.unroll(2):
                    m[e] = -T.infinity(F32)
                    total[e] = 0
                    token[e] = T.truncmod(row + 8 * e, PER)
                for e in T.unroll(O_REGS):
                    acc_o[e] = 0
                for e in T.unroll(SETS * P_REGS):
                    p[e] = T.uint32(0)
                if wg == NW - 1:
                    T.named_barrier_arrive(1, 256)

                i[0] = -1
                n[0] = 0
                blocks_[0] = 0

                place = (
                    i, n, step, blocks_, first, shift, length, first_old, end_old, fresh, pending
                )  # fmt: skip
                held = (
                    (v_s, o_s, tile_s),
                    (q_full, q_free, k_full, k_free, v_full, v_free),
                    (q_desc, k_desc, v_desc),
                    (o, lse, of_heads),
                    (m, total, alpha, m_old, total_old, row_lse),
                    (acc_s, acc_o, p, out),
                    place,
                    (wg, group_low, group_high, token, tx),
                    (scale, factors, cap, w_left, w_right),
                )
                while n[0] >= 0:  # a serial loop would be unrolled
                    take_block(0, *held)
                    if SETS == 2:
                        take_block(1, *held)
                finish(
                    (v_s, o_s, tile_s), v_full, v_desc, (o, lse, of_heads),
                    (m, total, alpha, row_lse), (acc_o, p, out),
                    (i, step, first_old, end_old, fresh), wg, scale,
                )  # fmt: skip

    return gqa_forward
