"""What a run has asked of Google, written into its home before it is sent: ``requests.json``.

The number of a request makes the names of its machines, its id at the service, or the label of its job (``mark_of``),
so the same request sent again asks for the same. A process that was killed in between leaves here what may be under
way. A log that is closed lets no process ask for anything, and no host train.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from muster.core.errors import ConflictError
from muster.core.protocols import Store
from muster.core.typed_json import Count, Int64, Name, Record, decode, encode
from muster.storage import uris

FILE = "requests.json"
ASKED, MADE, NOTHING = "asked", "made", "nothing"
TRIES = 20
"""Against other writers: hosts that wake, the supervisor's machine, a person's `submit` or `down`."""


@dataclass(frozen=True, kw_only=True)
class Request(Record):
    """One request for hosts in one zone or region."""

    number: Count
    where: Name
    asked_s: float
    """When it was last sent, seconds since 1970."""
    count: Count = 0
    """Machines of a Compute Engine request."""
    replaces: bool = False
    """It replaces hosts that were lost: any number of them is welcome."""
    state: str = ASKED
    name: str = ""
    """What answers for it, once known: the custom job, or the operation of a bulk request."""
    left: bool = False
    """Its end was asked for, because the region kept it waiting."""
    reason: str = ""
    """Why it brought nothing, or does not go on."""
    owner: str = ""
    """Number of the custom job that trains, whose host woke first: a lost answer may make two jobs of one request."""
    owner_began_wall_ns: Int64 = 0
    """When that host woke: the job's time does not begin again with its containers."""

    @property
    def is_sent(self) -> bool:
        """It was answered, and not refused."""
        return bool(self.name) and self.state != NOTHING

    @property
    def is_lost(self) -> bool:
        """Its answer has not come: whether it was carried out is not known."""
        return not self.name and self.state != NOTHING


@dataclass(frozen=True, kw_only=True)
class GivenUp(Record):
    """A machine that is replaced although it runs."""

    name: Name
    at_s: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class RequestLog(Record):
    """Everything asked for in one submission of a run; a later one begins with the numbers after it."""

    run_id: str
    submission: Count
    files_sha256: str = ""
    """Of the run's files."""
    requests: tuple[Request, ...] = ()
    given_up: tuple[GivenUp, ...] = ()
    first_number: Count = 1
    supervisor_zone: str = ""
    """Where the supervisor's machine was asked for."""
    closed: bool = False

    @property
    def last(self) -> Request | None:
        return self.requests[-1] if self.requests else None

    @property
    def next_number(self) -> int:
        return self.last.number + 1 if self.last is not None else self.first_number

    @property
    def mark(self) -> str:
        """Of the newest request; empty: there is none."""
        return mark_of(self.run_id, self.submission, self.last.number) if self.last is not None else ""

    def with_request(self, request: Request) -> RequestLog:
        """``request`` is the newest one's next form, or a new one."""
        kept = tuple(one for one in self.requests if one.number != request.number)
        return replace(self, requests=(*kept, request))


def mark_of(run_id: str, submission: int, number: int) -> str:
    """The label by which what a request made is found, at a service that takes no names."""
    return hashlib.sha256(f"{run_id}/{submission}/{number}".encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class RequestLogFile:
    """The log in a run's home; each change is a conditional write."""

    store: Store
    home: str

    def read(self) -> tuple[RequestLog | None, str | None]:
        """With its generation. Raises as the store; Unreadable."""
        try:
            stored = self.store.get(self._uri)
        except FileNotFoundError:
            return None, None
        return decode(RequestLog, stored.data), stored.generation

    def write(self, log: RequestLog, generation: str | None) -> str:
        """Raises ConflictError where another process has changed it."""
        if generation is None:
            return self.store.put_if_absent(self._uri, encode(log))
        return self.store.put_if(self._uri, encode(log), generation)

    def begin(self, run_id: str, submission: int, files_sha256: str = "") -> RequestLog:
        """Begin the submission's log, or go on with it, closed or not: no repeat undoes a `down`. An older submission's
        ends with that. Raises as ``_change``."""

        def begun(before: RequestLog | None) -> RequestLog:
            if before is not None and before.submission == submission:
                return before
            first = before.next_number if before is not None else 1
            return RequestLog(run_id=run_id, submission=submission, files_sha256=files_sha256, first_number=first)

        log = self._change(begun)
        assert log is not None
        return log

    def close(self) -> RequestLog | None:
        """From now on nothing is asked for; the log as it is then. Raises as ``_change``."""
        return self._change(_closed)

    def claim(self, mark: str, job: str, now_wall_ns: int) -> Request | None:
        """The request under which the hosts of ``job`` work; the first one that wakes makes the job its owner. None:
        another job trains, or none does, and this one does nothing.

        Raises:
            ConflictError: others keep writing.
            MusterError: the home does not answer: ask again, and start nothing before it has.
        """

        def owned(log: RequestLog | None) -> RequestLog | None:
            last = _open_request(log, mark)
            if log is None or last is None or last.owner:
                return log
            return log.with_request(replace(last, owner=job, owner_began_wall_ns=now_wall_ns))

        last = _open_request(self._change(owned), mark)
        return last if last is not None and last.owner == job else None

    @property
    def _uri(self) -> str:
        return uris.join(self.home, FILE)

    def _change(self, edit: Callable[[RequestLog | None], RequestLog | None]) -> RequestLog | None:
        """Write what ``edit`` makes of the log, unless that is what is there; returns the log as it is then.

        Raises:
            ConflictError: others keep writing it.
        """
        for _ in range(TRIES):
            before, generation = self.read()
            after = edit(before)
            if after is None or after == before:
                return before
            try:
                self.write(after, generation)
                return after
            except ConflictError:
                continue  # another process was faster; or this write was made, and its answer lost
        raise ConflictError(f"others keep writing {self._uri}", hint="one muster command at a time asks for a run")


def _closed(log: RequestLog | None) -> RequestLog | None:
    return replace(log, closed=True) if log is not None else None


def _open_request(log: RequestLog | None, mark: str) -> Request | None:
    """The newest request, if it has that mark and the log is open."""
    return log.last if log is not None and not log.closed and log.mark == mark else None
