"""The variants of the Hopper kernel, compiled without a GPU: no spills, nothing serialised."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

tilelang = pytest.importorskip("tilelang")

from tilelang import tvm  # noqa: E402  needs tilelang

from benchmarks.hopper import kernel  # noqa: E402  the same
from benchmarks.hopper.variants import VARIANTS  # noqa: E402  the same

pytestmark = pytest.mark.aot
NVCC = ("-std=c++17", "-O3", "-cubin", "-arch=sm_90a", "--expt-relaxed-constexpr", "-Xptxas", "-v")


def source(options):
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
    with tvm.transform.PassContext(opt_level=3, config=kernel.PASSES), target:
        lowered = tilelang.lower(
            kernel.make(**options), target=target, enable_device_compile=False
        )
    return lowered.kernel_source


@pytest.mark.parametrize("name", VARIANTS)
def test_what_the_assembler_says(name, tmp_path):
    text = source(VARIANTS[name])
    if not shutil.which("nvcc"):
        pytest.skip("registers and spills need nvcc")
    (tmp_path / "kernel.cu").write_text(text)
    package = Path(tilelang.__file__).parent
    folders = [f"-I{package}/src", f"-I{package}/3rdparty/cutlass/include"]
    said = subprocess.run(
        ["nvcc", *NVCC, *folders, "kernel.cu", "-o", "kernel.cubin"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    print(name, re.findall(r"Used \d+ registers", said))
    assert "0 bytes spill stores, 0 bytes spill loads" in said
    assert "C75" not in said, said
