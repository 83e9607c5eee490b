"""The load of a mixture's experts: counted, reported, and kept even by losses and biases. L layers, E experts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from muster.train.distributed.reduce import local

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: torchtitan's and DeepSeek's step of a bias.
BIAS_STEP = 1e-3
BIAS = "e_score_correction_bias"
#: Names of ``Mixture.figures`` in a step's event.
EXPERT_FIGURES = ("expert_load_max", "expert_idle_share", "expert_entropy")


@dataclass
class Mixture:
    """The experts of a model, while it trains."""

    experts: list[nn.Module]
    """One a layer, those of other layers left out."""
    routers: list[nn.Module]
    num_experts: int
    top_k: int
    balance: float = 0.0
    """Coefficient of the family's auxiliary loss."""
    z: float = 0.0
    """``training.router_z_loss``."""
    routes_in_float32: bool = False
    """Routers compute in it: from random weights."""
    moves_bias: bool = False
    """DeepSeek's biases follow the load: from random weights."""
    notes: list[str] = field(default_factory=list)
    """What is to be reported once."""
    loads: Tensor | None = None
    """float64[L * E]: tokens of this step that each expert got here; sums over ranks once these have been taken."""
    _real: Tensor | None = None
    """bool[N] of the forward pass that counts; its backward pass repeats parts of it, which do not."""
    _counts: bool = False

    def __deepcopy__(self, memo: object) -> Mixture:
        """A copy of a layer has no mixture of its own."""
        return self

    @property
    def wants_logits(self) -> bool:
        return self.balance > 0 or self.z > 0

    def begin_step(self, device: torch.device) -> None:
        self.loads = torch.zeros(len(self.experts) * self.num_experts, dtype=torch.float64, device=device)

    def begin(self, real: Tensor | None, *, counts: bool) -> None:
        """A forward pass over tokens of which ``real`` are no padding (None: all) begins."""
        self._real, self._counts = real, counts and self.loads is not None

    def end(self) -> None:
        self._real, self._counts = None, False

    @torch.no_grad()
    def count(self, layer: int, index_Nk: Tensor) -> None:
        if not self._counts or self.loads is None:
            return
        if self._real is not None:
            index_Nk = index_Nk.masked_fill(~self._real.unsqueeze(1), -1)
        self.loads[layer * self.num_experts : (layer + 1) * self.num_experts] += counted(index_Nk, self.num_experts)

    def loss(self, model: PreTrainedModel, logits: Sequence[Tensor], real: Tensor | None, share: Tensor) -> Tensor:
        """What is added to the loss of a micro-batch that has ``share`` of the step's targets. 0-d, its value is 0: the
        loss that is reported stays cross-entropy."""
        total = torch.zeros((), device=share.device)
        if self.balance > 0:
            mask = None if real is None else real.unsqueeze(0)
            balance = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
            total = total + self.balance * balance(tuple(logits), self.num_experts, self.top_k, mask)  # type: ignore[misc]
        if self.z > 0:
            squares = torch.stack([torch.logsumexp(each.float(), -1).square() for each in logits])
            kept = squares if real is None else squares[:, real]
            total = total + self.z * (kept.mean() if kept.numel() else squares.sum() * 0.0)
        total = total * share
        return total - total.detach()

    def figures(self) -> Tensor:
        """float64[3] of the summed loads: the largest over the mean of its layer, the share of experts without a token,
        and the mean entropy as a share of that of an even load."""
        assert self.loads is not None
        loads = self.loads.view(-1, self.num_experts)
        shares = loads / loads.sum(1, keepdim=True).clamp(min=1)
        entropy = torch.special.entr(shares).sum(1) / torch.log(loads.new_tensor(max(2, self.num_experts)))
        return torch.stack([shares.max() * self.num_experts, (loads == 0).double().mean(), entropy.mean()])

    def biases(self, model: nn.Module) -> dict[str, Tensor]:
        """Name -> the buffers that follow the load."""
        moved = {id(getattr(router, BIAS)) for router in self.routers} if self.moves_bias else ()
        return {name: buffer for name, buffer in model.named_buffers() if id(buffer) in moved}

    @torch.no_grad()
    def move_biases(self, skip: Tensor) -> None:
        """Before the optimizer's step: up for experts with less than the mean load. ``skip``: 1.0 where the step is not
        applied."""
        if not self.moves_bias or self.loads is None:
            return
        for router, load in zip(self.routers, self.loads.view(len(self.routers), -1), strict=True):
            move = torch.sign(load.mean() - load)
            bias = local(getattr(router, BIAS))
            bias.add_(((move - move.mean()) * (1 - skip) * BIAS_STEP).to(bias.dtype))


def counted(index: Tensor, number: int) -> Tensor:
    """int: how often each of 0..number-1 is in ``index``; without waiting for the device."""
    values = index.flatten()
    return torch.histc(values.float() if values.device.type == "cpu" else values.int(), number, 0, number - 1)
