"""Contract of `nsa_topk`: choose the blocks that native sparse attention reads."""

from ops_registry.accuracy import EXACT
from ops_registry.contract import HALF, INT32, OpContract, TensorSpec, define

NSA_TOPK = define(
    OpContract(
        name="nsa_topk",
        op_class="NSATopKVarlenFwdOp",
        summary="Select, per token and key/value head, the blocks of highest importance.",
        signature=(
            "(Tensor q, Tensor k_cmp, Tensor offsets, Tensor chunk_offsets, "
            "Tensor token_indices, float scale, int selected_block_num, int bs, "
            'str target="") -> Tensor'
        ),
        letters={
            "T": "packed tokens",
            "H": "query heads",
            "H_kv": "key/value heads",
            "D": "head dim",
            "C": "compressed chunks of all requests",
            "N": "requests",
        },
        tensors={
            "q": TensorSpec("T H D", HALF, "packed queries"),
            "k_cmp": TensorSpec("C H_kv D", "q", "compressed keys"),
            "offsets": TensorSpec("N+1", INT32, "prefix sums of the request lengths"),
            "chunk_offsets": TensorSpec("N+1", INT32, "prefix sums of ceil(length / bs)"),
            "token_indices": TensorSpec("T 2", INT32, "request id and position of each token"),
        },
        returns={
            "block_indices": TensorSpec(
                "T H_kv selected_block_num", INT32, "block ids within the request, then -1"
            ),
        },
        options={
            "scale": "multiplies q, rounded to q's dtype, before the scores; finite and > 0",
            "selected_block_num": "width of the answer",
            "bs": "tokens per block",
        },
        accuracy={"block_indices": EXACT},
    )
)
