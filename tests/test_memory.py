"""Extra memory of every operator at real shapes: at most 300 MB above inputs and outputs."""

import subprocess
import sys

import pytest

from ops_registry.contract import CONTRACTS
from tests import headline
from tests.checks import ROOT

LIMIT_MB = 300
# The longest rows, then every operator scaled to 4096.
ROWS = [("gqa_dense_fwd", 8192), ("gqa_dense_bwd", 8192), *((name, 4096) for name in CONTRACTS)]


def extra_memory(mode, name, length):
    command = [sys.executable, "-m", "tests.peak_memory", mode, name, str(length)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    megabytes = float(done.stdout)
    print(f"{name} at {length}, {mode}: {megabytes:.0f} MB")
    return megabytes


def test_every_operator_has_a_headline_call():
    assert set(headline.BUILDERS) == set(CONTRACTS)


@pytest.mark.parametrize("name, length", ROWS)
@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_extra_memory(mode, name, length):
    assert extra_memory(mode, name, length) <= LIMIT_MB


@pytest.mark.package
@pytest.mark.parametrize("name, length", ROWS)
def test_extra_memory_of_a_package(name, length):
    assert extra_memory("package", name, length) <= LIMIT_MB
