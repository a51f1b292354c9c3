"""Attention over indexed cache rows in aten ops: every query gathers its own rows."""

from typing import Any

import torch
from torch import Tensor

from tileops.kernels.common.blockwise import FAR, Inputs, take
from tileops.kernels.common.gathered import attend_gathered, last_slot


def dsa_decode_fwd(out: Tensor, call: Any) -> None:
    """q [B, S, H, W]; kv [B, S_kv, H_kv, W]; indices [B, S, H_kv, K] -> o [B, S, H, D]."""
    q, kv, indices = call.q, call.kv, call.indices
    width, length = q.shape[3], kv.shape[1]

    def prepare(x: Inputs, rows: Tensor, live: Tensor) -> tuple[Inputs, Tensor]:
        index = take(x["indices"], rows).to(torch.int64)
        limit = torch.where(live, take(x["limit"], rows), 0)[:, None, None]
        used = (index >= 0) & (index < limit)
        first = take(x["first"], rows)[:, None, None]
        return {"rows": torch.where(used, first + index, -1)}, last_slot(used, x["slots"])

    def pick(x: Inputs, lanes: Tensor) -> tuple[Tensor, Tensor]:
        row = take(x["rows"], lanes.clamp(max=x["rows"].shape[2] - 1), dim=2)
        return row, row >= 0

    # Query rows of all requests, end to end: the first cache row of each and its live prefix.
    row = torch.arange(q.shape[0] * q.shape[1], device=q.device)
    request = torch.div(row, torch.sym_max(q.shape[1], 1), rounding_mode="floor")
    limit = torch.zeros_like(row) + length
    if call.is_causal:
        position = row - request * q.shape[1] + min(call.q_start_index_s, FAR // 2)
        past = torch.div(position + 1, call.stride_kv, rounding_mode="floor")
        limit = torch.minimum(limit, past)
    inputs = {
        "indices": indices.flatten(0, 1),
        "slots": torch.arange(indices.shape[3], device=q.device),
        "first": request * length,
        "limit": limit,
    }
    attend_gathered(
        q.flatten(0, 1),
        kv.flatten(0, 1),
        None,
        inputs,
        prepare,
        pick,
        scale=width**-0.5 if call.sm_scale is None else call.sm_scale,
        value_dim=width - call.dim_tail,
        sizes=(q, kv),
        out=out.flatten(0, 1),
    )
