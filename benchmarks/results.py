"""Rows that were measured: the file that keeps them, and the table that shows them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

Result: TypeAlias = dict[str, Any]

KEYS = (
    "row",
    "op",
    "ours_us",
    "eager_us",
    "host_us",
    "first_call_s",
    "peers",
    "best_peer",
    "ratio",
    "limit_share",
    "error",
    "tolerance",
    "kernel",
    "machine",
    "torch",
    "triton",
    "tilelang",
    "date",
)


def tidy(value: Any) -> Any:
    """JSON-able, floats to four digits, NaN and infinities as null."""
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: tidy(v) for k, v in value.items()}
    return value


def load(path: Path) -> list[Result]:
    return json.loads(path.read_text()) if path.exists() else []


def merge(old: Iterable[Result], new: Iterable[Result], order: Sequence[str]) -> list[Result]:
    """One object per row in the given order; a new one replaces the old one whole.

    Whole, so that every field of a row is of one run; rows that `order` does not name are gone.
    """
    found = {result["row"]: result for result in (*old, *new)}
    return [found[name] for name in order if name in found]


def save(path: Path, results: Iterable[Result], order: Sequence[str]) -> None:
    """Merge into the file."""
    kept = merge(load(path), (tidy(result) for result in results), order)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("  " + json.dumps(result) for result in kept)
    path.write_text(f"[\n{lines}\n]\n" if kept else "[]\n")


def result(**fields: Any) -> Result:
    """One row's object, absent fields null, its best peer and the ratio to it worked out."""
    found = dict.fromkeys(KEYS) | fields
    assert set(found) == set(KEYS), set(found) ^ set(KEYS)
    peers = found["peers"] = found["peers"] or {}
    if peers:
        found["best_peer"] = min(peers, key=peers.__getitem__)
        if found["ours_us"]:
            found["ratio"] = peers[found["best_peer"]] / found["ours_us"]
    return found


def rate(us: float | None, flops: float, moved: float, flop_bound: bool) -> str:
    if not us:
        return "-"
    return f"{1e-6 * flops / us:.0f} TF/s" if flop_bound else f"{1e-3 * moved / us:.0f} GB/s"


HEADER = (
    f"{'row':46}{'kernel':>10}{'us':>9}{'rate':>11}{'limit':>7}{'host us':>9}{'eager us':>10}"
    f"{'best peer':>12}{'us':>9}{'ratio':>7}  error"
)


def line(found: Result, rate: str) -> str:
    """A row of the table under HEADER."""

    def number(key: str, form: str) -> str:
        return "-" if found[key] is None else format(found[key], form)

    best = found["best_peer"]
    peer = "-" if best is None else f"{found['peers'][best]:.1f}"
    return (
        f"{found['row']:46}{found['kernel'] or '-':>10}{number('ours_us', '.1f'):>9}{rate:>11}"
        f"{number('limit_share', '.0%'):>7}{number('host_us', '.1f'):>9}"
        f"{number('eager_us', '.1f'):>10}{best or '-':>12}{peer:>9}{number('ratio', '.2f'):>7}"
        f"  {number('error', '.1e')} of {found['tolerance']:.0e}"
    )
