"""How the loading warps of a Hopper latent kernel fill its tiles."""

from typing import Any

import tilelang.language as T
from tilelang import tvm

from tileops.kernels.common.tilelang_config import device
from tileops.kernels.common.tilelang_copies import NO_HINT, tensor_map
from tileops.kernels.common.tilelang_latent_config import (
    BEGIN,
    DIM,
    END,
    GROUP,
    HALF,
    HEADS,
    PANEL,
    PANELS,
    ROW,
    SLOTS,
    STAGES,
    TILE,
    WARP,
    WIDE,
    Config,
)

LOADER = 2 * GROUP  # the first of the threads that load
SIDE = HALF // WIDE  # panels of half a tile
BOTH = 3  # programs of a pair, as bits


def loads(config: Config, rows_kv: Any, slots: Any) -> tuple[Any, Any, Any]:
    """The macros `load_queries` and `copy_tiles`, by one warp, and `gather_tiles`, by a group.

    rows_kv: N. slots: of a row that names them.
    """
    pair = config.pair

    @T.macro
    def load_queries(q, q_pe, q_s, full, head, token):
        if T.shuffle_elect(WARP):
            T.mbarrier_arrive_expect_tx(full[0], TILE)
            for c in T.unroll(PANELS, explicit=True):
                to = T.access_ptr(q_s[c, 0, 0], "r")
                if c < DIM // WIDE:
                    T.tma_load(tensor_map(q, HEADS), full[0], to, c * WIDE, head, token, NO_HINT)
                else:
                    T.tma_load(tensor_map(q_pe, HEADS), full[0], to, 0, head, token, NO_HINT)

    @T.macro
    def describe(lines, slot, live, more):
        lines[slot, 0] = T.reinterpret(live[0], "int32")
        lines[slot, 1] = T.reinterpret(live[1], "int32")
        lines[slot, 2] = T.if_then_else(more, 0, 1)

    @T.macro
    def copy_part(x, tiles, full, part, slot, panel, count, column, row, r, b, rank):
        """Panels of a tile by the copy engine, for both programs if they are a pair."""
        T.mbarrier_arrive_expect_tx(full[part], count * PANEL)
        for c in T.unroll(count, explicit=True):
            if pair:
                T.call_intrin(
                    "handle", tvm.ir.Op.get("tl.tma_load_multicast"),
                    tensor_map(x, SLOTS // 2), full[part],
                    T.access_ptr(tiles[slot, panel + c, rank * (SLOTS // 2), 0], "r"), BOTH,
                    column + c * WIDE, row + rank * (SLOTS // 2), r, b, NO_HINT,
                )  # fmt: skip
            else:
                T.tma_load(
                    tensor_map(x, SLOTS), full[part],
                    T.access_ptr(tiles[slot, panel + c, 0, 0], "r"), column + c * WIDE, row, r, b,
                    NO_HINT,
                )  # fmt: skip

    @T.macro
    def copy_tiles(k, k_pe, shared, barriers, step, at, b, r, rank):
        """The tiles of a row, by one warp."""
        live = T.alloc_local([2], "uint32")
        for n in T.unroll(at[END] - at[BEGIN], unroll_factor=1):
            tile = at[BEGIN] + n
            s = step[0] % STAGES
            turn = ((step[0] // STAGES) % 2) ^ 1
            T.mbarrier_wait_parity(barriers.tail_free[s], turn)
            if T.shuffle_elect(WARP):
                device("first_slots", rows_kv - tile * SLOTS, live.data)
                describe(shared.lines, s, live, tile + 1 < at[END])
                copy_part(
                    k_pe, shared.tiles, barriers.tail_full, s, s, PANELS - 1, 1, 0, tile * SLOTS,
                    r, b, rank,
                )  # fmt: skip
            for side in (0, 1):
                T.mbarrier_wait_parity(barriers.half_free[side * STAGES + s], turn)
                if T.shuffle_elect(WARP):
                    copy_part(
                        k, shared.tiles, barriers.half_full, side * STAGES + s, s, SIDE * side,
                        SIDE, HALF * side, tile * SLOTS, r, b, rank,
                    )  # fmt: skip
            step[0] = step[0] + 1

    @T.macro
    def gather_tiles(k, k_pe, indices, shared, barriers, step, at, b, r, last, tx):
        """The tiles of a row that have a live slot, by all loading threads; one tile if none has,
        so that there is one to end with."""
        name = T.alloc_local([2], "int32")
        live = T.alloc_local([2], "uint32")
        next_name = T.alloc_local([2], "int32")
        next_live = T.alloc_local([2], "uint32")
        tile = T.alloc_local([1], "int32")
        going = T.alloc_local([1], "bool")
        tile[0] = T.call_extern(
            "int32", "attn::seek", T.access_ptr(indices[at[ROW], 0], "r"), at[BEGIN], at[END],
            slots, last, name.data, live.data,
        )  # fmt: skip
        going[0] = True
        while going[0]:
            # The names of the tile to come are on their way while there is no room for this one.
            tile[0] = T.call_extern(
                "int32", "attn::seek", T.access_ptr(indices[at[ROW], 0], "r"), tile[0] + 1,
                at[END], slots, last, next_name.data, next_live.data,
            )  # fmt: skip
            going[0] = tile[0] < at[END]
            s = step[0] % STAGES
            turn = ((step[0] // STAGES) % 2) ^ 1
            T.mbarrier_wait_parity(barriers.tail_free[s], turn)
            if tx == LOADER:
                describe(shared.lines, s, live, going[0])
                T.mbarrier_arrive(barriers.tail_full[s])
            device(
                "gather<1>", T.access_ptr(shared.tiles[s, PANELS - 1, 0, 0], "w"),
                T.access_ptr(k_pe[b, 0, r, 0], "r"), k_pe.strides[1] * T.int64(2), name.data,
                live.data,
            )  # fmt: skip
            T.cp_async_barrier_noinc(barriers.tail_full[s])
            for side in (0, 1):
                T.mbarrier_wait_parity(barriers.half_free[side * STAGES + s], turn)
                device(
                    f"gather<{SIDE}>", T.access_ptr(shared.tiles[s, SIDE * side, 0, 0], "w"),
                    T.access_ptr(k[b, 0, r, HALF * side], "r"), k.strides[1] * T.int64(2),
                    name.data, live.data,
                )  # fmt: skip
                T.cp_async_barrier_noinc(barriers.half_full[side * STAGES + s])
            for e in T.unroll(2):
                name[e] = next_name[e]
                live[e] = next_live[e]
            step[0] = step[0] + 1

    return load_queries, copy_tiles, gather_tiles
