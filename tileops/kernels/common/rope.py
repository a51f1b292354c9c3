"""Rotary embedding in aten ops: the rotation, its inverse, and the two sources of cos and sin.

Operators either gather rows of a caller's table or, where they own the convention, compute the
angles of exactly the positions at hand. Both give [n, R/2], one column per frequency.
"""

import torch
from torch import Tensor

LAYOUTS = ("neox", "interleaved")


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str = "neox") -> Tensor:
    """Rotate the first R columns of x [n, heads, D] by cos, sin [n, R/2]; the rest passes.

    Computes in float32 (float64 for a float64 x) and returns that dtype; whoever stores rounds.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    x = x.to(dtype)
    cos, sin = cos.to(dtype)[:, None, :], sin.to(dtype)[:, None, :]
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if layout == "neox":
        a, b = turned[..., :half], turned[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
    if layout != "interleaved":
        raise ValueError(f"rope_layout must be one of {LAYOUTS}, got {layout!r}")
    a, b = turned[..., 0::2], turned[..., 1::2]
    pairs = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return torch.cat([pairs.flatten(-2), rest], dim=-1)


def rotate_back(x: Tensor, cos: Tensor, sin: Tensor, layout: str = "neox") -> Tensor:
    """The inverse of `rotate`, which is also its transpose: what a gradient goes through."""
    return rotate(x, cos, -sin, layout)


def rope_rows(table: Tensor, positions: Tensor) -> Tensor:
    """Rows [n, R/2] of a table [P, R/2]; a negative position reads row 0.

    Only a query that sees no key is at a negative position or needs no table at all, so what it
    reads does not matter.
    """
    size = table.shape[0]
    if isinstance(size, int) and size == 0:
        return table.new_zeros(positions.shape[0], table.shape[1])
    return table.index_select(0, positions.clamp(min=0))


def rope_angles(positions: Tensor, rotary_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cos and sin [n, R/2], float32, of positions [n]; the angles are float64.

    A float32 angle is off by 3.5e-2 at position 131072.
    """
    half = rotary_dim // 2
    exponent = torch.arange(half, dtype=torch.float64, device=positions.device) / -half
    angle = positions.to(torch.float64)[:, None] * torch.pow(base, exponent)
    return angle.cos().to(torch.float32), angle.sin().to(torch.float32)
