"""Contract of `nsa_varlen_fwd`: native sparse attention over selected blocks."""

from ops_registry.accuracy import FORWARD
from ops_registry.contract import HALF, INT32, OpContract, TensorSpec, define

NSA_VARLEN_FWD = define(
    OpContract(
        name="nsa_varlen_fwd",
        op_class="NSAVarlenFwdOp",
        summary="Attend each packed token to the key blocks selected for it.",
        signature=(
            "(Tensor q, Tensor k, Tensor v, Tensor block_indices, Tensor block_counts, "
            "Tensor offsets, Tensor token_indices, bool is_causal, float scale, "
            'int block_size, str target="") -> Tensor'
        ),
        letters={
            "T": "packed tokens",
            "H": "query heads",
            "H_kv": "key/value heads",
            "D": "head dim",
            "SEL": "block slots per token and key/value head",
            "N": "requests",
        },
        tensors={
            "q": TensorSpec("T H D", HALF, "packed queries"),
            "k": TensorSpec("T H_kv D", "q", "packed keys"),
            "v": TensorSpec("T H_kv D", "q", "packed values"),
            "block_indices": TensorSpec(
                "T H_kv SEL", INT32, "block ids within the request; others contribute nothing"
            ),
            "block_counts": TensorSpec("T H_kv", INT32, "slots in use, cut to [0, SEL]"),
            "offsets": TensorSpec("N+1", INT32, "prefix sums of the request lengths"),
            "token_indices": TensorSpec("T 2", INT32, "request id and position of each token"),
        },
        returns={"o": TensorSpec("T H D", "q", "attention output")},
        options={
            "is_causal": "a token sees the keys up to its own position, else all of its request",
            "scale": "factor of the float32 scores, finite and > 0",
            "block_size": "tokens per block",
        },
        accuracy={"o": FORWARD},
    )
)
