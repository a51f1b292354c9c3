"""Device functions of the Hopper kernel, compiled for the host: a warp of them at a time."""

import ctypes
import re
import shutil
import subprocess

import numpy as np
import pytest

from tests.checks import ROOT
from tileops.kernels.common import tilelang_latent_rows, tilelang_rows

# What an instruction means, where a host test gets to it; any other throws.
MEANINGS = {
    'asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));': "x = threadIdx.x;",
    'asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));': "y = std::exp2(x);",
    'asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));': "y = bfloat16s(a, b);",
    'asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));': "y = float16s(a, b);",
}
LATENT_MEANINGS = MEANINGS | {
    'asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to + c * 8192), '
    '"l"(source + c * 128), "r"(is_live ? 16 : 0) : "memory");': (
        "copy_16_bytes(to + c * 8192, source + c * 128, is_live ? 16 : 0);"
    ),
}


def compiled(text, folder, latent=False):
    """A library of C++ that includes warp.h and rows.h, the device functions.

    latent: with those of latent rows.
    """
    if not shutil.which("g++"):
        pytest.skip("device functions on the host need g++")
    rows = (tilelang_latent_rows if latent else tilelang_rows).SOURCE
    for instruction, meaning in (LATENT_MEANINGS if latent else MEANINGS).items():
        pattern = r"\s+".join(map(re.escape, instruction.split()))
        rows, count = re.subn(pattern, lambda _, meaning=meaning: meaning, rows)
        assert count, instruction
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


def fragment(tile):
    """What the lanes of a warp hold of its 16 rows of a tile: [32, N / 2] numbers of [16, N]."""
    columns = tile.shape[1]
    held = tile.reshape(2, 8, columns // 8, 4, 2).transpose(1, 3, 2, 0, 4)
    return np.ascontiguousarray(held.reshape(32, columns // 2))


def pointer(x):
    return x.ctypes.data_as(ctypes.c_void_p)
