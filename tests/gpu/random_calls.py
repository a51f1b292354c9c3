"""Thousands of random calls of every operator on a GPU, against its float64 twin.

    python -m tests.gpu.random_calls [--op NAME] [--calls 2000] [--keys 40] [--seed 0]
                                     [--report DIR] [--workers N]

First at most `--keys` compile keys of every operator are drawn; each is the work of one process
at a time, which compiles its kernels and then makes its share of the calls. What is not read is
NaN in every second call, fresh memory in all of them. Where a TileLang kernel would serve, the
Triton kernel behind it serves two calls of four. The report, DIR/random_calls.jsonl, has a
line per key; keys that stand in it are not run again. A failure names its call:

    python -m tests.gpu.random_calls --op NAME --seed 0 --key 17 --call 23
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import random
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ops_registry.accuracy import EXACT
from ops_registry.contract import CONTRACTS
from ops_registry.errors import NoKernelError
from ops_registry.targets import aside
from tests import checks, poison
from tests.gpu import draws, twins
from tests.triton_target import kernels

KEY_SECONDS = 240  # a key that takes longer has hung


class Job(NamedTuple):
    """One key of one operator and its calls."""

    op: str
    seed: int
    key: int
    calls: int
    device: str

    @property
    def drawn(self) -> dict[str, Any]:
        return draws.draw_key(self.op, random.Random(f"{self.seed} {self.op} {self.key}"))


def draw(job: Job, index: int) -> Any:
    """Call number `index` of a key."""
    seed = f"{job.seed} {job.op} {job.key} {index}"
    return draws.draw_call(job.op, job.drawn, draws.Draw(seed, job.device))


def check(job: Job, call: Any, index: int) -> None:
    """Run call number `index` of a key and judge every output."""
    contract = CONTRACTS[job.op]
    stale, behind = index % 2 == 1, index % 4 >= 2
    used = poison.poisoned(call) if stale else checks.clone(call)
    with poison.memory(), aside(*(["tilelang"] if behind else [])):
        result = contract.op(*used)
    returned = () if result is None else (result,) if torch.is_tensor(result) else tuple(result)
    actual = returned + tuple(getattr(used, name) for name in contract.mutated)
    # A pool keeps its NaN; what else is NaN does not matter to the twin either.
    reference = poison.poisoned(call) if stale and contract.mutated else checks.clone(call)
    judge(job.op, job.drawn, actual, reference)


def judge(op: str, key: Mapping[str, Any], actual: Sequence[torch.Tensor], reference: Any) -> None:
    """Outputs and mutated tensors of a call of the key against the twin's."""
    if op == "nsa_topk":
        twins.check_nsa_topk(actual[0], twins.nsa_scores(reference))
        return
    found = zip(actual, twins.twin(reference), draws.tolerances(op, key), strict=True)
    for index, (a, e, tolerance) in enumerate(found):
        if tolerance is not None:
            if op == "fp8_lightning_indexer":
                a = a if key["clean_logits"] else a.masked_fill(e == -torch.inf, -torch.inf)
                # Weights of both signs cancel: a handful of logits has no size of its own.
                few = e.isfinite().sum() < 16
                tolerance = replace(tolerance, rel_l2=None) if few else tolerance
            unit = 1.0 if tolerance == EXACT else size_of(e)
            checks.assert_close(a, e, tolerance, f"output {index}", unit)


def size_of(expected: torch.Tensor) -> torch.Tensor:
    """The size of values, at least 1: sums over many rows or heads are larger.

    A gradient row of a key that hundreds of queries see is a sum of as many rounded terms, while
    the typical key of the call is seen by few: a row counts with its own size.
    """
    finite = expected.masked_fill(~expected.isfinite(), 0.0).to(torch.float64)
    if not finite.numel():
        return finite
    own = finite.square().mean(-1, keepdim=True).sqrt()
    return own.clamp(min=1.0).max(finite.square().mean().sqrt())


def described(key: dict[str, Any]) -> str:
    return " ".join(f"{n}={str(x).removeprefix('torch.')}" for n, x in key.items())


def run(job: Job) -> dict[str, Any]:
    """The line of a report: the calls that passed, what failed, and how long it took."""
    started, passed, failures, refused = time.perf_counter(), 0, [], None
    compiled = None
    for index in range(job.calls):
        try:
            call = draw(job, index)
            check(job, call, index)
            passed += 1
        except NoKernelError as error:
            refused = str(error)
            break
        except Exception as error:  # a failure of this call, reported with it
            text = "".join(traceback.format_exception_only(error)).strip()
            failures.append({"call": index, "error": text[:500]})
            if fatal(text) or len(failures) == 3:
                break
        compiled = compiled or time.perf_counter() - started
    return {
        **job._asdict(),
        "drawn": described(job.drawn),
        "passed": passed,
        "failures": failures,
        "refused": refused,
        "first_call_s": round(compiled or 0.0, 1),
        "seconds": round(time.perf_counter() - started, 1),
    }


def fatal(error: str) -> bool:
    """Whether the process can make no more calls."""
    return "CUDA error" in error or "device-side assert" in error


def lost(job: Job, what: str) -> dict[str, Any]:
    failure = {"call": None, "error": what}
    drawn = described(job.drawn)
    return {**job._asdict(), "drawn": drawn, "passed": 0, "failures": [failure], "refused": None}


# ------------------------------------------------------------------------------- processes


def work(jobs: Any, results: Any, name: int) -> None:
    """Take jobs until there are none; a broken device ends the process."""
    torch.set_num_threads(1)
    while True:
        try:
            job = jobs.get(timeout=2)
        except queue.Empty:
            return
        results.put((name, job, None))
        line = run(job)
        results.put((name, job, line))
        if any(fatal(failure["error"]) for failure in line["failures"]):
            results.close()
            results.join_thread()
            os._exit(1)


def spread(jobs: Sequence[Job], workers: int) -> Iterable[dict[str, Any]]:
    """The lines of all jobs, as they come; a process that dies or hangs is replaced."""
    context = multiprocessing.get_context("spawn")
    waiting, results = context.Queue(), context.Queue()
    for job in jobs:
        waiting.put(job)
    left, running, names = len(jobs), {}, iter(range(1 << 30))
    processes: dict[int, Any] = {}
    while left:
        while len(processes) < min(workers, left):
            name = next(names)
            processes[name] = context.Process(target=work, args=(waiting, results, name))
            processes[name].start()
        try:
            name, job, line = results.get(timeout=1)
            if line is None:
                running[name] = job, time.monotonic()
            else:
                running.pop(name, None)
                left -= 1
                yield line
            continue
        except queue.Empty:
            pass
        for name, process in list(processes.items()):
            hung = name in running and time.monotonic() - running[name][1] > KEY_SECONDS
            if hung:
                process.kill()
                process.join()
            if not process.is_alive():
                del processes[name]
                if name in running:
                    left -= 1
                    job = running.pop(name)[0]
                    yield lost(job, "hung" if hung else f"died with {process.exitcode}")
    for process in processes.values():
        process.join()


# ---------------------------------------------------------------------------------- command


def summary(lines: Sequence[dict[str, Any]]) -> str:
    """A table with a row per operator, and every failure."""
    rows = [
        f"{'operator':26} {'keys':>5} {'calls':>6} {'failed':>6} {'refused':>7} {'seconds':>8}"
    ]
    for op in dict.fromkeys(line["op"] for line in lines):
        own = [line for line in lines if line["op"] == op]
        rows.append(
            f"{op:26} {len(own):5} {sum(x['passed'] for x in own):6} "
            f"{sum(len(x['failures']) for x in own):6} {sum(bool(x['refused']) for x in own):7} "
            f"{sum(x.get('seconds', 0) for x in own):8.0f}"
        )
    for line in lines:
        where = f"--op {line['op']} --seed {line['seed']} --key {line['key']}"
        rows += [f"{where} --call {f['call']}: {f['error']}" for f in line["failures"]]
        if line["refused"]:
            rows.append(f"{where}: refused: {line['refused']}")
        if line["failures"] or line["refused"]:
            rows.append(f"    {line['drawn']}")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.random_calls")
    parser.add_argument("--op", action="append", choices=sorted(draws.CALLS))
    parser.add_argument("--calls", type=int, default=2000, help="of every operator")
    parser.add_argument("--keys", type=int, default=40, help="of every operator, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, default=Path("gpu_report"))
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--key", type=int, help="only this key, in this process")
    parser.add_argument("--call", type=int, help="only this call of the key; its error is raised")
    chosen = parser.parse_args(arguments)
    ops = chosen.op or [name for name in CONTRACTS if name in kernels()]
    share = -(-chosen.calls // chosen.keys)
    jobs = [
        Job(op, chosen.seed, key, share, chosen.device)
        for key in range(chosen.keys)
        for op in ops
        if chosen.key in (None, key)
    ]
    if chosen.call is not None:
        for job in jobs:
            print(described(job.drawn))
            call = draw(job, chosen.call)
            for name, x in call._asdict().items():
                print(f"  {name} {tuple(x.shape) if torch.is_tensor(x) else x}")
            check(job, call, chosen.call)
        return 0
    chosen.report.mkdir(parents=True, exist_ok=True)
    path = chosen.report / "random_calls.jsonl"
    lines = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
    done = {(x["op"], x["seed"], x["key"]) for x in lines}
    jobs = [job for job in jobs if job[:3] not in done]
    with path.open("a") as file:
        for line in spread(jobs, chosen.workers):
            file.write(json.dumps(line) + "\n")
            file.flush()
            lines.append(line)
    print(summary(lines))
    return int(any(line["failures"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
