"""The host's event file: one per attempt, written by the agent for itself and for its ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from muster.core.event_log import EventLog
from muster.protocol.to_supervisor import FlushCommitted
from muster.protocol.values import RankEvent
from muster.storage import uris
from muster.storage.home import Home


def committed_event(answer: FlushCommitted, *, directory: str, attempt: int) -> RankEvent:
    """What is logged of a checkpoint that was made of snapshots."""
    tier = "disk" if uris.is_local(directory) else "bucket"
    return RankEvent(
        kind="checkpoint.committed",
        attempt=attempt,
        mono_ns=time.monotonic_ns(),
        wall_ns=time.time_ns(),
        step=answer.step,
        detail={"tier": tier, "uri": answer.uri, "bytes": answer.bytes},
    )


def writer_of(home: Home, *, host: str, pod: str) -> str:
    """What names a host's files: where the home is no folder its pod, since what a lost pod could not bring home must
    not meet what its successor as ``host`` writes."""
    return host if home.is_folder else pod or host


class HostLog:
    """Appends to the file of the newest attempt."""

    def __init__(self, *, home: Home, run_id: str, host: str, pod: str = "") -> None:
        self._home, self._run_id, self._host = home, run_id, host
        self.writer = writer_of(home, host=host, pod=pod)
        self._log: EventLog | None = None
        self._attempt = -1
        self._behind: list[EventLog] = []
        """Of older attempts, whose last lines a full disk has not accepted yet."""

    def open(self, attempt: int) -> None:
        """From here on events go to ``attempt``'s file; one that exists (a predecessor's) is continued."""
        if self._attempt != attempt:
            if self._log is not None:
                self._behind.append(self._log)
            self._log = self._home.open_log(self._run_id, self.writer, attempt)
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

    def note(self, text: str) -> None:
        """An informational message."""
        self.write("run.message", {"text": text})

    def write_rank(self, event: RankEvent) -> None:
        """An event as a rank sent it, with the rank's own times. Raises ValueError where its kind has other details."""
        times = {"attempt": event.attempt, "mono_ns": event.mono_ns, "wall_ns": event.wall_ns}
        self.write(event.kind, event.detail, **times, rank=event.rank, step=event.step, phase=event.phase)
