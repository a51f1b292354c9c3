"""A progress bar on standard error, for commands that compile or measure."""

from __future__ import annotations

import sys
import time

WIDTH = 30


class Progress:
    """Redrawn in place on a terminal, a line per step elsewhere."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.begin = total, 0, time.monotonic()
        self.shown = 0  # characters of the line that is shown
        self.terminal = sys.stderr.isatty()

    def step(self, words: str) -> None:
        """One more is done; `words` say which."""
        self.done += 1
        filled = WIDTH * self.done // max(self.total, 1)
        seconds = time.monotonic() - self.begin
        bar = f"[{'#' * filled}{'.' * (WIDTH - filled)}] " if self.terminal else ""
        self._draw(f"{bar}{self.done}/{self.total} {seconds:4.0f} s  {words}")
        if self.terminal and self.done == self.total:
            print(file=sys.stderr, flush=True)

    def tell(self, words: str) -> None:
        """A line of its own above the bar."""
        if self.terminal and self.shown:
            print("\r" + " " * self.shown + "\r", end="", file=sys.stderr)
            self.shown = 0
        print(words, file=sys.stderr, flush=True)

    def _draw(self, line: str) -> None:
        if not self.terminal:
            print(line, file=sys.stderr, flush=True)
            return
        print("\r" + line.ljust(self.shown), end="", file=sys.stderr, flush=True)
        self.shown = len(line)
