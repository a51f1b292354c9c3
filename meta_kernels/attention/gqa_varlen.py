"""What packed variable-length GQA requires and returns, forward and backward."""

from typing import Any

import torch

from meta_kernels import checks
from meta_kernels.checks import Dims, check_tensors
from meta_kernels.contents import offsets
from ops_registry.attention.gqa_varlen import GQA_VARLEN_BWD, GQA_VARLEN_FWD
from ops_registry.contract import E4M3, Condition


def infer_gqa_varlen_fwd(call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    op = GQA_VARLEN_FWD.name
    dims = check_tensors(GQA_VARLEN_FWD, call)
    dtype = checks.output_dtype(op, call.q, call.out_dtype)
    check_options(op, call, dims, dtype)
    fp8 = call.q.dtype == E4M3
    scales = {"q_scale": fp8, "k_scale": fp8, "v_scale": fp8}
    checks.check_scales(op, call, scales, (dims["B"], dims["H_kv"]), "float8_e4m3fn q, k and v")
    o = call.q.new_empty((dims["T_q"], dims["H"], dims["D"]), dtype=dtype)
    lse = call.q.new_empty((dims["H"], dims["T_q"]), dtype=torch.float32)
    return o, lse


def infer_gqa_varlen_bwd(call: Any) -> tuple[torch.Tensor, ...]:
    dims = check_tensors(GQA_VARLEN_BWD, call)
    check_options(GQA_VARLEN_BWD.name, call, dims, call.q.dtype)
    dq = call.q.new_empty((dims["T_q"], dims["H"], dims["D"]))
    dk, dv = (call.q.new_empty((dims["T_kv"], dims["H_kv"], dims["D"])) for _ in range(2))
    width = 0 if call.sinks is None else dims["H"]
    return dq, dk, dv, call.q.new_empty((width,), dtype=torch.float32)


def check_options(op: str, call: Any, dims: Dims, dtype: torch.dtype) -> None:
    """The rules that forward and backward share."""
    checks.check_extent(op, "q", "D", dims["D"])
    checks.check_groups(op, dims["H"], dims["H_kv"])
    checks.scores(op, call)
    checks.check_rope(op, call, dims["D"], dtype)


def contents_gqa_varlen_fwd(call: Any) -> list[Condition]:
    """Offsets are well formed; under RoPE every position has a row in the tables."""
    found = offsets("cu_seqlens_q", call.cu_seqlens_q, call.q.shape[0])
    found += offsets("cu_seqlens_kv", call.cu_seqlens_kv, call.k.shape[0])
    if call.pos_encoding_mode == "rope":
        q_len, kv_len = call.cu_seqlens_q.diff(), call.cu_seqlens_kv.diff()
        found += [
            Condition(
                kv_len <= call.rope_cos.shape[0],
                "cu_seqlens_kv must give no request more keys than rope_cos has rows",
                kv_len,
            ),
            Condition(
                q_len <= kv_len,
                "cu_seqlens_q must give no request more queries than keys with RoPE",
                q_len,
            ),
        ]
    return found
