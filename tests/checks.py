"""The harness that drives every operator's cases: values, layouts, compilers, packages."""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import fresh_cache

from ops_registry import tracing
from ops_registry.accuracy import EXACT, Tolerance
from ops_registry.contract import E4M3, OpContract
from tests import poison
from tests.cases import Case

ROOT = Path(__file__).parent.parent
# Sizes for the compile tests: ten with every dynamic extent >= 2.
TEN_SIZES = (5, 3, 17, 9, 33, 2, 64, 21, 8, 40)


# ------------------------------------------------------------------------------ comparing


def assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    tolerance: Tolerance,
    what: str = "output",
    unit: torch.Tensor | float = 1.0,
) -> None:
    """Both metrics of `ops_registry.accuracy`; a failure names the place and the share.

    unit: the size of values, broadcast, that the absolute bound is for.
    """
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape} != {expected.shape}"
    if tolerance == EXACT:
        assert torch.equal(bits(actual), bits(expected.to(actual.dtype))), f"{what}: bits differ"
        return
    got, ref = actual.to(torch.float64), expected.to(torch.float64)
    same = (got.isinf() & (got == ref)) | (got.isnan() & ref.isnan())
    got, ref = got.masked_fill(same, 0), ref.masked_fill(same, 0)
    bound = tolerance.atol * unit + tolerance.rtol * ref.abs()
    bad = ~((got - ref).abs() <= bound)
    if bad.any():
        place = tuple(bad.nonzero()[0].tolist())
        worst = (got - ref).abs().nan_to_num(torch.inf).max().item()
        raise AssertionError(
            f"{what}: {bad.sum().item()} of {bad.numel()} elements off, first at {place}: "
            f"{got[place].item():.6g}, expected {ref[place].item():.6g}; worst {worst:.3g}"
        )
    norm = ref.norm()
    if tolerance.rel_l2 is not None and norm > 0:
        error = ((got - ref).norm() / norm).item()
        assert error <= tolerance.rel_l2, f"{what}: relative L2 {error:.3g} > {tolerance.rel_l2}"


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bit pattern, so that NaN payloads and signed zeros compare."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(kinds[x.element_size()])


def outputs_of(case: Case, call: Any, result: Any) -> tuple[torch.Tensor, ...]:
    """What `expected` describes: returned tensors, then mutated arguments."""
    returned = () if result is None else (result,) if torch.is_tensor(result) else tuple(result)
    return returned + tuple(getattr(call, name) for name in case.contract.mutated)


def clone(call: Any) -> Any:
    """The call on copies of its tensors, strides kept."""
    return type(call)(*(copy.deepcopy(x) if torch.is_tensor(x) else x for x in call))


def run(case: Case, call: Any, fn: Any = None) -> tuple[torch.Tensor, ...]:
    """Run on a copy of the call and return what `expected` describes."""
    call = clone(call)
    return outputs_of(case, call, (fn or case.contract.op)(*call))


def check_against(case: Case, actual: Sequence[torch.Tensor], call: Any) -> None:
    """Compare with the oracle."""
    expected = case.expected(clone(call))
    assert len(actual) == len(expected) == len(case.tolerances)
    for index, (a, e, t) in enumerate(zip(actual, expected, case.tolerances, strict=True)):
        if e is not None:
            assert_close(a, e, t, f"{case} output {index}")


def check_values(case: Case, size: int, seed: int = 0, fn: Any = None) -> None:
    """Eager (or `fn`) against the oracle, inputs untouched except the declared pools."""
    call = case.call(size, seed)
    check_against(case, run(case, call, fn), call)


def check_poisoned(case: Case, size: int) -> None:
    """The answer of a call stays what it is when all that is not read, and not written, is NaN."""
    clean = case.call(size)
    call = poison.poisoned(clean)
    with poison.memory():
        actual = run(case, call)
    # The oracle of some operators reads more than the operator may; a pool keeps its NaN.
    check_against(case, actual, call if case.contract.mutated else clean)


FOLLOW_AUTOCAST = ("gqa_dense_fwd", "gqa_varlen_fwd")


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def states(case: Case) -> Iterator[contextlib.AbstractContextManager[None]]:
    """What a process may be set to, and an operator must not notice."""
    for dtype in (torch.float64, torch.bfloat16):
        yield default_dtype(dtype)
    if case.contract.name not in FOLLOW_AUTOCAST:
        for dtype in (torch.float16, torch.bfloat16):
            yield torch.autocast("cpu", dtype=dtype)


def check_states(case: Case) -> None:
    """The same bits in every state."""
    call = case.call()
    expected = run(case, call)
    for state in states(case):
        with state:
            actual = run(case, call)
        for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert torch.equal(bits(a), bits(e)), f"{case} output {index}"


# --------------------------------------------------------------------------------- layouts


def relayout(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values with other strides."""
    if layout == "transposed" and x.dim() >= 2:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "sliced":
        wide = x.new_empty(*x.shape[:-1], 2 * x.shape[-1] + 1)
        wide.view(torch.uint8).fill_(0x7F)
        wide[..., 1 : 1 + x.shape[-1]] = x
        return wide[..., 1 : 1 + x.shape[-1]]
    if layout == "expanded":
        return x[:1].expand_as(x) if x.shape[0] else x
    return x


LAYOUTS = ("contiguous", "transposed", "sliced", "expanded")


def with_layout(case: Case, call: Any, layout: str) -> Any:
    """Every read-only tensor in that layout ("expanded": floating tensors of rank >= 3 only)."""
    changed = {}
    for name, spec in case.contract.tensors.items():
        x = getattr(call, name)
        if x is None or spec.mutated:
            continue
        if layout == "expanded" and (x.dim() < 3 or not x.is_floating_point()):
            continue
        if layout == "expanded" and case.expandable is not None and name not in case.expandable:
            continue
        changed[name] = relayout(x, layout)
    return call._replace(**changed)


def check_strides(case: Case, call: Any) -> None:
    """The real kernel returns exactly what the fake promised (opcheck skips CPU strides)."""
    real = run(case, call)
    with torch._subclasses.FakeTensorMode() as mode:
        faked = type(call)(*(mode.from_tensor(x) if torch.is_tensor(x) else x for x in call))
        fake = outputs_of(case, faked, case.contract.op(*faked))
    for index, (a, b) in enumerate(zip(real, fake, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype and a.device == b.device, (case, index)
        assert a.stride() == b.stride(), f"{case} output {index}: {a.stride()} != {b.stride()}"


def check_opcheck(case: Case, call: Any) -> None:
    """`torch.library.opcheck` with the tolerances of the case.

    Its schema test has no float8 arithmetic; `check_untouched` covers those calls.
    """
    atol = max(t.atol for t in case.tolerances)
    rtol = max(t.rtol for t in case.tolerances)
    utils = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if not any(torch.is_tensor(x) and x.dtype == E4M3 for x in call):
        utils.append("test_schema")
    check_untouched(case, call)
    # Its copies fail where several extents are 0, unless the strides are 0 too.
    call = type(call)(
        *(
            x.as_strided(x.shape, (0,) * x.dim()) if torch.is_tensor(x) and not x.numel() else x
            for x in call
        )
    )
    torch.library.opcheck(
        case.contract.op, tuple(clone(call)), test_utils=utils, atol=atol, rtol=rtol
    )


def check_untouched(case: Case, call: Any) -> None:
    """Only declared arguments change, and outputs alias nothing."""
    used = clone(call)
    result = case.contract.op(*used)
    returned = () if result is None else (result,) if torch.is_tensor(result) else tuple(result)
    storages = {x.untyped_storage().data_ptr() for x in used if torch.is_tensor(x)} - {0}
    for output in returned:
        assert output.is_contiguous() and output.untyped_storage().data_ptr() not in storages
    for name, before, after in zip(call._fields, call, used, strict=True):
        if torch.is_tensor(before) and name not in case.contract.mutated:
            assert torch.equal(bits(before), bits(after)), f"{case}: {name} was modified"


# ------------------------------------------------------------------------------- compilers


class CountingBackend:
    """Inductor, counting its compilations."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: Any) -> Any:
        self.count += 1
        return torch._inductor.compile(gm, inputs)


@contextlib.contextmanager
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()


@contextlib.contextmanager
def lowered() -> Iterator[None]:
    """Compile operators decomposed, as an AOTInductor package holds them, past every cache."""
    with pytest.MonkeyPatch.context() as patch, fresh_cache(), fresh_dynamo():
        patch.setattr(tracing, "packaging", lambda: True)
        yield


def check_compiled(case: Case) -> None:
    """Whole graphs, dynamic shapes: right at ten sizes with at most two compilations.

    Without duck shapes, so that extents which happen to be equal in one call, such as a head
    count and a batch, do not tie the next.
    """
    backend = CountingBackend()

    def step(*args):
        return case.contract.op(*args)

    plain_shapes = torch.fx.experimental._config.patch(use_duck_shape=False)
    with fresh_dynamo(), torch.no_grad(), plain_shapes:
        compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
        for size in TEN_SIZES:
            check_values(case, size, fn=compiled)
        assert backend.count <= 2, f"{case}: {backend.count} compilations over ten sizes"
        for extra, size in enumerate((1, 0), start=1):
            check_values(case, size, fn=compiled)
            assert backend.count <= 2 + extra, f"{case}: recompiled more than once at {size}"


class _Stop(Exception):
    pass


class Recorded(NamedTuple):
    """What tracing a call records: shape guards, specializations, and what `read` found."""

    guards: set[str]
    specialized: dict[str, str]
    seen: Any


def recorded(
    fn: Any, call: Any, dynamic: Any, read: Callable[[torch.fx.Graph], Any] = lambda graph: None
) -> Recorded:
    """Trace `fn(*call)` up to the compiler; `read` gets the graph."""
    found: list[Recorded] = []

    def stop(gm: torch.fx.GraphModule, example: Any) -> Any:
        env = torch._guards.TracingContext.get().fake_mode.shape_env
        guards = {str(g.expr) for g in env.guards}
        specialized = {str(a): str(b) for a, b in env.replacements.items()}
        found.append(Recorded(guards, specialized, read(gm.graph)))
        raise _Stop

    call = clone(call)
    for name, axes in dynamic.items():
        for axis in axes:
            torch._dynamo.mark_dynamic(getattr(call, name), axis)
    with fresh_dynamo(), torch.no_grad():
        compiled = torch.compile(
            lambda *args: fn(*args), backend=aot_autograd(fw_compiler=stop), fullgraph=True
        )
        try:
            compiled(*call)
        except Exception:  # what `stop` raised, wrapped
            if not found:
                raise
    return found[0]


def check_guards(case: Case, monkeypatch: Any) -> None:
    """Lowered for a package, the operator records no guard beyond those of `infer_*` alone."""
    call = case.call(7)
    whole = recorded(case.contract.op, call, case.dynamic)
    monkeypatch.setattr(tracing, "packaging", lambda: True)
    decomposed = recorded(case.contract.op, call, case.dynamic)
    extra = decomposed.guards - whole.guards
    assert not extra, f"{case}: extra guards {extra}"
    assert decomposed.specialized == whole.specialized, case


# ---------------------------------------------------------------------- export and packages


class Module(torch.nn.Module):
    """The operator with its options fixed, tensors as inputs (None inputs are dropped)."""

    def __init__(self, contract: OpContract, call: Any) -> None:
        super().__init__()
        self.op = contract.op
        self.names = [n for n in call._fields if torch.is_tensor(getattr(call, n))]
        self.Call = type(call)
        self.rest = {n: getattr(call, n) for n in call._fields if n not in self.names}

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = dict(zip(self.names, tensors, strict=True))
        return self.op(*self.Call(**self.rest, **given))


def tensors_of(call: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x for x in call if torch.is_tensor(x))


def dims_of(case: Case, call: Any) -> tuple[Any, ...]:
    """`dynamic_shapes` for `Module`: every data dimension, ties kept."""
    dims: dict[str, Any] = {}

    def parse(text: str) -> Any:
        letter, _, plus = text.partition("+")
        factor, _, name = letter.rpartition("*")
        dim = dims.setdefault(name, torch.export.Dim(f"dim_{name}", min=0, max=1 << 20))
        if factor:
            dim = int(factor) * dim
        return dim + int(plus) if plus else dim

    shapes = []
    for name in call._fields:
        if torch.is_tensor(getattr(call, name)):
            axes = case.dynamic.get(name, {})
            shapes.append({axis: parse(text) for axis, text in axes.items()} or None)
    return (tuple(shapes),)


def export(case: Case, size: int = 7) -> tuple[torch.export.ExportedProgram, Any]:
    """The exported program with every data dimension dynamic, and the call it was made from."""
    call = case.call(size)
    module = Module(case.contract, call)
    with torch.no_grad():
        program = torch.export.export(
            module, tensors_of(clone(call)), dynamic_shapes=dims_of(case, call)
        )
    return program, call


def check_exports(cases: Sequence[Case], tmp_path: Path) -> None:
    """The operator stays whole; saved, the programs run at other sizes in one new process."""
    jobs = []
    for index, case in enumerate(cases):
        program, _ = export(case)
        targets = [n.target for n in program.graph.nodes if n.op == "call_function"]
        assert case.contract.op in targets, targets
        path = tmp_path / f"program{index}.pt2"
        torch.export.save(program, path)
        jobs.append((case, path, (7, 12, 3)))
    check_in_new_process("tests.run_program", jobs, tmp_path)


def check_in_new_process(
    module: str,
    jobs: Sequence[tuple[Case, Path, tuple[int, ...]]],
    tmp_path: Path,
    **env: str,
) -> None:
    """`python -m module inputs outputs` gives the oracle's answers for every file and size."""
    calls = [[case.call(size) for size in sizes] for case, _, sizes in jobs]
    source, target = tmp_path / "inputs.pt", tmp_path / "outputs.pt"
    inputs = [
        (str(path), [tensors_of(call) for call in own])
        for (_, path, _), own in zip(jobs, calls, strict=True)
    ]
    torch.save(inputs, source)
    done = subprocess.run(
        [sys.executable, "-m", module, str(source), str(target)],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for (case, _, _), own, results in zip(jobs, calls, torch.load(target), strict=True):
        for call, (returned, after) in zip(own, results, strict=True):
            check_against(case, returned + mutated_of(case, call, after), call)


def mutated_of(case: Case, call: Any, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The mutated arguments among a call's tensors."""
    names = [n for n in call._fields if torch.is_tensor(getattr(call, n))]
    given = dict(zip(names, inputs, strict=True))
    return tuple(given[name] for name in case.contract.mutated)
