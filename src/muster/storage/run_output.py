"""Files in a run's folder for those who follow it: the output of its processes, and how it ended."""

from __future__ import annotations

import codecs
import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from muster.core.typed_json import JsonObject, child, parse_object
from muster.core.types import LogChunk

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


def verdict(run_dir: Path, since_wall_ns: int) -> Verdict | None:
    """The ``run.finished`` since then; it is near the end of the newest supervisor's file."""
    files = sorted(run_dir.glob("events/supervisor.*.jsonl"), key=lambda path: int(path.name.split(".")[1]))
    for path in files[-1:]:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - (1 << 16)))
            lines = file.read().split(b"\n")
        for line in reversed(lines):
            if b'"run.finished"' in line:
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    found = _verdict(parse_object(line))
                    return found if found.wall_ns >= since_wall_ns else None
    return None


def _verdict(event: JsonObject) -> Verdict:
    detail = child(event, "detail")
    return Verdict(
        outcome=str(detail["outcome"]),
        exit_code=int(str(detail.get("exit_code", 1))),
        reason=str(detail.get("reason", "")),
        wall_ns=int(str(event["wall_ns"])),
    )


def _chunk(path: Path, position: int) -> LogChunk | None:
    try:
        with open(path, "rb") as file:
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
