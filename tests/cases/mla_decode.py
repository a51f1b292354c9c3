"""Cases of latent decode."""

import torch

from ops_registry.attention.mla_decode import MLA_DECODE_FWD
from tests import oracle
from tests.cases import Case, randn


def build(dtype, heads, heads_kv, dim, rotary):
    def make(size, generator):
        batch, rows = (9 + size % 3, size + 12) if size > 1 else (size, size)
        return {
            "q": randn(generator, batch, heads, dim, dtype=dtype),
            "q_pe": randn(generator, batch, heads, rotary, dtype=dtype),
            "k": randn(generator, batch, rows, heads_kv, dim, dtype=dtype),
            "k_pe": randn(generator, batch, rows, heads_kv, rotary, dtype=dtype),
        }

    return make


def expected(call):
    return (oracle.mla_decode_fwd(*call[:4]),)


def case(variant, dtype, **kwargs):
    return Case(
        contract=MLA_DECODE_FWD,
        variant=variant,
        build=build(dtype, **kwargs),
        expected=expected,
        tolerances=(MLA_DECODE_FWD.accuracy["16-bit"][dtype],),
        dynamic={
            "q": {0: "B"},
            "q_pe": {0: "B"},
            "k": {0: "B", 1: "N_kv"},
            "k_pe": {0: "B", 1: "N_kv"},
        },
    )


CASES = [
    case("bf16", torch.bfloat16, heads=4, heads_kv=1, dim=32, rotary=8),
    case("fp16-heads-kv", torch.float16, heads=6, heads_kv=2, dim=24, rotary=6),
    case("bf16-no-rotary", torch.bfloat16, heads=2, heads_kv=1, dim=16, rotary=0),
]
