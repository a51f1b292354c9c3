"""Native sparse attention: the compressed branch."""

import torch

from meta_kernels.attention.nsa_compressed import check_parameters, infer_nsa_compressed_fwd
from ops_registry.attention.nsa_compressed import NSA_COMPRESSED_FWD
from ops_registry.contract import register
from ops_registry.targets import Target
from tileops.op import Op

KERNELS = ("triton", "reference")

register(
    NSA_COMPRESSED_FWD,
    infer_nsa_compressed_fwd,
    KERNELS,
    package="tileops.kernels.attention.nsa_compressed",
)


class NSACompressedVarlenFwdOp(Op):
    r"""Attend each token of a packed batch to the closed compressed chunks of its request.

    Chunk c of request n is row chunk_offsets[n] + c of the compressed tensors and stands for
    the request's tokens [c * bs, (c + 1) * bs). It is closed for the token at position t once
    its last token is at or before t, so that causality is built in. For head h, with
    :math:`r = \lfloor h / (H / H_{kv}) \rfloor` (native sparse attention, arXiv:2502.11089):

    .. math::

        Z_c = scale \, \langle q_h, k_{c,r} \rangle, \; c < \lfloor (t + 1) / bs \rfloor, \qquad
        o_h = \sum_c softmax(Z)_c v_{c,r}, \qquad lse_h = \log \sum_c \exp Z_c

    A token before its request's first closed chunk gives o = 0 and lse = -inf, as do rows past
    the last offset.

    Args:
        scale: factor of the float32 scores, finite and > 0.
        bs: tokens per chunk, >= 1.
        target: a target name, BUILTIN, or None to decide from the device of the inputs.

    Raises:
        ValueError: a parameter is outside its range.
        TypeError: a parameter has the wrong type.
    """

    contract = NSA_COMPRESSED_FWD
    PARAMETERS = ("scale", "bs")

    def __init__(self, scale: float, bs: int, *, target: Target = None) -> None:
        super().__init__(target)
        self.scale = self._number("scale", scale)
        self.bs = self._integer("bs", bs)
        check_parameters(self.scale, self.bs)

    def options(self) -> tuple[float, int]:
        return self.scale, self.bs

    def forward(
        self,
        q: torch.Tensor,
        k_cmp: torch.Tensor,
        v_cmp: torch.Tensor,
        offsets: torch.Tensor,
        chunk_offsets: torch.Tensor,
        token_indices: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return o [T, H, DV] in q's dtype and lse [H, T], float32 natural log.

        Args:
            q: packed queries [T, H, DK], float16 or bfloat16.
            k_cmp: compressed keys [C, H_kv, DK], q's dtype; H_kv divides H.
            v_cmp: compressed values [C, H_kv, DV], q's dtype.
            offsets: int32 [N + 1], prefix sums of the request lengths: 0, ..., T.
            chunk_offsets: int32 [N + 1], prefix sums of ceil(length / bs): 0, ..., C.
            token_indices: int32 [T, 2], request id and position of each token. The three
                metadata tensors must agree; their contents are not checked.

        Raises:
            ValueError: shapes, dtypes or devices break the contract.
            TypeError: an argument is not a tensor.
        """
        o, lse = self.call(q, k_cmp, v_cmp, offsets, chunk_offsets, token_indices)
        return o, lse
