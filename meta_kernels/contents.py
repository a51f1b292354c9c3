"""The rules behind `validate_inputs`: what tensor contents must be.

Each function returns conditions in the order of their sentences. They are built from aten ops
alone, so that the same rules become asserts in a traced program, where sizes are symbols.
"""

from __future__ import annotations

from typing import Any

import torch

from ops_registry.contract import Condition


def offsets(name: str, cu: torch.Tensor, total: Any) -> list[Condition]:
    """Offsets cu [B + 1] delimit `total` packed rows."""
    yes = torch.ones_like(cu, dtype=torch.bool)
    starts = torch.cat([cu[:1] == 0, yes[1:]])
    rises = torch.cat([yes[:1], cu[1:] >= cu[:-1]])
    ends = torch.cat([yes[1:], cu[-1:] == total])
    return [
        Condition(starts, f"{name} must start at 0", cu),
        Condition(rises, f"{name} must not decrease", cu),
        Condition(ends, f"{name} must end at the number of packed rows", cu),
    ]


def positive_scale(name: str, scale: torch.Tensor) -> Condition:
    """A dequantization scale can be divided by."""
    ok = torch.isfinite(scale) & (scale > 0)
    return Condition(ok, f"{name} must be finite and > 0", scale)


def non_negative(name: str, values: torch.Tensor) -> Condition:
    return Condition(values >= 0, f"{name} must be >= 0", values)
