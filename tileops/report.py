"""What serves a call, in words: `explain` for one call, `report` for this machine."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import torch

from ops_registry import targets
from ops_registry.contract import BUILTIN_KERNELS, CONTRACTS
from tileops.op import Op


def explain(op: Op, *tensors: Any) -> str:
    """Which kernel serves `op(*tensors)`, and why each of the others does not.

    The call must be legal; it is validated, and nothing is run or written.
    """
    specs = op.contract.tensors
    given = (*tensors, *([None] * (len(specs) - len(tensors))))
    call = op.contract.Call(*op.bound(*given))
    op.contract.op(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in call))
    lines = [f"{op.contract.name} on {call[0].device}, target {op.target!r}"]
    chosen = False
    for kernel in targets.candidates(op.contract, call, BUILTIN_KERNELS[op.contract.name]):
        reason = kernel.declines(call, packaged=False)
        if reason is None:
            reason = "would serve, a better one does" if chosen else "serves"
            chosen = True
        lines.append(f"  {kernel.target}/{kernel.name}: {reason}")
    if not chosen:
        lines.append("  no kernel serves this call")
    return "\n".join(lines)


def versions() -> dict[str, str]:
    """Versions of what a bug report needs."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("tileops", "torch", "triton", "tilelang", "onnx", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["torch"] = torch.__version__
    return found


def devices() -> list[str]:
    """The devices operators can run on here."""
    found = [f"cpu: {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            found.append(f"cuda:{index}: {torch.cuda.get_device_name(index)}, sm_{major}{minor}")
    return found


def serving(device: str) -> dict[str, str]:
    """The kernels that may serve each operator on a device type, best first."""
    table = {}
    for name, kernels in BUILTIN_KERNELS.items():
        found = [k.name for k in kernels if not k.devices or device in k.devices]
        found += [
            f"{t.name}/{t.kernels[name].name}"
            for t in targets.external_targets().values()
            if name in t.kernels
        ]
        table[name] = ", ".join(found) or "none"
    return table


def report() -> str:
    """Versions, devices, targets and kernels as a text table."""
    lines = ["versions"]
    lines += [f"  {name:<14}{version}" for name, version in versions().items()]
    lines += ["devices"] + [f"  {line}" for line in devices()]
    names = [targets.BUILTIN, *sorted(targets.external_targets())]
    lines += ["targets", "  " + ", ".join(names)]
    kinds = ["cpu", "cuda"]
    tables = {kind: serving(kind) for kind in kinds}
    width = max(map(len, CONTRACTS)) + 2
    lines += ["operators (kernels by device, best first)"]
    lines += ["  " + "operator".ljust(width) + "".join(kind.ljust(22) for kind in kinds).rstrip()]
    for name in CONTRACTS:
        cells = "".join(tables[kind][name].ljust(22) for kind in kinds)
        lines.append("  " + (name.ljust(width) + cells).rstrip())
    return "\n".join(lines)
