"""The four ways to run the same generation; each yields one `Step` per step of the batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from export_examples.smollm2.engine import PAGE_SIZE, Request, Runner, Step, generate
from export_examples.smollm2.model import DecodeStep, Llama, PrefillStep

MODES = ("eager", "compile", "aoti", "cpp")


class EagerSteps:
    """The steps as written."""

    def __init__(self, model: Llama) -> None:
        self.prefill = PrefillStep(model, PAGE_SIZE)
        self.decode = DecodeStep(model, PAGE_SIZE)


class CompiledSteps:
    """The steps through torch.compile, each one graph with symbolic extents.

    A batch of one request is an extent that torch.compile always fixes: a graph of its own.
    """

    def __init__(self, model: Llama) -> None:
        eager = EagerSteps(model)
        self.prefill = torch.compile(eager.prefill, fullgraph=True, dynamic=True)
        self.decode = torch.compile(eager.decode, fullgraph=True, dynamic=True)


def run_mode(
    mode: str,
    model: Llama,
    requests: list[Request],
    stop_ids: Collection[int],
    pages: int | None = None,
) -> Iterator[Step]:
    """Continue all requests greedily in one of `MODES`, over a pool of `pages` pages.

    The first step, `ready`, is empty: what comes after it is generation, not setting up. The
    generation runs where the model is.
    """
    # Activations are float32 throughout; some environments let GPUs round them to TF32.
    torch.set_float32_matmul_precision("highest")
    if mode == "cpp":
        from export_examples.smollm2.native import generate_native

        return generate_native(model, requests, stop_ids, pages)
    runner: Runner
    if mode == "aoti":
        from export_examples.smollm2.packages import PackagedSteps

        runner = PackagedSteps(model)
    elif mode in MODES:
        runner = (CompiledSteps if mode == "compile" else EagerSteps)(model)
    else:
        raise ValueError(f"The mode must be one of {', '.join(MODES)}, got {mode!r}.")
    return generate(runner, model.config, requests, stop_ids, pages, model.device)
