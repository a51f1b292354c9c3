"""Multi-head latent attention, decode."""

import torch

from meta_kernels.attention.mla_decode import infer_mla_decode_fwd
from ops_registry.attention.mla_decode import MLA_DECODE_FWD
from ops_registry.contract import register
from ops_registry.targets import Target
from tileops.op import Op

KERNELS = ("tilelang", "triton", "cpu", "reference")

register(
    MLA_DECODE_FWD,
    infer_mla_decode_fwd,
    KERNELS,
    package="tileops.kernels.attention.mla_decode",
)


class MLADecodeWithKVCacheFwdOp(Op):
    """Attend one query token per request to its latent cache.

    In the absorbed form of multi-head latent attention the latent k is both key and value, and
    k_pe extends the key only. Head h reads latent head r = h // (H / H_kv):

        z_n = (D + PE)**-0.5 * (<q_h, k_nr> + <q_pe_h, k_pe_nr>)
        o_h = sum_n softmax(z)_n k_nr

    All N_kv rows of a request are visible; without rows the output is 0.

    Args:
        target: a target name, BUILTIN, or None to decide from the device of the inputs.
    """

    contract = MLA_DECODE_FWD
    PARAMETERS = ()

    def __init__(self, *, target: Target = None) -> None:
        super().__init__(target)

    def options(self) -> tuple[()]:
        return ()

    def forward(
        self, q: torch.Tensor, q_pe: torch.Tensor, k: torch.Tensor, k_pe: torch.Tensor
    ) -> torch.Tensor:
        """Return o [B, H, D] in q's dtype.

        Args:
            q: queries [B, H, D] in the latent space, float16 or bfloat16.
            q_pe: rotated part of the queries [B, H, PE], q's dtype; PE may be 0.
            k: latent cache [B, N_kv, H_kv, D], q's dtype; keys and values.
            k_pe: rotated part of the keys [B, N_kv, H_kv, PE], q's dtype.

        Raises:
            ValueError: shapes, dtypes or devices break the contract.
            TypeError: an argument is not a tensor.
        """
        o: torch.Tensor = self.call(q, q_pe, k, k_pe)
        return o
