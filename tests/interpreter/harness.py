"""The cases as the interpreter runs them, with what it rounds differently."""

import dataclasses

import torch

from ops_registry.accuracy import EXACT, Tolerance
from tests.cases import Case
from tests.triton_target import through_triton, triton_cases


def doubled(tolerance: Tolerance) -> Tolerance:
    if tolerance == EXACT:
        return tolerance
    rel_l2 = None if tolerance.rel_l2 is None else 2 * tolerance.rel_l2
    return Tolerance(rel_l2, 2 * tolerance.atol, 2 * tolerance.rtol)


def interpreted(case: Case) -> Case:
    """The case through the target, bf16 at twice its tolerance: the interpreter truncates."""
    call = case.call(1)
    dtypes = {x.dtype for x in call if torch.is_tensor(x)} | set(call)
    case = through_triton(case)
    if torch.bfloat16 not in dtypes:
        return case
    return dataclasses.replace(case, tolerances=tuple(map(doubled, case.tolerances)))


CASES = [interpreted(case) for case in triton_cases()]
