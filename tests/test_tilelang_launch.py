"""How TileLang kernels are compiled, kept and launched, without a GPU."""

import contextlib
import logging
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from ops_registry.errors import KernelUnavailableError
from tests.test_imports import attempt, python
from tests.tilelang_calls import meta
from tileops.kernels.common import tilelang_launch, tilelang_limits
from tileops.kernels.common.machine import H200
from tileops.kernels.common.recorder import recording

pytest.importorskip("triton")


# ---------------------------------------------------------------------------------- compiling


@pytest.fixture
def built(monkeypatch, compiler):
    """What is built, by a compiler that takes its time; launches of CPU tensors."""
    found = []

    def build(constants):
        time.sleep(0.2)
        found.append(constants)
        return lambda *args: found.append(args)

    monkeypatch.setattr(tilelang_launch, "_compiled", {})
    monkeypatch.setattr(tilelang_launch, "_built", build)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    return found


def make(**constants):
    return constants


def test_threads_compile_a_kernel_once(built):
    x = torch.zeros(3)
    several = [
        threading.Thread(target=tilelang_launch.launch, args=(make, x, (index,)), kwargs={"D": 64})
        for index in range(5)
    ]
    for thread in several:
        thread.start()
    for thread in several:
        thread.join()
    tilelang_launch.launch(make, x, (9,), D=128)
    assert built[0] == {"D": 64} and built.count({"D": 64}) == 1
    assert sorted(x[0] for x in built if isinstance(x, tuple)) == [0, 1, 2, 3, 4, 9]
    assert built[-2:] == [{"D": 128}, (9,)]


def test_what_is_compiled_waits_for_no_compilation(built):
    x = torch.zeros(3)
    tilelang_launch.launch(make, x, (1,), D=64)
    with tilelang_launch._compiling:
        tilelang_launch.launch(make, x, (2,), D=64)
    assert built[-1] == (2,)


def test_a_failure_is_told_once(built, monkeypatch, caplog):
    def fails(constants):
        raise RuntimeError(
            "__global__ void error();\nCompilation error:\nkernel.cu(3): error: no such thing\n"
            "Command: nvcc"
        )

    monkeypatch.setattr(tilelang_launch, "_built", fails)
    with caplog.at_level(logging.WARNING, "tileops"):
        for dim in (64, 64, 128):
            with pytest.raises(KernelUnavailableError, match="no such thing"):
                tilelang_launch.launch(make, torch.zeros(3), (), D=dim)
    [record] = caplog.records
    sentence = "could not be compiled: kernel.cu(3): error: no such thing"
    assert record.getMessage().endswith(f"one of which {sentence}")
    assert tilelang_limits.compiler_refusal() == sentence


def test_launches_are_recorded():
    with recording(H200) as found:
        tilelang_launch.launch(make, meta(3), (1, 2), D=64)
    [launch] = found
    assert (launch.name, launch.args, launch.constants) == (
        "test_tilelang_launch",
        (1, 2),
        {"D": 64},
    )


WAITING = """
import time, torch
from tileops.kernels.common import tilelang_launch as launch, tilelang_limits

def make(D):
    return 0.8 if D == 64 else 0.0

tilelang_limits._missing = lambda: None
launch.PATIENCE = 0.2
launch._built = lambda seconds: time.sleep(seconds) or print
torch.cuda.current_device = lambda: None
for dim in (64, 64, 128):
    launch.launch(make, torch.zeros(1), (dim,), D=dim)
"""


def test_a_first_call_says_what_it_waits_for():
    done = attempt(WAITING)
    assert (done.returncode, done.stdout) == (0, "64\n64\n128\n")
    assert done.stderr == (
        "tileops compiles __main__(D=64) for this GPU, once; "
        "`python -m tileops.warmup` does it ahead\n"
    )


def test_the_notice_can_be_switched_off():
    quiet = "import logging\nlogging.getLogger('tileops').setLevel(logging.ERROR)\n"
    done = attempt(quiet + WAITING)
    assert (done.returncode, done.stderr) == (0, "")


TOUCH = """
import json, sys
import tilelang.language as T
from tileops.kernels.common import tilelang_launch, tilelang_limits

def make(text):
    @T.prim_func
    def touch(x: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=128) as block:
            T.import_source(text)
            x[T.get_thread_binding()] = T.float32(1)

    return touch

asked = []
class Compiler:
    @staticmethod
    def compile(function, **options):
        options.pop("target")
        asked.append(tilelang_limits.importlib.import_module("tilelang.cache")._dispatch_map[
            "tvm_ffi"]._generate_key(function, None, args=(), **options))
        raise ValueError

tilelang_limits.load = lambda: Compiler
for text, minor in (("int a;", 0), ("int a;", 0), ("int b;", 0), ("int a;", 1)):
    tilelang_launch._nvcc_version = lambda: (13, minor)
    try:
        tilelang_launch._built(make(text))
    except ValueError:
        pass
print(json.dumps([asked.index(key) for key in asked]))
"""


def test_binaries_are_kept_by_source_and_version(tmp_path):
    """TileLang's key holds the included text; the version of nvcc is added to it here."""
    pytest.importorskip("tilelang")
    (tmp_path / "touch.py").write_text(TOUCH)
    code = f"import runpy; runpy.run_path({str(tmp_path / 'touch.py')!r}, run_name='touch')"
    assert python(code, TILELANG_CACHE_DIR=str(tmp_path)) == "[0, 0, 2, 3]"


@pytest.mark.aot
def test_a_compilation_prints_nothing_and_is_read_back(tmp_path):
    pytest.importorskip("tilelang")
    if tilelang_limits.compiler_refusal() is not None:
        pytest.skip(str(tilelang_limits.compiler_refusal()))
    text = TOUCH.partition("asked =")[0] + "print(tilelang_launch._compile(make, {'text': ''}, 0))"
    (tmp_path / "touch.py").write_text(text)
    code = f"import runpy; runpy.run_path({str(tmp_path / 'touch.py')!r}, run_name='touch')"
    cache = str(tmp_path / "cache")
    first = attempt(code, TILELANG_CACHE_DIR=cache)
    assert first.returncode == 0 and first.stdout == "ffi.Function\n", first.stdout + first.stderr
    second = attempt(code, TILELANG_CACHE_DIR=cache, CXX="false", PATH="/nowhere")
    assert (second.stdout, second.stderr) == ("ffi.Function\n", ""), second.stderr


# ------------------------------------------------------------------------------------- counters


@pytest.fixture
def streams(monkeypatch):
    """Streams that a test names, capturing or not, and tables of counters on the CPU."""
    state = SimpleNamespace(current=1, capturing=False, device=0, zeroed=0, tables=0)

    def table(device):
        state.tables += 1
        return torch.zeros(tilelang_launch.SLOTS, tilelang_launch.SLOT, dtype=torch.int32)

    def zeros(*size, dtype, device):
        state.zeroed += 1
        return torch.empty(size, dtype=dtype).zero_()

    monkeypatch.setattr(tilelang_launch, "_counters", {})
    monkeypatch.setattr(tilelang_launch, "_table", table)
    monkeypatch.setattr(tilelang_launch, "SLOTS", 4)
    current = SimpleNamespace(
        zeros=zeros,
        int32=torch.int32,
        cuda=SimpleNamespace(
            current_device=lambda: state.device,
            device=lambda device: _using(state, device.index),
            is_current_stream_capturing=lambda: state.capturing,
        ),
        _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda device: state.current),
    )
    monkeypatch.setattr(tilelang_launch, "torch", current)
    return state


@contextlib.contextmanager
def _using(state, device):
    before, state.device = state.device, device
    yield
    state.device = before


def counter(device=0):
    found = tilelang_launch.counter(SimpleNamespace(device=torch.device("cuda", device)))
    assert found.shape == (1,) and found.dtype is torch.int32
    return found.data_ptr()


def test_a_stream_has_one_counter(streams):
    first = counter()
    assert counter() == first
    streams.current = 2
    second = counter()
    assert second != first and second % 128 == first % 128
    streams.current = 1
    assert counter() == first
    assert counter(device=1) not in (first, second) and streams.device == 0
    assert streams.tables == 2 and streams.zeroed == 0


def test_a_captured_launch_has_its_own(streams):
    eager = counter()
    streams.capturing = True
    captured = [counter() for _ in range(3)]
    assert len({eager, *captured}) == 4 and streams.zeroed == 0
    counter()
    assert streams.zeroed == 1  # the table is used up
    streams.capturing = False
    assert counter() == eager and streams.tables == 1
    streams.current = 2
    assert counter() not in (eager, *captured) and streams.tables == 2


def test_a_capture_before_any_eager_call(streams):
    streams.capturing = True
    counter()
    assert (streams.zeroed, streams.tables) == (1, 0)


def test_threads_get_one_counter_of_a_stream(streams):
    found = []
    several = [threading.Thread(target=lambda: found.append(counter())) for _ in range(8)]
    for thread in several:
        thread.start()
    for thread in several:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1 and streams.tables == 1
    # A thread that looked before there was one asks for it again.
    assert tilelang_launch._counters[0].of(streams.current).data_ptr() == found[0]
