"""Contract of `paged_kv_cache_write`: scatter new K/V rows into a paged pool."""

from ops_registry.accuracy import EXACT
from ops_registry.contract import (
    FLOAT32,
    HALF,
    HALF_OR_E4M3,
    INT64,
    OpContract,
    TensorSpec,
    define,
)

PAGED_KV_CACHE_WRITE = define(
    OpContract(
        name="paged_kv_cache_write",
        op_class="PagedKVCacheWriteFwdOp",
        summary="Scatter new key and value rows into a paged KV cache.",
        signature=(
            "(Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor slot_mapping, "
            'Tensor? k_scale=None, Tensor? v_scale=None, str target="") -> ()'
        ),
        letters={
            "T": "new tokens",
            "H_kv": "key/value heads",
            "D": "head dim",
            "NP": "pages in the pool",
            "PS": "tokens per page",
        },
        tensors={
            "k": TensorSpec("T H_kv D", HALF, "new keys"),
            "v": TensorSpec("T H_kv D", "k", "new values"),
            "k_pages": TensorSpec(
                "NP PS H_kv D", HALF_OR_E4M3, "key pool: k's dtype or e4m3", mutated=True
            ),
            "v_pages": TensorSpec("NP PS H_kv D", "k_pages", "value pool", mutated=True),
            "slot_mapping": TensorSpec("T", INT64, "page * PS + offset; -1 skips the token"),
            "k_scale": TensorSpec(
                "1", FLOAT32, "divisor of stored keys, e4m3 pools", optional=True
            ),
            "v_scale": TensorSpec("1", FLOAT32, "divisor of stored values", optional=True),
        },
        returns={},
        accuracy={"stored rows": EXACT},
    )
)
