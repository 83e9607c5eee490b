"""What the loop needs of an optimizer, and how the one that the run file names is made."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from muster.config.spec import Optimizer as Settings


class ShardOptimizer(Protocol):
    """What the loop asks of an optimizer."""

    @property
    def moments(self) -> Mapping[str, Mapping[str, Tensor]]:
        """State name (``exp_avg``...) -> parameter name -> this rank's part; may be a copy, or compact
        (``checkpoint.compact``)."""
        ...

    def load_moments(self, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load values that were written into the tensors of ``moments``."""
        ...

    def step(self, *, step: int, learning_rate: float, scale: Tensor, skip: Tensor) -> None:
        """Apply update ``step`` with gradients times ``scale`` (0-d); do nothing if ``skip`` is 1.0."""
        ...


def make_optimizer(named: Mapping[str, nn.Parameter], settings: Settings, *, elementwise: bool) -> ShardOptimizer:
    """The optimizer that the run file names, over this rank's shards of the ``named`` parameters.

    ``elementwise``: an element's update may depend on that element alone (exact training).

    Raises:
        UsageError: it needs a package that is not installed, or cannot work element by element.
    """
    module, _, name = settings.traits.factory.partition(":")
    factory: Callable[..., ShardOptimizer] = getattr(importlib.import_module(module), name)
    return factory(named, settings, elementwise=elementwise)


def decays_weight(parameter: Tensor, settings: Settings) -> bool:
    """Matrices decay; norms and biases only where the settings ask for it."""
    return parameter.ndim >= 2 or settings.decay_norms_and_biases


def clip_scale(norm: Tensor, max_norm: float | None) -> Tensor:
    """Factor that reduces gradients of global ``norm`` to ``max_norm``; 1 if they are below. Stays on the device."""
    if max_norm is None:
        return torch.ones_like(norm)
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
