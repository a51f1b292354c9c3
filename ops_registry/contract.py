"""The contract of one operator, and the one helper that registers it with torch.

A contract is what every compiler sees: the schema string, the letters of its dimensions, its
dtypes, what it mutates and what it differentiates. `define` puts the schema on the dispatcher;
`register` adds the behaviour:

    infer    validates and allocates; it is the fake kernel, and every kernel fills its outputs
    kernels  who can serve the call, best first (see `targets.py`)

The operator is registered on a raw `torch.library.Library` because that is the leanest way into
the dispatcher, and because the choice "whole or decomposed" must be ours: eager and
`torch.compile` run the fastest kernel, `torch.export` keeps the operator whole, and an
AOTInductor lowering decomposes it so that the package runs where Python is not.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import increment_version

from . import tracing
from .accuracy import Row, Tolerance
from .autograd import define_refusal, refuse_gradients
from .errors import KernelUnavailableError
from .repeats import Repeats
from .targets import Kernel, Lowering, builtin_kernel, select

NAMESPACE = "tileops"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
TAGS = (torch.Tag.pt2_compliant_tag,)


def imported_twice(name: str) -> RuntimeError:
    return RuntimeError(
        f"{NAMESPACE}::{name} is defined already: the package was imported twice in this "
        "process, under two paths or by a reload; start a new process"
    )


if hasattr(getattr(torch.ops, NAMESPACE), "refuse_gradient"):
    raise imported_twice("refuse_gradient")
define_refusal(LIBRARY)

HALF = (torch.float16, torch.bfloat16)
E4M3 = torch.float8_e4m3fn
HALF_OR_E4M3 = (*HALF, E4M3)
FLOAT32 = (torch.float32,)
INT32 = (torch.int32,)
INT64 = (torch.int64,)

# Every contract by dispatcher name, in order of definition.
CONTRACTS: dict[str, OpContract] = {}


@dataclass(frozen=True)
class Axis:
    """One axis of a TensorSpec: `letter + offset`, a `fixed` extent, or left open ("-")."""

    text: str
    letter: str | None = None
    offset: int = 0
    fixed: int | None = None

    @staticmethod
    def parse(text: str) -> Axis:
        if text == "-":
            return Axis(text)
        letter, _, plus = text.partition("+")
        return Axis(text, letter, int(plus or 0), int(letter) if letter.isdigit() else None)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a contract.

    shape: dimension letters, one per axis ("B S_q H D"). "B+1" ties an extent to a letter, a
        number fixes it; "-" leaves an axis to `infer` ("P R/2" rules depend on options). None
        leaves the whole shape to `infer`, `note` describes it.
    dtypes: the allowed dtypes, or the name of the argument whose dtype it must have, or None
        where `infer` decides.
    """

    shape: str | None
    dtypes: tuple[torch.dtype, ...] | str | None
    note: str = ""
    optional: bool = False
    mutated: bool = False
    differentiable: bool = False

    @functools.cached_property
    def axes(self) -> tuple[Axis, ...] | None:
        return None if self.shape is None else tuple(map(Axis.parse, self.shape.split()))


@dataclass(frozen=True)
class Condition:
    """A rule about tensor contents, checked only with `validate_inputs=True`.

    ok: bool tensor, True where the rule holds, shaped like the argument it is about so that an
        index into it names the culprit.
    message: the sentence, beginning with the argument's name.
    values: what came, a tensor of ok's shape.
    """

    ok: torch.Tensor
    message: str
    values: torch.Tensor | None = None


Contents: TypeAlias = Callable[[Any], list[Condition]]


@dataclass(frozen=True, eq=False)
class OpContract:
    """What one dispatcher operator is. See the module docstring for the life of it.

    accuracy: what a case of this operator is held to, by kind of case (see `accuracy.py`).
    guard: name of the int tensor that is zeroed where traced contents checks fail, so that a
        failed call writes nothing whatever order a compiler gives assert and write.
    """

    name: str
    op_class: str
    signature: str
    tensors: Mapping[str, TensorSpec]
    returns: Mapping[str, TensorSpec]
    letters: Mapping[str, str]
    summary: str
    options: Mapping[str, str] = field(default_factory=dict)
    accuracy: Mapping[str, Row | Tolerance] = field(default_factory=dict)
    guard: str | None = None

    @property
    def schema(self) -> torch.FunctionSchema:
        return self.op._schema

    @functools.cached_property
    def op(self) -> torch._ops.OpOverload:
        return getattr(getattr(torch.ops, NAMESPACE), self.name).default

    @functools.cached_property
    def functional(self) -> torch._ops.OpOverload:
        """The twin of a mutating op that returns the pools instead of writing them."""
        return getattr(getattr(torch.ops, NAMESPACE), self.name + "_functional").default

    @functools.cached_property
    def mutated(self) -> tuple[str, ...]:
        return tuple(name for name, spec in self.tensors.items() if spec.mutated)

    @functools.cached_property
    def differentiable(self) -> tuple[str, ...]:
        return tuple(name for name, spec in self.tensors.items() if spec.differentiable)

    @functools.cached_property
    def Call(self) -> Any:
        """A namedtuple of the schema's arguments with its defaults: one bound call."""
        arguments = self.schema.arguments
        defaults = []
        for argument in arguments:
            if argument.has_default_value():
                defaults.append(argument.default_value)
            elif defaults:
                raise TypeError(f"{self.name}: {argument.name} needs a default after others")
        return namedtuple(f"{self.name}_call", [a.name for a in arguments], defaults=defaults)


def define(contract: OpContract) -> OpContract:
    """Put the contract's schema on the dispatcher and return the contract."""
    if contract.name in CONTRACTS:
        raise imported_twice(contract.name)
    LIBRARY.define(contract.name + contract.signature, tags=TAGS)
    tensors = [a.name for a in contract.schema.arguments if "Tensor" in str(a.type)]
    leading = [a.name for a in contract.schema.arguments[: len(tensors)]]
    if not tensors == leading == list(contract.tensors):
        raise TypeError(f"{contract.name}: tensors must lead the schema, in the contract's order")
    CONTRACTS[contract.name] = contract
    return contract


def register(
    contract: OpContract,
    infer: Callable[[Any], Any],
    kernels: Iterable[str],
    *,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
    autocast: Callable[[Any, torch.dtype], Any] | None = None,
    contents: Contents | None = None,
    package: str,
) -> OpContract:
    """Give a defined contract its behaviour.

    infer: `(call) -> outputs`, raises ValueError in words.
    kernels: names of the kernel files in `package`, best first.
    backward, setup_context: as for `torch.library.register_autograd`; without them a gradient
        is refused when it is executed.
    autocast: `(call, dtype) -> call` with the inputs cast; only for ops that follow autocast.
    contents: the rules behind `validate_inputs`, for ops that have it.
    """
    qualname = f"{NAMESPACE}::{contract.name}"
    Call = contract.Call
    BUILTIN_KERNELS[contract.name] = tuple(
        builtin_kernel(name, f"{package}.{name}", contract.name) for name in kernels
    )
    candidates = BUILTIN_KERNELS[contract.name]
    repeats = REPEATS[contract.name] = Repeats()
    mutated = tuple(Call._fields.index(name) for name in contract.mutated)

    def run(*args, **kwargs):
        call = Call(*args, **kwargs)
        out = repeated(call)
        for index in mutated:
            if not call[index].is_inference():
                increment_version(call[index])
        return out

    def repeated(call):
        checked = contents if contents is not None and call.validate_inputs else None
        known = None if checked is not None else repeats.key(call)
        if known is None:
            return validated(call, checked)[0]
        key, pointers = known
        repeat = repeats.found.get(key)
        if repeat:
            return repeat(pointers, call)
        if not repeats.wanted(key):
            return validated(call, checked)[0]
        out, repeat = validated(call, checked, remember=True)
        repeats.found[key] = repeat or False
        return out

    def validated(call, checked, remember=False):
        out = infer(call)
        kernel = select(contract, call, candidates)
        with without_autocast():
            if checked is not None:
                check_contents(contract, checked, call)
            try:
                if remember and kernel.remember is not None:
                    return out, kernel.remember(out, call)
                kernel.run(out, call)
            except KernelUnavailableError:  # its refusal says so from now on
                select(contract, call, candidates).run(out, call)
        return out, None

    def fake(*args, **kwargs):
        return infer(Call(*args, **kwargs))

    def trace(mode, op, types, args, kwargs):
        if tracing.exporting():
            if contract.mutated and torch.onnx.is_in_onnx_export():
                with mode:
                    return _through_copies(contract, Call(*args, **kwargs))
            return mode.__torch_dispatch__(op, types, args, kwargs)
        if tracing.foreign(types):
            return NotImplemented
        if contract.mutated:
            tracing.keep_storage_offsets()
        call = Call(*args, **kwargs)
        packaged = tracing.packaging()
        if packaged:
            tracing.keep_loop_inputs()
            tracing.restore_hints(call)
        with mode:
            kernel = select(contract, call, candidates, packaged=packaged)
            if contents is not None and call.validate_inputs:
                call = trace_contents(contract, contents, call)
            if packaged or kernel.lowering is Lowering.INLINE:
                out = infer(call)
                kernel.run(out, call)
                return out
        return mode.__torch_dispatch__(op, types, tuple(call), {})

    LIBRARY.impl(contract.name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(qualname, fake, lib=LIBRARY)
    torch.library.register_torch_dispatch(
        qualname, tracing.FunctionalTensorMode, trace, lib=LIBRARY
    )
    if backward is not None:
        torch.library.register_autograd(
            qualname, backward, setup_context=setup_context, lib=LIBRARY
        )
    else:
        refuse_gradients(contract, LIBRARY)
    if autocast is not None:
        _follow_autocast(contract, autocast)
    if contract.mutated:
        _define_functional_twin(contract, infer, candidates, contents)
    return contract


# By dispatcher name, filled by `register`: in-tree kernels, best first, and remembered calls.
BUILTIN_KERNELS: dict[str, tuple[Kernel, ...]] = {}
REPEATS: dict[str, Repeats] = {}


def check_contents(contract: OpContract, contents: Contents, call: Any) -> None:
    """Raise the first violated contents rule as a ValueError that names the index."""
    first = call[0]
    if first.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{contract.name}: validate_inputs=True reads tensors on the host and cannot run "
            "while a CUDA graph is captured; construct the op with validate_inputs=False"
        )
    for condition in contents(call):
        bad = (~condition.ok).nonzero()
        if bad.shape[0]:
            index = bad[0].tolist()
            shown = str(index[0] if len(index) == 1 else index)
            came = ""
            if condition.values is not None:
                came = f", got {condition.values[tuple(index)].item()}"
            raise ValueError(f"{contract.name}: {condition.message} (index {shown}{came})")


def trace_contents(contract: OpContract, contents: Contents, call: Any) -> Any:
    """The same rules as asserts in the traced program; returns the call left to run.

    The guard tensor is zeroed where a rule fails, so a mutating operator writes nothing even if
    a compiler moves the assert behind the write.
    """
    assert contract.guard is not None
    good = None
    for condition in contents(call):
        ok = condition.ok.all()
        torch.ops.aten._assert_async.msg(ok, f"{contract.name}: {condition.message}")
        good = ok if good is None else torch.logical_and(good, ok)
    guard = getattr(call, contract.guard)
    if good is not None:
        guard = torch.where(good, guard, torch.zeros_like(guard))
    return call._replace(**{contract.guard: guard, "validate_inputs": False})


AUTOCAST = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}
_CPU_KEYS, _CUDA_KEYS = map(torch._C.DispatchKeySet, AUTOCAST.values())
_AUTOCAST_KEYS = _CPU_KEYS | _CUDA_KEYS


def without_autocast() -> Any:
    """Autocast is not for the inside of a kernel, which it would round, or fail in a `cat`."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS)


def _follow_autocast(contract: OpContract, autocast: Callable[[Any, torch.dtype], Any]) -> None:
    """Register autocast kernels that follow the active dtype (`register_autocast` fixes one)."""
    for device, key in AUTOCAST.items():

        def cast(*args, _device=device, **kwargs):
            call = contract.Call(*args, **kwargs)
            with without_autocast():
                return contract.op(*autocast(call, torch.get_autocast_dtype(_device)))

        LIBRARY.impl(contract.name, cast, key.name)


def _through_copies(contract: OpContract, call: Any) -> Any:
    """A mutating call as its functional twin and copies: ONNX translates no mutation."""
    results = contract.functional(*call)
    returned = len(results) - len(contract.mutated)
    for name, pool in zip(contract.mutated, results[returned:], strict=True):
        getattr(call, name).copy_(pool)
    return results[0] if returned == 1 else tuple(results[:returned]) or None


def _define_functional_twin(
    contract: OpContract,
    infer: Callable[[Any], Any],
    candidates: tuple[Kernel, ...],
    contents: Contents | None,
) -> None:
    """`<name>_functional`: the same call on copies of the pools, which it returns."""
    name = contract.name + "_functional"
    arguments, _, returns = contract.signature.partition("->")
    returns = returns.strip().strip("()")
    pools = ", ".join(["Tensor"] * len(contract.mutated))
    for mark in ("(a!)", "(b!)", "(c!)"):
        arguments = arguments.replace(mark, "")
    LIBRARY.define(
        f"{name}{arguments.strip()} -> ({', '.join(filter(None, [returns, pools]))})", tags=TAGS
    )
    single = returns == "Tensor"

    def gather(call, out):
        copies = tuple(getattr(call, pool) for pool in contract.mutated)
        if out is None:
            return copies
        return ((out,) if single else tuple(out)) + copies

    def on_copies(call):
        return call._replace(**{pool: getattr(call, pool).clone() for pool in contract.mutated})

    def run(*args, **kwargs):
        call = contract.Call(*args, **kwargs)
        infer(call)
        call = on_copies(call)
        return gather(call, contract.op(*call))

    def fake(*args, **kwargs):
        call = contract.Call(*args, **kwargs)
        out = infer(call)
        fresh = {p: getattr(call, p).new_empty(getattr(call, p).shape) for p in contract.mutated}
        return gather(call._replace(**fresh), out)

    def trace(mode, op, types, args, kwargs):
        if tracing.exporting():
            return mode.__torch_dispatch__(op, types, args, kwargs)
        if tracing.foreign(types):
            return NotImplemented
        call = contract.Call(*args, **kwargs)
        packaged = tracing.packaging()
        if packaged:
            tracing.keep_loop_inputs()
            tracing.restore_hints(call)
        with mode:
            if contents is not None and call.validate_inputs:
                call = trace_contents(contract, contents, call)
            if packaged:
                call = on_copies(call)
                kernel = select(contract, call, candidates, packaged=True)
                out = infer(call)
                kernel.run(out, call)
                return gather(call, out)
        return mode.__torch_dispatch__(op, types, tuple(call), {})

    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    qualname = f"{NAMESPACE}::{name}"
    torch.library.register_fake(qualname, fake, lib=LIBRARY)
    torch.library.register_torch_dispatch(
        qualname, tracing.FunctionalTensorMode, trace, lib=LIBRARY
    )
    refuse_gradients(contract, LIBRARY, name=name, functional=True)
