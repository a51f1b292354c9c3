"""What the Triton kernels do not serve: machines that lack their instructions, rows too wide."""

from typing import Any

from tileops.kernels.common.recorder import machine

MOST_COLUMNS = 512  # of a head, in registers and shared memory at once


def refusal(call: Any) -> str | None:
    """Why kernels cannot be compiled for the device of a call."""
    return machine(call[0]).refusal


def head_dim_refusal(call: Any) -> str | None:
    """Why attention whose tiles hold whole rows declines a call."""
    dim = call.q.shape[-1]
    if dim > MOST_COLUMNS:
        return f"serves head dims of at most {MOST_COLUMNS} columns, got D={dim}"
    return None
