"""The host's event file: one per attempt, written by the agent for itself and for its ranks."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from muster.core.event_log import CLOSE_PATIENCE_S, EventLog
from muster.core.event_log.names import files_of, parts_pattern
from muster.core.typed_json import Json, parse_object
from muster.protocol.values import RankEvent
from muster.storage.home import Home

#: So many of a rank's newest lines in a predecessor's file hold what it may send again (``rank.sent_events.KEPT``), and
#: what the agent says of it. They may be anywhere: most ranks write little compared with the first one's steps.
NEWEST = 2048
#: Of a line of a rank, whose fields are in the order of their names (``core.event_log``). A file of weeks is read while
#: the ranks wait, and parsing each line would take ten times as long.
_OF_RANK = re.compile(rb'"prev":"[0-9a-f]*","rank":(\d+),')
_Written: TypeAlias = set[tuple[Json, Json, Json]]


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
        self._before: _Written = set()
        """What a predecessor wrote of the ranks of this attempt."""

    def open(self, attempt: int) -> None:
        """From here on events go to ``attempt``'s file; one that exists (a predecessor's) is continued."""
        if self._attempt != attempt:
            if self._log is not None:
                self._behind.append(self._log)
            self._log = self._home.open_log(self._run_id, self.writer, attempt)
            self._attempt = attempt
            self._before = _written(self._log.directory, self.writer, attempt)

    def write(self, kind: str, detail: Mapping[str, Any], **extra: Any) -> None:
        """One event of this host or, with ``rank``, of one of its ranks."""
        if self._log is None:
            self.open(0)
        assert self._log is not None
        self._log.append(kind, host=self._host, detail=detail, **extra)
        for log in [log for log in self._behind if log.tend()]:
            log.close()
            self._behind.remove(log)

    def close(self) -> None:
        """The end of this host: what a full disk has not accepted is waited for, at most ``CLOSE_PATIENCE_S``."""
        until = time.monotonic() + CLOSE_PATIENCE_S
        for log in (*self._behind, *([self._log] if self._log else [])):
            log.close(patience_s=until - time.monotonic())
            if log.trouble is not None:
                print(f"{log.path} lacks its last events: {log.trouble}", file=sys.stderr)

    def write_rank(self, event: RankEvent) -> bool:
        """An event as a rank sent it, with the rank's own times; False: a predecessor of this agent had written it.

        Raises:
            ValueError: its kind has other details.
        """
        if (event.rank, event.kind, event.mono_ns) in self._before:
            return False
        times = {"attempt": event.attempt, "mono_ns": event.mono_ns, "wall_ns": event.wall_ns}
        self.write(event.kind, event.detail, **times, rank=event.rank, step=event.step, phase=event.phase)
        return True


def _written(directory: Path, writer: str, attempt: int) -> _Written:
    """(rank, kind, monotonic time) of the newest events of ranks."""
    lines: dict[bytes, deque[bytes]] = {}
    of_attempt = parts_pattern(writer, attempt)
    for path in files_of(directory, writer):
        if of_attempt.match(path.name) is None:
            continue
        with contextlib.suppress(OSError), open(path, "rb") as file:
            for line in file:
                if (of_rank := _OF_RANK.search(line)) is not None:
                    lines.setdefault(of_rank[1], deque(maxlen=NEWEST)).append(line)
    result: _Written = set()
    for line in itertools.chain.from_iterable(lines.values()):
        with contextlib.suppress(ValueError):
            found = parse_object(line)
            result.add((found.get("rank"), found.get("kind"), found.get("mono_ns")))
    return result
