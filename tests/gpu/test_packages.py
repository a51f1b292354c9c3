"""Every operator in an AOTInductor package for CUDA: in C++, and in Python without tileops."""

import os
import sys

import pytest
import torch

from tests import checks
from tests.gpu.cases import first_cases
from tests.test_packages import lower, run, run_in_cpp, runner  # noqa: F401  a fixture

SIZES = (7, 2, 3, 65, 130, 1)
LIBRARY = "libstdc++.so.6"

pytestmark = pytest.mark.package


class Plain(torch.nn.Module):
    """A matmul and a fused kernel, nothing of this library."""

    def forward(self, x, y):
        return torch.mm(x, y) + x.sin()


@pytest.fixture(scope="module")
def load_plain(tmp_path_factory):
    """Loads a package without operators in a new process, with libraries preloaded or not."""
    folder = tmp_path_factory.mktemp("plain")
    x = torch.randn(64, 64, device="cuda")
    program = torch.export.export(Plain(), (x, x.clone()))
    package = lower(program, folder / "package.pt2")

    def load(preloaded):
        inputs = torch.randn(2, 64, 64, device="cuda").unbind()
        source, target = folder / "inputs.pt", folder / "outputs.pt"
        torch.save([(str(package), [inputs])], source)
        command = [sys.executable, "-m", "tests.run_package", source, target]
        run(command, LD_PRELOAD=preloaded)
        [[((result,), _)]] = torch.load(target)
        torch.testing.assert_close(result, Plain()(*inputs), atol=1e-4, rtol=1e-4)

    return load


@pytest.fixture(scope="module")
def preloaded(load_plain):
    """What a Python that loads packages preloads here: see docs/compile_export.md."""
    try:
        load_plain("")
    except AssertionError:
        return LIBRARY
    return ""


@pytest.fixture(
    scope="module",
    params=[pytest.param(c, marks=pytest.mark.xdist_group(str(c))) for c in first_cases()],
    ids=str,
)
def packaged(request, tmp_path_factory):
    """A case and the path of its package, from the saved and loaded program."""
    case = request.param
    folder = tmp_path_factory.mktemp("package")
    program, _ = checks.export(case)
    torch.export.save(program, folder / "program.pt2")
    return case, lower(torch.export.load(folder / "program.pt2"), folder / "package.pt2")


@pytest.mark.cpp
def test_in_cpp(packaged, runner, tmp_path):  # noqa: F811  the fixture
    case, package = packaged
    calls = [case.call(size) for size in SIZES]
    results = run_in_cpp(runner, package, map(checks.tensors_of, calls), tmp_path)
    for call, (outputs, inputs) in zip(calls, results, strict=True):
        assert all(x.is_cuda for x in outputs)
        checks.check_against(case, outputs + checks.mutated_of(case, call, inputs), call)


def test_in_this_process(packaged, preloaded):
    case, package = packaged
    if preloaded not in os.environ.get("LD_PRELOAD", ""):
        pytest.skip(f"any package crashes this Python: run it with LD_PRELOAD={preloaded}")
    model = torch._inductor.aoti_load_package(str(package))
    for size in SIZES:
        call = case.call(size)
        used = checks.clone(call)
        result = model(*checks.tensors_of(used))
        checks.check_against(case, checks.outputs_of(case, used, result), call)


def test_in_python_without_tileops(packaged, preloaded, tmp_path):
    case, package = packaged
    checks.check_in_new_process(
        "tests.run_package",
        [(case, package, SIZES)],
        tmp_path,
        AOTI_RUNTIME_CHECK_INPUTS="1",
        LD_PRELOAD=preloaded,
    )


@pytest.mark.xdist_group("plain")
def test_the_library_that_the_docs_preload(load_plain):
    load_plain(LIBRARY)
