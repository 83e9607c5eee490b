"""A run's output for those who follow it: files in its folder, how it ended, and lines for a collector of logs."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from muster.core import processes, resolved_file
from muster.core.errors import MusterError
from muster.core.event_detail import Detail
from muster.core.event_details.run import RunFinished, SupervisorStarted
from muster.core.event_log.names import LogName, files_of
from muster.core.events import Event
from muster.core.typed_json import at, parse_object, text
from muster.core.types import LogChunk

_Detail = TypeVar("_Detail", bound=Detail)
#: Bytes of a log read at once.
CHUNK_BYTES = 1 << 20


def chunks(run_dir: Path, after: Mapping[str, int]) -> Iterator[LogChunk]:
    """What each file in the run's ``logs`` holds beyond ``after``; a half character waits for its rest."""
    for path in sorted(run_dir.glob("logs/*.log")):
        position = after.get(path.stem, 0)
        while chunk := _chunk(path, position):
            position = chunk.next_offset
            yield chunk


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a run ended, by its own log."""

    outcome: str
    exit_code: int
    reason: str
    wall_ns: int
    submission: int | None = None
    """Of its supervisor; None: an older version did not write it."""

    def ends(self, submission: int, submitted_wall_ns: int) -> bool:
        """Whether it is the end of this submission: by its number, which no clock that was set changes."""
        return self.wall_ns >= submitted_wall_ns if self.submission is None else self.submission >= submission


def verdict(run_dir: Path, *, since_wall_ns: int = 0) -> Verdict | None:
    """The ``run.finished`` of the newest supervisor; it is near the end of its file. A line that is damaged, or no
    event, is passed over."""
    files = _newest_term(run_dir / "events")
    for path in reversed(files):
        for event, end in _details(path, RunFinished, from_end=True):
            numbers = (started.submission for _, started in _details(files[0], SupervisorStarted, from_end=False))
            number = next(numbers, None)
            result = Verdict(
                outcome=end.outcome,
                exit_code=end.exit_code,
                reason=end.reason,
                wall_ns=event.wall_ns,
                submission=int(number) if number and number.isdecimal() else None,
            )
            return result if result.wall_ns >= since_wall_ns else None
    return None


def _newest_term(events: Path) -> list[Path]:
    """The files of the newest supervisor, the first part first."""
    files = files_of(events, "supervisor")
    terms = {path: named.attempt for path in files if (named := LogName.of(path.name)) is not None}
    return [path for path in files if terms[path] == max(terms.values())]


def _details(path: Path, cls: type[_Detail], *, from_end: bool) -> Iterator[tuple[Event, _Detail]]:
    """The events of one kind in the first or last 64 KiB of a file, as far as they can be read."""
    with contextlib.suppress(OSError), processes.open_plain(path) as file:
        if from_end:
            file.seek(max(0, os.fstat(file.fileno()).st_size - (1 << 16)))
        lines = file.read(1 << 16).split(b"\n")
        for line in reversed(lines) if from_end else lines:
            if f'"{cls.kind}"'.encode() in line:
                with contextlib.suppress(ValueError, MusterError):
                    event = Event.from_json(parse_object(line))
                    if event.kind == cls.kind:
                        yield event, event.read(cls)


def _chunk(path: Path, position: int) -> LogChunk | None:
    try:
        with processes.open_plain(path) as file:
            if position > os.fstat(file.fileno()).st_size:
                position = 0  # replaced by a new file
            file.seek(position)
            data = file.read(CHUNK_BYTES)
    except OSError:
        return None
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    text = decoder.decode(data)
    waiting = len(decoder.getstate()[0])
    if not text:
        return None
    return LogChunk(task=path.stem, text=text, next_offset=position + len(data) - waiting)


#: How a line of ``json_line`` begins.
JSON_BEGINS = '{"severity":"'
#: The field whose members Cloud Logging takes for labels of the entry (docs/structured-logging).
LABELS = "logging.googleapis.com/labels"


def json_line(message: str, severity: str, *, run: str, task: str = "") -> str:
    """One line of output as Cloud Logging reads it: grouped by run, by task, and a rank's by its rank."""
    labels = {"muster_run": run}
    if task:
        labels["muster_task"] = task
    if rank := re.match(r"rank-(\d+)\.", task):
        labels["muster_rank"] = rank[1]
    found = {"severity": severity, "message": message, LABELS: labels}
    return json.dumps(found, ensure_ascii=False, separators=(",", ":"))


def of_json_line(line: str) -> tuple[str, str] | None:
    """(task or nothing, message) of a line of ``json_line``; None: it is none."""
    try:
        found = parse_object(line)
    except ValueError:
        return None
    return (text(found, LABELS, "muster_task"), text(found, "message")) if LABELS in found else None


def json_logs_of(run_dir: Path) -> str:
    """The run's id where its file asks for JSON lines (``output.json_logs``); else empty."""
    try:
        asked = at(parse_object(resolved_file.read(run_dir)), "output", "json_logs") is True
        return processes.read_plain(run_dir / "run_id", most=1 << 10).decode().strip() if asked else ""
    except (OSError, ValueError):
        return ""
