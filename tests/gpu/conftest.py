"""Everything here is marked `gpu`, and skipped where there is none."""

import os
import sys
from pathlib import Path

import pytest
import torch

from ops_registry.targets import aside

HERE = Path(__file__).parent
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# Other versions of torch and Triton run here; what they warn about is not ours.
THEIR_WARNINGS = pytest.mark.filterwarnings("default")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)
            item.add_marker(NO_GPU)
            item.add_marker(THEIR_WARNINGS)


@pytest.fixture(autouse=True)
def room():
    """Memory that a test cached is free for the other workers.

    After an illegal access every call of the process fails: one of several workers ends, so that
    the blame stays with the test that did it.
    """
    yield
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            raise
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    torch.cuda.empty_cache()


@pytest.fixture(params=["tilelang", "triton"])
def kernel(request):
    """The kernel that serves on Hopper, and the one behind it, which it hides there."""
    with aside(*({"tilelang"} - {request.param})):
        yield
