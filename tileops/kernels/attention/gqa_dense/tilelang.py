"""Dense prefill on Hopper: one warp copies tiles, groups of warps multiply them."""

from typing import Any

from torch import Tensor

from ops_registry import tracing
from tileops.kernels.common.gqa_hooks import score_scale
from tileops.kernels.common.launch import machine

LOG2E = 1.4426950408889634
DIMS = (64, 128)
FEWEST = 128  # rows a request below which triton serves


def gqa_dense_fwd_refusal(call: Any) -> str | None:
    q, k, v = call.q, call.k, call.v
    device = machine(q)
    if device.backend != "cuda" or device.arch != 90:
        return "needs a GPU of compute capability 9.0"
    if q.dtype.itemsize != 2:
        return f"serves float16 and bfloat16, got {str(q.dtype).removeprefix('torch.')}"
    if q.shape[-1] not in DIMS:
        return f"serves head dims of 64 and 128 columns, got D={q.shape[-1]}"
    for name, absent in (
        ("window_size_left", call.window_size_left < 0),
        ("window_size_right", call.window_size_right < 0),
        ("softcap", not call.softcap),
        ("pos_encoding_mode", call.pos_encoding_mode == "none"),
    ):
        if not absent:
            return f"has no {name}, got {getattr(call, name)!r}"
    if tracing.traced(q):
        return None  # sizes and strides decide when the call is made
    if not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()):
        return "reads contiguous q, k and v"
    if min(q.shape[1], k.shape[1], q.shape[0] * q.shape[2]) < 1 or q.shape[1] < FEWEST:
        return f"serves {FEWEST} and more query rows of a request, got S_q={q.shape[1]}"
    return None
