"""What block selection requires and returns: block_indices [T, H_kv, selected_block_num]."""

from typing import Any

import torch

from meta_kernels.checks import check_extent, check_groups, check_tensors, positive, sm_scale
from ops_registry.attention.nsa_topk import NSA_TOPK as OP


def check_parameters(scale: float, selected_block_num: int, bs: int) -> None:
    sm_scale(OP.name, scale, "scale")
    positive(OP.name, "selected_block_num", selected_block_num)
    positive(OP.name, "bs", bs)


def infer_nsa_topk(call: Any) -> torch.Tensor:
    check_parameters(call.scale, call.selected_block_num, call.bs)
    dims = check_tensors(OP, call)
    check_extent(OP.name, "q", "D", dims["D"])
    check_groups(OP.name, dims["H"], dims["H_kv"], "k_cmp")
    shape = (dims["T"], dims["H_kv"], call.selected_block_num)
    return call.q.new_empty(shape, dtype=torch.int32)
