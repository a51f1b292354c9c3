"""Grouped-query attention over a paged KV cache."""

import torch

from meta_kernels.attention.gqa_paged import infer_gqa_paged_fwd
from ops_registry.attention.gqa_paged import GQA_PAGED_FWD
from ops_registry.contract import register
from ops_registry.targets import Target
from tileops.op import Op

KERNELS = ("tilelang", "triton", "cpu", "reference")

register(
    GQA_PAGED_FWD,
    infer_gqa_paged_fwd,
    KERNELS,
    package="tileops.kernels.attention.gqa_paged",
)


class GQAPagedFwdOp(Op):
    """Attend packed queries to a KV cache that lives in pages; the cache is only read.

    Request b owns the query rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] and the first
    S_kv = cache_seqlens[b] cached tokens, its own query tokens included: prefill, decode and
    requests without a query mix freely. Logical position j lies in page
    page_table[b, j // PS], row j % PS. Query i sits at position p = i + S_kv - S_q; head h reads
    KV head h // (H / H_kv):

        z_j = sm_scale * <Rot(p, q), Rot(j, k_j)>
        l_j = softcap * tanh(z_j / softcap)             z_j without softcap
        o   = sum_j exp(l_j) v_j / (exp(sink_h) + sum_j exp(l_j))

    over the visible j: j <= p when causal, p - window_size_left <= j <= p + window_size_right
    where a window is set. A row that sees no key is 0.

    The cache holds unrotated keys when RoPE is fused here; one that stores rotated keys needs
    pos_encoding_mode="none" and a query rotated by the caller.

    Args:
        is_causal: align a causal mask to the end of each request's cache.
        window_size_left: keys visible to the left, the query's own position not counted; -1 all.
        window_size_right: keys visible to the right; -1 all. Changes nothing when causal.
        sm_scale: scale of the scores, finite and > 0; None for D**-0.5.
        softcap: positive cap of the scores; None or 0 is off.
        out_dtype: float16 or bfloat16, for a float8_e4m3fn q; else None or q's dtype.
        pos_encoding_mode: "none" or "rope".
        rotary_dim: rotated columns, positive, even and at most D; None for D.
        rope_layout: "neox" (halves) or "interleaved" (neighbours).
        target: a target name, BUILTIN, or None to decide from the device of the inputs.

    Raises:
        ValueError: a parameter is out of range.
        TypeError: a parameter has the wrong type.
    """

    contract = GQA_PAGED_FWD
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

    def options(
        self,
    ) -> tuple[
        bool, int, int, float | None, float | None, torch.dtype | None, str, int | None, str
    ]:
        return (
            self.is_causal,
            self.window_size_left,
            self.window_size_right,
            self.sm_scale,
            self.softcap,
            self.out_dtype,
            self.pos_encoding_mode,
            self.rotary_dim,
            self.rope_layout,
        )

    def forward(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        page_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        q_scale: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        rope_cos: torch.Tensor | None = None,
        rope_sin: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return o [T_q, H, D] in q's dtype, or in out_dtype for a float8_e4m3fn q.

        Args:
            q: queries [T_q, H, D], float16, bfloat16, or float8_e4m3fn over a pool of the same.
            k_pages: key pool [NP, PS, H_kv, D], q's dtype or float8_e4m3fn.
            v_pages: value pool, shape and dtype of k_pages.
            page_table: int32 [B, W]; used entries in [0, NP), entries past
                ceil(cache_seqlens / PS) are never read.
            cache_seqlens: int32 [B], cached tokens with the query's own, at most W * PS.
            cu_seqlens_q: int32 [B + 1], starts at 0, ascends. Query rows past the last offset
                give zeros.
            q_scale: float32 [B, H_kv], multiplies q; exactly with a float8_e4m3fn q.
            k_scale: float32 [1] or [B, H_kv], multiplies cached keys; exactly with a
                float8_e4m3fn pool.
            v_scale: float32, shape of k_scale, multiplies cached values.
            rope_cos: cosines [P, R/2] in o's dtype, row x for position x, P at least the longest
                cache; exactly with pos_encoding_mode="rope".
            rope_sin: sines, shape and dtype of rope_cos.
            sinks: float32 [H] natural-log logits; -inf is none, +inf makes the head zero.

        Raises:
            ValueError: shapes, dtypes, devices, scales or tables break the contract.
            IndexError: on CPU, a used page id or rotary row lies outside its table or pool.
            TypeError: an argument is not a tensor.
        """
        o: torch.Tensor = self.call(
            q,
            k_pages,
            v_pages,
            page_table,
            cache_seqlens,
            cu_seqlens_q,
            q_scale,
            k_scale,
            v_scale,
            rope_cos,
            rope_sin,
            sinks,
        )
        return o
