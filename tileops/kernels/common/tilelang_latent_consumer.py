"""What a consumer group of a Hopper latent kernel does with tiles, and with its outputs."""

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


def consumer(config: Config, heads: Any, heads_kv: Any) -> tuple[Any, Any, Any]:
    """The macros `take_row` and, of a row or a part of it, `store` and `store_sums`.

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
    def own_product(p, descs, acc, v_at, fresh):
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
    def other_product(descs, acc, p_at, v_at, fresh):
        """The same, p in shared memory."""
        T.warpgroup_arrive()
        for c in T.unroll(SLOTS // 16, explicit=True):
            T.ptx_wgmma_ss(
                F32, "m64n256k16", True, False, KIND, KIND, "fp32", descs.p.data, p_at + c * 2,
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
    def begin_values(step, shared, barriers, descs, held, place):
        """The values product of the tile that the other group has weighed, under way."""
        acc_o, alpha, fresh, wg = held.outs, held.alpha, held.fresh, place.wg
        other = 1 - wg
        turn = (step // STAGES) % 2
        T.mbarrier_wait_parity(barriers.p_full[other], turn)
        device(
            "take_factors", T.access_ptr(shared.factors[other, 0, 0], "r"), alpha.data,
            held.m.data, held.total.data,
        )  # fmt: skip
        if T.any_sync(T.Or(alpha[0] != 1, alpha[1] != 1)):
            device(f"scale_rows<{OUTS}>", acc_o.data, alpha.data)
        T.mbarrier_wait_parity(barriers.half_full[wg * STAGES + other], turn)
        T.fence_proxy_async()
        T.warpgroup_fence_operand(acc_o, num_regs=OUTS)
        at = other * (TILE // UNIT)
        other_product(descs, acc_o, at, at + wg * SIDE, fresh[0])
        T.warpgroup_fence_operand(acc_o, num_regs=OUTS)
        fresh[0] = False

    @T.macro
    def end_values(barriers, held, place):
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(held.outs, num_regs=OUTS)
        arrive(barriers.half_free, place.wg * STAGES + 1 - place.wg, place.tx)
        arrive(barriers.tail_free, 1 - place.wg, place.tx)

    @T.macro
    def take_tile(behind, shared, barriers, descs, held, place):
        """Scores, weights and values of the next tile, which is in the group's own slot. behind:
        the values of the tile before, in the other slot, are multiplied meanwhile."""
        acc_s, acc_o, p, alpha, moved, line = (
            held.scores, held.outs, held.p, held.alpha, held.moved, held.line
        )  # fmt: skip
        step, wg, tx = place.step, place.wg, place.tx
        if behind:
            step[0] = step[0] + 1
        turn = (step[0] // STAGES) % 2
        T.mbarrier_wait_parity(barriers.tail_full[wg], turn)
        for e in T.unroll(3):
            line[e] = shared.lines[wg, e]
        for side in (0, 1):
            T.mbarrier_wait_parity(barriers.half_full[side * STAGES + wg], turn)
        T.fence_proxy_async()
        T.warpgroup_fence_operand(acc_s, num_regs=SCORES)
        score_product(descs, acc_s, wg * (TILE // UNIT))
        T.warpgroup_fence_operand(acc_s, num_regs=SCORES)
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(acc_s, num_regs=SCORES)
        if line[2] != 0:
            if tx % WARP == 0:
                T.mbarrier_arrive(barriers.q_free[0])
        if T.bitwise_and(line[0], line[1]) != -1:
            device(
                "hide_dead", acc_s.data, T.reinterpret(line[0], "uint32"),
                T.reinterpret(line[1], "uint32"),
            )  # fmt: skip
        if behind:
            begin_values(step[0] - 1, shared, barriers, descs, held, place)
        moved[0] = T.call_extern(
            "bool", f"attn::weigh<{SCORES}, {BF16}, 0>", acc_s.data, held.m.data,
            held.total.data, alpha.data, p.data, place.scale, T.float32(MOST), held.fresh[0],
        )  # fmt: skip
        if not moved[0]:
            for e in T.unroll(2):
                alpha[e] = 1
        if behind:
            end_values(barriers, held, place)
        device(
            f"put_tile<{SLOTS}, 0>",
            p.data,
            T.access_ptr(shared.tiles[wg, PANELS - 1, 0, 0], "w"),
        )
        device(
            "put_factors",
            T.access_ptr(shared.factors[wg, 0, 0], "w"),
            alpha.data,
            held.m.data,
        )
        T.fence_proxy_async()
        T.mbarrier_arrive(barriers.p_full[wg])
        if moved[0]:
            device(f"scale_rows<{OUTS}>", acc_o.data, alpha.data)
        T.warpgroup_fence_operand(acc_o, num_regs=OUTS)
        T.warpgroup_fence_operand(p, num_regs=WEIGHTS)
        own_product(p, descs, acc_o, wg * (TILE // UNIT + SIDE), held.fresh[0])
        T.warpgroup_fence_operand(acc_o, num_regs=OUTS)
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(acc_o, num_regs=OUTS)
        T.warpgroup_fence_operand(p, num_regs=WEIGHTS)
        held.fresh[0] = False
        arrive(barriers.half_free, wg * STAGES + wg, tx)
        step[0] = step[0] + 1

    @T.macro
    def take_other(shared, barriers, descs, held, place):
        """The values of the next tile, which is in the other slot."""
        step, other = place.step, 1 - place.wg
        T.mbarrier_wait_parity(barriers.tail_full[other], (step[0] // STAGES) % 2)
        held.line[2] = shared.lines[other, 2]
        if held.line[2] != 0:
            if place.tx % WARP == 0:
                T.mbarrier_arrive(barriers.q_free[0])
        begin_values(step[0], shared, barriers, descs, held, place)
        end_values(barriers, held, place)
        step[0] = step[0] + 1

    @T.macro
    def take_row(shared, barriers, descs, held, place):
        """The tiles of a row. The first group multiplies its tile and then the other's, so that
        both slots are free before it waits for the next tile; the second one multiplies the
        other's beside the weights of its own."""
        step, wg, line = place.step, place.wg, held.line
        line[2] = 0
        if wg == 1:
            if step[0] % STAGES == 1:
                take_tile(False, shared, barriers, descs, held, place)
        while line[2] == 0:
            if wg == 0:
                if step[0] % STAGES == 0:
                    take_tile(False, shared, barriers, descs, held, place)
                else:
                    take_other(shared, barriers, descs, held, place)
            else:
                T.mbarrier_wait_parity(barriers.tail_full[0], (step[0] // STAGES) % 2)
                line[2] = shared.lines[0, 2]
                if line[2] == 0:
                    take_tile(True, shared, barriers, descs, held, place)
                else:
                    take_other(shared, barriers, descs, held, place)

    @T.macro
    def store(acc, o, parts, inverse, at, wg, work):
        """A group's half of the outputs of a row, or of a part of it."""
        block = T.truncmod(at[ITEM], work.head_blocks)
        if whole or T.And(at[BEGIN] == 0, at[END] == work.row_tiles):
            device(f"scale_rows<{OUTS}>", acc.data, inverse.data)
            device(
                f"write_rows<{HALF}, 1, {HEADS}, {BF16}, {DIM}>",
                acc.data,
                T.access_ptr(o[0, 0, wg * HALF], "w"),
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
                T.access_ptr(parts[part, begins, block, 0, wg * HALF], "w"),
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

    return take_row, store, store_sums
