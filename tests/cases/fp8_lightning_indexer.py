"""Cases of the lightning indexer."""

import torch

from ops_registry.accuracy import INDEXER
from ops_registry.attention.fp8_lightning_indexer import FP8_LIGHTNING_INDEXER
from ops_registry.contract import E4M3
from tests import oracle
from tests.cases import Case, randn


def build(dtype, heads, groups, dim, scaled, clean):
    def make(size, generator):
        batch, keys = (2 + size % 3, 2 * size + 1) if size > 1 else [size] * 2
        args = {
            "index_q": randn(generator, batch, size, heads, dim, dtype=dtype),
            "index_k": randn(generator, batch, keys, groups, dim, dtype=dtype),
            "weights": randn(generator, size, heads, dtype=torch.float32),
            # Some windows are inverted, some reach past the keys.
            "cu_seqlen_ks": torch.randint(-2, keys + 1, (size,), generator=generator),
            "cu_seqlen_ke": torch.randint(-1, keys + 3, (size,), generator=generator),
            "clean_logits": clean,
        }
        if not clean:
            args["cu_seqlen_ks"].fill_(0)
            args["cu_seqlen_ke"].fill_(keys)
        if scaled:
            scale = torch.rand(batch, keys, groups, generator=generator)
            args["index_k_scale"] = scale + 0.1
        for name in ("cu_seqlen_ks", "cu_seqlen_ke"):
            args[name] = args[name].to(torch.int32)
        return args

    return make


def expected(call):
    return (oracle.fp8_lightning_indexer(*call[:6]),)


def case(variant, dtype, heads, groups, dim, scaled, clean):
    return Case(
        contract=FP8_LIGHTNING_INDEXER,
        variant=variant,
        build=build(dtype, heads, groups, dim, scaled, clean),
        expected=expected,
        tolerances=(INDEXER[torch.float32],),
        dynamic={
            "index_q": {0: "B", 1: "S"},
            "index_k": {0: "B", 1: "S_kv"},
            "weights": {0: "S"},
            "cu_seqlen_ks": {0: "S"},
            "cu_seqlen_ke": {0: "S"},
            **({"index_k_scale": {0: "B", 1: "S_kv"}} if scaled else {}),
        },
    )


CASES = [
    case("bf16", torch.bfloat16, 4, 1, 16, False, True),
    case("e4m3-scaled", E4M3, 4, 2, 16, True, True),
    case("e4m3-unclean", E4M3, 3, 1, 8, False, False),
]
