"""How often a rank's in-memory snapshot is taken: the run file's number, or by what one costs."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from muster.core import intervals

#: Steps of an attempt before its first look at the cost: the first ones compile, and fault a ring's pages in.
FIRST_LOOK = 8
#: Snapshots and steps that a look takes the median of.
LOOK_AT = 5
#: A new interval must differ by this factor: measurements scatter.
WORTH = 1.5


@dataclass
class SnapshotPace:
    """Steps between the snapshots of one attempt, the same on every rank.

    ``auto``: every step at first, and always where a rank's state is small. After 8, 16, 32... steps each rank says
    what its own snapshots would allow (``core.intervals.snapshot_steps``), and the largest number of any rank counts.
    It travels with the small all-reduce that every step makes anyway (``StepConsensus``).
    """

    setting: int | Literal["auto"]
    """``checkpoint.snapshot_every_steps``."""
    bytes: int
    """Of this rank's snapshot."""
    clock: Callable[[], float] = time.monotonic
    mtbf_s: float = math.inf
    """Between failures, as far as is known when the attempt starts."""
    every: int = field(init=False)
    """What the ranks agreed on; 0: no snapshots."""
    _wanted: int = field(init=False)
    _look: int = FIRST_LOOK
    _settled: int = 0
    """Steps after which what a look found has become the ranks' number."""
    _said: int | None = None
    _steps: int = 0
    _ended_s: float | None = None
    _stalled_s: float = 0.0
    _step_s: deque[float] = field(default_factory=lambda: deque(maxlen=LOOK_AT))
    _stall_s: deque[float] = field(default_factory=lambda: deque(maxlen=LOOK_AT))
    """Of each snapshot, what it waited for the one before left out: that ends with the interval, this does not."""
    _takes_s: float = 0.0

    def __post_init__(self) -> None:
        self.every = self._wanted = 1 if self.setting == "auto" else self.setting

    def step_ended(self) -> None:
        """A step's update was applied."""
        now = self.clock()
        if self._ended_s is not None:
            self._step_s.append(now - self._ended_s - self._stalled_s)
        self._ended_s, self._stalled_s, self._steps = now, 0.0, self._steps + 1
        if self.setting == "auto" and self._steps >= self._look and self._stall_s:
            self._look *= 2
            self._settled = self._steps + 1
            best = intervals.snapshot_steps(
                median(self._stall_s), median(self._step_s),
                bytes_=self.bytes, takes_s=self._takes_s, mtbf_s=self.mtbf_s,
            )  # fmt: skip
            if not self.every / WORTH <= best <= self.every * WORTH:
                self._wanted = best

    def took(self, seconds: float, *, waited_s: float = 0.0, takes_s: float = 0.0) -> None:
        """A snapshot held the step up, ``waited_s`` of it until the one before counted, which took ``takes_s``."""
        self._stall_s.append(seconds - waited_s)
        self._takes_s = takes_s
        self._stalled_s += seconds

    def wants(self) -> int:
        """This rank's number, for the ranks' maximum."""
        return self._wanted

    def due(self, step: int, agreed: Callable[[], int]) -> bool:
        """Whether a snapshot of ``step`` is to be taken. ``agreed``: the ranks' maximum, as of this step."""
        if self.setting == "auto":
            self.every = agreed()
        return self.every > 0 and step % self.every == 0

    @property
    def _measures(self) -> bool:
        return self.setting == "auto" and self.bytes > intervals.SNAPSHOT_SMALL_BYTES

    def news(self) -> str | None:
        """``describe`` when the interval is known, and whenever it is another one; None: nothing new. Ask each step."""
        known = not self._measures or 0 < self._settled <= self._steps
        if not known or self.every in (0, self._said):
            return None
        self._said = self.every
        return self.describe()

    def describe(self) -> str:
        """The interval and its reason, for the run's log."""
        if self.setting != "auto":
            return f"{self._often()}, as checkpoint.snapshot_every_steps says"
        if not self._measures:
            size = f"{self.bytes / 1e6:.3g} MB"
            return f"{self._often()}: a rank's state is small ({size})"
        cost = ""
        if self._stall_s and self._step_s:
            stall_s, step_s = median(self._stall_s), median(self._step_s)
            cost = f"one takes {stall_s:.3g} s, {stall_s / step_s:.0%} of a step of {step_s:.3g} s"
            cost += f", and {self._takes_s:.3g} s until it counts; " if self._takes_s > step_s else "; "
        rule = f"checkpoint.snapshot_every_steps: auto takes about {intervals.SNAPSHOT_SHARE:.0%} of the time"
        return f"{self._often()}: {cost}{rule}"

    def _often(self) -> str:
        return "snapshots in memory every " + ("step" if self.every == 1 else f"{self.every} steps")
