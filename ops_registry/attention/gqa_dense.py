"""Contracts of dense grouped-query attention, forward and backward, and their autograd."""

from typing import Any

from ops_registry.accuracy import BACKWARD, FORWARD, FORWARD_ROPE, FP8, FP8_ROPE, LSE, LSE_ROPE
from ops_registry.autograd import refused_arguments
from ops_registry.contract import (
    FLOAT32,
    HALF,
    HALF_OR_E4M3,
    OpContract,
    TensorSpec,
    define,
)

LETTERS = {
    "B": "batch entries",
    "S_q": "query length",
    "S_kv": "key/value length",
    "H": "query heads, H = g * H_kv",
    "H_kv": "key/value heads",
    "D": "head dim",
    "P": "rows of the rotary tables, P >= S_kv",
    "R": "rotated width of a head, rotary_dim or D",
}

OPTIONS = {
    "is_causal": "apply the causal mask, bottom-right aligned: p_i = i + S_kv - S_q",
    "window_size_left": "keys admitted left of p_i, -1 is unlimited",
    "window_size_right": "keys admitted right of p_i, -1 is unlimited",
    "sm_scale": "score scale, None is D ** -0.5",
    "softcap": "cap c of c * tanh(score / c), None or 0 is off",
    "pos_encoding_mode": '"none", or "rope" to rotate q and k with the given tables',
    "rotary_dim": "rotated width R of each head, None is D",
    "rope_layout": '"neox" rotates split halves, "interleaved" adjacent pairs',
    "out_dtype": "dtype of o for float8_e4m3fn inputs, float16 or bfloat16",
    "target": "target name, empty for the device's choice",
}

GQA_DENSE_FWD = define(
    OpContract(
        name="gqa_dense_fwd",
        op_class="GQADenseFwdOp",
        summary="Grouped-query attention over dense q, k and v.",
        signature=(
            "(Tensor q, Tensor k, Tensor v, Tensor? q_scale=None, Tensor? k_scale=None, "
            "Tensor? v_scale=None, Tensor? rope_cos=None, Tensor? rope_sin=None, "
            "bool is_causal=True, int window_size_left=-1, int window_size_right=-1, "
            'float? sm_scale=None, float? softcap=None, str pos_encoding_mode="none", '
            'int? rotary_dim=None, str rope_layout="neox", ScalarType? out_dtype=None, '
            'str target="") -> (Tensor, Tensor)'
        ),
        letters=LETTERS,
        tensors={
            "q": TensorSpec("B S_q H D", HALF_OR_E4M3, "queries", differentiable=True),
            "k": TensorSpec("B S_kv H_kv D", "q", "keys", differentiable=True),
            "v": TensorSpec("B S_kv H_kv D", "q", "values", differentiable=True),
            "q_scale": TensorSpec(None, FLOAT32, "[B, H_kv], with e4m3 inputs", optional=True),
            "k_scale": TensorSpec(None, FLOAT32, "[B, H_kv], with e4m3 inputs", optional=True),
            "v_scale": TensorSpec(None, FLOAT32, "[B, H_kv], with e4m3 inputs", optional=True),
            "rope_cos": TensorSpec(None, None, "[P, R/2], o's dtype, with RoPE", optional=True),
            "rope_sin": TensorSpec(None, None, "[P, R/2], o's dtype, with RoPE", optional=True),
        },
        returns={
            "o": TensorSpec("B S_q H D", HALF, "q's dtype, out_dtype for e4m3 inputs"),
            "lse": TensorSpec("B H S_q", FLOAT32, "natural log, -inf where no key is seen"),
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
    )
)

GQA_DENSE_BWD = define(
    OpContract(
        name="gqa_dense_bwd",
        op_class="GQABwdOp",
        summary="Gradient of dense grouped-query attention.",
        signature=(
            "(Tensor q, Tensor k, Tensor v, Tensor o, Tensor do, Tensor lse, "
            "Tensor? rope_cos=None, Tensor? rope_sin=None, "
            "bool is_causal=True, int window_size_left=-1, int window_size_right=-1, "
            'float? sm_scale=None, float? softcap=None, str pos_encoding_mode="none", '
            'int? rotary_dim=None, str rope_layout="neox", str target="") '
            "-> (Tensor, Tensor, Tensor)"
        ),
        letters=LETTERS,
        tensors={
            "q": TensorSpec("B S_q H D", HALF, "queries"),
            "k": TensorSpec("B S_kv H_kv D", "q", "keys"),
            "v": TensorSpec("B S_kv H_kv D", "q", "values"),
            "o": TensorSpec("B S_q H D", "q", "output of the forward"),
            "do": TensorSpec("B S_q H D", "q", "gradient of o"),
            "lse": TensorSpec("B H S_q", FLOAT32, "natural log-sum-exp of the forward"),
            "rope_cos": TensorSpec(None, None, "[P, R/2], q's dtype, with RoPE", optional=True),
            "rope_sin": TensorSpec(None, None, "[P, R/2], q's dtype, with RoPE", optional=True),
        },
        returns={
            "dq": TensorSpec("B S_q H D", "q", "gradient of q"),
            "dk": TensorSpec("B S_kv H_kv D", "q", "gradient of k, summed over its query heads"),
            "dv": TensorSpec("B S_kv H_kv D", "q", "gradient of v, summed over its query heads"),
        },
        options={name: text for name, text in OPTIONS.items() if name != "out_dtype"},
        accuracy={"dq, dk, dv": BACKWARD},
    )
)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    call = GQA_DENSE_FWD.Call(*inputs)
    o, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*call[:8], o, lse)
    ctx.options = call[8:]


def backward(ctx: Any, do: Any, dlse: Any) -> tuple[Any, ...]:
    *tensors, o, lse = ctx.saved_tensors
    call = GQA_DENSE_FWD.Call(*tensors, *ctx.options)
    if do is None:
        return (None,) * len(call)
    grads = refused_arguments(GQA_DENSE_FWD, call, ctx.needs_input_grad, [do])
    if not grads.keys() & {"q", "k", "v"}:
        grads["q"], grads["k"], grads["v"] = GQA_DENSE_BWD.op(
            call.q,
            call.k,
            call.v,
            o,
            do,
            lse,
            call.rope_cos,
            call.rope_sin,
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
    return tuple(grads.get(name) for name in call._fields)
