"""Tiles between global and shared memory: what the Hopper kernel asks of the copy engine."""

from typing import Any

import tilelang.language as T
from tilelang import tvm

from tileops.kernels.common.tilelang_config import LINE, Config

# What cuTensorMapEncodeTiled takes.
TYPES = {"float16": 6, "bfloat16": 9, "float8_e4m3fn": 0}  # e4m3 as bytes
SWIZZLED, IN_L2, ZEROS = 3, 2, 0  # by 128 bytes; 128 bytes at a time; outside of the tensor
NO_HINT = 0  # of how long the L2 cache keeps what is copied


def strided(name: str, shape: tuple[Any, ...], dtype: str) -> Any:
    """A tensor of any strides, whose last dimension is dense."""
    strides = (T.dynamic(f"{name}_stride_{i}", "int64") for i in range(len(shape) - 1))
    return T.StridedTensor(shape, (*strides, 1), dtype)


def panels(rows: int, columns: int, dtype: str) -> tuple[int, int, int]:
    """The shape of a tile in shared memory."""
    wide = LINE // _bytes(dtype)
    return (columns // wide, rows, wide)


def _bytes(dtype: str) -> int:
    return 1 if dtype == "float8_e4m3fn" else 2


def tensor_map(x: Any, rows: int) -> Any:
    """Of boxes of x [..., D], `rows` rows of 128 bytes; x is 3- or 4-dimensional, heads before D.

    Coordinates: column, row, head, and of a 4-dimensional x its first index.
    """
    rank, size = len(x.shape), _bytes(str(x.dtype))
    order = (3, 1, 2, 0) if rank == 4 else (2, 0, 1)
    # One that is not used may be anything.
    strides = [
        T.Select(x.shape[d] > 1, T.Cast("int64", x.strides[d]) * T.int64(size), T.int64(LINE))
        for d in order[1:]
    ]
    return T.create_tma_descriptor(
        TYPES[str(x.dtype)],
        rank,
        x.data,
        *(x.shape[d] for d in order),
        size,
        *strides,
        LINE // size,
        rows,
        *[1] * (rank - 2),
        *[1] * rank,
        0,
        SWIZZLED,
        IN_L2,
        ZEROS,
    )


def _store(box: Any, tile: Any, *place: Any) -> Any:
    operation = tvm.ir.Op.get("tl.tma_store")
    return T.call_intrin("handle", operation, box, tile, *place, 0, NO_HINT)


def copies(config: Config) -> tuple[Any, Any, Any]:
    """The macros `load_queries` and `load_keys`, by one warp, and `send_tile`, by a group."""
    D, P, PER, BN = config.head_dim, config.packed_heads, config.tokens, config.block_n
    DENSE, PAGED, PAGE = config.dense, config.paged, config.page
    PIECE = min(BN, PAGE) if PAGED else BN  # rows of one copy
    PIECES = BN // PIECE

    def place(row: Any, b: Any, h: Any, n: Any, page: Any) -> tuple[Any, ...]:
        """Where the keys of a copy are, but for the column."""
        if DENSE:
            return n * BN, h, b
        if PAGED:
            return 0 if PIECES > 1 else T.truncmod(n * BN, PAGE), h, page
        return row, h

    @T.macro
    def load_queries(q, q_s, full, slot, row, b, h):
        """Rows of a tile: of `packed_heads` heads from h, one after the other."""
        count, rows, wide = panels(config.block_m, D, config.dtype)
        if T.shuffle_elect(32):
            T.mbarrier_arrive_expect_tx(full[slot], count * rows * LINE)
            for g in T.unroll(P, explicit=True):
                for c in T.unroll(count, explicit=True):
                    T.tma_load(
                        tensor_map(q, PER), full[slot],
                        T.access_ptr(q_s[slot, c, g * PER, 0], "r"),
                        c * wide, row, *((h, b) if DENSE else (h * P + g,)), NO_HINT,
                    )  # fmt: skip

    @T.macro
    def load_keys(x, x_s, full, slot, row, b, h, n):
        """Block n of the keys (or values) of a KV head. row: its first row, or the lane's page."""
        count, rows, wide = panels(BN, D, str(x.dtype))
        leads = T.alloc_var("bool")
        leads = T.shuffle_elect(32)
        if leads:
            T.mbarrier_arrive_expect_tx(full[slot], count * rows * LINE)
        for i in T.unroll(PIECES, explicit=True):
            page = T.shfl_sync(row, i) if PAGED else 0
            if leads:
                for c in T.unroll(count, explicit=True):
                    to = T.access_ptr(x_s[slot, c, i * PIECE, 0], "r")
                    T.tma_load(
                        tensor_map(x, PIECE), full[slot], to, c * wide, *place(row, b, h, n, page),
                        NO_HINT,
                    )  # fmt: skip

    @T.macro
    def send_tile(o, o_s, slot, wg, row, b, h):
        """A group's rows of a dense tile; what lies past S_q is left out."""
        count, _, wide = panels(64, D, config.o_dtype)
        if T.shuffle_elect(128):
            for c in T.unroll(count, explicit=True):
                _store(
                    tensor_map(o, 64), T.access_ptr(o_s[slot, c, wg * 64, 0], "r"),
                    c * wide, row + wg * 64, h, b,
                )  # fmt: skip
                T.tma_store_arrive()

    return load_queries, load_keys, send_tile
