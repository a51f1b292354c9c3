"""Where the new tokens go, and what they look like there: shared by both kernels, traceable."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tileops.kernels.common.rope import rope_angles, rotate


def destinations(call: Any) -> tuple[Tensor, Tensor]:
    """Position in its request [T_q] and pool row [T_q] of each packed token, int64.

    The pool row is outside the pool for tokens that are not to be stored: those of no request,
    those past the table, and those whose page is outside the pool.
    """
    cu = call.cu_seqlens_q.to(torch.int64)
    rows = torch.arange(call.q.shape[0], device=cu.device)
    request = torch.searchsorted(cu, rows, right=True) - 1
    owned = (request >= 0) & (request < call.cache_seqlens.shape[0])
    request = request.clamp(min=0)
    shift = pad(call.cache_seqlens.to(torch.int64), (0, 1)) - cu
    position = rows + shift.index_select(0, request)
    # One more row and column of the table stand for "nowhere".
    table = pad(call.block_table, (0, 1, 0, 1), value=-1)
    last = table.shape[1] - 1
    column = torch.div(position, call.page_size, rounding_mode="floor")
    column = torch.where(owned & (column >= 0), column.clamp(max=last), last)
    page = table.flatten().index_select(0, request * (last + 1) + column).to(torch.int64)
    return position, page * call.page_size + position % call.page_size


def rotated(call: Any, rows: Tensor, position: Tensor) -> Tensor:
    """rows [n, heads, D] turned to positions [n], in float32."""
    cos, sin = rope_angles(position, call.rotary_dim or rows.shape[2], call.rope_base)
    return rotate(rows, cos, sin)
