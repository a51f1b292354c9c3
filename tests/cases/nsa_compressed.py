"""Cases of compressed attention."""

import torch

from ops_registry.accuracy import FORWARD, LSE
from ops_registry.attention.nsa_compressed import NSA_COMPRESSED_FWD
from tests import oracle
from tests.cases import Case, lengths, nsa_packing, randn


def build(dtype, heads, heads_kv, dim, value_dim, bs):
    def make(size, generator):
        packing = nsa_packing(lengths(size, batch=3 + size % 2), bs)
        tokens, chunks = len(packing["token_indices"]), int(packing["chunk_offsets"][-1])
        return {
            "q": randn(generator, tokens, heads, dim, dtype=dtype),
            "k_cmp": randn(generator, chunks, heads_kv, dim, dtype=dtype),
            "v_cmp": randn(generator, chunks, heads_kv, value_dim, dtype=dtype),
            **packing,
            "scale": dim**-0.5,
            "bs": bs,
        }

    return make


def expected(call):
    return oracle.nsa_compressed_fwd(*call[:5], call.scale, call.bs)


def case(variant, dtype, *sizes):
    return Case(
        contract=NSA_COMPRESSED_FWD,
        variant=variant,
        build=build(dtype, *sizes),
        expected=expected,
        tolerances=(FORWARD[dtype], LSE[dtype]),
        dynamic={
            "q": {0: "T"},
            "k_cmp": {0: "C"},
            "v_cmp": {0: "C"},
            "offsets": {0: "N+1"},
            "chunk_offsets": {0: "N+1"},
            "token_indices": {0: "T"},
        },
    )


CASES = [
    case("bf16", torch.bfloat16, 4, 2, 16, 16, 4),
    case("fp16-wide-values", torch.float16, 3, 1, 8, 24, 1),
]
