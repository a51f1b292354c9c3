"""Launches that are made together: what is new compiles side by side, then they run in order."""

import threading

import pytest
import torch
from triton.runtime import _async_compile

from tileops.kernels.common import launch

WAIT_S = 20


class Kernel:
    """Compiles only while another does; writes down what happens to it."""

    arg_names = ("x", "SIZE")

    def __init__(self, name, others, log):
        self.name, self.others, self.log = name, others, log
        self.fn = self

    def warmup(self, x, *, grid, **options):
        def compiled():
            self.others.wait(WAIT_S)
            self.log.append(f"compiled {self.name}")

        mode = _async_compile.active_mode.get()
        return mode.submit(self.name, compiled, lambda kernel: None)

    def __getitem__(self, grid):
        return self.run

    def run(self, x, *constexprs, **options):
        self.log.append(f"ran {self.name}")
        return self


@pytest.fixture
def log(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "keep_key", lambda: None)
    monkeypatch.setattr(launch, "hash_from_below", lambda kernel: None)
    monkeypatch.setattr(launch, "_compiled", {})
    return []


def start(*kernels):
    for kernel in kernels:
        launch.launch(kernel, (1,), torch.zeros(1), SIZE=1, warps=4, stages=1)


def test_new_kernels_compile_side_by_side_and_run_in_order(log):
    others = threading.Barrier(2)
    first, second = Kernel("first", others, log), Kernel("second", others, log)
    with launch.together():
        start(first, second, first)
        assert log == []
    assert set(log[:2]) == {"compiled first", "compiled second"}
    assert log[2:] == ["ran first", "ran second", "ran first"]
    with launch.together():
        start(second, first)
    assert log[5:] == ["ran second", "ran first"]  # compiled already


def test_those_held_inside_of_others_keep_their_order(log):
    others = threading.Barrier(3)
    a, b, c = (Kernel(name, others, log) for name in "abc")
    with launch.together():
        start(a)
        with launch.together():
            start(b)
        start(c)
    assert log[3:] == ["ran a", "ran b", "ran c"]


def test_an_error_of_the_compiler_is_met_by_the_launch(log):
    class Wrong(Kernel):
        def run(self, x, *constexprs, **options):
            raise ValueError(self.name)

    broken = threading.Barrier(2)
    broken.abort()
    kernels = Wrong("first", broken, log), Wrong("second", broken, log)
    for _ in range(2):
        with pytest.raises(ValueError, match="first"), launch.together():
            start(*kernels)


def test_nothing_runs_that_was_held_before_an_error(log):
    kernel = Kernel("one", None, log)

    @launch.together()
    def failing():
        start(kernel)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        failing()
    start(kernel)
    assert log == ["ran one"]
