"""Cases of attention over indexed cache rows."""

import torch

from ops_registry.accuracy import FORWARD
from ops_registry.attention.dsa_decode import DSA_DECODE_FWD
from tests import oracle
from tests.cases import Case, randn


def indices(generator, batch, queries, heads_kv, rows, slots):
    """Distinct rows in random slots, dead values of every kind between them."""
    dead = torch.tensor([-1, rows, 2**31 - 1, -(2**31)])
    pool = torch.cat([torch.arange(rows), dead.repeat(slots)])
    found = torch.empty(batch, queries, heads_kv, slots, dtype=torch.int32)
    for place in found.reshape(-1, slots) if slots else ():
        place.copy_(pool[torch.randperm(len(pool), generator=generator)[:slots]])
    return found


def build(dtype, heads, heads_kv, dim, dim_tail, options):
    def make(size, generator):
        batch, rows, slots = (2 + size % 3, 2 * size + 1, size + 3) if size > 1 else [size] * 3
        width = dim + dim_tail
        return {
            "q": randn(generator, batch, size, heads, width, dtype=dtype),
            "kv": randn(generator, batch, rows, heads_kv, width, dtype=dtype),
            "indices": indices(generator, batch, size, heads_kv, rows, slots),
            "dim_tail": dim_tail,
            **options,
        }

    return make


def expected(call):
    return (oracle.dsa_decode_fwd(*call[:-1]),)


def case(variant, dtype, *sizes, **options):
    return Case(
        contract=DSA_DECODE_FWD,
        variant=variant,
        build=build(dtype, *sizes, options),
        expected=expected,
        tolerances=(FORWARD[dtype],),
        dynamic={
            "q": {0: "B", 1: "S"},
            "kv": {0: "B", 1: "S_kv"},
            "indices": {0: "B", 1: "S", 3: "K"},
        },
    )


CASES = [
    case("bf16", torch.bfloat16, 4, 1, 16, 8, stride_kv=1, q_start_index_s=3),
    case("fp16-strided", torch.float16, 6, 2, 12, 0, stride_kv=4, q_start_index_s=0, sm_scale=0.5),
    case(
        "bf16-full", torch.bfloat16, 2, 2, 10, 3, stride_kv=2, q_start_index_s=0, is_causal=False
    ),
]
