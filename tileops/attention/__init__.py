"""The thirteen attention operators. Construct once, then call with tensors."""

from tileops.attention.dsa_decode import DSADecodeWithKVCacheFwdOp
from tileops.attention.fp8_lightning_indexer import FP8LightningIndexerFwdOp
from tileops.attention.gqa_dense import GQABwdOp, GQADenseFwdOp
from tileops.attention.gqa_paged import GQAPagedFwdOp
from tileops.attention.gqa_prefill_paged import GQAPrefillPagedWithKVCacheFwdOp
from tileops.attention.gqa_varlen import GQAVarlenFwdOp
from tileops.attention.mha_decode_paged import MHADecodePagedWithKVCacheFwdOp
from tileops.attention.mla_decode import MLADecodeWithKVCacheFwdOp
from tileops.attention.nsa_compressed import NSACompressedVarlenFwdOp
from tileops.attention.nsa_topk import NSATopKVarlenFwdOp
from tileops.attention.nsa_varlen import NSAVarlenFwdOp
from tileops.attention.paged_kv_cache_write import PagedKVCacheWriteFwdOp

__all__ = [
    "DSADecodeWithKVCacheFwdOp",
    "FP8LightningIndexerFwdOp",
    "GQABwdOp",
    "GQADenseFwdOp",
    "GQAPagedFwdOp",
    "GQAPrefillPagedWithKVCacheFwdOp",
    "GQAVarlenFwdOp",
    "MHADecodePagedWithKVCacheFwdOp",
    "MLADecodeWithKVCacheFwdOp",
    "NSACompressedVarlenFwdOp",
    "NSATopKVarlenFwdOp",
    "NSAVarlenFwdOp",
    "PagedKVCacheWriteFwdOp",
]
