"""Dense grouped-query attention forward for sm_90a in TileLang: one warp copies, groups multiply.

The design, and what each option is expected to bring, is in `docs/design/hopper-log.md`.
"""

import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout as swizzled

from benchmarks.hopper.rows import SOURCE

PASSES = {
    "tl.disable_warp_specialized": True,
    "tl.disable_thread_storage_sync": True,
    "tl.disable_shared_memory_reuse": True,
    "tl.disable_buffer_init_check": True,
    "tl.disable_safe_memory_legalize": True,
}
SWIZZLE_128B = 1
PANEL = 64  # columns of a shared-memory panel: 128 bytes


def make(
    head_dim=128,
    group=4,
    causal=True,
    dtype="bfloat16",
    *,
    block_n=128,
    consumers=2,
    stages=2,
    turns=True,
    slack=8.0,
    poly=0,
    trim=0,
    dynamic=False,
    anchor=True,
    stale=False,  # experiment: a tile's first block alone sets the reference of the exponentials
    consumer_regs=None,
    producer_regs=None,
):
    """Kernel of (q, k, v, o, lse, counter, scale * log2(e), row blocks, tiles, CTAs).

    q, o [B, S_q, H, D]; k, v [B, S_kv, H_kv, D]; lse [B * H, S_q] float32; counter [1] int32,
    zero before the first call and after every call (dynamic only). Row blocks are
    ceil(S_q / (64 consumers)), tiles B * H times as many. Batch, heads and lengths are known at
    run time.
    """
    # per-thread registers of 504 (2 + 1 groups), 512 (3 + 1) and 500 (4 + 1) a quarter of a core
    consumer_regs = consumer_regs or {2: 232, 3: 160, 4: 112}[consumers]
    producer_regs = producer_regs or {2: 40, 3: 32, 4: 32}[consumers]
    if trim and block_n % 32:
        raise ValueError("trim needs a block_n that is a multiple of 32")
    D, G, BN, NW, ST = head_dim, group, block_n, consumers, stages
    BM = 64 * NW
    S_REGS, O_REGS = BN // 2, D // 2
    BF16 = "true" if dtype == "bfloat16" else "false"
    KIND = "bf16" if dtype == "bfloat16" else "fp16"
    Q_PANEL, KV_PANEL = BM * 128, BN * 128  # bytes
    Q_TILE, KV_TILE = BM * D * 2, BN * D * 2
    B, SQ, SK, H, HK = (T.dynamic(n) for n in ("batch", "seq_q", "seq_kv", "heads", "heads_kv"))
    F32 = "float32"
    THREADS = 128 * (NW + 1)

    div, mod = T.truncdiv, T.truncmod

    def place(t, n_m):
        """Row block and batch-head of tile t: long causal tiles first, heads side by side."""
        if causal:
            return n_m - 1 - div(t, B * H), mod(t, B * H)
        return mod(t, n_m), div(t, n_m)

    def blocks(mb):
        """Key blocks of a tile; a tile without keys still runs one, wholly masked."""
        last = T.min(SK, (mb + 1) * BM + (SK - SQ)) if causal else SK
        return T.max(1, div(last + BN - 1, BN))

    @T.macro
    def score_product(q_desc, k_desc, acc, q_at, k_at, columns):
        """acc[64, columns] = q k^T, one group; q_at, k_at are offsets of the tiles in
        units of 16 bytes, as in a descriptor."""
        T.warpgroup_arrive()
        for c in T.unroll(D // 16, explicit=True):
            T.ptx_wgmma_ss(
                F32,
                f"m64n{columns}k16",
                True,
                True,
                KIND,
                KIND,
                "fp32",
                q_desc.data,
                q_at + (c // 4 * (Q_PANEL // 16) + c % 4 * 2),
                k_desc.data,
                k_at + (c // 4 * (KV_PANEL // 16) + c % 4 * 2),
                acc.data,
                0,
                T.if_then_else(c > 0, 1, 0),
                True,
                True,
            )
        T.warpgroup_commit_batch()

    @T.macro
    def value_product(p, v_desc, acc, v_at, steps, fresh):
        """acc[64, D] (= if fresh, else +=) p v over the first 16 * steps keys, one group."""
        T.warpgroup_arrive()
        for c in T.unroll(steps, explicit=True):
            T.ptx_wgmma_rs(
                F32,
                f"m64n{D}k16",
                False,
                KIND,
                KIND,
                "fp32",
                p.data,
                c * 4,
                v_desc.data,
                v_at + c * 128,
                acc.data,
                0,
                T.if_then_else(c > 0, 1, T.if_then_else(fresh, 0, 1)),
                True,
                True,
            )
        T.warpgroup_commit_batch()

    @T.macro
    def store_tile(
        q_s, o, lse, acc, out, slot, tile, n_m, m, total, inverse, row_lse, scale, wg, row
    ):
        """Normalise acc, round it, send it to o through the tile's q slot; write lse."""
        mb, bh = place(tile, n_m)
        b = div(bh, H)
        h = mod(bh, H)
        line = T.alloc_var("int32")  # variables keep the divisions of place out of 64-bit indices
        first = T.alloc_var("int32")
        line = bh
        first = mb * BM + row
        T.call_extern(
            "void", "attn::close_rows", m.data, total.data, inverse.data, row_lse.data, scale
        )
        T.call_extern("void", f"attn::scale_rows<{O_REGS}>", acc.data, inverse.data)
        T.call_extern("void", f"attn::pack<{O_REGS}, {BF16}>", acc.data, out.data)
        T.call_extern(
            "void",
            f"attn::put_tile<{D}, {Q_PANEL}>",
            out.data,
            T.access_ptr(q_s[slot, wg * 64, 0], "w"),
        )
        T.fence_proxy_async()
        T.sync_threads(8 + wg, 128)
        for c in T.unroll(D // PANEL, explicit=True):
            T.tma_copy(
                q_s[slot, wg * 64 : wg * 64 + 64, c * PANEL : (c + 1) * PANEL],
                o[
                    b,
                    mb * BM + wg * 64 : mb * BM + wg * 64 + 64,
                    h,
                    c * PANEL : (c + 1) * PANEL,
                ],
                leader_scope_threads=128,
            )
        if T.get_thread_binding() % 4 == 0:
            if first < SQ:
                lse[line, first] = row_lse[0]
            if first + 8 < SQ:
                lse[line, first + 8] = row_lse[1]

    @T.macro
    def free_slot(q_free, pending):
        """Give the q slot of a stored tile back once the copy engine has read it."""
        if pending[0] >= 0:
            if T.shuffle_elect(128):
                T.tma_store_wait(0)
                T.mbarrier_arrive(q_free[pending[0]])
            pending[0] = -1

    @T.macro
    def advance(
        columns, q_s, o, lse, q_free, k_free, v_full, v_free, q_desc, k_desc, v_desc, acc_s,
        acc_o, p, out, m, total, top, alpha, m_old, total_old, row_lse, pending, moved, fresh,
        half_old, tile_old, tile, scale, n_m, cta, ctas, i, n, step, s, r, q_at, first_last, wg,
        row, tx,
    ):  # fmt: skip
        """One step of a group: scores of key block n (its first `columns` keys), values of the
        block before, weights of n while the values product runs."""
        if trim == 2:
            for e in T.unroll(S_REGS):
                acc_s[e] = 0  # nothing of the step before lives on: bodies of two widths meet here
        else:
            T.warpgroup_fence_operand(acc_s, num_regs=S_REGS)
        score_product(q_desc, k_desc, acc_s, q_at, s * (KV_TILE // 16), columns)
        T.warpgroup_fence_operand(acc_s, num_regs=columns // 2)
        if step > 0:
            T.mbarrier_wait_parity(v_full[r], ((step - 1) // ST) % 2)
        T.warpgroup_fence_operand(acc_o, num_regs=O_REGS)
        T.warpgroup_fence_operand(p, num_regs=S_REGS // 2)
        if trim:
            if half_old:
                value_product(p, v_desc, acc_o, r * (KV_TILE // 16), BN // 32, fresh)
            else:
                value_product(p, v_desc, acc_o, r * (KV_TILE // 16), BN // 16, fresh)
        else:
            value_product(p, v_desc, acc_o, r * (KV_TILE // 16), BN // 16, fresh)
        T.warpgroup_fence_operand(acc_o, num_regs=O_REGS)
        if turns:
            T.named_barrier_arrive(1 + (wg + 1) % NW, 256)
        free_slot(q_free, pending)
        T.wait_wgmma(1)
        T.warpgroup_fence_operand(acc_s, num_regs=columns // 2)
        if tx % 32 == 0:
            T.mbarrier_arrive(k_free[s])
        if n == 0:
            for e in T.unroll(2):
                m_old[e] = m[e]
                total_old[e] = total[e]
                m[e] = -T.infinity(F32)
                total[e] = 0
        if causal:
            if n * BN + columns - 1 > first_last:
                T.call_extern(
                    "void",
                    f"attn::mask_after<{columns // 2}>",
                    acc_s.data,
                    first_last + row % 64 - n * BN - 2 * (tx % 4),
                )
        else:
            if n * BN + columns > SK:
                T.call_extern(
                    "void",
                    f"attn::mask_length<{columns // 2}>",
                    acc_s.data,
                    SK - 1 - n * BN - 2 * (tx % 4),
                )
        if stale:
            moved[0] = False
            if n == 0:
                T.call_extern(
                    "void", f"attn::row_max<{columns // 2}>", acc_s.data, m.data, top.data
                )
                moved[0] = T.call_extern(
                    "bool",
                    "attn::move_reference",
                    m.data,
                    top.data,
                    total.data,
                    alpha.data,
                    scale,
                    T.float32(slack),
                )
        else:
            T.call_extern("void", f"attn::row_max<{columns // 2}>", acc_s.data, m.data, top.data)
            moved[0] = T.call_extern(
                "bool",
                "attn::move_reference",
                m.data,
                top.data,
                total.data,
                alpha.data,
                scale,
                T.float32(slack),
            )
        T.call_extern(
            "void", f"attn::weights<{columns // 2}, {poly}>", acc_s.data, m.data, total.data, scale
        )
        if anchor:
            T.call_extern("void", "attn::after_weights", total.data)
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(acc_o, num_regs=O_REGS)
        T.warpgroup_fence_operand(p, num_regs=S_REGS // 2)
        if step > 0:  # noqa: SIM102  branches of warps, then of lanes
            if tx % 32 == 0:
                T.mbarrier_arrive(v_free[r])
        if n == 0:
            if i > 0:
                store_tile(
                    q_s,
                    o,
                    lse,
                    acc_o,
                    out,
                    (i - 1) % 2,
                    tile_old if dynamic else cta + (i - 1) * ctas,
                    n_m,
                    m_old,
                    total_old,
                    alpha,
                    row_lse,
                    scale,
                    wg,
                    row,
                )
                pending[0] = (i - 1) % 2
        else:
            if moved[0]:
                T.call_extern("void", f"attn::scale_rows<{O_REGS}>", acc_o.data, alpha.data)
        T.call_extern("void", f"attn::pack<{columns // 2}, {BF16}>", acc_s.data, p.data)
        if columns < BN:
            for e in T.unroll(columns // 4, S_REGS // 2):
                p[e] = T.uint32(0)

    @T.macro
    def load_values(v, v_s, v_full, v_free, step, b, h, n):
        """Values of the block of flattened step `step`."""
        p = step % ST
        T.mbarrier_wait_parity(v_free[p], ((step // ST) % 2) ^ 1)
        T.tma_copy(v[b, n * BN : (n + 1) * BN, h, :], v_s[p, :, :], barrier=v_full[p])
        if T.shuffle_elect(32):
            T.mbarrier_arrive(v_full[p])

    @T.prim_func
    def gqa_forward(
        q: T.Tensor((B, SQ, H, D), dtype),
        k: T.Tensor((B, SK, HK, D), dtype),
        v: T.Tensor((B, SK, HK, D), dtype),
        o: T.Tensor((B, SQ, H, D), dtype),
        lse: T.Tensor((B * H, SQ), F32),
        counter: T.Tensor((1,), "int32"),
        scale: T.float32,
        n_m: T.int32,
        tiles: T.int32,
        ctas: T.int32,
    ):
        with T.Kernel(ctas, threads=THREADS) as cta:
            T.import_source(SOURCE)
            q_s = T.alloc_shared((2, BM, D), dtype)
            k_s = T.alloc_shared((ST, BN, D), dtype)
            v_s = T.alloc_shared((ST, BN, D), dtype)
            tile_s = T.alloc_shared((2,), "int32")
            T.annotate_layout({q_s: swizzled(q_s), k_s: swizzled(k_s), v_s: swizzled(v_s)})
            q_full = T.alloc_barrier([1] * 2)
            q_free = T.alloc_barrier([NW] * 2)
            k_full = T.alloc_barrier([1] * ST)
            k_free = T.alloc_barrier([4 * NW] * ST)
            v_full = T.alloc_barrier([1] * ST)
            v_free = T.alloc_barrier([4 * NW] * ST)
            tx = T.get_thread_binding()
            rounds = tiles if dynamic else div(tiles - cta + ctas - 1, ctas)

            with T.ws(NW):
                T.set_max_nreg(producer_regs, 0)
                if tx < 128 * NW + 32:
                    last_b = T.alloc_var("int32")
                    last_h = T.alloc_var("int32")
                    last_n = T.alloc_var("int32")
                    step = T.alloc_var("int32")
                    tile = T.alloc_var("int32")
                    step = 0
                    for i in T.serial(rounds + 1):
                        slot = i % 2
                        if dynamic:
                            if i == 0:
                                tile = cta
                            else:
                                tile = T.call_extern(
                                    "int32",
                                    "attn::next_tile",
                                    T.access_ptr(counter[0], "rw"),
                                    ctas,
                                    tiles,
                                )
                        else:
                            tile = cta + i * ctas
                        if dynamic or i < rounds:
                            T.mbarrier_wait_parity(q_free[slot], ((i // 2) % 2) ^ 1)
                        if dynamic:
                            if T.shuffle_elect(32):
                                tile_s[slot] = tile
                            if tile >= tiles:
                                if T.shuffle_elect(32):
                                    T.mbarrier_arrive(q_full[slot])
                                T.loop_break()
                        else:
                            if i >= rounds:
                                T.loop_break()
                        mb, bh = place(tile, n_m)
                        b = div(bh, H)
                        h = mod(bh, H)
                        T.tma_copy(
                            q[b, mb * BM : (mb + 1) * BM, h, :],
                            q_s[slot, :, :],
                            barrier=q_full[slot],
                        )
                        if T.shuffle_elect(32):
                            T.mbarrier_arrive(q_full[slot])
                        for n in T.serial(blocks(mb)):
                            s = step % ST
                            T.mbarrier_wait_parity(k_free[s], ((step // ST) % 2) ^ 1)
                            T.tma_copy(
                                k[b, n * BN : (n + 1) * BN, div(h, G), :],
                                k_s[s, :, :],
                                barrier=k_full[s],
                            )
                            if T.shuffle_elect(32):
                                T.mbarrier_arrive(k_full[s])
                            if step > 0:
                                load_values(
                                    v, v_s, v_full, v_free, step - 1, last_b, last_h, last_n
                                )
                            last_b = b
                            last_h = div(h, G)
                            last_n = n
                            step = step + 1
                    if step > 0:
                        load_values(v, v_s, v_full, v_free, step - 1, last_b, last_h, last_n)

            with T.ws(*range(NW)):
                T.set_max_nreg(consumer_regs, 1)
                acc_s = T.alloc_local([S_REGS], F32)
                acc_o = T.alloc_local([O_REGS], F32)
                p = T.alloc_local([S_REGS // 2], "uint32")
                out = T.alloc_local([O_REGS // 2], "uint32")
                m = T.alloc_local([2], F32)
                total = T.alloc_local([2], F32)
                top = T.alloc_local([2], F32)
                alpha = T.alloc_local([2], F32)
                m_old = T.alloc_local([2], F32)
                total_old = T.alloc_local([2], F32)
                row_lse = T.alloc_local([2], F32)
                tile_old = T.alloc_var("int32")  # the tile whose values acc_o sums
                step = T.alloc_var("int32")
                tile = T.alloc_var("int32")
                count = T.alloc_var("int32")  # tiles served
                fresh = T.alloc_var("bool")  # p belongs to the first block of its tile
                half = T.alloc_var("bool")  # only the first half of this block's keys are seen
                half_old = T.alloc_var("bool")  # the same of the block whose weights p holds
                moved = T.alloc_local([1], "bool")
                pending = T.alloc_local([1], "int32")  # q slot of a store under way, or -1
                q_desc = T.alloc_wgmma_desc()
                k_desc = T.alloc_wgmma_desc()
                v_desc = T.alloc_wgmma_desc()
                T.initialize_wgmma_descriptor(
                    q_desc, T.access_ptr(q_s[0, 0, 0], "r"), SWIZZLE_128B, 1, 64
                )
                T.initialize_wgmma_descriptor(
                    k_desc, T.access_ptr(k_s[0, 0, 0], "r"), SWIZZLE_128B, 1, 64
                )
                T.initialize_wgmma_descriptor(
                    v_desc, T.access_ptr(v_s[0, 0, 0], "r"), SWIZZLE_128B, KV_PANEL >> 4, 64
                )
                wg = T.shfl_sync(tx // 128, 0)
                row = wg * 64 + (tx % 128) // 32 * 16 + tx % 32 // 4  # first of the thread's two
                step = 0
                count = 0
                fresh = True
                half_old = False
                half = False
                pending[0] = -1
                for e in T.unroll(2):
                    m[e] = -T.infinity(F32)
                    total[e] = 0
                for e in T.unroll(O_REGS):
                    acc_o[e] = 0
                for e in T.unroll(S_REGS // 2):
                    p[e] = T.uint32(0)
                if turns:  # noqa: SIM102  the outer one is known when compiling
                    if wg == NW - 1:
                        T.named_barrier_arrive(1, 256)

                for i in T.serial(rounds + 1):
                    slot = i % 2
                    free_slot(q_free, pending)
                    if dynamic:
                        T.mbarrier_wait_parity(q_full[slot], (i // 2) % 2)
                        tile = tile_s[slot]
                        if tile >= tiles:
                            T.loop_break()
                    else:
                        if i >= rounds:
                            T.loop_break()
                        T.mbarrier_wait_parity(q_full[slot], (i // 2) % 2)
                        tile = cta + i * ctas
                    mb, bh = place(tile, n_m)
                    first_last = mb * BM + wg * 64 + (SK - SQ)  # last key of the group's first row
                    seen = T.min(SK, first_last + 64) if causal else SK  # keys the group needs
                    for n in T.serial(blocks(mb)):
                        s = step % ST
                        r = (step + ST - 1) % ST
                        T.mbarrier_wait_parity(k_full[s], (step // ST) % 2)
                        if turns:
                            T.sync_threads(1 + wg, 256)
                        q_at = slot * (Q_TILE // 16) + wg * 512
                        if trim == 2:
                            half = seen <= n * BN + BN // 2
                            if half:
                                advance(
                                    BN // 2, q_s, o, lse, q_free, k_free, v_full, v_free, q_desc,
                                    k_desc, v_desc, acc_s, acc_o, p, out, m, total, top, alpha,
                                    m_old, total_old, row_lse, pending, moved, fresh, half_old,
                                    tile_old, tile, scale, n_m, cta, ctas, i, n, step, s, r, q_at,
                                    first_last, wg, row, tx,
                                )  # fmt: skip
                            else:
                                advance(
                                    BN, q_s, o, lse, q_free, k_free, v_full, v_free, q_desc,
                                    k_desc, v_desc, acc_s, acc_o, p, out, m, total, top, alpha,
                                    m_old, total_old, row_lse, pending, moved, fresh, half_old,
                                    tile_old, tile, scale, n_m, cta, ctas, i, n, step, s, r, q_at,
                                    first_last, wg, row, tx,
                                )  # fmt: skip
                        else:
                            if trim == 1:
                                half = seen <= n * BN + BN // 2
                            advance(
                                BN, q_s, o, lse, q_free, k_free, v_full, v_free, q_desc, k_desc,
                                v_desc, acc_s, acc_o, p, out, m, total, top, alpha, m_old,
                                total_old, row_lse, pending, moved, fresh, half_old, tile_old,
                                tile, scale, n_m, cta, ctas, i, n, step, s, r, q_at, first_last,
                                wg, row, tx,
                            )  # fmt: skip
                        if dynamic:  # noqa: SIM102  the outer one is known when compiling
                            if n == 0:
                                tile_old = tile
                        fresh = n == 0
                        if trim:
                            half_old = half
                        step = step + 1
                    count = i + 1

                if count > 0:
                    r = (step + ST - 1) % ST
                    T.mbarrier_wait_parity(v_full[r], ((step - 1) // ST) % 2)
                    T.warpgroup_fence_operand(acc_o, num_regs=O_REGS)
                    T.warpgroup_fence_operand(p, num_regs=S_REGS // 2)
                    value_product(p, v_desc, acc_o, r * (KV_TILE // 16), BN // 16, fresh)
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(acc_o, num_regs=O_REGS)
                    store_tile(
                        q_s,
                        o,
                        lse,
                        acc_o,
                        out,
                        (count - 1) % 2,
                        tile_old if dynamic else cta + (count - 1) * ctas,
                        n_m,
                        m,
                        total,
                        alpha,
                        row_lse,
                        scale,
                        wg,
                        row,
                    )
                    if T.shuffle_elect(128):
                        T.tma_store_wait(0)

    return gqa_forward
