"""Contract of `nsa_compressed_fwd`: native sparse attention over compressed chunks."""

from ops_registry.accuracy import FORWARD, LSE
from ops_registry.contract import FLOAT32, HALF, INT32, OpContract, TensorSpec, define

NSA_COMPRESSED_FWD = define(
    OpContract(
        name="nsa_compressed_fwd",
        op_class="NSACompressedVarlenFwdOp",
        summary="Attend each packed token to the closed compressed chunks of its request.",
        signature=(
            "(Tensor q, Tensor k_cmp, Tensor v_cmp, Tensor offsets, Tensor chunk_offsets, "
            'Tensor token_indices, float scale, int bs, str target="") -> (Tensor o, Tensor lse)'
        ),
        letters={
            "T": "packed tokens",
            "H": "query heads",
            "H_kv": "key/value heads",
            "DK": "head dim of queries and keys",
            "DV": "head dim of values",
            "C": "compressed chunks of all requests",
            "N": "requests",
        },
        tensors={
            "q": TensorSpec("T H DK", HALF, "packed queries"),
            "k_cmp": TensorSpec("C H_kv DK", "q", "compressed keys"),
            "v_cmp": TensorSpec("C H_kv DV", "q", "compressed values"),
            "offsets": TensorSpec("N+1", INT32, "prefix sums of the request lengths"),
            "chunk_offsets": TensorSpec("N+1", INT32, "prefix sums of ceil(length / bs)"),
            "token_indices": TensorSpec("T 2", INT32, "request id and position of each token"),
        },
        returns={
            "o": TensorSpec("T H DV", "q", "attention output"),
            "lse": TensorSpec("H T", FLOAT32, "natural log of the sum of exponentials"),
        },
        options={
            "scale": "factor of the float32 scores, finite and > 0",
            "bs": "tokens per chunk",
        },
        accuracy={"o": FORWARD, "lse": LSE},
    )
)
