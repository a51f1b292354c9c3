"""Contract of `fp8_lightning_indexer`: relevance logits of every key in a window."""

import torch

from ops_registry.accuracy import INDEXER
from ops_registry.contract import E4M3, FLOAT32, INT32, OpContract, TensorSpec, define

FP8_LIGHTNING_INDEXER = define(
    OpContract(
        name="fp8_lightning_indexer",
        op_class="FP8LightningIndexerFwdOp",
        summary="Weighted sums over heads of relu(q . k) in e4m3, the logits of a key selection.",
        signature=(
            "(Tensor index_q, Tensor index_k, Tensor weights, Tensor cu_seqlen_ks, "
            "Tensor cu_seqlen_ke, Tensor? index_k_scale=None, bool clean_logits=True, "
            'str target="") -> Tensor'
        ),
        letters={
            "B": "requests",
            "S": "queries of a request",
            "S_kv": "keys of a request",
            "H": "query heads",
            "G": "key groups, each of H / G query heads",
            "D": "head dim",
        },
        tensors={
            "index_q": TensorSpec("B S H D", (torch.bfloat16, E4M3), "queries"),
            "index_k": TensorSpec("B S_kv G D", "index_q", "keys"),
            "weights": TensorSpec("S H", FLOAT32, "head weights, of any sign"),
            "cu_seqlen_ks": TensorSpec("S", INT32, "first key of each query's window"),
            "cu_seqlen_ke": TensorSpec("S", INT32, "end of each query's window, exclusive"),
            "index_k_scale": TensorSpec(
                "B S_kv G", FLOAT32, "factors of e4m3 keys; None is 1", optional=True
            ),
        },
        returns={"logits": TensorSpec("B S S_kv G", FLOAT32, "logits, -inf outside the window")},
        options={"clean_logits": "False leaves the values outside the window unspecified"},
        accuracy={"logits": INDEXER},
    )
)
