"""The mode without Python in the loop: build the C++ program, give it token ids, read picks."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import torch

from export_examples.smollm2.engine import (
    Pick,
    Request,
    Step,
    check_requests,
    default_pages,
)
from export_examples.smollm2.errors import NativeError
from export_examples.smollm2.model import Llama
from export_examples.smollm2.packages import (
    build_packages,
    cache_folder,
    digest_files,
)

SOURCES = Path(__file__).parent.parent / "cpp"
ALIGNMENT = 16  # in values: 64 bytes, what vector loads like


def build_program() -> Path:
    """Return the program, configuring and building it with CMake if the cache lacks it."""
    torch_package = Path(torch.__file__).parent
    folder = cache_folder(
        "program", digest_files(SOURCES, ".cpp", ".txt"), torch.__version__, str(torch_package)
    )
    program = folder / "generate"
    if program.exists():
        return program
    cmake = shutil.which("cmake")
    if cmake is None:
        raise NativeError("--mode cpp builds a C++ program: install cmake and a C++20 compiler.")
    print("building the C++ program, once ...", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder) as build:
        for command in (
            [cmake, "-S", str(SOURCES), "-B", build, f"-DTORCH_PACKAGE={torch_package}"],
            [cmake, "--build", build, "--target", "generate"],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise NativeError(f"Building the C++ program failed:\n{done.stdout}{done.stderr}")
        os.replace(Path(build) / "generate", program)
    return program


def write_weights(model: Llama) -> Path:
    """Return a folder with the weights as the C++ program maps them: weights.bin and .txt.

    A layer's tensors are listed in the order in which its program takes them.
    """
    weights = {name: value.cpu().numpy() for name, value in model.named_parameters()}
    digest = hashlib.sha256()
    for name, value in weights.items():
        digest.update(f"{name} {value.shape}".encode())
        digest.update(value)
    folder = cache_folder("weights", digest.hexdigest())
    index = folder / "weights.txt"
    if index.exists():
        return folder
    print("writing the weights for the C++ program, once ...", file=sys.stderr)
    lines, offset = [], 0
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        values = Path(scratch) / "weights.bin"
        with values.open("wb") as file:
            for name, value in weights.items():
                padding = -offset % ALIGNMENT
                file.write(np.zeros(padding, np.float32))
                file.write(np.ascontiguousarray(value, np.float32))
                offset += padding
                lines.append(" ".join(map(str, (name, offset, value.ndim, *value.shape))))
                offset += value.size
        os.replace(values, folder / values.name)
        listing = Path(scratch) / "weights.txt"
        listing.write_text("\n".join(lines) + "\n")
        os.replace(listing, index)  # last: its presence says that the folder is complete
    return folder


def generate_native(
    model: Llama,
    requests: list[Request],
    stop_ids: Collection[int],
    pages: int | None = None,
) -> Iterator[Step]:
    """Continue all requests in the C++ program, yielding the picks of every step.

    The first step, `ready`, is empty: packages and weights are loaded.
    """
    pages = default_pages(requests) if pages is None else pages
    check_requests(requests, model.config, pages)
    packages = build_packages(model)
    command = [build_program(), packages["prefill"], packages["decode"], write_weights(model)]
    with (
        tempfile.TemporaryFile("w+") as messages,
        subprocess.Popen(
            [*map(str, command), str(pages), str(model.device)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
        ) as process,
    ):
        assert process.stdin and process.stdout
        try:
            process.stdin.write(job_text(requests, stop_ids))
            process.stdin.close()
        except BrokenPipeError:
            pass  # it has stopped already, and says why below
        for line in process.stdout:
            yield parse_step(line)
        if process.wait():
            messages.seek(0)
            raise NativeError(f"The C++ program failed: {messages.read().strip()}")


def job_text(requests: list[Request], stop_ids: Collection[int]) -> str:
    """Return what the program reads from its standard input."""

    def counted(ids: Collection[int]) -> str:
        return " ".join(map(str, (len(ids), *ids)))

    lines = [f"stop {counted(stop_ids)}"]
    for request in requests:
        ids = f"{counted(request.prompt)} {counted(request.forced)}"
        lines.append(f"request {request.max_new_tokens} {ids}")
    return "\n".join(lines) + "\n"


def parse_step(line: str) -> Step:
    """Read one line of the program's standard output."""
    phase, *words = line.split()
    picks = []
    for word in words:
        request, token = word.rstrip("!").split(":")
        picks.append(Pick(int(request), int(token), word.endswith("!")))
    return Step(phase, picks)
