"""Which compiler is tracing: the one place that touches torch's private names for it."""

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

__all__ = ["FunctionalTensorMode", "exporting", "foreign", "packaging"]


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
