"""Fitting the step-time model to steps that were measured: one constant, the arithmetic's efficiency.

Pure: what was measured is an argument. The rest of the model (traffic, communication, snapshots) stays as it is, so
that one minute on one GPU carries over to other layouts and sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from muster.catalog.offers import Option
from muster.core.errors import UsageError
from muster.plan.constants import Constants
from muster.plan.step_time import step_time
from muster.plan.workload import Setting, Workload

#: Steps at the beginning that are not used: compile, caches, first allocation.
WARMUP_STEPS = 3
LEAST, MOST = 0.001, 3.0


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A fitted constant, and how far the model was off before."""

    efficiency: float
    measured_step_s: float
    predicted_step_s: float
    """With the constants it began with."""
    steps: int
    spread: float
    """Robust standard deviation of the measured steps, over their median."""

    @property
    def off(self) -> float:
        """predicted / measured - 1, before fitting."""
        return self.predicted_step_s / self.measured_step_s - 1


def calibrate(
    work: Workload, setting: Setting, option: Option, num_nodes: int, steps_s: Sequence[float], constants: Constants
) -> Calibration:
    """Fit ``efficiency`` so that the model's step is the median of ``steps_s`` (in order, the first of the run first).

    Raises:
        UsageError: too few steps, or no efficiency explains them.
    """
    used = list(steps_s)[WARMUP_STEPS:]
    if len(used) < 3:
        raise UsageError(
            f"{len(steps_s)} steps are too few to calibrate with", hint=f"run at least {WARMUP_STEPS + 3} steps"
        )
    measured = median(used)

    def predicted(efficiency: float) -> float:
        return step_time(work, setting, option, num_nodes, replace(constants, efficiency=efficiency)).seconds

    low, high = LEAST, MOST
    if not predicted(high) <= measured <= predicted(low):
        raise UsageError(
            f"a step of {measured:.4g} s cannot be explained: without any arithmetic the model takes "
            f"{predicted(high):.4g} s",
            hint="the run is dominated by something else (data, host): calibrate with a larger model or batch",
        )
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if predicted(middle) > measured else (low, middle)
    spread = 1.4826 * median(abs(value - measured) for value in used) / measured
    return Calibration(
        efficiency=(low * high) ** 0.5,
        measured_step_s=measured,
        predicted_step_s=predicted(constants.efficiency),
        steps=len(used),
        spread=spread,
    )
