"""Cases of block selection.

They have no near ties, and the kernels here rank equal scores as the oracle does, so that ids
compare exactly. `tests/attention/test_nsa_topk.py` judges answers by admissibility.
"""

import torch

from ops_registry.accuracy import EXACT
from ops_registry.attention.nsa_topk import NSA_TOPK
from tests import oracle
from tests.cases import Case, lengths, nsa_packing, randn


def build(dtype, heads, heads_kv, dim, bs, selected):
    def make(size, generator):
        packing = nsa_packing(lengths(size, batch=3 + size % 2), bs)
        tokens, chunks = len(packing["token_indices"]), int(packing["chunk_offsets"][-1])
        return {
            "q": randn(generator, tokens, heads, dim, dtype=dtype),
            "k_cmp": randn(generator, chunks, heads_kv, dim, dtype=dtype),
            **packing,
            "scale": 0.3,
            "selected_block_num": selected,
            "bs": bs,
        }

    return make


def expected(call):
    return (oracle.nsa_topk(*call[:4], call.scale, call.selected_block_num, call.bs),)


def case(variant, dtype, *sizes):
    return Case(
        contract=NSA_TOPK,
        variant=variant,
        build=build(dtype, *sizes),
        expected=expected,
        tolerances=(EXACT,),
        dynamic={
            "q": {0: "T"},
            "k_cmp": {0: "C"},
            "offsets": {0: "N+1"},
            "chunk_offsets": {0: "N+1"},
            "token_indices": {0: "T"},
        },
    )


CASES = [
    case("bf16", torch.bfloat16, 4, 2, 16, 4, 6),
    case("fp16-wider-than-bs", torch.float16, 3, 1, 8, 2, 20),
]
