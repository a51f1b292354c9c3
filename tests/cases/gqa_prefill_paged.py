"""Cases of the paged prefill that appends to its cache."""

import torch

from ops_registry.accuracy import EXACT, FORWARD, FORWARD_ROPE, FP8_CACHE, Tolerance
from ops_registry.attention.gqa_prefill_paged import GQA_PREFILL_PAGED_FWD
from ops_registry.contract import E4M3
from tests import oracle
from tests.cases import Case, lengths, offsets, randn

F16, BF16 = torch.float16, torch.bfloat16
PADDING = 2  # packed rows past the last offset
TAIL = (-1, 2**30)  # table entries past a request's last page
STORED = {F16: Tolerance(None, 4e-3, 4e-3), BF16: Tolerance(None, 3e-2, 3e-2)}


def build(dtype, *, heads, heads_kv, dim, page_size, **opts):
    pool_dtype = opts.get("cache_dtype") or dtype

    def make(size, generator):
        new = lengths(size, 3 + size % 3)
        old = [(7 * i + size) % (2 * size + 3) if i else 0 for i in range(len(new))]
        counts = [-(-(c + n) // page_size) for c, n in zip(old, new, strict=True)]
        batch, tokens = len(new), sum(new)
        padded = size > 1 and not opts.get("validate_inputs")
        tokens += PADDING if padded else 0
        width, pages = max(counts, default=0), sum(counts)
        if size > 1:  # every extent distinct, or a compiler takes two for one
            taken = [batch, batch + 1, tokens, heads, heads_kv, dim]
            while (width := width + 1) in taken:
                pass
            taken.append(width)
            while (pages := pages + 1) in taken or pages * page_size in taken:
                pass
        order = torch.randperm(pages, generator=generator).to(torch.int32)
        table = torch.tensor(TAIL, dtype=torch.int32).repeat(batch * width)[: batch * width]
        table = table.reshape(batch, width)
        for b, count in enumerate(counts):
            table[b, :count], order = order[:count], order[count:]
        pool = (pages * page_size, heads_kv, dim)
        return {
            "q": randn(generator, tokens, heads, dim, dtype=dtype),
            "k_new": randn(generator, tokens, heads_kv, dim, dtype=dtype),
            "v_new": randn(generator, tokens, heads_kv, dim, dtype=dtype),
            "k_pages": randn(generator, *pool, dtype=pool_dtype),
            "v_pages": randn(generator, *pool, dtype=pool_dtype),
            "k_scale": torch.tensor([0.75]),
            "v_scale": torch.tensor([1.5]),
            "cu_seqlens_q": offsets(new),
            "cache_seqlens": torch.tensor(old, dtype=torch.int32),
            "block_table": table,
            "page_size": page_size,
            "max_seqlen_q": 1024,
        } | opts

    return make


def expected(call):
    """o and both pools; a rotated e4m3 key may round either way, a test of its own looks."""
    o = oracle.gqa_prefill_paged_fwd(
        *call[:11],
        is_causal=call.is_causal,
        sm_scale=call.sm_scale,
        softcap=call.softcap,
        fuse_rope=call.fuse_rope,
        rope_base=call.rope_base,
        max_position=call.max_position,
        rotary_dim=call.rotary_dim,
    )
    rotated_codes = call.fuse_rope and call.k_pages.dtype == E4M3
    return o, None if rotated_codes else call.k_pages, call.v_pages


def case(variant, dtype, tolerance, **kwargs):
    rotated = kwargs.get("fuse_rope") and kwargs.get("cache_dtype") != E4M3
    page_size = kwargs["page_size"]
    return Case(
        contract=GQA_PREFILL_PAGED_FWD,
        variant=variant,
        build=build(dtype, **kwargs),
        expected=expected,
        tolerances=(tolerance[dtype], STORED[dtype] if rotated else EXACT, EXACT),
        dynamic={
            "q": {0: "T_q"},
            "k_new": {0: "T_q"},
            "v_new": {0: "T_q"},
            "k_pages": {0: f"{page_size}*NP"},
            "v_pages": {0: f"{page_size}*NP"},
            "cu_seqlens_q": {0: "B+1"},
            "cache_seqlens": {0: "B"},
            "block_table": {0: "B", 1: "W"},
        },
    )


CASES = [
    case("bf16", BF16, FORWARD, heads=4, heads_kv=2, dim=16, page_size=4),
    case(
        "fp16-softcap-validated",
        F16,
        FORWARD,
        heads=3,
        heads_kv=1,
        dim=24,
        page_size=7,
        is_causal=False,
        sm_scale=0.3,
        softcap=2.0,
        validate_inputs=True,
    ),
    case(
        "bf16-rope",
        BF16,
        FORWARD_ROPE,
        heads=2,
        heads_kv=2,
        dim=20,
        page_size=1,
        fuse_rope=True,
        max_position=4096,
        rotary_dim=8,
    ),
    case(
        "fp16-e4m3",
        F16,
        FP8_CACHE,
        heads=4,
        heads_kv=2,
        dim=16,
        page_size=4,
        cache_dtype=E4M3,
    ),
    case(
        "bf16-e4m3-rope-validated",
        BF16,
        FP8_CACHE,
        heads=4,
        heads_kv=1,
        dim=16,
        page_size=5,
        cache_dtype=E4M3,
        fuse_rope=True,
        rope_base=500.0,
        max_position=4096,
        validate_inputs=True,
    ),
]
