"""Seeing launches instead of making them, and the machine they are for.

Listings and the compile matrix of the tests read from a recorder what launchers ask for. It knows
no kernel language: what says which devices a kernel lacks must not load one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from tileops.kernels.common.machine import Machine, machine_of


class _Recorder(NamedTuple):
    machine: Machine
    launches: list[Any]


_recorder: _Recorder | None = None


@contextlib.contextmanager
def recording(machine: Machine) -> Iterator[list[Any]]:
    """Collect launches for `machine` instead of running them; tensors may be meta tensors."""
    global _recorder
    before, _recorder = _recorder, _Recorder(machine, [])
    try:
        yield _recorder.launches
    finally:
        _recorder = before


def recorded() -> list[Any] | None:
    """Where launches are collected, if they are."""
    return None if _recorder is None else _recorder.launches


def machine(tensor: Tensor) -> Machine:
    """The machine that launches on this tensor are for."""
    if _recorder is not None:
        return _recorder.machine
    return machine_of(tensor.device.index)
