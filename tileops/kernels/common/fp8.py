"""What an FP8 cache stores and loads (`float8_e4m3fn`), bit for bit the same on every path."""

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0


def store_e4m3(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """Round x / scale to e4m3: a true float32 division, saturating, NaN stays NaN.

    `scale` is float32 and broadcasts against x; without it the values are stored as they are.
    """
    wide = x.to(torch.float32)
    if scale is not None:
        wide = wide / scale
    # The cast saturates in this torch and gave NaN in older ones. Comparisons, not a clamp,
    # because a compiled clamp drops the sign of a NaN.
    wide = torch.where(wide > E4M3_MAX, E4M3_MAX, wide)
    return torch.where(wide < -E4M3_MAX, -E4M3_MAX, wide).to(E4M3)


def load_e4m3(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """The float32 values of e4m3 codes, times a broadcastable float32 scale."""
    wide = x.to(torch.float32)
    return wide if scale is None else wide * scale
