"""How many programs grouped-query attention launches for decode, read from its launchers."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from ops_registry.contract import CONTRACTS
from tests import aot
from tests.meta_calls import I32, meta
from tileops.kernels.common.machine import configuration

CHIP = aot.CHIPS["sm_90"]
DECODE = {"requests": 32, "tokens": 32, "keys": 4096}
PREFILL = {"requests": 4, "tokens": 4096, "keys": 4096}
FEW = {
    "one request": {"requests": 1, "tokens": 1, "keys": 131072, "heads_kv": 4},
    "16 of 70B": {"requests": 16, "tokens": 16, "keys": 8192, "heads": 64},
    "speculation": {"requests": 4, "tokens": 12, "keys": 32768},
}


def paged(requests, tokens, keys, heads=32, heads_kv=8, page=64, tensor=meta):
    pool = tensor(requests * keys // page, page, heads_kv, 128)
    return CONTRACTS["gqa_paged_fwd"].Call(
        q=tensor(tokens, heads, 128),
        k_pages=pool,
        v_pages=pool,
        page_table=tensor(requests, keys // page, dtype=I32),
        cache_seqlens=tensor(requests, dtype=I32),
        cu_seqlens_q=tensor(requests + 1, dtype=I32),
    )


def sized_in_a_trace():
    """Stand-ins whose sizes, but those of pages, heads and columns, are symbols."""
    mode = FakeTensorMode(shape_env=ShapeEnv())

    def tensor(*shape, dtype=torch.bfloat16):
        free = [DimDynamic.DYNAMIC if i == 0 else DimDynamic.STATIC for i in range(len(shape))]
        if len(shape) == 2:
            free[1] = DimDynamic.DYNAMIC
        context = StatelessSymbolicContext(free)
        return mode.from_tensor(meta(*shape, dtype=dtype), symbolic_context=context)

    return mode, tensor


def number(size):
    """A size, or what a symbol stands for."""
    return size if isinstance(size, int) else size.node.hint


def arguments(launch):
    return dict(zip(launch.kernel.arg_names, launch.args, strict=False))


@pytest.mark.parametrize("shape", FEW.values(), ids=FEW.keys())
def test_few_requests_fill_the_machine(shape):
    """Programs that have rows, a request's worth for each of its KV heads: no second wave."""
    attention, _ = aot.launches("gqa_paged_fwd", paged(**shape), CHIP)
    resident = configuration("attention_narrow", "d128", CHIP.machine)["programs_paged"]
    slots = resident * CHIP.machine.processors
    busy = shape["requests"] * attention.constexprs["HEADS_KV"]
    assert 0.9 * slots <= busy * arguments(attention)["splits"] <= slots


@pytest.mark.parametrize("shape", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_of_two_traced_shapes_the_idle_one_joins_nothing(shape):
    """Its parts are memory that nobody filled."""
    mode, tensor = sized_in_a_trace()
    call = paged(**shape, tensor=tensor)
    with mode:
        launches = aot.launches("gqa_paged_fwd", call, CHIP)
    attention, combined = launches[::2], launches[1::2]
    working = [number(launch.grid[0]) > 0 for launch in attention]
    assert sorted(working) == [False, True]
    for works, launch, combine in zip(working, attention, combined, strict=True):
        if not works:
            assert number(combine.grid[0]) == 0
            assert number(arguments(launch)["partial_o"].numel()) == 16
