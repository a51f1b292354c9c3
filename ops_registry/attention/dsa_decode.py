"""Contract of `dsa_decode_fwd`: attention over the cache rows that indices name."""

from ops_registry.accuracy import FORWARD
from ops_registry.contract import HALF, INT32, OpContract, TensorSpec, define

DSA_DECODE_FWD = define(
    OpContract(
        name="dsa_decode_fwd",
        op_class="DSADecodeWithKVCacheFwdOp",
        summary="Attend each query to the cache rows selected for it (DeepSeek sparse attention).",
        signature=(
            "(Tensor q, Tensor kv, Tensor indices, int dim_tail, int stride_kv, "
            "int q_start_index_s, float? sm_scale=None, bool is_causal=True, "
            'str target="") -> Tensor'
        ),
        letters={
            "B": "requests",
            "S": "queries of a request",
            "S_kv": "cache rows of a request",
            "H": "query heads",
            "H_kv": "key/value heads",
            "W": "width of a cache row: D value columns, then dim_tail more of the key",
            "K": "slots per query and key/value head",
        },
        tensors={
            "q": TensorSpec("B S H W", HALF, "queries"),
            "kv": TensorSpec("B S_kv H_kv W", "q", "cache rows: key, and value in D columns"),
            "indices": TensorSpec(
                "B S H_kv K", INT32, "cache row of each slot; any dead value pads"
            ),
        },
        returns={"o": TensorSpec("B S H W-dim_tail", "q", "attention output")},
        options={
            "dim_tail": "key columns that are not part of the value, >= 0",
            "stride_kv": "tokens that one cache row stands for, >= 1",
            "q_start_index_s": "position of query 0, >= 0",
            "sm_scale": "factor of the float32 scores; None is 1 / sqrt(W)",
            "is_causal": "a row is live only once its last token is at or before the query",
        },
        accuracy={"o": FORWARD},
    )
)
