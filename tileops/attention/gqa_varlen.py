"""Packed variable-length grouped-query attention."""

from __future__ import annotations

from typing import Any

import torch

from meta_kernels.attention.gqa_varlen import (
    contents_gqa_varlen_fwd,
    infer_gqa_varlen_bwd,
    infer_gqa_varlen_fwd,
)
from ops_registry.attention.gqa_varlen import (
    GQA_VARLEN_BWD,
    GQA_VARLEN_FWD,
    backward,
    setup_context,
)
from ops_registry.contract import register
from ops_registry.targets import Target
from tileops.op import Op, cast_to_autocast

KERNELS = ("tilelang", "triton", "cpu", "reference")
PACKAGE = "tileops.kernels.attention.gqa_varlen"

register(
    GQA_VARLEN_FWD,
    infer_gqa_varlen_fwd,
    KERNELS,
    package=PACKAGE,
    backward=backward,
    setup_context=setup_context,
    autocast=cast_to_autocast,
    contents=contents_gqa_varlen_fwd,
)
# TileLang has no backward.
register(GQA_VARLEN_BWD, infer_gqa_varlen_bwd, KERNELS[1:], package=PACKAGE)


class GQAVarlenFwdOp(Op):
    r"""Grouped-query attention over requests of any lengths, packed one after another.

    Request b owns the query rows [cu_seqlens_q[b], cu_seqlens_q[b+1]) and the key rows
    [cu_seqlens_kv[b], cu_seqlens_kv[b+1]), and is dense attention on them (see
    :class:`GQADenseFwdOp`) with :math:`S_q`, :math:`S_{kv}` its lengths; requests never see each
    other. A sink adds :math:`\exp(sink_h)` to the softmax denominator of head h and nothing to
    the numerator: it is neither scaled nor capped; -inf is no sink, +inf makes the head's rows
    zero. A row that sees no key is zero, as are query rows past the last offset. Differentiable
    in q, k, v and sinks for 16-bit inputs.

    Args:
        is_causal: apply the causal mask per request, bottom-right aligned.
        window_size_left: keys admitted left of a row's position; -1 is unlimited.
        window_size_right: keys admitted right of it; -1 is unlimited.
        sm_scale: score scale > 0, None is D ** -0.5.
        softcap: cap c >= 0 on the scaled scores; None or 0 is off.
        out_dtype: float16 or bfloat16 for float8_e4m3fn inputs; otherwise None or q's dtype.
        pos_encoding_mode: "none", or "rope" to rotate by given tables, positions per request.
        rotary_dim: rotated width R, even and at most D; None is D. Only with "rope".
        rope_layout: "neox" (split halves) or "interleaved" (adjacent pairs).
        validate_inputs: check the offsets on every call. Reads them on the host; not inside
            CUDA graph capture. In compiled and packaged programs the checks become asserts.
        target: a target name, BUILTIN, or None to decide from the device of the inputs.

    Raises:
        ValueError: a parameter is outside its range.
        TypeError: a parameter has the wrong type.
    """

    contract = GQA_VARLEN_FWD
    PARAMETERS = (
        "is_causal",
        "window_size_left",
        "window_size_right",
        "sm_scale",
        "softcap",
        "out_dtype",
        "pos_encoding_mode",
        "rotary_dim",
        "rope_layout",
        "validate_inputs",
    )

    def __init__(
        self,
        is_causal: bool = True,
        window_size_left: int = -1,
        window_size_right: int = -1,
        sm_scale: float | None = None,
        softcap: float | None = None,
        out_dtype: torch.dtype | None = None,
        pos_encoding_mode: str = "none",
        rotary_dim: int | None = None,
        rope_layout: str = "neox",
        validate_inputs: bool = False,
        *,
        target: Target = None,
    ) -> None:
        super().__init__(target)
        self._set_score_options(
            is_causal,
            window_size_left,
            window_size_right,
            sm_scale,
            softcap,
            pos_encoding_mode,
            rotary_dim,
            rope_layout,
            out_dtype,
        )
        self.validate_inputs = self._boolean("validate_inputs", validate_inputs)

    def options(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.PARAMETERS)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_kv: torch.Tensor,
        q_scale: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        rope_cos: torch.Tensor | None = None,
        rope_sin: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend each request's queries to its keys.

        Args:
            q: packed queries [T_q, H, D]; float16, bfloat16 or float8_e4m3fn, any strides.
            k: packed keys [T_kv, H_kv, D], q's dtype; H_kv divides H.
            v: packed values [T_kv, H_kv, D], q's dtype.
            cu_seqlens_q: int32 [B + 1], offsets of the requests in q: 0, non-decreasing, T_q.
            cu_seqlens_kv: int32 [B + 1], offsets of the requests in k and v.
            q_scale: float32 [B, H_kv], dequantization scale of an e4m3 q; the three scales come
                together with e4m3 inputs and not otherwise.
            k_scale: float32 [B, H_kv], scale of k.
            v_scale: float32 [B, H_kv], scale of v.
            rope_cos: cosines [P, R / 2] by position in the request, in o's dtype; both tables
                come together with pos_encoding_mode="rope" and not otherwise.
            rope_sin: sines, like rope_cos.
            sinks: float32 [H], natural-log logit of each head's sink.

        Returns:
            o [T_q, H, D], contiguous; out_dtype for e4m3 inputs, otherwise q's dtype.

        Raises:
            ValueError: shapes, dtypes, devices or optional inputs break the contract, no kernel
                of the target serves the call, or (validate_inputs) offsets are malformed.
            TypeError: an argument is not a tensor.
        """
        return self.call(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_kv,
            q_scale,
            k_scale,
            v_scale,
            rope_cos,
            rope_sin,
            sinks,
        )[0]
