"""Captured calls replay on changed contents and lengths; streams and devices are the tensors'."""

import pytest
import torch

from tests import checks
from tests.gpu.cases import CASES, first_cases, moved, on, unvalidated
from tests.gpu.relength import relengthened

every_case = pytest.mark.parametrize("case", [unvalidated(c) for c in CASES], ids=str)


def overwrite(static, call):
    for x, y in zip(static, call, strict=True):
        if torch.is_tensor(x):
            x.copy_(y)


def captured(op, call):
    """The graph of a call, its static inputs and its result."""
    static = checks.clone(call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = op(*static)
    return graph, static, result


@every_case
def test_capture_and_replay(case):
    """One graph serves other contents, lengths, tables and slots of the same shapes."""
    first = case.call(21)
    case.contract.op(*checks.clone(first))
    graph, static, result = captured(case.contract.op, first)
    for seed in range(4):
        call = relengthened(case.call(21, seed), seed) if seed else first
        overwrite(static, call)
        graph.replay()
        checks.check_against(case, checks.outputs_of(case, static, result), call)


@every_case
def test_capture_of_another_size(case):
    """A call of one size warms the capture of another: no kernel is compiled for a length."""
    case.contract.op(*case.call(13))
    call = case.call(22)
    graph, static, result = captured(case.contract.op, call)
    overwrite(static, call)
    graph.replay()
    checks.check_against(case, checks.outputs_of(case, static, result), call)


@pytest.mark.parametrize("case", [c for c in CASES if "validated" in c.variant], ids=str)
def test_contents_checks_refuse_a_capture(case):
    call = case.call(5)
    unvalidated(case).contract.op(*call._replace(validate_inputs=False))
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="cannot run while a CUDA graph is captured"),
        torch.cuda.graph(graph),
    ):
        case.contract.op(*call)


@pytest.mark.parametrize("case", [unvalidated(c) for c in first_cases()], ids=str)
def test_reduce_overhead(case):
    """Graphs that torch.compile makes, over five calls."""
    with checks.fresh_dynamo(), torch.no_grad():
        compiled = torch.compile(
            lambda *args: case.contract.op(*args), mode="reduce-overhead", fullgraph=True
        )
        for seed in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            call = relengthened(case.call(9, seed), seed)
            used = checks.clone(call)
            result = compiled(*used)
            copied = (
                result if result is None else torch.utils._pytree.tree_map(torch.clone, result)
            )
            checks.check_against(case, checks.outputs_of(case, used, copied), call)


def late(call):
    """The call on tensors that are filled only after a long kernel on the current stream."""
    empty = [torch.zeros_like(x) if torch.is_tensor(x) else x for x in checks.clone(call)]
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    for x, y in zip(empty, call, strict=True):
        if torch.is_tensor(x):
            x.copy_(y, non_blocking=True)
    return type(call)(*empty)


@every_case
def test_side_stream(case):
    case.contract.op(*case.call(9))
    call = case.call(9)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        used = late(call)
        result = case.contract.op(*used)
    stream.synchronize()
    checks.check_against(case, checks.outputs_of(case, used, result), call)


two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@two
@every_case
def test_other_device(case):
    """Inputs on cuda:1 while cuda:0 is current."""
    other = on(case, "cuda:1")
    with torch.cuda.device(0):
        checks.check_values(other, 9)
        assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        checks.check_values(on(case, "cuda:0"), 9)
        assert torch.cuda.current_device() == 1


@two
@pytest.mark.parametrize("case", first_cases(), ids=str)
def test_devices_do_not_mix(case):
    call = case.call(5)
    name = list(case.contract.tensors)[1]
    mixed = call._replace(**{name: moved(call, "cuda:1")[1]})
    with pytest.raises((ValueError, RuntimeError), match="device"):
        case.contract.op(*mixed)
