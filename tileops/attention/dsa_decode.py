"""DeepSeek sparse attention over a key/value cache."""

from typing import Any

import torch

from meta_kernels.attention.dsa_decode import check_parameters, infer_dsa_decode_fwd
from ops_registry.attention.dsa_decode import DSA_DECODE_FWD
from ops_registry.contract import register
from ops_registry.targets import Target
from tileops.op import Op

KERNELS = ("tilelang", "triton", "reference")

register(
    DSA_DECODE_FWD, infer_dsa_decode_fwd, KERNELS, package="tileops.kernels.attention.dsa_decode"
)


class DSADecodeWithKVCacheFwdOp(Op):
    r"""Attend each query to the cache rows that its indices name (DeepSeek sparse attention).

    A cache row is the key; its first :math:`D = W - dim\_tail` columns are also the value. Row j
    stands for the last of stride_kv tokens; a slot that names it is live iff

    .. math::

        0 \le j < S_{kv} \; \text{and, if causal,} \;
        (j + 1) \cdot stride\_kv - 1 \le q\_start\_index\_s + s

    For head h, with :math:`r = \lfloor h / (H / H_{kv}) \rfloor` and j over the live slots:

    .. math::

        o_{s,h} = \sum_j softmax_j(sm\_scale \, \langle q_{s,h}, kv_{j,r} \rangle) \, kv_{j,r,:D}

    Dead slots are never read and may hold anything (S_kv and -1 are usual). A query without a
    live slot gives zeros. Naming a row twice in one list of slots is the caller's error.

    Args:
        dim_tail: key columns that are not part of the value, >= 0.
        stride_kv: tokens that one cache row stands for, >= 1.
        q_start_index_s: position of query 0, >= 0.
        sm_scale: score scale > 0, None is W ** -0.5.
        is_causal: rows past the query's position are dead.
        target: a target name, BUILTIN, or None to decide from the device of the inputs.

    Raises:
        ValueError: a parameter is outside its range.
        TypeError: a parameter has the wrong type.
    """

    contract = DSA_DECODE_FWD
    PARAMETERS = ("dim_tail", "stride_kv", "q_start_index_s", "sm_scale", "is_causal")

    def __init__(
        self,
        dim_tail: int,
        stride_kv: int,
        q_start_index_s: int,
        sm_scale: float | None = None,
        is_causal: bool = True,
        *,
        target: Target = None,
    ) -> None:
        super().__init__(target)
        self.dim_tail = self._integer("dim_tail", dim_tail)
        self.stride_kv = self._integer("stride_kv", stride_kv)
        self.q_start_index_s = self._integer("q_start_index_s", q_start_index_s)
        self.sm_scale = self._optional_number("sm_scale", sm_scale)
        self.is_causal = self._boolean("is_causal", is_causal)
        check_parameters(self.dim_tail, self.stride_kv, self.q_start_index_s, self.sm_scale)

    def options(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.PARAMETERS)

    def forward(self, q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Return o [B, S, H, W - dim_tail] in q's dtype.

        Args:
            q: queries [B, S, H, W], float16 or bfloat16; W > dim_tail.
            kv: cache [B, S_kv, H_kv, W], q's dtype; H_kv divides H.
            indices: int32 [B, S, H_kv, K], the cache row of each slot, in any order.

        Raises:
            ValueError: shapes, dtypes or devices break the contract.
            TypeError: an argument is not a tensor.
        """
        o: torch.Tensor = self.call(q, kv, indices)
        return o
