"""Compile ahead the kernels that a model's calls launch, so that its first calls are warm.

    python -m tileops.warmup --op gqa_paged_fwd paged_kv_cache_write \\
        --heads 32 --heads-kv 8 --head-dim 128 --dtype bfloat16 --page-size 64
    python -m tileops.warmup --op 'gqa_*' --window-size-left -1 4095 --list

A kernel is compiled for the dtypes, head counts, head dims, page size and options of a call, and
for no length: small calls on the GPU, one for decode and one for prefill where they differ, fill
the caches on disk (TRITON_CACHE_DIR, TILELANG_CACHE_DIR) that every later process reads. Run it
on the machine and in the environment that will serve. A flag may have several values; all their
combinations are compiled, for the operators that have the flag.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import tileops  # noqa: F401  registers the operators
from ops_registry.contract import BUILTIN_KERNELS, CONTRACTS, E4M3
from ops_registry.targets import Kernel, aside
from tileops.progress import Progress
from tileops.warmup_calls import RECIPES, Maker

if TYPE_CHECKING:
    from tileops.kernels.common.machine import Machine

MOST_JOBS = 8


# ------------------------------------------------------------------------- what users may say


def boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"must be true or false, got {text!r}")
    return text == "true"


def dtype(text: str) -> torch.dtype:
    known = {str(x).removeprefix("torch."): x for x in (torch.float16, torch.bfloat16, E4M3)}
    if text not in known:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(known)}, got {text!r}")
    return known[text]


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a non-negative integer, got {text!r}")
    return int(text)


class Flag(NamedTuple):
    """One thing about a model that decides compilations."""

    parse: Callable[[str], Any]
    help: str
    choices: tuple[str, ...] | None = None


FLAGS = {
    "heads": Flag(positive, "query heads"),
    "heads_kv": Flag(positive, "key/value heads"),
    "head_dim": Flag(positive, "columns of a head; of latent operators, of the values"),
    "dim_tail": Flag(whole, "columns that latent keys have besides those of the values"),
    "dtype": Flag(dtype, "of queries and new keys: float16, bfloat16, float8_e4m3fn"),
    "cache_dtype": Flag(dtype, "of paged pools, if not that of the queries"),
    "out_dtype": Flag(dtype, "of the output, for float8_e4m3fn queries (default bfloat16)"),
    "kv_scales": Flag(
        str, "scales of a float8_e4m3fn pool: one, or by request and head", ("tensor", "head")
    ),
    "page_size": Flag(positive, "tokens of a page"),
    "is_causal": Flag(boolean, "true, false"),
    "window_size_left": Flag(int, "keys visible to the left, -1 for all"),
    "window_size_right": Flag(int, "keys visible to the right, -1 for all"),
    "softcap": Flag(float, "cap of the scores"),
    "rope": Flag(str, "rotary embedding fused into the call", ("none", "neox", "interleaved")),
    "rotary_dim": Flag(positive, "rotated columns, if not all"),
    "rope_base": Flag(float, "base of the angles that gqa_prefill_paged_fwd computes"),
    "sinks": Flag(boolean, "true, false: whether calls have sinks"),
    "block_size": Flag(positive, "keys of a block of sparse attention"),
    "selected_block_num": Flag(positive, "blocks that a token selects"),
    "clean_logits": Flag(boolean, "true, false"),
    "layout": Flag(
        str,
        "whether q, k and v (of latent operators, the two parts of a row) are tensors of their "
        "own or slices of the rows of one projection",
        ("separate", "fused"),
    ),
}


# ------------------------------------------------------------------------------ the calls


class Planned(NamedTuple):
    """One call to make: an operator at some settings, in one phase."""

    op: str
    settings: tuple[tuple[str, Any], ...]
    phase: str

    def call(self, device: torch.device | str) -> Any:
        """The bound call, its tensors on `device`."""
        settings = SimpleNamespace(**dict(self.settings))
        arguments = RECIPES[self.op].build(settings, Maker(device), self.phase)
        return CONTRACTS[self.op].Call(**arguments)

    def described(self) -> str:
        said = (f"{n}={str(x).removeprefix('torch.')}" for n, x in self.settings if x is not None)
        return " ".join((self.op, *said))


def plan(ops: Sequence[str], given: Mapping[str, Sequence[Any]]) -> list[Planned]:
    """Every call of the operators, in all combinations of the values that are given.

    Raises ValueError, with the operator's own sentence, if one of the calls is not legal.
    """
    unread = set(given).difference(*(RECIPES[op].defaults for op in ops))
    if unread:
        flags = ", ".join("--" + name.replace("_", "-") for name in sorted(unread))
        raise ValueError(f"{flags}: no flag of {', '.join(ops)}")
    found = []
    for op in ops:
        recipe = RECIPES[op]
        values = [[(n, x) for x in given.get(n, [old])] for n, old in recipe.defaults.items()]
        for settings in itertools.product(*values):
            for phase in recipe.phases_in(dict(settings)["layout"]):
                planned = Planned(op, settings, phase)
                CONTRACTS[op].op(*planned.call("meta"))
                found.append(planned)
    return found


# ---------------------------------------------------------------------------- compiling


def portable(op: str) -> Kernel:
    """The kernel that all GPUs compile."""
    return next(kernel for kernel in BUILTIN_KERNELS[op] if kernel.name == "triton")


def special(op: str) -> list[Kernel]:
    """Kernels of some GPUs, which serve some calls there before the portable one."""
    return [k for k in BUILTIN_KERNELS[op] if "cuda" in k.devices and k != portable(op)]


def kernels(planned: Planned, machine: Machine) -> list[str]:
    """The names of the kernels that calls like this one launch on a machine.

    Where a special kernel serves the call, the portable one serves other lengths and layouts.
    """
    from tileops.kernels.common.recorder import recording

    call = planned.call("meta")
    out = CONTRACTS[planned.op].op(*call)
    with recording(machine) as found:
        for kernel in special(planned.op):
            if kernel.refusal(call) is None:
                kernel.run(out, call)
        portable(planned.op).run(out, call)
    return [launch.name for launch in found if 0 not in launch.grid]


def listing(calls: Sequence[Planned], machine: Machine) -> Iterator[str]:
    """A line per operator and settings, below it the kernels of its calls."""
    for (_, _), group in itertools.groupby(calls, key=lambda call: call[:2]):
        for index, planned in enumerate(group):
            if index == 0:
                yield planned.described()
            yield f"  {planned.phase}: {', '.join(kernels(planned, machine))}"


def compile_call(planned: Planned, device: str) -> str | None:
    """Make the call, whose kernels are compiled by it; why that failed, if it did."""
    op = CONTRACTS[planned.op].op
    try:
        torch.cuda.set_device(device)
        with torch.inference_mode():
            with aside(*(kernel.name for kernel in special(planned.op))):
                op(*planned.call(device))
            if special(planned.op):
                op(*planned.call(device))
        torch.cuda.synchronize(device)
    except Exception as error:  # the other calls are compiled all the same
        return " ".join(str(error).split()) or type(error).__name__
    return None


def compile_all(calls: Sequence[Planned], device: str, jobs: int) -> list[str]:
    """Make every call, in some processes at once; a sentence for each that failed."""
    progress, failed = Progress(len(calls)), []

    def done(planned: Planned, problem: str | None) -> None:
        progress.step(f"{planned.op} {planned.phase}")
        if problem is not None:
            failed.append(f"{planned.described()} ({planned.phase}): {problem}")

    if jobs == 1:
        for planned in calls:
            done(planned, compile_call(planned, device))
        return failed
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(compile_call, planned, device): planned for planned in calls}
        for future in as_completed(waiting):
            done(waiting[future], future.result())
    return failed


# ------------------------------------------------------------------------- command line


def parse(arguments: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="python -m tileops.warmup",
        usage="%(prog)s [--op NAME ...] [--FLAG VALUE ...] [--device cuda:0] [--jobs N] [--list]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--op", nargs="+", default=["*"], metavar="NAME",
        help="operators, by name or glob; all by default, at the shapes of models that use them",
    )  # fmt: skip
    for name, flag in FLAGS.items():
        parser.add_argument(
            "--" + name.replace("_", "-"), dest=name, nargs="+", type=flag.parse,
            choices=flag.choices, help=flag.help, metavar=None if flag.choices else "VALUE",
        )  # fmt: skip
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ...")
    parser.add_argument("--jobs", type=positive, help=f"processes, at most {MOST_JOBS} by default")
    parser.add_argument("--list", action="store_true", help="what would be compiled, and stop")
    return parser, parser.parse_args(arguments)


def chosen_ops(patterns: Sequence[str]) -> list[str]:
    """Operators in order of definition; ValueError for a pattern that fits none."""
    known = [op for op in CONTRACTS if op in RECIPES]
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            raise ValueError(f"--op {pattern}: no operator; there are {', '.join(known)}")
    return [op for op in known if any(fnmatch.fnmatchcase(op, p) for p in patterns)]


def checked_device(text: str) -> str:
    """The device with its index; ValueError, in a sentence, where it cannot compile."""
    try:
        device = torch.device(text)
    except RuntimeError:
        raise ValueError(f"--device must be cuda or cuda:INDEX, got {text!r}") from None
    if device.type != "cuda":
        raise ValueError(f"--device must be cuda or cuda:INDEX, got {text!r}")
    if not torch.cuda.is_available():
        raise ValueError(
            "kernels are compiled on the GPU that will run them and torch finds none here; "
            "--list works without one"
        )
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise ValueError(f"--device {text}: there are {torch.cuda.device_count()} GPUs here")
    return f"cuda:{index}"


def refuse(calls: Sequence[Planned]) -> None:
    """ValueError if a kernel declines one of the calls, or is not installed."""
    for planned in calls:
        reason = portable(planned.op).refusal(planned.call("meta"))
        if reason is not None:
            raise ValueError(f"{planned.op}: the Triton kernel {reason}")


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 1 if a call failed; 2 for what is asked wrongly or where nothing can be compiled."""
    parser, options = parse(arguments)
    given = {name: values for name in FLAGS if (values := getattr(options, name)) is not None}
    try:
        calls = plan(chosen_ops(options.op), given)
        device = "meta" if options.list else checked_device(options.device)
        refuse(calls)
    except ValueError as problem:
        parser.exit(2, f"tileops.warmup: {problem}\n")
    if options.list:
        from tileops.kernels.common.machine import machine_of

        machine = machine_of(torch.device(options.device).index)
        print(f"for {machine.family}")
        print("\n".join(listing(calls, machine)))
        return 0
    jobs = min(options.jobs or MOST_JOBS, len(calls), os.cpu_count() or 1)
    failed = compile_all(calls, device, jobs)
    for sentence in failed:
        print(sentence, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
