"""Compile, check and time the variants of the Hopper kernel on one GPU, a line for each.

    python -m benchmarks.hopper.run [NAME ...]

Variants compile side by side, each in a process of its own; a lock lets one at a time use the
GPU, and for at most `GPU_SECONDS`, so that a variant that hangs costs its line and no other.
Device time is that of the benchmark: graph replays with a cold L2.
"""

import fcntl
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.hopper.variants import VARIANTS
from benchmarks.timing import Clock

JOBS, COMPILE_SECONDS, GPU_SECONDS = 8, 240, 60
LOCK = Path(tempfile.gettempdir()) / "tileops-hopper.lock"
# Batch, S, query heads, KV heads, D.
TIMED = {"A": (4, 2048, 32, 8, 128), "B": (1, 8192, 32, 8, 128), "C": (2, 8192, 64, 8, 64)}
# Batch, S_q, S_kv, KV heads: tiles that end early, rows without keys, few and many tiles.
CHECKED = (
    (1, 1, 1, 1),
    (2, 128, 128, 2),
    (2, 255, 129, 1),
    (1, 333, 517, 2),
    (1, 517, 333, 2),
    (1, 1000, 64, 1),
    (3, 64, 1000, 1),
    (1, 700, 1, 1),
    (1, 1024, 1024, 2),
    (2, 1153, 1537, 1),
)


def reference(q, k, v, causal, rows=1024):
    """o [B, S_q, H, D] and lse [B, H, S_q] in float64, some rows at a time."""
    group, shift = q.shape[2] // k.shape[2], k.shape[1] - q.shape[1]
    k, v = (x.double().repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    key = torch.arange(k.shape[2], device=q.device)
    found = []
    for first, part in zip(range(0, q.shape[1], rows), q.double().split(rows, 1), strict=True):
        scores = part.transpose(1, 2) @ k.transpose(2, 3) * q.shape[-1] ** -0.5
        if causal:
            row = torch.arange(first, first + part.shape[1], device=q.device)
            scores = scores.masked_fill(key > row[:, None] + shift, -torch.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse.isinf(), 0.0)[..., None]).exp()
        found.append(((weights @ v).transpose(1, 2), lse))
    o, lse = zip(*found, strict=True)
    return torch.cat(o, 1), torch.cat(lse, 2)


def relative(found, expected):
    return ((found.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


class Variant:
    """A compiled variant, and how it is called."""

    def __init__(self, name):
        import tilelang

        from benchmarks.hopper import kernel

        self.options = VARIANTS[name]
        self.causal = self.options.get("causal", True)
        self.dtype = getattr(torch, self.options.get("dtype", "bfloat16"))
        target = {"kind": "cuda", "arch": "sm_90a"}
        built = kernel.make(**self.options)
        self.kernel = tilelang.compile(built, target=target, pass_configs=kernel.PASSES)

    def inputs(self, batch, s_q, s_kv, heads_kv):
        heads, dim = heads_kv * self.options["group"], self.options["head_dim"]
        shapes = ((batch, s_q, heads, dim), *[(batch, s_kv, heads_kv, dim)] * 2)
        return [torch.randn(shape, device="cuda").to(self.dtype) for shape in shapes]

    def outputs(self, q):
        o = torch.full_like(q, torch.nan)
        return o, o.new_full((q.shape[0], q.shape[2], q.shape[1]), torch.nan, dtype=torch.float32)

    def call(self, q, k, v, o, lse, programs=132):
        """programs: that share the tiles; one a multiprocessor."""
        batch, s_q, heads, dim = q.shape
        blocks = -(-s_q // (64 * self.options.get("consumers", 2)))
        tiles = blocks * batch * heads
        scale = dim**-0.5 * 1.4426950408889634
        counter = self.counter
        programs = min(programs, tiles)
        self.kernel(q, k, v, o, lse.view(-1, s_q), counter, scale, blocks, tiles, programs)

    def check(self):
        """The shapes that are wrong, and how often a repeated call differed in a bit."""
        self.counter = torch.zeros(1, dtype=torch.int32, device="cuda")
        bound, wrong = (6e-3 if self.dtype == torch.bfloat16 else 1e-3), []
        for shape in CHECKED:
            for programs in (132, 3):
                q, k, v = self.inputs(*shape)
                o, lse = self.outputs(q)
                self.call(q, k, v, o, lse, programs)
                expected, expected_lse = reference(q, k, v, self.causal)
                error = relative(o, expected)
                empty = expected_lse.isinf()
                off = (lse.double() - expected_lse).masked_fill(empty, 0.0).abs().max().item()
                silent = bool((lse[empty] == -torch.inf).all())
                silent = silent and bool((o.transpose(1, 2)[empty] == 0).all())
                if not (error < bound and off < 1e-3 and silent and self.counter.item() == 0):
                    wrong.append(f"{shape} by {programs}: {error:.1e}, lse {off:.1e}")
        q, k, v = self.inputs(2, 1537, 1537, 2)
        first, differ = self.outputs(q), 0
        self.call(q, k, v, *first)
        for _ in range(20):
            again = self.outputs(q)
            self.call(q, k, v, *again)
            differ += not all(map(torch.equal, first, again))
        return wrong, differ

    def time(self, batch, s, heads, heads_kv, dim):
        """TFLOP/s over visible pairs, and the error of the first and the last head."""
        q, k, v = self.inputs(batch, s, s, heads_kv)
        outputs = self.outputs(q)

        def call():
            self.call(q, k, v, *outputs)
            return outputs

        us = statistics.median(Clock(torch.device("cuda")).timed(call).sample(30))
        group, errors = heads // heads_kv, []
        for head in (0, heads - 1):
            at = slice(head, head + 1)
            of_kv = slice(head // group, head // group + 1)
            one = q[-1:, :, at], k[-1:, :, of_kv], v[-1:, :, of_kv]
            errors.append(relative(outputs[0][-1:, :, at], reference(*one, self.causal)[0]))
        pairs = s * (s + 1) / 2 if self.causal else s * s
        return 4e-6 * dim * batch * heads * pairs / us, max(errors)


def work(name):
    """What a process prints about its variant, a JSON object a line."""
    variant = Variant(name)
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        signal.alarm(GPU_SECONDS)
        wrong, differ = variant.check()
        print(json.dumps({"wrong": wrong, "repeats that differ": differ}), flush=True)
        for row, shape in TIMED.items():
            _, _, heads, heads_kv, dim = shape
            like = variant.options["group"], variant.options["head_dim"]
            if like == (heads // heads_kv, dim):
                rate, error = variant.time(*shape)
                print(json.dumps({row: f"{rate:.1f} TFLOP/s, error {error:.1e}"}), flush=True)


def line(name):
    """All that is known of a variant when its process ended."""
    command = [sys.executable, "-m", "benchmarks.hopper.run", "--work", name]
    environment = {**os.environ, "TILELANG_DISABLE_CACHE": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as log:
        try:
            seconds = COMPILE_SECONDS + GPU_SECONDS * len(VARIANTS)  # it may wait for its turn
            ended = subprocess.run(
                command, stdout=log, stderr=log, env=environment, timeout=seconds
            ).returncode
        except subprocess.TimeoutExpired:
            ended = "never"
        log.seek(0)
        printed = log.read().splitlines()
    facts = [x for x in printed if x.startswith("{")]
    if ended != 0:
        facts += [f"ended with {ended}", *(x[:200] for x in printed[-4:] if x not in facts)]
    return f"{name:16} " + " | ".join(facts)


def main(arguments):
    if arguments[:1] == ["--work"]:
        work(arguments[1])
        return
    with ThreadPoolExecutor(JOBS) as pool:
        for found in pool.map(line, arguments or VARIANTS):
            print(found, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
