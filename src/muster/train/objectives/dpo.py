"""Direct preference optimisation (Rafailov et al. 2023) and its kin. Numerics are TRL's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from muster.config.spec import Objective as Settings
from muster.train.data_feed.batch import Units
from muster.train.objectives.base import Objective, Values, sides


class Dpo(Objective):
    """``-log sigmoid(beta * (ratio of the better answer - ratio of the worse one))``, or another ``loss`` of it."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.loss = settings.loss

    def losses(self, values: Values, units: Units) -> tuple[Tensor, Tensor]:
        beta, smoothing = self.settings.beta, self.settings.label_smoothing
        rewards = beta * values.ratios
        averaged = self.loss in ("ipo", "sigmoid_norm")
        chosen, rejected = sides(values.ratios / values.counts if averaged else values.ratios)
        ahead = chosen - rejected
        match self.loss:
            case "sigmoid" | "sigmoid_norm":
                losses = -logsigmoid(beta * ahead) * (1 - smoothing) - logsigmoid(-beta * ahead) * smoothing
            case "robust":
                right, wrong = -logsigmoid(beta * ahead), -logsigmoid(-beta * ahead)
                losses = (right * (1 - smoothing) - wrong * smoothing) / (1 - 2 * smoothing)
            case "hinge":
                losses = torch.relu(1 - beta * ahead)
            case "ipo":
                losses = (ahead - 1 / (2 * beta)) ** 2
            case "apo_zero":
                losses = 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)
            case _:
                raise AssertionError(self.loss)
        return losses, rewards


class Ipo(Dpo):
    """Identity preference optimisation (Azar et al. 2023): dpo with loss ipo."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.loss = "ipo"
