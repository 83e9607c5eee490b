"""Captured files, each recognised by its content, not by its name: evidence of a hang, rank by rank.

A rank's number stands after the word (``rank-3.stack``, ``rank3/trace.json``); else it is the last short number in the
file's name (``_dump_12.json``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from muster.core.typed_json import Unreadable
from muster.health.hang import flight_recorder, process_state, ras, stacks
from muster.health.hang.evidence import Evidence, RankEvidence

_STAT = re.compile(rb"^\d+ \(.*\) [A-Za-z] -?\d+ ")
_STATUS = re.compile(rb"^Name:\t.*\n(?:.*\n)*?State:\t")
_STACK = re.compile(rb'"frames"|^Thread (?:0x)?\w+ \(|\(most recent call first\)', re.MULTILINE)


@dataclass
class _Found:
    ranks: dict[int, RankEvidence] = field(default_factory=dict)
    ras: ras.Ras | None = None
    missing: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)


def evidence_of(files: Iterable[tuple[str, bytes]]) -> Evidence:
    """From (name, content) of files; what is cut or of no known form is named under ``missing``, never guessed."""
    found = _Found()
    for name, content in files:
        try:
            _add(found, name, content.removeprefix(b"\xef\xbb\xbf"))
        except ValueError as error:  # Unreadable; a number of thousands of digits
            found.missing.append(f"{name}: {error}")
    if found.foreign:
        shown = ", ".join(found.foreign[:5]) + (", ..." if len(found.foreign) > 5 else "")
        found.missing.append(f"of no known form: {shown}")
    ranks = tuple(found.ranks[rank] for rank in sorted(found.ranks))
    return Evidence(ranks=ranks, ras=found.ras, missing=tuple(found.missing))


def _add(found: _Found, name: str, content: bytes) -> None:
    if content[:1] == b"\x80" or (content.lstrip()[:1] == b"{" and re.search(rb'"(entries|pg_status)"', content)):
        _put(found, name, recorder=flight_recorder.parse(content))
    elif _STACK.search(content):
        _put(found, name, threads=stacks.parse(content.decode(errors="replace")))
    elif _STAT.match(content) or _STATUS.match(content):
        parse = process_state.parse_stat if _STAT.match(content) else process_state.parse_status
        _put(found, name, process=parse(content.decode(errors="replace")))
    elif b"Job summary" in content and b"Communicators" in content:
        found.ras = ras.parse(content.decode(errors="replace"))
        if not found.ras.complete:
            found.missing.append(f"{name}: the report of NCCL's RAS is cut")
    else:
        found.foreign.append(name)


def _put(found: _Found, name: str, **part: object) -> None:
    folders, _, file = name.rpartition("/")
    numbers = re.findall(r"(?<![a-z])rank\D?(\d{1,6})(?!\d)", file, re.IGNORECASE)
    numbers = numbers or re.findall(r"(?:^|/)rank\D?(\d{1,6})(?=/|$)", folders, re.IGNORECASE)
    numbers = numbers or re.findall(r"(?<!\d)\d{1,6}(?!\d)", file)
    if not numbers:
        raise Unreadable("its rank is not known: the file's name has no number")
    rank = int(numbers[-1])
    before = found.ranks.get(rank, RankEvidence(rank=rank))
    if "recorder" in part and before.recorder is not None:
        raise Unreadable(f"another file is of rank {rank}, too: keep those of one moment")
    found.ranks[rank] = replace(before, **part)  # type: ignore[arg-type]
