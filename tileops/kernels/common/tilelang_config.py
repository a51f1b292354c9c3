"""What a Hopper attention kernel is made for, and the numbers that follow from it."""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

LINE = 128  # bytes of a row of a panel, in which tiles are in shared memory
SWIZZLE_128B = 1  # how they lie there, in a descriptor of a product
F32 = "float32"
# Consumer groups -> registers of a thread, in them and in the producer: together at most the
# 65,536 of a multiprocessor. With fewer the producer spills.
REGISTERS = {2: (232, 40), 3: (160, 32)}
SPARE_REGISTERS = 32  # what a consumer needs beside scores, outputs and weights
# What `equal_tile` and `packed_tile` write of a tile; TARGET: `part_of_tile` alone.
ROW, LIVE, HEAD, REQUEST, SHIFT, LENGTH, FIRST, BLOCKS, KEYS, TARGET, NUMBERS = range(11)


def device(name: str, *args: Any) -> Any:
    """A call of a function of `tilelang_rows.py` that returns nothing."""
    return T.call_extern("void", f"attn::{name}", *args)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The options of `tilelang_attention.make`, which says what they mean."""

    layout: str
    dtype: str
    head_dim: int
    group: int
    packed_heads: int = 1
    split: bool = False
    page: int = 0
    appended: bool = False
    left: bool = False
    right: bool = True
    causal: bool = True
    softcap: bool = False
    sinks: bool = False
    has_lse: bool = True
    block_n: int = 128
    consumers: int = 2
    stages: int = 2
    out_dtype: str = ""

    @property
    def dense(self) -> bool:
        return self.layout == "dense"

    @property
    def paged(self) -> bool:
        return self.layout == "paged"

    @property
    def e4m3(self) -> bool:
        return self.dtype == "float8_e4m3fn"

    @property
    def v_dtype(self) -> str:
        return "float16" if self.e4m3 else self.dtype

    @property
    def o_dtype(self) -> str:
        return self.out_dtype if self.e4m3 else self.dtype

    @property
    def block_m(self) -> int:
        """Rows of a tile."""
        return 64 * self.consumers

    @property
    def tokens(self) -> int:
        """Tokens of a tile, which holds `packed_heads` rows of each."""
        return self.block_m // self.packed_heads

    @property
    def element(self) -> int:
        """Bytes of an element of q and k."""
        return 1 if self.e4m3 else 2

    @property
    def q_panel(self) -> int:
        """Bytes of a panel of q or o."""
        return self.block_m * LINE

    @property
    def kv_panel(self) -> int:
        return self.block_n * LINE

    @property
    def s_registers(self) -> int:
        """Scores of a block that a thread holds."""
        return self.block_n // 2

    @property
    def o_registers(self) -> int:
        return self.head_dim // 2

    @property
    def p_registers(self) -> int:
        """Pairs of weights of a block that a thread holds."""
        return self.block_n // 4

    @property
    def q_slots(self) -> int:
        """Tiles of q in shared memory; with one, o does not go through them."""
        return 1 if self.head_dim > 128 else 2

    @property
    def q_takers(self) -> int:
        """Arrivals that give a q slot back: of each group with o, or of each warp before it."""
        return 4 * self.consumers if self.q_slots == 1 else self.consumers

    @property
    def lines(self) -> int:
        """Tiles that are known. A line is written again when its tile is stored: by the time that
        the copies of the next but one are under way, or the one after that."""
        return 4 if self.q_slots == 1 else 3

    @property
    def sets(self) -> int:
        """Sets of registers for weights.

        With two, the weights of a block are computed while the product still reads those of the
        block before; blocks take turns, one after the other in the code, as the assembler gives
        a set away that is copied. Outputs of 256 columns leave no room for that without spills.
        """
        held = self.s_registers + self.o_registers + 2 * self.p_registers
        spare = REGISTERS[self.consumers][0] - held
        return 2 if spare >= SPARE_REGISTERS and self.head_dim <= 128 else 1
