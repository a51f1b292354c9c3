"""The Triton kernels serve CPU tensors here, and memory that nobody wrote holds NaN."""

import pytest

from tests import poison, triton_target


@pytest.fixture(scope="session", autouse=True)
def target():
    """Calls with target=TARGET run the Triton kernels."""
    with triton_target.registered():
        yield triton_target.TARGET


@pytest.fixture(autouse=True)
def unwritten_is_nan():
    with poison.memory():
        yield
