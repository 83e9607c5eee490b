"""The supervisor's own events: into its log, to the run's home, to the limits, and to whoever looks on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from muster.core.event_log import CLOSE_PATIENCE_S, EventLog
from muster.core.events import Event
from muster.core.typed_json import JsonObject
from muster.supervise.process.home_sync import SupervisorHome
from muster.supervise.process.limits import LimitsTimer


@dataclass(kw_only=True)
class Journal:
    """Of one term. A disk that takes nothing for a while stops nobody."""

    log: EventLog
    home: SupervisorHome
    limits: LimitsTimer
    attempt: Callable[[], int]
    """The run's newest."""
    on_event: Callable[[Event], None] | None
    """Must not block: the loop calls it."""
    notes: deque[str] = field(default_factory=deque)
    """Messages for people from other threads and signal handlers (``deque.append``), logged by the loop (``tend``)."""
    _trouble: str | None = None
    """Why events could not be written."""

    def append(
        self,
        kind: str,
        detail: JsonObject,
        *,
        host: str | None = None,
        rank: int | None = None,
        step: int | None = None,
        phase: str | None = None,
    ) -> None:
        """Log one event of this moment and pass it on. Never raises for disk errors."""
        event = self.log.append(
            kind, detail=detail, attempt=self.attempt(), host=host, rank=rank, step=step, phase=phase
        )
        self.limits.add_now(event)
        self.show(event)
        if kind == "host.allocated" and len(self.limits.guard.unpriced) == 1:
            name = self.limits.guard.unpriced[0]
            self.say(f"limits.max_usd cannot be kept: the price of {name} is unknown (set resources.usd_per_host_hour)")

    def show(self, event: Event) -> None:
        """Pass on an event that is logged here or on its host."""
        self.home.add(event)
        if self.on_event is not None:
            self.on_event(event)

    def say(self, text: str) -> None:
        """Log a message for people."""
        self.append("run.message", {"text": text})

    def tend(self) -> None:
        """Log the notes; try again what the disk did not take, and say so once it has."""
        while self.notes:
            self.say(self.notes.popleft())
        if self.log.trouble is None:
            return
        self._trouble = self._trouble or self.log.trouble
        if self.log.tend():
            text = f"the event log could not be written for a while ({self._trouble}); it is complete again"
            self._trouble = None
            self.say(text)

    def close(self) -> None:
        """The end of this term: how the run ended is told by the log alone, so a full disk is waited for."""
        self.log.close(patience_s=CLOSE_PATIENCE_S)
