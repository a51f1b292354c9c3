"""What compilers see of the Triton kernels, traced on CPU tensors with a stand-in for the driver.

The graph has the kernels in it, with symbolic grids, and knows what each of them writes; tracing
records no guard beyond those of `infer_*`; and another size gives the same graph.
"""

import functools
import operator
from typing import Any, NamedTuple

import pytest
import torch
from torch._higher_order_ops import triton_kernel_wrap
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_functional,
)

from ops_registry import tracing
from tests import checks, triton_target
from tests.triton_target import through_triton, triton_cases

triton = pytest.importorskip("triton")

CASES = triton_cases()
every_case = pytest.mark.parametrize("case", CASES, ids=str)


class FakeDriver:
    """A Hopper GPU for whoever only asks what to compile for."""

    def get_current_target(self):
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_benchmarker(self):
        return lambda fn, quantiles=None, **options: (fn(), [0.0, 0.0, 0.0])[1]


@pytest.fixture(scope="module", autouse=True)
def driver():
    with pytest.MonkeyPatch.context() as patch, triton_target.registered():
        patch.setattr(triton.runtime.driver, "_active", FakeDriver())
        yield


@pytest.fixture(autouse=True)
def complaints():
    with triton_target.complaints() as found:
        yield
    assert not found, found


class Kernel(NamedTuple):
    """One launch in a graph."""

    name: str
    grid: tuple[str, ...]
    constants: str


class Seen(NamedTuple):
    """What a graph shows. written: the inputs of the graph that kernels write, as numbers."""

    kernels: list[Kernel]
    targets: set[Any]
    written: set[int]


def value(x: Any) -> str:
    """A number of a graph as an expression in the sizes of the inputs."""
    x = x.meta["val"] if isinstance(x, torch.fx.Node) else x
    return str(x.node.expr if isinstance(x, (torch.SymInt, torch.SymFloat)) else x)


def origin(node: torch.fx.Node) -> torch.fx.Node:
    """What a tensor is a view or a later state of: an input, or where it was made."""
    while node.op == "call_function":
        if node.target is operator.getitem:
            source, key = node.args
            if source.target is not triton_kernel_wrapper_functional:
                return node
            node = source.kwargs["kwargs"][key]
        elif node.target._schema.returns[0].alias_info is not None:
            node = node.args[0]
        else:
            return node
    return node


def is_tensor(x: Any) -> bool:
    return isinstance(x, torch.fx.Node) and torch.is_tensor(x.meta["val"])


def kernel_of(node: torch.fx.Node) -> Kernel:
    kw = node.kwargs
    (grid,) = {tuple(map(value, grid)) for grid in kw["grid"]}
    kernel = kernel_side_table.get_kernel(kw["kernel_idx"])
    constants = kernel_side_table.get_constant_args(kw["constant_args_idx"])
    numbers = {k: value(x) for k, x in kw["kwargs"].items() if not is_tensor(x)}
    return Kernel(
        getattr(kernel, "base_fn", kernel.fn).__name__,
        grid,
        str((sorted(constants.items(), key=str), sorted(numbers.items()))),
    )


def seen(graph: torch.fx.Graph) -> Seen:
    launches = [n for n in graph.nodes if n.target is triton_kernel_wrapper_functional]
    inputs = [n for n in graph.nodes if n.op == "placeholder" and is_tensor(n)]
    written = {
        origin(n.kwargs["kwargs"][name]) for n in launches for name in n.kwargs["tensors_to_clone"]
    }
    return Seen(
        [kernel_of(n) for n in launches],
        {n.target for n in graph.nodes},
        {index for index, node in enumerate(inputs) if node in written},
    )


TRACES: dict[tuple[str, int], checks.Recorded] = {}


def traced(case, size):
    """The case traced through the target; each test looks at another side of it."""
    key = str(case), size
    if key not in TRACES:
        call = through_triton(case).call(size)
        TRACES[key] = checks.recorded(case.contract.op, call, case.dynamic, seen)
    return TRACES[key]


@every_case
def test_guards_are_those_of_infer(case):
    whole = checks.recorded(case.contract.op, case.call(9), case.dynamic)
    found = traced(case, 9)
    assert found.guards <= whole.guards, f"extra guards {found.guards - whole.guards}"
    assert found.specialized == whole.specialized


@every_case
def test_graph_holds_the_kernels(case):
    kernels, targets, _ = traced(case, 9).seen
    assert kernels and case.contract.op not in targets
    assert any(not extent.isdigit() for kernel in kernels for extent in kernel.grid)


@every_case
def test_what_is_written_is_known(case):
    """Kernels write outputs, pools and memory of their own, and no other input."""
    names = [n for n, x in case.call(9)._asdict().items() if torch.is_tensor(x)]
    written = {names[index] for index in traced(case, 9).seen.written}
    assert written == set(case.contract.mutated)


@every_case
def test_what_is_written_is_found_out_once(case, monkeypatch):
    """Reading a kernel takes torch 0.2 s, several times a launch: minutes for a whole model."""
    written = traced(case, 9).seen.written

    def read_again(kernel, *_):
        raise AssertionError(f"{kernel} is read again")

    monkeypatch.setattr(triton_kernel_wrap, "generate_ttir", read_again)
    again = checks.recorded(case.contract.op, through_triton(case).call(9), case.dynamic, seen)
    assert again.seen.written == written


def test_what_torch_could_not_read_is_not_remembered(monkeypatch):
    """It says that every tensor is written then, for this launch and not for the next one."""
    kernel, answers = object(), iter([["x", "y"], ["y"]])
    monkeypatch.setattr(tracing, "_REMEMBERED", {kernel})
    written = tracing._remembering(lambda *_: next(answers))
    launch = {"x": torch.ones(1), "y": torch.ones(1), "n": 3}
    assert [written(kernel, launch, {}) for _ in range(3)] == [["x", "y"], ["y"], ["y"]]


@every_case
def test_another_size_gives_the_same_graph(case):
    assert traced(case, 9).seen.kernels == traced(case, 34).seen.kernels


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_cache_is_read_as_it_lies(heads_first, dynamic):
    """The filled part of a cache, of a fixed or a dynamic size, is not copied in a graph."""

    class Step(NamedTuple):
        q: torch.Tensor
        k_cache: torch.Tensor
        v_cache: torch.Tensor

    def attend(target, q, *caches):
        if heads_first:
            caches = [x.transpose(1, 2) for x in caches]
        k, v = (x[:, : x.shape[1] - q.shape[1]] for x in caches)
        return torch.ops.tileops.gqa_dense_fwd(q, k, v, target=target)

    def keys_and_targets(graph):
        found = [n for n in graph.nodes if n.target is triton_kernel_wrapper_functional]
        keys = [origin(n.kwargs["kwargs"]["k"]).op for n in found if "k" in n.kwargs["kwargs"]]
        return keys, {n.target for n in graph.nodes}

    shape = (3, 2, 40, 32) if heads_first else (3, 40, 2, 32)
    step = Step(*(torch.randn(s).half() for s in ((3, 5, 4, 32), shape, shape)))
    axes = (0, 2 if heads_first else 1) if dynamic else (0,)
    marked = {"q": (0, 1), "k_cache": axes, "v_cache": axes}
    whole, found = (
        checks.recorded(functools.partial(attend, target), step, marked, keys_and_targets)
        for target in ("", triton_target.TARGET)
    )
    keys, targets = found.seen
    assert keys and set(keys) == {"placeholder"} and torch.ops.aten.clone.default not in targets
    assert found.guards <= whole.guards, f"extra guards {found.guards - whole.guards}"
