"""Every operator in an AOTInductor package, run by a Python without tileops and by C++.

One package per case serves both. Each starts from the saved and loaded program, with every data
dimension dynamic, and must answer at sizes on both sides of anything a kernel might branch on.
"""

import os
import resource
import shutil
import subprocess
import sys

import pytest
import torch

import tileops
from ops_registry.contract import CONTRACTS, E4M3
from tests import checks
from tests.cases import all_cases

CPP = checks.ROOT / "export_examples" / "cpp" / "ops"
SIZES = (7, 2, 3, 65, 130)
# Besides the first case of every operator: what reaches other code of a kernel.
ALSO: set[str] = set()


def packaged_cases():
    first, chosen = set(), []
    for case in all_cases():
        if case.contract.name not in first or str(case) in ALSO:
            chosen.append(case)
        first.add(case.contract.name)
    return chosen


CASES = packaged_cases()


def lower(program, path):
    """The package of an exported program, as a user makes it."""
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return path


@pytest.fixture(scope="module", params=CASES, ids=str)
def packaged(request, tmp_path_factory):
    """A case and the path of its package."""
    case = request.param
    folder = tmp_path_factory.mktemp("package")
    program, _ = checks.export(case)
    torch.export.save(program, folder / "program.pt2")
    return case, lower(torch.export.load(folder / "program.pt2"), folder / "package.pt2")


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    """The C++ program, built against the installed torch."""
    if not (shutil.which("cmake") and shutil.which("c++")):
        pytest.skip("needs cmake and a C++ compiler")
    build = tmp_path_factory.mktemp("build")
    torch_at = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    run(["cmake", "-S", str(CPP), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release", torch_at])
    run(["cmake", "--build", str(build)])
    return build / "run_package"


def run(command, **env):
    done = subprocess.run(
        [str(part) for part in command],
        cwd=checks.ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# Tensors as the C++ program reads and writes them: (dtype name, tensor), float8 as bytes.


def item(x):
    return str(x.dtype).split(".")[1], x.view(torch.uint8) if x.dtype == E4M3 else x


def tensor(pair):
    name, stored = pair
    return stored.view(E4M3) if name == "float8_e4m3fn" else stored


def run_in_cpp(runner, package, calls, folder):
    """[(outputs, inputs after the call)] of each list of tensors, from the C++ program."""
    source, target = folder / "calls.pt", folder / "results.pt"
    torch.save([[item(x) for x in call] for call in calls], source)
    run([runner, package, source, target], AOTI_RUNTIME_CHECK_INPUTS="1")
    return [
        (tuple(map(tensor, outputs)), tuple(map(tensor, inputs)))
        for outputs, inputs in torch.load(target)
    ]


def test_every_operator_is_packaged():
    assert {case.contract.name for case in CASES} == set(CONTRACTS)
    assert {str(case) for case in all_cases()} >= ALSO


@pytest.mark.package
def test_in_python_without_tileops(packaged, tmp_path):
    case, package = packaged
    checks.check_in_new_process(
        case, "tests.run_package", package, SIZES, tmp_path, AOTI_RUNTIME_CHECK_INPUTS="1"
    )


@pytest.mark.package
@pytest.mark.cpp
def test_in_cpp(packaged, runner, tmp_path):
    case, package = packaged
    calls = [case.call(size) for size in SIZES]
    results = run_in_cpp(runner, package, map(checks.tensors_of, calls), tmp_path)
    for call, (outputs, inputs) in zip(calls, results, strict=True):
        checks.check_against(case, outputs + checks.mutated_of(case, call, inputs), call)


@pytest.mark.cpp
def test_cpp_program_needs_no_python(runner):
    libraries = run(["ldd", runner])
    assert "libtorch" in libraries and "libpython" not in libraries, libraries


@pytest.mark.cpp
def test_cpp_program_says_what_is_wrong(runner, tmp_path):
    done = subprocess.run([runner], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("usage: run_package")
    command = [runner, tmp_path / "absent.pt2", tmp_path / "calls.pt", tmp_path / "results.pt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "absent.pt2" in done.stderr
