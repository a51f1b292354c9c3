"""Packed GQA in aten ops: the blockwise engine over the requests that the offsets delimit."""

from typing import Any

from torch import Tensor

from tileops.kernels.common.blockwise import Window, attend, packed_lengths, packed_rows
from tileops.kernels.common.blockwise_backward import attend_backward, rope_of
from tileops.kernels.common.gqa_hooks import hooks_of, score_scale, softcap_of


def gqa_varlen_fwd(out: tuple[Tensor, Tensor], call: Any) -> None:
    """Fill o [T_q, H, D] and lse [H, T_q]."""
    o, lse = out
    hooks = hooks_of(call)
    rows, natural = attend(
        call.q,
        call.cu_seqlens_q,
        packed_lengths(call.cu_seqlens_kv),
        {"k": call.k, "v": call.v, "kv_offsets": call.cu_seqlens_kv, **hooks.inputs},
        packed_rows(hooks.key),
        Window(call.is_causal, call.window_size_left, call.window_size_right),
        scale=score_scale(call),
        heads_kv=call.k.shape[1],
        value_dim=call.v.shape[2],
        softcap=softcap_of(call),
        sinks=call.sinks,
        query=hooks.query,
        finish=hooks.finish,
        out_dtype=o.dtype,
    )
    o.copy_(rows)
    lse.copy_(natural)


def gqa_varlen_bwd(out: tuple[Tensor, Tensor, Tensor, Tensor], call: Any) -> None:
    """Fill dq [T_q, H, D], dk and dv [T_kv, H_kv, D], dsinks [H] or empty."""
    gradients = attend_backward(
        call.q,
        call.k,
        call.v,
        call.o,
        call.do,
        call.lse,
        call.cu_seqlens_q,
        call.cu_seqlens_kv,
        Window(call.is_causal, call.window_size_left, call.window_size_right),
        scale=score_scale(call),
        softcap=softcap_of(call),
        sinks=call.sinks,
        rope=rope_of(call),
    )
    for gradient, rows in zip(out, gradients, strict=True):
        gradient.copy_(rows)
