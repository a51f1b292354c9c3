"""Contracts of packed variable-length GQA, forward and backward, and their autograd."""

from typing import Any

from ops_registry.accuracy import BACKWARD, FORWARD, FORWARD_ROPE, FP8, FP8_ROPE, LSE, LSE_ROPE
from ops_registry.attention import gqa_dense
from ops_registry.autograd import refused_arguments
from ops_registry.contract import (
    FLOAT32,
    HALF,
    HALF_OR_E4M3,
    INT32,
    OpContract,
    TensorSpec,
    define,
)

LETTERS = {
    "B": "requests",
    "T_q": "packed query tokens",
    "T_kv": "packed key/value tokens",
    "H": "query heads, H = g * H_kv",
    "H_kv": "key/value heads",
    "D": "head dim",
    "P": "rows of the rotary tables, at least the longest request",
    "R": "rotated width of a head, rotary_dim or D",
}

OPTIONS = gqa_dense.OPTIONS | {
    "is_causal": "apply the causal mask per request, bottom-right aligned",
    "validate_inputs": "check the offsets on every call, at the cost of a host read",
}

SCORE_OPTIONS = (
    "bool is_causal=True, int window_size_left=-1, int window_size_right=-1, "
    "float? sm_scale=None, float? softcap=None, "
)
ROPE_OPTIONS = 'str pos_encoding_mode="none", int? rotary_dim=None, str rope_layout="neox", '

GQA_VARLEN_FWD = define(
    OpContract(
        name="gqa_varlen_fwd",
        op_class="GQAVarlenFwdOp",
        summary="Grouped-query attention over packed requests of any lengths.",
        signature=(
            "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_kv, "
            "Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None, "
            "Tensor? rope_cos=None, Tensor? rope_sin=None, Tensor? sinks=None, "
            + SCORE_OPTIONS
            + "ScalarType? out_dtype=None, "
            + ROPE_OPTIONS
            + 'bool validate_inputs=False, str target="") -> (Tensor, Tensor)'
        ),
        letters=LETTERS,
        tensors={
            "q": TensorSpec("T_q H D", HALF_OR_E4M3, "packed queries", differentiable=True),
            "k": TensorSpec("T_kv H_kv D", "q", "packed keys", differentiable=True),
            "v": TensorSpec("T_kv H_kv D", "q", "packed values", differentiable=True),
            "cu_seqlens_q": TensorSpec("B+1", INT32, "offsets of the requests in q"),
            "cu_seqlens_kv": TensorSpec("B+1", INT32, "offsets of the requests in k and v"),
            "q_scale": TensorSpec(None, FLOAT32, "[B, H_kv], with e4m3 inputs", optional=True),
            "k_scale": TensorSpec(None, FLOAT32, "[B, H_kv], with e4m3 inputs", optional=True),
            "v_scale": TensorSpec(None, FLOAT32, "[B, H_kv], with e4m3 inputs", optional=True),
            "rope_cos": TensorSpec(None, None, "[P, R/2], o's dtype, with RoPE", optional=True),
            "rope_sin": TensorSpec(None, None, "[P, R/2], o's dtype, with RoPE", optional=True),
            "sinks": TensorSpec(
                "H",
                FLOAT32,
                "logit per head, denominator only",
                optional=True,
                differentiable=True,
            ),
        },
        returns={
            "o": TensorSpec("T_q H D", HALF, "q's dtype, out_dtype for e4m3 inputs"),
            "lse": TensorSpec("H T_q", FLOAT32, "natural log over keys, sinks left out"),
        },
        options=OPTIONS,
        accuracy={
            "o": FORWARD,
            "o, fused RoPE": FORWARD_ROPE,
            "o, float8_e4m3fn": FP8,
            "o, float8_e4m3fn and RoPE": FP8_ROPE,
            "lse": LSE,
            "lse, fused RoPE": LSE_ROPE,
        },
        guard="cu_seqlens_q",
    )
)

GQA_VARLEN_BWD = define(
    OpContract(
        name="gqa_varlen_bwd",
        op_class="",
        summary="Gradient of packed variable-length grouped-query attention.",
        signature=(
            "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_kv, "
            "Tensor o, Tensor do, Tensor lse, Tensor? rope_cos=None, Tensor? rope_sin=None, "
            "Tensor? sinks=None, "
            + SCORE_OPTIONS
            + ROPE_OPTIONS
            + 'str target="") -> (Tensor, Tensor, Tensor, Tensor)'
        ),
        letters=LETTERS,
        tensors={
            "q": TensorSpec("T_q H D", HALF, "packed queries"),
            "k": TensorSpec("T_kv H_kv D", "q", "packed keys"),
            "v": TensorSpec("T_kv H_kv D", "q", "packed values"),
            "cu_seqlens_q": TensorSpec("B+1", INT32, "offsets of the requests in q"),
            "cu_seqlens_kv": TensorSpec("B+1", INT32, "offsets of the requests in k and v"),
            "o": TensorSpec("T_q H D", "q", "output of the forward"),
            "do": TensorSpec("T_q H D", "q", "gradient of o"),
            "lse": TensorSpec("H T_q", FLOAT32, "natural log-sum-exp of the forward"),
            "rope_cos": TensorSpec(None, None, "[P, R/2], q's dtype, with RoPE", optional=True),
            "rope_sin": TensorSpec(None, None, "[P, R/2], q's dtype, with RoPE", optional=True),
            "sinks": TensorSpec("H", FLOAT32, "logit per head of the forward", optional=True),
        },
        returns={
            "dq": TensorSpec("T_q H D", "q", "gradient of q"),
            "dk": TensorSpec("T_kv H_kv D", "q", "gradient of k, summed over its query heads"),
            "dv": TensorSpec("T_kv H_kv D", "q", "gradient of v, summed over its query heads"),
            "dsinks": TensorSpec(None, FLOAT32, "[H], empty without sinks"),
        },
        options={
            name: text
            for name, text in OPTIONS.items()
            if name not in ("out_dtype", "validate_inputs")
        },
        accuracy={"dq, dk, dv, dsinks": BACKWARD},
    )
)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    call = GQA_VARLEN_FWD.Call(*inputs)
    o, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*call[:11], o, lse)
    ctx.options = call[11:]


def backward(ctx: Any, do: Any, dlse: Any) -> tuple[Any, ...]:
    *tensors, o, lse = ctx.saved_tensors
    call = GQA_VARLEN_FWD.Call(*tensors, *ctx.options)
    if do is None:
        return (None,) * len(call)
    grads = refused_arguments(GQA_VARLEN_FWD, call, ctx.needs_input_grad, [do])
    if not grads.keys() & {"q", "k", "v"}:
        grads["q"], grads["k"], grads["v"], dsinks = GQA_VARLEN_BWD.op(
            call.q,
            call.k,
            call.v,
            call.cu_seqlens_q,
            call.cu_seqlens_kv,
            o,
            do,
            lse,
            call.rope_cos,
            call.rope_sin,
            call.sinks,
            call.is_causal,
            call.window_size_left,
            call.window_size_right,
            call.sm_scale,
            call.softcap,
            call.pos_encoding_mode,
            call.rotary_dim,
            call.rope_layout,
            call.target,
        )
        if call.sinks is not None:
            grads["sinks"] = dsinks
    return tuple(grads.get(name) for name in call._fields)
