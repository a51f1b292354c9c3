"""Who serves a call: targets, their kernels, and the report of every refusal.

A target is a named set of kernels. BUILTIN is the in-tree set; others join by an entry point in
the group `tileops.targets` or by `register_target`. `target=None` lets the device decide: the
external target whose detector claims the device first, then BUILTIN. A named target serves the
call or raises; it never falls back to another.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from .errors import NoKernelError, UnknownTargetError

if TYPE_CHECKING:
    from .contract import OpContract
    from .repeats import Repeat

Target: TypeAlias = str | None
BUILTIN = "builtin"
ENTRY_POINTS = "tileops.targets"


class Lowering(enum.Enum):
    """How a kernel meets a compiler.

    INLINE: decomposed wherever a compiler lowers the program (Triton).
    PACKAGE: decomposed into AOTInductor packages only; `torch.compile` calls the operator whole.
    OPAQUE: always called whole; cannot ride in a package.
    """

    INLINE = "inline"
    PACKAGE = "package"
    OPAQUE = "opaque"


@dataclass(frozen=True)
class Kernel:
    """One kernel of one operator.

    run: `(out, call) -> None`, fills the outputs that `infer` allocated.
    refusal: `(call) -> str | None`, why this kernel declines the call.
    devices: device types it serves; empty means any.
    remember: runs a call too, and returns how to repeat it (see `repeats.py`), or None.
    """

    name: str
    target: str
    run: Callable[[Any, Any], None]
    refusal: Callable[[Any], str | None] = lambda call: None
    devices: tuple[str, ...] = ()
    lowering: Lowering = Lowering.OPAQUE
    remember: Callable[[Any, Any], Repeat | None] | None = None

    def declines(self, call: Any, packaged: bool) -> str | None:
        if self.name in _aside and self.target == BUILTIN:
            return "is set aside"
        device = call[0].device.type
        if self.devices and device not in self.devices:
            return f"serves {' and '.join(self.devices)} tensors, got {device}"
        if packaged and self.lowering is Lowering.OPAQUE:
            return "is opaque to the compiler, an AOTInductor package cannot carry it"
        return self.refusal(call)


@dataclass(frozen=True)
class ExternalTarget:
    """A set of kernels from outside: {dispatcher name: Kernel}.

    claims: `(device) -> bool`, True for devices whose calls this target serves when the user
        names no target.
    """

    name: str
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    claims: Callable[[torch.device], bool] = lambda device: False


@dataclass(frozen=True)
class _Kind:
    """What every in-tree kernel file of one name has in common."""

    devices: tuple[str, ...]
    lowering: Lowering
    requires: str | None = None
    remembers: str | None = None  # the module whose `remember(run, out, call)` does it
    # The module whose `refusal(call)` says which devices it lacks; it loads no kernel language.
    limits: str | None = None


_KINDS = {
    "tilelang": _Kind(
        ("cuda",),
        Lowering.OPAQUE,
        "tilelang",
        "tileops.kernels.common.repeat",
        "tileops.kernels.common.tilelang_limits",
    ),
    "triton": _Kind(
        ("cuda",),
        Lowering.INLINE,
        "triton",
        "tileops.kernels.common.repeat",
        "tileops.kernels.common.limits",
    ),
    "cpu": _Kind(("cpu",), Lowering.OPAQUE),
    "reference": _Kind(("cpu",), Lowering.PACKAGE),
}


_aside: frozenset[str] = frozenset()


@contextlib.contextmanager
def aside(*names: str) -> Iterator[None]:
    """The in-tree kernels of these names decline every call, so that those behind them serve."""
    global _aside
    before, _aside = _aside, _aside.union(names)
    try:
        yield
    finally:
        _aside = before


def set_aside() -> frozenset[str]:
    """The names of the in-tree kernels that decline every call."""
    return _aside


def builtin_kernel(name: str, module: str, op: str) -> Kernel:
    """The in-tree kernel `op` of file `module`; the file is imported when first asked."""
    kind = _KINDS[name]

    @functools.cache
    def loaded() -> ModuleType:
        return importlib.import_module(module)

    @functools.cache
    def missing() -> str | None:
        if kind.requires and importlib.util.find_spec(kind.requires) is None:
            return f"needs {kind.requires}: pip install 'tileops[{kind.requires}]'"
        return None

    @functools.cache
    def limits() -> Callable[[Any], str | None]:
        return importlib.import_module(kind.limits).refusal if kind.limits else _serves_all

    def run(out: Any, call: Any) -> None:
        getattr(loaded(), op)(out, call)

    def refusal(call: Any) -> str | None:
        # The device first: nothing that can be installed helps where it is not served.
        return limits()(call) or missing() or getattr(loaded(), op + "_refusal", _serves_all)(call)

    def remember(out: Any, call: Any) -> Repeat | None:
        return importlib.import_module(str(kind.remembers)).remember(run, out, call)

    return Kernel(
        name,
        BUILTIN,
        run,
        refusal,
        kind.devices,
        kind.lowering,
        remember if kind.remembers else None,
    )


def _serves_all(call: Any) -> str | None:
    return None


_EXTERNAL: dict[str, ExternalTarget] = {}


def register_target(target: ExternalTarget) -> None:
    """Add a set of kernels under its name; a name is taken once."""
    if not target.name or target.name == BUILTIN:
        raise ValueError(f"target name {target.name!r} is reserved; choose another")
    if target.name in _EXTERNAL:
        raise ValueError(f"target {target.name!r} is registered already")
    _EXTERNAL[target.name] = target


def unregister_target(name: str) -> None:
    """Take a target away again; unknown names are ignored."""
    _EXTERNAL.pop(name, None)


@functools.cache
def _load_entry_points() -> None:
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        loaded = entry.load()
        target = loaded if isinstance(loaded, ExternalTarget) else loaded()
        if not isinstance(target, ExternalTarget):
            raise TypeError(
                f"entry point {entry.name!r} of {ENTRY_POINTS} must give an ExternalTarget, "
                f"got {type(target).__name__}"
            )
        if target.name not in _EXTERNAL:
            register_target(target)


def external_targets() -> Mapping[str, ExternalTarget]:
    """Every external target known here, by name."""
    _load_entry_points()
    return _EXTERNAL


def check_target(op: str, target: str) -> None:
    """Raise unless `target` is "", BUILTIN or the name of an external target."""
    if target and target != BUILTIN and target not in external_targets():
        names = ", ".join(repr(name) for name in (BUILTIN, *sorted(_EXTERNAL)))
        raise UnknownTargetError(
            f"{op}: target must be None or one of {names}, got {target!r}; an external target "
            f"joins by an entry point in the group {ENTRY_POINTS!r} or by register_target"
        )


def claimant(op: str, device: torch.device) -> ExternalTarget | None:
    """The external target that claims the device; two claimants are an error."""
    found = [t for t in external_targets().values() if t.claims(device)]
    if len(found) > 1:
        raise NoKernelError(
            f"{op}: targets {' and '.join(repr(t.name) for t in found)} both claim {device}; "
            "name one with target="
        )
    return found[0] if found else None


def candidates(contract: OpContract, call: Any, builtin: tuple[Kernel, ...]) -> Iterator[Kernel]:
    """The kernels that may serve a call, best first."""
    target = call.target
    if target == BUILTIN:
        yield from builtin
        return
    if target:
        check_target(contract.name, target)
        kernel = _EXTERNAL[target].kernels.get(contract.name)
        if kernel is not None:
            yield kernel
        return
    external = claimant(contract.name, call[0].device)
    if external is not None and contract.name in external.kernels:
        yield external.kernels[contract.name]
    yield from builtin


def select(
    contract: OpContract, call: Any, builtin: tuple[Kernel, ...], *, packaged: bool = False
) -> Kernel:
    """The first kernel that does not decline; NoKernelError with every reason if all do."""
    reasons = []
    for kernel in candidates(contract, call, builtin):
        reason = kernel.declines(call, packaged)
        if reason is None:
            return kernel
        reasons.append(f"\n  {kernel.target}/{kernel.name} {reason}")
    what = f"target {call.target!r}" if call.target else f"{call[0].device.type} tensors"
    listed = "".join(reasons) or "\n  (it has no kernel for this operator)"
    where = " in an AOTInductor package" if packaged else ""
    raise NoKernelError(f"{contract.name}: no kernel serves this call for {what}{where}:{listed}")
