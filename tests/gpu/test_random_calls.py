"""A few random calls of every operator; `python -m tests.gpu.random_calls` makes thousands."""

import pytest

from tests.gpu import random_calls
from tests.triton_target import kernels


@pytest.mark.parametrize("key", range(3))
@pytest.mark.parametrize("op", kernels())
def test_random_calls(op, key):
    line = random_calls.run(random_calls.Job(op, 1000, key, 8, "cuda"))
    assert not line["failures"] and not line["refused"], random_calls.summary([line])
