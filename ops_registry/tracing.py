"""Which compiler is tracing: the one place that touches torch's private names for it."""

import copy
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

__all__ = [
    "FunctionalTensorMode",
    "always",
    "exporting",
    "foreign",
    "keep_loop_inputs",
    "keep_storage_offsets",
    "loops_write_in_place",
    "packaging",
    "remember_what_is_written",
    "restore_hints",
    "traced",
    "view_base",
]


def exporting() -> bool:
    """True while torch.export captures or decomposes: operators then stay whole."""
    try:
        from torch.export._trace import custom_triton_ops_decomposition_disabled
    except ImportError:  # a torch without the private name: is_exporting covers the capture
        return torch.compiler.is_exporting()
    return custom_triton_ops_decomposition_disabled()


def packaging() -> bool:
    """True while AOTInductor lowers a program that has to run without Python."""
    try:
        from torch._inductor.virtualized import V

        return bool(V.aot_compilation)
    except (ImportError, AttributeError):  # a renamed flag: lowering then keeps operators whole
        return False


def foreign(types: tuple[type, ...]) -> bool:
    """True if a tensor subclass (DTensor, ...) takes part that has its own rules."""
    known = (torch.Tensor, FunctionalTensor, torch.nn.Parameter)
    return any(t not in known and not issubclass(t, FakeTensor) for t in types)


def traced(tensor: torch.Tensor) -> bool:
    """True for the stand-ins that flow through a compiler in place of tensors."""
    return isinstance(tensor, (FunctionalTensor, FakeTensor))


def always(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes holds; of a traced program, for all sizes without a guard.

    Eager calls stay without sympy, which takes longer to import than all else that they need.
    """
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def view_base(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that `tensor` is a view of, or itself."""
    inference = torch.is_inference_mode_enabled()
    base = getattr(tensor, "_inference_mode_base" if inference else "_base", None)
    return tensor if base is None else base


def keep_storage_offsets() -> None:
    """Give Inductor the lowering of `aten.sym_storage_offset` where it has none.

    Without it (pytorch#198068) a compiled program that passes a view of a dynamic extent, such
    as kv[1], to an operator that writes in place writes to kv[0]. The value is in the node's
    metadata, as for sizes and strides.
    """
    inductor = sys.modules.get("torch._inductor.lowering")
    op = torch.ops.aten.sym_storage_offset.default
    if inductor is None or op in inductor.lowerings:
        return

    def sym_storage_offset(a):
        value = inductor.V.graph.current_node.meta["val"]
        return value.node.expr if isinstance(value, torch.SymInt) else int(value)

    inductor.register_lowering(op)(sym_storage_offset)


def keep_loop_inputs() -> None:
    """Keep Inductor from writing other results over the tensors that enter a while loop.

    A loop that runs no iteration returns the very tensors that entered it, but Inductor takes
    its results for new ones and reuses the memory of what entered (pytorch#146213).
    """
    ir = sys.modules.get("torch._inductor.ir")
    if ir is None or hasattr(ir.WhileLoop, "tileops_create"):
        return
    ir.WhileLoop.tileops_create = create = ir.WhileLoop.create

    def keeping_inputs(*args: Any, **kwargs: Any) -> Any:
        results = create(*args, **kwargs)
        kept = ir.V.graph.never_reuse_buffers
        for result in results:
            kept.add(result.get_name())
            for loop in getattr(result, "inputs", ()):
                kept.update(x.get_name() for x in getattr(loop, "carried_inputs", ()))
        return results

    ir.WhileLoop.create = keeping_inputs


_REMEMBERED: set[Any] = set()


def remember_what_is_written(kernel: Any) -> None:
    """Let torch find out once per kind of launch which arguments the Triton `kernel` writes.

    It builds and reads the kernel's intermediate code for every launch of a graph again, in each
    of its passes: 0.2 s each time for an attention kernel, minutes for a model of 30 layers.
    """
    if kernel in _REMEMBERED:
        return
    _REMEMBERED.add(kernel)
    from torch._higher_order_ops import triton_kernel_wrap

    for name in ("identify_accessed_tensors", "identify_mutated_tensors"):  # since 2.13, before
        found = getattr(triton_kernel_wrap, name, None)
        if found is not None and not hasattr(found, "__wrapped__"):
            setattr(triton_kernel_wrap, name, _remembering(found))


def _remembering(analyse: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[Any, Any] = {}

    @functools.wraps(analyse)
    def remembered(kernel: Any, kwargs: dict[str, Any], descriptors: dict[str, Any]) -> Any:
        # A number of warps makes a new autotuner of one configuration around the kernel.
        configs = getattr(kernel, "configs", None)
        code = kernel if configs is None else kernel.fn
        if code not in _REMEMBERED:
            return analyse(kernel, kwargs, descriptors)
        given = {**kwargs, **configs[0].kwargs} if configs else kwargs
        arguments = tuple((name, *_seen_by_analysis(x)) for name, x in given.items())
        key = code, arguments, repr(descriptors)
        if key not in known:
            found = analyse(kernel, kwargs, descriptors)
            accesses = getattr(found, "read_writes", None)  # since torch 2.13
            written = found if accesses is None else accesses.writes
            if len(written) == sum(kind == "tensor" for _, kind, *_ in arguments):
                return found  # what torch says of a kernel that it could not read, too
            known[key] = found
        return copy.deepcopy(known[key])

    return remembered


def _seen_by_analysis(x: Any) -> tuple[Any, ...]:
    """What of an argument the analysis can see: the types of tensors, the values of constants."""
    dtype = getattr(x, "dtype", None)
    if isinstance(dtype, torch.dtype):  # a tensor, or Inductor's box of one
        return "tensor", dtype
    if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)) or hasattr(x, "free_symbols"):
        return ("symbol",)
    return type(x), x


def loops_write_in_place() -> bool:
    """True if the loops of a package may write into what they carry, as those of a scan do."""
    return torch.__version__ >= "2.13"  # a TorchVersion, so no comparison of letters


def restore_hints(values: Iterable[Any]) -> None:
    """Give a loaded program the example sizes that `torch.export.load` drops.

    A Dim that occurs only in arithmetic, as B in B + 1 offsets, is loaded with an example of the
    expression and none of the symbol; Inductor asks for the symbol's and fails.
    """
    sizes: Iterator[Any] = (n for x in values if isinstance(x, torch.Tensor) for n in x.shape)
    symbol: Any = next((n for n in sizes if isinstance(n, torch.SymInt)), None)
    if symbol is None:
        return
    examples = getattr(symbol.node.shape_env, "backed_var_to_val", None)
    if examples is None:  # the name before torch 2.13
        examples = symbol.node.shape_env.var_to_val
    import sympy  # a dependency of torch that eager code never loads

    for expression, value in list(examples.items()):
        free = list(expression.free_symbols)
        if not expression.is_Symbol and len(free) == 1 and free[0] not in examples:
            (examples[free[0]],) = sympy.solve(expression - value, free[0])
