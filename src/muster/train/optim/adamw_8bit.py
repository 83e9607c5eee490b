"""AdamW with 8-bit moments, by torchao: about a quarter of the moments' memory, at some cost in speed.

torchao compiles its update, so a CPU needs a C++ compiler. Whether to skip a bad update is read by the host
here, which waits for the device once a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from muster.checkpoint import compact
from muster.config.spec import Optimizer as Settings
from muster.core.errors import UsageError
from muster.train.distributed.reduce import local
from muster.train.optim.optimizer import decays_weight

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW8bit:
    """torchao's ``AdamW8bit`` over this rank's shards as plain tensors.

    Moments are saved and loaded as float32, slice by slice: codes belong to blocks of 256 values of a shard and are
    meaningless in another layout. Quantising again may move ``exp_avg`` by one code (its code points are not
    symmetric), so a resume is exact only up to quantisation noise.

    Raises:
        UsageError: torchao is not installed, or the run is exact (``elementwise``).
    """

    def __init__(self, named: Mapping[str, nn.Parameter], settings: Settings, *, elementwise: bool) -> None:
        if elementwise:
            raise UsageError(
                "training.exact needs whole optimizer state: 8-bit blocks depend on where a shard begins",
                hint="set training.optimizer.name: adamw",
            )
        try:
            from torchao.optim import AdamW8bit as Quantised
        except ImportError as error:
            raise UsageError(
                "training.optimizer.name is adamw_8bit, but torchao is not installed", hint="pip install torchao"
            ) from error
        self.named = dict(named)
        self._parts = {name: nn.Parameter(local(p.detach())) for name, p in self.named.items()}
        groups = [
            {
                "params": [self._parts[name] for name, p in self.named.items() if decays_weight(p, settings) == decays],
                "weight_decay": settings.weight_decay if decays else 0.0,
            }
            for decays in (True, False)
        ]
        self._torchao: Any = Quantised(
            [group for group in groups if group["params"]],
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
        )
        for part in self._parts.values():
            self._torchao.state[part] = {
                "step": torch.tensor(0.0),
                "exp_avg": self._torchao._new_buffer(part, True),
                "exp_avg_sq": self._torchao._new_buffer(part, False),
            }

    @property
    def moments(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The state itself, compact (``checkpoint.compact``); small tensors are plain."""
        return {
            moment: {name: self._torchao.state[part][moment] for name, part in self._parts.items()}
            for moment in MOMENTS
        }

    @torch.no_grad()
    def load_moments(self, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
        for moment in MOMENTS:
            for name, part in self._parts.items():
                compact.write(self._torchao.state[part][moment], moments[moment][name])

    @torch.no_grad()
    def step(self, *, step: int, learning_rate: float, scale: Tensor, skip: Tensor) -> None:
        if float(skip):
            return
        for group in self._torchao.param_groups:
            group["lr"].fill_(learning_rate)
        for name, part in self._parts.items():
            gradient = self.named[name].grad
            part.grad = None if gradient is None or not part.numel() else local(gradient).mul_(scale.float())
            self._torchao.state[part]["step"].fill_(step - 1)  # torchao adds 1
        self._torchao.step()
        for part in self._parts.values():
            part.grad = None
