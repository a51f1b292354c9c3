"""What the consumer groups of a Hopper latent kernel do with tiles, and with their outputs."""

from typing import Any

import tilelang.language as T

from tileops.kernels.common.tilelang_config import F32, device
from tileops.kernels.common.tilelang_latent_config import (
    BEGIN,
    DIM,
    END,
    HALF,
    HEADS,
    ITEM,
    OUTS,
    PANEL,
    PANELS,
    ROW,
    SCORES,
    SLOTS,
    STAGES,
    TILE,
    UNIT,
    WARP,
    WEIGHTS,
    Config,
)

MOST = 4096.0  # sum of a thread's weights in a row; beyond it the row's reference moves
SIDE = HALF // 64 * PANEL // UNIT  # from the values of one group to those of the other


def consumer(config: Config, heads: Any, heads_kv: Any) -> tuple[Any, Any, Any, Any]:
    """The macros `lead_row` and `follow_row`, and of a row or a part `store` and `store_sums`.

    heads, heads_kv: H, H_kv.
    """
    KIND, BF16, whole, pair = config.kind, config.bf16, config.whole, config.pair

    @T.macro
    def score_product(descs, acc, k_at):
        """acc[64, 64] = q k^T, under way."""
        q_at = T.alloc_var("int32")
        q_at = T.call_extern("int32", "attn::zero")
        T.warpgroup_arrive()
        for c in T.unroll(PANELS * 4, explicit=True):
            at = c // 4 * (PANEL // UNIT) + c % 4 * 2
            T.ptx_wgmma_ss(
                F32, "m64n64k16", True, True, KIND, KIND, "fp32", descs.q.data, q_at + at,
                descs.k.data, k_at + at, acc.data, 0, T.if_then_else(c > 0, 1, 0), True, True,
            )  # fmt: skip
        T.warpgroup_commit_batch()

    @T.macro
    def left_product(p, descs, acc, v_at, fresh):
        """acc[64, 256] (= if fresh, else +=) p v, under way, p in registers."""
        T.warpgroup_arrive()
        for c in T.unroll(SLOTS // 16, explicit=True):
            T.ptx_wgmma_rs(
                F32, "m64n256k16", False, KIND, KIND, "fp32", p.data, c * 4, descs.v.data,
                v_at + c * 128, acc.data, 0,
                T.if_then_else(c > 0, 1, T.if_then_else(fresh, 0, 1)), True, True,
            )  # fmt: skip
        T.warpgroup_commit_batch()

    @T.macro
    def right_product(descs, acc, v_at, fresh):
        """The same, p in shared memory."""
        T.warpgroup_arrive()
        for c in T.unroll(SLOTS // 16, explicit=True):
            T.ptx_wgmma_ss(
                F32, "m64n256k16", True, False, KIND, KIND, "fp32", descs.p.data, c * 2,
                descs.v.data, v_at + c * 128, acc.data, 0,
                T.if_then_else(c > 0, 1, T.if_then_else(fresh, 0, 1)), True, True,
            )  # fmt: skip
        T.warpgroup_commit_batch()

    @T.macro
    def arrive(barrier, slot, tx):
        """A warp is done with a part of a tile, which other programs may fill as well."""
        if tx % WARP == 0:
            if pair:
                for rank in (0, 1):
                    T.mbarrier_arrive(barrier[slot], rank)
            else:
                T.mbarrier_arrive(barrier[slot])

    @T.macro
    def take_scores(is_first, step, shared, barriers, descs, held, scale, tx):
        """Scores and weights of the next tile; unless it is a row's first, behind the values of
        the tile before, which are under way."""
        acc_s, acc_o, p, alpha, moved, line = (
            held.scores, held.outs, held.p, held.alpha, held.moved, held.line
        )  # fmt: skip
        s = step[0] % STAGES
        turn = (step[0] // STAGES) % 2
        T.mbarrier_wait_parity(barriers.tail_full[s], turn)
        for e in T.unroll(3):
            line[e] = shared.lines[s, e]
        for side in (0, 1):
            T.mbarrier_wait_parity(barriers.half_full[side * STAGES + s], turn)
        T.fence_proxy_async()
        T.warpgroup_fence_operand(acc_s, num_regs=SCORES)
        score_product(descs, acc_s, s * (TILE // UNIT))
        T.warpgroup_fence_operand(acc_s, num_regs=SCORES)
        if not is_first:
            T.wait_wgmma(1)
            T.warpgroup_fence_operand(acc_o, num_regs=OUTS)
            arrive(barriers.half_free, 1 - s, tx)
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(acc_s, num_regs=SCORES)
        T.warpgroup_fence_operand(p, num_regs=WEIGHTS)
        arrive(barriers.tail_free, s, tx)
        if tx % WARP == 0:
            if not is_first:
                T.mbarrier_arrive(barriers.scored[0])
            if line[2] != 0:
                T.mbarrier_arrive(barriers.q_free[0])
        if T.bitwise_and(line[0], line[1]) != -1:
            device(
                "hide_dead", acc_s.data, T.reinterpret(line[0], "uint32"),
                T.reinterpret(line[1], "uint32"),
            )  # fmt: skip
        moved[0] = T.call_extern(
            "bool", f"attn::weigh<{SCORES}, {BF16}, 0>", acc_s.data, held.m.data,
            held.total.data, alpha.data, p.data, scale, T.float32(MOST), is_first,
        )  # fmt: skip
        if not moved[0]:
            for e in T.unroll(2):
                alpha[e] = 1
        step[0] = step[0] + 1

    @T.macro
    def start_values(is_last, step, shared, barriers, descs, held, tx):
        """The left product of the tile scored last, under way; its weights for the other group."""
        acc_o, p, alpha = held.outs, held.p, held.alpha
        if held.moved[0]:
            device(f"scale_rows<{OUTS}>", acc_o.data, alpha.data)
        T.warpgroup_fence_operand(acc_o, num_regs=OUTS)
        T.warpgroup_fence_operand(p, num_regs=WEIGHTS)
        left_product(p, descs, acc_o, (step[0] + 1) % STAGES * (TILE // UNIT), held.fresh[0])
        T.warpgroup_fence_operand(acc_o, num_regs=OUTS)
        held.fresh[0] = False
        T.mbarrier_wait_parity(barriers.weights_free[0], step[0] % 2)
        device(f"put_tile<{SLOTS}, 0>", p.data, T.access_ptr(shared.weights[0, 0, 0, 0], "w"))
        device("put_factors", T.access_ptr(shared.factors[0, 0], "w"), alpha.data)
        if tx == 0:
            shared.lines[STAGES, 0] = is_last
        T.fence_proxy_async()
        T.mbarrier_arrive(barriers.weights_full[0])

    @T.macro
    def lead_row(step, shared, barriers, descs, held, scale, tx):
        """The tiles of a row, by the group that scores; alpha is then what its outputs, and those
        of the other group, are multiplied by in the end."""
        line, total, alpha = held.line, held.total, held.alpha
        take_scores(True, step, shared, barriers, descs, held, scale, tx)
        while line[2] == 0:
            start_values(0, step, shared, barriers, descs, held, tx)
            take_scores(False, step, shared, barriers, descs, held, scale, tx)
        start_values(1, step, shared, barriers, descs, held, tx)
        if tx % WARP == 0:
            T.mbarrier_arrive(barriers.scored[0])
        device("add_up", total.data)
        for e in T.unroll(2):
            alpha[e] = T.if_then_else(total[e] == 0, T.float32(0), 1 / total[e])
        device("put_factors", T.access_ptr(shared.factors[1, 0], "w"), alpha.data)
        T.mbarrier_arrive(barriers.factors_full[0])
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(held.outs, num_regs=OUTS)
        T.warpgroup_fence_operand(held.p, num_regs=WEIGHTS)
        arrive(barriers.half_free, (step[0] + 1) % STAGES, tx)

    @T.macro
    def follow_row(i, step, shared, barriers, descs, acc_o, alpha, fresh, ended, tx):
        """The same by the group that takes its weights from shared memory. i: rows before."""
        fresh[0] = True
        ended[0] = 0
        while ended[0] == 0:
            s = step[0] % STAGES
            T.mbarrier_wait_parity(barriers.weights_full[0], step[0] % 2)
            device("get_factors", alpha.data, T.access_ptr(shared.factors[0, 0], "r"))
            ended[0] = shared.lines[STAGES, 0]
            if not fresh[0]:
                if T.any_sync(T.Or(alpha[0] != 1, alpha[1] != 1)):
                    device(f"scale_rows<{OUTS}>", acc_o.data, alpha.data)
            T.mbarrier_wait_parity(barriers.half_full[STAGES + s], (step[0] // STAGES) % 2)
            if config.gather:
                # Beside the weights of the first group, so that the tensor cores have something
                # to do; the copy engine is better served by early room.
                T.mbarrier_wait_parity(barriers.scored[0], step[0] % 2)
            T.fence_proxy_async()
            T.warpgroup_fence_operand(acc_o, num_regs=OUTS)
            right_product(descs, acc_o, s * (TILE // UNIT) + SIDE, fresh[0])
            T.warpgroup_fence_operand(acc_o, num_regs=OUTS)
            T.wait_wgmma(0)
            T.warpgroup_fence_operand(acc_o, num_regs=OUTS)
            fresh[0] = False
            arrive(barriers.half_free, STAGES + s, tx)
            if ended[0] != 0:  # read before the weights are free: then they may be written again
                T.mbarrier_wait_parity(barriers.factors_full[0], i % 2)
                device("get_factors", alpha.data, T.access_ptr(shared.factors[1, 0], "r"))
            if tx % WARP == 0:
                T.mbarrier_arrive(barriers.weights_free[0])
            step[0] = step[0] + 1

    @T.macro
    def store(acc, o, parts, inverse, at, side, work):
        """A group's half of the outputs of a row, or of a part of it."""
        block = T.truncmod(at[ITEM], work.head_blocks)
        if whole or T.And(at[BEGIN] == 0, at[END] == work.row_tiles):
            device(f"scale_rows<{OUTS}>", acc.data, inverse.data)
            device(
                f"write_rows<{HALF}, 1, {HEADS}, {BF16}, {DIM}>",
                acc.data,
                T.access_ptr(o[0, 0, side * HALF], "w"),
                0,
                T.truncdiv(at[ROW], heads_kv),
                1,
                T.truncmod(at[ROW], heads_kv) * work.head_blocks + block,
                heads,
            )
        else:
            part, begins = (
                T.truncdiv(at[ITEM], work.head_blocks),
                T.if_then_else(at[BEGIN] == 0, 1, 0),
            )
            device(
                f"write_part<{HALF}, {DIM}>",
                acc.data,
                T.access_ptr(parts[part, begins, block, 0, side * HALF], "w"),
            )

    @T.macro
    def store_sums(part_sums, m, total, scale, at, work):
        if T.Or(at[BEGIN] > 0, at[END] < work.row_tiles):
            block = T.truncmod(at[ITEM], work.head_blocks)
            part, begins = (
                T.truncdiv(at[ITEM], work.head_blocks),
                T.if_then_else(at[BEGIN] == 0, 1, 0),
            )
            device(
                "write_sums",
                T.access_ptr(part_sums[part, begins, block, 0, 0], "w"),
                m.data,
                total.data,
                scale,
            )

    return lead_row, follow_row, store, store_sums
