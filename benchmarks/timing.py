"""Device time of one call with a cold L2, and what the call costs the host.

A call is captured n times in one CUDA graph, each after a read of twice the L2, and the reads
alone in another graph; a sample is the difference of two replays over n, so that neither the
reads nor the launch of a graph counts. The L2 is flushed by reading, not by writing: dirty
lines would be written back at the call's expense.

    clock = Clock(torch.device("cuda"))
    timed = clock.timed(lambda: op(q, k, v))
    statistics.median(timed.sample(20))         microseconds
    clock.host(lambda: op(q, k, v), 50.0)       of the host per call, and eager wall clock

Only torch is imported here. On a CPU the wall clock times one call, warm.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch

Call: TypeAlias = Callable[[], Any]

SHORT_US = 250.0  # calls shorter than this are captured several times
MOST_CALLS = 16
COPY_BYTES = 1 << 31
MATMUL = 8192


class Timed(Protocol):
    """A call that can be repeated and timed. outputs: of its last run."""

    how: str
    outputs: Any

    def run(self) -> None: ...

    def sample(self, count: int) -> list[float]: ...


class Clock:
    """Times calls on one device. Everything it runs, it runs on its own stream."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        if self.on_gpu and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        if self.on_gpu:
            torch.cuda.set_device(device)
            self.stream = torch.cuda.Stream()
            cache = torch.cuda.get_device_properties(device).L2_cache_size
            self.lines = torch.zeros(max(2 * cache // 16384, 4096), 4096, device=device)
            self.sums = torch.zeros(len(self.lines), device=device)
            self.flushes: dict[int, torch.cuda.CUDAGraph] = {}
            self.flush()  # loads its kernel, which a capture may not
            self.wait()

    def flush(self) -> None:
        """Read twice the L2."""
        torch.sum(self.lines, dim=1, out=self.sums)

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def timed(self, call: Call) -> Timed:
        """The call, warmed up and captured."""
        if not self.on_gpu:
            return Wall(call)
        with torch.cuda.stream(self.stream):
            call()
            self.wait()
            begin, end = event(), event()
            begin.record()
            for _ in range(3):
                call()
            end.record()
            self.wait()
        roughly = 1e3 * begin.elapsed_time(end) / 3
        count = max(1, min(MOST_CALLS, round(SHORT_US / max(roughly, 1.0))))
        graph, outputs = self.capture(call, count)
        if count not in self.flushes:
            self.flushes[count], _ = self.capture(lambda: None, count)
        return Replays(self, graph, self.flushes[count], count, outputs)

    def capture(self, call: Call, count: int) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph, outputs = torch.cuda.CUDAGraph(), None
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            for _ in range(count):
                self.flush()
                outputs = None  # the next call may reuse its memory
                outputs = call()
        return graph, outputs

    def eager(self, call: Call) -> Timed:
        """For calls that cannot be captured: events about each call, flushed before it."""
        return Eager(self, call) if self.on_gpu else Wall(call)

    def host(self, call: Call, device_us: float) -> tuple[float, float]:
        """Microseconds the host spends in a call, and a call's share of the wall clock.

        Few calls at a time, so that the queue never fills and nothing waits for the device.
        """
        calls = max(2, min(16, round(2e4 / max(device_us, 1.0))))
        turns = max(3, min(25, round(2e5 / max(calls * device_us, 1.0))))
        busy, total = [], []
        call()
        gc.disable()
        try:
            for _ in range(turns):
                self.wait()
                begin = time.perf_counter()
                for _ in range(calls):
                    call()
                queued = time.perf_counter()
                self.wait()
                total.append((time.perf_counter() - begin) / calls)
                busy.append((queued - begin) / calls)
        finally:
            gc.enable()
        return 1e6 * statistics.median(busy), 1e6 * statistics.median(total)


def event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


class Replays:
    """A call captured `count` times behind flushes, beside as many flushes alone."""

    how = "graph"

    def __init__(
        self,
        clock: Clock,
        graph: torch.cuda.CUDAGraph,
        flushes: torch.cuda.CUDAGraph,
        count: int,
        outputs: Any,
    ) -> None:
        self.clock, self.graph, self.flushes = clock, graph, flushes
        self.count, self.outputs = count, outputs

    def run(self) -> None:
        with torch.cuda.stream(self.clock.stream):
            self.graph.replay()

    def sample(self, count: int) -> list[float]:
        marks: tuple[list[Any], list[Any]] = ([], [])
        with torch.cuda.stream(self.clock.stream):
            self.flushes.replay()
            self.graph.replay()
            for _ in range(count):
                for graph, pairs in zip((self.graph, self.flushes), marks, strict=True):
                    begin, end = event(), event()
                    begin.record()
                    graph.replay()
                    end.record()
                    pairs.append((begin, end))
        self.clock.wait()
        both, flushes = ([1e3 * a.elapsed_time(b) for a, b in pairs] for pairs in marks)
        floor = statistics.median(flushes)
        return [(x - floor) / self.count for x in both]


class Eager:
    """A call on the default stream between two events."""

    how = "eager"
    HEAD_START = 8  # flushes before a call: the host must be ahead when the call begins

    def __init__(self, clock: Clock, call: Call) -> None:
        self.clock, self.call = clock, call
        self.outputs = call()
        clock.wait()

    def run(self) -> None:
        self.outputs = None
        self.outputs = self.call()

    def sample(self, count: int) -> list[float]:
        pairs = []
        for _ in range(count):
            for _ in range(self.HEAD_START):
                self.clock.flush()
            begin, end = event(), event()
            begin.record()
            self.run()
            end.record()
            pairs.append((begin, end))
        self.clock.wait()
        return [1e3 * a.elapsed_time(b) for a, b in pairs]


class Wall:
    """A call on the CPU by the wall clock."""

    how = "wall"

    def __init__(self, call: Call) -> None:
        self.call = call
        self.outputs = call()

    def run(self) -> None:
        self.outputs = self.call()

    def sample(self, count: int) -> list[float]:
        found = []
        for _ in range(count):
            begin = time.perf_counter()
            self.run()
            found.append(1e6 * (time.perf_counter() - begin))
        return found


def limits(clock: Clock) -> tuple[float, float]:
    """Measured here: GB/s of a device-to-device copy (read and write), bf16 matmul TFLOP/s."""
    device, size = clock.device, MATMUL if clock.on_gpu else 64
    # By a kernel: captured, `copy_` becomes a node for a copy engine, a third slower.
    words = (COPY_BYTES if clock.on_gpu else 1 << 16) // 4
    source = torch.randint(2**31 - 1, (words,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in "ab")
    seconds = []
    for call in (lambda: torch.bitwise_not(source, out=target), lambda: a @ b):
        seconds.append(1e-6 * statistics.median(clock.timed(call).sample(10)))
    return 2e-9 * source.nbytes / seconds[0], 2e-12 * size**3 / seconds[1]
