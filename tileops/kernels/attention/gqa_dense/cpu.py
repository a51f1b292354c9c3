"""Dense GQA on CPU, eager: the blocked engine, one batch entry at a time."""

from typing import Any

from torch import Tensor

from tileops.kernels.common.cpu_attention import PackedKeys, Scratch, attend, rope_of
from tileops.kernels.common.cpu_attention_backward import attend_backward
from tileops.kernels.common.gqa_hooks import score_scale


def gqa_dense_fwd(out: tuple[Tensor, Tensor], call: Any) -> None:
    """Fill o [B, S_q, H, D] and lse [B, H, S_q]."""
    o, lse = out
    scratch = Scratch()
    rope = rope_of(call)
    for b in range(call.q.shape[0]):
        attend(
            o[b],
            lse[b],
            call.q[b],
            PackedKeys(call.k[b], call.v[b]),
            kv_len=call.k.shape[1],
            scale=score_scale(call),
            is_causal=call.is_causal,
            left=call.window_size_left,
            right=call.window_size_right,
            softcap=call.softcap,
            rope=rope,
            q_scale=None if call.q_scale is None else call.q_scale[b],
            k_scale=None if call.k_scale is None else call.k_scale[b],
            v_scale=None if call.v_scale is None else call.v_scale[b],
            scratch=scratch,
        )


def gqa_dense_bwd(out: tuple[Tensor, Tensor, Tensor], call: Any) -> None:
    """Fill dq [B, S_q, H, D], dk and dv [B, S_kv, H_kv, D]."""
    dq, dk, dv = out
    scratch = Scratch()
    rope = rope_of(call)
    for b in range(call.q.shape[0]):
        attend_backward(
            dq[b],
            dk[b],
            dv[b],
            call.do[b],
            call.q[b],
            call.k[b],
            call.v[b],
            call.o[b],
            call.lse[b],
            scale=score_scale(call),
            is_causal=call.is_causal,
            left=call.window_size_left,
            right=call.window_size_right,
            softcap=call.softcap,
            rope=rope,
            scratch=scratch,
        )
