"""NCCL's own report of a job (``ncclras -v``, or what answers on port 28028), NCCL 2.24 and later.

Ranks are numbered as in the communicator, which is the rank of the run only for a communicator of all ranks; the
process and its host are certain. Counts may differ by little on a healthy job: they only support other evidence.
Source of the form: NCCL user guide, "RAS", read 2026-11.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from muster.core.typed_json import Record, Unreadable

_SECTION = re.compile(r"^(?:#(\d+-\d+) \([0-9a-f]+\)\s+)?(INCOMPLETE|DEAD|MISMATCH|[A-Z]{4,})\s*$")
_COUNT = re.compile(r"^\s+(?:\d+ ranks?|Rank \d+) (?:has|have) launched up to operation (\d+)")
_PROCESS = re.compile(r"^\s+Process (\d+) on node (\S+) managing GPUs? ([\d,-]+)")
_RANK = re.compile(r"^\s+Rank (\d+)\b.*?-- GPU (\S+) managed by process (\d+) on node (\S+)")


@dataclass(frozen=True, kw_only=True)
class RasRank(Record):
    """A process that the report names."""

    pid: int
    node: str
    gpu: str = ""
    rank: int | None = None
    """In its communicator; None: the report names only the process."""
    communicator: str = ""
    launched: int | None = None
    """The last operation that it has launched; None: the report says nothing of it."""


@dataclass(frozen=True, kw_only=True)
class Ras(Record):
    silent: tuple[RasRank, ...] = ()
    """Processes that do not answer."""
    behind: tuple[RasRank, ...] = ()
    """Ranks that launched less than others of their communicator."""
    complete: bool = True
    """The report has its end; one that was cut may lack some ranks."""


def parse(captured: str) -> Ras:
    """The report.

    Raises:
        Unreadable: it is none.
    """
    if "Job summary" not in captured and "Communicators..." not in captured:
        raise Unreadable("no report of NCCL's RAS: it has no job summary")
    silent: dict[tuple[str, int], RasRank] = {}
    behind: dict[tuple[str, int], RasRank] = {}
    for kind, communicator, lines in _sections(captured):
        if kind in ("INCOMPLETE", "DEAD"):
            for one in _named(lines, communicator):
                if one.rank is not None or (one.node, one.pid) not in silent:
                    silent[one.node, one.pid] = one
        elif kind == "MISMATCH":
            furthest = max((int(found[1]) for line in lines if (found := _COUNT.match(line))), default=0)
            named = _named(lines, communicator)
            behind |= {(one.node, one.pid): one for one in named if (one.launched or furthest) < furthest}
    complete = bool(re.search(r"^Warnings\s*$", captured, re.MULTILINE))
    return Ras(silent=tuple(silent.values()), behind=tuple(behind.values()), complete=complete)


def _sections(captured: str) -> Iterator[tuple[str, str, list[str]]]:
    """(what is wrong, with which communicator, lines); later versions count each kind of operation by itself."""
    kind, communicator = "", ""
    lines: list[str] = []
    for line in captured.splitlines():
        found = _SECTION.match(line)
        if found or "operation counts" in line:
            yield kind, communicator, lines
            lines = []
        if found:
            kind, communicator = found[2], f"#{found[1]}" if found[1] else ""
        else:
            lines.append(line)
    yield kind, communicator, lines


def _named(lines: list[str], communicator: str) -> Iterator[RasRank]:
    launched: int | None = None
    for line in lines:
        if found := _COUNT.match(line):
            launched = int(found[1])
        if found := _PROCESS.match(line):
            yield RasRank(pid=int(found[1]), node=found[2], gpu=found[3])
        elif found := _RANK.match(line):
            yield RasRank(
                rank=int(found[1]), gpu=found[2], pid=int(found[3]), node=found[4], communicator=communicator,
                launched=launched,
            )  # fmt: skip
