"""A consumer group of the Hopper attention kernel: products, weights, and what becomes of them."""

from typing import Any, NamedTuple

import tilelang.language as T

from tileops.kernels.common.tilelang_config import (
    BLOCKS,
    F32,
    FIRST,
    HEAD,
    LENGTH,
    LIVE,
    REQUEST,
    ROW,
    SHIFT,
    TARGET,
    Config,
    device,
)

MOST = 4096.0  # sum of a thread's weights in a row; beyond it the row's reference moves
SMALLEST = 2.0**-100  # of what scores are multiplied by


class Sizes(NamedTuple):
    """Sizes of the tensors that consumers address: S_q, T_q, H."""

    seq_q: Any
    rows_q: Any
    heads: Any


def consumer(config: Config, sizes: Sizes, send_tile: Any) -> tuple[Any, Any]:
    """The macros `take_block` and `finish`, both over what a group holds.

    `take_block` breaks out of the loop that it is in behind the last tile.
    """
    D, G, P = config.head_dim, config.group, config.packed_heads
    BN, NW, ST, PER = config.block_n, config.consumers, config.stages, config.tokens
    DENSE, E4M3, SETS, split = config.dense, config.e4m3, config.sets, config.split
    left, right, causal = config.left, config.right, config.causal
    softcap, sinks, has_lse = config.softcap, config.sinks, config.has_lse
    S_REGS, O_REGS, P_REGS = config.s_registers, config.o_registers, config.p_registers
    BYTES, Q_PANEL, KV_PANEL = config.element, config.q_panel, config.kv_panel
    Q_TILE, K_TILE, V_TILE = config.block_m * D * BYTES, BN * D * BYTES, BN * D * 2
    KIND = "bf16" if config.v_dtype == "bfloat16" else "fp16"
    BF16, O_BF16 = (str(x == "bfloat16").lower() for x in (config.v_dtype, config.o_dtype))
    QS, LINES = config.q_slots, config.lines
    SQ, TQ, H = sizes

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
                device(f"clear_rows<{BN}, {D}>", T.access_ptr(v_s[slot, 0, 0, 0], "r"), first, end)
                T.fence_proxy_async()
                T.sync_threads(8 + wg, 128)

    @T.macro
    def read_scales(factors, of_heads, tile_s, line, scale):
        """What the scores and the values of a tile are multiplied by. Never zero: a score that
        is not seen stays -inf. Those of a request without keys, and of rows behind the last
        request, are not looked at: a NaN of them would be the rows'."""
        kv_head = T.truncdiv(tile_s[line, HEAD] * P, G)
        factors[0] = scale
        factors[1] = 1
        if tile_s[line, LENGTH] > 0:
            factors[0] = scale * of_heads[0, tile_s[line, REQUEST], kv_head]
            factors[1] = of_heads[1, tile_s[line, REQUEST], kv_head]
        if T.abs(factors[0]) < SMALLEST:
            factors[0] = SMALLEST

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
            read_scales(factors, of_heads, tile_s, line, scale)
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
                if inverse[e] != 0:  # of a row that sees something
                    inverse[e] = inverse[e] * factors[1]
        device(f"scale_rows<{O_REGS}>", acc.data, inverse.data)
        if QS == 1:
            device(
                f"write_rows<{D}, {PER}, {P}, {O_BF16}>",
                acc.data,
                T.access_ptr(o[b, 0, 0, 0] if DENSE else o[0, 0, 0], "w"),
                wg,
                first,
                live,
                head,
                H,
            )
        else:
            device(f"pack<{O_REGS}, {O_BF16}>", acc.data, out.data)
            tile = T.access_ptr(o_s[slot, 0, wg * 64, 0], "r")
            device(f"put_tile<{D}, {Q_PANEL}>", out.data, tile)
            T.fence_proxy_async()
            T.sync_threads(8 + wg, 128)
            if DENSE:  # the copy engine leaves out what lies past S_q
                send_tile(o, o_s, slot, wg, first, b, head)
            else:  # which would go past the request
                device(
                    f"send_rows<{D}, {Q_PANEL}, {PER}, {P}>",
                    tile,
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
            T.mbarrier_wait_parity(q_full[i[0] % QS], (i[0] // QS) % 2)
            line = i[0] % LINES
            blocks_[0] = tile_s[line, BLOCKS]
            if blocks_[0] == 0:
                T.loop_break()
            first[0] = tile_s[line, FIRST]
            shift[0] = tile_s[line, SHIFT]
            length[0] = tile_s[line, LENGTH]
            if E4M3:
                read_scales(factors, of_heads, tile_s, line, scale)
        slot = i[0] % QS
        s = u if SETS == ST == 2 else step[0] % ST
        r = 1 - u if SETS == ST == 2 else (step[0] + ST - 1) % ST
        at = (first[0] + n[0]) * BN
        T.mbarrier_wait_parity(k_full[s], (step[0] // ST) % 2)
        T.sync_threads(1 + wg, 256)
        # Scores of this block; while they are computed and weighed, the values of the block
        # before, which may belong to the tile before.
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
        if QS == 1:
            if n[0] + 1 == blocks_[0]:
                if tx % 32 == 0:
                    T.mbarrier_arrive(q_free[0])
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
        if SETS == 1:  # the product reads p until it is done
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
                if QS == 2:
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

    @T.macro
    def finish(shared, v_full, v_desc, tensors, sums, registers, last, wg, scale):
        """The values product of the last block, and its tile."""
        v_s, o_s, tile_s = shared
        o, lse, of_heads = tensors
        m, total, alpha, row_lse = sums
        acc_o, p, out = registers
        i, step, first_old, end_old, fresh = last
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
            if DENSE and QS == 2:
                if T.shuffle_elect(128):
                    T.tma_store_wait(0)

    return take_block, finish
