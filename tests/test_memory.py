"""Extra memory of every operator at real shapes: at most 300 MB above inputs and outputs."""

import subprocess
import sys

import pytest

from ops_registry.contract import CONTRACTS
from tests import headline
from tests.checks import ROOT

LIMIT_MB = 300
LONGEST = {"gqa_dense_fwd": 8192, "gqa_dense_bwd": 8192}
ROWS = [*LONGEST.items(), *((name, 4096) for name in CONTRACTS)]
# `torch.compile` calls operators whole, so one of each kind says it all.
COMPILED = [("gqa_dense_fwd", 8192), ("nsa_varlen_fwd", 4096)]
# A package is the traced reference, whose loops copy where eager calls write in place.
PACKAGED = [(name, LONGEST.get(name, 4096)) for name in CONTRACTS]


def extra_memory(mode, name, length):
    command = [sys.executable, "-m", "tests.peak_memory", mode, name, str(length)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    megabytes = float(done.stdout)
    print(f"{name} at {length}, {mode}: {megabytes:.0f} MB")
    return megabytes


def test_every_operator_has_a_headline_call():
    assert set(headline.BUILDERS) == set(CONTRACTS)


@pytest.mark.package
@pytest.mark.parametrize("name, length", ROWS)
def test_extra_memory(name, length):
    assert extra_memory("eager", name, length) <= LIMIT_MB


@pytest.mark.package
@pytest.mark.parametrize("name, length", COMPILED)
def test_extra_memory_compiled(name, length):
    assert extra_memory("compile", name, length) <= LIMIT_MB


@pytest.mark.package
@pytest.mark.parametrize("name, length", PACKAGED)
def test_extra_memory_of_a_package(name, length):
    assert extra_memory("package", name, length) <= LIMIT_MB
