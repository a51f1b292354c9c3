"""Cases of attention over selected blocks."""

import torch

from ops_registry.accuracy import FORWARD
from ops_registry.attention.nsa_varlen import NSA_VARLEN_FWD
from tests import oracle
from tests.cases import Case, lengths, nsa_packing, randn


def build(dtype, heads, heads_kv, dim, bs, is_causal):
    def make(size, generator):
        packing = nsa_packing(lengths(size, batch=3 + size % 2), bs)
        tokens, slots = len(packing["token_indices"]), size + 2 if size > 1 else size
        shape = (tokens, heads_kv, slots)
        blocks = torch.randint(-2, size // bs + 3, shape, generator=generator)
        blocks[torch.rand(shape, generator=generator) < 0.1] = 2**31 - 1
        return {
            "q": randn(generator, tokens, heads, dim, dtype=dtype),
            "k": randn(generator, tokens, heads_kv, dim, dtype=dtype),
            "v": randn(generator, tokens, heads_kv, dim, dtype=dtype),
            "block_indices": blocks.to(torch.int32),
            "block_counts": torch.randint(
                -1, slots + 2, (tokens, heads_kv), generator=generator, dtype=torch.int32
            ),
            "offsets": packing["offsets"],
            "token_indices": packing["token_indices"],
            "is_causal": is_causal,
            "scale": dim**-0.5,
            "block_size": bs,
        }

    return make


def expected(call):
    return (oracle.nsa_fwd(*call[:6], call.is_causal, call.scale, call.block_size),)


def case(variant, dtype, *options):
    return Case(
        contract=NSA_VARLEN_FWD,
        variant=variant,
        build=build(dtype, *options),
        expected=expected,
        tolerances=(FORWARD[dtype],),
        dynamic={
            "q": {0: "T"},
            "k": {0: "T"},
            "v": {0: "T"},
            "block_indices": {0: "T", 2: "SEL"},
            "block_counts": {0: "T"},
            "offsets": {0: "N+1"},
            "token_indices": {0: "T"},
        },
    )


CASES = [
    case("bf16-causal", torch.bfloat16, 4, 2, 16, 4, True),
    case("fp16-full", torch.float16, 3, 1, 8, 3, False),
]
