"""Attention of a packed chunk over a paged KV cache, which it extends."""

from __future__ import annotations

from typing import Any

import torch

from meta_kernels.attention.gqa_prefill_paged import (
    check_options,
    contents_gqa_prefill_paged_fwd,
    infer_gqa_prefill_paged_fwd,
)
from ops_registry.attention.gqa_prefill_paged import GQA_PREFILL_PAGED_FWD
from ops_registry.contract import register
from ops_registry.targets import Target
from tileops.op import Op

KERNELS = ("tilelang", "triton", "cpu", "reference")

register(
    GQA_PREFILL_PAGED_FWD,
    infer_gqa_prefill_paged_fwd,
    KERNELS,
    contents=contents_gqa_prefill_paged_fwd,
    package="tileops.kernels.attention.gqa_prefill_paged",
)


class GQAPrefillPagedWithKVCacheFwdOp(Op):
    r"""Append each request's new tokens to its paged cache and attend to all of it.

    Request b owns the packed rows [cu_seqlens_q[b], cu_seqlens_q[b+1]); with
    c = cache_seqlens[b] tokens cached already, its new token i takes position x = c + i and is
    stored in pool row block_table[b, x // page_size] * page_size + x % page_size. With
    :math:`r = h // (H / H_{kv})` and keys j running over the old pool rows and the new tokens,

    .. math::
        Z_{ij} = \alpha \langle q_i, k_j \rangle, \quad
        L_{ij} = c \tanh(Z_{ij} / c), \quad
        o_i = \sum_j \mathrm{softmax}_j(L_{ij}) \, v_j

    where causal rows see :math:`j \le c + i`. The new tokens take part at their own 16-bit
    precision, whatever the pool stores of them. A 16-bit pool receives bit copies; a
    float8_e4m3fn pool receives e4m3(row / scale), saturating, and its old rows are multiplied
    by the scale when read. With fuse_rope, q and the new keys are rotated (neox layout) at
    their positions, by angles x * rope_base ** (-2 f / R) computed in float64; the rotated key
    is rounded to q's dtype once, and that is what is stored. Cached keys are taken as rotated
    by whoever wrote them.

    Rows of the pools that no new token names keep their bits. Query rows past the last offset
    are zero and store nothing. On CPU, a used page id outside the pool raises IndexError where
    it is read, and is skipped where it would be written, as is a token past the table.

    Args:
        page_size: tokens per page, any positive integer.
        max_seqlen_q: the most new tokens of one request, a launch bound; a longer request is
            the caller's error.
        is_causal: mask keys after each token's own position.
        cache_dtype: dtype of the pools: None is q's, or float8_e4m3fn.
        sm_scale: score scale > 0, None is D ** -0.5.
        softcap: cap c >= 0 on the scaled scores; None or 0 is off.
        fuse_rope: rotate q and the new keys.
        rope_base: base of the rotary frequencies, > 0.
        max_position: the most tokens of a request under fuse_rope, which requires it; checked
            by validate_inputs.
        rotary_dim: rotated width R, even and at most D; None is D. Only with fuse_rope.
        validate_inputs: check scales, offsets, lengths and page ids on every call. Reads them
            on the host; not inside CUDA graph capture. In compiled and packaged programs the
            checks become asserts.
        target: a target name, BUILTIN, or None to decide from the device of the inputs.

    Raises:
        ValueError: a parameter is outside its range.
        TypeError: a parameter has the wrong type.
    """

    contract = GQA_PREFILL_PAGED_FWD
    PARAMETERS = (
        "page_size",
        "max_seqlen_q",
        "is_causal",
        "cache_dtype",
        "sm_scale",
        "softcap",
        "fuse_rope",
        "rope_base",
        "max_position",
        "rotary_dim",
        "validate_inputs",
    )

    def __init__(
        self,
        page_size: int,
        max_seqlen_q: int,
        is_causal: bool = True,
        cache_dtype: torch.dtype | None = None,
        sm_scale: float | None = None,
        softcap: float | None = None,
        fuse_rope: bool = False,
        rope_base: float = 10000.0,
        max_position: int | None = None,
        rotary_dim: int | None = None,
        *,
        validate_inputs: bool = False,
        target: Target = None,
    ) -> None:
        super().__init__(target)
        self.page_size = self._integer("page_size", page_size)
        self.max_seqlen_q = self._integer("max_seqlen_q", max_seqlen_q)
        self.is_causal = self._boolean("is_causal", is_causal)
        self.cache_dtype = cache_dtype
        self.sm_scale = self._optional_number("sm_scale", sm_scale)
        self.softcap = self._optional_number("softcap", softcap)
        self.fuse_rope = self._boolean("fuse_rope", fuse_rope)
        self.rope_base = self._number("rope_base", rope_base)
        self.max_position = self._optional_integer("max_position", max_position)
        self.rotary_dim = self._optional_integer("rotary_dim", rotary_dim)
        self.validate_inputs = self._boolean("validate_inputs", validate_inputs)
        check_options(self.contract.name, self)

    def options(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.PARAMETERS)

    def forward(
        self,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cache_seqlens: torch.Tensor,
        block_table: torch.Tensor,
    ) -> torch.Tensor:
        """Attend the chunk and append its keys and values; both pools are mutated.

        Args:
            q: queries of the new tokens [T_q, H, D], packed by request; float16 or bfloat16,
                any strides.
            k_new: keys of the new tokens [T_q, H_kv, D], q's dtype; H_kv divides H.
            v_new: values of the new tokens [T_q, H_kv, D], q's dtype.
            k_pages: key pool [N_kv, H_kv, D], contiguous, N_kv a multiple of page_size; the
                cache dtype.
            v_pages: value pool, shape and dtype of k_pages. The pools overlap neither each
                other nor any input.
            k_scale: float32 [1], scale of an e4m3 key pool; ignored for a 16-bit pool.
            v_scale: float32 [1], scale of an e4m3 value pool; ignored for a 16-bit pool.
            cu_seqlens_q: int32 [B + 1], offsets of the requests: 0, non-decreasing, T_q.
            cache_seqlens: int32 [B], cached tokens of each request before the append.
            block_table: int32 [B, W], pages of each request in logical order; entries past its
                last page, the new tokens included, are never read.

        Returns:
            o [T_q, H, D], contiguous, q's dtype.

        Raises:
            ValueError: shapes, dtypes, devices or contiguity break the contract, no kernel of
                the target serves the call, or (validate_inputs) tensor contents break the
                rules; the pools are untouched.
            TypeError: an argument is not a tensor.
        """
        return self.call(
            q,
            k_new,
            v_new,
            k_pages,
            v_pages,
            k_scale,
            v_scale,
            cu_seqlens_q,
            cache_seqlens,
            block_table,
        )
