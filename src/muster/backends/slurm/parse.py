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
#: Further ones for a job that names a reservation: the nodes of a reservation show these while it lasts.
RESERVED = frozenset({"RESERVED", "RESV", "MAINT"})
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


#: A type may be missing; ``no_consume`` (jobs share them) is none.
_GPUS = r"(?:gres/)?gpu(?::(?!no_consume\b)([^:=()]+))?(?::no_consume)?([:=])(\d{1,9})(K?)(?:\(.*\))?"


def gpus(gres: str) -> list[Gpus]:
    """``gpu:h100:8(S:0-1),nvme:1`` -> [h100 x 8]; a count may have a suffix (``2K``).

    Also with ``no_consume`` between type and count, and as TRES (``gres/gpu=8,gres/gpu:h100=8``), where the untyped one
    is the sum of the typed ones.
    """
    found = []
    for word in re.split(r",(?![^(\[]*[)\]])", gres):
        match = re.fullmatch(_GPUS, word.strip())
        if match:
            found.append((match[2], Gpus(type=match[1] or "", count=int(match[3]) * (1024 if match[4] else 1))))
    typed = any(sign == "=" and one.type for sign, one in found)
    return [one for sign, one in found if one.type or sign == ":" or not typed]


def node_usable(text: str, *, reservation: bool = False) -> bool:
    """Whether a job could run on a node in this state (``drained*``: a word and its flags), now or after others.

    ``reservation``: the job names one. Whether the node belongs to it is Slurm's to say.
    """
    word = text.strip().rstrip(_FLAGS)
    flags = set(text.strip()[len(word) :])
    if reservation:
        return word.upper() in USABLE | RESERVED and "*" not in flags
    return word.upper() in USABLE and not flags & {"*", "$"}


def job_id(text: str) -> str | None:
    """``Submitted batch job 12`` and ``--parsable``'s ``12;cluster`` -> 12."""
    match = re.search(r"(?:^|\s)(\d+)(?:;\S+)?\s*$", text.strip())
    return match[1] if match else None


def accounting(text: str) -> list[Mapping[str, str]]:
    """``sacct --parsable2`` with its header; no field that is asked for may hold a bar or a line break."""
    names, *rows = [line.split("|") for line in text.splitlines()] or [[]]
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]
