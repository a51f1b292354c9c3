"""What attention over indexed cache rows requires and returns: o [B, S, H, W - dim_tail]."""

from typing import Any

import torch

from meta_kernels.checks import at_least, check_groups, check_tensors, refuse, sm_scale
from ops_registry.attention.dsa_decode import DSA_DECODE_FWD as OP


def check_parameters(
    dim_tail: int, stride_kv: int, q_start_index_s: int, scale: float | None
) -> None:
    at_least(OP.name, "dim_tail", dim_tail, 0)
    at_least(OP.name, "stride_kv", stride_kv, 1)
    at_least(OP.name, "q_start_index_s", q_start_index_s, 0)
    sm_scale(OP.name, scale)


def infer_dsa_decode_fwd(call: Any) -> torch.Tensor:
    check_parameters(call.dim_tail, call.stride_kv, call.q_start_index_s, call.sm_scale)
    dims = check_tensors(OP, call)
    if dims["W"] <= call.dim_tail:
        raise refuse(
            OP.name,
            f"q must have a last extent W > dim_tail={call.dim_tail}, got {dims['W']}",
        )
    check_groups(OP.name, dims["H"], dims["H_kv"], "kv")
    return call.q.new_empty(dims["B"], dims["S"], dims["H"], dims["W"] - call.dim_tail)
