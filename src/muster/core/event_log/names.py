"""What event files are called: ``WRITER.ATTEMPT.jsonl``, and ``WRITER.part2.ATTEMPT.jsonl`` for what its writer goes on
with where that file was found broken."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(
    r"(?P<writer>[A-Za-z0-9][A-Za-z0-9_.-]*?)(?:\.part(?P<part>[1-9]\d{0,5}))?\.(?P<attempt>\d{1,18})\.jsonl"
)


@dataclass(frozen=True, kw_only=True)
class LogName:
    """The name of one event file, taken apart."""

    writer: str
    attempt: int
    """Of a supervisor: its term."""
    part: int = 1

    @staticmethod
    def of(name: str) -> LogName | None:
        """None for what is no event file."""
        match = _NAME.fullmatch(name)
        if match is None or match["part"] == "1":
            return None
        return LogName(writer=match["writer"], attempt=int(match["attempt"]), part=int(match["part"] or 1))

    def __str__(self) -> str:
        part = f".part{self.part}" if self.part > 1 else ""
        return f"{self.writer}{part}.{self.attempt}.jsonl"


def parts_pattern(writer: str, attempt: int | None = None) -> re.Pattern[str]:
    """Matches the names of every part of ``writer``'s file of ``attempt``; None: of each attempt."""
    number = r"\d+" if attempt is None else str(attempt)
    return re.compile(rf"{re.escape(writer)}(?:\.part[1-9]\d*)?\.{number}\.jsonl\Z")


def event_files(directory: str | Path) -> list[Path]:
    """The event files of a folder, which need not exist, by name."""
    return sorted(path for path in Path(directory).glob("*.jsonl") if LogName.of(path.name) is not None)


def files_of(directory: str | Path, writer: str) -> list[Path]:
    """Those of one writer, in the order in which they were begun."""
    named = ((LogName.of(path.name), path) for path in event_files(directory))
    mine = [(name.attempt, name.part, path) for name, path in named if name is not None and name.writer == writer]
    return [path for _, _, path in sorted(mine)]
