"""Native sparse attention: the selected branch."""

import torch

from meta_kernels.attention.nsa_varlen import check_parameters, infer_nsa_varlen_fwd
from ops_registry.attention.nsa_varlen import NSA_VARLEN_FWD
from ops_registry.contract import register
from ops_registry.targets import Target
from tileops.op import Op

KERNELS = ("triton", "reference")

register(
    NSA_VARLEN_FWD, infer_nsa_varlen_fwd, KERNELS, package="tileops.kernels.attention.nsa_varlen"
)


class NSAVarlenFwdOp(Op):
    r"""Attend each token of a packed batch to the key blocks selected for it.

    Block b of a request holds its keys [b * block_size, (b + 1) * block_size). The token at
    position t sees, of the blocks in its first block_counts slots, the keys before t + 1 if
    causal, else before the end of its request. For head h, with
    :math:`r = \lfloor h / (H / H_{kv}) \rfloor` and the keys j of the slots of (t, r):

    .. math::

        o_h = \sum_j softmax_j(scale \, \langle q_h, k_{j,r} \rangle) \, v_{j,r}

    A slot whose block is negative or starts at or past that bound contributes nothing; a block
    id that occurs twice counts twice. A token without keys gives zeros, as do rows past the
    last offset.

    Args:
        is_causal: a token sees the keys up to its own position only.
        scale: factor of the float32 scores, finite and > 0.
        block_size: tokens per block, >= 1.
        target: a target name, BUILTIN, or None to decide from the device of the inputs.

    Raises:
        ValueError: a parameter is outside its range.
        TypeError: a parameter has the wrong type.
    """

    contract = NSA_VARLEN_FWD
    PARAMETERS = ("is_causal", "scale", "block_size")

    def __init__(
        self, is_causal: bool, scale: float, block_size: int, *, target: Target = None
    ) -> None:
        super().__init__(target)
        self.is_causal = self._boolean("is_causal", is_causal)
        self.scale = self._number("scale", scale)
        self.block_size = self._integer("block_size", block_size)
        check_parameters(self.scale, self.block_size)

    def options(self) -> tuple[bool, float, int]:
        return self.is_causal, self.scale, self.block_size

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        block_indices: torch.Tensor,
        block_counts: torch.Tensor,
        offsets: torch.Tensor,
        token_indices: torch.Tensor,
    ) -> torch.Tensor:
        """Return o [T, H, D] in q's dtype.

        Args:
            q: packed queries [T, H, D], float16 or bfloat16.
            k: packed keys [T, H_kv, D], q's dtype; H_kv divides H.
            v: packed values [T, H_kv, D], q's dtype.
            block_indices: int32 [T, H_kv, SEL], block ids within the request, in any order.
            block_counts: int32 [T, H_kv], slots in use; cut to [0, SEL].
            offsets: int32 [N + 1], prefix sums of the request lengths: 0, ..., T.
            token_indices: int32 [T, 2], request id and position of each token. It must agree
                with offsets; the contents of both are not checked.

        Raises:
            ValueError: shapes, dtypes or devices break the contract.
            TypeError: an argument is not a tensor.
        """
        o: torch.Tensor = self.call(q, k, v, block_indices, block_counts, offsets, token_indices)
        return o
