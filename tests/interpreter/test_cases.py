"""Every case of every operator with a Triton kernel: values, layouts, stale memory."""

import pytest

from tests import checks
from tests.interpreter.harness import CASES

every_case = pytest.mark.parametrize("case", CASES, ids=str)


@every_case
@pytest.mark.parametrize("size", [0, 1, 2, 5, 31])
def test_values(case, size):
    checks.check_values(case, size)


@every_case
@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
def test_layouts(case, layout):
    call = checks.with_layout(case, case.call(6), layout)
    checks.check_against(case, checks.run(case, call), call)


@every_case
@pytest.mark.parametrize("size", [1, 7])
def test_what_is_not_read_is_nan(case, size):
    checks.check_poisoned(case, size)


@every_case
def test_only_pools_change(case):
    checks.check_untouched(case, case.call(6))
