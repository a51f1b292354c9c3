"""Dense GQA in aten ops: the blockwise engine over equal requests laid end to end."""

from typing import Any

import torch
from torch import Tensor

from tileops.kernels.common.blockwise import Window, attend, dense_offsets, packed_rows
from tileops.kernels.common.blockwise_backward import attend_backward, rope_of
from tileops.kernels.common.gqa_hooks import hooks_of, score_scale, softcap_of


def gqa_dense_fwd(out: tuple[Tensor, Tensor], call: Any) -> None:
    """Fill o [B, S_q, H, D] and lse [B, H, S_q]."""
    o, lse = out
    batch, s_q, heads, dim = call.q.shape
    s_kv, heads_kv = call.k.shape[1:3]
    kv_offsets = dense_offsets(batch, s_kv, call.q.device)
    hooks = hooks_of(call)
    rows, natural = attend(
        call.q.reshape(batch * s_q, heads, dim),
        dense_offsets(batch, s_q, call.q.device),
        torch.full((batch,), s_kv, device=call.q.device),
        {
            "k": call.k.reshape(batch * s_kv, heads_kv, dim),
            "v": call.v.reshape(batch * s_kv, heads_kv, dim),
            "kv_offsets": kv_offsets,
            **hooks.inputs,
        },
        packed_rows(hooks.key),
        Window(call.is_causal, call.window_size_left, call.window_size_right),
        scale=score_scale(call),
        heads_kv=heads_kv,
        value_dim=dim,
        softcap=softcap_of(call),
        query=hooks.query,
        finish=hooks.finish,
        out_dtype=o.dtype,
        sizes=(call.q, call.k),
    )
    o.copy_(rows.reshape(o.shape))
    lse.copy_(natural.reshape(heads, batch, s_q).transpose(0, 1))


def gqa_dense_bwd(out: tuple[Tensor, Tensor, Tensor], call: Any) -> None:
    """Fill dq [B, S_q, H, D], dk and dv [B, S_kv, H_kv, D]."""
    batch, s_q = call.q.shape[:2]
    s_kv, device = call.k.shape[1], call.q.device
    q, k, v, o, do = (x.flatten(0, 1) for x in (call.q, call.k, call.v, call.o, call.do))
    *gradients, _ = attend_backward(
        q,
        k,
        v,
        o,
        do,
        call.lse.transpose(0, 1).flatten(1),
        dense_offsets(batch, s_q, device),
        dense_offsets(batch, s_kv, device),
        Window(call.is_causal, call.window_size_left, call.window_size_right),
        scale=score_scale(call),
        softcap=softcap_of(call),
        rope=rope_of(call),
        sizes=(call.q, call.k),
    )
    for gradient, rows in zip(out, gradients, strict=True):
        gradient.copy_(rows.reshape(gradient.shape))
