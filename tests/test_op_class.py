"""What every Op class promises as an object: copies, files, repr, and the types it takes."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch

from ops_registry.contract import CONTRACTS
from tests.cases import all_cases
from tests.checks import bits, clone
from tests.test_signatures import SIGNATURES
from tileops import BUILTIN, attention

every_class = pytest.mark.parametrize("name", SIGNATURES)


def parameters(name):
    positional, keyword_only, _ = SIGNATURES[name]
    return [e if isinstance(e, str) else e[0] for e in (*positional, *keyword_only)]


def first_case(name):
    contract = next(c for c in CONTRACTS.values() if c.op_class == name)
    return next(case for case in all_cases() if case.contract is contract)


def example(name, size=5, **changed):
    """An Op with the options of its first case, and legal tensors for it."""
    case = first_case(name)
    call = case.call(size)
    if name == "GQABwdOp":  # the class is square
        call = call._replace(k=call.k[:, : call.q.shape[1]], v=call.v[:, : call.q.shape[1]])
    options = {n: getattr(call, n) for n in parameters(name)} | changed
    tensors = [e if isinstance(e, str) else e[0] for e in SIGNATURES[name][2]]
    return getattr(attention, name)(**options), [getattr(call, n) for n in tensors]


def answers(op, tensors):
    """Outputs and inputs after a call on copies of the tensors."""
    tensors = [copy.deepcopy(x) for x in tensors]
    out = op(*tensors)
    out = () if out is None else (out,) if torch.is_tensor(out) else out
    return [x for x in (*out, *tensors) if x is not None]


def saved_and_loaded(op):
    file = io.BytesIO()
    torch.save(op, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda op: pickle.loads(pickle.dumps(op)),
    "torch.save": saved_and_loaded,
    "in a module": lambda op: copy.deepcopy(torch.nn.Sequential(op))[0],
}


@every_class
@pytest.mark.parametrize("how", COPIES)
def test_copies_before_and_after_the_first_call(name, how):
    op, tensors = example(name)
    before = COPIES[how](op)
    expected = answers(op, tensors)
    after = COPIES[how](op)
    for other in (before, after):
        assert repr(other) == repr(op) and other is not op
        got = answers(other, tensors)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, expected, strict=True))


@every_class
def test_repr_rebuilds_the_op(name):
    for changed in ({}, {"target": BUILTIN}):
        op, _ = example(name, **changed)
        again = eval(repr(op), {"torch": torch, **vars(attention)})
        assert type(again) is type(op) and repr(again) == repr(op)
        assert again.target == op.target


@every_class
def test_has_no_state(name):
    op, _ = example(name)
    assert op.state_dict() == {} and list(op.parameters()) == [] == list(op.buffers())
    assert op.train().training and not op.eval().training and op.to("cpu") is op


@every_class
def test_one_instance_serves_any_size(name):
    op, _ = example(name)
    for size in (3, 9, 2):
        fresh, tensors = example(name, size)
        for a, b in zip(answers(op, tensors), answers(fresh, tensors), strict=True):
            assert torch.equal(bits(a), bits(b))


@every_class
def test_keyword_tensors(name):
    op, tensors = example(name)
    names = [e if isinstance(e, str) else e[0] for e in SIGNATURES[name][2]]
    by_name = lambda *values: op(**dict(zip(names, values, strict=True)))  # noqa: E731
    for a, b in zip(answers(by_name, tensors), answers(op, tensors), strict=True):
        assert torch.equal(bits(a), bits(b))


@every_class
@pytest.mark.parametrize(
    "value", [[1.0], 3, None, np.zeros(3), "q"], ids=lambda v: type(v).__name__
)
def test_a_non_tensor_is_a_type_error(name, value):
    op, tensors = example(name)
    for index, entry in enumerate(SIGNATURES[name][2]):
        argument = entry if isinstance(entry, str) else entry[0]
        if value is None and not isinstance(entry, str):
            continue
        wrong = [*tensors[:index], value, *tensors[index + 1 :]]
        with pytest.raises(TypeError, match=rf"{argument} must be a torch.Tensor, got"):
            op(*wrong)


@every_class
def test_numbers_are_normalised(name):
    op, tensors = example(name)
    expected = answers(op, tensors)
    kinds = {int: np.int64, float: np.float64}
    changed = {}
    for parameter in parameters(name):
        value = getattr(op, parameter)
        if type(value) in kinds:
            changed[parameter] = kinds[type(value)](value)
    other, _ = example(name, **changed)
    assert repr(other) == repr(op)
    assert all(type(getattr(other, p)) is type(getattr(op, p)) for p in parameters(name))
    got = answers(other, tensors)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, expected, strict=True))


@every_class
def test_bools_and_strings_are_no_numbers(name):
    op, _ = example(name)
    for parameter in parameters(name):
        value = getattr(op, parameter)
        if type(value) is bool:
            wrong = (1, 0, "yes", None, np.int64(1))
        elif type(value) is int:
            wrong = (True, np.bool_(True), torch.tensor(True), "3", 2.0)
        elif type(value) is float:
            wrong = (True, np.bool_(True), torch.tensor(True), "3", b"3", [1.0])
        else:
            continue
        for bad in wrong:
            with pytest.raises(TypeError, match=rf"{op.contract.name}: {parameter} must be"):
                example(name, **{parameter: bad})


@every_class
def test_numbers_that_no_kernel_could_hold_are_refused(name):
    """Integers beyond 64 bits and what is infinite in float32, at construction."""
    op, _ = example(name)
    for parameter in parameters(name):
        kind = type(getattr(op, parameter))
        beyond = {int: (2**63, -(2**63) - 1, 10**400), float: (10**400, -(10**400))}.get(kind, ())
        if parameter in ("scale", "sm_scale", "softcap"):
            beyond = (*beyond, 1e39)
        for number in beyond:
            with pytest.raises(ValueError, match=rf"{op.contract.name}: {parameter} must be"):
                example(name, **{parameter: number})


@every_class
def test_an_unknown_keyword_or_extra_tensor_is_a_type_error(name):
    op, tensors = example(name)
    with pytest.raises(TypeError):
        op(*tensors, None)
    with pytest.raises(TypeError):
        example(name, absent=1)


@every_class
def test_matches_its_dispatcher_operator(name):
    """The class adds nothing to the answer."""
    op, tensors = example(name)
    names = [e if isinstance(e, str) else e[0] for e in SIGNATURES[name][2]]
    options = {p: getattr(op, p) for p in parameters(name)}
    fields = op.contract.Call._fields
    given = {**dict(zip(names, tensors, strict=True)), **options}
    call = clone(op.contract.Call(**{n: v for n, v in given.items() if n in fields}))
    out = op.contract.op(*call)
    out = () if out is None else (out,) if torch.is_tensor(out) else out
    mine = op(*[copy.deepcopy(x) for x in tensors])
    mine = () if mine is None else (mine,) if torch.is_tensor(mine) else mine
    assert len(mine) <= len(out)  # a class may keep the lse to itself
    for a, b in zip(mine, out, strict=False):
        assert torch.equal(bits(a), bits(b))
