"""Contract of `gqa_paged_fwd`: packed queries of any length against a paged KV cache."""

from ops_registry.accuracy import FORWARD, FORWARD_ROPE, FP8, FP8_CACHE, FP8_ROPE
from ops_registry.contract import (
    FLOAT32,
    HALF,
    HALF_OR_E4M3,
    INT32,
    OpContract,
    TensorSpec,
    define,
)

GQA_PAGED_FWD = define(
    OpContract(
        name="gqa_paged_fwd",
        op_class="GQAPagedFwdOp",
        summary="Grouped-query attention of packed queries over a paged KV cache, read only.",
        signature=(
            "(Tensor q, Tensor k_pages, Tensor v_pages, Tensor page_table, Tensor cache_seqlens, "
            "Tensor cu_seqlens_q, Tensor? q_scale=None, Tensor? k_scale=None, "
            "Tensor? v_scale=None, Tensor? rope_cos=None, Tensor? rope_sin=None, "
            "Tensor? sinks=None, bool is_causal=True, int window_size_left=-1, "
            "int window_size_right=-1, float? sm_scale=None, float? softcap=None, "
            'ScalarType? out_dtype=None, str pos_encoding_mode="none", int? rotary_dim=None, '
            'str rope_layout="neox", str target="") -> Tensor'
        ),
        letters={
            "T_q": "packed query tokens",
            "B": "requests",
            "H": "query heads",
            "H_kv": "key/value heads, a divisor of H",
            "D": "head dim",
            "NP": "pages in the pool",
            "PS": "tokens per page",
            "W": "page-table columns",
            "P": "rows of the rotary tables",
            "R": "rotated columns of a head",
        },
        tensors={
            "q": TensorSpec("T_q H D", HALF_OR_E4M3, "packed queries"),
            "k_pages": TensorSpec("NP PS H_kv D", HALF_OR_E4M3, "key pool: q's dtype or e4m3"),
            "v_pages": TensorSpec("NP PS H_kv D", "k_pages", "value pool"),
            "page_table": TensorSpec("B W", INT32, "pages of each request, in logical order"),
            "cache_seqlens": TensorSpec("B", INT32, "cached tokens, the query's own included"),
            "cu_seqlens_q": TensorSpec("B+1", INT32, "query offsets; rows past the last are 0"),
            "q_scale": TensorSpec("B H_kv", FLOAT32, "multiplies an e4m3 q", optional=True),
            "k_scale": TensorSpec(
                None, FLOAT32, "[1] or [B, H_kv], multiplies an e4m3 key pool", optional=True
            ),
            "v_scale": TensorSpec(
                None, FLOAT32, "shaped like k_scale, multiplies an e4m3 value pool", optional=True
            ),
            "rope_cos": TensorSpec(None, None, "[P, R/2] in o's dtype", optional=True),
            "rope_sin": TensorSpec(None, None, "[P, R/2] in o's dtype", optional=True),
            "sinks": TensorSpec(
                "H", FLOAT32, "natural-log logit that joins a row's denominator", optional=True
            ),
        },
        returns={
            "o": TensorSpec("T_q H D", HALF, "q's dtype, or out_dtype for an e4m3 q"),
        },
        options={
            "is_causal": "bottom-right aligned: query i sees keys up to i + cache_seqlens - S_q",
            "window_size_left": "keys visible to the left of a query's position, -1 unlimited",
            "window_size_right": "keys visible to the right of a query's position, -1 unlimited",
            "sm_scale": "scale of the scores, None for D**-0.5",
            "softcap": "c * tanh(score / c) before the mask; None or 0 is off",
            "out_dtype": "dtype of o; must be named for an e4m3 q",
            "pos_encoding_mode": "'none', or 'rope': rotate q and the cached keys as read",
            "rotary_dim": "rotated columns R, None for D",
            "rope_layout": "'neox' pairs columns f and f + R/2, 'interleaved' 2f and 2f + 1",
        },
        accuracy={
            "16-bit": FORWARD,
            "16-bit, fused RoPE": FORWARD_ROPE,
            "16-bit q, e4m3 pool": FP8_CACHE,
            "e4m3 q, e4m3 pool": FP8,
            "e4m3 q, e4m3 pool, fused RoPE": FP8_ROPE,
        },
    )
)
