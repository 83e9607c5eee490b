"""The host's event file: one per attempt, written by the agent for itself and for its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from muster.core.event_log import EventLog


class HostLog:
    """Appends to the file of the newest attempt."""

    def __init__(self, *, run_id: str, run_dir: Path, host: str) -> None:
        self._run_id, self._directory, self._host = run_id, run_dir / "events", host
        self._log: EventLog | None = None
        self._attempt = -1
        self._behind: list[EventLog] = []
        """Of older attempts, whose last lines a full disk has not accepted yet."""

    def open(self, attempt: int) -> None:
        """From here on events go to ``attempt``'s file; one that exists (a predecessor's) is continued."""
        if self._attempt != attempt:
            if self._log is not None:
                self._behind.append(self._log)
            self._log = EventLog(self._run_id, self._directory, self._host, attempt)
            self._attempt = attempt

    def write(self, kind: str, detail: Mapping[str, Any], **extra: Any) -> None:
        """One event of this host or, with ``rank``, of one of its ranks."""
        if self._log is None:
            self.open(0)
        assert self._log is not None
        self._log.append(kind, host=self._host, detail=detail, **extra)
        for log in [log for log in self._behind if log.tend()]:
            log.close()
            self._behind.remove(log)

    def write_rank(self, event: Mapping[str, Any]) -> None:
        """An event as a rank sent it, with the rank's own times."""
        required = {key: event[key] for key in ("attempt", "mono_ns", "wall_ns")}
        optional = {key: event.get(key) for key in ("rank", "step", "phase")}
        self.write(event["kind"], event.get("detail", {}), **required, **optional)
