"""Contract of `gqa_prefill_paged_fwd`: attend a packed chunk and append it to a paged cache."""

from ops_registry.accuracy import EXACT, FORWARD, FORWARD_ROPE, FP8_CACHE
from ops_registry.contract import (
    FLOAT32,
    HALF,
    HALF_OR_E4M3,
    INT32,
    OpContract,
    TensorSpec,
    define,
)

GQA_PREFILL_PAGED_FWD = define(
    OpContract(
        name="gqa_prefill_paged_fwd",
        op_class="GQAPrefillPagedWithKVCacheFwdOp",
        summary="Grouped-query attention of a packed chunk over a paged cache, which it extends.",
        signature=(
            "(Tensor q, Tensor k_new, Tensor v_new, Tensor(a!) k_pages, Tensor(b!) v_pages, "
            "Tensor k_scale, Tensor v_scale, Tensor cu_seqlens_q, Tensor cache_seqlens, "
            "Tensor block_table, int page_size, int max_seqlen_q, bool is_causal=True, "
            "ScalarType? cache_dtype=None, float? sm_scale=None, float? softcap=None, "
            "bool fuse_rope=False, float rope_base=10000.0, int? max_position=None, "
            'int? rotary_dim=None, bool validate_inputs=False, str target="") -> Tensor'
        ),
        letters={
            "T_q": "packed new tokens",
            "B": "requests",
            "H": "query heads",
            "H_kv": "key/value heads, a divisor of H",
            "D": "head dim",
            "N_kv": "rows of the pool, a multiple of page_size",
            "W": "block-table columns",
        },
        tensors={
            "q": TensorSpec("T_q H D", HALF, "queries of the new tokens, packed by request"),
            "k_new": TensorSpec("T_q H_kv D", "q", "keys of the new tokens"),
            "v_new": TensorSpec("T_q H_kv D", "q", "values of the new tokens"),
            "k_pages": TensorSpec(
                "N_kv H_kv D", HALF_OR_E4M3, "key pool in the cache dtype", mutated=True
            ),
            "v_pages": TensorSpec("N_kv H_kv D", "k_pages", "value pool", mutated=True),
            "k_scale": TensorSpec("1", FLOAT32, "scale of an e4m3 key pool, else ignored"),
            "v_scale": TensorSpec("1", FLOAT32, "scale of an e4m3 value pool, else ignored"),
            "cu_seqlens_q": TensorSpec("B+1", INT32, "offsets of the requests in q"),
            "cache_seqlens": TensorSpec("B", INT32, "cached tokens before the append"),
            "block_table": TensorSpec("B W", INT32, "pages of each request, in logical order"),
        },
        returns={"o": TensorSpec("T_q H D", "q", "attention output")},
        options={
            "page_size": "tokens per page",
            "max_seqlen_q": "launch bound: the most new tokens of one request",
            "is_causal": "new token i of a request sees keys up to its own position",
            "cache_dtype": "dtype of the pools: q's (None) or float8_e4m3fn",
            "sm_scale": "scale of the scores, None for D**-0.5",
            "softcap": "c * tanh(score / c) before the mask; None or 0 is off",
            "fuse_rope": "rotate q and the new keys (neox); cached keys are rotated already",
            "rope_base": "base of the rotary frequencies",
            "max_position": "positions that validate_inputs admits with fuse_rope",
            "rotary_dim": "rotated columns of a head, None for D",
            "validate_inputs": "check tensor contents on every call, at the cost of a host read",
        },
        accuracy={
            "o": FORWARD,
            "o, fused RoPE": FORWARD_ROPE,
            "o, e4m3 pool": FP8_CACHE,
            "stored rows, without RoPE": EXACT,
        },
        guard="cu_seqlens_q",
    )
)
