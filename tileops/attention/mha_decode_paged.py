"""Multi-head decode over a paged KV cache."""

import torch

from meta_kernels import checks
from meta_kernels.attention.mha_decode_paged import infer_mha_decode_paged_fwd
from ops_registry.attention.mha_decode_paged import MHA_DECODE_PAGED_FWD
from ops_registry.contract import register
from ops_registry.targets import Target
from tileops.op import Op

KERNELS = ("triton", "cpu", "reference")

register(
    MHA_DECODE_PAGED_FWD,
    infer_mha_decode_paged_fwd,
    KERNELS,
    package="tileops.kernels.attention.mha_decode_paged",
)


class MHADecodePagedWithKVCacheFwdOp(Op):
    """Attend S_q query tokens per request to a flat pool of pages; the pool is only read.

    Request b has S_kv = real_seqlen_kv[b] keys; logical position j is pool row
    block_table[b, j // page_size] * page_size + j % page_size. Each head reads its own keys:

        o_i = sum_j exp(D**-0.5 <q_i, k_j>) v_j / sum_j exp(D**-0.5 <q_i, k_j>)

    over all S_kv keys, or those with j <= i + S_kv - S_q when causal. A query that sees no key
    gives 0.

    Args:
        page_size: rows of a page, positive.
        is_causal: align a causal mask to the end of each request's cache.
        target: a target name, BUILTIN, or None to decide from the device of the inputs.

    Raises:
        ValueError: page_size is not positive.
        TypeError: a parameter has the wrong type.
    """

    contract = MHA_DECODE_PAGED_FWD
    PARAMETERS = ("page_size", "is_causal")

    def __init__(self, page_size: int, is_causal: bool = False, *, target: Target = None) -> None:
        super().__init__(target)
        self.page_size = self._integer("page_size", page_size)
        checks.positive(self.contract.name, "page_size", self.page_size)
        self.is_causal = self._boolean("is_causal", is_causal)

    def options(self) -> tuple[int, bool]:
        return self.page_size, self.is_causal

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        real_seqlen_kv: torch.Tensor,
        block_table: torch.Tensor,
    ) -> torch.Tensor:
        """Return o [B, S_q, H, D] in q's dtype.

        Args:
            q: queries [B, S_q, H, D], float16 or bfloat16.
            k: key pool [N_kv, H, D], q's dtype, N_kv a multiple of page_size.
            v: value pool, shape and dtype of k.
            real_seqlen_kv: int32 [B], cached tokens of each request, at most W * page_size.
            block_table: int32 [B, W]; used entries in [0, N_kv / page_size), entries past
                ceil(real_seqlen_kv / page_size) are never read.

        Raises:
            ValueError: shapes, dtypes or devices break the contract.
            IndexError: on CPU, a used page id lies outside the pool.
            TypeError: an argument is not a tensor.
        """
        o: torch.Tensor = self.call(q, k, v, real_seqlen_kv, block_table)
        return o
