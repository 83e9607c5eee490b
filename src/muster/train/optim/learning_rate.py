"""Learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from muster.config.spec import Optimizer


def learning_rate(settings: Optimizer, *, step: int, total_steps: int) -> float:
    """Rate of the update that makes ``step`` (counted from 1).

    Rises in a straight line to ``settings.learning_rate`` at the last warmup step, then follows the schedule
    down to ``min_lr_fraction`` of it at ``total_steps`` and stays there.
    """
    warmup = settings.warmup_of(total_steps)
    if step <= warmup:
        return settings.learning_rate * step / warmup
    if settings.schedule == "constant":
        return settings.learning_rate
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    share = 1.0 - progress if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.learning_rate * (settings.min_lr_fraction + (1.0 - settings.min_lr_fraction) * share)
