"""Gradients an operator does not have: refused in words, and only when they are executed.

A raw operator without an autograd kernel would silently give wrong gradients. A formula that
raises at once would break compiled inference, whose joint trace calls the formula although
nobody asked for a gradient. So the formula calls an operator whose kernel raises.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from .errors import GradientError

if TYPE_CHECKING:
    from .contract import OpContract


def define_refusal(library: torch.library.Library) -> None:
    """`tileops::refuse_gradient`: traces, raises when run.

    It takes the incoming gradients because a compiler runs in the forward pass whatever does not
    depend on them.
    """
    library.define(
        "refuse_gradient(Tensor like, Tensor[] grads, str why) -> Tensor",
        tags=(torch.Tag.pt2_compliant_tag,),
    )

    def run(like: torch.Tensor, grads: list[torch.Tensor], why: str) -> torch.Tensor:
        raise GradientError(why)

    def fake(like: torch.Tensor, grads: list[torch.Tensor], why: str) -> torch.Tensor:
        return like.new_empty(like.shape)

    library.impl("refuse_gradient", run, "CompositeExplicitAutograd")
    torch.library.register_fake("tileops::refuse_gradient", fake, lib=library)


def refused(like: torch.Tensor, grads: Iterable[torch.Tensor | None], why: str) -> torch.Tensor:
    """A gradient shaped like `like` that raises GradientError(why) when it is computed.

    grads: the gradients of the outputs, None for those without.
    """
    incoming = [grad.detach() for grad in grads if grad is not None]
    return torch.ops.tileops.refuse_gradient.default(like.detach(), incoming, why)


def no_gradient(name: str) -> str:
    if name.endswith("_bwd"):
        return f"{name}: second derivatives are not supported, call backward without create_graph"
    return f"{name} has no gradient: detach its inputs, or use an operator that has one"


def refuse_gradients(
    contract: OpContract,
    library: torch.library.Library,
    *,
    name: str | None = None,
    functional: bool = False,
) -> None:
    """Give an operator without a gradient the formula that says so."""
    name = name or contract.name
    if contract.mutated and not functional:
        _refuse_below_autograd(contract, library)
        return
    why = no_gradient(name)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*(x for x in inputs if isinstance(x, torch.Tensor)))
        ctx.tensors = [isinstance(x, torch.Tensor) for x in inputs]

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        found = [next(saved) if is_tensor else None for is_tensor in ctx.tensors]
        return tuple(
            refused(x, grads, why) if x is not None and needed else None
            for x, needed in zip(found, ctx.needs_input_grad, strict=False)
        )

    torch.library.register_autograd(f"tileops::{name}", backward, setup_context=setup, lib=library)


def _refuse_below_autograd(contract: OpContract, library: torch.library.Library) -> None:
    """For mutating operators, which `register_autograd` does not take.

    The returned tensors carry the refusing node; gradients never flow through a pool.
    """
    why = no_gradient(contract.name)

    class Refuse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, like: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(like)
            return out.view_as(out)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            return refused(ctx.saved_tensors[0], grads, why), None

    def autograd(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        recording = torch.is_grad_enabled()
        first = next((x for x in tensors if x.requires_grad), None) if recording else None
        with torch._C._AutoDispatchBelowAutograd():
            out = contract.op(*args, **kwargs)
        if first is None or out is None:
            return out
        if isinstance(out, torch.Tensor):
            return Refuse.apply(first, out)
        return tuple(Refuse.apply(first, x) for x in out)

    library.impl(contract.name, autograd, "Autograd")


def refused_arguments(
    contract: OpContract,
    call: Any,
    needed: tuple[bool, ...],
    grads: Iterable[torch.Tensor | None],
) -> dict[str, torch.Tensor | None]:
    """Refusing gradients for the arguments that were asked for one and have none.

    Differentiable inputs in float8_e4m3fn, scales and rotary tables: each sentence names the
    argument.
    """
    refusals: dict[str, torch.Tensor | None] = {}
    for name, wanted in zip(call._fields, needed, strict=False):
        value = getattr(call, name)
        if not wanted or not isinstance(value, torch.Tensor):
            continue
        if value.dtype == torch.float8_e4m3fn:
            why = f"{name} is float8_e4m3fn and has no gradient, use 16-bit inputs to train"
        elif name not in contract.differentiable:
            why = f"{name} has no gradient, detach it"
        elif call.q.dtype == torch.float8_e4m3fn:
            why = f"{name} has no gradient in a float8_e4m3fn call, use 16-bit inputs to train"
        else:
            continue
        refusals[name] = refused(value, grads, f"{contract.name}: {why}")
    return refusals
