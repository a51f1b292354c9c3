"""Every operator in an AOTInductor package, run by a Python without tileops and by C++.

One package per case serves both. Each starts from the saved and loaded program, with every data
dimension dynamic, and must answer at sizes on both sides of anything a kernel might branch on.
"""

import os
import shutil
import subprocess

import pytest
import torch

from ops_registry.contract import CONTRACTS, E4M3
from tests import checks
from tests.cases import all_cases

CPP = checks.ROOT / "export_examples" / "cpp" / "ops"
SIZES = (7, 2, 3, 65, 130, 1, 0)
# Besides the first case of every operator: what reaches other code of a kernel.
ALSO = {
    "fp8_lightning_indexer-e4m3-scaled",
    "gqa_dense_fwd-fp8-rope",
    "gqa_paged_fwd-fp16-e4m3-pool-rope",
    "gqa_varlen_fwd-window-sinks-validated",
    "paged_kv_cache_write-bf16-e4m3",
}


def packaged_cases():
    first, chosen = set(), []
    for case in all_cases():
        if case.contract.name not in first or str(case) in ALSO:
            chosen.append(case)
        first.add(case.contract.name)
    return chosen


CASES = packaged_cases()


def lower(program, path):
    """The package of an exported program.

    Inductor assumes extents of at least 2 and its input check refuses others; the answers hold
    at extents of 1 too, which decoding one request needs, and for empty calls.
    """
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(path),
            inductor_configs={"aot_inductor.check_lowerbound": False},
        )
    return path


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, marks=pytest.mark.xdist_group(str(case))) for case in CASES],
    ids=str,
)
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
    torch_at = f"-DTORCH_PACKAGE={torch.__path__[0]}"
    run(["cmake", "-S", str(CPP), "-B", str(build), torch_at])
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
        "tests.run_package", [(case, package, SIZES)], tmp_path, AOTI_RUNTIME_CHECK_INPUTS="1"
    )


@pytest.mark.package
@pytest.mark.cpp
def test_in_cpp(packaged, runner, tmp_path):
    case, package = packaged
    calls = [case.call(size) for size in SIZES]
    results = run_in_cpp(runner, package, map(checks.tensors_of, calls), tmp_path)
    for call, (outputs, inputs) in zip(calls, results, strict=True):
        checks.check_against(case, outputs + checks.mutated_of(case, call, inputs), call)
    if case.contract.mutated:  # unchecked, it would be written through the compiled strides
        name = case.contract.mutated[0]
        strided = calls[0]._replace(
            **{name: checks.relayout(getattr(calls[0], name), "transposed")}
        )
        with pytest.raises(AssertionError, match="unmatched stride value"):
            run_in_cpp(runner, package, [checks.tensors_of(strided)], tmp_path)


def all_bits(dtype):
    """Every 16-bit pattern once, NaN payloads and signed zeros included."""
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)


@pytest.mark.package
def test_packaged_write_keeps_every_bit_and_copies_no_pool(tmp_path):
    case = next(c for c in all_cases() if str(c) == "paged_kv_cache_write-bf16")
    program, call = checks.export(case)
    package = lower(program, tmp_path / "package.pt2")
    model = torch._inductor.aoti_load_package(str(package))
    _, page_size, heads, dim = call.k_pages.shape
    rows = all_bits(torch.bfloat16).view(-1, heads, dim)
    pages = 1 << 16
    pool = torch.zeros(pages, page_size, heads, dim, dtype=torch.bfloat16)
    pool[-1] = rows[-1]
    slots = torch.randperm((pages - 1) * page_size)[: len(rows)]
    slots[::7] = -1
    expected = pool.flatten(0, 1).clone()
    expected[slots[slots >= 0]] = rows[slots >= 0]
    pools = pool.clone(), pool.clone()
    with torch.profiler.profile(profile_memory=True) as profile:
        model(rows, rows.clone(), *pools, slots)
    for written in pools:
        assert torch.equal(checks.bits(written.flatten(0, 1)), checks.bits(expected))
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest <= 2 * rows.nbytes < pool.nbytes / 32, (largest, rows.nbytes, pool.nbytes)
    model(rows, rows.clone(), pool[:0].clone(), pool[:0].clone(), slots)  # nowhere to write


@pytest.mark.package
def test_packaged_contents_rules_hold_and_nothing_is_written(tmp_path):
    name = "gqa_prefill_paged_fwd-bf16-e4m3-rope-validated"
    case = next(c for c in all_cases() if str(c) == name)
    program, call = checks.export(case)
    package = lower(program, tmp_path / "package.pt2")
    model = torch._inductor.aoti_load_package(str(package))
    good = checks.clone(call)
    out = model(*checks.tensors_of(good))
    checks.check_against(case, checks.outputs_of(case, good, out), call)
    bad = checks.clone(call)._replace(k_scale=-call.k_scale)
    with pytest.raises(RuntimeError, match="gqa_prefill_paged_fwd: k_scale must be"):
        model(*checks.tensors_of(bad))
    for pool in case.contract.mutated:
        assert torch.equal(checks.bits(getattr(bad, pool)), checks.bits(getattr(call, pool)))


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
    assert done.returncode == 1 and "absent.pt2: " in done.stderr
