"""Shared fixtures: a fresh compile cache per run, seeds, and marks."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def compile_cache(tmp_path_factory):
    """Compiled code of another run must not be served here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
