"""What attention over selected blocks requires and returns: o [T, H, D]."""

from typing import Any

import torch

from meta_kernels.checks import check_extent, check_groups, check_tensors, positive, sm_scale
from ops_registry.attention.nsa_varlen import NSA_VARLEN_FWD as OP


def check_parameters(scale: float, block_size: int) -> None:
    sm_scale(OP.name, scale, "scale")
    positive(OP.name, "block_size", block_size)


def infer_nsa_varlen_fwd(call: Any) -> torch.Tensor:
    check_parameters(call.scale, call.block_size)
    dims = check_tensors(OP, call)
    check_extent(OP.name, "q", "D", dims["D"])
    check_groups(OP.name, dims["H"], dims["H_kv"])
    return call.q.new_empty(dims["T"], dims["H"], dims["D"])
