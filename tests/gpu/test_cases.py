"""Every case of every operator with a Triton kernel, on CUDA tensors, through the operator."""

import pytest
import torch

from ops_registry.accuracy import BACKWARD
from tests import checks
from tests.cases import gqa_dense, gqa_varlen
from tests.gpu.cases import CASES, moved
from tests.triton_target import complaints

every_case = pytest.mark.parametrize("case", CASES, ids=str)
LAYOUTS = ["transposed", "sliced", "expanded"]
GRADIENTS = {"gqa_dense_fwd": gqa_dense, "gqa_varlen_fwd": gqa_varlen}


@every_case
@pytest.mark.parametrize("size", [0, 1, 2, 5, 31, 70, 300])
def test_values(case, size):
    checks.check_values(case, size)


@every_case
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(case, layout):
    call = checks.with_layout(case, case.call(6), layout)
    checks.check_against(case, checks.run(case, call), call)
    checks.check_strides(case, call)


@every_case
@pytest.mark.parametrize("size", [1, 7, 33, 130])
def test_what_is_not_read_is_nan(case, size):
    checks.check_poisoned(case, size)


@every_case
@pytest.mark.parametrize("size, layout", [(5, "contiguous"), (5, "sliced"), (1, ""), (0, "")])
def test_opcheck(case, size, layout):
    checks.check_opcheck(case, checks.with_layout(case, case.call(size), layout))


@every_case
def test_compiled(case):
    with complaints() as found:
        checks.check_compiled(case)
    assert not found, found


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.contract.name in GRADIENTS and "fp8" not in c.variant], ids=str
)
def test_gradients(case, compiled):
    """Autograd through the forward operator, against float64 autograd of the formula."""
    dtype = case.call(2).q.dtype
    tolerances = (BACKWARD[dtype],) * 3 + (gqa_varlen.FLOAT32_SINKS[dtype],)
    reference = GRADIENTS[case.contract.name]
    for size in (5, 17):
        call = case.call(size)
        names = [n for n in case.contract.differentiable if getattr(call, n) is not None]
        leaves = {n: getattr(call, n).clone().requires_grad_() for n in names}
        do = torch.randn_like(call.q)

        def step(call):
            return case.contract.op(*call)[0]

        if compiled:
            step = torch.compile(step, fullgraph=True, dynamic=True)
        with checks.fresh_dynamo():
            step(call._replace(**leaves)).backward(do)
        expected = gradients(reference, moved(call, "cpu"), do.cpu())
        for name, tolerance, e in zip(names, tolerances, expected, strict=False):
            grad = leaves[name].grad.cpu()
            checks.assert_close(grad, e, tolerance, f"{case}: gradient of {name}")


@torch.enable_grad()
def gradients(reference, call, do):
    """Float64 gradients of q, k, v and, where there are any, sinks."""
    if reference is gqa_dense:
        *leaves, o, _ = gqa_dense.softmax_of(call)
    else:
        leaves, sinks, o, _ = gqa_varlen.gradients(call)  # zero where no key is seen
        leaves = leaves if sinks is None else [*leaves, sinks]
    found = torch.autograd.grad(o, leaves, do.to(torch.float64), allow_unused=True)
    return [
        torch.zeros_like(x) if g is None else g.nan_to_num(0.0)
        for x, g in zip(leaves, found, strict=True)
    ]
