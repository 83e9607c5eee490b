"""Loss, tokens and speed of a run so far: a fold of its events that stays small over weeks."""

from __future__ import annotations

import statistics
from array import array
from collections import deque
from dataclasses import dataclass, field

from muster.core.event_details.attempts import AttemptStarted
from muster.core.event_details.checkpoints import CheckpointRestored
from muster.core.event_details.incidents import IncidentDetected
from muster.core.event_details.training import Step
from muster.core.events import Event

#: Speed is the median of so many steps: enough to pass over a slow one, few enough to follow a change.
RECENT = 256


@dataclass
class Figures:
    """Feed it every event, in order. A step that is taken again after a recovery counts once, as last taken."""

    loss: float | None = None
    """Of the last step that has one."""
    incidents: int = 0
    _steps: array[int] = field(default_factory=lambda: array("q"))
    """Numbers of the steps that count, rising."""
    _tokens: array[int] = field(default_factory=lambda: array("q"))
    """Tokens up to and with each."""
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _fresh: bool = True
    """No step of the attempt yet: its first one pays for the start."""

    @property
    def tokens(self) -> int:
        """Padding excluded."""
        return self._tokens[-1] if self._tokens else 0

    @property
    def tokens_per_s(self) -> float | None:
        """None: no attempt has taken two steps."""
        return statistics.median(self._rates) if self._rates else None

    def add(self, event: Event) -> None:
        """Take one event; kinds that do not matter are ignored."""
        if event.kind == Step.kind and event.step is not None:
            self._step(event.step, event.read(Step))
        elif event.kind == AttemptStarted.kind:
            self._fresh = True
        elif event.kind == CheckpointRestored.kind and event.step is not None:
            self._discard(event.step + 1)
        elif event.kind == IncidentDetected.kind:
            self.incidents += event.read(IncidentDetected).part_of is None

    def _step(self, number: int, detail: Step) -> None:
        self._discard(number)
        tokens = detail.tokens or 0
        self._tokens.append(self.tokens + tokens)
        self._steps.append(number)
        self.loss = detail.loss if detail.loss is not None else self.loss
        if tokens and detail.step_ns > 0 and not self._fresh:
            self._rates.append(tokens / detail.step_ns * 1e9)
        self._fresh = False

    def _discard(self, first: int) -> None:
        """Steps from ``first`` on were lost."""
        while self._steps and self._steps[-1] >= first:
            self._steps.pop()
            self._tokens.pop()
