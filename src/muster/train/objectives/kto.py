"""Kahneman-Tversky optimisation (Ethayarajh et al. 2024): answers that are good or bad each. Numerics are TRL's."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from muster.config.spec import Objective as Settings
from muster.train.data_feed.batch import Batch, Units
from muster.train.distributed.reduce import ReduceGroups
from muster.train.objectives.base import UNIT, Objective, Values, is_good


class Kto(Objective):
    """``1 - sigmoid(beta * (ratio - z))`` of good answers, ``1 - sigmoid(beta * (z - ratio))`` of bad ones.

    z is the step's mean ratio of answers to prompts of other rows, at least 0, and has no gradient. TRL takes that of
    a device's batch: the same with one micro-batch a step.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.z: Tensor | None = None

    def look_at(
        self,
        log_probs_of: Callable[[Batch], Tensor],
        mismatched: Iterable[tuple[int | None, Batch]],
        groups: ReduceGroups,
    ) -> None:
        sums: Tensor | None = None
        for _, batch in mismatched:
            log_probs, units = log_probs_of(batch), batch.units
            if sums is None:
                sums = torch.zeros(2, dtype=torch.float64, device=batch.input_ids.device)
            if units is not None and len(log_probs):
                ratios = log_probs if units.reference is None else log_probs - units.reference
                # Whole numbers: the same sum in any order.
                sums += torch.stack([(ratios.double() / UNIT).round().sum(), sums.new_tensor(len(ratios))])
        assert sums is not None, "a step without rounds"
        total, count = groups.sum_everywhere_(sums).unbind()
        self.z = (total * UNIT / count.clamp(min=1)).clamp(min=0).float()

    def losses(self, values: Values, units: Units) -> tuple[Tensor, Tensor]:
        beta, good = self.settings.beta, is_good(units, len(values.ratios))
        ahead = values.ratios - (0.0 if self.z is None else self.z)
        weights = torch.where(good, self.settings.desirable_weight, self.settings.undesirable_weight)
        losses = 1 - torch.sigmoid(beta * torch.where(good, ahead, -ahead))
        return losses * weights, beta * values.ratios
