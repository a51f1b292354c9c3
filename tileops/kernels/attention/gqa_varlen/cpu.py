"""Packed GQA on CPU, eager: the blocked engine, one request at a time."""

from typing import Any

from torch import Tensor

from tileops.kernels.common.cpu_attention import PackedKeys, Scratch, attend, rope_of
from tileops.kernels.common.cpu_attention_backward import attend_backward
from tileops.kernels.common.gqa_hooks import score_scale


def requests(call: Any) -> list[tuple[int, slice, slice]]:
    """(b, query rows, key rows) of every request; IndexError for rows outside the tensors."""
    found = []
    cu_q, cu_kv = call.cu_seqlens_q.tolist(), call.cu_seqlens_kv.tolist()
    for b in range(len(cu_q) - 1):
        spans = []
        for name, cu, rows in (("q", cu_q, call.q.shape[0]), ("kv", cu_kv, call.k.shape[0])):
            start, stop = cu[b], cu[b + 1]
            if not 0 <= start <= stop <= rows:
                raise IndexError(
                    f"cu_seqlens_{name} must not decrease and stay in [0, {rows}], got "
                    f"{start} and {stop} at index {b}"
                )
            spans.append(slice(start, stop))
        found.append((b, spans[0], spans[1]))
    return found


def gqa_varlen_fwd(out: tuple[Tensor, Tensor], call: Any) -> None:
    """Fill o [T_q, H, D] and lse [H, T_q]; rows of no request become 0 and -inf."""
    o, lse = out
    scratch = Scratch()
    rope = rope_of(call)
    o.zero_()
    lse.fill_(-float("inf"))
    for b, rows, keys in requests(call):
        attend(
            o[rows],
            lse[:, rows],
            call.q[rows],
            PackedKeys(call.k[keys], call.v[keys]),
            kv_len=keys.stop - keys.start,
            scale=score_scale(call),
            is_causal=call.is_causal,
            left=call.window_size_left,
            right=call.window_size_right,
            softcap=call.softcap,
            sinks=call.sinks,
            rope=rope,
            q_scale=None if call.q_scale is None else call.q_scale[b],
            k_scale=None if call.k_scale is None else call.k_scale[b],
            v_scale=None if call.v_scale is None else call.v_scale[b],
            scratch=scratch,
        )


def gqa_varlen_bwd(out: tuple[Tensor, Tensor, Tensor, Tensor], call: Any) -> None:
    """Fill dq [T_q, H, D], dk and dv [T_kv, H_kv, D], dsinks [H] or empty."""
    dq, dk, dv, dsinks = out
    for gradient in out:
        gradient.zero_()
    scratch = Scratch()
    rope = rope_of(call)
    for _, rows, keys in requests(call):
        attend_backward(
            dq[rows],
            dk[keys],
            dv[keys],
            call.do[rows],
            call.q[rows],
            call.k[keys],
            call.v[keys],
            call.o[rows],
            call.lse[:, rows],
            scale=score_scale(call),
            is_causal=call.is_causal,
            left=call.window_size_left,
            right=call.window_size_right,
            softcap=call.softcap,
            sinks=call.sinks,
            dsinks=None if call.sinks is None else dsinks,
            rope=rope,
            scratch=scratch,
        )
