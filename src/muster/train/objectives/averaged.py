"""Objectives without a reference, on mean log-probabilities of tokens. Numerics are TRL's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from muster.train.data_feed.batch import Units
from muster.train.objectives.base import Objective, Values, sides


class Orpo(Objective):
    """Odds ratio (Hong et al. 2024): cross-entropy of the better conversation, prompt included, and ``beta`` times
    ``-log sigmoid`` of the log odds ratio of the two answers."""

    def losses(self, values: Values, units: Units) -> tuple[Tensor, Tensor]:
        means = values.log_probs / values.counts
        chosen, rejected = sides(means - torch.log1p(-torch.exp(means).clamp(max=1 - 1e-7)))
        return -self.settings.beta * logsigmoid(chosen - rejected), self.settings.beta * means

    def of_tokens(self, log_probs_T: Tensor, units: Units) -> Tensor | float:
        assert units.in_chosen is not None
        return -(log_probs_T * units.in_chosen).sum() * units.per_token


class SimPo(Objective):
    """SimPO (Meng et al. 2024): ``-log sigmoid(beta * difference of means - gamma)``, and no cross-entropy (TRL's
    ``cpo_alpha: 0``)."""

    def losses(self, values: Values, units: Units) -> tuple[Tensor, Tensor]:
        beta = self.settings.beta
        rewards = beta * values.log_probs / values.counts
        chosen, rejected = sides(rewards)
        return -logsigmoid(chosen - rejected - self.settings.gamma), rewards
