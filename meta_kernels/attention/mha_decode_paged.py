"""What multi-head decode over a paged KV cache requires, and its output."""

from typing import Any

import torch

from meta_kernels import checks
from meta_kernels.checks import check_extent, check_multiple, check_tensors
from ops_registry.attention.mha_decode_paged import MHA_DECODE_PAGED_FWD as OP


def infer_mha_decode_paged_fwd(call: Any) -> torch.Tensor:
    checks.positive(OP.name, "page_size", call.page_size)
    dims = check_tensors(OP, call)
    check_extent(OP.name, "q", "D", dims["D"])
    check_extent(OP.name, "q", "H", dims["H"])
    check_multiple(OP.name, "k", dims["N_kv"], "page_size", call.page_size)
    return call.q.new_empty(call.q.shape)
