"""AdamW on each rank's own shards, as plain tensors: no DTensor dispatch, one kernel call for all of them.

Decoupled weight decay, on matrices alone unless ``decay_norms_and_biases`` is set. Loshchilov and Hutter 2019, as
``torch.optim.AdamW`` computes it. The step counter is the training step, so nothing but the moments is state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from muster.config.spec import Optimizer as Settings
from muster.train.distributed.reduce import local
from muster.train.optim.optimizer import decays_weight


class AdamW:
    """AdamW with the moments of the local shards.

    ``elementwise``: compute the update in separate operations instead of the fused kernel. Slower, but the fused
    CPU kernel rounds the elements at the end of a shard differently from those in its middle, so that its result
    depends on where a shard ends, which exact training does not allow.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], settings: Settings, *, elementwise: bool = False) -> None:
        self.settings = settings
        self.elementwise = elementwise
        self.named = dict(named)
        self.exp_avg = {name: torch.zeros_like(local(p.detach())) for name, p in self.named.items()}
        self.exp_avg_sq = {name: torch.zeros_like(local(p.detach())) for name, p in self.named.items()}
        self._counters: dict[torch.device, Tensor] = {}

    @property
    def moments(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    def load_moments(self, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Nothing to do: ``moments`` are the moments themselves."""

    @torch.no_grad()
    def step(self, *, step: int, learning_rate: float, scale: Tensor, skip: Tensor) -> None:
        for decays in (True, False):
            names = [
                name
                for name, parameter in self.named.items()
                if decays_weight(parameter, self.settings) == decays
                and parameter.grad is not None
                and self.exp_avg[name].numel()
            ]
            if names:
                decay = self.settings.weight_decay if decays else 0.0
                self._update(names, step, learning_rate, decay, scale, skip)

    def _update(
        self, names: Sequence[str], step: int, learning_rate: float, decay: float, scale: Tensor, skip: Tensor
    ) -> None:
        parameters = [local(self.named[name].detach()) for name in names]
        gradients = [local(gradient) for name in names if (gradient := self.named[name].grad) is not None]
        exp_avg = [self.exp_avg[name] for name in names]
        exp_avg_sq = [self.exp_avg_sq[name] for name in names]
        if self.elementwise:
            if float(skip):
                return
            torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))
            for tensors in zip(parameters, gradients, exp_avg, exp_avg_sq, strict=True):
                adamw_elementwise(*tensors, self.settings, step=step, learning_rate=learning_rate, decay=decay)
            return
        device = parameters[0].device
        counter = self._counters.setdefault(device, torch.zeros((), dtype=torch.float32, device=device))
        beta1, beta2 = self.settings.betas
        torch._fused_adamw_(
            parameters,
            gradients,
            exp_avg,
            exp_avg_sq,
            [],
            [counter.fill_(step)] * len(parameters),
            lr=learning_rate,
            beta1=beta1,
            beta2=beta2,
            weight_decay=decay,
            eps=self.settings.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=scale.float().reciprocal(),  # the kernel divides
            found_inf=skip.float(),
        )


def adamw_elementwise(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    settings: Settings,
    *,
    step: int,
    learning_rate: float,
    decay: float,
) -> None:
    """One update in operations that each round once, so that no element depends on its neighbours."""
    beta1, beta2 = settings.betas
    parameter.mul_(1.0 - learning_rate * decay)
    exp_avg.mul_(beta1).add_(gradient.mul(1.0 - beta1))
    exp_avg_sq.mul_(beta2).add_(gradient.square().mul_(1.0 - beta2))
    denominator = exp_avg_sq.sqrt().div_((1.0 - beta2**step) ** 0.5).add_(settings.eps)
    parameter.sub_(exp_avg.div(denominator).mul_(learning_rate / (1.0 - beta1**step)))
