"""The ratio to the best peer of every row, as an SVG.

python -m benchmarks.plot docs/benchmarks/h200.json docs/benchmarks/h200.svg
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.results import Result, load

STEP, TOP, LEFT, WIDTH, RIGHT = 18, 46, 330, 460, 190
FASTER, SLOWER, INK, FAINT = "#2f855a", "#c05621", "#333", "#ccc"
LOWEST, HIGHEST = 0.25, 4.0
TICKS = (0.25, 0.5, 1.0, 2.0, 4.0)


def place(ratio: float) -> float:
    """The x of a ratio: logarithmic, cut to [LOWEST, HIGHEST]."""
    held = min(max(ratio, LOWEST), HIGHEST)
    return LEFT + WIDTH * math.log(held / LOWEST) / math.log(HIGHEST / LOWEST)


def text(x: float, y: float, words: str, anchor: str = "start", color: str = INK) -> str:
    at = f'x="{x:.1f}" y="{y:.1f}"'
    return f'<text {at} text-anchor="{anchor}" fill="{color}">{escape(words)}</text>'


def bar(y: float, found: Result) -> list[str]:
    """One row: from 1 to its ratio, the peer and the times beside it."""
    ratio, best = found["ratio"], found["best_peer"]
    start, end = sorted((place(1.0), place(ratio)))
    color = FASTER if ratio >= 1 else SLOWER
    times = f"{ratio:.2f}  {found['ours_us']:.4g} us, {best} {found['peers'][best]:.4g}"
    return [
        text(LEFT - 8, y + 11, found["row"], "end"),
        f'<rect x="{start:.1f}" y="{y + 2:.1f}" width="{end - start:.1f}" height="12" '
        f'fill="{color}"/>',
        text(LEFT + WIDTH + 8, y + 11, times),
    ]


def svg(results: Sequence[Result]) -> str:
    """Bars of the rows that have a ratio, in their order; longer to the right is faster."""
    rows = [found for found in results if found["ratio"] is not None]
    height = TOP + STEP * len(rows) + 12
    width = LEFT + WIDTH + RIGHT + 60
    machine = rows[0]["machine"] if rows else "no row has a peer"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        text(LEFT, 16, f"time of the best peer / ours, on {machine}"),
    ]
    for tick in TICKS:
        x = place(tick)
        line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{height - 8}"'
        parts += [
            f'{line} stroke="{INK if tick == 1 else FAINT}"/>',
            text(x, TOP - 10, f"{tick:g}", "middle"),
        ]
    for index, found in enumerate(rows):
        parts += bar(TOP + STEP * index, found)
    return "\n".join([*parts, "</svg>"]) + "\n"


def write(source: Path, target: Path) -> None:
    target.write_text(svg(load(source)))


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
