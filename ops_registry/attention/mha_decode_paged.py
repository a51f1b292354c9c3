"""Contract of `mha_decode_paged_fwd`: multi-head decode against a paged KV cache."""

from ops_registry.accuracy import FORWARD
from ops_registry.contract import HALF, INT32, OpContract, TensorSpec, define

MHA_DECODE_PAGED_FWD = define(
    OpContract(
        name="mha_decode_paged_fwd",
        op_class="MHADecodePagedWithKVCacheFwdOp",
        summary="Multi-head attention of a few query tokens per request over a paged KV cache.",
        signature=(
            "(Tensor q, Tensor k, Tensor v, Tensor real_seqlen_kv, Tensor block_table, "
            'int page_size, bool is_causal=False, str target="") -> Tensor'
        ),
        letters={
            "B": "requests",
            "S_q": "query tokens of each request",
            "H": "heads",
            "D": "head dim",
            "N_kv": "rows of the pool, whole pages",
            "W": "block-table columns",
        },
        tensors={
            "q": TensorSpec("B S_q H D", HALF, "queries"),
            "k": TensorSpec("N_kv H D", "q", "key pool shared by all requests"),
            "v": TensorSpec("N_kv H D", "q", "value pool"),
            "real_seqlen_kv": TensorSpec("B", INT32, "cached tokens of each request"),
            "block_table": TensorSpec("B W", INT32, "pages of each request, in logical order"),
        },
        returns={"o": TensorSpec("B S_q H D", "q", "attention output")},
        options={
            "page_size": "rows of a page, any positive number",
            "is_causal": "query i sees keys up to i + real_seqlen_kv - S_q, else all",
        },
        accuracy={"16-bit": FORWARD},
    )
)
