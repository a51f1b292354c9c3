"""Every case of every operator through the harness: values, layouts, compile, export, guards."""

import pytest

from ops_registry.contract import CONTRACTS
from tests import checks
from tests.cases import all_cases

CASES = all_cases()
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def test_every_operator_has_cases():
    assert {case.contract.name for case in CASES} == set(CONTRACTS)


@every_case
@pytest.mark.parametrize("size", [0, 1, 2, 5, 31, 70])
def test_values(case, size):
    checks.check_values(case, size)


@every_case
@pytest.mark.parametrize("layout", checks.LAYOUTS)
def test_layouts(case, layout):
    call = checks.with_layout(case, case.call(6), layout)
    checks.check_against(case, checks.run(case, call), call)
    checks.check_strides(case, call)


@every_case
def test_states_of_the_process_change_nothing(case):
    checks.check_states(case)


@every_case
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "expanded"])
def test_opcheck(case, layout):
    checks.check_opcheck(case, checks.with_layout(case, case.call(5), layout))


@every_case
@pytest.mark.parametrize("size", [0, 1])
def test_opcheck_small(case, size):
    checks.check_opcheck(case, case.call(size))


@every_case
def test_compiled(case):
    checks.check_compiled(case)


@pytest.mark.parametrize("name", CONTRACTS)
def test_export(name, tmp_path):
    checks.check_exports([case for case in CASES if case.contract.name == name], tmp_path)


@every_case
def test_guards(case, monkeypatch):
    checks.check_guards(case, monkeypatch)
