"""What compressed attention requires and returns: o [T, H, DV], lse [H, T]."""

from typing import Any

import torch

from meta_kernels.checks import check_extent, check_groups, check_tensors, positive, sm_scale
from ops_registry.attention.nsa_compressed import NSA_COMPRESSED_FWD as OP


def check_parameters(scale: float, bs: int) -> None:
    sm_scale(OP.name, scale, "scale")
    positive(OP.name, "bs", bs)


def infer_nsa_compressed_fwd(call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    check_parameters(call.scale, call.bs)
    dims = check_tensors(OP, call)
    check_extent(OP.name, "q", "DK", dims["DK"])
    check_extent(OP.name, "v_cmp", "DV", dims["DV"])
    check_groups(OP.name, dims["H"], dims["H_kv"], "k_cmp")
    o = call.q.new_empty(dims["T"], dims["H"], dims["DV"])
    return o, call.q.new_empty(dims["H"], dims["T"], dtype=torch.float32)
