"""Dense grouped-query attention and its explicit gradient."""

from __future__ import annotations

from typing import Any

import torch

from meta_kernels import checks
from meta_kernels.attention.gqa_dense import infer_gqa_dense_bwd, infer_gqa_dense_fwd
from ops_registry.attention.gqa_dense import (
    GQA_DENSE_BWD,
    GQA_DENSE_FWD,
    backward,
    setup_context,
)
from ops_registry.contract import register
from ops_registry.targets import Target
from tileops.op import Op, cast_to_autocast

KERNELS = ("tilelang", "triton", "cpu", "reference")
PACKAGE = "tileops.kernels.attention.gqa_dense"

register(
    GQA_DENSE_FWD,
    infer_gqa_dense_fwd,
    KERNELS,
    package=PACKAGE,
    backward=backward,
    setup_context=setup_context,
    autocast=cast_to_autocast,
)
# TileLang has no backward.
register(GQA_DENSE_BWD, infer_gqa_dense_bwd, KERNELS[1:], package=PACKAGE)


class GQADenseFwdOp(Op):
    r"""Grouped-query attention over dense q, k and v.

    With :math:`p_i = i + S_{kv} - S_q` the position of query row i in key coordinates and
    :math:`r = \lfloor h / g \rfloor` the KV head of query head h,

    .. math::

        Z_{h,i,j} = \alpha \langle q_{i,h}, k_{j,r} \rangle, \qquad
        o_{i,h} = \sum_j \operatorname{softmax}_j(L_{h,i})_j \, v_{j,r}

    where L is Z, capped as :math:`c \tanh(Z / c)` with a softcap c, on the visible keys
    :math:`j \le p_i` (causal), :math:`p_i - w_L \le j \le p_i + w_R` (windows), and minus
    infinity elsewhere. Accumulation is float32. A row that sees no key is zero. Differentiable
    in q, k and v for 16-bit inputs. Source: the FlashAttention formulation of Vaswani et al.
    (2017) with the grouped heads of Ainslie et al. (2023).

    Args:
        is_causal: apply the causal mask, bottom-right aligned; then S_q <= S_kv.
        window_size_left: keys admitted left of p_i, own position excluded; -1 is unlimited.
        window_size_right: keys admitted right of p_i; -1 is unlimited.
        sm_scale: score scale alpha > 0, None is D ** -0.5.
        softcap: cap c >= 0 on the scaled scores; None or 0 is off.
        pos_encoding_mode: "none", or "rope" to rotate q at p_i and k at j by given tables.
        rotary_dim: rotated width R, even and at most D; None is D. Only with "rope".
        rope_layout: "neox" (split halves) or "interleaved" (adjacent pairs).
        out_dtype: float16 or bfloat16 for float8_e4m3fn inputs; otherwise None or q's dtype.
        target: a target name, BUILTIN, or None to decide from the device of the inputs.

    Raises:
        ValueError: a parameter is outside its range.
        TypeError: a parameter has the wrong type.
    """

    contract = GQA_DENSE_FWD
    PARAMETERS = (
        "is_causal",
        "window_size_left",
        "window_size_right",
        "sm_scale",
        "softcap",
        "pos_encoding_mode",
        "rotary_dim",
        "rope_layout",
        "out_dtype",
    )

    def __init__(
        self,
        is_causal: bool = True,
        window_size_left: int = -1,
        window_size_right: int = -1,
        sm_scale: float | None = None,
        softcap: float | None = None,
        pos_encoding_mode: str = "none",
        rotary_dim: int | None = None,
        rope_layout: str = "neox",
        out_dtype: torch.dtype | None = None,
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

    def options(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.PARAMETERS)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_scale: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        rope_cos: torch.Tensor | None = None,
        rope_sin: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend q to k and v.

        Args:
            q: queries [B, S_q, H, D]; float16, bfloat16 or float8_e4m3fn, any strides.
            k: keys [B, S_kv, H_kv, D], q's dtype; H_kv divides H.
            v: values [B, S_kv, H_kv, D], q's dtype.
            q_scale: float32 [B, H_kv], dequantization scale of an e4m3 q; the three scales come
                together with e4m3 inputs and not otherwise.
            k_scale: float32 [B, H_kv], scale of k.
            v_scale: float32 [B, H_kv], scale of v.
            rope_cos: cosines [P, R / 2] by key position, P >= S_kv, in o's dtype; both tables
                come together with pos_encoding_mode="rope" and not otherwise.
            rope_sin: sines, like rope_cos.

        Returns:
            o [B, S_q, H, D], contiguous; out_dtype for e4m3 inputs, otherwise q's dtype.

        Raises:
            ValueError: shapes, dtypes, devices or optional inputs break the contract, or no
                kernel of the target serves the call.
            TypeError: an argument is not a tensor.
        """
        return self.call(q, k, v, q_scale, k_scale, v_scale, rope_cos, rope_sin)[0]


class GQABwdOp(Op):
    r"""Gradient of square dense grouped-query attention from its saved log-sum-exp.

    With :math:`\alpha = D^{-1/2}`, :math:`P_{ij} = \exp(\alpha \langle q_i, k_j \rangle - lse_i)`
    on visible keys and :math:`\delta_i = \langle o_i, do_i \rangle`,

    .. math::

        dS_{ij} = P_{ij} (\langle do_i, v_j \rangle - \delta_i), \quad
        dq_i = \alpha \sum_j dS_{ij} k_j, \quad
        dk_j = \alpha \sum_{h,i} dS_{ij} q_i, \quad
        dv_j = \sum_{h,i} P_{ij} do_i

    where the sums over h run over the query heads of a KV head, in float32, rounded once. Rows
    whose lse is minus infinity contribute nothing and get a zero dq. Source: the recomputation
    of Dao et al., FlashAttention (2022).

    Args:
        is_causal: the mask of the forward.
        target: a target name, BUILTIN, or None to decide from the device of the inputs.
    """

    contract = GQA_DENSE_BWD
    PARAMETERS = ("is_causal",)

    def __init__(self, is_causal: bool = True, *, target: Target = None) -> None:
        super().__init__(target)
        self.is_causal = self._boolean("is_causal", is_causal)

    def options(self) -> tuple[Any, ...]:
        return (self.is_causal, -1, -1, None, None, "none", None, "neox")

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        do: torch.Tensor,
        lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute dq, dk and dv.

        Args:
            q: queries [B, S, H, D], float16 or bfloat16.
            k: keys [B, S, H_kv, D], q's dtype.
            v: values [B, S, H_kv, D], q's dtype.
            o: output of the forward [B, S, H, D], q's dtype.
            do: gradient of o [B, S, H, D], q's dtype, any strides.
            lse: float32 [B, H, S], natural log of each row's sum of exp of scaled scores.

        Returns:
            dq [B, S, H, D], dk [B, S, H_kv, D], dv [B, S, H_kv, D], in q's dtype.

        Raises:
            ValueError: shapes, dtypes or devices break the contract, or no kernel serves.
            TypeError: an argument is not a tensor.
        """
        arguments = self.bound(q, k, v, o, do, lse, None, None)
        if q.dim() == 4 and k.dim() == 4 and k.shape[1] != q.shape[1]:
            raise checks.refuse(
                self.contract.name,
                f"k must have the sequence length of q, {q.shape[1]}, got {k.shape[1]}",
            )
        return self.contract.op(*arguments)
