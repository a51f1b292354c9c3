"""A few small random calls of every operator; `tests/gpu/random_calls.py` makes thousands."""

import pytest
import torch

from tests.gpu import draws, random_calls
from tests.interpreter.harness import doubled
from tests.triton_target import kernels


@pytest.mark.parametrize("key", range(3))
@pytest.mark.parametrize("op", kernels())
def test_random_calls(op, key, target, monkeypatch):
    job = random_calls.Job(op, 11, key, 1, "cpu")
    allowed = draws.tolerances(op, job.drawn)
    if torch.bfloat16 in job.drawn.values():
        allowed = tuple(tolerance and doubled(tolerance) for tolerance in allowed)
    monkeypatch.setattr(draws, "tolerances", lambda op, key: allowed)
    for stale in (False, True):
        draw = draws.Draw(f"{op} {key} {stale}", budget=1 << 11)
        call = draws.draw_call(op, job.drawn, draw)._replace(target=target)
        random_calls.check(job, call, stale)
