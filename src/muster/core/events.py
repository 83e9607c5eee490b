"""The event schema: the only record of a run, from which everything else is read.

An event is one JSON object on one line. ``KINDS`` (``core.event_details.kinds``) holds a class for every kind, with the
fields of its ``detail``; ``docs/reference/events.md`` is generated from it. Times are integer nanoseconds. ``mono_ns``
never steps back but compares only within one host and boot; ``wall_ns`` is for people; the supervisor logs each host's
``clock.offset`` so that a reader can put hosts on one axis.

One writer has one file per attempt (``events/<writer>.<attempt>.jsonl``) and one chain: ``prev`` is the
SHA-256 of the line before, so that an edited line is found and a torn last line is tolerated. Writers are
``client`` (the command that submitted), ``supervisor`` (its ``attempt`` in the file name is its term,
the generation of its lease) and each host's agent, which writes its ranks' events too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import is_
from typing import Any, TypeVar

from muster.core.errors import MusterError
from muster.core.event_detail import Detail
from muster.core.typed_json import INT64_MAX, Json, JsonObject, Unreadable

_Detail = TypeVar("_Detail", bound=Detail)

SCHEMA_VERSION = 1

#: What a rank (or host) spends its time on. ``phase`` events mark the moment it changes; the ledger turns
#: the gaps into host-seconds. The order is that of a healthy life.
PHASES = (
    "queue",  # wanted but not held: wall time, costs nothing
    "provision",  # bought, not yet running our agent
    "start",  # processes, imports, rendezvous
    "restore",  # weights or state are being read
    "warmup",  # compile and the first, slow step
    "train",
    "eval",
    "checkpoint",  # training waits for a save
    "detect",  # broken, not yet noticed (set by the ledger, from the incident)
    "restart",  # noticed, not yet stepping again
    "wait",  # for capacity
    "spare",  # held for an emergency
    "hold",  # kept warm after the user's own failure
    "idle",  # the tail: finished, not yet released
)


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened, once."""

    run_id: str
    attempt: int
    seq: int
    mono_ns: int
    wall_ns: int
    host: str
    kind: str
    rank: int | None = None
    phase: str | None = None
    step: int | None = None
    detail: JsonObject = field(default_factory=dict)
    _read: Detail | None = field(default=None, init=False, repr=False, compare=False)
    """``detail`` as ``read`` decoded it."""

    def read(self, cls: type[_Detail]) -> _Detail:
        """``detail`` as a value of its kind's class, decoded by the first call. Fields unknown here are skipped.

        Raises:
            MusterError: a field is missing or mistyped: not written by Muster, or edited.
        """
        if isinstance(self._read, cls):
            return self._read
        assert self.kind == cls.kind, f"{self.kind} read as {cls.kind}"
        try:
            result = cls.of(self.detail, skip_unknown=True)
        except Unreadable as error:
            where = f"event {self.seq} of {self.host}, attempt {self.attempt}"
            raise MusterError(f"{where}: {error}", hint="the log was edited, or another program wrote it") from error
        object.__setattr__(self, "_read", result)
        return result

    def to_json(self) -> dict[str, Json]:
        """The JSON object of the line; absent fields are left out."""
        result = {**vars(self), "detail": dict(self.detail) or None, "_read": None}
        return {name: value for name, value in result.items() if value is not None}

    @classmethod
    def from_json(cls, result: Mapping[str, Any]) -> Event:
        """Read one line's object. Raises ValueError on a missing, unknown or mistyped field."""
        given = {**result}
        given.pop("prev", None)
        if given.keys() >= _NEEDED and all(map(is_, map(type, given.values()), map(_TYPES.get, given))):
            event = object.__new__(cls)  # as ``cls(**given)`` makes it, which takes four times as long
            vars(event).update(_ABSENT, **given)
            numbers = (event.attempt, event.seq, event.mono_ns, event.wall_ns, event.rank or 0, event.step or 0)
            if min(numbers) >= -INT64_MAX and max(numbers) <= INT64_MAX:
                return event
        if unknown := given.keys() - cls.__dataclass_fields__.keys():
            raise ValueError(f"unknown event field {sorted(unknown)[0]!r}")
        try:
            event = cls(**given)
        except TypeError as error:
            raise ValueError(f"not an event: {error}") from error
        wrong = [name for name, fits in _FIELDS.items() if not fits(getattr(event, name))]
        if wrong:
            raise ValueError(f"the field {wrong[0]!r} of an event cannot be {str(given[wrong[0]])[:40]!r}")
        return event


def _is_int(value: object) -> bool:
    return type(value) is int and abs(value) <= INT64_MAX + 1


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_FIELDS: Mapping[str, Callable[[object], bool]] = {
    **dict.fromkeys(("attempt", "seq", "mono_ns", "wall_ns"), _is_int),
    **dict.fromkeys(("run_id", "host", "kind"), _is_text),
    **dict.fromkeys(("rank", "step"), lambda value: value is None or _is_int(value)),
    "phase": lambda value: value is None or isinstance(value, str),
    "detail": lambda value: isinstance(value, dict),
}


_NEEDED = {"run_id", "host", "kind", "attempt", "seq", "mono_ns", "wall_ns", "detail"}
_ABSENT = {"rank": None, "phase": None, "step": None, "_read": None}
_TYPES = {**dict.fromkeys(_FIELDS, int), **dict.fromkeys(("run_id", "host", "kind", "phase"), str), "detail": dict}


def encode(result: JsonObject) -> bytes:
    """Canonical bytes of one line, newline included: sorted keys, no spaces, finite numbers only."""
    return _ENCODER.encode(result).encode() + b"\n"


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
