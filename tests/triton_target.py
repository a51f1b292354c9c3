"""The Triton kernels as a target of their own: through it CPU tensors reach them.

On CPU tensors the interpreter runs the kernels (`tests/interpreter`) and the compilers trace them
(`tests/test_triton_tracing.py`), each through the operator, as CUDA tensors would.
"""

import contextlib
import dataclasses
import logging

from ops_registry.contract import BUILTIN_KERNELS
from ops_registry.targets import ExternalTarget, Kernel, register_target, unregister_target
from tests.cases import Case, all_cases

TARGET = "triton"


def kernels() -> dict[str, Kernel]:
    """The Triton kernels by dispatcher name."""
    return {
        name: kernel
        for name, found in BUILTIN_KERNELS.items()
        for kernel in found
        if kernel.name == "triton"
    }


@contextlib.contextmanager
def registered():
    """The target is known, and serves tensors of every device."""
    serving = {
        name: dataclasses.replace(kernel, target=TARGET, devices=())
        for name, kernel in kernels().items()
    }
    register_target(ExternalTarget(TARGET, serving))
    try:
        yield
    finally:
        unregister_target(TARGET)


def through_triton(case: Case) -> Case:
    """The case with calls that name the target."""
    return dataclasses.replace(
        case, build=lambda size, generator: case.build(size, generator) | {"target": TARGET}
    )


@contextlib.contextmanager
def complaints():
    """What torch logs where it cannot see through a kernel; it then takes all for written."""
    logger, found = logging.getLogger("torch._dynamo"), []

    class Collect(logging.Handler):
        def emit(self, record):
            if "assuming every input is mutated" in record.getMessage():
                found.append(str(record.exc_info and record.exc_info[1]))

    handler = Collect(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def triton_cases() -> list[Case]:
    """The cases of every operator that has a Triton kernel, as the operator is called."""
    return [case for case in all_cases() if case.contract.name in kernels()]
