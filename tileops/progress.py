"""A progress bar on standard error, for commands that compile or measure."""

from __future__ import annotations

import sys
import threading
import time

WIDTH = 30


class Progress:
    """Redrawn in place on a terminal, a line per step elsewhere."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.begin = total, 0, time.monotonic()
        self.shown = 0  # characters of the line that is shown
        self.terminal = sys.stderr.isatty()
        self.lock = threading.Lock()

    def step(self, words: str) -> None:
        """One more is done; `words` say which."""
        with self.lock:
            self.done += 1
            seconds = time.monotonic() - self.begin
            line = f"{self.done}/{self.total} {seconds:4.0f} s  {words}"
            if not self.terminal:
                print(line, file=sys.stderr, flush=True)
                return
            filled = WIDTH * self.done // self.total
            line = f"[{'#' * filled}{'.' * (WIDTH - filled)}] {line}"
            end = "\n" if self.done == self.total else ""
            print(f"\r{line.ljust(self.shown)}", end=end, file=sys.stderr, flush=True)
            self.shown = len(line)
