"""What latent decode requires, and its output."""

from typing import Any

import torch

from meta_kernels.checks import check_extent, check_groups, check_tensors
from ops_registry.attention.mla_decode import MLA_DECODE_FWD as OP


def infer_mla_decode_fwd(call: Any) -> torch.Tensor:
    dims = check_tensors(OP, call)
    check_extent(OP.name, "q", "D", dims["D"])
    check_groups(OP.name, dims["H"], dims["H_kv"])
    return call.q.new_empty(call.q.shape)
