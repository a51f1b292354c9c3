"""TileLang kernels: compiled once per kind, launched on the device and stream of their tensors.

A compilation takes seconds. TileLang keeps its binaries on disk (TILELANG_CACHE_DIR), by source and
version; the logger "tileops" says once a process that one is under way, on standard error unless
logging is configured otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tilelang
import torch
from torch import Tensor

LOG = logging.getLogger("tileops")
PATIENCE = 1.0  # seconds before a first call says what it waits for
TARGET = {"kind": "cuda", "arch": "sm_90a"}
_lock = threading.Lock()


@functools.cache
def _say(what: str) -> None:
    LOG.warning(
        "tileops compiles %s for this GPU, once: `python -m tileops.warmup` does it ahead", what
    )


@contextlib.contextmanager
def announced(what: str) -> Iterator[None]:
    """Say what a first call waits for, if it waits."""
    timer = threading.Timer(PATIENCE, _say, [what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@functools.cache
def _compiled(make: Callable[..., Any], constants: tuple[tuple[str, Any], ...]) -> Any:
    options = dict(constants)
    with announced(f"{make.__module__.rpartition('.')[2]} ({options})"):
        return tilelang.compile(
            make(**options), target=TARGET, pass_configs=make.passes, execution_backend="tvm_ffi"
        )


def launch(make: Callable[..., Any], first: Tensor, args: tuple[Any, ...], **constants: Any) -> None:
    """Run what `make(**constants)` builds over args, on the device of `first`."""
    key = tuple(sorted(constants.items()))
    with _lock:  # threads that want the same kernel compile it once
        kernel = _compiled(make, key)
    with torch.cuda.device(first.device):
        kernel(*args)
