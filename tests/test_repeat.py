"""Repeated calls launch what the launcher would, with the pointers of their own tensors."""

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tests import aot, checks
from tests.cases import all_cases
from tests.triton_target import kernels, triton_cases
from tileops.kernels.common import launch, repeat

every_case = pytest.mark.parametrize("case", triton_cases(), ids=str)


class Compiled:
    """A kernel that writes down what it is launched with."""

    def __init__(self, kernel, log):
        self.kernel, self.log = kernel, log

    def __getitem__(self, grid):
        return lambda *args: self.log.append((self.kernel, grid, args))


@pytest.fixture
def log(monkeypatch):
    """The launches of this process, on CPU tensors and without a device."""
    found = []

    def run(kernel, grid, args, constexprs, options, device):
        rest = tuple(constexprs[name] for name in kernel.arg_names[len(args) :])
        compiled = Compiled(kernel, found)
        compiled[grid](*args, *rest)
        if launch._made is not None:
            launch._made.append(launch.Made(compiled, grid, (*args, *rest)))

    monkeypatch.setattr(launch, "_run", run)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    return found


def addresses(call):
    return [x.data_ptr() for x in checks.tensors_of(call)]


def described(launches, known):
    """The launches with every pointer as its place: known ones first, then others as they come."""
    places = {address: place for place, address in enumerate(known)}

    def place(address):
        return places.setdefault(address, len(places))

    def shown(x):
        if torch.is_tensor(x):
            return ("pointer", place(x.data_ptr())) if x.data_ptr() else 0
        if isinstance(x, TensorDescriptor):
            return "tiles", place(x.base.data_ptr()), *x.shape, *x.strides, *x.block_shape
        if type(x) is int and x > 2**40:
            return "pointer", place(x)
        return x

    return [(k, grid, [shown(x) for x in args]) for k, grid, args in launches]


@every_case
@pytest.mark.parametrize("size", [5, 40])
def test_a_repeat_launches_what_the_launcher_would(case, size, log):
    run = kernels()[case.contract.name].run
    first, second = case.call(size), case.call(size, seed=1)
    infer = aot.infers()[case.contract.name]
    again = repeat.remember(run, infer(first), first)
    assert again is not None
    log.clear()
    outputs = again(addresses(second))
    repeated = described(log, addresses((*second, *repeat._tensors(outputs))))
    log.clear()
    expected = infer(second)
    run(expected, second)
    launched = described(
        log, addresses(second) + [x.data_ptr() for x in repeat._tensors(expected)]
    )
    assert repeated == launched
    assert [(x.shape, x.stride(), x.dtype) for x in repeat._tensors(outputs)] == [
        (x.shape, x.stride(), x.dtype) for x in repeat._tensors(expected)
    ]


def remembered(**changes):
    """How a small dense call is repeated, with some of its arguments changed."""
    case = next(case for case in all_cases() if case.contract.name == "gqa_dense_fwd")
    call = case.call(40)
    call = call._replace(**{name: change(call) for name, change in changes.items()})
    run, infer = kernels()[case.contract.name].run, aot.infers()[case.contract.name]
    return repeat.remember(run, infer(call), call)


def test_tensors_of_one_address_are_not_told_apart(log):
    assert remembered() is not None
    assert remembered(v=lambda call: call.k) is None


def test_a_call_that_copies_is_not_repeated(log):
    assert remembered(k=lambda call: call.k.transpose(1, 2).contiguous().transpose(1, 2)) is None


def test_slices_are_found_by_their_offset():
    x = torch.empty(4, 10)
    places = repeat._Places([x, torch.empty(3)])
    assert places.find(x[1, 3:].data_ptr()) == (0, 13 * 4)
    assert places.find(x.data_ptr() + 4 * 10 * 4) != (0, 160)
    pool = torch.empty(4, 2, 8)
    places = repeat._Places([pool[:, 0], pool[:, 1]])
    assert places.find(pool[:, 1].data_ptr()) == (1, 0)
    assert places.find(pool[2, 1].data_ptr()) is None
