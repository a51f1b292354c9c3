"""No kernel reads or writes past an allocation, as `compute-sanitizer` sees it."""

import shutil
import subprocess
import sys

import pytest

from tests.checks import ROOT
from tests.gpu import draws
from tests.gpu.cases import CASES
from tests.triton_target import kernels

FAILED = 9


@pytest.fixture(scope="module")
def sanitizer():
    tool = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if tool is None:
        pytest.skip("compute-sanitizer is not installed")
    return tool


@pytest.mark.parametrize("name", kernels())
def test_memory(sanitizer, name):
    checked = [sanitizer, "--tool", "memcheck", "--error-exitcode", str(FAILED)]
    done = subprocess.run(
        [*checked, "--print-limit", "5", sys.executable, "-m", "tests.gpu.run_cases", name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=580,
    )
    said = done.stdout + done.stderr
    if "Device not supported" in said or "not supported on" in said:
        pytest.skip(next(line for line in said.splitlines() if "supported" in line))
    assert done.returncode == 0, said[-6000:]
    own = [str(case) for case in CASES if case.contract.name == name]
    own += [f"{name} long"] if name in draws.LONG else []
    assert set(own) <= set(said.splitlines())
