"""Calls that repeat: what a call did is done again for the next one with the same metadata.

What `infer`, `select` and a launcher decide follows from metadata alone, never from contents. So
a kernel may offer to remember a call (`Kernel.remember`), and a call whose tensors have the same
shapes, strides, dtypes, devices and alignment, with the same options and the same deterministic
mode of torch, repeats it with its own pointers: nothing is validated or decided twice. A
language model calls an operator with the same metadata once per layer, so a call is remembered
when it is seen for the second time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from . import targets

ALIGNMENT = 16  # bytes; what decides how a pointer is loaded through
MOST = 1024  # remembered calls of one operator
PLAIN = (Tensor, torch.nn.Parameter)

# A remembered call: takes the pointers of the tensors in order, and the call; returns the outputs.
Repeat = Callable[[list[int], Any], Any]

_paused = 0


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Nothing is remembered or repeated: for whoever changes what launchers decide by."""
    global _paused
    _paused += 1
    try:
        yield
    finally:
        _paused -= 1


class Repeats:
    """The remembered calls of one operator."""

    def __init__(self) -> None:
        # None: seen once. False: what it does cannot be repeated.
        self.found: dict[Any, Repeat | Literal[False] | None] = {}

    def key(self, call: Any) -> tuple[Any, list[int]] | None:
        """What decides a call, and its pointers; None for a call that is not to be remembered."""
        if _paused or not call[0].is_cuda or targets.external_targets():
            return None
        parts: list[Any] = [
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            targets.set_aside(),
        ]
        pointers = []
        for x in call:
            if isinstance(x, Tensor):
                if type(x) not in PLAIN:
                    return None
                pointer = x.data_ptr()
                pointers.append(pointer)
                parts += (x.shape, x.stride(), x.dtype, x.device, pointer % ALIGNMENT)
            else:
                parts.append(x)
        return tuple(parts), pointers

    def wanted(self, key: Any) -> bool:
        """Whether to try to remember a call: it was seen before, and not tried."""
        if key in self.found:
            return self.found[key] is None
        if len(self.found) >= MOST:
            self.found.clear()
        self.found[key] = None
        return False
