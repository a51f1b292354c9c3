"""What dense GQA requires and returns, forward and backward."""

from typing import Any

import torch

from meta_kernels import checks
from meta_kernels.checks import Dims, check_tensors, refuse
from ops_registry.attention.gqa_dense import GQA_DENSE_BWD, GQA_DENSE_FWD
from ops_registry.contract import E4M3


def infer_gqa_dense_fwd(call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    op = GQA_DENSE_FWD.name
    dims = check_tensors(GQA_DENSE_FWD, call)
    dtype = checks.output_dtype(op, call.q, call.out_dtype)
    check_options(op, call, dims, dtype)
    fp8 = call.q.dtype == E4M3
    scales = {"q_scale": fp8, "k_scale": fp8, "v_scale": fp8}
    checks.check_scales(op, call, scales, (dims["B"], dims["H_kv"]), "float8_e4m3fn q, k and v")
    o = call.q.new_empty((dims["B"], dims["S_q"], dims["H"], dims["D"]), dtype=dtype)
    lse = call.q.new_empty((dims["B"], dims["H"], dims["S_q"]), dtype=torch.float32)
    return o, lse


def infer_gqa_dense_bwd(call: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dims = check_tensors(GQA_DENSE_BWD, call)
    check_options(GQA_DENSE_BWD.name, call, dims, call.q.dtype)
    dq = call.q.new_empty((dims["B"], dims["S_q"], dims["H"], dims["D"]))
    dk, dv = (
        call.q.new_empty((dims["B"], dims["S_kv"], dims["H_kv"], dims["D"])) for _ in range(2)
    )
    return dq, dk, dv


def check_options(op: str, call: Any, dims: Dims, dtype: torch.dtype) -> None:
    """The rules that forward and backward share."""
    checks.check_extent(op, "q", "D", dims["D"])
    checks.check_groups(op, dims["H"], dims["H_kv"])
    checks.scores(op, call)
    checks.check_rope(op, call, dims["D"], dtype, rows=dims["S_kv"])
    aligned = (
        (call.is_causal, "is_causal=True"),
        (
            call.pos_encoding_mode == "rope",
            "pos_encoding_mode='rope'",
        ),
    )
    for active, option in aligned:
        if active and dims["S_q"] > dims["S_kv"]:
            raise refuse(
                op,
                f"q must not be longer than k with {option}, got S_q={dims['S_q']} and "
                f"S_kv={dims['S_kv']}",
            )
