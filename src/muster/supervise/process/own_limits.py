"""The supervisor's own resource limits: lowered ones are put back, and said where that is not allowed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from muster.core import processes

#: What cannot be put back is said again so often.
AGAIN_S = 60.0


@dataclass
class OwnLimits:
    """As they were when this was made. ``keep`` may be called from any thread, as ``say``."""

    say: Callable[[str], None]
    now_s: Callable[[], float] = time.monotonic
    _before: Mapping[int, tuple[int, int]] = field(default_factory=processes.limits)
    _said: str = ""
    _said_s: float = 0.0

    def keep(self, run: str) -> None:
        """Raise what somebody lowered (``prlimit``): without descriptors no host connects and none is started again."""
        low = processes.restore_limits(self._before)
        if low and (low != self._said or self.now_s() - self._said_s >= AGAIN_S):
            self._said_s = self.now_s()
            self.say(
                f"{low}, and this process may not raise it: hosts may be unable to connect or to be started again "
                f"until root does (prlimit --pid); muster down {run}, then muster recover {run} starts everything anew"
            )
        self._said = low
