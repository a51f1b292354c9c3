"""The Triton kernels serve CPU tensors here, and memory that nobody wrote holds NaN."""

from pathlib import Path

import pytest

from tests import poison, triton_target

# The interpreter computes lanes that a kernel masks afterwards, and numpy remarks on them.
MASKED_LANES = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(MASKED_LANES)


@pytest.fixture(scope="session", autouse=True)
def target():
    """Calls with target=TARGET run the Triton kernels."""
    with triton_target.registered():
        yield triton_target.TARGET


@pytest.fixture(autouse=True)
def unwritten_is_nan():
    with poison.memory():
        yield
