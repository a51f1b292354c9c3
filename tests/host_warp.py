"""Device functions of the Hopper kernel, compiled for the host: a warp of them at a time."""

import ctypes
import shutil
import subprocess

import pytest

from tests.checks import ROOT
from tileops.kernels.common.tilelang_rows import SOURCE

# What an instruction means, where a host test gets to it; any other throws.
MEANINGS = {
    'asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));': "x = threadIdx.x;",
    'asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));': "y = std::exp2(x);",
    'asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));': "y = bfloat16s(a, b);",
    'asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));': "y = float16s(a, b);",
}


def compiled(text, folder):
    """A library of C++ that includes warp.h and rows.h, the device functions."""
    if not shutil.which("g++"):
        pytest.skip("device functions on the host need g++")
    rows = SOURCE
    for instruction, meaning in MEANINGS.items():
        assert instruction in rows
        rows = rows.replace(instruction, meaning)
    rows = rows.replace("asm volatile(", "NO_PTX(").replace("asm(", "NO_PTX(")
    (folder / "rows.h").write_text(rows)
    (folder / "device.cpp").write_text(text)
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{ROOT / 'tests'}",
         f"-I{folder}", "device.cpp", "-o", "device.so"],
        cwd=folder,
        check=True,
    )  # fmt: skip
    return ctypes.CDLL(str(folder / "device.so"))
