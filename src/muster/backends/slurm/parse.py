"""The output of Slurm's commands as values. Pure, and robust against any content of a field.

Requested with separators of our own (ASCII record and unit separator), because job names, comments and reasons may
contain blanks, bars and line breaks. Not ``--json``: its structure has changed with nearly every release since 21.08,
it needs a plug-in that many builds lack, and contains nothing more that is used here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

RECORD, UNIT = "\x1e", "\x1f"

#: Job states that are final; all others (pending, running, completing, requeued, suspended...) are not.
ENDED = frozenset(
    {
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
        "PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT",
    }
)  # fmt: skip
#: Node states in which a job may run on the node, now or later.
USABLE = frozenset({"IDLE", "ALLOCATED", "ALLOC", "MIXED", "MIX", "COMPLETING", "COMP", "PLANNED", "PLND"})
#: Flags behind a node's state: ``*`` does not answer, ``~`` powered down, ``#`` powering up, ``!`` ``%`` powering down,
#: ``$`` reserved for maintenance, ``@`` ``^`` reboots, ``-`` planned, ``+`` several.
_FLAGS = "*~#!%$@^-+"


def format_of(fields: Sequence[str]) -> str:
    """The ``-o`` argument for output that ``records`` reads."""
    return RECORD + UNIT.join(fields)


def records(text: str, fields: Sequence[str]) -> Iterator[dict[str, str]]:
    """A row per record, with ``fields`` as keys; records with another number of fields are skipped."""
    for piece in text.split(RECORD)[1:]:
        values = piece.removesuffix("\n").split(UNIT)
        if len(values) == len(fields):
            yield {field: value.strip() for field, value in zip(fields, values, strict=True)}


def pairs(text: str) -> Iterator[dict[str, str]]:
    """``Key=Value`` words of ``scontrol show ... --oneliner``, one object per line.

    A value ends at the next word that looks like ``Key=``: values may contain blanks.
    """
    for line in text.splitlines():
        marks = list(re.finditer(r"(?:^|(?<=\s))([A-Z][A-Za-z0-9:/_()]*)=", line))
        ends = [*(mark.start() for mark in marks[1:]), len(line)]
        if marks:
            yield {mark[1]: line[mark.end() : end].strip() for mark, end in zip(marks, ends, strict=True)}


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """GPUs of one type on a node; ``type`` is empty where the site names none."""

    type: str
    count: int


def gpus(gres: str) -> list[Gpus]:
    """``gpu:h100:8(S:0-1),nvme:1`` -> [h100 x 8]; a count may have a suffix (``2K``)."""
    result = []
    for word in re.split(r",(?![^(\[]*[)\]])", gres):
        match = re.fullmatch(r"gpu(?::([^:()]+))?:(\d+)(K?)(?:\(.*\))?", word.strip())
        if match:
            result.append(Gpus(type=match[1] or "", count=int(match[2]) * (1024 if match[3] else 1)))
    return result


def node_usable(text: str) -> bool:
    """Whether a job could run on a node in this state (``drained*``: a word and its flags), now or after others."""
    word = text.strip().rstrip(_FLAGS)
    return word.upper() in USABLE and not set("*$") & set(text.strip()[len(word) :])


def job_id(text: str) -> str | None:
    """``Submitted batch job 12`` and ``--parsable``'s ``12;cluster`` -> 12."""
    match = re.search(r"(?:^|\s)(\d+)(?:;\S+)?\s*$", text.strip())
    return match[1] if match else None


def accounting(text: str) -> list[Mapping[str, str]]:
    """``sacct --parsable2`` with its header; no field that is asked for may hold a bar or a line break."""
    names, *rows = [line.split("|") for line in text.splitlines()] or [[]]
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]
