"""The sentences every operator shares: one function per rule, each with one wording.

A sentence has three parts: which argument of which operator, what was required, what came.
Tensor rules (`check_*`) are called by `infer_*`. Parameter rules (named after the parameter) are
called by the Op class's constructor, where they also normalise, and again by `infer_*` for raw
dispatcher calls and loaded programs. Nothing here reads tensor contents.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from ops_registry.contract import E4M3, HALF, Axis, OpContract, TensorSpec

Dims = dict[str, Any]


def describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {shown(tensor.shape)}"


def shown(shape: Any) -> str:
    return "[" + ", ".join(str(extent) for extent in shape) + "]"


def names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def refuse(op: str, sentence: str) -> ValueError:
    return ValueError(f"{op}: {sentence}")


# ------------------------------------------------------------------------------ tensor rules


def check_tensors(contract: OpContract, call: Any) -> Dims:
    """Ranks, extents, dtypes and devices as the contract states them; returns the extents.

    Each letter is bound by the first tensor that carries it and checked on every later one.
    """
    dims: Dims = {}
    device = call[0].device
    for index, (name, spec) in enumerate(contract.tensors.items()):
        tensor = call[index]
        if tensor is None:
            if not spec.optional:
                raise refuse(contract.name, f"{name} must be a tensor, got None")
            continue
        if spec.axes is not None:
            _check_shape(contract, name, spec.axes, tensor, dims)
        if spec.dtypes is not None:
            _check_dtype(contract, call, name, spec, tensor)
        if tensor.device != device:
            lead = next(iter(contract.tensors))
            raise refuse(
                contract.name,
                f"{name} must be on the device of {lead}, {device}, got {tensor.device}",
            )
        if spec.mutated and not tensor.is_contiguous():
            raise refuse(
                contract.name,
                f"{name} is written in place and must be contiguous, got shape "
                f"{shown(tensor.shape)} with strides {shown(tensor.stride())}; pass the pool "
                "itself, a copy would lose the write",
            )
    return dims


def _check_shape(
    contract: OpContract, name: str, axes: tuple[Axis, ...], tensor: torch.Tensor, dims: Dims
) -> None:
    shape = tensor.shape
    if len(shape) != len(axes):
        letters = ", ".join(axis.text for axis in axes)
        raise refuse(contract.name, f"{name} must have shape [{letters}], got {shown(shape)}")
    for axis, extent in zip(axes, shape, strict=True):
        if axis.letter is None:
            continue
        known = axis.fixed if axis.fixed is not None else dims.get(axis.letter)
        if known is None:
            if axis.offset and extent < axis.offset:
                raise _wrong_shape(contract, name, axes, tensor, dims)
            dims[axis.letter] = extent - axis.offset if axis.offset else extent
        elif extent != (known + axis.offset if axis.offset else known):
            raise _wrong_shape(contract, name, axes, tensor, dims)


def _wrong_shape(
    contract: OpContract, name: str, axes: tuple[Axis, ...], tensor: torch.Tensor, dims: Dims
) -> ValueError:
    letters = dict.fromkeys(axis.letter for axis in axes if axis.letter in dims)
    known = ", ".join(f"{letter}={dims[letter]}" for letter in letters if letter)
    where = f" with {known}" if known else ""
    shape = ", ".join(axis.text for axis in axes)
    return refuse(
        contract.name, f"{name} must have shape [{shape}]{where}, got {shown(tensor.shape)}"
    )


def _check_dtype(
    contract: OpContract, call: Any, name: str, spec: TensorSpec, tensor: torch.Tensor
) -> None:
    if isinstance(spec.dtypes, str):
        wanted = getattr(call, spec.dtypes).dtype
        if tensor.dtype != wanted:
            raise refuse(
                contract.name,
                f"{name} must have the dtype of {spec.dtypes}, {names((wanted,))}, "
                f"got {names((tensor.dtype,))}",
            )
    elif tensor.dtype not in (spec.dtypes or ()):
        raise refuse(
            contract.name,
            f"{name} must be {names(spec.dtypes or ())}, got {names((tensor.dtype,))}",
        )


def check_extent(op: str, name: str, what: str, extent: Any) -> None:
    """An extent that must not be zero, such as the head dim."""
    if extent == 0:
        raise refuse(op, f"{name} must have {what} > 0, got 0")


def check_groups(op: str, heads: Any, heads_kv: Any, kv_name: str = "k") -> None:
    """V4: the query heads split evenly over the KV heads."""
    if heads_kv == 0 or heads % heads_kv != 0:
        raise refuse(
            op,
            f"{kv_name} must have a number of heads that divides the {heads} query heads, "
            f"got {heads_kv}",
        )


def check_multiple(op: str, name: str, extent: Any, what: str, divisor: int) -> None:
    """A flat pool holds whole pages."""
    if extent % divisor != 0:
        raise refuse(op, f"{name} must have a multiple of {what}={divisor} rows, got {extent}")


def check_same_shape(op: str, name: str, shape: Any, other: str, wanted: Any) -> None:
    if tuple(shape) != tuple(wanted):
        raise refuse(
            op, f"{name} must have the shape of {other}, {shown(wanted)}, got {shown(shape)}"
        )


def output_dtype(op: str, q: torch.Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """V12 and V13: the dtype of o for this query and `out_dtype`."""
    checked_out_dtype(op, out_dtype)
    if q.dtype == E4M3:
        if out_dtype is None:
            raise refuse(
                op, "out_dtype must name float16 or bfloat16 for float8_e4m3fn inputs, got None"
            )
        return out_dtype
    if out_dtype is not None and out_dtype != q.dtype:
        raise refuse(
            op,
            f"out_dtype must be None or the dtype of q, {names((q.dtype,))}, for 16-bit inputs, "
            f"got {names((out_dtype,))}",
        )
    return q.dtype


def check_scales(
    op: str, call: Any, wanted: dict[str, bool], shape: tuple[Any, ...], reason: str
) -> None:
    """V11: each scale is present exactly where wanted, float32, of shape [B, H_kv].

    reason: what decides, such as "float8_e4m3fn q, k and v".
    """
    for name, needed in wanted.items():
        scale = getattr(call, name)
        if scale is None and needed:
            raise refuse(op, f"{name} must be given for {reason}, got None")
        if scale is not None and not needed:
            raise refuse(op, f"{name} must be None without {reason}, got {describe(scale)}")
        if scale is None:
            continue
        if scale.dtype != torch.float32 or scale.dim() != len(shape):
            raise refuse(op, f"{name} must be float32 {shown(shape)}, got {describe(scale)}")
        if any(a != b for a, b in zip(scale.shape, shape, strict=True)):
            raise refuse(op, f"{name} must be float32 {shown(shape)}, got {describe(scale)}")


def check_rope(op: str, call: Any, head_dim: Any, dtype: torch.dtype, rows: Any = None) -> int:
    """V9b and V10: the tables of a fused-RoPE call; returns the rotated width R, 0 without RoPE.

    rows: positions the tables must cover, where shapes alone tell (dense).
    """
    cos, sin = call.rope_cos, call.rope_sin
    if call.pos_encoding_mode == "none":
        for name, table in (("rope_cos", cos), ("rope_sin", sin)):
            if table is not None:
                raise refuse(
                    op, f"{name} must be None with pos_encoding_mode='none', got {describe(table)}"
                )
        return 0
    width = checked_rotary_width(op, call.rotary_dim, head_dim)
    for name, table in (("rope_cos", cos), ("rope_sin", sin)):
        if table is None:
            raise refuse(op, f"{name} must be given with pos_encoding_mode='rope', got None")
        if table.dim() != 2 or table.shape[1] != width // 2:
            raise refuse(
                op,
                f"{name} must have shape [P, R/2] with R/2={width // 2}, got {shown(table.shape)}",
            )
        if table.dtype != dtype:
            raise refuse(
                op,
                f"{name} must have the output dtype {names((dtype,))}, "
                f"got {names((table.dtype,))}",
            )
    if sin.shape[0] != cos.shape[0]:
        raise refuse(
            op,
            f"rope_sin must have the shape of rope_cos, {shown(cos.shape)}, "
            f"got {shown(sin.shape)}",
        )
    if rows is not None and cos.shape[0] < rows:
        raise refuse(op, f"rope_cos must have at least S_kv={rows} rows, got {cos.shape[0]}")
    return width


def checked_rotary_width(op: str, rotary_dim: int | None, head_dim: Any) -> int:
    """The rotated width R of a head: rotary_dim, or the whole even head dim."""
    if rotary_dim is None:
        if head_dim % 2 != 0:
            raise refuse(op, f"rotary_dim must be given for an odd head dim, got D={head_dim}")
        return head_dim
    if rotary_dim > head_dim:
        raise refuse(op, f"rotary_dim must be at most the head dim {head_dim}, got {rotary_dim}")
    return rotary_dim


# --------------------------------------------------------------------------- parameter rules


def is_bool(value: Any) -> bool:
    """A bool of Python, numpy or torch, which those take for the numbers 0 and 1."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def integer(op: str, name: str, value: Any) -> int:
    """A Python int from any integer type; bools and everything else are a TypeError."""
    if is_bool(value):
        raise TypeError(f"{op}: {name} must be an integer, got a bool")
    try:
        found = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{op}: {name} must be an integer, got {type(value).__name__} {value!r}"
        ) from None
    if not -(2**63) <= found < 2**63:
        raise refuse(
            op, f"{name} must be an integer of 64 bits, got one of {found.bit_length() + 1}"
        )
    return found


def boolean(op: str, name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be a bool, got {type(value).__name__} {value!r}")
    return value


def number(op: str, name: str, value: Any) -> float:
    """A Python float from any real number type; bools and strings are a TypeError."""
    if not is_bool(value) and not isinstance(value, (str, bytes)):
        try:
            return float(value)
        except OverflowError:  # an integer beyond every float: no rule takes it for finite
            return math.inf if value > 0 else -math.inf
        except (TypeError, ValueError):
            pass
    raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__} {value!r}")


def positive(op: str, name: str, value: int) -> None:
    """V16."""
    if value <= 0:
        raise refuse(op, f"{name} must be a positive integer, got {value}")


def at_least(op: str, name: str, value: int, low: int) -> None:
    if value < low:
        raise refuse(op, f"{name} must be at least {low}, got {value}")


def sm_scale(op: str, value: float | None, name: str = "sm_scale") -> None:
    """V5."""
    if value is not None and not (math.isfinite(value) and value > 0):
        raise refuse(op, f"{name} must be finite and > 0, got {value}")
    float32(op, name, value)


def softcap(op: str, value: float | None) -> None:
    """V6: None and 0 both mean off."""
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise refuse(op, f"softcap must be None, 0 or a finite number > 0, got {value}")
    float32(op, "softcap", value)


def float32(op: str, name: str, value: float | None) -> None:
    """What scores are multiplied by is finite where they live."""
    largest = torch.finfo(torch.float32).max
    if value is not None and value > largest:
        raise refuse(op, f"{name} must be at most {largest}, the largest float32, got {value}")


def window(op: str, left: int, right: int) -> None:
    """V7."""
    for name, value in (("window_size_left", left), ("window_size_right", right)):
        if value < -1:
            raise refuse(op, f"{name} must be -1 (unlimited) or >= 0, got {value}")


def rope(op: str, mode: str, rotary_dim: int | None, layout: str) -> None:
    """V8 and V9."""
    if mode not in ("none", "rope"):
        raise refuse(op, f"pos_encoding_mode must be 'none' or 'rope', got {mode!r}")
    if layout not in ("neox", "interleaved"):
        raise refuse(op, f"rope_layout must be 'neox' or 'interleaved', got {layout!r}")
    if rotary_dim is not None:
        if mode != "rope":
            raise refuse(
                op, f"rotary_dim must be None with pos_encoding_mode='none', got {rotary_dim}"
            )
        even_width(op, rotary_dim)


def even_width(op: str, rotary_dim: int) -> None:
    if rotary_dim <= 0 or rotary_dim % 2:
        raise refuse(op, f"rotary_dim must be positive and even, got {rotary_dim}")


def rope_base(op: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise refuse(op, f"rope_base must be finite and > 0, got {value}")


def checked_out_dtype(op: str, dtype: torch.dtype | None) -> None:
    """V13, the part known at construction."""
    if dtype is not None and dtype not in HALF:
        raise refuse(op, f"out_dtype must be None, float16 or bfloat16, got {dtype}")


def scores(op: str, call: Any) -> None:
    """V5 to V9, for operators with windows, softcap and caller-given rotary tables."""
    sm_scale(op, call.sm_scale)
    softcap(op, call.softcap)
    window(op, call.window_size_left, call.window_size_right)
    rope(op, call.pos_encoding_mode, call.rotary_dim, call.rope_layout)
