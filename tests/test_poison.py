"""No answer depends on memory that the contract says is not read: it holds NaN here."""

import pytest

from tests import checks
from tests.cases import all_cases


@pytest.mark.parametrize("case", all_cases(), ids=str)
@pytest.mark.parametrize("size", [0, 1, 7, 33])
def test_what_is_not_read_is_nan(case, size):
    checks.check_poisoned(case, size)
