"""Our kernels beside their peers on one GPU, every figure with its error.

    python -m benchmarks.gpu                            every row, peers of torch alone
    python -m benchmarks.gpu --tier peers --peer-site tileops=FOLDER --peer-site fa4=FOLDER \\
        --out docs/benchmarks/h200.json
    python -m benchmarks.gpu --rows dense-decode --no-peers         a kernel being tuned
    python -m benchmarks.gpu --list

Device time is that of CUDA-graph replays with a cold L2 (`timing.py`); host time is what
queuing a call costs under inference mode. Each contestant's site has a process of its own
(`worker.py`), and they take turns at samples of a few milliseconds; a figure is the median of
all its samples, the ratio one of medians. A contestant whose error against the float64 formula
exceeds the row's tolerance has no figure. What fails is reported and left out.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import queue
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks import plot, results
from benchmarks.peers import OURS, PEERS, serves
from benchmarks.processes import Contestants, Message, Process, Stopwatch, parse_sites
from benchmarks.results import Result
from benchmarks.rows import ROWS, Row, select

PREPARE_S, SAMPLE_S, START_S = 150.0, 60.0, 120.0
TURN_S = 0.015  # of one contestant's samples before the next one's turn
FEWEST_TURNS, MOST_TURNS = 3, 40
# Contestants that compile for seconds per row and keep it on disk, and their share of processes.
COMPILING = {OURS: 1, "tileops": 2, "flex": 1}
# Bytecode too: packages are installed with it, but not into a folder that nobody may write.
CACHES = (
    "TRITON_CACHE_DIR",
    "TILELANG_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "PYTHONPYCACHEPREFIX",
)


def tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def about(row: Row, contestant: str, do: str) -> Message:
    return {
        "do": do,
        "contestant": contestant,
        "op": row.op,
        "shape": row.shape,
        "options": row.options,
        "tolerance": row.tolerance,
    }


@dataclass(frozen=True)
class Machine:
    """What the run is on, and the limits measured in it."""

    versions: Message
    copy: float | None  # GB/s
    matmul: float | None  # bf16 TFLOP/s

    @classmethod
    def ask(cls, process: Process) -> Machine:
        versions = process.ask({"do": "hello"}, START_S)
        limits = process.ask({"do": "limits"}, START_S)
        if not (versions["ok"] and limits["ok"]):
            tell(f"limits: {versions.get('why') or limits.get('why')}")
        return cls(versions, limits.get("copy"), limits.get("matmul"))

    def __str__(self) -> str:
        name = self.versions.get("device", "unknown")
        if self.copy is None or self.matmul is None:
            return f"{name}"
        return f"{name}, copy {self.copy:.0f} GB/s, bf16 matmul {self.matmul:.0f} TFLOP/s"

    def floor_us(self, row: Row) -> tuple[float, float] | None:
        """Microseconds of the row's FLOPs and of its bytes at the limits; FP8 at twice bf16."""
        if self.copy is None or self.matmul is None:
            return None
        matmul = self.matmul * (2 if row.eight_bit else 1)
        return 1e-6 * row.flops / matmul, 1e-3 * row.bytes / self.copy


class Race:
    """One row: the contestants that are ready, and their samples."""

    def __init__(self, row: Row, contestants: Contestants) -> None:
        self.row, self.contestants = row, contestants
        self.ready: dict[str, Message] = {}
        self.samples: dict[str, list[float]] = {}

    def ask(self, name: str, message: Message, seconds: float) -> Message:
        return self.contestants.of(name).ask(message, seconds)

    def prepare(self) -> None:
        """All processes at once; the contestants of one after another."""

        def one(name: str) -> Message:
            why = self.contestants.given_up.get((name, self.row.name))
            if why:
                return {"ok": False, "why": why}
            return self.ask(name, about(self.row, name, "prepare"), PREPARE_S)

        def each(names: list[str]) -> list[tuple[str, Message]]:
            return [(name, one(name)) for name in names]

        groups = self.contestants.by_process(self.row.op)
        with ThreadPoolExecutor(len(groups)) as pool:
            replies = [pair for found in pool.map(each, groups) for pair in found]
        for name, reply in replies:
            if reply["ok"] and reply["error"] <= self.row.tolerance:
                self.ready[name] = reply
                self.samples[name] = []
            elif reply["ok"]:
                self.ready.pop(name, None)
                tell(
                    f"  {name}: error {reply['error']:.2g}, tolerance {self.row.tolerance:.0e}: "
                    f"no figure (about {reply['us']:.1f} us)"
                )
            elif not reply.get("unserved"):
                tell(f"  {name}: {reply['why']}")
            if reply.get("note"):
                tell(f"  {name}: timed eagerly, {reply['note']}")
        self.errors = {name: reply.get("error") for name, reply in replies}
        self.kernel = dict(replies)[OURS].get("kernel")

    def run(self, seconds: float) -> None:
        watch = Stopwatch(seconds)
        for turn in range(MOST_TURNS):
            names = list(self.ready)
            if not names or (turn >= FEWEST_TURNS and watch.over):
                return
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                message = {"do": "sample", "contestant": name, "seconds": TURN_S}
                reply = self.ask(name, message, SAMPLE_S)
                if reply["ok"]:
                    self.samples[name] += reply["us"]
                else:
                    tell(f"  {name}: {reply['why']}")
                    del self.ready[name], self.samples[name]

    def host(self) -> Message:
        if OURS not in self.ready:
            return {}
        message = {"do": "host", "contestant": OURS, "us": self.ready[OURS]["us"]}
        reply = self.ask(OURS, message, SAMPLE_S)
        return {k: reply.get(k) for k in ("host_us", "eager_us")}

    def drop(self) -> None:
        for process in self.contestants.processes.values():
            if process.child is not None:
                process.ask({"do": "drop"}, SAMPLE_S)


def measure(row: Row, contestants: Contestants, machine: Machine, seconds: float) -> Result:
    """One row's object; ours_us is null where ours failed or gave a wrong answer."""
    race = Race(row, contestants)
    race.prepare()
    host = race.host()
    race.run(seconds)
    race.drop()
    medians = {name: statistics.median(found) for name, found in race.samples.items() if found}
    mine, floor = medians.pop(OURS, None), machine.floor_us(row)
    return results.result(
        row=row.name,
        op=row.op,
        ours_us=mine,
        peers=medians,
        limit_share=max(floor) / mine if mine and floor else None,
        error=race.errors[OURS],
        tolerance=row.tolerance,
        kernel=race.kernel,
        machine=str(machine),
        date=datetime.date.today().isoformat(),
        **host,
        **{key: machine.versions.get(key) for key in ("torch", "triton", "tilelang")},
    )


# --------------------------------------------------------------- before anything is timed


def warm(rows: Sequence[Row], contestants: Contestants, jobs: int, watch: Stopwatch) -> None:
    """Every row called once by those who compile, so that their caches on disk hold it.

    Rows are shared out to several processes of each. What a process dies of, or is silent
    over, is not tried again.
    """
    tasks = {name: queue.SimpleQueue[Row]() for name in contestants.names if name in COMPILING}
    for name, waiting in tasks.items():
        for row in rows:
            if serves(name, row.op):
                waiting.put(row)

    def drain(name: str, waiting: queue.SimpleQueue[Row]) -> None:
        process = contestants.fresh(contestants.kind(name))
        with contextlib.suppress(queue.Empty), contextlib.closing(process):
            while not watch.over:
                row = waiting.get_nowait()
                reply = process.ask(about(row, name, "warm"), PREPARE_S)
                if process.child is None:
                    contestants.given_up[name, row.name] = reply["why"]

    shares = sum(COMPILING[name] for name in tasks)
    with ThreadPoolExecutor(max(1, 2 * jobs)) as pool:
        for name, waiting in tasks.items():
            count = min(waiting.qsize(), max(1, jobs * COMPILING[name] // shares))
            for _ in range(count):
                pool.submit(drain, name, waiting)


def first_calls(rows: Sequence[Row], contestants: Contestants, jobs: int) -> dict[str, float]:
    """Seconds of our first call of each row, in a new process with empty compiler caches.

    What another process takes that finds them filled is told beside it.
    """

    def first(row: Row) -> tuple[str, float | None]:
        replies = []
        with tempfile.TemporaryDirectory() as folder:
            caches = {name: str(Path(folder) / name.lower()) for name in CACHES}
            caches["PYTHONDONTWRITEBYTECODE"] = ""
            for _ in range(2):
                process = contestants.fresh(OURS, caches)
                replies.append(process.ask(about(row, OURS, "first"), PREPARE_S))
                process.close()
        if all(reply["ok"] for reply in replies):
            cold, warm = (reply["seconds"] for reply in replies)
            tell(f"  first call of {row.name}: {cold:.2f} s, from filled caches {warm:.2f} s")
            return row.name, cold
        why = next(reply["why"] for reply in replies if not reply["ok"])
        tell(f"  first call of {row.name}: {why}")
        return row.name, None

    with ThreadPoolExecutor(max(1, min(4, jobs))) as pool:
        return {name: seconds for name, seconds in pool.map(first, rows) if seconds is not None}


# ------------------------------------------------------------------------ the command line


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--rows", nargs="+", default=[], metavar="PATTERN", help="a glob or a part of the name")
    add("--tier", choices=("peers", "headline", "all"), default="all")
    add("--peers", nargs="+", default=[], choices=PEERS, metavar="NAME", help=", ".join(PEERS))
    add("--no-peers", action="store_true", help="ours alone")
    add("--peer-site", nargs="+", action="extend", default=[], metavar="NAME=FOLDER")
    add("--seconds", type=float, default=1.0, help="of samples per row (default 1)")
    add("--deadline", type=float, default=float("inf"), metavar="S", help="start no row after S")
    add("--out", type=Path, help="JSON file to merge the rows into, with a plot beside it")
    add("--first-call", action="store_true", help="also the first call in a new process")
    add("--no-warm", action="store_true", help="compile row by row, not all rows at first")
    add("--jobs", type=int, default=max(1, min(12, (os.cpu_count() or 4) - 4)))
    add("--device", default="cuda", help=argparse.SUPPRESS)
    add("--list", action="store_true", help="the rows, and stop")
    options = parser.parse_args(arguments)
    try:
        options.sites = parse_sites(options.peer_site)
    except ValueError as problem:
        parser.error(str(problem))
    return options


def listing(rows: Sequence[Row]) -> str:
    lines = [f"{'row':46}{'tier':>10}{'GFLOP':>10}{'MB':>10}  op"]
    lines += [
        f"{r.name:46}{r.tier:>10}{1e-9 * r.flops:10.1f}{1e-6 * r.bytes:10.1f}  {r.op}"
        for r in rows
    ]
    return "\n".join(lines)


def run(options: argparse.Namespace, rows: Sequence[Row], contestants: Contestants) -> int:
    watch = Stopwatch(options.deadline)
    order = [row.name for row in ROWS]
    with ThreadPoolExecutor() as pool:  # every process imports torch while the others do
        processes = {id(p): p for p in map(contestants.of, contestants.names)}.values()
        list(pool.map(lambda process: process.ask({"do": "hello"}, START_S), processes))
    machine = Machine.ask(contestants.of(OURS))
    tell(f"{machine}; {watch.passed:.0f} s")
    if len(rows) > 2 and not options.no_warm:
        warm(rows, contestants, options.jobs, Stopwatch(options.deadline / 2))
        tell(f"compiled; {watch.passed:.0f} s")
    first: dict[str, float] = {}
    if options.first_call:
        first = first_calls(rows, contestants, options.jobs)
        tell(f"first calls; {watch.passed:.0f} s")
    print(results.HEADER, flush=True)
    failed, skipped = [], []
    for row in rows:
        if watch.over:
            skipped.append(row.name)
            continue
        found = measure(row, contestants, machine, options.seconds)
        found["first_call_s"] = first.get(row.name)
        floor = machine.floor_us(row) or (0.0, 1.0)
        speed = results.rate(found["ours_us"], row.flops, row.bytes, floor[0] > floor[1])
        print(results.line(found, speed), flush=True)
        if found["ours_us"] is None:
            failed.append(row.name)
        if options.out:
            results.save(options.out, [found], order)
            plot.write(options.out, options.out.with_suffix(".svg"))
    tell(f"done; {watch.passed:.0f} s")
    if skipped:
        print(f"not reached: {' '.join(skipped)}")
    if failed:
        print(f"no figure of ours: {' '.join(failed)}")
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if a row has no figure of ours."""
    options = parse(arguments)
    rows = select(options.rows, options.tier)
    if options.list:
        print(listing(rows))
        return 0
    wanted = [] if options.no_peers else options.peers or PEERS
    wanted = [name for name in wanted if any(serves(name, row.op) for row in rows)]
    contestants = Contestants(wanted, options.sites, options.device)
    missing = contestants.missing(wanted)
    if missing:
        tell(f"without {', '.join(missing)}: no --peer-site")
    try:
        return run(options, rows, contestants)
    finally:
        contestants.close()


if __name__ == "__main__":
    sys.exit(main())
