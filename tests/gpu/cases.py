"""The cases with their tensors on a CUDA device; the float64 oracle stays on the CPU."""

import dataclasses
from typing import Any

import torch

from tests.cases import Case
from tests.triton_target import triton_cases


def moved(call: Any, device: str) -> Any:
    """The call with its tensors on `device`, strides kept."""
    return type(call)(*(to(x, device) if torch.is_tensor(x) else x for x in call))


def to(x: torch.Tensor, device: str) -> torch.Tensor:
    """x there, on rows of the same stride: a copy of a view with gaps has the gaps."""
    if x.is_contiguous() or not x.numel():
        return x.to(device)
    there = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return there.copy_(x) if 0 not in x.stride() else x.to(device)


def on(case: Case, device: str = "cuda") -> Case:
    """The case with calls, and what the oracle expects of them, on `device`."""

    def build(size, generator):
        built = case.build(size, generator)
        return {n: x.to(device) if torch.is_tensor(x) else x for n, x in built.items()}

    def expected(call):
        found = case.expected(moved(call, "cpu"))
        return tuple(None if x is None else x.to(device) for x in found)

    return dataclasses.replace(case, build=build, expected=expected)


CASES = [on(case) for case in triton_cases()]


def unvalidated(case: Case) -> Case:
    """The case without contents checks, which read tensors on the host."""
    if "validate_inputs" not in case.contract.Call._fields:
        return case
    return dataclasses.replace(
        case,
        build=lambda size, generator: case.build(size, generator) | {"validate_inputs": False},
    )


def first_cases() -> list[Case]:
    """One case of every operator."""
    first: dict[str, Case] = {}
    for case in CASES:
        first.setdefault(case.contract.name, case)
    return list(first.values())
