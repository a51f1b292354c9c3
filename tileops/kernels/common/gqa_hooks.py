"""How the options of a GQA call enter the blockwise engine: rotation and FP8 scales.

Scales are constant over a head, so they commute with the rotation and the products: those of q
and k go into the query block, that of v into the finished rows.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tileops.kernels.common.blockwise import Inputs, Rows
from tileops.kernels.common.rope import rope_rows, rotate


@dataclass(frozen=True)
class Hooks:
    """Callbacks for `attend` and the tensors they read."""

    inputs: Inputs
    query: Rows | None = None
    key: Rows | None = None
    finish: Rows | None = None


def hooks_of(call: Any) -> Hooks:
    """From a call with rope_cos, rope_sin, rope_layout and (forward) q_scale, k_scale, v_scale."""
    inputs: Inputs = {}
    rope = call.pos_encoding_mode == "rope"
    layout = call.rope_layout
    if rope:
        inputs |= {"cos": call.rope_cos, "sin": call.rope_sin}
    scales = {
        name: scale
        for name in ("q_scale", "k_scale", "v_scale")
        if (scale := getattr(call, name, None)) is not None
    }
    inputs |= scales
    folded = [name for name in ("q_scale", "k_scale") if name in scales]

    def turn(x: Inputs, b: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        cos, sin = rope_rows(x["cos"], positions), rope_rows(x["sin"], positions)
        return rotate(rows, cos, sin, layout)

    def query(x: Inputs, b: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        for name in folded:
            rows = rows * per_head(x[name], b, rows)
        return turn(x, b, positions, rows) if rope else rows

    def finish(x: Inputs, b: Tensor, local: Tensor, rows: Tensor) -> Tensor:
        return rows * per_head(x["v_scale"], b, rows)

    return Hooks(
        inputs,
        query if folded or rope else None,
        turn if rope else None,
        finish if "v_scale" in scales else None,
    )


def per_head(scale: Tensor, b: Tensor, rows: Tensor) -> Tensor:
    """[B, H_kv] or [1] -> [H, 1] (or [1]) for the rows [n, H, D] of request b."""
    if scale.dim() == 1:
        return scale
    own = scale.index_select(0, b)[0]
    group = rows.shape[1] // own.shape[0]
    return own[:, None].expand(-1, group).reshape(-1, 1)


def score_scale(call: Any) -> float:
    """sm_scale, or D ** -0.5."""
    return call.q.shape[-1] ** -0.5 if call.sm_scale is None else call.sm_scale


def softcap_of(call: Any) -> float:
    """The cap, 0.0 for none."""
    return call.softcap or 0.0
