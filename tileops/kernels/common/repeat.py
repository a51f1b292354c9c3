"""Repeating what a launcher did: the same kernels, grids and sizes, with other pointers.

A call is run once under watch. It can be repeated if all it did was to allocate, to take views
and to launch kernels, and if every pointer of a launch lies in one tensor: of the call, of an
output or of a temporary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.tools.tensor_descriptor import TensorDescriptor

from tileops.kernels.common.launch import Called, Made, noting

ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
    torch.ops.aten.new_zeros.default,
}
ZEROS = torch.ops.aten.new_zeros.default


class _Watch(TorchDispatchMode):
    """What else than launches a call does: `made` are its allocations, kept alive."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Tensor, bool]] = []  # and whether they are zeros
        self.plain = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in ALLOCATIONS:
            self.made.append((out, func is ZEROS))
        elif not func.is_view:
            self.plain = False
        return out


class _Pointer(NamedTuple):
    """The base of a tensor descriptor, as far as a launch looks at it."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


class _Place(NamedTuple):
    """Where the args of a launch have a pointer: that of a tensor, some bytes on."""

    argument: int
    tensor: int
    offset: int


class _Launch(NamedTuple):
    """A launch to repeat, over pointers."""

    compiled: Any
    grid: tuple[int, ...]
    args: list[Any]
    pointers: tuple[_Place, ...]
    tiles: tuple[_Place, ...]

    def again(self, memory: list[int], tensors: list[Tensor]) -> None:
        args = self.args.copy()
        for index, tensor, offset in self.pointers:
            args[index] = memory[tensor] + offset
        for index, tensor, offset in self.tiles:
            args[index] = _moved(args[index], memory[tensor] + offset)
        self.compiled[self.grid](*args)


class _View(NamedTuple):
    """Where the args of a launch have a tensor: a view of another, some elements on."""

    argument: int
    tensor: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Call(NamedTuple):
    """A launch to repeat, over tensors.

    whole: (argument, tensor) of the args that are a tensor as it is. The last of the tensors is
    the counter.
    """

    kernel: Any
    args: list[Any]
    whole: tuple[tuple[int, int], ...]
    views: tuple[_View, ...]
    fresh: Any

    def again(self, memory: list[int], tensors: list[Tensor]) -> None:
        args = self.args.copy()
        tensors = [*tensors, self.fresh(tensors[0])]
        for index, tensor in self.whole:
            args[index] = tensors[tensor]
        for index, tensor, shape, stride, offset in self.views:
            x = tensors[tensor]
            args[index] = x.as_strided(shape, stride, x.storage_offset() + offset)
        self.kernel(*args)


class _Repeat:
    """See `Repeat` of `ops_registry/repeats.py`."""

    def __init__(
        self,
        out: Any,
        made: list[tuple[Tensor, bool]],
        launches: list[_Launch | _Call],
        device: torch.device,
    ) -> None:
        outputs = _tensors(out)
        self.shaped = [
            (x.shape, x.stride(), x.dtype, zeros)
            for x, zeros in (*((x, False) for x in outputs), *made)
        ]
        self.outputs = len(outputs)
        self.single = isinstance(out, Tensor)
        self.nothing = out is None
        self.launches = launches
        self.over_tensors = any(isinstance(x, _Call) for x in launches)
        self.device = device

    def __call__(self, pointers: list[int], call: Any) -> Any:
        device = self.device
        made = []
        for shape, stride, dtype, zeros in self.shaped:
            x = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            made.append(x.zero_() if zeros else x)
        pointers += [x.data_ptr() for x in made]
        tensors = []
        if self.over_tensors:
            tensors = [*(x for x in call if isinstance(x, Tensor)), *made]
        if device.index == torch.cuda.current_device():
            self._launch(pointers, tensors)
        else:
            with torch.cuda.device(device):
                self._launch(pointers, tensors)
        if self.nothing:
            return None
        return made[0] if self.single else tuple(made[: self.outputs])

    def _launch(self, memory: list[int], tensors: list[Tensor]) -> None:
        for launch in self.launches:
            launch.again(memory, tensors)


def remember(run: Callable[[Any, Any], None], out: Any, call: Any) -> _Repeat | None:
    """Run a call, and return how to repeat it, or None where it cannot be."""
    watch = _Watch()
    with noting() as launches, watch:
        run(out, call)
    tensors = [x for x in call if isinstance(x, Tensor)]
    tensors += [*_tensors(out), *(x for x, _ in watch.made)]
    places = _Places(tensors)
    if not watch.plain or places.ambiguous:
        return None
    bound: list[_Launch | _Call | None] = [
        _bound(launch, places) if isinstance(launch, Made) else _bound_call(launch, tensors)
        for launch in launches
    ]
    if any(launch is None for launch in bound):
        return None
    return _Repeat(out, watch.made, [x for x in bound if x is not None], call[0].device)


class _Places:
    """Finds the tensor that an address lies in."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.spans = [
            (x.data_ptr(), x.data_ptr() + _extent(x), index)
            for index, x in enumerate(tensors)
            if x.numel()
        ]
        self.starts = {begin: index for begin, _, index in self.spans}
        # Two tensors of one address could not be told apart.
        self.ambiguous = len(self.starts) < len(self.spans)

    def find(self, address: int) -> tuple[int, int] | None:
        """The index of the tensor and the offset in bytes; None if there is not just one."""
        if address in self.starts:
            return self.starts[address], 0
        found = [(i, address - begin) for begin, end, i in self.spans if begin < address < end]
        return found[0] if len(found) == 1 else None


def _extent(x: Tensor) -> int:
    """Bytes from the first element of x to the end of its last."""
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.dtype.itemsize


def _bound(launch: Made, places: _Places) -> _Launch | None:
    args = list(launch.args)
    pointers: list[_Place] = []
    tiles: list[_Place] = []
    for index, x in enumerate(args):
        if isinstance(x, Tensor):
            address, found = x.data_ptr(), pointers
            args[index] = 0  # of an empty tensor, which it is in every repeat
        elif isinstance(x, TensorDescriptor):
            address, found = x.base.data_ptr(), tiles
            args[index] = _moved(x, 0)
        else:
            continue
        if not address:
            continue
        place = places.find(address)
        if place is None:
            return None
        found.append(_Place(index, *place))
    return _Launch(launch.compiled, launch.grid, args, tuple(pointers), tuple(tiles))


def _bound_call(launch: Called, tensors: list[Tensor]) -> _Call | None:
    tensors = [*tensors, launch.counter]
    places = _Places(tensors)
    args = list(launch.args)
    whole: list[tuple[int, int]] = []
    views: list[_View] = []
    for index, x in enumerate(args):
        if not isinstance(x, Tensor):
            continue
        place = places.find(x.data_ptr()) if x.numel() else None
        if place is None or tensors[place[0]].dtype != x.dtype:
            return None
        base, offset = tensors[place[0]], place[1] // x.dtype.itemsize
        args[index] = None
        if not offset and x.shape == base.shape and x.stride() == base.stride():
            whole.append((index, place[0]))
        else:
            views.append(_View(index, place[0], x.shape, x.stride(), offset))
    return _Call(launch.kernel, args, tuple(whole), tuple(views), launch.fresh)


def _moved(tiles: TensorDescriptor, address: int) -> TensorDescriptor:
    """The descriptor over other memory; what its constructor checks was checked."""
    moved = object.__new__(TensorDescriptor)
    vars(moved).update(vars(tiles), base=_Pointer(address, tiles.base.dtype))
    return moved


def _tensors(out: Any) -> tuple[Tensor, ...]:
    """The outputs of an operator as a tuple."""
    if out is None:
        return ()
    return (out,) if isinstance(out, Tensor) else tuple(out)
