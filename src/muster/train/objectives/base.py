"""What objectives share: log-probabilities by document, and the figures of a step.

Legend: D documents, U units (pairs, or labelled answers), T targets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from muster.config.spec import Objective as Settings
from muster.core.errors import UsageError
from muster.train.data_feed.batch import Batch, Units

if TYPE_CHECKING:
    from muster.train.distributed.reduce import ReduceGroups

#: Figures are summed as whole numbers of this: the same in any order, in floats and in fixed point.
UNIT = 2.0**-20
#: What is summed: good answers, bad ones; pairs in the right order; rewards and log-probabilities of good and bad ones.
_SUMS = 7


class Sides(NamedTuple):
    """Of each unit: the better answer's value and the worse one's; of labelled answers one of them is masked out."""

    chosen: Tensor
    rejected: Tensor


@dataclass(frozen=True)
class Values:
    """Of each document, float32[D]."""

    log_probs: Tensor
    """Summed over its answer."""
    ratios: Tensor
    """``log_probs`` less those of the model before training; the same without a reference."""
    counts: Tensor
    """Targets of its answer."""


class Objective(ABC):
    """A loss of units, and what was measured since ``begin``."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.traits = settings, settings.traits
        self.totals: Tensor | None = None
        """float64[7], whole numbers of ``UNIT``; summed over ranks with a step's loss."""

    def begin(self, device: torch.device) -> None:
        """A step, or an evaluation, begins."""
        self.totals = torch.zeros(_SUMS, dtype=torch.float64, device=device)

    def look_at(
        self,
        log_probs_of: Callable[[Batch], Tensor],
        mismatched: Iterable[tuple[int | None, Batch]],
        groups: ReduceGroups,
    ) -> None:
        """What the step's loss needs to know of answers to prompts of other rows; collective."""
        raise NotImplementedError(f"{self.settings.name} does not look at other rows")

    def __call__(self, log_probs_T: Tensor, batch: Batch, *, scale: float) -> Tensor:
        """``scale`` times the summed loss of the batch's units; 0-d float32."""
        units = batch.units
        if units is None:
            assert not any(batch.tokens), "only a round of padding has no units"
            return log_probs_T.sum() * 0.0
        values = values_of(log_probs_T, units)
        losses, rewards = self.losses(values, units)
        self._count(values, rewards.detach(), units)
        return scale * (losses.sum() + self.of_tokens(log_probs_T, units))

    @abstractmethod
    def losses(self, values: Values, units: Units) -> tuple[Tensor, Tensor]:
        """The loss of each unit [U], and the reward of each document [D]."""

    def of_tokens(self, log_probs_T: Tensor, units: Units) -> Tensor | float:
        """What the loss has besides of single targets."""
        return 0.0

    @torch.no_grad()
    def _count(self, values: Values, rewards: Tensor, units: Units) -> None:
        good = is_good(units, len(rewards))
        bad = ~good
        columns = [good, bad, torch.zeros_like(rewards), rewards * good, rewards * bad]
        columns += [values.log_probs * good, values.log_probs * bad]
        if self.traits.rows == "pairs":
            columns[2][0::2] = (rewards[0::2] > rewards[1::2]).to(rewards.dtype)
        sums = (torch.stack([column.double() for column in columns]) / UNIT).round().sum(1)
        assert self.totals is not None, "begin comes first"
        self.totals += sums

    def figures(self, totals: list[float]) -> dict[str, float]:
        """What ``totals`` say, by names of the step event."""
        good, bad, right, *sums = (value * UNIT for value in totals)
        names = ("rewards_chosen", "rewards_rejected", "logps_chosen", "logps_rejected")
        counts = (good, bad, good, bad)
        means = {name: value / n for name, value, n in zip(names, sums, counts, strict=True) if n}
        if self.traits.rows == "pairs" and good:
            means["accuracy"] = right / good
        if good and bad:
            means["margin"] = means["rewards_chosen"] - means["rewards_rejected"]
        return means


def values_of(log_probs_T: Tensor, units: Units) -> Values:
    """The documents' log-probabilities. Sums are of segments: additions by index have no order on a GPU."""
    answers = log_probs_T if units.answers is None else log_probs_T * units.answers
    summed = torch.segment_reduce(answers, "sum", lengths=units.targets, unsafe=True)
    ratios = summed if units.reference is None else summed - units.reference
    return Values(summed, ratios, units.counts)


def is_good(units: Units, documents: int) -> Tensor:
    """bool[D]: better answers of pairs, or those labelled good."""
    if documents == len(units.grades):
        return units.grades > 0
    return torch.arange(documents, device=units.grades.device) % 2 == 0


def sides(values: Tensor) -> Sides:
    """Of pairs, whose documents are in turn better and worse."""
    return Sides(values[0::2], values[1::2])


def make_objective(settings: Settings | None, *, apart: str | None = None) -> Objective | None:
    """The objective that a run file names. ``apart``: why the model's documents must not share a row.

    Raises:
        UsageError: it cannot be loaded, or not be used with this model.
    """
    if settings is None:
        return None
    if apart is not None:
        text = f"training.objective is not possible: the answers of a pair share a row, and {apart}"
        raise UsageError(text, hint="another model")
    import importlib

    module, _, name = settings.traits.factory.partition(":")
    try:
        made: Objective = getattr(importlib.import_module(module), name)(settings)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"objective {settings.name!r} cannot be loaded: {error}") from error
    return made
