"""Cases of attention over a paged KV cache."""

import torch

from ops_registry.attention.gqa_paged import GQA_PAGED_FWD
from ops_registry.contract import E4M3
from tests import oracle
from tests.cases import Case, lengths, offsets, randn

PADDING = 2  # query rows past the last offset
TAIL = (-1, 2**30)  # table entries past a request's last page


def build(dtype, pool_dtype, *, heads, heads_kv, dim, page_size, scales=None, sinks=False, **opts):
    """scales: "tensor" or "heads", for an e4m3 pool. opts: options of the operator."""
    rope = opts.get("pos_encoding_mode") == "rope"
    out_dtype = opts.get("out_dtype") or dtype

    def make(size, generator):
        q_lens = lengths(size, 5 + size % 3)
        batch = len(q_lens)
        lens = [n + 5 * i for i, n in enumerate(q_lens)]
        if size > 1 and not rope:
            lens[0] = size // 2  # fewer keys than queries
        if size > 2 and rope:
            lens[1] = 0
        counts = [-(-n // page_size) for n in lens]
        tokens = sum(q_lens) + (PADDING if size > 1 else 0)
        width, pages, rows = max(counts, default=0), sum(counts), max(lens, default=0)
        if size > 1:
            fixed = (heads, dim, page_size, batch, batch + 1, tokens)
            width = apart(width + 3, *fixed)
            pages = apart(pages + 2, *fixed, width)
            rows = apart(rows + 2, *fixed, width, pages)
        order = torch.randperm(pages, generator=generator).to(torch.int32)
        table = torch.tensor(TAIL, dtype=torch.int32).repeat(batch * width)[: batch * width]
        table = table.reshape(batch, width)
        for b, count in enumerate(counts):
            table[b, :count], order = order[:count], order[count:]
        pool = (pages, page_size, heads_kv, dim)
        args = {
            "q": randn(generator, tokens, heads, dim, dtype=dtype),
            "k_pages": randn(generator, *pool, dtype=pool_dtype),
            "v_pages": randn(generator, *pool, dtype=pool_dtype),
            "page_table": table,
            "cache_seqlens": torch.tensor(lens, dtype=torch.int32),
            "cu_seqlens_q": offsets(q_lens),
        }

        def scale(*shape):
            return torch.rand(*shape, generator=generator) + 0.5

        if dtype == E4M3:
            args["q_scale"] = scale(batch, heads_kv)
        if pool_dtype == E4M3:
            shape = (1,) if scales == "tensor" else (batch, heads_kv)
            args |= {"k_scale": scale(*shape), "v_scale": scale(*shape)}
        if rope:
            cos, sin = oracle.rope_table(opts.get("rotary_dim") or dim, rows, 100.0, out_dtype)
            args |= {"rope_cos": cos, "rope_sin": sin}
        if sinks:
            args["sinks"] = randn(generator, heads, dtype=torch.float32)
        return args | opts

    return make


def apart(extent, *taken):
    """At least `extent`, and none of the extents that are taken."""
    while extent in taken:
        extent += 1
    return extent


def expected(call):
    return (
        oracle.gqa_paged_fwd(
            *call[:9],
            is_causal=call.is_causal,
            window_size_left=call.window_size_left,
            window_size_right=call.window_size_right,
            sm_scale=call.sm_scale,
            softcap=call.softcap,
            rope_cos=call.rope_cos,
            rope_sin=call.rope_sin,
            rope_layout=call.rope_layout,
            sinks=call.sinks,
        ),
    )


def case(variant, row, dtype, pool_dtype, **kwargs):
    batch = {0: "B"}
    tables = {"rope_cos": {0: "P"}, "rope_sin": {0: "P"}} if "pos_encoding_mode" in kwargs else {}
    scales = {"q_scale": batch} if dtype == E4M3 else {}
    if kwargs.get("scales") == "heads":
        scales |= {"k_scale": batch, "v_scale": batch}
    return Case(
        contract=GQA_PAGED_FWD,
        variant=variant,
        build=build(dtype, pool_dtype, **kwargs),
        expected=expected,
        tolerances=(GQA_PAGED_FWD.accuracy[row][kwargs.get("out_dtype") or dtype],),
        dynamic={
            "q": {0: "T_q"},
            "k_pages": {0: "NP"},
            "v_pages": {0: "NP"},
            "page_table": {0: "B", 1: "W"},
            "cache_seqlens": batch,
            "cu_seqlens_q": {0: "B+1"},
            **scales,
            **tables,
        },
    )


F16, BF16 = torch.float16, torch.bfloat16
ROPE = {"pos_encoding_mode": "rope"}

CASES = [
    case("bf16", "16-bit", BF16, BF16, heads=4, heads_kv=2, dim=16, page_size=4),
    case(
        "fp16-window-softcap-sinks",
        "16-bit",
        F16,
        F16,
        heads=9,
        heads_kv=3,
        dim=24,
        page_size=11,
        sinks=True,
        is_causal=False,
        window_size_left=5,
        window_size_right=2,
        sm_scale=0.3,
        softcap=2.0,
    ),
    case(
        "bf16-rope-interleaved",
        "16-bit, fused RoPE",
        BF16,
        BF16,
        heads=3,
        heads_kv=1,
        dim=20,
        page_size=1,
        window_size_left=9,
        rotary_dim=8,
        rope_layout="interleaved",
        **ROPE,
    ),
    case(
        "fp16-e4m3-pool-rope",
        "16-bit q, e4m3 pool",
        F16,
        E4M3,
        heads=2,
        heads_kv=2,
        dim=24,
        page_size=4,
        scales="tensor",
        sinks=True,
        **ROPE,
    ),
    case(
        "e4m3",
        "e4m3 q, e4m3 pool",
        E4M3,
        E4M3,
        heads=4,
        heads_kv=2,
        dim=16,
        page_size=3,
        scales="heads",
        is_causal=False,
        out_dtype=BF16,
    ),
]
