"""TileLang kernels: compiled once, launched on the device and current stream of their tensors.

A compilation takes seconds, so TileLang keeps its binaries on disk (`TILELANG_CACHE_DIR`, by
default `~/.tilelang/cache`). As of 0.1.15:

* The key of a binary is a hash of the kernel as TileLang prints it, which has the text of
  `T.import_source` and every constant in it, of the target, the pass configuration, the machine
  type and the version of TileLang. A change of the sources here gives another key.
* The version of nvcc is in no key. Here it is in the pass configuration, as a macro that nothing
  reads, so that a newer compiler is used once it is installed.
* An entry is written beside its place and renamed into it, and hashed when it is read: processes
  may share the folder, and a broken entry is compiled again.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops_registry.errors import KernelUnavailableError
from tileops.kernels.common import tilelang_limits
from tileops.kernels.common.launch import Called, noted
from tileops.kernels.common.recorder import recorded

LOG = logging.getLogger("tileops")
PATIENCE = 1.0  # seconds before a first call says what it waits for; reading the cache is faster
TARGET = {"kind": "cuda", "arch": "sm_90a"}
# What the kernels do themselves: give tasks to warps, order them, lay out shared memory, guard.
PASSES = {
    "tl.disable_warp_specialized": True,
    "tl.disable_thread_storage_sync": True,
    "tl.disable_shared_memory_reuse": True,
    "tl.disable_buffer_init_check": True,
    "tl.disable_safe_memory_legalize": True,
}


class Launch(NamedTuple):
    """One recorded launch: of what `make(**constants)` builds, over args."""

    make: Callable[..., Any]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    grid: tuple[int, ...] = (1,)  # never empty

    @property
    def name(self) -> str:
        return self.make.__module__.rpartition(".")[2]


# -------------------------------------------------------------------------------- compiling

_compiled: dict[Any, Callable[..., Any]] = {}
_compiling = threading.Lock()


def launch(
    make: Callable[..., Any], count: Tensor, args: tuple[Any, ...], **constants: Any
) -> None:
    """Run what `make(**constants)` builds over args, on the device of `count`.

    count: the `counter` that is among the args. KernelUnavailableError if it cannot be compiled
    here.
    """
    launches = recorded()
    if launches is not None:
        launches.append(Launch(make, args, constants))
        return
    key = (make, *constants.items())
    kernel = _compiled.get(key)
    if kernel is None:
        kernel = _compile(make, constants, key)
    device = count.device.index
    if device == torch.cuda.current_device():
        kernel(*args)
    else:
        with torch.cuda.device(device):
            kernel(*args)
    made = noted()
    if made is not None:
        made.append(Called(kernel, args, count, counter))


def _compile(make: Callable[..., Any], constants: dict[str, Any], key: Any) -> Callable[..., Any]:
    """The kernel, compiled by one thread of those that want it."""
    with _compiling:
        if key in _compiled:
            return _compiled[key]
        if tilelang_limits.compiler_refusal() is None:
            try:
                with _announced(_described(make, constants)), _quiet():
                    _compiled[key] = _built(make(**constants))
                return _compiled[key]
            except Exception as error:  # of TileLang, TVM, nvcc, the C++ compiler or the disk
                _give_up(error)
        raise KernelUnavailableError(f"TileLang kernel {tilelang_limits.compiler_refusal()}")


def _built(function: Any) -> Callable[..., Any]:
    version = ".".join(map(str, _nvcc_version()))
    passes = {**PASSES, "tl.device_compile_flags": [f"-DTILEOPS_NVCC={version}"]}
    kernel = tilelang_limits.load().compile(
        function, target=TARGET, pass_configs=passes, execution_backend="tvm_ffi"
    )
    # Not through the wrapper, which goes over all arguments to find outputs that it has to make.
    return kernel.adapter.get_exportable_executable()["main"]


@functools.cache
def _nvcc_version() -> tuple[int, ...]:
    return importlib.import_module("tilelang.contrib.nvcc").get_cuda_version()


def _give_up(error: Exception) -> None:
    """Say why, once; of a compiler only the first complaint, as its input is printed with it."""
    lines = str(error).rpartition("Compilation error:")[2].strip().splitlines() or [repr(error)]
    said = next((line for line in lines if "error" in line.lower()), lines[-1]).strip()[:300]
    tilelang_limits.give_up(f"could not be compiled: {said}")
    LOG.warning(
        "tileops serves calls without its TileLang kernels, one of which %s",
        tilelang_limits.compiler_refusal(),
    )
    LOG.debug("all that was said", exc_info=error)


# ---------------------------------------------------------------------------- what is said


def _described(make: Callable[..., Any], constants: dict[str, Any]) -> str:
    options = ", ".join(f"{name}={value}" for name, value in constants.items())
    return f"{Launch(make, (), {}).name}({options})"


@contextlib.contextmanager
def _announced(what: str) -> Iterator[None]:
    """Say what a first call waits for, if it waits.

    As a warning, which reaches standard error where logging is not configured;
    `logging.getLogger("tileops").setLevel(logging.ERROR)` switches it off.
    """
    timer = threading.Timer(
        PATIENCE,
        LOG.warning,
        (
            "tileops compiles %s for this GPU, once; `python -m tileops.warmup` does it ahead",
            what,
        ),
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the lines that TileLang prints on standard output about each compilation."""
    logger = logging.getLogger("tilelang")
    before = logger.level
    logger.setLevel(max(before, logging.WARNING))
    try:
        yield
    finally:
        logger.setLevel(before)


# -------------------------------------------------------------------------------- counters

SLOTS = 4096  # counters of a device that are made at once
SLOT = 32  # numbers from one to the next: cache lines of their own


class _Counters:
    """The counters of one device: of streams that eager calls used, and those left of a table."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.of_stream: dict[int, Tensor] = {}
        self.table, self.used = _table(device), 0
        self.lock = threading.Lock()

    def of(self, stream: int) -> Tensor:
        """That of eager launches on a stream."""
        with self.lock:
            if stream not in self.of_stream:
                if self.used == SLOTS:
                    self.table, self.used = _table(self.device), 0
                self.of_stream[stream] = self._next()
            return self.of_stream[stream]

    def unused(self) -> Tensor | None:
        """One that no other launch has or will have, None if there is none left."""
        with self.lock:
            return self._next() if self.used < SLOTS else None

    def _next(self) -> Tensor:
        self.used += 1
        return self.table[self.used - 1, :1]


def _table(device: torch.device) -> Tensor:
    """New counters in ordinary memory of the device, zero by the time this returns.

    Another thread allocates them, on another stream: a graph that this thread warms or captures
    may have turned its allocations to memory that is overwritten when the graph runs. The wait is
    for an event, which even a program that forbids synchronisation may wait for.
    """

    def make() -> Tensor:
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            zeros = torch.zeros(SLOTS, SLOT, dtype=torch.int32, device=device)
            done = torch.cuda.Event()
            done.record()
            done.synchronize()
        return zeros

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


_counters: dict[int, _Counters] = {}
_new_device = threading.Lock()


def counter(tensor: Tensor) -> Tensor:
    """An int32 [1] that is zero when the launch to come begins, on the tensor's device.

    A kernel takes its tiles from it, and the last taker sets it back to zero. Launches that might
    overlap must not share one. Eager launches on one stream follow each other, whichever thread
    makes them, so each stream has one. A captured launch may be replayed on any stream, beside
    eager calls and other graphs, so it has one of its own, for good; replays of one graph follow
    each other. Those are made before any capture, with the first eager call. When they are used
    up, or where no eager call was before, the graph makes and zeroes one itself, at the price of
    a memset in every replay.
    """
    device = tensor.device
    if recorded() is not None:
        return torch.empty(1, dtype=torch.int32, device=device)
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return counter(tensor)
    found = _counters.get(device.index)
    if torch.cuda.is_current_stream_capturing():
        unused = None if found is None else found.unused()
        return torch.zeros(1, dtype=torch.int32, device=device) if unused is None else unused
    if found is None:
        with _new_device:
            if device.index not in _counters:
                _counters[device.index] = _Counters(device)
            found = _counters[device.index]
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    kept = found.of_stream.get(stream)
    return found.of(stream) if kept is None else kept
