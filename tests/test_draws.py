"""Random calls are legal, repeat from their seed, and have the answer of the operators on CPU."""

import random

import pytest
import torch

from ops_registry.contract import CONTRACTS
from tests import aot, checks
from tests.gpu import draws, random_calls, twins
from tests.tilelang_calls import refusal
from tests.triton_target import kernels
from tileops.kernels.common import tilelang_limits

every_operator = pytest.mark.parametrize("op", kernels())


def small(op, key, index):
    rng = random.Random(f"{op} {key}")
    drawn = draws.draw_key(op, rng)
    return drawn, draws.draw_call(op, drawn, draws.Draw(f"{op} {key} {index}", budget=1 << 13))


def test_every_operator_of_a_gpu_is_drawn_and_has_a_twin():
    assert set(draws.KEYS) == set(draws.CALLS) == set(kernels()) == set(twins.TWINS)


@every_operator
def test_calls_are_legal(op):
    shapes = set()
    for key in range(40):
        drawn, call = small(op, key, 0)
        out = aot.infers()[op](call)
        results = () if out is None else (out,) if torch.is_tensor(out) else tuple(out)
        mutated = CONTRACTS[op].mutated
        assert len(draws.tolerances(op, drawn)) == len(results) + len(mutated)
        shapes.add(str([x.shape for x in call if torch.is_tensor(x)]))
    assert len(shapes) > 20


@pytest.mark.parametrize("op", draws.LONG)
def test_a_third_of_the_calls_is_for_hopper(op, monkeypatch):
    """Its kernel serves them, with every option; and the fixed key of every operator."""
    pytest.importorskip("tilelang")  # which tests/run.sh does without
    monkeypatch.setattr(tilelang_limits, "_missing", lambda: None)
    served = 0
    for key in range(40):
        call = random_calls.draw(random_calls.Job(op, 0, key, 1, "cpu"), 0)
        served += refusal(call) is None
        fixed = draws.draw_call(op, draws.LONG[op], draws.Draw(f"{key}", budget=1 << 20))
        assert refusal(fixed) is None
    assert served >= 12


@every_operator
def test_calls_repeat(op):
    job = random_calls.Job(op, 3, 5, 1, "cpu")
    once, again = (checks.tensors_of(random_calls.draw(job, 7)) for _ in range(2))
    for x, y in zip(once, again, strict=True):
        assert torch.equal(checks.bits(x), checks.bits(y))


@every_operator
def test_operators_on_cpu_answer_random_calls(op):
    for key in range(8):
        job = random_calls.Job(op, 1, key, 1, "cpu")
        drawn = job.drawn
        for index in range(2):
            call = draws.draw_call(op, drawn, draws.Draw(f"{op} {key} {index}", budget=1 << 13))
            random_calls.check(job, call, index)


def test_a_wrong_answer_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(twins, "twin", lambda call: (torch.ones(call.q.shape),))
    line = random_calls.run(random_calls.Job("mla_decode_fwd", 0, 0, 5, "cpu"))
    assert line["failures"] and "output 0" in line["failures"][0]["error"]
    assert "--op mla_decode_fwd --seed 0 --key 0 --call" in random_calls.summary([line])
