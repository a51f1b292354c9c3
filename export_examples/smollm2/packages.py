"""The two steps as AOTInductor packages with dynamic extents, kept in a cache folder.

A step runs one layer program thirty times, then one head program; each package holds these two.
A layer's weights and pools are inputs, the pools are written in place. So the packages hold code
only (a few megabytes; the 540 MB of float32 weights exist once, for both steps), and a step takes
a minute to compile, where thirty layers unrolled into one graph take more than ten.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.package import load_package, package_aoti
from torch.export import Dim
from torch.func import functional_call
from torch.nn import functional as F

from export_examples.smollm2.devices import describe_target
from export_examples.smollm2.engine import PAGE_SIZE, Pools
from export_examples.smollm2.errors import DeviceError
from export_examples.smollm2.model import (
    Block,
    DecodeAttention,
    Llama,
    PrefillAttention,
    last_rows,
)
from export_examples.smollm2.weights import Config
from tileops._fingerprint import source_hash

PHASES = ("prefill", "decode")


class LayerProgram(nn.Module):
    """One layer of a step, its weights being inputs in the order of the block's parameters."""

    def __init__(self, block: Block, attention: PrefillAttention | DecodeAttention) -> None:
        super().__init__()
        self.attention = attention
        self.names = tuple(name for name, _ in block.named_parameters())
        # In a list, so that the block's own weights are no part of the exported program.
        self.template = [block]

    def forward(
        self,
        x: Tensor,
        positions: tuple[Tensor, ...],
        k_pool: Tensor,
        v_pool: Tensor,
        weights: tuple[Tensor, ...],
    ) -> Tensor:
        """Map x [T, dim] to [T, dim]; positions are the arguments of the attention's `bind`."""
        attend = self.attention.bind(*positions)(k_pool, v_pool)
        named = dict(zip(self.names, weights, strict=True))
        return functional_call(self.template[0], named, (x, attend))


class HeadProgram(nn.Module):
    """What follows the layers."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.dim = config.dim
        self.eps = config.norm_eps

    def forward(
        self, x: Tensor, cu_seqlens_q: Tensor | None, norm: Tensor, output: Tensor
    ) -> Tensor:
        """Map x [T, dim] to logits [B, V]; in a prefill, of each request's last row."""
        if cu_seqlens_q is not None:
            x = last_rows(x, cu_seqlens_q)
        return F.linear(F.rms_norm(x, (self.dim,), norm, self.eps), output)


def build_packages(model: Llama) -> dict[str, Path]:
    """Return the package of each phase, exporting and compiling what the cache lacks.

    The cache key covers all sources, the versions, the processor and the kind of GPU, which a
    package is tied to.
    """
    sources = digest_files(Path(__file__).parent, ".py")
    target = describe_target(model.device)
    folder = cache_folder(
        "packages", source_hash(), sources, torch.__version__, target, model.config
    )
    paths = {phase: folder / f"{phase}.pt2" for phase in PHASES}
    if model.device.type == "cuda" and not all(path.exists() for path in paths.values()):
        need_toolkit()
    for phase, path in paths.items():
        if not path.exists():
            print(f"compiling the {phase} step, once (a minute or two) ...", file=sys.stderr)
            build_package(model, phase, path)
    return paths


def need_toolkit() -> None:
    """Refuse to compile packages for a GPU where the headers they include are missing."""
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME is None:
        raise DeviceError(
            "Packages for a GPU are compiled with the CUDA toolkit, which was not found: install "
            "it and name its folder in CUDA_HOME, or use --mode eager or --mode compile."
        )


def build_package(model: Llama, phase: str, path: Path) -> None:
    """Export and compile the programs of one step to `path`."""
    options = {
        "aot_inductor.package": True,
        # The checks of AOTI_RUNTIME_CHECK_INPUTS would ask for extents of two and more.
        "aot_inductor.check_lowerbound": False,
        "aot_inductor.metadata": metadata(model.config),
    }
    files = {}
    with torch.no_grad():
        for name, (module, arguments, shapes) in examples(model, phase).items():
            program = torch.export.export(module, arguments, dynamic_shapes=shapes)
            graph = program.module(check_guards=False)
            files[name] = torch._inductor.aot_compile(graph, arguments, options=dict(options))
    # A reader must never see half a package, so it appears by a rename.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        os.replace(package_aoti(str(Path(folder) / path.name), files), path)


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


def examples(model: Llama, phase: str) -> dict[str, tuple[nn.Module, tuple, tuple]]:
    """Return the programs of a step, arguments to trace them with, and their dynamic extents.

    The example extents are distinct and at least two, or the exporter would tie or fix them.
    """
    config, block, device = model.config, model.blk[0], model.device
    weights = tuple(block.parameters())
    pools = Pools(config, pages=24, layers=1, device=device)
    batch, pages = Dim("batch"), Dim("pages")
    lengths = torch.arange(3, dtype=torch.int32, device=device)
    table = torch.arange(15, dtype=torch.int32, device=device).view(3, 5)
    offsets = torch.tensor([0, 2, 4, 7], dtype=torch.int32, device=device)
    table_shape = {0: batch, 1: Dim("width")}
    attention: PrefillAttention | DecodeAttention
    positions: tuple[Tensor, ...]
    where: tuple[dict, ...]
    if phase == "prefill":
        attention = PrefillAttention(config, PAGE_SIZE)
        rows, row_count = Dim("tokens"), 7
        positions, where = (offsets, lengths, table), ({0: batch + 1}, {0: batch}, table_shape)
        pool_shape = {0: PAGE_SIZE * pages}
        k_pool, v_pool = pools.k_flat[0], pools.v_flat[0]
        ends, ends_shape = offsets, {0: batch + 1}
    else:
        attention = DecodeAttention(config, PAGE_SIZE)
        rows, row_count = batch, 3
        positions, where = (lengths, table), ({0: batch}, table_shape)
        pool_shape = {0: pages}
        k_pool, v_pool = pools.k[0], pools.v[0]
        ends, ends_shape = None, None
    x = torch.randn(row_count, config.dim, device=device)
    fixed = tuple({} for _ in weights)
    return {
        "layer": (
            LayerProgram(block, attention),
            (x, positions, k_pool, v_pool, weights),
            ({0: rows}, where, pool_shape, pool_shape, fixed),
        ),
        "head": (
            HeadProgram(config),
            (x, ends, model.output_norm.weight, model.output_weight),
            ({0: rows}, ends_shape, {}, {}),
        ),
    }


class PackagedStep:
    """One step of a model, run from its package."""

    def __init__(self, model: Llama, path: Path) -> None:
        self.layer, self.head = (
            load_package(str(path), name, device_index=device_index(model.device))
            for name in ("layer", "head")
        )
        self.embedding = model.token_embd.weight
        self.blocks = [tuple(block.parameters()) for block in model.blk]
        self.output = (model.output_norm.weight, model.output_weight)

    def run(
        self,
        tokens: Tensor,
        positions: tuple[Tensor, ...],
        k_pools: list[Tensor],
        v_pools: list[Tensor],
        cu_seqlens_q: Tensor | None = None,
    ) -> Tensor:
        """Map tokens [T] to logits [B, V]."""
        x = F.embedding(tokens, self.embedding)
        for k_pool, v_pool, weights in zip(k_pools, v_pools, self.blocks, strict=True):
            x = self.layer(x, positions, k_pool, v_pool, weights)
        return self.head(x, cu_seqlens_q, *self.output)


def device_index(device: torch.device) -> int:
    """Return the number of a GPU as package loaders take it; -1 stands for none."""
    return -1 if device.index is None else device.index


class PackagedSteps:
    """Both steps of a model from their packages; the arguments are those of `model.py`."""

    def __init__(self, model: Llama) -> None:
        # Packages check their inputs only when asked to, and then say which one is wrong.
        os.environ.setdefault("AOTI_RUNTIME_CHECK_INPUTS", "1")
        paths = build_packages(model)
        self.steps = {phase: PackagedStep(model, path) for phase, path in paths.items()}

    def prefill(
        self,
        tokens: Tensor,
        cu_seqlens_q: Tensor,
        cache_seqlens: Tensor,
        block_table: Tensor,
        k_pools: list[Tensor],
        v_pools: list[Tensor],
    ) -> Tensor:
        positions = (cu_seqlens_q, cache_seqlens, block_table)
        return self.steps["prefill"].run(tokens, positions, k_pools, v_pools, cu_seqlens_q)

    def decode(
        self,
        tokens: Tensor,
        cache_seqlens: Tensor,
        block_table: Tensor,
        k_pools: list[Tensor],
        v_pools: list[Tensor],
    ) -> Tensor:
        return self.steps["decode"].run(tokens, (cache_seqlens, block_table), k_pools, v_pools)


def cache_folder(kind: str, *parts: Any) -> Path:
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
