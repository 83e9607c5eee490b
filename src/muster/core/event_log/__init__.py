"""Append-only, hash-chained event files: one writer, one chain.

A line is the event's JSON plus ``prev``, the SHA-256 of the line before it (the first one cites the run
id and the file's name, so that files cannot change places). An edited, dropped or reordered line breaks
the chain; a torn last line (a writer killed in mid-write) is dropped when the writer comes back.

A disk that takes nothing (full, an I/O error) stops no writer: its lines wait in memory, in their order, and go to the
disk as soon as it takes them. What is on it is a beginning of the chain at every moment, at worst with a torn end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from muster.core.event_log.chain import Verdict, genesis, head, heads, verify
from muster.core.event_log.order import merge_by_monotonic_clock
from muster.core.event_log.reader import Damage, EventReader, in_words
from muster.core.event_log.writer import CLOSE_PATIENCE_S, SEAL_TIMEOUT_S, EventLog, Sealer
from muster.core.events import Event

__all__ = [
    "CLOSE_PATIENCE_S",
    "SEAL_TIMEOUT_S",
    "Damage",
    "EventLog",
    "EventReader",
    "Sealer",
    "Verdict",
    "genesis",
    "head",
    "heads",
    "in_words",
    "merged",
    "read",
    "verify",
]


def read(directory: str | Path, *, on_damage: Callable[[Damage], None] | None = None) -> Iterator[tuple[str, Event]]:
    """``(file name, event)`` of every file, in each file's order: all that is whole (``EventReader``)."""
    return EventReader(Path(directory), on_damage).read()


def merged(directory: str | Path, *, on_damage: Callable[[Damage], None] | None = None) -> list[Event]:
    """All events of a run in the order in which they happened (see ``core.event_log.order``), each as it was written;
    what is damaged is left out.

    Good enough for showing; the ledger uses the logged clock offsets instead.
    """
    files: dict[str, list[Event]] = {}
    for name, event in read(directory, on_damage=on_damage):
        files.setdefault(name, []).append(event)
    return [event for _, _, event in merge_by_monotonic_clock(files)]
