"""One process that runs contestants of rows and times them, told what to do line by line.

    python benchmarks/worker.py [--device cuda]

Requests come on standard input and replies go to standard output, one JSON object a line; what
the packages print goes to standard error. The process runs by path with only torch and the
site of its contestants in its path, so that a peer may have the import name of this package;
nothing here imports `tileops` before a contestant's builder does.

    {"do": "hello"}                                       versions and the device
    {"do": "limits"}                                      copy GB/s, matmul TFLOP/s
    {"do": "warm", "contestant", "op", "shape", "options"}      compile by one call
    {"do": "prepare", ...the same, "tolerance"}           error, kernel, how, microseconds
    {"do": "sample", "contestant", "seconds"}             samples in microseconds
    {"do": "host", "contestant"}                          host and eager microseconds of a call
    {"do": "first", ...}                                  seconds of the process's first call
    {"do": "drop"}                                        forget the row
    {"do": "quit"}

Ours takes "numbers" too, {configuration: {key: value}}, instead of those in the files.

A reply has "ok". If it is false, "why" says why, "unserved" marks a row the contestant has
nothing for, and after "fatal" the process has ended: the device refuses it further work.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent


def load_benchmarks() -> None:
    """Make `benchmarks` importable without its parent folder, which holds our `tileops`."""
    if "benchmarks" in sys.modules:
        return
    sys.path[:] = [p for p in sys.path if not p or Path(p).resolve() != HERE]
    spec = importlib.util.spec_from_file_location(
        "benchmarks", HERE / "__init__.py", submodule_search_locations=[str(HERE)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmarks"] = module
    spec.loader.exec_module(module)


load_benchmarks()

# After `load_benchmarks`, which makes them importable beside a peer of the same name.
from benchmarks import inputs, peers, timing  # noqa: E402
from benchmarks.reference import Check, expect  # noqa: E402

Message = dict[str, Any]

FEWEST, MOST = 3, 60  # samples in one turn


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


class Worker:
    """The row in hand: its tensors, its check, and the contestants prepared for it."""

    def __init__(self, device: torch.device) -> None:
        self.clock = timing.Clock(device)
        self.device = self.clock.device
        self.row: tuple[str, str] | None = None
        self.tensors: inputs.Tensors = {}
        self.check: Check | None = None
        self.calls: dict[str, timing.Call] = {}
        self.timed: dict[str, timing.Timed] = {}
        self.cost: dict[str, float] = {}  # seconds of one sample, its flushes included

    def hello(self, _: Message) -> Message:
        on_gpu = self.device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(self.device) if on_gpu else "cpu",
            "torch": torch.__version__,
            "triton": version("triton"),
            "tilelang": version("tilelang"),
        }

    def limits(self, _: Message) -> Message:
        copy, matmul = timing.limits(self.clock)
        return {"copy": copy, "matmul": matmul}

    def take(self, message: Message) -> None:
        """Build the row's tensors, unless they are at hand."""
        row = (message["op"], json.dumps([message["shape"], message["options"]]))
        if row == self.row:
            return
        self.drop({})
        self.tensors = inputs.build(*self.of(message), self.device)
        self.clock.wait()
        self.row = row

    @staticmethod
    def of(message: Message) -> tuple[str, inputs.Shape, inputs.Shape]:
        return message["op"], message["shape"], message["options"]

    def call(self, message: Message) -> timing.Call:
        """The contestant's call, under inference mode as a server would run it."""
        build = peers.CONTESTANTS[message["contestant"]]
        raw = build(*self.of(message), self.tensors)
        numbers = message.get("numbers", {})

        def call() -> Any:
            with torch.inference_mode(), peers.overriding(numbers):
                return raw()

        return call

    def warm(self, message: Message) -> Message:
        self.take(message)
        self.call(message)()
        self.clock.wait()
        return self.drop({})

    def first(self, message: Message) -> Message:
        self.take(message)
        call = self.call(message)
        begin = time.perf_counter()
        call()
        self.clock.wait()
        return {"seconds": time.perf_counter() - begin}

    def prepare(self, message: Message) -> Message:
        name = message["contestant"]
        self.take(message)
        if self.check is None:
            self.check = expect(*self.of(message), self.tensors)
            self.clock.wait()
        self.forget(name)
        found: Message = {"kernel": None}
        if name == peers.OURS:
            found["kernel"] = peers.serving(message["op"], message["options"], self.tensors)
        call = self.built(message)
        replaceable = name != peers.OURS and self.clock.on_gpu
        failed = ""
        try:
            timed, error = self.checked(self.clock.timed(call))
            if not error <= message["tolerance"]:
                failed = f"error {error:.2g}"
        except Exception as problem:  # a peer may raise anything; timed eagerly then
            if not replaceable or self.lost():
                raise
            failed = say(problem)
        if failed and replaceable:
            # A peer that cannot be captured, or that leaves a graph empty.
            found["note"] = f"not captured: {failed}"
            self.clock.wait()
            timed, error = self.checked(self.clock.eager(call))
        self.calls[name], self.timed[name] = call, timed
        begin = time.perf_counter()
        samples = timed.sample(3)
        self.cost[name] = (time.perf_counter() - begin) / len(samples)
        return found | {"error": error, "how": timed.how, "us": statistics.median(samples)}

    def built(self, message: Message) -> timing.Call:
        """The call, built on the stream that will time it: a backward runs on its forward's."""
        if not self.clock.on_gpu:
            return self.call(message)
        with torch.cuda.stream(self.clock.stream):
            call = self.call(message)
        self.clock.wait()
        return call

    def checked(self, timed: timing.Timed) -> tuple[timing.Timed, float]:
        """The error of one more run, whose outputs held nothing before it."""
        assert self.check is not None
        with torch.inference_mode():
            self.check.poison(timed.outputs)
            self.clock.wait()
            timed.run()
            self.clock.wait()
            return timed, self.check.error(timed.outputs)

    def sample(self, message: Message) -> Message:
        name = message["contestant"]
        count = round(message["seconds"] / self.cost[name])
        return {"us": self.timed[name].sample(max(FEWEST, min(MOST, count)))}

    def host(self, message: Message) -> Message:
        host, eager = self.clock.host(self.calls[message["contestant"]], message["us"])
        return {"host_us": host, "eager_us": eager}

    def forget(self, name: str) -> None:
        """Give up one contestant; the others keep the row."""
        self.calls.pop(name, None)
        self.timed.pop(name, None)
        gc.collect()

    def lost(self) -> bool:
        """Whether the device refuses all further work of this process."""
        for _ in range(2):  # an error that does not last is reported once
            try:
                self.clock.wait()
                return False
            except Exception:  # of whatever class this torch gives it
                continue
        return True

    def drop(self, _: Message) -> Message:
        self.row, self.tensors, self.check = None, {}, None
        self.calls, self.timed = {}, {}
        gc.collect()
        if self.clock.on_gpu:
            torch.cuda.empty_cache()
        return {}


def say(problem: BaseException) -> str:
    """An exception in a line."""
    text = " ".join(str(problem).split())
    return f"{type(problem).__name__}: {text}"[:400]


def answer(worker: Worker, message: Message) -> Message:
    try:
        return {"ok": True} | getattr(worker, message["do"])(message)
    except peers.Unserved as problem:
        return {"ok": False, "why": str(problem), "unserved": True}
    except Exception as problem:  # one contestant's, and the run goes on without it
        reply = {"ok": False, "why": say(problem), "fatal": worker.lost()}
    if "contestant" in message and not reply["fatal"]:
        worker.forget(message["contestant"])
    return reply


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    device = torch.device(parser.parse_args().device)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a package prints must not be taken for a reply
    worker = Worker(device)
    for line in sys.stdin:
        message = json.loads(line)
        if message["do"] == "quit":
            break
        reply = answer(worker, message)
        print(json.dumps(reply), file=replies, flush=True)
        if reply.get("fatal"):
            break
    sys.stdout.flush()
    os._exit(0)  # a lost context must not hang the interpreter's end


if __name__ == "__main__":
    main()
