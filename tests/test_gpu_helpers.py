"""What the tests on CUDA tensors are built from, on CPU tensors."""

import pytest
import torch

from tests import checks
from tests.cases import all_cases
from tests.gpu.cases import on, unvalidated
from tests.gpu.relength import CHANGES, relengthened

CASES = [unvalidated(on(case, "cpu")) for case in all_cases()]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


@every_case
@pytest.mark.parametrize("seed", [1, 2])
def test_other_lengths_are_legal_and_keep_the_shapes(case, seed):
    first = case.call(21)
    call = relengthened(case.call(21, seed), seed)
    for name, x, y in zip(call._fields, first, call, strict=True):
        if torch.is_tensor(x):
            assert (x.shape, x.dtype) == (y.shape, y.dtype), name
    checks.check_against(case, checks.run(case, call), call)


def test_lengths_do_change():
    changed = set()
    for case in CASES:
        first, call = case.call(21), relengthened(case.call(21), 1)
        pairs = zip(checks.tensors_of(first), checks.tensors_of(call), strict=True)
        if not all(torch.equal(checks.bits(x), checks.bits(y)) for x, y in pairs):
            changed.add(case.contract.name)
    assert changed == set(CHANGES)
