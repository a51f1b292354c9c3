"""The machine a kernel is launched or lowered for, and the tuned numbers for it.

Configurations are data: `tileops/kernels/configs/<name>.json` holds, per family of
architectures and shape class, the tile sizes, warps and stages of one kernel.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from ops_registry import repeats

CONFIGS = Path(__file__).parent.parent / "configs"
OLDEST = 80  # the first with bfloat16 products and asynchronous copies


class Machine(NamedTuple):
    """What launchers may ask of a device.

    backend: "cuda" or "hip".
    arch: 90 for sm_90; "gfx942".
    processors: multiprocessors (compute units).
    """

    backend: str
    arch: int | str
    processors: int

    @property
    def family(self) -> str:
        """The key of configurations: the newest described architecture this one can run as."""
        if self.backend == "hip":
            return "gfx942"
        assert isinstance(self.arch, int)
        # sm_86 and sm_87 have the shared memory of sm_89; sm_12x is no larger sm_100.
        for least, name in ((120, "sm_120"), (100, "sm_100"), (90, "sm_90"), (86, "sm_89")):
            if self.arch >= least:
                return name
        return "sm_80"

    @property
    def refusal(self) -> str | None:
        """Why kernels cannot be compiled for it."""
        if self.backend == "cuda" and isinstance(self.arch, int) and self.arch < OLDEST:
            got = f"{self.arch // 10}.{self.arch % 10}"
            return f"needs a GPU of compute capability {OLDEST / 10} or later, got {got}"
        return None

    @property
    def e4m3(self) -> bool:
        """Whether the compiler knows float8_e4m3fn there; else kernels see bytes."""
        return self.backend == "cuda" and isinstance(self.arch, int) and self.arch >= 89


H200 = Machine("cuda", 90, 132)


@functools.cache
def machine_of(index: int | None) -> Machine:
    """The CUDA or ROCm device with this index, None the current one; H200 where there is none."""
    if not torch.cuda.is_available():
        return H200
    found = torch.cuda.get_device_properties(
        torch.cuda.current_device() if index is None else index
    )
    if torch.version.hip:
        return Machine("hip", found.gcnArchName.partition(":")[0], found.multi_processor_count)
    return Machine("cuda", 10 * found.major + found.minor, found.multi_processor_count)


@functools.cache
def _configurations(name: str) -> Mapping[str, Mapping[str, Mapping[str, int]]]:
    return json.loads((CONFIGS / f"{name}.json").read_text())


_overrides: dict[str, Mapping[str, int]] = {}


@contextlib.contextmanager
def overriding(name: str, numbers: Mapping[str, int]) -> Iterator[None]:
    """Use these numbers for a kernel whatever the files say: for tuning and tests."""
    _overrides[name] = numbers
    try:
        with repeats.paused():
            yield
    finally:
        del _overrides[name]


def configuration(name: str, shape_class: str, machine: Machine) -> Mapping[str, int]:
    """The numbers of one kernel for a shape class on a machine, such as {"BLOCK_M": 128}.

    `warps` and `stages` are launch options, the other keys constexprs of the kernel. A family's
    entry overrides the "default" entry key by key.
    """
    return _overrides.get(name) or _looked_up(name, shape_class, machine)


@functools.cache
def _looked_up(name: str, shape_class: str, machine: Machine) -> Mapping[str, int]:
    table = _configurations(name)
    found = {
        **table.get("default", {}).get(shape_class, {}),
        **table.get(machine.family, {}).get(shape_class, {}),
    }
    if not found:
        raise KeyError(f"configs/{name}.json has no {shape_class!r} for {machine.family}")
    return found
