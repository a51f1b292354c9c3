"""Tile sizes, warps and stages of a kernel, measured on this machine and kept as data.

    python -m benchmarks.tune gqa_paged_fwd                 every configuration of an operator
    python -m benchmarks.tune attention_wide --shape d128   one configuration, one shape class
    python -m benchmarks.tune mla_decode --dry-run          measure and print, write nothing
    python -m benchmarks.tune mla_decode --list             the candidates; needs no GPU

regenerates the entries of `tileops/kernels/configs/<name>.json` for this machine's family. All
candidates of a shape class are compiled first, in several processes. Then each is called on the
rows of the class: a candidate whose error exceeds a row's tolerance is out, the others are timed
as the benchmark times (`timing.py`), and the best few again in all the numbers that compile
nothing, and once more at length. The geometric mean over the rows decides; the numbers in the
file stay unless the best are faster by more than the noise.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import queue
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from benchmarks.gpu import PREPARE_S, SAMPLE_S, about, tell
from benchmarks.peers import OURS
from benchmarks.processes import Contestants, Process
from benchmarks.rows import (
    CHUNKS,
    HEADLINE,
    ROPE,
    Row,
    append,
    backward,
    dense,
    find,
    heads,
    indexer,
    nsa,
    paged,
    square,
)
from tileops.kernels.common.machine import CONFIGS, Machine, configuration, machine_of
from tileops.progress import Progress
from tileops.warmup import positive

Numbers: TypeAlias = dict[str, Any]
Frozen: TypeAlias = tuple[tuple[str, Any], ...]
Times: TypeAlias = dict[Frozen, dict[str, float]]  # of candidates, microseconds by row

FINALISTS = 4
BRIEF_S, LONG_S = 0.03, 0.3  # of samples per candidate and row
NOISE = 0.01  # by how much a candidate must be faster than what the file has


# ------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Table:
    """How the numbers of one kernel are found.

    ops: the operators whose calls use them.
    compiled: the values tried of numbers that a compilation depends on; all combinations are.
    free: those of numbers that compile nothing, tried for the best combinations.
    rows: what is timed for each shape class.
    """

    ops: tuple[str, ...]
    compiled: Mapping[str, tuple[Any, ...]]
    free: Mapping[str, tuple[int, ...]]
    rows: Mapping[str, Sequence[Row]]

    def candidates(self, current: Mapping[str, Any]) -> list[Numbers]:
        """The numbers in use, and every combination with those that are not tried kept."""
        found = varied(current, self.compiled)
        return [dict(current), *(numbers for numbers in found if numbers != dict(current))]


def varied(base: Mapping[str, Any], values: Mapping[str, Sequence[Any]]) -> list[Numbers]:
    """base in every combination of the values."""
    combinations = itertools.product(*values.values())
    return [{**base, **dict(zip(values, found, strict=True))} for found in combinations]


def known(*names: str) -> list[Row]:
    return [find(name) for name in names]


def at_dims(build: Any, **rows: Sequence[Row]) -> dict[str, Sequence[Row]]:
    """Rows by the class of their head dim: those given, and where none are, one that is built."""
    dims = (16, 32, 64, 128, 256, 512)
    return {f"d{dim}": rows.get(f"d{dim}") or [build(dim)] for dim in dims}


def latent(op: str, **shape: Any) -> Row:
    """A latent row at other dims than those of the model that has them."""
    like = find("mla-decode-b32-n4096-h128" if op == "mla" else "dsa-ds-v32-tp8-2k-of-32k")
    options = dict(like.options)
    if "dim_tail" in options:
        options["dim_tail"] = shape.pop("pe")
    name = "-".join(f"{key}{value}" for key, value in shape.items())
    return Row(f"{op}-{name}", like.op, like.shape | shape, options)


def latent_rows(op: str, **rows: Sequence[Row]) -> dict[str, Sequence[Row]]:
    """Rows by padded width and heads: those given, and where none are, one that is built."""
    dims = {144: (128, 16), 320: (256, 64), 576: (512, 64), 1152: (1024, 128)}
    return {
        f"w{width}h{group}": rows.get(f"w{width}h{group}")
        or [latent(op, heads=16 if group == 16 else 128, dim=dim, pe=pe)]
        for width, (dim, pe) in dims.items()
        for group in (16, 64)
    }


def nsa_rows(index: int, *names: str) -> dict[str, Sequence[Row]]:
    """Rows of one of the three operators of a sparse layer; names: those at 64 and 128 columns."""
    d64, *d128 = names
    wide = {dim: nsa(f"d{dim}", [4096] * 4, heads(32, 2, dim), 64, HEADLINE) for dim in (256, 512)}
    return {
        "d64": known(d64),
        "d128": known(*d128),
        "d256": [wide[256][index]],
        "wide": [wide[512][index]],
    }


GQA = ("gqa_dense_fwd", "gqa_varlen_fwd", "gqa_paged_fwd", "gqa_prefill_paged_fwd")
GQA_AND_MHA = (*GQA, "mha_decode_paged_fwd")
GRADIENTS = ("gqa_dense_bwd", "gqa_varlen_bwd")

GRADIENT_ROWS = at_dims(
    lambda dim: backward(f"b2-s2048-d{dim}", 2, 2048, heads(16, 8, dim), HEADLINE),
    d64=known("dense-causal-bwd-b2-s8192-d64"),
    d128=known("dense-causal-bwd-b4-s2048-d128", "dense-causal-bwd-b1-s8192-d128"),
)

TABLES = {
    "attention_wide": Table(
        GQA_AND_MHA,
        {
            "BLOCK_M": (64, 128),
            "BLOCK_N": (32, 64, 128),
            "TILES": (0, 1),
            "warps": (4, 8),
            "stages": (2, 3),
            "registers": (None, 168),
        },
        {"programs": (1, 2, 3)},
        at_dims(
            lambda dim: square(2, 4096, heads(32, 8, dim), HEADLINE),
            d64=known("dense-causal-fwd-b2-s8192-d64"),
            d128=known(
                "dense-causal-fwd-b4-s2048-d128",
                "dense-causal-fwd-b1-s8192-d128",
                "paged-prefill-b8-q512-l4096-ps64",
            ),
            d256=known("dense-gemma2-9b-8k"),
        ),
    ),
    "attention_narrow": Table(
        GQA_AND_MHA,
        {
            "BLOCK_M": (64,),
            "BLOCK_N": (32, 64, 128),
            "warps": (2, 4, 8),
            "stages": (2, 3, 4),
            "HOISTED": (0, 1),
        },
        {"programs": (1, 2, 3, 4), "programs_paged": (1, 2, 3)},
        at_dims(
            lambda dim: dense(f"decode-d{dim}", 32, 1, 4096, heads(32, 8, dim), HEADLINE),
            d64=known("paged-decode-gpt-oss-120b-b128-8k", "mha-decode-b16-l2048-h32-d64"),
            d128=known(
                "dense-decode-b32-s4096-d128",
                "dense-decode-b4-s32768-h64-d128",
                "paged-decode-b32-l4096-ps64",
                "mha-decode-llama2-7b-b16-4k",
            ),
            d256=known("mha-decode-gemma-7b-b8-8k"),
        ),
    ),
    "attention_pointers": Table(
        GQA,
        {"BLOCK_M": (64, 128), "BLOCK_N": (16, 32, 64, 128), "warps": (4, 8), "stages": (1, 2, 3)},
        {"programs": (1, 2)},
        at_dims(
            lambda dim: paged(
                f"prefill-rope-d{dim}", CHUNKS, [4096] * 8, 64, heads(32, 8, dim), HEADLINE, **ROPE
            ),
            d128=[
                *known("paged-prefill-llama3-8b-rope-chunk", "dense-fp8-b1-s8192-d128"),
                append(
                    "fp8cache-d128",
                    CHUNKS,
                    [4096] * 8,
                    64,
                    heads(32, 8, 128),
                    HEADLINE,
                    cache_dtype="e4m3",
                ),
            ],
        ),
    ),
    "attention_backward_keys": Table(
        GRADIENTS,
        {
            "BLOCK_M": (32, 64, 128),
            "BLOCK_N": (32, 64, 128),
            "FUSED": (0, 1),
            "EARLY": (0, 1),
            "warps": (4, 8),
            "stages": (1, 2, 3),
        },
        {},
        GRADIENT_ROWS,
    ),
    "attention_backward_queries": Table(
        GRADIENTS,
        {"BLOCK_M": (32, 64, 128), "BLOCK_N": (32, 64, 128), "warps": (4, 8), "stages": (1, 2, 3)},
        {},
        GRADIENT_ROWS,
    ),
    "mla_decode": Table(
        ("mla_decode_fwd",),
        {
            "BLOCK_H": (16, 32, 64),
            "BLOCK_N": (16, 32, 64),
            "EARLY": (0, 1),
            "TILES": (0, 1),
            "warps": (4, 8),
            "stages": (2, 3, 4),
        },
        {"programs": (1, 2, 3)},
        latent_rows(
            "mla",
            w576h16=known("mla-decode-ds-v3-tp8-b64-8k"),
            w576h64=known("mla-decode-b32-n4096-h128", "mla-decode-b128-n8192-h128"),
        ),
    ),
    "dsa_decode": Table(
        ("dsa_decode_fwd",),
        {
            "BLOCK_H": (16, 32, 64),
            "BLOCK_N": (16, 32, 64),
            "EARLY": (0, 1),
            "warps": (4, 8),
            "stages": (2, 3, 4),
        },
        {"programs": (1, 2, 3)},
        latent_rows(
            "dsa",
            w576h16=known("dsa-ds-v32-tp8-2k-of-32k"),
            w576h64=known("dsa-s4096-kv8192-k2048-h128", "dsa-ds-v32-decode-b64-32k"),
        ),
    ),
    "nsa_compressed": Table(
        ("nsa_compressed_fwd",),
        {
            "BLOCK_M": (32, 64, 128),
            "BLOCK_N": (32, 64),
            "FIRST": (0, 1),
            "warps": (4, 8),
            "stages": (1, 2),
            "registers": (None, 96, 128),
        },
        {},
        nsa_rows(0, "nsa-compressed-d64-4x8k", "nsa-compressed-8x1k", "nsa-compressed-27b-8x4k"),
    ),
    "nsa_topk": Table(
        ("nsa_topk",),
        {"BLOCK_M": (32, 64, 128), "BLOCK_N": (32, 64), "warps": (4, 8), "stages": (1, 2, 3)},
        {},
        nsa_rows(1, "nsa-topk-d64-4x8k", "nsa-topk-8x1k", "nsa-topk-27b-8x4k"),
    ),
    "nsa_varlen": Table(
        ("nsa_varlen_fwd",),
        {
            "BLOCK_M": (32, 64, 128),
            "BLOCK_N": (32, 64),
            "TOKENS": (2, 4, 8),
            "warps": (4, 8),
            "stages": (1, 2, 3),
            "registers": (None, 128, 168),
        },
        {"APART": (24, 52, 64)},
        nsa_rows(2, "nsa-sparse-d64-4x8k", "nsa-sparse-8x1k", "nsa-sparse-27b-8x4k"),
    ),
    "nsa_varlen_apart": Table(
        ("nsa_varlen_fwd",),
        {"BLOCK_N": (32, 64), "warps": (1, 2), "stages": (2, 3, 4)},
        {},
        {"d64": known("nsa-sparse-d64-4x8k")},
    ),
    "fp8_lightning_indexer": Table(
        ("fp8_lightning_indexer",),
        {"BLOCK_M": (64, 128), "COLUMNS": (64, 128, 256), "warps": (4, 8), "stages": (2, 3, 4)},
        {"programs": (1, 2), "MOST": (2048, 4096), "LEAST": (512, 1024)},
        at_dims(
            lambda dim: indexer(f"d{dim}", 4096, 32768, HEADLINE, dim=dim),
            d128=known("indexer-s4096-kv32768-h64-d128", "indexer-ds-v32-decode-128k"),
        ),
    ),
    "index_keys": Table(
        ("fp8_lightning_indexer",),
        {"ELEMENTS": (1024, 2048, 4096, 8192), "warps": (1, 2, 4, 8)},
        {},
        {"all": known("indexer-bf16-h32-d64-8k")},
    ),
    "paged_kv_cache_write": Table(
        ("paged_kv_cache_write",),
        {"BLOCK": (128, 256, 512, 1024), "WIDTH": (4, 8, 16), "warps": (2, 4, 8)},
        {},
        {
            "16bit": known("cache-write-t8192-h8-d128", "cache-write-gpt-oss-120b-prefill-16k"),
            "e4m3": known("cache-write-t8192-h8-d128-fp8", "cache-write-qwen3-235b-fp8-4k"),
        },
    ),
}


# ------------------------------------------------------------------------------------- files


def entry_a_line(table: Any) -> str:
    """JSON with the numbers of a shape class on one line."""

    def block(members: Mapping[str, str], indent: str) -> str:
        lines = (f"{indent} {json.dumps(name)}: {text}" for name, text in members.items())
        return "{\n" + ",\n".join(lines) + "\n" + indent + "}"

    def family(classes: Mapping[str, Any]) -> str:
        return block({name: json.dumps(numbers) for name, numbers in classes.items()}, " ")

    return block({name: family(classes) for name, classes in table.items()}, "")


def number_a_line(table: Any) -> str:
    return json.dumps(table, indent=1)


def rewritten(text: str, table: Any) -> str:
    """The table as JSON in the style of the file's text, so that only what changed differs."""
    end = text[len(text.rstrip()) :]
    before = json.loads(text)
    for style in (entry_a_line, number_a_line):
        if style(before) + end == text:
            return style(table) + end
    raise ValueError("the file is in neither of the two styles of configurations")


def updated(table: Any, family: str, shape_class: str, numbers: Mapping[str, Any]) -> Any:
    """The table with these numbers for a family: what differs from its "default" entry is added
    to the family's, what is there already keeps its place. None takes a number away."""
    default = table.get("default", {}).get(shape_class, {})
    entry = dict(table.get(family, {}).get(shape_class, {}))
    for name, value in numbers.items():
        if value is None and name not in default:
            entry.pop(name, None)
        elif {**default, **entry}.get(name) != value:
            entry[name] = value
    if not entry:
        return table
    return {**table, family: {**table.get(family, {}), shape_class: entry}}


# ----------------------------------------------------------------------------------- measuring


def frozen(numbers: Mapping[str, Any]) -> Frozen:
    return tuple(numbers.items())


def mean(times: Mapping[str, float]) -> float:
    return statistics.geometric_mean(times.values())


def in_use(name: str, shape_class: str, machine: Machine) -> Numbers:
    """What the file says, and None for a number that it leaves out and that is tried."""
    tried = dict.fromkeys(TABLES[name].compiled)
    return {**tried, **configuration(name, shape_class, machine)}


class Tuning:
    """One configuration and shape class on this machine."""

    def __init__(
        self, name: str, shape_class: str, machine: Machine, contestants: Contestants
    ) -> None:
        self.name, self.shape_class, self.contestants = name, shape_class, contestants
        self.table = TABLES[name]
        self.rows = self.table.rows[shape_class]
        self.current = in_use(name, shape_class, machine)
        self.failed: dict[tuple[Frozen, str], str] = {}

    def message(self, row: Row, numbers: Mapping[str, Any], do: str) -> dict[str, Any]:
        return about(row, OURS, do) | {"numbers": {self.name: dict(numbers)}}

    def compile(self, jobs: int) -> None:
        """Call every candidate once on every row, in several processes."""
        waiting: queue.SimpleQueue[tuple[Row, Numbers]] = queue.SimpleQueue()
        tasks = list(itertools.product(self.rows, self.table.candidates(self.current)))
        for task in tasks:
            waiting.put(task)
        progress = Progress(len(tasks))

        def drain() -> None:
            process = self.contestants.fresh(OURS)
            with contextlib.suppress(queue.Empty), contextlib.closing(process):
                while True:
                    row, numbers = waiting.get_nowait()
                    reply = process.ask(self.message(row, numbers, "warm"), PREPARE_S)
                    if not reply["ok"]:
                        self.failed[frozen(numbers), row.name] = reply["why"]
                    progress.step(f"compiled {self.name} {self.shape_class}")

        with ThreadPoolExecutor(jobs) as pool:
            drains = [pool.submit(drain) for _ in range(min(jobs, len(tasks)))]
            for drained in drains:
                drained.result()

    def measure(self, candidates: Sequence[Numbers], seconds: float, what: str) -> Times:
        """Microseconds on every row of the candidates that are right on all of them."""
        progress = Progress(len(candidates) * len(self.rows))
        times: Times = {frozen(numbers): {} for numbers in candidates}
        for row in self.rows:
            for numbers in candidates:
                us = self.time(row, numbers, seconds)
                if us is not None:
                    times[frozen(numbers)][row.name] = us
                progress.step(f"{what} {self.name} {self.shape_class}")
        return {key: found for key, found in times.items() if len(found) == len(self.rows)}

    def time(self, row: Row, numbers: Numbers, seconds: float) -> float | None:
        """The median, None if the call fails or is wrong; `failed` keeps why."""
        key = frozen(numbers), row.name
        if key in self.failed:
            return None
        process: Process = self.contestants.of(OURS)
        reply = process.ask(self.message(row, numbers, "prepare"), PREPARE_S)
        if reply["ok"] and not reply["error"] <= row.tolerance:
            reply = {"ok": False, "why": f"error {reply['error']:.2g} > {row.tolerance:.2g}"}
        if reply["ok"]:
            asked = {"do": "sample", "contestant": OURS, "seconds": seconds}
            reply = process.ask(asked, SAMPLE_S)
        if not reply["ok"]:
            self.failed[key] = reply["why"]
            return None
        return statistics.median(reply["us"])

    def finalists(self, times: Times) -> list[Numbers]:
        """The best few, and what is in use."""
        best = sorted(times, key=lambda key: mean(times[key]))[:FINALISTS]
        kept = [dict(key) for key in best]
        return kept if self.current in kept else [self.current, *kept]

    def run(self, jobs: int) -> tuple[Numbers, Times]:
        """The numbers to keep, and the last times, those in use and the chosen among them."""
        self.compile(jobs)
        candidates = self.table.candidates(self.current)
        times = self.measure(candidates, BRIEF_S, "timed")
        if self.table.free:
            more = [n for best in self.finalists(times) for n in varied(best, self.table.free)]
            times |= self.measure(distinct(more), BRIEF_S, "timed")
        times = self.measure(self.finalists(times), LONG_S, "final")
        return chosen(self.current, times), times


def distinct(candidates: Iterable[Numbers]) -> list[Numbers]:
    return list({frozen(numbers): numbers for numbers in candidates}.values())


def chosen(current: Numbers, times: Times) -> Numbers:
    """The fastest candidate, if it beats what is in use by more than the noise."""
    if not times:
        return current
    best = min(times, key=lambda key: mean(times[key]))
    mine = times.get(frozen(current))
    if mine is not None and mean(times[best]) > (1 - NOISE) * mean(mine):
        return current
    return dict(best)


# -------------------------------------------------------------------------------- command line


def tables_of(name: str) -> list[str]:
    """The configuration of that name, and those of the operator of that name."""
    return [key for key, table in TABLES.items() if name == key or name in table.ops]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("op", help="an operator, or a configuration by the name of its file")
    add("--shape", nargs="+", metavar="CLASS", help="shape classes (default: all)")
    add("--out", type=Path, default=CONFIGS, metavar="FOLDER", help="where the files are")
    add("--dry-run", action="store_true", help="measure and print, write nothing")
    add("--list", action="store_true", help="the candidates and rows, and stop")
    add("--jobs", type=positive, default=max(1, min(12, (os.cpu_count() or 4) - 4)))
    add("--device", default="cuda", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.tables = tables_of(options.op)
    if not options.tables:
        operators = sorted({op for table in TABLES.values() for op in table.ops})
        parser.error(f"no {options.op}; operators: {', '.join(operators)}; "
                     f"configurations: {', '.join(TABLES)}")  # fmt: skip
    classes = {shape for name in options.tables for shape in TABLES[name].rows}
    wrong = [shape for shape in options.shape or () if shape not in classes]
    if wrong:
        parser.error(f"--shape {' '.join(wrong)}: {options.op} has {', '.join(sorted(classes))}")
    missing = [name for name in options.tables if not (options.out / f"{name}.json").exists()]
    if missing:
        parser.error(f"--out {options.out}: there is no {missing[0]}.json")
    if not (options.list or options.device == "cpu" or torch.cuda.is_available()):
        parser.error("candidates are timed on a GPU and torch finds none here; --list needs none")
    return options


def listing(name: str, shape_class: str, machine: Machine) -> str:
    table = TABLES[name]
    current = in_use(name, shape_class, machine)
    lines = [f"{name} {shape_class}: {len(table.candidates(current))} candidates"]
    for number, values in (*table.compiled.items(), *table.free.items()):
        lines.append(f"  {number:10} {current.get(number)!s:>6} now, tries {values}")
    return "\n".join([*lines, *(f"  on {row.name}" for row in table.rows[shape_class])])


def report(tuning: Tuning, numbers: Numbers, times: Times) -> str:
    """The table of one shape class: the rows before and after, and what changed."""
    now, best = times.get(frozen(tuning.current), {}), times.get(frozen(numbers), {})
    lines = [f"{tuning.name} {tuning.shape_class}", f"  {'row':46}{'now us':>10}{'best us':>10}"]
    for row in tuning.rows:
        old, new = now.get(row.name, math.nan), best.get(row.name, math.nan)
        lines.append(f"  {row.name:46}{old:10.2f}{new:10.2f}{old / new:8.3f}x")
    changes = [
        f"{key} {tuning.current.get(key)} -> {value}"
        for key, value in numbers.items()
        if tuning.current.get(key) != value
    ]
    lines.append(f"  {', '.join(changes) or 'kept'}; {len(tuning.failed)} calls failed")
    return "\n".join(lines)


def write(folder: Path, name: str, family: str, shape_class: str, numbers: Numbers) -> None:
    path = folder / f"{name}.json"
    text = path.read_text()
    path.write_text(rewritten(text, updated(json.loads(text), family, shape_class, numbers)))


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if a shape class has no candidate that is right."""
    options = parse(arguments)
    machine = machine_of(None)
    work = [
        (name, shape)
        for name in options.tables
        for shape in TABLES[name].rows
        if shape in (options.shape or TABLES[name].rows)
    ]
    if options.list:
        for pair in work:
            print(listing(*pair, machine))
        return 0
    contestants = Contestants([], {}, options.device)
    failed = False
    try:
        tell(f"{machine.family}, {len(work)} shape classes")
        for name, shape in work:
            tuning = Tuning(name, shape, machine, contestants)
            numbers, times = tuning.run(options.jobs)
            print(report(tuning, numbers, times), flush=True)
            for reason in sorted(set(tuning.failed.values()))[:5]:
                tell(f"  failed: {reason}")
            failed = failed or not times
            if times and not options.dry_run:
                write(options.out, name, machine.family, shape, numbers)
    finally:
        contestants.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
