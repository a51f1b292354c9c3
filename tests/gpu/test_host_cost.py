"""What the host pays for an eager call, beside Triton's own launch of the same kernels."""

import time

import pytest
import torch

from ops_registry import contract as contracts
from tests.gpu.cases import first_cases, unvalidated
from tileops.kernels.common import launch

MOST = 1.3  # times the launches and the memory of the outputs
CASES = [case for case in map(unvalidated, first_cases()) if not case.contract.differentiable]


def microseconds(*calls):
    """Of each call queued back to back: the best of turns that they take."""
    best = [float("inf")] * len(calls)
    for _ in range(9):
        for index, call in enumerate(calls):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(100):
                call()
            best[index] = min(best[index], 1e4 * (time.perf_counter() - begin))
    return best


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.inference_mode()
def test_a_call_costs_little_more_than_its_launches(case, monkeypatch):
    op, call = case.contract.op, case.call(33)
    contracts.REPEATS[case.contract.name].found.clear()
    launches, run = [], launch._run

    def noted(*arguments):
        launches.append(arguments)
        run(*arguments)

    monkeypatch.setattr(launch, "_run", noted)
    result = op(*call)
    monkeypatch.undo()
    outputs = () if result is None else (result,) if torch.is_tensor(result) else result
    for _ in range(2):
        op(*call)
    [repeat] = contracts.REPEATS[case.contract.name].found.values()
    zeros = [shaped[:3] for shaped in repeat.shaped if shaped[3]]

    def stock():
        for x in outputs:
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        for shape, stride, dtype in zeros:  # a launch as well
            torch.empty_strided(shape, stride, dtype=dtype, device="cuda").zero_()
        for kernel, grid, args, constexprs, (warps, stages, registers), _ in launches:
            bound = {} if registers is None else {"maxnreg": registers}
            kernel[grid](*args, **constexprs, num_warps=warps, num_stages=stages, **bound)

    ours, theirs = microseconds(lambda: op(*call), stock)
    assert launches and ours <= MOST * theirs, f"{ours:.1f} us, the launches {theirs:.1f} us"
