"""One event file as the ledger reads it: its steps, which may be millions, as columns; all other events as they are."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from muster.core.event_details import training
from muster.core.events import Event
from muster.core.typed_json import INT64_MAX

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]
#: A piece of a column in as few bytes as its values need: what to add to every value; one value, or all of them.
_Packed: TypeAlias = tuple[int, Ints | Floats | NDArray[np.unsignedinteger]]
_Numbers = TypeVar("_Numbers", Ints, Floats)

#: An integer that its event does not have. (A number that it does not have is NaN: JSON has no other use for that.)
UNKNOWN = -INT64_MAX - 1
PLACED = ("seq", "attempt", "step", "mono_ns", "wall_ns")
COUNTS = (
    "step_ns", "tokens", "supervised_tokens", "padding_tokens", "data_wait_ns", "stall_ns", "memory_bytes",
    "snapshot_step", "peer_step", "comm_ns", "host_gap_ns", "compute_ns",
)  # fmt: skip
#: Of preferences, in a step and in an evaluation.
PREFERENCES = ("accuracy", "margin", "rewards_chosen", "rewards_rejected")
NUMBERS = ("loss", "grad_norm", "mfu", "expert_load_max", "expert_idle_share", *PREFERENCES)
_RECORD = struct.Struct(f"<{len(PLACED) + len(COUNTS)}q{len(NUMBERS)}d")
_DTYPE = np.dtype([(name, "<i8") for name in (*PLACED, *COUNTS)] + [(name, "<f8") for name in NUMBERS])
_BLOCK = 1 << 15


def _packed(values: Ints | Floats) -> _Packed:
    least, most = values.min(), values.max()
    if least == most or np.isnan(values).all():
        return 0, values[:1].copy()
    if values.dtype.kind == "i" and int(most) - int(least) < 1 << 32:
        return int(least), (values - least).astype(np.min_scalar_type(int(most) - int(least)))
    return 0, values.copy()


@dataclass
class StepColumns:
    """Steps in the order in which they were written. A column is made when it is asked for."""

    _blocks: list[tuple[int, dict[str, _Packed]]] = field(default_factory=list)
    _pending: bytearray = field(default_factory=bytearray)
    _packed: int = 0

    def __len__(self) -> int:
        return self._packed + len(self._pending) // _RECORD.size

    def append(self, event: Event) -> None:
        """Raises MusterError where its detail is none of a step's."""
        detail = event.detail
        places = (event.seq, event.attempt, event.step, event.mono_ns, event.wall_ns)
        try:
            counts = [UNKNOWN if (value := detail.get(name)) is None else value for name in COUNTS]
            numbers = [np.nan if (value := detail.get(name)) is None else value for name in NUMBERS]
            self._pending += _RECORD.pack(*places, *counts, *numbers)
        except (struct.error, OverflowError):
            event.read(training.Step)  # says what is wrong, where it is no number
            self._pending += _RECORD.pack(*map(_within, (*places, *counts)), *numbers)  # type: ignore[arg-type]
        if len(self._pending) >= _BLOCK * _RECORD.size:
            self.pack()

    def pack(self) -> None:
        """Needs fewer bytes from here on."""
        if self._pending:
            rows = np.frombuffer(bytes(self._pending), _DTYPE)
            self._blocks.append((len(rows), {name: _packed(rows[name]) for name in _DTYPE.names or ()}))
            self._packed += len(rows)
            self._pending = bytearray()

    def extend(self, others: StepColumns) -> None:
        """Those of ``others`` after these."""
        self.pack()
        others.pack()
        self._blocks += others._blocks
        self._packed += others._packed

    def ints(self, name: str) -> Ints:
        """``UNKNOWN`` where an event has none."""
        return self._column(name, np.empty(len(self), np.int64))

    def floats(self, name: str) -> Floats:
        """NaN where an event has none."""
        return self._column(name, np.empty(len(self), np.float64))

    def _column(self, name: str, into: _Numbers) -> _Numbers:
        self.pack()
        at = 0
        for steps, columns in self._blocks:
            base, values = columns[name]
            np.add(values, np.int64(base), out=into[at : at + steps])
            at += steps
        return into


def known(values: Floats) -> list[float | None]:
    return [None if value != value else value for value in values.tolist()]  # NaN does not equal itself


def _within(value: int) -> int:
    """A damaged last line may name any number."""
    return max(UNKNOWN, min(value, INT64_MAX))


@dataclass
class FileLog:
    events: list[Event] = field(default_factory=list)
    """All but the steps of rank 0, of which it has the first of each attempt."""
    steps: StepColumns = field(default_factory=StepColumns)
    """Rank 0's."""

    @staticmethod
    def of(events: Iterable[Event]) -> FileLog:
        """Raises MusterError where a step's detail is none of a step's."""
        result, known = FileLog(), set()
        for event in events:
            rank = event.attempt, event.host, event.rank
            if event.kind == training.Step.kind and event.step is not None and event.rank in (0, None):
                result.steps.append(event)
                if rank in known:
                    continue
                known.add(rank)
            result.events.append(event)
        return result
