"""The Triton kernels compile for every chip, into its shared memory, without spilling.

What the launchers ask for is recorded on meta tensors and compiled ahead of time: see
`tests/aot.py`, whose command prints the table of one operator or chip.
"""

import pytest
import torch

from tests import aot, meta_calls
from tests.triton_target import kernels, triton_cases

FAST = "sm_90"  # the chip of the fast suite
# What still spills at the shapes of models, in bytes of stores and loads (registers on AMD): a
# ratchet, nothing may spill more and the aim is an empty table. What `attention_kernel` spills is
# outside its loops over whole blocks, or (sm_89, sm_120) a few numbers of a decode that appends to
# an e4m3 cache; `keys_kernel` does it at D = 256.
SPILLS = {
    "sm_80": {"attention_kernel": 24, "nsa_topk_kernel": 16},
    "sm_89": {"attention_kernel": 36, "nsa_topk_kernel": 16},
    "sm_90": {"attention_kernel": 300, "keys_kernel": 580},
    "sm_100": {
        "attention_kernel": 32,
        "finish_kernel": 8,
        "queries_kernel": 16,
        "rows_kernel": 44,
    },
    "sm_120": {"attention_kernel": 16, "latent_kernel": 24},
    "gfx942": {
        "attention_kernel": 131,
        "keys_kernel": 16,
        "latent_kernel": 21,
        "nsa_varlen_kernel": 7,
        "queries_kernel": 41,
    },
}
every_operator = pytest.mark.parametrize("name", kernels())
every_chip = pytest.mark.parametrize("arch", aot.CHIPS)


def test_every_operator_has_calls():
    assert set(meta_calls.CALLS) == set(kernels())


@every_operator
def test_calls_are_legal_and_served(name):
    for variant, call in meta_calls.CALLS[name]:
        aot.infers()[name](call)
        for arch, chip in aot.CHIPS.items():
            reason = aot.refusal(name, call, chip)
            assert reason is None, f"{variant} on {arch}: {reason}"


def check(name, calls, arch, spilling):
    """Compile what the calls launch, print its table, and judge it."""
    wanted = [x for call in calls for x in aot.launches(name, call, aot.CHIPS[arch])]
    problems, limit = [], aot.CHIPS[arch].shared
    for kernel in aot.distinct(wanted):
        found = aot.compiled(kernel, arch)
        print(found)
        if found.shared > limit * 1024:
            problems.append(f"more than {limit} KiB of shared memory: {found}")
        if found.spills > SPILLS[arch].get(found.kernel, 0) and not spilling:
            problems.append(f"spills registers: {found}")
    assert wanted and not problems, "\n".join(problems)


@every_operator
def test_plainest_call(name):
    check(name, [meta_calls.CALLS[name][0][1]], FAST, spilling=False)


@pytest.mark.aot
@every_chip
@every_operator
def test_model_shapes(name, arch):
    check(name, [call for _, call in meta_calls.CALLS[name]], arch, spilling=False)


@pytest.mark.aot
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
@every_operator
def test_options(name, arch):
    """The options of the cases, at their small and odd dims: a chip of every instruction set."""
    cases = [case for case in triton_cases() if case.contract.name == name]
    calls = [on_meta(case.call(5)) for case in cases]
    check(name, calls, arch, spilling=True)


def on_meta(call):
    return type(call)(*(x.to("meta") if torch.is_tensor(x) else x for x in call))


@pytest.mark.parametrize("case", triton_cases(), ids=str)
def test_sizes_of_one(case):
    """Inductor makes a size of 1 a constant, which has neither dtype nor methods."""
    for size in (1, 40):  # narrow tiles and wide ones
        call = on_meta(case.call(size))
        for wanted in aot.distinct(aot.launches(case.contract.name, call, aot.CHIPS[FAST])):
            aot.check_constants(wanted, FAST)


@every_operator
def test_arguments_are_no_words_of_cpp(name):
    """A package calls a kernel from C++ under the names of its arguments."""
    call = meta_calls.CALLS[name][0][1]
    for launch in aot.launches(name, call, aot.CHIPS[FAST]):
        found = {"do", "for", "if", "int", "new", "this", "union"} & set(launch.kernel.arg_names)
        assert not found, f"{launch.kernel.__name__}: {found}"


@every_operator
def test_only_a_product_needs_a_matrix_instruction(name):
    """On Hopper, a plain prefill call runs on the tensor cores of Hopper."""
    decode = {"gqa_paged_fwd", "mha_decode_paged_fwd"}  # a few queries: smaller than a wgmma
    if name in decode | {"paged_kv_cache_write"}:
        pytest.skip("multiplies no tiles of 64 rows")
    call = meta_calls.CALLS[name][0][1]
    found = [
        aot.compiled(kernel, FAST).instruction
        for kernel in aot.distinct(aot.launches(name, call, aot.CHIPS[FAST]))
    ]
    assert "wgmma" in found, found


@pytest.mark.parametrize("case", triton_cases(), ids=str)
def test_lengths_decide_few_compilations(case):
    """A launcher may choose among kernels by length, and a length compiles nothing of its own."""
    found = set()
    for size in (2, 5, 17, 40, 130):
        launched = aot.launches(case.contract.name, on_meta(case.call(size)), aot.CHIPS[FAST])
        found |= {str(aot.specialization(launch)[1:]) for launch in launched}
    # The gradient of packed rotated rows takes the most: two tile orders, two lookups.
    assert len(found) <= 10, found
