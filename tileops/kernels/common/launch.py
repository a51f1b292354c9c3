"""Launching Triton kernels: one call that is lean in eager and visible to tracers.

Eager launches go straight to the compiled kernel: what decides the compilation is the key of a
cache, so a call pays neither Triton's binder nor its hashing. Traced launches go through
`wrap_triton`, which puts the kernel itself into the graph. A recorder sees launches instead of a
device: the compile matrix of the tests reads from it what the launchers ask for.

Conventions of kernels, which make the key small and the graphs free of guards:

* runtime arguments first, then constexprs; both without defaults;
* lengths and counts are named in `do_not_specialize`; constexprs come from head counts, dims,
  dtypes, page sizes and options, never from a length (but see `triton_gqa.window_for`);
* no None arguments: an absent tensor is any other tensor plus a constexpr that says so;
* every program id is checked against what there is to do: a traced grid is never empty.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ops_registry import tracing
from tileops.kernels.common.recorder import machine, recorded
from tileops.kernels.common.triton_key import hash_from_below, keep_key

INTERPRETED: bool = triton.knobs.runtime.interpret


class Launch(NamedTuple):
    """One recorded launch."""

    kernel: Any
    grid: tuple[Any, ...]
    args: tuple[Any, ...]
    constexprs: dict[str, Any]
    warps: int
    stages: int
    registers: int | None = None

    @property
    def name(self) -> str:
        return self.kernel.__name__


def native_e4m3(tensor: Tensor) -> bool:
    """Whether kernels there load and store float8_e4m3fn themselves (`device.e4m3_*`)."""
    return machine(tensor).e4m3 and not INTERPRETED


def e4m3_argument(tensor: Tensor) -> Tensor:
    """A float8_e4m3fn tensor as kernels take it: its bytes where the compiler has no such type."""
    if tensor.dtype is torch.float8_e4m3fn and not native_e4m3(tensor):
        return tensor.view(torch.uint8)
    return tensor


def smaller(a: Any, b: Any) -> Any:
    """min without a branch on traced sizes; `torch.sym_min` alone costs 8 us in eager."""
    return min(a, b) if type(a) is int and type(b) is int else torch.sym_min(a, b)


def larger(a: Any, b: Any) -> Any:
    """max without a branch on traced sizes."""
    return max(a, b) if type(a) is int and type(b) is int else torch.sym_max(a, b)


def padded(dim: int) -> int:
    """The power of two that a tile has for `dim` columns, at least the 16 of a dot."""
    return max(16, 1 << (dim - 1).bit_length())


def row_stride(x: Tensor) -> int | None:
    """The static distance between rows of x [..., H, D], None if x has to be copied.

    Rows must be dense (strides D and 1), rows of all leading axes evenly spaced.
    """
    same = torch.fx.experimental.symbolic_shapes.guard_or_false if tracing.traced(x) else bool
    if x.dim() < 3:
        return None
    if not (same(x.stride(-1) == 1) and same(x.stride(-2) == x.shape[-1])):
        return None
    row = x.stride(-3)
    if not isinstance(row, int) or row < x.shape[-1] * x.shape[-2]:
        return None
    for axis in range(x.dim() - 3):
        if not same(x.stride(axis) == x.stride(axis + 1) * x.shape[axis + 1]):
            return None
    return row


def rows(x: Tensor) -> tuple[Tensor, int]:
    """x, or a copy of it, with its static row stride in elements."""
    stride = row_stride(x)
    if stride is not None:
        return x, stride
    return x.contiguous(), x.shape[-1] * x.shape[-2]


def or_other(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A metadata argument that may be absent: contiguous, or any other tensor."""
    return other if tensor is None else tensor.contiguous()


class Made(NamedTuple):
    """One eager launch as it was made: the compiled kernel, its grid and all it was given."""

    compiled: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]


class Called(NamedTuple):
    """One eager launch of a kernel that takes tensors.

    counter: one of the args, or memory that some of them view, which each launch has anew:
    `fresh(tensor)` makes one on the tensor's device.
    """

    kernel: Callable[..., Any]
    args: tuple[Any, ...]
    counter: Tensor
    fresh: Callable[[Tensor], Tensor]


class Held(NamedTuple):
    """One eager launch that is yet to be made, by `_run` with these arguments."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constexprs: dict[str, Any]
    options: tuple[int, int, int | None]
    device: int

    @property
    def key(self) -> Any:
        """What decides which compiled kernel it takes.

        A kernel by its function: its own hash is Triton's, which must not be the first to ask.
        """
        types = map(_type_of, self.args)
        return self.kernel.fn, self.device, self.options, *self.constexprs.values(), *types


class _Notes(threading.local):
    """The launches of a thread that are noted, and those that are held; None where none are."""

    made: list[Made | Called] | None = None
    held: list[Held] | None = None


_notes = _Notes()


@contextlib.contextmanager
def noting() -> Iterator[list[Made | Called]]:
    """Note the eager launches that this thread makes meanwhile (see `repeat.py`)."""
    made: list[Made | Called] = []
    before, _notes.made = _notes.made, made
    try:
        yield made
    finally:
        _notes.made = before


def noted() -> list[Made | Called] | None:
    """Where this thread's launches are noted, if they are."""
    return _notes.made


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Make the eager launches of this thread in the end, their new kernels compiled side by side.

    Only for launches whose results nothing but launches reads meanwhile.
    """
    if _notes.held is not None:
        yield  # part of those that are held already
        return
    held: list[Held] = []
    _notes.held = held
    try:
        yield
    finally:
        _notes.held = None
    compile_side_by_side(held)
    for each in held:
        _on_device(each.device, _run, *each)


def compile_side_by_side(held: Sequence[Held]) -> None:
    """Compile what is new of several launches; most of it runs without Python's lock."""
    new = {each.key: each for each in held if each.key not in _compiled}
    if len(new) < 2:
        return
    keep_key()
    with ThreadPoolExecutor(len(new)) as pool:
        # An error would leave the mode on; the launch itself meets it again.
        with triton.AsyncCompileMode(pool, ignore_errors=True):
            begun = [(each, _on_device(each.device, _begin, each)) for each in new.values()]
        loaded = [pool.submit(_on_device, e.device, _load, e, f) for e, f in begun]
        for future in loaded:
            future.result()


def _begin(each: Held) -> Any:
    """What will be the compiled kernel, or the kernel that Triton has already."""
    hash_from_below(each.kernel)
    named = _named(each.options)
    return each.kernel.warmup(*each.args, grid=each.grid, **each.constexprs, **named)


def _load(each: Held, found: Any) -> None:
    """Compile the module that launches it, by the C compiler, and load both."""
    compiled = (
        found.result(ignore_errors=True) if isinstance(found, triton.FutureKernel) else found
    )
    if compiled is not None:
        compiled[each.grid]


_compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


def _type_of(x: Any) -> Any:
    """What of an argument decides the compilation."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if type(x) is int:
        return -(2**31) <= x < 2**31
    if type(x) is TensorDescriptor:
        return x.base.dtype, *x.block_shape
    return type(x)


def launch(
    kernel: Any,
    grid: tuple[Any, ...],
    *args: Any,
    warps: int,
    stages: int,
    registers: int | None = None,
    **constexprs: Any,
) -> None:
    """Run `kernel` on the device and current stream of its first tensor.

    grid: one to three extents; y and z stay under 65,536. Nothing is launched for an empty one.
    args: the runtime arguments in order; constexprs: the others by name.
    registers: the most a thread may take on a CUDA device, so that more programs share a
        multiprocessor; traced launches leave it to the compiler.
    """
    launches = recorded()
    if launches is not None:
        launches.append(Launch(kernel, grid, args, constexprs, warps, stages, registers))
        return
    first = args[0]
    if tracing.traced(first):
        extents = tuple(g if isinstance(g, int) else larger(g, 1) for g in grid)
        if 0 not in extents:
            tracing.remember_what_is_written(kernel)
            torch.library.wrap_triton(kernel)[extents](
                *args, **constexprs, num_warps=warps, num_stages=stages
            )
        return
    if 0 in grid:
        return
    grid = (*grid, 1, 1)[:3]
    if INTERPRETED:
        kernel[grid](*args, **constexprs)
        return
    device = first.device.index
    each = Held(kernel, grid, args, constexprs, (warps, stages, registers), device)
    if _notes.held is None:
        _on_device(device, _run, *each)
    else:
        _notes.held.append(each)


def _on_device(device: int, do: Callable[..., Any], *args: Any) -> Any:
    if device == torch.cuda.current_device():
        return do(*args)
    with torch.cuda.device(device):
        return do(*args)


def _named(options: tuple[int, int, int | None]) -> dict[str, int]:
    """Options of a compilation by Triton's names."""
    warps, stages, registers = options
    named = {"num_warps": warps, "num_stages": stages}
    if registers is not None and not torch.version.hip:
        named["maxnreg"] = registers
    return named


def _run(
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    constexprs: dict[str, Any],
    options: tuple[int, int, int | None],
    device: int,
) -> None:
    key = Held(kernel, grid, args, constexprs, options, device).key
    found = _compiled.get(key)
    if found is None:
        keep_key()
        hash_from_below(kernel)
        compiled = kernel[grid](*args, **constexprs, **_named(options))
        rest = tuple(constexprs[name] for name in kernel.arg_names[len(args) :])
        _compiled[key] = compiled, rest
    else:
        compiled, rest = found
        compiled[grid](*args, *rest)
    made = noted()
    if made is not None:
        made.append(Made(compiled, grid, (*args, *rest)))
