"""Backward passes of linear layers in two parts: what goes on to the layer before, and the weights' gradients later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class LeftForLater:
    """What backward passes have left undone: (matrix, its input, the gradient of its output)."""

    anchor: Tensor = field(default_factory=lambda: torch.zeros(0, requires_grad=True), repr=False)
    """Makes an output need a gradient where no input does. The matrix must not: its hooks would be called early."""
    _left: list[tuple[nn.Parameter, Tensor, Tensor]] = field(default_factory=list, repr=False)

    def add(self, weight: nn.Parameter, inputs: Tensor, gradient: Tensor) -> None:
        self._left.append((weight, inputs, gradient))

    def take(self) -> list[tuple[nn.Parameter, Tensor, Tensor]]:
        """All that was left since the last call."""
        left, self._left = self._left, []
        return left


def split(layers: Iterable[nn.Module]) -> LeftForLater:
    """Have the trained matrices in these layers leave their gradients for ``finish``.

    For whole parameters alone: FSDP reduces what a unit has when its backward pass ends.
    """
    later = LeftForLater()
    for layer in layers:
        for module in layer.modules():
            if type(module) is nn.Linear and module.weight.requires_grad:
                module.forward = _forward(module, later)  # type: ignore[method-assign, assignment]
    return later


def finish(left: Sequence[tuple[nn.Parameter, Tensor, Tensor]]) -> None:
    """Add the gradients that were left to their parameters as a backward pass does, hooks included: the same products,
    and so the same bits."""
    for weight, inputs, gradient in left:
        product = gradient.flatten(0, -2).t().mm(inputs.flatten(0, -2))
        torch.autograd.backward([weight], [product])


def _forward(module: nn.Linear, later: LeftForLater) -> Callable[[Tensor], Tensor]:
    def forward(inputs: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return nn.functional.linear(inputs, module.weight, module.bias)
        output: Tensor = _Linear.apply(inputs, later.anchor, module.bias, module, later)  # type: ignore[no-untyped-call]
        return output

    return forward


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, inputs: Tensor, anchor: Tensor, bias: Tensor | None, module: nn.Linear, later: LeftForLater
    ) -> Tensor:
        context.save_for_backward(inputs)
        context.weight, context.later = module.weight, later
        return nn.functional.linear(inputs, module.weight, bias)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,) = context.saved_tensors
        wants_inputs, _, wants_bias, *_ = context.needs_input_grad
        flat = gradient.flatten(0, -2)
        context.later.add(context.weight, inputs, gradient)
        into = flat.mm(context.weight.detach()).view(inputs.shape) if wants_inputs else None
        return into, None, flat.sum(0) if wants_bias else None, None, None
