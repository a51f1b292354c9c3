"""The two steps as AOTInductor packages with dynamic extents, kept in a cache folder.

The packages hold code only. The 540 MB of float32 weights stay outside and are handed to both
loaders as memory they do not own, so that prefill and decode share one copy, on disk and in
memory, and a package is a few megabytes. The pools are inputs that a step writes in place.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim

import export_examples.smollm2
from export_examples.smollm2.engine import PAGE_SIZE, Pools
from export_examples.smollm2.model import DecodeStep, Llama, PrefillStep
from export_examples.smollm2.weights import Config
from tileops._fingerprint import source_hash

PHASES = ("prefill", "decode")
# Steps call the network `model`, so that is how both packages name its weights.
WEIGHT_PREFIX = "model."


def cache_folder(kind: str, *parts: object) -> Path:
    """Return (and create) the user's cache folder for things of one kind made from `parts`."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    folder = Path(root) / "tileops" / "smollm2" / f"{kind}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def digest_files(folder: Path, *suffixes: str) -> str:
    """Return a digest of the files of a folder that end in one of the suffixes."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.iterdir() if path.suffix in suffixes):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def step_weights(model: Llama) -> dict[str, Tensor]:
    """Return the weights under the names that the packages give them."""
    return {WEIGHT_PREFIX + name: value for name, value in model.state_dict().items()}


def build_packages(model: Llama) -> dict[str, Path]:
    """Return the package of each phase, exporting and compiling what the cache lacks.

    The cache key covers all sources, the versions and the processor, which a package is tied to.
    """
    sources = digest_files(Path(export_examples.smollm2.__file__).parent, ".py")
    processor = torch.backends.cpu.get_cpu_capability()
    folder = cache_folder(
        "packages", source_hash(), sources, torch.__version__, processor, model.config
    )
    paths = {phase: folder / f"{phase}.pt2" for phase in PHASES}
    for phase, path in paths.items():
        if not path.exists():
            print(f"compiling the {phase} step, once (minutes) ...", file=sys.stderr)
            build_package(model, phase, path)
    return paths


def build_package(model: Llama, phase: str, path: Path) -> None:
    """Export one step and compile it to `path`."""
    step, arguments, shapes = example(model, phase)
    with torch.no_grad():
        program = torch.export.export(step, arguments, dynamic_shapes=shapes)
        options = {
            "aot_inductor.package_constants_in_so": False,
            # The checks of AOTI_RUNTIME_CHECK_INPUTS would ask for extents of two and more.
            "aot_inductor.check_lowerbound": False,
            "aot_inductor.metadata": metadata(model.config),
        }
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = torch._inductor.aoti_compile_and_package(
                program, package_path=str(Path(folder) / path.name), inductor_configs=options
            )
            os.replace(made, path)


def metadata(config: Config) -> dict[str, str]:
    """Return what a program without Python has to know to make the pools."""
    figures = {
        "layers": config.layers,
        "heads_kv": config.heads_kv,
        "head_dim": config.head_dim,
        "page_size": PAGE_SIZE,
        "context": config.context,
    }
    return {name: str(value) for name, value in figures.items()}


def example(model: Llama, phase: str) -> tuple[nn.Module, tuple, tuple]:
    """Return a step, arguments to trace it with and which of their extents are dynamic.

    The example extents are distinct and at least two, or the exporter would tie or fix them.
    """
    layers = model.config.layers
    batch, width, pages = Dim("batch"), Dim("width"), Dim("pages")
    rows = 3
    lengths = torch.arange(rows, dtype=torch.int32)
    table = torch.arange(rows * 5, dtype=torch.int32).view(rows, 5)
    pools = Pools(model.config, pages=24)
    if phase == "decode":
        arguments = (torch.arange(rows), lengths, table, pools.k, pools.v)
        per_layer = [{0: pages}] * layers
        shapes = ({0: batch}, {0: batch}, {0: batch, 1: width}, per_layer, per_layer)
        return DecodeStep(model, PAGE_SIZE), arguments, shapes
    offsets = torch.tensor([0, 2, 4, 7], dtype=torch.int32)
    arguments = (torch.arange(7), offsets, lengths, table, pools.k_flat, pools.v_flat)
    per_layer = [{0: PAGE_SIZE * pages}] * layers
    shapes = (
        {0: Dim("tokens")},
        {0: batch + 1},
        {0: batch},
        {0: batch, 1: width},
        per_layer,
        per_layer,
    )
    return PrefillStep(model, PAGE_SIZE), arguments, shapes


class PackagedSteps:
    """The steps of a model, run from their packages."""

    def __init__(self, model: Llama) -> None:
        # Packages check their inputs only when asked to, and then say which one is wrong.
        os.environ.setdefault("AOTI_RUNTIME_CHECK_INPUTS", "1")
        loaded = {
            phase: torch._inductor.aoti_load_package(str(path))
            for phase, path in build_packages(model).items()
        }
        weights = step_weights(model)
        for package in loaded.values():
            package.load_constants(weights, check_full_update=True, user_managed=True)
        self.weights = weights  # the loaders keep pointers only
        self.prefill, self.decode = loaded["prefill"], loaded["decode"]
