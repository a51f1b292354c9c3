"""ONNX models of modules that hold Op classes.

    torch.onnx.export(
        module, args, dynamo=True, opset_version=23,
        custom_translation_table=tileops.onnx.translation_table(23),
    )

`gqa_dense_fwd` becomes the ONNX operator Attention with an explicit mask, because the causal
mask of Attention is aligned top-left and that of the package bottom-right. Everything else
refuses in a sentence: a model would need operators that ONNX does not have.

Importing this module imports onnxscript; nothing else of the package does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ops_registry.attention.gqa_dense import GQA_DENSE_FWD
from ops_registry.contract import CONTRACTS

try:
    from onnxscript import ir, opset23
except ImportError as error:
    raise ImportError("tileops.onnx needs onnxscript: pip install 'tileops[onnx]'") from error

OPSETS = (23, 24, 25)
HALF = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}


def translation_table(opset: int = 23) -> dict[Any, Callable[..., Any]]:
    """The `custom_translation_table` of `torch.onnx.export` for every operator.

    Args:
        opset: the `opset_version` of the export; Attention exists from 23 on.
    """
    if opset not in OPSETS:
        raise ValueError(
            f"opset must be one of {', '.join(map(str, OPSETS))}: the Attention operator of ONNX "
            f"came with 23; got {opset}"
        )
    table: dict[Any, Callable[..., Any]] = {}
    for contract in CONTRACTS.values():
        # In an ONNX export a mutating operator is its functional twin and copies.
        op = contract.functional if contract.mutated else contract.op
        table[op] = _refusal(contract.name)
    table[GQA_DENSE_FWD.op] = gqa_dense_fwd
    return table


def no_translation(op: str, why: str) -> NotImplementedError:
    return NotImplementedError(
        f"{op}: {why}; export the module with torch.export and package it with AOTInductor, or "
        "keep this operator outside the exported module"
    )


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise no_translation(name, "has no ONNX translation")

    return refuse


# The functions below build ONNX nodes: their arguments are values of the graph.

op = opset23


def gqa_dense_fwd(
    q: Any,
    k: Any,
    v: Any,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    rope_cos: Any = None,
    rope_sin: Any = None,
    is_causal: bool = True,
    window_size_left: int = -1,
    window_size_right: int = -1,
    sm_scale: float | None = None,
    softcap: float | None = None,
    pos_encoding_mode: str = "none",
    rotary_dim: int | None = None,
    rope_layout: str = "neox",
    out_dtype: int | None = None,
    target: str = "",
) -> tuple[Any, Any]:
    """o [B, S_q, H, D] in q's dtype and lse [B, H, S_q] float32, computed in float32."""
    name = GQA_DENSE_FWD.name
    if q.dtype not in HALF:
        raise no_translation(name, f"has no ONNX translation for {q.dtype.name} inputs")
    heads, dim = q.shape[2], q.shape[3]
    scale = float(dim**-0.5 if sm_scale is None else sm_scale)
    cap = float(softcap or 0.0)
    queries, keys, values = (_heads_first(x) for x in (q, k, v))
    s_q, s_kv = op.Shape(q, start=1, end=2), op.Shape(k, start=1, end=2)
    key = _range(s_kv)
    position = op.Add(_range(s_q), op.Sub(s_kv, s_q))
    if pos_encoding_mode == "rope":
        width, interleaved = rotary_dim or 0, int(rope_layout == "interleaved")
        queries = _rotate(queries, position, rope_cos, rope_sin, width, interleaved)
        keys = _rotate(keys, key, rope_cos, rope_sin, width, interleaved)
    mask = _visible(position, key, is_causal, window_size_left, window_size_right)
    o, _, _, _ = op.Attention(queries, keys, values, mask, scale=scale, softcap=cap)
    if mask is not None:  # a row that sees no key is zero
        seen = op.ReduceMax(op.Cast(mask, to=ir.DataType.FLOAT), op.Constant(value_ints=[-1]))
        o = op.Where(op.Cast(seen, to=ir.DataType.BOOL), o, op.Constant(value_float=0.0))
    o = op.Cast(op.Transpose(o, perm=[0, 2, 1, 3]), to=q.dtype)
    return o, _log_sum_exp(queries, keys, mask, heads // k.shape[2], scale, cap)


def _heads_first(x: Any) -> Any:
    """[B, S, H, D] -> float32 [B, H, S, D]."""
    return op.Transpose(op.Cast(x, to=ir.DataType.FLOAT), perm=[0, 2, 1, 3])


def _range(extent: Any) -> Any:
    """int64 [extent] 0, 1, ..., of an extent given as a vector of one element."""
    zero = op.Constant(value_int=0)
    return op.Range(zero, op.Squeeze(extent), op.Constant(value_int=1))


def _visible(position: Any, key: Any, is_causal: bool, left: int, right: int) -> Any:
    """bool [S_q, S_kv], or None where every key is visible."""
    row = op.Unsqueeze(position, op.Constant(value_ints=[1]))
    rules = []
    if is_causal:
        rules.append(op.LessOrEqual(key, row))
    if left >= 0:
        rules.append(op.GreaterOrEqual(key, op.Sub(row, op.Constant(value_int=left))))
    if right >= 0:
        rules.append(op.LessOrEqual(key, op.Add(row, op.Constant(value_int=right))))
    if not rules:
        return None
    mask = rules[0]
    for rule in rules[1:]:
        mask = op.And(mask, rule)
    return mask


def _rotate(x: Any, position: Any, cos: Any, sin: Any, width: int, interleaved: int) -> Any:
    """x [B, H, S, D] rotated at the positions [S] by the tables [P, R/2]."""
    batch = op.Shape(x, start=0, end=1)
    rows = op.Expand(position, op.Concat(batch, op.Shape(position), axis=0))
    cos, sin = (op.Cast(table, to=ir.DataType.FLOAT) for table in (cos, sin))
    return op.RotaryEmbedding(
        x, cos, sin, rows, interleaved=interleaved, rotary_embedding_dim=width
    )


def _log_sum_exp(q: Any, k: Any, mask: Any, group: int, scale: float, cap: float) -> Any:
    """float32 [B, H, S_q]; exporters drop these nodes where the module does not use them."""
    b, h, s = (op.Shape(q, start=i, end=i + 1) for i in range(3))
    grouped = op.Concat(
        b,
        op.Shape(k, start=1, end=2),
        op.Constant(value_ints=[group, -1]),
        op.Shape(q, start=3, end=4),
        axis=0,
    )
    scores = op.MatMul(
        op.Reshape(q, grouped),
        op.Unsqueeze(op.Transpose(k, perm=[0, 1, 3, 2]), op.Constant(value_ints=[2])),
    )
    scores = op.Mul(scores, op.Constant(value_float=scale))
    if cap:
        c = op.Constant(value_float=cap)
        scores = op.Mul(op.Tanh(op.Div(scores, c)), c)
    if mask is not None:
        scores = op.Where(mask, scores, op.Constant(value_float=float("-inf")))
    last, lowest = op.Constant(value_ints=[-1]), op.Constant(value_float=-3.0e38)
    top = op.Max(op.ReduceMax(scores, last), lowest)  # finite where no key is seen
    total = op.ReduceSum(op.Exp(op.Sub(scores, top)), last)
    lse = op.Add(op.Log(total), top)
    return op.Reshape(lse, op.Concat(b, h, s, axis=0))
