"""What was asked for on Compute Engine, written into the run's home before it is sent: ``gce.json``.

Each request for hosts is a turn: its number makes the names of its machines and the id of its request, so the same turn
sent again asks for the same machines. Whoever was killed in between reads here what may be under way, and finds it by
the run's label. A journal that is closed lets nobody ask for anything any more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from muster.core.errors import ConflictError
from muster.core.protocols import Store
from muster.core.typed_json import Count, Int64, Name, Record, decode, encode
from muster.storage import uris

FILE = "gce.json"
ASKED, MADE, NOTHING = "asked", "made", "nothing"
TRIES = 20
"""Against other writers: the supervisor's machine, and a person's `submit` or `down`."""


@dataclass(frozen=True, kw_only=True)
class Turn(Record):
    """One request for hosts in one zone."""

    number: Count
    zone: Name
    count: Count
    replaces: bool
    """It stands for hosts that were lost: any number of them is welcome."""
    at_wall_s: Int64
    """When it was first written."""
    state: str = ASKED
    operation: str = ""
    """Of the bulk request, once it was answered."""
    reason: str = ""
    """Why it brought nothing, or does not go on."""


@dataclass(frozen=True, kw_only=True)
class GivenUp(Record):
    """A machine that is replaced although it runs."""

    name: Name
    at_wall_s: Int64
    reason: str


@dataclass(frozen=True, kw_only=True)
class Journal(Record):
    """Everything asked for in one submission of a run; a later one begins with the numbers after it."""

    submission: str
    supervisor_zone: str = ""
    turns: tuple[Turn, ...] = ()
    given_up: tuple[GivenUp, ...] = ()
    first_turn: Count = 1
    closed: bool = False

    @property
    def last(self) -> Turn | None:
        return self.turns[-1] if self.turns else None

    @property
    def next_number(self) -> int:
        return self.last.number + 1 if self.last is not None else self.first_turn

    def with_turn(self, turn: Turn) -> Journal:
        """``turn`` is the newest one's next form, or a new one."""
        kept = [one for one in self.turns if one.number != turn.number]
        return replace(self, turns=(*kept, turn))


@dataclass(frozen=True, kw_only=True)
class JournalFile:
    """Where it is, and who may change it: each change is a conditional write."""

    store: Store
    home: str

    @property
    def uri(self) -> str:
        return uris.join(self.home, FILE)

    def read(self) -> tuple[Journal | None, str | None]:
        """With its generation. Raises as the store; Unreadable."""
        try:
            found = self.store.get(self.uri)
        except FileNotFoundError:
            return None, None
        return decode(Journal, found.data), found.generation

    def write(self, journal: Journal, generation: str | None) -> str:
        """Raises ConflictError where somebody else has changed it."""
        data = encode(journal)
        if generation is None:
            return self.store.put_if_absent(self.uri, data)
        return self.store.put_if(self.uri, data, generation)

    def open_for(self, submission: str) -> Journal:
        """Begin the submission's journal, or go on with it; an older submission's ends with that.

        Raises:
            ConflictError: others keep writing it.
        """
        for _ in range(TRIES):
            before, generation = self.read()
            if before is not None and before.submission == submission:  # closed, too: no repeat undoes a `down`
                return before
            first = before.next_number if before is not None else 1
            fresh = Journal(submission=submission, first_turn=first)
            try:
                self.write(fresh, generation)
                return fresh
            except ConflictError:
                continue
        raise ConflictError(f"others keep writing {self.uri}", hint="one muster command at a time asks for a run")

    def close(self) -> None:
        """Nobody asks for anything any more. Raises as ``open_for``."""
        for _ in range(TRIES):
            before, generation = self.read()
            if before is None or before.closed:
                return
            try:
                self.write(replace(before, closed=True), generation)
                return
            except ConflictError:
                continue
        raise ConflictError(f"others keep writing {self.uri}", hint="the same command again")
