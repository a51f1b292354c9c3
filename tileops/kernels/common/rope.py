"""Rotary embedding in aten ops, computed in float32 (float64 for float64 inputs)."""

import torch
from torch import Tensor


def rope_rows(table: Tensor, positions: Tensor) -> Tensor:
    """Rows [n, R/2] of a table [P, R/2] at positions [n]."""
    return table.index_select(0, positions)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str = "neox") -> Tensor:
    """Rotate x [n, heads, D] by per-row cos, sin [n, R/2]; columns past R pass through."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    half = cos.shape[1]
    x = x.to(dtype)
    c, s = cos.to(dtype)[:, None], sin.to(dtype)[:, None]
    if layout == "neox":
        a, b = x[..., :half], x[..., half : 2 * half]
        turned = torch.cat([a * c - b * s, b * c + a * s], -1)
    else:
        pairs = x[..., : 2 * half].unflatten(-1, (half, 2))
        a, b = pairs[..., 0], pairs[..., 1]
        turned = torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)
    return torch.cat([turned, x[..., 2 * half :]], -1)
