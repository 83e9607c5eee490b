"""What a host reads of its run's home, and what it does there for a program that was killed."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from muster.backends.host.state import Lease, Looked
from muster.core.errors import ConflictError, MusterError
from muster.core.protocols import Store
from muster.core.typed_json import Unreadable, decode, encode
from muster.protocol.lease import LEASE_S, EndRecord, LeaseRecord, read_lease, write_lease
from muster.protocol.version import OtherVersion
from muster.storage import run_registry
from muster.storage.home import Home, open_home
from muster.storage.store import open_store

SUPERVISOR = "supervisor"
CATCH_UP_S = 600.0
"""How often a supervisor that stands by brings the events: a takeover after weeks then reads the last minutes."""


@dataclass(kw_only=True)
class RunState:
    """Of the run whose folder on this host is ``run_dir``, as part of ``job`` (a JobSet, a custom job's request)."""

    run_dir: Path
    job: str = ""
    store: Store = field(default_factory=lambda: open_store(timeout_s=5.0, patience_s=5.0))
    brings_events: bool = False
    """While another host holds the run, its events are brought here now and then (``catch_up``)."""
    _home: Home | None = field(default=None)
    _said: str = ""
    _caught_up: float | None = None
    """When it was last begun, by the monotonic clock."""
    _lease: tuple[int, float, bool] = (0, 0.0, False)
    """What it said of its end, since when, by the monotonic clock; whether it was renewed before this host's eyes."""
    _catching_up: threading.Thread | None = None

    @property
    def home(self) -> Home:
        self._home = self._home or open_home(self.run_dir)
        return self._home

    @property
    def says_how_it_ended(self) -> bool:
        """Whether a supervisor that ends the run leaves an ``end.json``: one that left none crashed."""
        try:
            return bool(self.job) and not self.home.is_folder
        except MusterError:
            return False

    def look(self, ended_pid: int | None) -> Looked:
        """Lease and end. A lease that a process of this host left, ``ended_pid``, is free: it cannot renew it."""
        try:
            record = self.current_lease()
        except (MusterError, OSError) as error:
            self._say(f"the run's home does not answer: {error}")
            return Looked(lease=Lease(kind="unknown"))
        left_s = self._left_s(record.expires_wall_ns) if record is not None else 0.0
        if record is not None and left_s > 0 and not is_of(record, ended_pid):
            if self.brings_events:
                self.catch_up()
            return Looked(lease=Lease(kind="held", left_s=left_s))
        try:
            return Looked(lease=Lease(kind="free"), end=self.ended())
        except (MusterError, OSError):
            return Looked(lease=Lease(kind="free"), end="unreadable")

    def _left_s(self, expires_wall_ns: int) -> float:
        """Until its holder is gone if it does not renew; 0 or less: it is. The holder's clock may differ by hours: once
        a renewal was seen, this host's monotonic clock alone counts."""
        seen, since_s, is_renewed = self._lease
        if expires_wall_ns != seen:
            since_s, is_renewed = time.monotonic(), seen > 0
            self._lease = (expires_wall_ns, since_s, is_renewed)
        left_s = LEASE_S - (time.monotonic() - since_s)
        return left_s if is_renewed and expires_wall_ns else min(left_s, (expires_wall_ns - time.time_ns()) / 1e9)

    def lease(self) -> LeaseRecord | None:
        """The same; None also where the home does not answer."""
        try:
            return self.current_lease()
        except (MusterError, OSError):
            return None

    def held_by(self) -> int | None:
        """The process of this pod that the lease names, alive or not; None: it names none of this pod's."""
        record = self.lease()
        return record.pid if record is not None and record.machine == socket.gethostname() else None

    def is_held_by(self, pid: int | None) -> bool:
        """Whether that process of this pod, if there is one, holds the run."""
        return pid is not None and self.held_by() == pid

    def current_lease(self) -> LeaseRecord | None:
        """The record, in force or not; None: there is none that can be read. Raises as the store."""
        found = self._stored_lease()
        return found[0] if found is not None else None

    def _stored_lease(self) -> tuple[LeaseRecord, str] | None:
        """With its generation."""
        try:
            stored = self.store.get(self.home.uri_of("lease.json"))
            return read_lease(stored.data, me="this host"), stored.generation
        except FileNotFoundError:
            return None
        except (Unreadable, OtherVersion) as error:
            self._say(f"the run's lease cannot be read: {error}")
            return None

    def vacate(self, term: int) -> bool:
        """Expire the lease of a holder that cannot be reached: its renewals fail from then on, wherever it runs. False:
        it was renewed, or taken, just now. Raises as the store."""
        found = self._stored_lease()
        if found is None or found[0].term != term:
            return False
        record = write_lease(replace(found[0], expires_wall_ns=0))
        try:
            self.store.put_if(self.home.uri_of("lease.json"), record, found[1])
        except (ConflictError, FileNotFoundError):
            return False
        return True

    def catch_up(self) -> None:
        """Bring the run's events to ``run_dir`` now and then, in a thread; what fails is tried again."""
        due = self._caught_up is None or time.monotonic() - self._caught_up >= CATCH_UP_S
        if not due or not self.says_how_it_ended or (self._catching_up is not None and self._catching_up.is_alive()):
            return

        def bring() -> None:
            with contextlib.suppress(Exception):  # it only saves time
                self.home.mirror(self.run_dir)

        self._caught_up = time.monotonic()
        self._catching_up = threading.Thread(target=bring, name="catch-up", daemon=True)
        self._catching_up.start()

    def ended(self) -> int | None:
        """The exit code with which this JobSet's supervisor ended the run; None: the run goes on, or one cannot know
        (only a home in a bucket says so)."""
        end = self._end()
        return end[0].exit_code if end is not None else None

    def _end(self) -> tuple[EndRecord, str] | None:
        """With its generation. Raises as the store."""
        if not self.says_how_it_ended:
            return None
        try:
            found = self.store.get(self.home.uri_of("end.json"))
            end = decode(EndRecord, found.data)
        except (FileNotFoundError, Unreadable):
            return None
        return (end, found.generation) if (end.job, end.submission) == (self.job, self._submission()) else None

    def withdraw_end(self, code: int) -> None:
        """The run was to end with ``code`` for this time alone: the same JobSet's next supervisor goes on."""
        with contextlib.suppress(MusterError, OSError):
            if self.ended() == code:
                self.store.delete(self.home.uri_of("end.json"))

    def end(self, code: int, reason: str) -> bool:
        """End the run as failed, where its supervisor could not say so itself. An end that is there stays. False: the
        home has none, and takes none."""
        try:
            if self.ended() is None:
                record = EndRecord(
                    job=self.job, submission=self._submission(), term=self._newest_term(), outcome="failed",
                    exit_code=code, reason=reason, wall_ns=time.time_ns(),
                )  # fmt: skip
                self.store.put(self.home.uri_of("end.json"), encode(record))
        except (MusterError, OSError) as error:
            self._say(f"the run's end cannot be written: {error}")
            return False
        return True

    def end_instead(self, before: int, code: int, reason: str) -> None:
        """The run that ended with ``before`` is over: say so with ``code``, for people and for the other pod."""
        with contextlib.suppress(MusterError, OSError):
            if (end := self._end()) is not None and end[0].exit_code == before:
                record = replace(end[0], outcome="stopped", exit_code=code, reason=reason, wall_ns=time.time_ns())
                self.store.put_if(self.home.uri_of("end.json"), encode(record), end[1])

    def ship(self, writer: str, timeout_s: float) -> None:
        """Bring home what a killed program left in ``run_dir``; where another one writes in its place, nothing."""
        if self.home.is_folder:
            return
        try:
            if writer == SUPERVISOR and (term := self._newest_term()):
                run_id = run_registry.existing_id(self.run_dir) or ""
                self.home.open_log(run_id, SUPERVISOR, term).close()
            self.home.start(writer).stop(timeout_s)
        except (MusterError, OSError) as error:
            self._say(f"the last events stay behind: {error}")

    def _newest_term(self) -> int:
        names = (path.name.split(".") for path in (self.run_dir / "events").glob(f"{SUPERVISOR}.*.jsonl"))
        return max((int(term) for _, term, *_ in names if term.isdecimal()), default=0)

    def _submission(self) -> str:
        with contextlib.suppress(OSError):
            return (self.run_dir / "submission").read_text().strip()
        return ""

    def _say(self, text: str) -> None:
        if text != self._said:
            print(text, file=sys.stderr, flush=True)
        self._said = text


def is_of(record: LeaseRecord, pid: int | None) -> bool:
    """Whether the lease names this process of this machine."""
    return (record.machine, record.pid) == (socket.gethostname(), pid)
