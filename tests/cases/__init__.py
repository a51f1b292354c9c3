"""Every operator's test cases, in one shape, so that one harness drives all of them.

A `Case` is one configuration of one operator: how to build a legal call of a given size, what
the float64 oracle says about it, and which extents are dynamic. `tests/cases/<stem>.py` lists
the cases of an operator; `all_cases()` collects them. The harness is `tests/checks.py`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import tileops  # noqa: F401  registers the operators
from ops_registry.accuracy import Tolerance
from ops_registry.contract import OpContract


@dataclass(frozen=True)
class Case:
    """One configuration of one operator.

    build: `(size, generator) -> {argument: value}` for a legal call. `size` scales every dynamic
        extent: extents are distinct and >= 2 for size >= 2, all 1 for size 1 (where legal), all
        0 for size 0. Head counts, head dims, page sizes and options do not depend on it.
    expected: `(call) -> tuple` of float64 (or exact) tensors: the outputs, then each mutated
        argument after the call. It gets its own copy of the inputs and may write to them. An
        entry may be None: not compared (its own test does).
    tolerances: one per entry of `expected`.
    dynamic: {argument: {axis: dimension}}; equal names share a Dim, "B+1" and "16*NP" are tied.
    expandable: the arguments whose rows may all become the first one; None is every floating
        argument of rank >= 3. A backward's o and lse belong to its q, k and v.
    """

    contract: OpContract
    variant: str
    build: Callable[[int, torch.Generator], dict[str, Any]]
    expected: Callable[[Any], tuple[torch.Tensor | None, ...]]
    tolerances: tuple[Tolerance, ...]
    dynamic: Mapping[str, Mapping[int, str]]
    expandable: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return f"{self.contract.name}-{self.variant}"

    def call(self, size: int = 5, seed: int = 0) -> Any:
        """A bound call of this size with fresh tensors."""
        generator = torch.Generator().manual_seed(1000 * size + seed)
        return self.contract.Call(**self.build(size, generator))


def all_cases() -> list[Case]:
    """The cases of every operator, in the order of the files."""
    found: list[Case] = []
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
        found += importlib.import_module(f"{__name__}.{module}").CASES
    return found


def lengths(size: int, batch: int = 3) -> list[int]:
    """Request lengths of a packed call: ragged, with an empty request from size 2 on."""
    if size == 0:
        return []
    if size == 1:
        return [1]
    return [size, 0, *(size + 3 * i + 1 for i in range(batch - 2))]


def offsets(lens: list[int]) -> torch.Tensor:
    """int32 [B + 1] prefix sums."""
    return torch.tensor([0, *torch.tensor(lens, dtype=torch.int64).cumsum(0).tolist()]).to(
        torch.int32
    )


def nsa_packing(lens: list[int], bs: int) -> dict[str, torch.Tensor]:
    """offsets, chunk_offsets and token_indices of an NSA batch; C is the last chunk offset."""
    tokens = [(n, t) for n, length in enumerate(lens) for t in range(length)]
    return {
        "offsets": offsets(lens),
        "chunk_offsets": offsets([-(-length // bs) for length in lens]),
        "token_indices": torch.tensor(tokens, dtype=torch.int32).reshape(-1, 2),
    }


def randn(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)
