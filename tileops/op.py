"""The base of every Op class: parameters in `__init__`, tensors in `forward`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from meta_kernels import checks
from ops_registry.contract import OpContract
from ops_registry.targets import Target, check_target


class Op(torch.nn.Module):
    """One configured operator.

    A subclass names its `contract`, keeps its parameters as attributes of the same names in
    `PARAMETERS`, and implements `options`: what the dispatcher operator takes besides tensors.
    """

    contract: ClassVar[OpContract]
    PARAMETERS: ClassVar[tuple[str, ...]]

    def __init__(self, target: Target) -> None:
        super().__init__()
        if target is not None and not isinstance(target, str):
            raise TypeError(
                f"{self.contract.name}: target must be None or a target name, "
                f"got {type(target).__name__} {target!r}"
            )
        check_target(self.contract.name, target or "")
        self.target = target

    def extra_repr(self) -> str:
        """The parameters as they were given, defaults included."""
        shown = [f"{name}={getattr(self, name)!r}" for name in self.PARAMETERS]
        return ", ".join(shown + ([f"target={self.target!r}"] if self.target else []))

    def options(self) -> tuple[Any, ...]:
        """The arguments of the dispatcher operator that follow its tensors."""
        raise NotImplementedError

    def call(self, *tensors: Any) -> Any:
        """Run the dispatcher operator on these tensors, in the contract's order."""
        return self.contract.op(*self.bound(*tensors))

    def bound(self, *tensors: Any) -> tuple[Any, ...]:
        """All arguments of the dispatcher operator; TypeError for a non-tensor."""
        specs = self.contract.tensors
        for (name, spec), value in zip(specs.items(), tensors, strict=True):
            if isinstance(value, torch.Tensor) or (value is None and spec.optional):
                continue
            raise TypeError(
                f"{self.contract.name}: {name} must be a torch.Tensor, got {type(value).__name__}"
            )
        return (*tensors, *self.options(), self.target or "")

    # Parameter helpers, named for the rule they apply.

    def _integer(self, name: str, value: Any) -> int:
        return checks.integer(self.contract.name, name, value)

    def _optional_integer(self, name: str, value: Any) -> int | None:
        return None if value is None else self._integer(name, value)

    def _number(self, name: str, value: Any) -> float:
        return checks.number(self.contract.name, name, value)

    def _optional_number(self, name: str, value: Any) -> float | None:
        return None if value is None else self._number(name, value)

    def _boolean(self, name: str, value: Any) -> bool:
        return checks.boolean(self.contract.name, name, value)

    def _set_score_options(
        self,
        is_causal: Any,
        window_size_left: Any,
        window_size_right: Any,
        sm_scale: Any,
        softcap: Any,
        pos_encoding_mode: str,
        rotary_dim: Any,
        rope_layout: str,
        out_dtype: torch.dtype | None,
    ) -> None:
        """Normalise, check and keep the options that dense, varlen and paged GQA share."""
        self.is_causal = self._boolean("is_causal", is_causal)
        self.window_size_left = self._integer("window_size_left", window_size_left)
        self.window_size_right = self._integer("window_size_right", window_size_right)
        self.sm_scale = self._optional_number("sm_scale", sm_scale)
        self.softcap = self._optional_number("softcap", softcap)
        self.pos_encoding_mode = pos_encoding_mode
        self.rotary_dim = self._optional_integer("rotary_dim", rotary_dim)
        self.rope_layout = rope_layout
        self.out_dtype = out_dtype
        checks.scores(self.contract.name, self)
        checks.checked_out_dtype(self.contract.name, out_dtype)


def cast_to_autocast(call: Any, dtype: torch.dtype) -> Any:
    """q, k and v in the active autocast dtype, nothing else; FP8 inputs stay as they are."""
    if dtype not in (torch.float16, torch.bfloat16) or call.q.dtype == torch.float8_e4m3fn:
        return call
    return call._replace(q=call.q.to(dtype), k=call.k.to(dtype), v=call.v.to(dtype))
