"""What TileLang launches compile to, without a GPU: no spills, nothing serialised, small code."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("tilelang")

import tilelang
import triton
from tilelang import tvm
from tilelang.contrib import nvcc

from tests import aot
from tests.tilelang_calls import (
    F32,
    appended,
    dense,
    indexed,
    latent,
    launch_of,
    launches_of,
    meta,
    packed,
    paged,
    pools,
)
from tileops.kernels.common import launch as triton_launch
from tileops.kernels.common import tilelang_limits
from tileops.kernels.common.tilelang_launch import PASSES, TARGET

pytestmark = pytest.mark.aot
OPTIONS = ("-std=c++17", "-O3", "-cubin", "-arch=sm_90a", "--expt-relaxed-constexpr")
DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
CODE = 128 * 1024  # bytes of a cubin: an unrolled loop once made 750 KiB of it
SHARED = 227 * 1024  # bytes of a program
D256 = {"dim": 256}
D64 = {"dim": 64, "heads": 64, "heads_kv": 8}
MANY = {"batch": 8}  # requests, whose tiles keep all multiprocessors busy
FULL = {"is_causal": False}
WINDOW = {"window_size_left": 127}
SINKS = {"sinks": meta(64, dtype=F32)}
CALLS = {
    "dense": dense(**MANY),
    "dense-full-fp16": dense(dtype=torch.float16, **FULL, **MANY),
    "dense-window-cap": dense(window_size_left=300, softcap=50.0, **MANY),
    "dense-right": dense(window_size_right=40, **FULL, **MANY),
    "dense-d64-fp16": dense(dtype=torch.float16, **D64),
    "dense-d64-full": dense(**D64, **FULL),
    "dense-split": dense(rows=128),
    "dense-split-full-fp16": dense(rows=128, dtype=torch.float16, **FULL),
    "dense-split-window-cap": dense(rows=128, window_size_left=700, softcap=50.0),
    "dense-split-d64": dense(rows=144, keys=4000, batch=1, **D64),
    "dense-d64-window-cap": dense(softcap=50.0, **D64, **WINDOW),
    "dense-e4m3": dense(rows=4000, keys=4000, dtype=torch.float8_e4m3fn),
    "dense-e4m3-split": dense(dtype=torch.float8_e4m3fn),
    "packed-e4m3": packed(dtype=torch.float8_e4m3fn, window_size_left=300),
    "packed": packed(),
    "packed-group7": packed(heads=14),
    "packed-d64-window-sinks": packed(**D64, **WINDOW, **SINKS),
    "paged-64": paged(),
    "paged-16": paged(page=16),
    "paged-8-d64": paged(page=8, **D64),
    "paged-256-d64": paged(page=256, **D64),
    "paged-d64-window-sinks": paged(**D64, **WINDOW, **SINKS),
    "paged-d64-all": paged(window_size_left=500, softcap=50.0, **D64, **SINKS),
    "appended": appended(),
    "dense-d256-window-cap": dense(window_size_left=300, softcap=50.0, **D256, **MANY),
    "dense-d256-split": dense(rows=128, **D256),
    "packed-d256-full": packed(**D256, **FULL),
    "paged-16-d256": paged(page=16, **D256),
    "paged-64-d256-sinks": paged(sinks=meta(8, dtype=F32), **D256),
}
SPILLS = {"paged-d64-all": 32}  # bytes of stores, and of loads


def lowered(launch):
    """The source of a launch, and the bytes of shared memory that the host asks for."""
    target = tvm.target.Target(TARGET)
    with tvm.transform.PassContext(opt_level=3, config=PASSES), target:
        made = tilelang.lower(
            launch.make(**launch.constants), target=target, enable_device_compile=False
        )
    [function] = made.device_mod.functions.values()
    return made.kernel_source, int(function.attrs["dyn_shared_memory_buf"])


def assembled(text, folder):
    """What the assembler says, and the bytes of its result."""
    (folder / "kernel.cu").write_text(text)
    package = Path(tilelang.__file__).parent
    folders = [f"-I{package}/src", f"-I{package}/3rdparty/cutlass/include"]
    done = subprocess.run(
        [nvcc.get_nvcc_compiler(), *OPTIONS, "-Xptxas", "-v", *folders, "kernel.cu"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr, (folder / "kernel.cubin").stat().st_size


def assert_fits(name, launch, folder):
    """Into registers, into shared memory, into the instruction cache; the source."""
    if tilelang_limits.compiler_refusal():
        pytest.skip(tilelang_limits.compiler_refusal())
    text, dynamic = lowered(launch)
    said, size = assembled(text, folder)
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", said)]
    [static] = [int(n) for n in re.findall(r"(\d+) bytes smem", said)]
    print(name, re.findall(r"Used \d+ registers", said), f"{spilled} spilled, {size} bytes")
    print(f"{dynamic} + {static} bytes of shared memory")
    assert len(spilled) == 2 and max(spilled) <= SPILLS.get(name, 0)
    assert dynamic + static <= SHARED
    assert "C75" not in said, said
    assert size < CODE
    assert not overwritten(folder / "kernel.cubin")
    return text


@pytest.mark.parametrize("name", CALLS)
def test_what_the_assembler_says(name, tmp_path):
    launch = launch_of(CALLS[name])
    assert launch.constants["split"] == ("split" in name)
    assert_no_fence_of_every_block(assert_fits(name, launch, tmp_path))


LATENT = {
    "latent": latent(),
    "latent-few-heads": latent(heads=64),
    "latent-whole-fp16": latent(batch=66, dtype=torch.float16),
    "indexed-causal": indexed(),
    "indexed-whole-fp16": indexed(rows=300, is_causal=False, dtype=torch.float16),
}


@pytest.mark.parametrize("name", LATENT)
def test_what_the_assembler_says_of_latent_rows(name, tmp_path):
    launch = launch_of(LATENT[name])
    assert launch.constants["whole"] == ("whole" in name)
    assert launch.constants["causal"] == ("causal" in name)
    text = assert_fits(name, launch, tmp_path)
    taken = [int(n) for n in re.findall(r"warpgroup_reg_\w+<(\d+)>", text)]
    # What the threads of a launch get in all: for more a group would wait forever.
    assert len(taken) == 3 and sum(taken) <= 3 * 168


ONES = {"k_scale": meta(1, dtype=F32), "v_scale": meta(1, dtype=F32)}
BY_HEAD = {x: meta(3, 2, dtype=F32) for x in ONES}
ROPE = {"pos_encoding_mode": "rope", "rope_cos": meta(99, 64), "rope_sin": meta(99, 64)}
BYTES = {"dtype": torch.float8_e4m3fn}
COPIED = {
    "dense-e4m3": dense(**BYTES),
    "packed-e4m3": packed(**BYTES),
    "pages-of-20": paged(page=20),
    "rotated-d64": paged(dim=64, **ROPE | {x: meta(99, 32) for x in ("rope_cos", "rope_sin")}),
    "rotated-by-pairs": paged(rope_layout="interleaved", **ROPE),
    "e4m3-rotated": paged(**pools(paged(), **BYTES), **ROPE, **ONES),
    "e4m3-by-head": paged(**pools(paged(), **BYTES), **BY_HEAD),
    "e4m3-d256": paged(**pools(paged(dim=256), **BYTES), **D256, **ONES),
    "appended-pages-of-20": appended(page=20),
    "appended-e4m3": appended(cache_dtype=BYTES["dtype"], **pools(appended(), **BYTES)),
}


@pytest.mark.parametrize("name", COPIED)
def test_pools_are_copied_without_spills(name):
    found = [x for x in launches_of(COPIED[name]) if isinstance(x, triton_launch.Launch)]
    [wanted] = [x for x in aot.distinct(found) if x.kernel.__name__.startswith("widen")]
    made = aot.compiled(wanted, "sm_90")
    print(name, made)
    assert made.spills == 0
    assert made.wide_loads or name == "rotated-by-pairs"


def assert_no_fence_of_every_block(text):
    """A fence of the consumers would wait for their own stores before each product."""
    loops = re.findall(r"^( *)while \(.*?\n(.*?)^\1\}", text, re.M | re.S)
    [(indent, body)] = [found for found in loops if "wgmma_ss" in found[1]]
    assert f"\n{indent}  tl::wait_wgmma" in body
    assert f"\n{indent}  tl::fence_proxy_async" not in body


def instructions(cubin):
    """Operation and operands of each instruction, in the order of the code."""
    found = subprocess.run([DISASSEMBLER, "-c", cubin], capture_output=True, text=True, check=True)
    lines = re.findall(r"^\s*/\*\w+\*/\s+(?:@!?U?P\w+ +)?(.*?) *;", found.stdout, re.M)
    for line in lines:
        operation, _, operands = line.partition(" ")
        yield operation, [x.strip() for x in operands.split(",")]


def overwritten(cubin):
    """Instructions that write a register which a product under way still reads.

    A values product reads its weights from registers until it is done. The assembler takes them
    for free as soon as it is issued. Products are waited for in groups, the oldest first.
    """
    group, under_way, found, products = set(), [], [], 0
    for operation, operands in instructions(cubin):
        target = re.fullmatch(r"R(\d+)", operands[0])
        if operation.startswith("HGMMA"):
            weights = re.fullmatch(r"R(\d+)", operands[1])
            if weights:
                products += 1
                group.update(range(int(weights[1]), int(weights[1]) + 4))
            if operands[-1] == "gsb0":
                under_way.append(group)
                group = set()
        elif operation.startswith("WARPGROUP.DEPBAR"):
            under_way = under_way[max(len(under_way) - int(operands[-1], 16), 0) :]
        elif target and not operation.startswith(("ST", "SYNCS", "BAR", "RED")):
            wide = 4 if ".128" in operation else 2 if re.search(r"64|WIDE|CS2R", operation) else 1
            written = range(int(target[1]), int(target[1]) + wide)
            if group.union(*under_way).intersection(written):
                found.append((operation, operands))
    assert products > 0
    return found


def test_which_writes_a_product_under_way_forbids(monkeypatch):
    values = "HGMMA.64x256x16.F32", ["R24", "R184", "gdesc[UR4].tnspB", "R24", "gsb0"]
    scores = "HGMMA.64x64x16.F32", ["R152", "gdesc[UR8]", "RZ", "!UPT", "gsb0"]
    newest, none = (("WARPGROUP.DEPBAR.LE", ["gsb0", left]) for left in ("0x1", "0x0"))
    write = "MOV", ["R186", "R7"]
    for code, caught in (
        ((write, values), False),
        ((values, write, none), True),
        ((values, none, write), False),
        ((values, scores, write), True),
        ((values, scores, newest, write), False),
        ((scores, values, newest, write), True),
    ):
        monkeypatch.setitem(globals(), "instructions", lambda cubin, code=code: iter(code))
        assert overwritten("") == ([write] if caught else [])
