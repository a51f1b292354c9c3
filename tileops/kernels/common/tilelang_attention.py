"""Grouped-query attention for sm_90a in TileLang: one warp copies, groups of warps multiply.

A persistent program takes tiles (rows of one request and one or several heads of one KV head)
from a counter. Its producer warp finds them and requests their rows from the copy engine; two or
three consumer groups of 64 rows each run the products of one block of keys while the exponentials
of another are computed. The design and what each part brought: `docs/design/hopper-log.md`.
"""

from typing import Any

import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout as swizzled

from tileops.kernels.common.tilelang_rows import SOURCE

SWIZZLE_128B = 1
FOREVER = 2**30
PANEL = 64  # columns of a shared-memory panel: 128 bytes
F32 = "float32"
MOST = 4096.0  # sum of a thread's weights in a row; beyond it the row's reference moves
# Consumer groups -> registers of a thread, in them and in the producer: together at most the
# 65,536 of a multiprocessor. With fewer the producer spills.
REGISTERS = {2: (232, 40), 3: (160, 32)}
# What `equal_tile` and `packed_tile` write of a tile; TARGET: `part_of_tile` alone.
ROW, LIVE, HEAD, REQUEST, SHIFT, LENGTH, FIRST, BLOCKS, KEYS, TARGET, NUMBERS = range(11)
LINES = 3  # tiles that are known
SMALLEST = 2.0**-100  # of what scores are multiplied by
LEAD = 3  # blocks before the end of a tile's copies the next one is asked for


def device(name: str, *args: Any) -> Any:
    """A call of a function of `tilelang_rows.py` that returns nothing."""
    return T.call_extern("void", f"attn::{name}", *args)


def make(
    *,
    layout: str,
    dtype: str,
    head_dim: int,
    group: int,
    packed_heads: int = 1,
    split: bool = False,
    page: int = 0,
    appended: bool = False,
    left: bool = False,
    right: bool = True,
    causal: bool = True,
    softcap: bool = False,
    sinks: bool = False,
    has_lse: bool = True,
    block_n: int = 128,
    consumers: int = 2,
    stages: int = 2,
    out_dtype: str = "",
) -> Any:
    """The kernel of (q, k, v, o, lse, offsets, lengths, table, of_heads, counter, scale, cap,
    left, right, requests, blocks, tiles, section, splits, CTAs).

    layout: "dense": q, o [B, S_q, H, D]; k, v [B, S_kv, H_kv, D]; lse [B, H, S_q].
        "packed": q, o [T_q, H, D]; k, v [T_kv, H_kv, D]; lse [H, T_q]; request b has the queries
        offsets[b] to offsets[b + 1] and the keys lengths[b] to lengths[b + 1]. "paged": k, v are
        pools [N_kv, H_kv, D] behind table [B, W]; lengths [B] keys, the queries of an `appended`
        request not counted. Other metadata: any tensor of its dtype.
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
    """
    consumer_regs, producer_regs = REGISTERS[consumers]
    D, G, BN, NW, ST, P = head_dim, group, block_n, consumers, stages, packed_heads
    BM = 64 * NW
    PER = BM // P  # tokens of a tile
    DENSE, PAGED = layout == "dense", layout == "paged"
    S_REGS, O_REGS = BN // 2, D // 2
    P_REGS = BN // 4
    # Sets of registers for weights. With two, the weights of a block are computed while the
    # product still reads those of the block before; blocks take turns, one after the other in
    # the code, as the assembler gives a set away that is copied.
    SETS = 2 if consumer_regs - S_REGS - O_REGS - 2 * P_REGS >= 32 else 1
    E4M3 = dtype == "float8_e4m3fn"
    V_DTYPE, O_DTYPE = ("float16", out_dtype) if E4M3 else (dtype, dtype)
    KIND = "bf16" if V_DTYPE == "bfloat16" else "fp16"
    BF16, O_BF16 = (str(x == "bfloat16").lower() for x in (V_DTYPE, O_DTYPE))
    BYTES = 1 if E4M3 else 2  # of an element of q and k
    Q_PANEL, KV_PANEL = BM * 128, BN * 128  # bytes
    Q_TILE, K_TILE, V_TILE = BM * D * BYTES, BN * D * BYTES, BN * D * 2
    PAGE = page or BN
    PIECE = min(BN, PAGE)  # rows of one copy from a pool
    B, SQ, SK, TQ, TK, H, HK, W = (
        T.dynamic(n)
        for n in ("batch", "seq_q", "seq_kv", "rows_q", "rows_kv", "heads", "heads_kv", "width")
    )
    TARGETS = T.dynamic("targets") if split else B  # requests of o and lse
    NO, NL, NT, NS, REQUESTS = (
        T.dynamic(n) for n in ("offsets_len", "lengths_len", "tables", "of_heads_len", "scaled")
    )
    Q_SHAPE, KV_SHAPE, O_SHAPE, LSE_SHAPE = (
        ((B, SQ, H, D), (B, SK, HK, D), (TARGETS, SQ, H, D), (TARGETS * H, SQ))
        if DENSE
        else ((TQ, H, D), (TK, HK, D), (TQ, H, D), (H, TQ))
    )
    OF_HEADS = (H,) if sinks else (2, REQUESTS, HK) if E4M3 else (NS,)
    THREADS = 128 * (NW + 1)
    FLAGS = f"{PER}, {BN}, {str(left).lower()}, {str(right).lower()}"

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
                f"attn::packed_tile<{FLAGS}, {str(PAGED).lower()}, {str(appended).lower()}>",
                T.access_ptr(tile_s[line, 0], "rw"), number, state.data,
                T.access_ptr(offsets[0], "r"), T.access_ptr(lengths[0], "r"), TQ, requests,
                section, T.truncdiv(H, P), w_left, w_right,
            )  # fmt: skip

    @T.macro
    def load_keys(x, x_s, full, slot, row, b, h, n):
        """Block n of the keys (or values) of a KV head. row: its first row, of a pool that of
        the lane's page."""
        if DENSE:
            T.tma_copy(x[b, n * BN : (n + 1) * BN, h, :], x_s[slot, :, :], barrier=full[slot])
        elif PAGED:
            for i in T.unroll(BN // PIECE, explicit=True):
                at = T.shfl_sync(row, i)
                for c in T.unroll(D // PANEL, explicit=True):
                    T.tma_copy(
                        x[at : at + PIECE, h, c * PANEL : (c + 1) * PANEL],
                        x_s[slot, i * PIECE : (i + 1) * PIECE, c * PANEL : (c + 1) * PANEL],
                        barrier=full[slot],
                    )
        else:
            T.tma_copy(x[row : row + BN, h, :], x_s[slot, :, :], barrier=full[slot])
        if T.shuffle_elect(32):
            T.mbarrier_arrive(full[slot])

    @T.macro
    def load_queries(q, q_s, full, slot, row, b, h):
        """Rows of a tile: of `packed_heads` heads from h, one after the other."""
        if DENSE:
            T.tma_copy(q[b, row : row + BM, h, :], q_s[slot, :, :], barrier=full[slot])
        elif P == 1:
            T.tma_copy(q[row : row + BM, h, :], q_s[slot, :, :], barrier=full[slot])
        else:
            for g in T.unroll(P, explicit=True):
                for c in T.unroll(D * BYTES // 128, explicit=True):
                    columns = slice(c * (128 // BYTES), (c + 1) * (128 // BYTES))
                    T.tma_copy(
                        q[row : row + PER, h * P + g, columns],
                        q_s[slot, g * PER : (g + 1) * PER, columns],
                        barrier=full[slot],
                    )
        if T.shuffle_elect(32):
            T.mbarrier_arrive(full[slot])

    @T.macro
    def score_product(q_desc, k_desc, acc, q_at, k_at):
        """acc[64, BN] = q k^T, one group; q_at, k_at are offsets of the tiles in
        units of 16 bytes, as in a descriptor."""
        T.warpgroup_arrive()
        for c in T.unroll(D * BYTES // 32, explicit=True):
            T.ptx_wgmma_ss(
                F32,
                f"m64n{BN}k{32 // BYTES}",
                True,
                True,
                "e4m3" if E4M3 else KIND,
                "e4m3" if E4M3 else KIND,
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
    def value_product(p, p_at, v_desc, acc, v_at, fresh):
        """acc[64, D] (= if fresh, else +=) p v, one group; p from register p_at on."""
        T.warpgroup_arrive()
        for c in T.unroll(BN // 16, explicit=True):
            T.ptx_wgmma_rs(
                F32,
                f"m64n{D}k16",
                False,
                KIND,
                KIND,
                "fp32",
                p.data,
                p_at + c * 4,
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
    def clear_unseen(v_s, slot, first, end, wg):
        """Zeros before the first value that the tile sees and behind the request's last one."""
        if left or not DENSE:  # past S_kv the copy engine brings zeros
            if T.Or(first > 0, end < BN):
                device(f"clear_rows<{BN}, {D}>", T.access_ptr(v_s[slot, 0, 0], "r"), first, end)
                T.fence_proxy_async()
                T.sync_threads(8 + wg, 128)

    @T.macro
    def pool_rows(row, table, b, n, length):
        """The first row of the block's pages in a pool, a page a lane."""
        if PAGED:
            row[0] = T.call_extern(
                "int32", f"attn::pool_row<{BN}, {PAGE}>", T.access_ptr(table[0, 0], "r"), W, b,
                n, length, TK,
            )  # fmt: skip

    @T.macro
    def read_scales(factors, of_heads, b, head, scale):
        """What the scores and the values of a tile are multiplied by. Never zero: a score that
        is not seen stays -inf. A tile behind the last request has that one's."""
        request = T.min(b, REQUESTS - 1)
        kv_head = T.truncdiv(head * P, G)
        factors[0] = scale * of_heads[0, request, kv_head]
        if T.abs(factors[0]) < SMALLEST:
            factors[0] = SMALLEST
        factors[1] = of_heads[1, request, kv_head]

    @T.macro
    def store_tile(
        o_s, tile_s, o, lse, of_heads, acc, out, i, m, total, inverse, row_lse, scale, wg
    ):
        """Normalise acc, round it, send it to o through the q slot of tile i; write lse."""
        slot = 0 if E4M3 else i % 2
        line = i % LINES
        # Variables: an index of a tensor of unknown size is 64-bit, and so is what goes into it.
        first = T.alloc_var("int32")
        live = T.alloc_var("int32")
        head = T.alloc_var("int32")
        b = T.alloc_var("int32")
        first = tile_s[line, ROW]
        live = tile_s[line, LIVE]
        head = tile_s[line, HEAD]
        b = tile_s[line, TARGET if split else REQUEST]
        factors = T.alloc_local([2], F32)  # of the scores, of the values
        factors[0] = scale
        if E4M3:
            read_scales(factors, of_heads, tile_s[line, REQUEST], head, scale)
        device(
            f"close_rows<{str(sinks).lower()}, {PER}>",
            m.data,
            total.data,
            inverse.data,
            row_lse.data,
            T.abs(factors[0]) if E4M3 else scale,
            T.access_ptr(of_heads[head * P], "r") if sinks else m.data,
            wg,
        )
        if E4M3:
            for e in T.unroll(2):
                inverse[e] = inverse[e] * factors[1]
        device(f"scale_rows<{O_REGS}>", acc.data, inverse.data)
        device(f"pack<{O_REGS}, {O_BF16}>", acc.data, out.data)
        device(f"put_tile<{D}, {Q_PANEL}>", out.data, T.access_ptr(o_s[slot, wg * 64, 0], "r"))
        T.fence_proxy_async()
        T.sync_threads(8 + wg, 128)
        if DENSE:  # the copy engine leaves out what lies past S_q
            for c in T.unroll(D // PANEL, explicit=True):
                T.tma_copy(
                    o_s[slot, wg * 64 : wg * 64 + 64, c * PANEL : (c + 1) * PANEL],
                    o[
                        b,
                        first + wg * 64 : first + wg * 64 + 64,
                        head,
                        c * PANEL : (c + 1) * PANEL,
                    ],
                    leader_scope_threads=128,
                )
        else:  # which would go past the request
            device(
                f"send_rows<{D}, {Q_PANEL}, {PER}, {P}>",
                T.access_ptr(o_s[slot, wg * 64, 0], "r"),
                T.access_ptr(o[0, 0, 0], "w"),
                wg,
                first,
                live,
                head,
                H,
            )
            T.sync_threads(8 + wg, 128)
        if has_lse:
            device(
                f"put_lse<{PER}>",
                T.access_ptr(lse[0, 0], "w"),
                row_lse.data,
                wg,
                b * H + head if DENSE else head * P,
                SQ if DENSE else TQ,
                first,
                live,
            )

    @T.macro
    def free_slot(q_free, pending):
        """Give the q slot of a stored tile back once it has been read."""
        if pending[0] >= 0:
            if T.shuffle_elect(128):
                if DENSE:
                    T.tma_store_wait(0)
                T.mbarrier_arrive(q_free[pending[0]])
            pending[0] = -1

    @T.macro
    def mask(acc_s, at, shift, length, token, w_left, w_right, group_low, group_high, tx):
        """-inf for the columns of the block from key `at` on that a row does not see."""
        column = at + 2 * (tx % 4)  # the thread's first
        if right:
            if causal:
                if at + BN - 1 > shift + group_low:
                    device(
                        f"mask_after<{S_REGS}>",
                        acc_s.data,
                        shift + token[0] - column,
                        shift + token[1] - column,
                    )
            else:
                if at + BN - 1 > T.min(shift + group_low + w_right, length - 1):
                    device(
                        f"mask_after<{S_REGS}>",
                        acc_s.data,
                        T.min(shift + token[0] + w_right, length - 1) - column,
                        T.min(shift + token[1] + w_right, length - 1) - column,
                    )
        else:
            if at + BN > length:
                device(
                    f"mask_after<{S_REGS}>", acc_s.data, length - 1 - column, length - 1 - column
                )
        if left:
            if at < shift + group_high - w_left:
                device(
                    f"mask_before<{S_REGS}>",
                    acc_s.data,
                    shift + token[0] - w_left - column,
                    shift + token[1] - w_left - column,
                )

    @T.macro
    def take_block(u, shared, barriers, descs, tensors, sums, registers, place, who, numbers):
        """One block of keys: its scores and weights, and the values product of the block before,
        whose weights are set u of p."""
        v_s, o_s, tile_s = shared
        q_full, q_free, k_full, k_free, v_full, v_free = barriers
        q_desc, k_desc, v_desc = descs
        o, lse, of_heads = tensors
        m, total, alpha, m_old, total_old, row_lse = sums
        acc_s, acc_o, p, out = registers
        i, n, step, blocks_, first, shift, length, first_old, end_old, fresh, pending = place
        wg, group_low, group_high, token, tx = who
        scale, factors, cap, w_left, w_right = numbers
        if n[0] == blocks_[0]:
            i[0] = i[0] + 1
            n[0] = 0
            free_slot(q_free, pending)
            T.mbarrier_wait_parity(q_full[i[0] % 2], (i[0] // 2) % 2)
            line = i[0] % LINES
            blocks_[0] = tile_s[line, BLOCKS]
            if blocks_[0] == 0:
                T.loop_break()
            first[0] = tile_s[line, FIRST]
            shift[0] = tile_s[line, SHIFT]
            length[0] = tile_s[line, LENGTH]
            if E4M3:
                read_scales(factors, of_heads, tile_s[line, REQUEST], tile_s[line, HEAD], scale)
        slot = i[0] % 2
        s = u if SETS == ST == 2 else step[0] % ST
        r = 1 - u if SETS == ST == 2 else (step[0] + ST - 1) % ST
        at = (first[0] + n[0]) * BN
        T.mbarrier_wait_parity(k_full[s], (step[0] // ST) % 2)
        T.sync_threads(1 + wg, 256)
        # Scores of this block; while they are computed and weighed, the values
        # of the block before, which may belong to the tile before.
        q_at = slot * (Q_TILE // 16) + wg * 512
        T.warpgroup_fence_operand(acc_s, num_regs=S_REGS)
        score_product(q_desc, k_desc, acc_s, q_at, s * (K_TILE // 16))
        T.warpgroup_fence_operand(acc_s, num_regs=S_REGS)
        if step[0] > 0:
            T.mbarrier_wait_parity(v_full[r], ((step[0] - 1) // ST) % 2)
        clear_unseen(v_s, r, first_old[0], end_old[0], wg)
        T.warpgroup_fence_operand(acc_o, num_regs=O_REGS)
        T.warpgroup_fence_operand(p, num_regs=SETS * P_REGS)
        value_product(p, u * P_REGS, v_desc, acc_o, r * (V_TILE // 16), fresh[0])
        T.warpgroup_fence_operand(acc_o, num_regs=O_REGS)
        T.named_barrier_arrive(1 + (wg + 1) % NW, 256)
        free_slot(q_free, pending)
        T.wait_wgmma(1)
        T.warpgroup_fence_operand(acc_s, num_regs=S_REGS)
        if tx % 32 == 0:
            T.mbarrier_arrive(k_free[s])
        if n[0] == 0:
            for e in T.unroll(2):
                m_old[e] = m[e]
                total_old[e] = total[e]
                m[e] = -T.infinity(F32)
                total[e] = 0
        if E4M3:
            if factors[0] < 0:
                device(f"negate<{S_REGS}>", acc_s.data)
        if softcap:
            device(f"cap<{S_REGS}>", acc_s.data, cap)
        mask(
            acc_s,
            at,
            shift[0],
            length[0],
            token,
            w_left,
            w_right,
            group_low,
            group_high,
            tx,
        )
        if SETS == 1:
            T.wait_wgmma(0)
            T.warpgroup_fence_operand(acc_o, num_regs=O_REGS)
            T.warpgroup_fence_operand(acc_s, num_regs=S_REGS)
        moved = T.alloc_local([1], "bool")
        moved[0] = T.call_extern(
            "bool", f"attn::weigh<{S_REGS}, {BF16}, {(1 - u) % SETS * P_REGS}>",
            acc_s.data, m.data, total.data, alpha.data, p.data,
            T.abs(factors[0]) if E4M3 else scale, T.float32(MOST), n[0] == 0,
        )  # fmt: skip
        if SETS == 2:
            device("after_weights", total.data)
            T.wait_wgmma(0)
            T.warpgroup_fence_operand(acc_o, num_regs=O_REGS)
            T.warpgroup_fence_operand(p, num_regs=SETS * P_REGS)
        if step[0] > 0:
            if tx % 32 == 0:
                T.mbarrier_arrive(v_free[r])
        if n[0] == 0:
            if SETS == 2:
                device(f"keep<{u * P_REGS}, {P_REGS}>", p.data, total.data)
            if i[0] > 0:
                store_tile(
                    o_s, tile_s, o, lse, of_heads, acc_o, out, i[0] - 1, m_old,
                    total_old, alpha, row_lse, scale, wg,
                )  # fmt: skip
                pending[0] = (i[0] - 1) % 2
        else:
            if moved[0]:
                device(f"scale_rows<{O_REGS}>", acc_o.data, alpha.data)
        fresh[0] = n[0] == 0
        if left:
            first_old[0] = shift[0] - w_left - at
        if not DENSE:
            end_old[0] = length[0] - at
        step[0] = step[0] + 1
        n[0] = n[0] + 1

    @T.prim_func
    def gqa_forward(
        q: T.Tensor(Q_SHAPE, dtype),
        k: T.Tensor(KV_SHAPE, dtype),
        v: T.Tensor(KV_SHAPE, V_DTYPE),
        o: T.Tensor(O_SHAPE, O_DTYPE),
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
            q_s = T.alloc_shared((2, BM, D), dtype)
            k_s = T.alloc_shared((ST, BN, D), dtype)
            v_s = T.alloc_shared((ST, BN, D), V_DTYPE)
            o_s = T.alloc_shared((1, BM, D), O_DTYPE) if E4M3 else q_s  # tiles of o on their way
            tile_s = T.alloc_shared((LINES, NUMBERS if split else TARGET), "int32")
            T.annotate_layout({x: swizzled(x) for x in (q_s, k_s, v_s, o_s)})
            asked = T.alloc_barrier([1])
            tile_full = T.alloc_barrier([32] * LINES)
            q_full = T.alloc_barrier([1] * 2)
            q_free = T.alloc_barrier([NW] * 2)
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
                if tx < 128 * NW + 32:  # the warp that copies
                    b = T.alloc_var("int32")
                    h = T.alloc_var("int32")
                    last_b = T.alloc_var("int32")
                    last_h = T.alloc_var("int32")
                    last_n = T.alloc_var("int32")
                    length = T.alloc_var("int32")
                    keys = T.alloc_var("int32")
                    first = T.alloc_var("int32")
                    count = T.alloc_var("int32")
                    step = T.alloc_var("int32")
                    slot = T.alloc_var("int32")
                    row = T.alloc_local([1], "int32")
                    last_row = T.alloc_local([1], "int32")
                    step = 0
                    row[0] = 0
                    last_row[0] = 0
                    for i in T.serial(FOREVER):
                        slot = i % 2
                        line = i % LINES
                        T.mbarrier_wait_parity(tile_full[line], (i // LINES) % 2)
                        T.mbarrier_wait_parity(q_free[slot], ((i // 2) % 2) ^ 1)
                        count = tile_s[line, BLOCKS]
                        if count == 0:
                            if T.shuffle_elect(32):
                                T.mbarrier_arrive(q_full[slot])
                            T.loop_break()
                        b = tile_s[line, REQUEST]
                        h = tile_s[line, HEAD]
                        length = tile_s[line, LENGTH]
                        first = tile_s[line, FIRST]
                        keys = tile_s[line, KEYS]
                        load_queries(q, q_s, q_full, slot, tile_s[line, ROW], b, h)
                        h = T.truncdiv(h * P, G)
                        for n in T.serial(count):
                            s = step % ST
                            if PAGED:
                                pool_rows(row, table, b, first + n, length)
                            else:
                                row[0] = keys + (first + n) * BN
                            if n == T.max(count - LEAD, 0):  # of the line before the last, stored
                                if T.shuffle_elect(32):
                                    T.mbarrier_arrive(asked[0])
                            T.mbarrier_wait_parity(k_free[s], ((step // ST) % 2) ^ 1)
                            load_keys(k, k_s, k_full, s, row[0], b, h, first + n)
                            if step > 0:
                                r = (step - 1) % ST
                                T.mbarrier_wait_parity(v_free[r], (((step - 1) // ST) % 2) ^ 1)
                                load_keys(v, v_s, v_full, r, last_row[0], last_b, last_h, last_n)
                            last_b = b
                            last_h = h
                            last_n = first + n
                            last_row[0] = row[0]
                            step = step + 1
                    if step > 0:
                        r = (step - 1) % ST
                        T.mbarrier_wait_parity(v_free[r], (((step - 1) // ST) % 2) ^ 1)
                        load_keys(v, v_s, v_full, r, last_row[0], last_b, last_h, last_n)

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
                first_old = T.alloc_local(
                    [1], "int32"
                )  # seen values of the block whose weights p holds
                end_old = T.alloc_local([1], "int32")
                fresh = T.alloc_local([1], "bool")  # p belongs to the first block of its tile
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

                held = (
                    (v_s, o_s, tile_s),
                    (q_full, q_free, k_full, k_free, v_full, v_free),
                    (q_desc, k_desc, v_desc),
                    (o, lse, of_heads),
                    (m, total, alpha, m_old, total_old, row_lse),
                    (acc_s, acc_o, p, out),
                    (
                        i,
                        n,
                        step,
                        blocks_,
                        first,
                        shift,
                        length,
                        first_old,
                        end_old,
                        fresh,
                        pending,
                    ),
                    (wg, group_low, group_high, token, tx),
                    (scale, factors, cap, w_left, w_right),
                )
                while n[0] >= 0:  # a serial loop would be unrolled
                    take_block(0, *held)
                    if SETS == 2:
                        take_block(1, *held)

                if step[0] > 0:
                    if SETS == 2:
                        if step[0] % 2 == 1:
                            for e in T.unroll(P_REGS):
                                p[e] = p[P_REGS + e]
                    r = (step[0] + ST - 1) % ST
                    T.mbarrier_wait_parity(v_full[r], ((step[0] - 1) // ST) % 2)
                    clear_unseen(v_s, r, first_old[0], end_old[0], wg)
                    T.warpgroup_fence_operand(acc_o, num_regs=O_REGS)
                    T.warpgroup_fence_operand(p, num_regs=SETS * P_REGS)
                    value_product(p, 0, v_desc, acc_o, r * (V_TILE // 16), fresh[0])
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(acc_o, num_regs=O_REGS)
                    store_tile(
                        o_s, tile_s, o, lse, of_heads, acc_o, out, i[0] - 1, m, total, alpha,
                        row_lse, scale, wg,
                    )  # fmt: skip
                    if DENSE:
                        if T.shuffle_elect(128):
                            T.tma_store_wait(0)

    return gqa_forward
