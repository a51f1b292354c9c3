"""What the lightning indexer requires and returns: logits [B, S, S_kv, G]."""

from typing import Any

import torch

from meta_kernels.checks import check_extent, check_groups, check_tensors, describe, refuse
from ops_registry.attention.fp8_lightning_indexer import FP8_LIGHTNING_INDEXER as OP
from ops_registry.contract import E4M3


def infer_fp8_lightning_indexer(call: Any) -> torch.Tensor:
    dims = check_tensors(OP, call)
    check_extent(OP.name, "index_q", "D", dims["D"])
    check_groups(OP.name, dims["H"], dims["G"], "index_k")
    if call.index_k_scale is not None and call.index_q.dtype != E4M3:
        raise refuse(
            OP.name,
            "index_k_scale must be None for bfloat16 inputs, which the operator quantizes itself, "
            f"got {describe(call.index_k_scale)}",
        )
    shape = (dims["B"], dims["S"], dims["S_kv"], dims["G"])
    return call.index_q.new_empty(shape, dtype=torch.float32)
