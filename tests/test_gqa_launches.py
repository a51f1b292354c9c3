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
from tests.meta_calls import F32, I32, meta
from tileops.kernels.common.machine import configuration
from tileops.kernels.common.triton_gqa import even_splits, splits_wanted

CHIP = aot.CHIPS["sm_90"]
DECODE = {"requests": 32, "tokens": 32, "keys": 4096}
PREFILL = {"requests": 4, "tokens": 4096, "keys": 4096}
FEW = {
    "one request": {"requests": 1, "tokens": 1, "keys": 131072, "heads_kv": 4},
    "16 of 70B": {"requests": 16, "tokens": 16, "keys": 8192, "heads": 64},
    "speculation": {"requests": 4, "tokens": 12, "keys": 32768},
}


def paged(
    requests, tokens, keys, heads=32, heads_kv=8, page=64, tensor=meta, cache=None, **options
):
    pool = tensor(
        requests * keys // page, page, heads_kv, 128, **({"dtype": cache} if cache else {})
    )
    return CONTRACTS["gqa_paged_fwd"].Call(
        q=tensor(tokens, heads, 128),
        k_pages=pool,
        v_pages=pool,
        page_table=tensor(requests, keys // page, dtype=I32),
        cache_seqlens=tensor(requests, dtype=I32),
        cu_seqlens_q=tensor(requests + 1, dtype=I32),
        **options,
    )


def multi_head(tokens, is_causal):
    pool = meta(4 * 4096, 32, 128)
    return CONTRACTS["mha_decode_paged_fwd"].Call(
        q=meta(4, tokens, 32, 128),
        k=pool,
        v=pool,
        real_seqlen_kv=meta(4, dtype=I32),
        block_table=meta(4, 4096 // 64, dtype=I32),
        page_size=64,
        is_causal=is_causal,
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


def time(programs, slots, splits):
    """In waves, each the time of one program for all its keys, of which it walks a part."""
    return -(-programs * splits // slots) / splits


@pytest.mark.parametrize("slots", [132, 264, 296])
def test_no_wave_is_left_idle_that_more_splits_would_fill(slots):
    keys = 2**20
    for programs in range(1, 8 * slots):
        few, splits = splits_wanted(programs, slots, keys), even_splits(programs, slots, keys)
        assert time(programs, slots, splits) <= time(programs, slots, few)
        more = time(programs, slots, 2 * few + 1) <= 7 / 8 * time(programs, slots, few)
        assert splits == min(2 * few + 1 if more else few, 128)
        assert even_splits(programs, slots, 256) == 1


@pytest.mark.parametrize("requests, splits", [(32, 1), (40, 3), (64, 1), (128, 1)])
def test_requests_that_leave_the_last_wave_idle_are_split(requests, splits):
    attention, *_ = aot.launches("gqa_paged_fwd", paged(requests, requests, 4096), CHIP)
    assert arguments(attention)["splits"] == splits


def test_keys_outside_of_a_window_are_not_split():
    call = paged(**FEW["one request"], window_size_left=127)
    (attention,) = aot.launches("gqa_paged_fwd", call, CHIP)
    assert arguments(attention)["splits"] == 1
    call = paged(**FEW["one request"], window_size_left=127, is_causal=False)
    assert len(aot.launches("gqa_paged_fwd", call, CHIP)) == 2  # it sees all that follow


def test_one_token_sees_the_same_keys_under_a_causal_mask():
    """So that one kernel serves both; of several tokens only the last does."""
    kernels = {
        (tokens, causal): aot.distinct(
            aot.launches("mha_decode_paged_fwd", multi_head(tokens, causal), CHIP)
        )
        for tokens in (1, 4)
        for causal in (False, True)
    }
    assert kernels[1, False] == kernels[1, True] == kernels[4, True] != kernels[4, False]


def test_blocks_of_bytes_have_as_many_bytes_on_their_way():
    scale = meta(1, dtype=F32)
    scales = {"k_scale": scale, "v_scale": scale}
    call = paged(**DECODE, cache=torch.float8_e4m3fn, **scales)
    bytes_, pairs = (
        aot.launches("gqa_paged_fwd", x, CHIP)[0].stages for x in (call, paged(**DECODE))
    )
    # A step of the pipeline is the page table's: two blocks ahead and one.
    assert ((bytes_ - 1) // 2, (pairs - 1) // 2) == (2, 1)


def test_dense_blocks_of_bytes_keep_their_stages():
    """Nothing waits for a page table there: three stages take 82 us where five take 119."""
    options = {f"{x}_scale": meta(32, 8, dtype=F32) for x in "qkv"} | {"out_dtype": torch.bfloat16}

    def stages(dtype, **options):
        q, k = meta(32, 1, 32, 128, dtype=dtype), meta(32, 4096, 8, 128, dtype=dtype)
        call = CONTRACTS["gqa_dense_fwd"].Call(q=q, k=k, v=k, **options)
        return aot.launches("gqa_dense_fwd", call, CHIP)[0].stages

    assert stages(torch.float8_e4m3fn, **options) == stages(torch.bfloat16)


def test_parts_of_a_long_request_are_joined_in_few_steps():
    _, combine = aot.launches("gqa_paged_fwd", paged(**FEW["one request"]), CHIP)
    assert arguments(combine)["splits"] <= 2 * combine.constexprs["BLOCK_S"]
    assert combine.constexprs["BLOCK_S"] * combine.constexprs["BLOCK_D"] <= 2**13


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
