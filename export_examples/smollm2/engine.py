"""The generation loop of the modes that run in Python.

`cpp/generate.cpp` is the same loop without Python.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from export_examples.smollm2.pages import PageAllocator
from export_examples.smollm2.weights import Config

PAGE_SIZE = 16
POOL_TOKENS = 32768


@dataclass(frozen=True)
class Request:
    """Token ids to continue.

    With `forced`, those ids are fed instead of the picked ones and no token stops the request:
    the picks then show what the model makes of a given text.
    """

    prompt: list[int]
    max_new_tokens: int
    forced: list[int] = field(default_factory=list)

    @property
    def max_cached(self) -> int:
        """The most tokens its cache can hold; the last pick is never fed."""
        return len(self.prompt) + self.max_new_tokens - 1


class Pick(NamedTuple):
    """The token picked for a request, and whether it is the request's last one."""

    request: int
    token: int
    done: bool


class Step(NamedTuple):
    """What one `prefill` or `decode` step of a batch picked; `ready` precedes them."""

    phase: str
    picks: list[Pick]


class Runner(Protocol):
    """How a mode runs the two steps of `model.py`; the arguments are those of their forward."""

    def prefill(
        self,
        tokens: Tensor,
        cu_seqlens_q: Tensor,
        cache_seqlens: Tensor,
        block_table: Tensor,
        k_pools: list[Tensor],
        v_pools: list[Tensor],
    ) -> Tensor: ...

    def decode(
        self,
        tokens: Tensor,
        cache_seqlens: Tensor,
        block_table: Tensor,
        k_pools: list[Tensor],
        v_pools: list[Tensor],
    ) -> Tensor: ...


class Pools:
    """Keys and values of every layer, in the two shapes the operators take; same memory."""

    def __init__(
        self,
        config: Config,
        pages: int,
        layers: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (pages, PAGE_SIZE, config.heads_kv, config.head_dim)
        layers = config.layers if layers is None else layers
        self.device = device
        self.k, self.v = (
            [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(layers)]
            for _ in range(2)
        )
        self.k_flat = [pool.flatten(0, 1) for pool in self.k]
        self.v_flat = [pool.flatten(0, 1) for pool in self.v]


def check_requests(requests: list[Request], config: Config, pages: int) -> None:
    """Refuse requests that the model or a pool of `pages` pages cannot serve."""
    if not requests:
        raise ValueError("There is no prompt to continue.")
    for index, request in enumerate(requests):
        if not request.prompt:
            raise ValueError(f"Prompt {index + 1} is empty.")
        if request.max_new_tokens < 1:
            raise ValueError("At least one new token must be asked for.")
        if request.max_cached > config.context:
            raise ValueError(
                f"Prompt {index + 1} has {len(request.prompt)} tokens; with "
                f"{request.max_new_tokens} new ones it passes the model's {config.context}."
            )
        if pages_for(request) > pages:
            raise ValueError(
                f"Prompt {index + 1} needs {pages_for(request)} pages of {PAGE_SIZE} tokens, but "
                f"the pool has {pages}."
            )
        if request.forced and len(request.forced) < request.max_new_tokens:
            raise ValueError(f"Prompt {index + 1} has fewer forced tokens than new ones.")


def pages_for(request: Request) -> int:
    """Return the most pages that a request can hold."""
    return -(-request.max_cached // PAGE_SIZE)


def default_pages(requests: list[Request]) -> int:
    """Return enough pages for all requests at once, or for a full house of `POOL_TOKENS`.

    Requests that find no room wait until others end.
    """
    needs = [pages_for(request) for request in requests]
    return max(max(needs, default=1), min(sum(needs), POOL_TOKENS // PAGE_SIZE))


def table_width(requests: list[Request]) -> int:
    """Return one width for every step of a run, so that a compiled step sees a single one.

    At least two: a compiler treats an extent of one as a constant.
    """
    return max(2, *(pages_for(request) for request in requests))


class ActiveRequest:
    """A request on its way: the tokens it has cached and those it feeds next."""

    def __init__(self, index: int, request: Request) -> None:
        self.index = index
        self.request = request
        self.pending = list(request.prompt)
        self.cached = 0
        self.picked = 0

    def accept(self, token: int, stop_ids: Collection[int]) -> Pick:
        """Take the token picked after the pending ones, which the cache holds by now."""
        request = self.request
        self.cached += len(self.pending)
        self.pending = [request.forced[self.picked] if request.forced else token]
        self.picked += 1
        stopped = not request.forced and token in stop_ids
        return Pick(self.index, token, stopped or self.picked == request.max_new_tokens)


def generate(
    runner: Runner,
    config: Config,
    requests: list[Request],
    stop_ids: Collection[int],
    pages: int | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[Step]:
    """Continue all requests greedily, yielding the picks of every step as it is done.

    Waiting requests are let in as soon as the pool has room for the most they may need, and all
    that enter together are prefilled in one call. Between prefills every running request decodes
    one token per step. Runner and pools are on `device`; a step reads from it once, its picks.
    """
    pages = default_pages(requests) if pages is None else pages
    check_requests(requests, config, pages)
    allocator = PageAllocator(pages, PAGE_SIZE)
    pools = Pools(config, pages, device=device)
    width = table_width(requests)
    waiting = deque(ActiveRequest(i, request) for i, request in enumerate(requests))
    running: list[ActiveRequest] = []

    yield Step("ready", [])
    while waiting or running:
        entering: list[ActiveRequest] = []
        while waiting and allocator.open(waiting[0].index, waiting[0].request.max_cached):
            entering.append(waiting.popleft())
        batch = entering or running
        logits = run_step(runner, pools, allocator, batch, width, prefill=bool(entering))
        tokens = logits.argmax(1).tolist()
        picks = [s.accept(token, stop_ids) for s, token in zip(batch, tokens, strict=True)]
        for pick in picks:
            if pick.done:
                allocator.close(pick.request)
        finished = {pick.request for pick in picks if pick.done}
        running = [s for s in (running + entering) if s.index not in finished]
        yield Step("prefill" if entering else "decode", picks)


def run_step(
    runner: Runner,
    pools: Pools,
    allocator: PageAllocator,
    batch: list[ActiveRequest],
    width: int,
    prefill: bool,
) -> Tensor:
    """Feed the pending tokens of a batch and return its logits [B, V]."""
    for sequence in batch:
        allocator.grow(sequence.index, sequence.cached + len(sequence.pending))

    def integers(values: list, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=pools.device)

    tokens = integers([token for s in batch for token in s.pending], torch.int64)
    seqlens = integers([s.cached for s in batch])
    table = integers([allocator.row(s.index, width) for s in batch])
    if not prefill:
        return runner.decode(tokens, seqlens, table, pools.k, pools.v)
    offsets = integers([0, *accumulate(len(s.pending) for s in batch)])
    return runner.prefill(tokens, offsets, seqlens, table, pools.k_flat, pools.v_flat)
