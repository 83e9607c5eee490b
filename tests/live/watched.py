"""What live tests see of a run: its events, read as they are written, and what follows from them."""

from __future__ import annotations

from pathlib import Path

from muster.core.event_log import EventReader
from muster.core.events import Event


class Watched:
    """A run's folder, looked at.

    Tests look up to a hundred times a second, beside the run that they wait for: no line is parsed twice.
    """

    def __init__(self, directory: Path) -> None:
        self.dir = Path(directory)
        self._reader = EventReader(self.dir / "events")
        self._events: list[tuple[int, str, int, Event]] = []

    def events(self, kind: str | None = None) -> list[Event]:
        """By wall time."""
        new = list(self._reader.read())
        for name, event in new:
            self._events.append((event.wall_ns, name, event.seq, event))
        if new:
            self._events.sort(key=lambda item: item[:3])
        return [event for *_, event in self._events if kind is None or event.kind == kind]

    def step(self) -> int:
        return max((event.step or 0 for event in self.events("step")), default=0)

    def losses(self) -> dict[int, str]:
        """Step -> loss as hex, the last word on each step."""
        return {event.step: float(event.detail["loss"]).hex() for event in self.events("step") if event.step}

    def ranks(self) -> dict[int, tuple[int, str]]:
        """Rank -> (pid, host) of the newest attempt."""
        started = self.events("rank.started")
        newest = max((event.attempt for event in started), default=0)
        return {
            event.rank: (event.detail["pid"], event.host)
            for event in started
            if event.attempt == newest and event.rank is not None
        }

    def actions(self) -> list[str]:
        return [event.detail["action"] for event in self.events("incident.decided")]

    def recoveries(self) -> list[str]:
        """What was decided, but for what was ignored: a rank that a busy machine makes late is an incident, too."""
        return [action for action in self.actions() if action != "ignore"]

    def troubles(self) -> list[Event]:
        """Incidents, but for such a rank's."""
        return [event for event in self.events("incident.detected") if event.detail["incident"] != "straggler"]

    def spares(self) -> set[str]:
        """Hosts that were ever held as spares."""
        return {event.host for event in self.events("phase.changed") if event.phase == "spare"}
