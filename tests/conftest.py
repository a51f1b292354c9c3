"""Shared fixtures: a fresh compile cache per run, seeds, marks, and what a run collects."""

import os
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INTERPRETER_TESTS = Path(__file__).parent / "interpreter"


def pytest_ignore_collect(collection_path):
    """TRITON_INTERPRET=1 changes Triton for a process: it collects tests/interpreter, alone."""
    inside = collection_path.is_relative_to(INTERPRETER_TESTS)
    towards = INTERPRETER_TESTS.is_relative_to(collection_path)
    return True if inside != INTERPRETED and not towards else None


def pytest_report_header():
    other = "without it" if INTERPRETED else "with it"
    return (
        f"TRITON_INTERPRET={int(INTERPRETED)}: tests/interpreter "
        f"{'alone is' if INTERPRETED else 'is not'} collected ({other}, the other tests)"
    )


@pytest.fixture(scope="session", autouse=True)
def compile_cache(tmp_path_factory):
    """Compiled code of another run must not be served here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def compiler(monkeypatch):
    """TileLang and nvcc are there, as far as refusals know."""
    from tileops.kernels.common import tilelang_limits

    monkeypatch.setattr(tilelang_limits, "_missing", lambda: None)
    monkeypatch.setattr(tilelang_limits, "_broken", None)
