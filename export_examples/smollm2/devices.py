"""Where a generation runs: the processor or one GPU."""

from __future__ import annotations

import torch

from export_examples.smollm2.errors import DeviceError


def open_device(name: str) -> torch.device:
    """Return the device called `cpu`, `cuda` or `cuda:N`; a GPU becomes the current one."""
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        reason = (
            "finds no GPU it can use"
            if torch.backends.cuda.is_built()
            else "is a build without GPU support"
        )
        raise DeviceError(
            f"--device {name} needs a GPU, but torch {torch.__version__} {reason}: leave --device "
            "out to run on the processor."
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    count = torch.cuda.device_count()
    if index >= count:
        raise DeviceError(
            f"--device {name} does not exist: GPUs count from 0, and there are {count} here."
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def describe_target(device: torch.device) -> str:
    """Return what compiled code for the device is tied to: the kind of processor and of GPU."""
    processor = torch.backends.cpu.get_cpu_capability()
    if device.type == "cpu":
        return f"cpu {processor}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{device.type} sm_{major}{minor} {processor}"
