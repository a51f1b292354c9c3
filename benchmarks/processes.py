"""The processes of the contestants, seen from the driver."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.peers import OURS, PEERS, SITES, TORCH, serves

Message: TypeAlias = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("worker.py")
FA4_LIBRARIES = Path("nvidia_cutlass_dsl") / "dsl_packages"


class Process:
    """A worker process; started when first asked, and again after it ended."""

    def __init__(
        self,
        path: Sequence[Path],
        device: str = "cuda",
        extra: Mapping[str, str] | None = None,
    ) -> None:
        self.path, self.device, self.extra = list(path), device, dict(extra or {})
        self.child: subprocess.Popen[str] | None = None
        self.reader: threading.Thread | None = None
        self.replies: queue.Queue[str | None] = queue.Queue()
        self.log: Path | None = None  # what its packages print

    def environment(self) -> dict[str, str]:
        """Our own, the path of the contestants first, this repository only where it is named."""
        kept = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        kept = [p for p in kept if Path(p).resolve() != ROOT]
        path = os.pathsep.join([*map(str, self.path), *kept])
        return {**os.environ, **self.extra, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}

    def start(self) -> None:
        self.replies = queue.Queue()
        if self.log is None:
            handle, name = tempfile.mkstemp(suffix=".log")
            os.close(handle)
            self.log = Path(name)
        with self.log.open("w") as log:
            self.child = subprocess.Popen(
                [sys.executable, str(WORKER), "--device", self.device],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self.environment(),
                cwd=tempfile.gettempdir(),
            )
        self.reader = threading.Thread(target=self.read, args=(self.child, self.replies))
        self.reader.start()

    @staticmethod
    def read(child: subprocess.Popen[str], replies: queue.Queue[str | None]) -> None:
        assert child.stdout is not None
        with child.stdout:
            for line in child.stdout:
                replies.put(line)
        replies.put(None)

    def ask(self, message: Message, seconds: float) -> Message:
        """The reply; a process that dies or stays silent is a reply of why, never an error."""
        if self.child is None or self.child.poll() is not None:
            self.start()
        assert self.child is not None and self.child.stdin is not None
        try:
            self.child.stdin.write(json.dumps(message) + "\n")
            self.child.stdin.flush()
            reply = self.replies.get(timeout=seconds)
        except queue.Empty:
            self.end()
            return {"ok": False, "why": f"no reply to {message['do']} in {seconds:.0f} s"}
        except OSError:
            reply = None
        if reply is None:
            self.end()
            return {"ok": False, "why": f"the process ended: {self.last_words()}"}
        found: Message = json.loads(reply)
        if found.get("fatal"):
            self.end()
        return found

    def last_words(self) -> str:
        printed = self.log.read_text(errors="replace") if self.log else ""
        lines = [x for x in printed.splitlines() if x.strip()]
        return lines[-1].strip()[:300] if lines else "no words"

    def end(self) -> None:
        child, self.child = self.child, None
        if child is None:
            return
        assert child.stdin is not None and self.reader is not None
        with contextlib.suppress(OSError):
            child.stdin.close()
        try:
            child.wait(timeout=2)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        self.reader.join()

    def close(self) -> None:
        """End for good."""
        self.end()
        if self.log is not None:
            self.log.unlink(missing_ok=True)


class Contestants:
    """Who takes part, and the process each runs in."""

    def __init__(self, peers: Sequence[str], sites: Mapping[str, Path], device: str) -> None:
        self.sites, self.device = dict(sites), device
        if "tileops" in self.sites:
            self.sites.setdefault("fla", self.sites["tileops"])
        self.names = [OURS, *(n for n in PEERS if n in peers and (n in TORCH or n in self.sites))]
        self.processes: dict[str, Process] = {}
        self.given_up: dict[tuple[str, str], str] = {}  # (contestant, row): why

    def missing(self, peers: Sequence[str]) -> list[str]:
        """Peers that were asked for and have no site."""
        return [name for name in peers if name not in self.names]

    @staticmethod
    def kind(name: str) -> str:
        """Torch's own share a process; every site has its own."""
        return "torch" if name in TORCH else name

    def path(self, kind: str) -> list[Path]:
        if kind == OURS:
            return [ROOT]
        if kind == "torch":
            return []
        site = self.sites[kind]
        if kind != "fa4":
            return [site]
        others = [self.sites["tileops"]] if "tileops" in self.sites else []
        return [site, site / FA4_LIBRARIES, *others]  # it needs tvm_ffi, which may be the other's

    def fresh(self, kind: str, extra: Mapping[str, str] | None = None) -> Process:
        return Process(self.path(kind), self.device, extra)

    def of(self, name: str) -> Process:
        kind = self.kind(name)
        if kind not in self.processes:
            self.processes[kind] = self.fresh(kind)
        return self.processes[kind]

    def by_process(self, op: str) -> list[list[str]]:
        """The contestants that have a call for the op, those of one process together."""
        found: dict[str, list[str]] = {}
        for name in self.names:
            if serves(name, op):
                found.setdefault(self.kind(name), []).append(name)
        return list(found.values())

    def close(self) -> None:
        for process in self.processes.values():
            process.close()


def parse_sites(given: Sequence[str]) -> dict[str, Path]:
    """NAME=FOLDER pairs; ValueError for another name or no such folder."""
    found = {}
    for pair in given:
        name, _, folder = pair.partition("=")
        path = Path(folder).resolve()
        if name not in SITES or not folder or not path.is_dir():
            names = ", ".join(SITES)
            raise ValueError(f"--peer-site takes NAME=FOLDER, NAME one of {names}; got {pair!r}")
        found[name] = path
    return found


class Stopwatch:
    def __init__(self, seconds: float) -> None:
        self.began, self.seconds = time.monotonic(), seconds

    @property
    def passed(self) -> float:
        return time.monotonic() - self.began

    @property
    def over(self) -> bool:
        return self.passed > self.seconds
