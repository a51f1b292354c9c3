"""The paged KV cache write."""

import torch

from meta_kernels.attention.paged_kv_cache_write import infer_paged_kv_cache_write
from ops_registry.attention.paged_kv_cache_write import PAGED_KV_CACHE_WRITE
from ops_registry.contract import register
from ops_registry.targets import Target
from tileops.op import Op

KERNELS = ("triton", "cpu", "reference")

register(
    PAGED_KV_CACHE_WRITE,
    infer_paged_kv_cache_write,
    KERNELS,
    package="tileops.kernels.attention.paged_kv_cache_write",
)


class PagedKVCacheWriteFwdOp(Op):
    """Write each token's key and value row into the page-pool row that its slot names.

    Slots may come in any order, several per page; rows of the pools that no slot names keep
    their bits. A 16-bit pool receives bit copies. A float8_e4m3fn pool receives
    e4m3(row / scale): round to nearest even, overflow and infinities saturate to +-448 with
    their sign, NaN stays NaN.

    Args:
        target: a target name, BUILTIN, or None to decide from the device of the inputs.
    """

    contract = PAGED_KV_CACHE_WRITE
    PARAMETERS = ()

    def __init__(self, *, target: Target = None) -> None:
        super().__init__(target)

    def options(self) -> tuple[()]:
        return ()

    def forward(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        """Write the rows; both pools are mutated and no other tensor is touched.

        Args:
            k: new keys [T, H_kv, D], float16 or bfloat16.
            v: new values [T, H_kv, D], k's dtype.
            k_pages: key pool [NP, PS, H_kv, D], contiguous; k's dtype or float8_e4m3fn.
            v_pages: value pool, shape and dtype of k_pages.
            slot_mapping: int64 [T], page * PS + offset of each token's row, -1 skips the token.
                Non-negative slots must be distinct; slots outside the pool are skipped.
            k_scale: float32 [1], divisor of the stored keys; exactly with an e4m3 pool.
            v_scale: float32 [1], divisor of the stored values; exactly with an e4m3 pool.

        Raises:
            ValueError: shapes, dtypes, devices or scales break the contract; nothing is written.
            TypeError: an argument is not a tensor.
        """
        self.call(k, v, k_pages, v_pages, slot_mapping, k_scale, v_scale)
