"""Our eager CPU kernels beside torch's scaled_dot_product_attention.

    python -m benchmarks.cpu            the table
    python -m benchmarks.cpu --check    and an exit status of 1 if a row misses its floor

The calls of a group take turns, so that a busy machine slows all of them; a row is the median
of its turns. The error is that of the first KV head's group against the formula in float64.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tileops.attention import GQADenseFwdOp, GQAPagedFwdOp, GQAVarlenFwdOp

HEADS, HEADS_KV, DIM = 32, 8, 128
GROUP = HEADS // HEADS_KV
PREFILL = 1024
REQUESTS, CACHED, PAGE = 4, 4096, 16
WINDOW, SOFTCAP = 255, 50.0
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Row:
    """One call: at least `floor` times as fast as the call named `against`."""

    name: str
    call: Callable[[], Tensor]
    error: float
    against: str = "SDPA"
    floor: float = 0.0


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention in float64: q [S_q, g, D] over one KV head's k and v [S_kv, D]."""
    q, k, v = (x.double() for x in (q, k, v))
    scores = torch.einsum("igd,jd->gij", q, k) * DIM**-0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(len(q))[:, None] + len(k) - len(q)
    key = torch.arange(len(k))
    hidden = key > position
    if window >= 0:
        hidden |= key < position - window
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat((scores, column), -1)
    return torch.einsum("gij,jd->igd", torch.softmax(scores, -1)[..., : len(k)], v)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def prefill_rows(dtype: torch.dtype, floor: float) -> list[Row]:
    """1 x 1024 tokens, causal. Every option is measured against SDPA's call without it."""
    q = torch.randn(1, PREFILL, HEADS, DIM).to(dtype)
    k, v = (torch.randn(1, PREFILL, HEADS_KV, DIM).to(dtype) for _ in "kv")
    sinks = torch.randn(HEADS)
    ends = torch.tensor([0, PREFILL], dtype=torch.int32)
    q_by_head, k_by_head, v_by_head = (x.transpose(1, 2) for x in (q, k, v))
    plain, window, capped = (
        GQADenseFwdOp(),
        GQADenseFwdOp(window_size_left=WINDOW),
        GQADenseFwdOp(softcap=SOFTCAP),
    )
    packed = GQAVarlenFwdOp()
    one = (q[0, :, :GROUP], k[0, :, 0], v[0, :, 0])

    def error(o: Tensor, **options: Any) -> float:
        return relative(o.view(PREFILL, HEADS, DIM)[:, :GROUP], formula(*one, **options))

    def sdpa() -> Tensor:
        o = scaled_dot_product_attention(
            q_by_head, k_by_head, v_by_head, is_causal=True, enable_gqa=True
        )
        return o.transpose(1, 2).reshape(q.shape)

    def sunk() -> Tensor:
        return packed(q[0], k[0], v[0], ends, ends, sinks=sinks)

    def ours(op: GQADenseFwdOp) -> Callable[[], Tensor]:
        return lambda: op(q, k, v)

    return [
        Row("SDPA", sdpa, error(sdpa())),
        Row("prefill", ours(plain), error(plain(q, k, v)), floor=floor),
        Row(
            f"prefill, window {WINDOW}",
            ours(window),
            error(window(q, k, v), window=WINDOW),
            floor=1 / 1.1,
        ),
        Row("prefill, sinks", sunk, error(sunk(), sinks=sinks[:GROUP]), floor=1 / 1.1),
        Row(
            f"prefill, softcap {SOFTCAP:g}",
            ours(capped),
            error(capped(q, k, v), softcap=SOFTCAP),
            floor=1 / 1.5,
        ),
    ]


def decode_rows(dtype: torch.dtype, floor: float) -> list[Row]:
    """4 requests of one token over 4096 keys, dense and in pages of 16 in random order."""
    q = torch.randn(REQUESTS, 1, HEADS, DIM).to(dtype)
    k, v = (torch.randn(REQUESTS, CACHED, HEADS_KV, DIM).to(dtype) for _ in "kv")
    q_by_head, k_by_head, v_by_head = (x.transpose(1, 2) for x in (q, k, v))
    table = torch.randperm(REQUESTS * CACHED // PAGE).view(REQUESTS, -1)
    pools = []
    for x in (k, v):
        pages = x.view(-1, PAGE, HEADS_KV, DIM)
        pool = torch.empty_like(pages)
        pool[table.flatten()] = pages
        pools.append(pool)
    table = table.to(torch.int32)
    lengths = torch.full((REQUESTS,), CACHED, dtype=torch.int32)
    ends = torch.arange(REQUESTS + 1, dtype=torch.int32)
    dense, paged = GQADenseFwdOp(), GQAPagedFwdOp()
    one = [formula(q[b, :, :GROUP], k[b, :, 0], v[b, :, 0]) for b in range(REQUESTS)]
    want = torch.cat(one)

    def error(o: Tensor) -> float:
        return relative(o.view(REQUESTS, HEADS, DIM)[:, :GROUP], want)

    def sdpa() -> Tensor:
        return scaled_dot_product_attention(q_by_head, k_by_head, v_by_head, enable_gqa=True)

    def ours() -> Tensor:
        return dense(q, k, v)

    def ours_paged() -> Tensor:
        return paged(q[:, 0], *pools, table, lengths, ends)

    return [
        Row("SDPA", sdpa, error(sdpa())),
        Row("decode", ours, error(ours()), floor=floor),
        Row("paged decode", ours_paged, error(ours_paged()), "decode", 1 / 1.3),
    ]


def medians(rows: list[Row], turns: int, seconds: float) -> dict[str, float]:
    """Seconds per call. Three turns at least, then until `turns` or `seconds` are used up."""
    found: dict[str, list[float]] = {row.name: [] for row in rows}
    began = time.perf_counter()
    for turn in range(turns):
        for row in rows:
            start = time.perf_counter()
            row.call()
            found[row.name].append(time.perf_counter() - start)
        if turn >= 2 and time.perf_counter() - began > seconds:
            break
    return {name: statistics.median(taken) for name, taken in found.items()}


def machine() -> str:
    model = platform.processor() or platform.machine()
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        names = [x for x in listing.read_text().splitlines() if x.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    return (
        f"{model}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads, "
        f"load {os.getloadavg()[0]:.1f}; torch {torch.__version__}, "
        f"Python {platform.python_version()}"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu")
    parser.add_argument("--check", action="store_true", help="fail if a row misses its floor")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=15, help="calls per row, at most")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(machine())
    if os.getloadavg()[0] > options.threads:
        # A thread that spins at the end of a parallel loop keeps the last one from its core.
        # Ours are many short loops and SDPA is one, so that a busy machine costs us far more.
        print("other programs are running; OMP_WAIT_POLICY=PASSIVE makes the ratios comparable")
    print(f"{HEADS}/{HEADS_KV} heads of {DIM}; prefill 1 x {PREFILL} causal; ", end="")
    print(f"decode {REQUESTS} x {CACHED}, pages of {PAGE}")
    print(f"\n{'row':28}{'us':>10}{'SDPA us':>10}{'ratio':>8}{'floor':>7}  {'error':8}")
    missed = []
    with torch.no_grad():
        for name, dtype in DTYPES.items():
            for rows in (
                prefill_rows(dtype, floor=1.1 if name == "bf16" else 1.0),
                decode_rows(dtype, floor=3.0 if name == "bf16" else 1.0),
            ):
                taken = medians(rows, options.turns, seconds=30.0)
                for row in rows[1:]:
                    ratio = taken[row.against] / taken[row.name]
                    label = f"{name} {row.name}"
                    print(
                        f"{label:28}{1e6 * taken[row.name]:10.0f}{1e6 * taken['SDPA']:10.0f}"
                        f"{ratio:8.2f}{row.floor:7.2f}  {row.error:8.1e}"
                        + ("" if row.against == "SDPA" else f"  against {row.against}")
                        + ("" if ratio >= row.floor else "  MISSED"),
                        flush=True,
                    )
                    if ratio < row.floor:
                        missed.append(label)
    if missed:
        print("\nbelow the floor: " + ", ".join(missed))
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
