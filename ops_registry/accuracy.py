"""How close a kernel must come to the float64 formula on the same rounded inputs.

Both metrics must hold: the relative L2 error of the whole tensor (and per request for packed
calls), and |o - ref| <= atol + rtol * |ref| elementwise for inputs of unit scale. The rows come
from a float32 emulation of tile-wise online softmax with every rounding the contracts allow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch


@dataclass(frozen=True)
class Tolerance:
    """rel_l2 None: only the elementwise bound holds."""

    rel_l2: float | None
    atol: float
    rtol: float


Row: TypeAlias = Mapping[torch.dtype, Tolerance]

F16, BF16 = torch.float16, torch.bfloat16

FORWARD: Row = {F16: Tolerance(1e-3, 2e-3, 2e-3), BF16: Tolerance(6e-3, 1.6e-2, 1.6e-2)}
FORWARD_ROPE: Row = {F16: Tolerance(1.5e-3, 3e-3, 3e-3), BF16: Tolerance(9e-3, 2.4e-2, 2.4e-2)}
FP8_CACHE: Row = {F16: Tolerance(2e-3, 3e-3, 3e-3), BF16: Tolerance(9e-3, 2.4e-2, 2.4e-2)}
FP8: Row = {F16: Tolerance(4e-2, 8e-2, 5e-2), BF16: Tolerance(4e-2, 8e-2, 5e-2)}
FP8_ROPE: Row = {F16: Tolerance(6e-2, 1e-1, 6e-2), BF16: Tolerance(6e-2, 1e-1, 6e-2)}
BACKWARD: Row = {F16: Tolerance(1.5e-3, 5e-3, 5e-3), BF16: Tolerance(8e-3, 3e-2, 3e-2)}
LSE: Row = {F16: Tolerance(None, 1e-3, 1e-4), BF16: Tolerance(None, 1e-3, 1e-4)}
LSE_ROPE: Row = {F16: Tolerance(None, 2e-3, 1e-4), BF16: Tolerance(None, 2e-2, 1e-4)}
INDEXER: Row = {torch.float32: Tolerance(2e-3, 1e-2, 1e-2)}
EXACT = Tolerance(None, 0.0, 0.0)
