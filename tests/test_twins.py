"""The batched float64 formulas of the GPU tests say what the float64 oracle says."""

import pytest
import torch

from ops_registry.accuracy import EXACT, Tolerance
from tests import checks, oracle, poison
from tests.cases import all_cases
from tests.gpu import twins

CASES = all_cases()
# Gradients are formed from the stored o and lse, which are rounded; all else is float64.
ROUNDED = {"gqa_dense_bwd", "gqa_varlen_bwd"}


def agree(case, call, clean):
    """The twin on `call` against the oracle on `clean`, a call with the same answer."""
    expected = case.expected(checks.clone(clean))
    actual = twins.twin(checks.clone(call))
    assert len(actual) == len(expected)
    for index, (a, e, t) in enumerate(zip(actual, expected, case.tolerances, strict=True)):
        if e is not None:
            close = (
                t if t == EXACT or case.contract.name in ROUNDED else Tolerance(1e-10, 1e-10, 0)
            )
            checks.assert_close(a, e, close, f"{case} output {index}")


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 2, 5, 31])
def test_twin_is_the_oracle(case, size):
    call = case.call(size)
    agree(case, call, call)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_twin_ignores_what_is_not_read(case):
    clean = case.call(13)
    call = poison.poisoned(clean)
    agree(case, call, call if case.contract.mutated else clean)


@pytest.mark.parametrize("case", [c for c in CASES if c.contract.name == "nsa_topk"], ids=str)
def test_admissible_selections(case):
    call = case.call(31)
    score = twins.nsa_scores(call)
    reference = oracle.nsa_topk_scores(*call[:4], call.scale, call.bs)
    torch.testing.assert_close(score, reference, rtol=0, atol=1e-10)
    good = twins.nsa_topk(call)
    for picked in (good, *spoiled(good, score)):
        assert admitted(twins.check_nsa_topk, picked, score) == admitted(
            oracle.check_nsa_topk, picked, reference
        )
    assert admitted(twins.check_nsa_topk, good, score)


def admitted(check, picked, score):
    try:
        check(picked, score)
    except AssertionError:
        return False
    return True


def spoiled(picked, score):
    """Selections with one flaw each, at the last token."""
    for place, value in ((0, -1), (0, score.shape[-1]), (1, int(picked[-1, 0, 0]))):
        wrong = picked.clone()
        wrong[-1, 0, place] = value
        yield wrong
    wrong = picked.clone()
    wrong[-1, 0] = wrong[-1, 0].flip(0)
    yield wrong
    worst = int(score[-1, 0].argmin())
    wrong = picked.clone()
    wrong[-1, 0, int((picked[-1, 0] >= 0).sum()) - 1] = worst
    yield wrong
