"""What a Hopper latent kernel is made for, and the numbers that follow from it."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from tileops.kernels.common.tilelang_config import LINE
from tileops.kernels.common.tilelang_limits import LATENT_COLUMNS, LATENT_HEADS, LATENT_SLOTS

HEADS, SLOTS = LATENT_HEADS, LATENT_SLOTS
DIM, PE = LATENT_COLUMNS
HALF = DIM // 2  # columns of a consumer group
WIDE = 64  # columns of a panel
PANELS = (DIM + PE) // WIDE  # the tail is the last one
PANEL = SLOTS * LINE  # bytes
TILE = PANELS * PANEL
UNIT = 16  # bytes of a descriptor's steps
STAGES = 2  # slots for tiles
GROUP, WARP = 128, 32  # threads
WARPS = GROUP // WARP
# Of a thread of each group, the one that scores, the one that follows it, the one that loads:
# together at most what a launch of 3 * 128 threads gets, 168 for each. More would be waited for
# forever.
REGISTERS = 232, 184, 88
OUTS, SCORES, WEIGHTS = HALF // 2, SLOTS // 2, SLOTS // 4  # registers of a thread
# What `next_row` keeps.
ITEM, RANK, ROW, BEGIN, END, NUMBERS = range(6)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The options of `tilelang_latent_kernel.make`, which says what they mean."""

    dtype: str
    gather: bool
    causal: bool
    whole: bool
    pair: bool

    @property
    def kind(self) -> str:
        """The type of the products' operands."""
        return "bf16" if self.dtype == "bfloat16" else "fp16"

    @property
    def bf16(self) -> str:
        return str(self.dtype == "bfloat16").lower()

    @property
    def half_loads(self) -> int:
        """Arrivals that fill half of a tile: of each loading thread, or of the one that asks."""
        return GROUP if self.gather else 1

    @property
    def tail_loads(self) -> int:
        """The same of the tail, beside which a thread describes the tile."""
        return GROUP + 1 if self.gather else 1

    @property
    def takers(self) -> int:
        """Warps that give a part of a tile back: those of a group, in each program of a pair."""
        return 2 * WARPS if self.pair else WARPS


class Work(NamedTuple):
    """The schedule, arguments of the kernel, and the program."""

    ctas: Any
    items: Any
    head_blocks: Any
    rows: Any
    row_tiles: Any
    range_tiles: Any
    cta: Any


class Shared(NamedTuple):
    """Shared memory: tiles [STAGES, panels, rows, columns]; weights [1, panels, rows, columns];
    factors [2, HEADS], what the second group multiplies its rows with, before a tile and at the
    end; lines [STAGES + 1, 4]: of a tile which slots are live, whether it is the last one of its
    row, behind them the latter of the tile whose weights are there."""

    tiles: Any
    weights: Any
    factors: Any
    lines: Any


class Barriers(NamedTuple):
    """Those of tails by slot, those of halves [side * STAGES + slot], the others alone."""

    tail_full: Any
    half_full: Any
    tail_free: Any
    half_free: Any
    weights_full: Any
    weights_free: Any
    scored: Any
    factors_full: Any
    q_full: Any
    q_free: Any


class Descriptors(NamedTuple):
    """Of shared memory, for the products: queries, keys, weights and values."""

    q: Any
    k: Any
    p: Any
    v: Any


class Held(NamedTuple):
    """Registers of a thread that scores: fragments of scores, outputs and weights; by row the
    reference, sum of weights and the factor of a tile; what is known of the tile."""

    scores: Any
    outs: Any
    p: Any
    m: Any
    total: Any
    alpha: Any
    moved: Any
    fresh: Any
    line: Any
