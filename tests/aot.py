"""Ahead-of-time compilation of the Triton kernels, without a GPU: registers, spills, memory.

    python -m tests.aot [--op NAME] [--arch sm_90] [--variant TEXT]

prints one line per kernel that the calls of `tests/meta_calls.py` launch. What a launcher asks
for is recorded on meta tensors; each distinct specialization is compiled as Triton would at the
first launch, and ptxas or the AMD assembler says what it takes.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.tools.tensor_descriptor import TensorDescriptor

import meta_kernels.attention
from tests import meta_calls
from tests.triton_target import kernels
from tileops.kernels.common.launch import Launch
from tileops.kernels.common.machine import Machine
from tileops.kernels.common.recorder import recording


class Chip(NamedTuple):
    """A machine to compile for, and the shared memory of one of its programs, in KiB."""

    machine: Machine
    shared: int

    @property
    def target(self) -> GPUTarget:
        warp = 64 if self.machine.backend == "hip" else 32
        return GPUTarget(self.machine.backend, self.machine.arch, warp)


CHIPS = {
    "sm_80": Chip(Machine("cuda", 80, 108), 163),
    "sm_89": Chip(Machine("cuda", 89, 142), 99),
    "sm_90": Chip(Machine("cuda", 90, 132), 227),
    "sm_100": Chip(Machine("cuda", 100, 148), 227),
    "sm_120": Chip(Machine("cuda", 120, 188), 99),
    "gfx942": Chip(Machine("hip", "gfx942", 304), 64),
}
NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
# The matrix instructions, the newest first.
INSTRUCTIONS = {
    "tcgen05": r"tcgen05\.mma",
    "wgmma": r"wgmma\.mma_async",
    "mma.sync": r"mma\.sync",
    "mfma": r"v_mfma",
}


# ------------------------------------------------------------------------------- recording


@functools.cache
def infers() -> dict[str, Callable[[Any], Any]]:
    """Every `infer_<op>` by dispatcher name."""
    found = {}
    for module in pkgutil.iter_modules(meta_kernels.attention.__path__):
        members = vars(importlib.import_module(f"meta_kernels.attention.{module.name}"))
        found |= {n[6:]: fn for n, fn in members.items() if n.startswith("infer_")}
    return found


def refusal(name: str, call: Any, chip: Chip) -> str | None:
    """Why the Triton kernel declines the call on that machine."""
    with recording(chip.machine):
        return kernels()[name].refusal(call)


def launches(name: str, call: Any, chip: Chip) -> list[Launch]:
    """What the launcher of an operator asks for on that machine."""
    with recording(chip.machine) as found:
        kernels()[name].run(infers()[name](call), call)
    return found


class Specialization(NamedTuple):
    """What decides one compilation; hashable, except that kernels compare by identity."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constexprs: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    warps: int
    stages: int
    registers: int | None


def specialization(launch: Launch) -> Specialization:
    """As Triton specializes at run time: pointers aligned, sizes as their kernel asks for."""
    names = launch.kernel.arg_names
    signature, aligned, constexprs = {}, [], dict(launch.constexprs)
    for parameter, value in zip(launch.kernel.params, launch.args, strict=False):
        name = parameter.name
        free = parameter.do_not_specialize
        if torch.is_tensor(value):
            signature[name] = "*" + NAMES[value.dtype]
            aligned.append(name)
        elif isinstance(value, TensorDescriptor):
            block = ",".join(map(str, value.block_shape))
            signature[name] = f"tensordesc<{NAMES[value.base.dtype]}[{block}]>"
        elif isinstance(value, bool):
            signature[name] = "i1"
        elif isinstance(value, int):
            if value == 1 and not free:
                constexprs[name] = 1
                continue
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not free:
                aligned.append(name)
        else:
            signature[name] = "fp32"
    assert set(signature) | set(constexprs) == set(names), launch.kernel.__name__
    return Specialization(
        launch.kernel,
        tuple(signature.items()),
        tuple(sorted(constexprs.items())),
        tuple(aligned),
        launch.warps,
        launch.stages,
        launch.registers,
    )


def distinct(found: Iterable[Launch]) -> list[Specialization]:
    """Each specialization once, in the order of the launches."""
    keyed = {}
    for launch in found:
        wanted = specialization(launch)
        keyed.setdefault((id(wanted.kernel), str(wanted[1:])), wanted)
    return list(keyed.values())


# ------------------------------------------------------------------------------- compiling


@dataclass(frozen=True)
class Compiled:
    """One kernel on one chip. spills: bytes (NVIDIA: stores and loads), registers for AMD."""

    kernel: str
    arch: str
    warps: int
    stages: int
    shared: int
    registers: int
    spills: int
    instruction: str
    wide_loads: bool
    async_copies: bool

    def __str__(self) -> str:
        return (
            f"{self.kernel:34} {self.arch:7} w{self.warps} s{self.stages} "
            f"{self.shared / 1024:6.1f} KiB {self.registers:4} registers {self.spills:5} spilled "
            f"{self.instruction:9}{' v4' if self.wide_loads else '   '}"
            f"{' async' if self.async_copies else ''}"
        )


def compiled(wanted: Specialization, arch: str) -> Compiled:
    chip = CHIPS[arch]
    names = wanted.kernel.arg_names
    types = dict(wanted.signature)
    source = ASTSource(
        wanted.kernel,
        {name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in wanted.constexprs},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in wanted.aligned},
    )
    options = {"num_warps": wanted.warps, "num_stages": wanted.stages}
    if wanted.registers is not None and chip.machine.backend == "cuda":
        options["maxnreg"] = wanted.registers
    result = triton.compile(source, target=chip.target, options=options)
    nvidia = chip.machine.backend == "cuda"
    text = result.asm["ptx" if nvidia else "amdgcn"]
    registers, spills = ptxas(text, chip.machine.arch) if nvidia else amd(text)
    return Compiled(
        kernel=wanted.kernel.__name__,
        arch=arch,
        warps=wanted.warps,
        stages=wanted.stages,
        shared=result.metadata.shared,
        registers=registers,
        spills=spills,
        instruction=next((n for n, p in INSTRUCTIONS.items() if re.search(p, text)), "-"),
        wide_loads=bool(
            re.search(r"ld\.global\S*\.v4|global_load_dwordx4|buffer_load_dwordx4", text)
        ),
        async_copies=bool(re.search(r"cp\.async|global_load_lds|buffer_load\S* .* lds", text)),
    )


def check_constants(wanted: Specialization, arch: str) -> None:
    """Raise where the kernel cannot take sizes of 1 as constants, as Inductor gives them."""
    target = CHIPS[arch].target
    sizes = {name for name, type in wanted.signature if type in ("i32", "i64")}
    names = wanted.kernel.arg_names
    types = {name: type for name, type in wanted.signature if name not in sizes}
    constants = {**dict(wanted.constexprs), **dict.fromkeys(sizes, 1)}
    source = ASTSource(
        wanted.kernel,
        {name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    backend = make_backend(target)
    options = backend.parse_options({"num_warps": wanted.warps, "num_stages": wanted.stages})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    source.make_ir(target, options, functions, backend.get_module_map(), context)


def ptxas(ptx: str, capability: int) -> tuple[int, int]:
    """Registers per thread, and bytes of spill stores and loads."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        arch = sm_arch_from_capability(capability)
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={arch}", path, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", said))
    return int(re.search(r"Used (\d+) registers", said)[1]), spills


def amd(assembly: str) -> tuple[int, int]:
    """Vector registers, and the registers that were spilled or put into scratch memory."""

    def number(name: str) -> int:
        return int(re.search(rf"\.{name}:\s*(\d+)", assembly)[1])

    spilled = number("vgpr_spill_count") + number("sgpr_spill_count")
    return number("vgpr_count"), max(spilled, number("private_segment_fixed_size"))


# --------------------------------------------------------------------------------- command


def compile_call(name: str, call: Any, arch: str) -> list[Compiled] | str:
    """Every kernel that a call launches, or why it is refused."""
    chip = CHIPS[arch]
    reason = refusal(name, call, chip)
    if reason is not None:
        return reason
    return [compiled(wanted, arch) for wanted in distinct(launches(name, call, chip))]


def _job(job: tuple[str, int, str]) -> list[Compiled] | str:
    name, index, arch = job
    try:
        return compile_call(name, meta_calls.CALLS[name][index][1], arch)
    except Exception as error:  # the other lines are wanted all the same
        return f"{arch:7} {type(error).__name__}: {' '.join(str(error).split())[:400]}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.aot", description=__doc__)
    parser.add_argument("--op", action="append", help="dispatcher names; all by default")
    parser.add_argument("--arch", action="append", choices=CHIPS, help="all by default")
    parser.add_argument("--variant", default="", help="only calls whose variant holds this text")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    chosen = parser.parse_args(arguments)
    jobs = [
        (name, index, arch)
        for name in chosen.op or kernels()
        for index, (variant, _) in enumerate(meta_calls.CALLS[name])
        for arch in chosen.arch or CHIPS
        if chosen.variant in variant
    ]
    with ProcessPoolExecutor(chosen.workers) as pool:
        for (name, index, _), found in zip(jobs, pool.map(_job, jobs), strict=True):
            where = f"{name}-{meta_calls.CALLS[name][index][0]}"
            lines = [found] if isinstance(found, str) else found
            for line in lines:
                print(f"{where:42} {line}", flush=True)


if __name__ == "__main__":
    main()
