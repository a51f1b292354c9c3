"""Cases of multi-head decode over a paged KV cache."""

import torch

from ops_registry.attention.mha_decode_paged import MHA_DECODE_PAGED_FWD
from tests import oracle
from tests.cases import Case, randn

HEADS, D = 2, 24
TAIL = (-1, 2**30)  # table entries past a request's last page


def build(dtype, page_size, is_causal):
    def make(size, generator):
        batch = 3 + size % 3 if size > 1 else size
        queries = 6 + size % 5 if size > 1 else size
        lens = [(0, size, queries - 1, 2 * size + 1, 3)[b % 5] for b in range(batch)]
        if size == 1:
            lens = [1]
        counts = [-(-n // page_size) for n in lens]
        spare = 11 if size > 1 else 0
        width, pages = max(counts, default=0) + spare, sum(counts) + 3 * spare
        order = torch.randperm(pages, generator=generator).to(torch.int32)
        table = torch.tensor(TAIL, dtype=torch.int32).repeat(batch * width)[: batch * width]
        table = table.reshape(batch, width)
        for b, count in enumerate(counts):
            table[b, :count], order = order[:count], order[count:]
        return {
            "q": randn(generator, batch, queries, HEADS, D, dtype=dtype),
            "k": randn(generator, pages * page_size, HEADS, D, dtype=dtype),
            "v": randn(generator, pages * page_size, HEADS, D, dtype=dtype),
            "real_seqlen_kv": torch.tensor(lens, dtype=torch.int32),
            "block_table": table,
            "page_size": page_size,
            "is_causal": is_causal,
        }

    return make


def expected(call):
    return (oracle.mha_decode_paged_fwd(*call[:7]),)


def case(variant, dtype, page_size, is_causal):
    pool = {0: f"{page_size}*NP" if page_size > 1 else "NP"}
    return Case(
        contract=MHA_DECODE_PAGED_FWD,
        variant=variant,
        build=build(dtype, page_size, is_causal),
        expected=expected,
        tolerances=(MHA_DECODE_PAGED_FWD.accuracy["16-bit"][dtype],),
        dynamic={
            "q": {0: "B", 1: "S_q"},
            "k": pool,
            "v": pool,
            "real_seqlen_kv": {0: "B"},
            "block_table": {0: "B", 1: "W"},
        },
    )


CASES = [
    case("fp16", torch.float16, 4, False),
    case("bf16-causal", torch.bfloat16, 7, True),
]
