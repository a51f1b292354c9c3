"""The lightning indexer of DeepSeek sparse attention."""

import torch

from meta_kernels.attention.fp8_lightning_indexer import infer_fp8_lightning_indexer
from ops_registry.attention.fp8_lightning_indexer import FP8_LIGHTNING_INDEXER
from ops_registry.contract import register
from ops_registry.targets import Target
from tileops.op import Op

KERNELS = ("triton", "reference")

register(
    FP8_LIGHTNING_INDEXER,
    infer_fp8_lightning_indexer,
    KERNELS,
    package="tileops.kernels.attention.fp8_lightning_indexer",
)


class FP8LightningIndexerFwdOp(Op):
    r"""Relevance logits of the keys in each query's window, from e4m3 queries and keys.

    Key group g owns the H / G query heads from g * H / G on. For t in the window of query s:

    .. math::

        logits_{s,t,g} = scale_{t,g} \sum_{h \in g} weights_{s,h} \,
            \max(\langle q_{s,h}, k_{t,g} \rangle, 0)

    A bfloat16 call quantizes both itself: q directly (unit scale, so it should be scaled to
    e4m3's range by the caller; beyond +-448 it saturates), each key by its own scale
    a / 448 with a = max(amax, 1e-4).

    Args:
        clean_logits: logits outside the window are -inf; False leaves them unspecified.
        target: a target name, BUILTIN, or None to decide from the device of the inputs.

    Raises:
        TypeError: a parameter has the wrong type.
    """

    contract = FP8_LIGHTNING_INDEXER
    PARAMETERS = ("clean_logits",)

    def __init__(self, clean_logits: bool = True, *, target: Target = None) -> None:
        super().__init__(target)
        self.clean_logits = self._boolean("clean_logits", clean_logits)

    def options(self) -> tuple[bool]:
        return (self.clean_logits,)

    def forward(
        self,
        index_q: torch.Tensor,
        index_k: torch.Tensor,
        weights: torch.Tensor,
        cu_seqlen_ks: torch.Tensor,
        cu_seqlen_ke: torch.Tensor,
        index_k_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return logits, float32 [B, S, S_kv, G].

        Args:
            index_q: queries [B, S, H, D], bfloat16 or float8_e4m3fn.
            index_k: keys [B, S_kv, G, D], index_q's dtype; G divides H.
            weights: float32 [S, H], one weight per query and head, shared by the batch.
            cu_seqlen_ks: int32 [S], first key of each query's window, shared by the batch.
            cu_seqlen_ke: int32 [S], end of the window. Both are cut to [0, S_kv]; a window that
                ends before it starts is empty.
            index_k_scale: float32 [B, S_kv, G], factors > 0 of e4m3 keys; None is 1. Not with
                bfloat16 inputs.

        Raises:
            ValueError: shapes, dtypes or devices break the contract.
            TypeError: an argument is not a tensor.
        """
        logits: torch.Tensor = self.call(
            index_q, index_k, weights, cu_seqlen_ks, cu_seqlen_ke, index_k_scale
        )
        return logits
