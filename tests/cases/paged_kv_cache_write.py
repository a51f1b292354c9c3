"""Cases of the paged KV cache write."""

import torch

from ops_registry.accuracy import EXACT
from ops_registry.attention.paged_kv_cache_write import PAGED_KV_CACHE_WRITE
from ops_registry.contract import E4M3
from tests import oracle
from tests.cases import Case, randn

H_KV, D, PS = 2, 16, 4


def build(dtype, pool_dtype):
    def make(size, generator):
        pages = size + 2 if size > 1 else size
        pool = randn(generator, pages, PS, H_KV, D, dtype=torch.float32).to(pool_dtype)
        slots = torch.randperm(pages * PS, generator=generator)[:size] if size else torch.empty(0)
        slots = slots.to(torch.int64)
        if size > 2:
            slots[1] = -1
        args = {
            "k": randn(generator, size, H_KV, D, dtype=dtype),
            "v": randn(generator, size, H_KV, D, dtype=dtype),
            "k_pages": pool,
            "v_pages": pool.clone(),
            "slot_mapping": slots,
        }
        if pool_dtype == E4M3:
            args |= {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([0.25])}
        return args

    return make


def expected(call):
    oracle.paged_kv_cache_write(*call[:7])
    return call.k_pages, call.v_pages


def case(variant, dtype, pool_dtype):
    return Case(
        contract=PAGED_KV_CACHE_WRITE,
        variant=variant,
        build=build(dtype, pool_dtype),
        expected=expected,
        tolerances=(EXACT, EXACT),
        dynamic={
            "k": {0: "T"},
            "v": {0: "T"},
            "k_pages": {0: "NP"},
            "v_pages": {0: "NP"},
            "slot_mapping": {0: "T"},
        },
    )


CASES = [
    case("bf16", torch.bfloat16, torch.bfloat16),
    case("fp16", torch.float16, torch.float16),
    case("bf16-e4m3", torch.bfloat16, E4M3),
]
