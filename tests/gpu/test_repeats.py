"""Calls that repeat: the third of the same metadata neither validates nor decides."""

import pytest
import torch

from ops_registry import contract as contracts
from tests import checks
from tests.gpu.cases import CASES, first_cases, unvalidated
from tileops import explain
from tileops.attention import GQADenseFwdOp

every_case = pytest.mark.parametrize("case", list(map(unvalidated, CASES)), ids=str)
every_operator = pytest.mark.parametrize("case", list(map(unvalidated, first_cases())), ids=str)


@pytest.fixture
def known():
    """What is remembered by operator, of this test alone."""
    for repeats in contracts.REPEATS.values():
        repeats.found.clear()
    return {name: repeats.found for name, repeats in contracts.REPEATS.items()}


@every_case
@pytest.mark.parametrize("size", [5, 130])
def test_values(case, size, known):
    for seed in range(4):
        call = case.call(size, seed=seed)
        checks.check_against(case, checks.run(case, call), call)


@every_operator
def test_the_second_call_is_remembered(case, known):
    call = case.call(33)
    found = known[case.contract.name]
    for remembered in (False, True, True):
        checks.run(case, call)
        [repeat] = found.values()
        assert bool(repeat) == remembered
    checks.run(case, case.call(34))
    assert len(found) == 2


@every_operator
def test_nothing_is_checked_twice_but_what_differs(case, known, monkeypatch):
    call = case.call(33)
    for _ in range(3):
        checks.run(case, call)
    name = next(n for n in case.contract.tensors if getattr(call, n) is not None)
    with pytest.raises(ValueError, match=case.contract.name):
        case.contract.op(*call._replace(**{name: getattr(call, name).double()}))


def test_tensors_elsewhere_are_refused(known):
    q, k, v = (torch.randn(1, 64, 4, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    op = GQADenseFwdOp()
    for _ in range(3):
        op(q, k, v)
    with pytest.raises(ValueError, match="v must be on the device of q"):
        op(q, k, v.cpu())
    assert "serves" in explain(op, q, k, v)


def test_a_pool_counts_its_versions(known):
    case = next(c for c in first_cases() if c.contract.name == "paged_kv_cache_write")
    call = case.call(9)
    before = call.k_pages._version
    for count in (1, 2, 3):
        case.contract.op(*call)
        assert call.k_pages._version == before + count


def test_memory_of_outputs_is_fresh(known):
    q, k, v = (torch.randn(1, 64, 4, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    op = GQADenseFwdOp()
    kept = [op(q * n, k, v) for n in range(1, 5)]
    assert len({x.data_ptr() for x in kept}) == 4
    for n, x in enumerate(kept, 1):
        torch.testing.assert_close(x, op(moved_up(q * n), k, v), atol=2e-3, rtol=2e-3)


def moved_up(x):
    """x at an address with another alignment, which is another key."""
    room = torch.empty(x.numel() + 8, dtype=x.dtype, device=x.device)
    return room[1 : x.numel() + 1].view(x.shape).copy_(x)
