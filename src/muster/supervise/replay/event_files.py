"""What a run's event files hold, for the supervisor that takes over."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from muster.core import event_log
from muster.core.events import Event


@dataclass
class EventReplay:
    """Read what is there before the lease is taken (weeks of events take longer than a lease lasts), and afterwards
    what its former holder still wrote meanwhile."""

    directory: Path
    _files: dict[str, list[Event]] = field(default_factory=dict)

    def read_new_events(self) -> None:
        """Read what the files hold beyond what was read before."""
        known = {name: len(events) for name, events in self._files.items()}
        for name, event in event_log.read(self.directory, after=known):
            self._files.setdefault(name, []).append(event)

    def in_order(self) -> list[Event]:
        """All of it, with wall times by a clock that is never stepped."""
        return event_log.on_one_clock(self._files)
