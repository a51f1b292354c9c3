"""`python -m tests.peak_memory MODE NAME LENGTH`: extra memory of one call, in MB, on stdout.

MODE is eager, compile or package. Extra means above inputs and outputs: the peak resident size
during the call, less the size before it and the outputs. A first call at a small length takes
what a library allocates once.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from ops_registry.contract import CONTRACTS
from tests import checks, headline


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


SMALL = 256  # a length whose calls fit every page size


def packaged(name: str) -> Any:
    """The operator's AOTInductor package as a function; what grows with the length is dynamic."""
    made_from, longer = headline.call(name, SMALL), headline.call(name, 2 * SMALL)
    dims = tuple(
        {axis: torch.export.Dim.AUTO for axis in range(x.dim()) if x.shape[axis] != y.shape[axis]}
        for x, y in zip(checks.tensors_of(made_from), checks.tensors_of(longer), strict=True)
    )
    module = checks.Module(CONTRACTS[name], made_from)
    with torch.no_grad():
        program = torch.export.export(module, checks.tensors_of(made_from), dynamic_shapes=(dims,))
        path = str(Path(tempfile.mkdtemp()) / "package.pt2")
        torch._inductor.aoti_compile_and_package(program, package_path=path)
    model = torch._inductor.aoti_load_package(path)
    return lambda *args: model(*(x for x in args if torch.is_tensor(x)))


def extra(mode: str, name: str, length: int) -> float:
    op = getattr(torch.ops.tileops, name).default
    if mode == "compile":
        run = torch.compile(lambda *args: op(*args), fullgraph=True, dynamic=True)
    else:
        run = packaged(name) if mode == "package" else op
    with torch.no_grad():
        run(*headline.call(name, SMALL))
        call = headline.call(name, length)
        before = resident("VmRSS")
        reset_peak()
        result = run(*call)
        peak = resident("VmHWM")
    results = () if result is None else (result,) if torch.is_tensor(result) else result
    return (peak - before - sum(x.nbytes for x in results)) / 1e6


if __name__ == "__main__":
    print(f"{extra(sys.argv[1], sys.argv[2], int(sys.argv[3])):.0f}")
