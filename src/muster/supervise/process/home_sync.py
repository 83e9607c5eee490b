"""The supervisor's part in a run's home: the lease, what earlier terms left, how the run is, and how it ended."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from muster.core.clock import SystemClock
from muster.core.errors import BackendError, ConflictError, MusterError
from muster.core.event_details.run import RunFinished
from muster.core.event_log import EventLog, in_words
from muster.core.event_log.cadence import STATUS_LEAST_S, STATUS_S
from muster.core.event_log.names import files_of, parts_pattern
from muster.core.events import Event
from muster.core.protocols import Clock
from muster.core.typed_json import Unreadable, decode, encode
from muster.protocol.client import SupervisorStatus
from muster.protocol.lease import LEASE_S, EndRecord, HomeStatus
from muster.storage import job_record
from muster.storage.home import SUBMISSION_FILE, BucketHome, Home, HomeSync, open_home
from muster.storage.run_registry import replace_text
from muster.supervise.process.figures import Figures
from muster.supervise.process.lease import LeaseKeeper, keeping
from muster.supervise.recovery.inputs import SECOND_NS, End
from muster.supervise.replay.event_replay import EventReplay, EventsInOrder
from muster.supervise.replay.rebuild_state import finish_of

STATUS, END = "status.json", "end.json"
#: File of a local folder with the term that wrote there last.
TERMS = "term"
#: What the end of a run may take to reach its home; the lease is renewed meanwhile.
END_S, AGAIN_S = 60.0, 1.0
#: Exit code of a run that wants to go on: the end of an allocation, not of the run.
AGAIN = 75


@dataclass
class SupervisorHome:
    """One term's. Not thread-safe; what takes long is done by a thread of its own."""

    run_dir: Path
    job: str = ""
    """The back end's name for the job that this process is part of."""
    clock: Clock = field(default_factory=SystemClock)
    home: Home = field(init=False)
    lease: LeaseKeeper = field(init=False)
    figures: Figures = field(default_factory=Figures)
    _sync: HomeSync | None = None
    _reporter: Reporter | None = None
    damage: list[str] = field(default_factory=list)
    """What could be brought in part only, one sentence each: of a host, whose own report replaces it."""
    _declared: bool = False
    """``end.json`` is there."""

    def __post_init__(self) -> None:
        self.home = open_home(self.run_dir)
        self.lease = LeaseKeeper(self.home.store, self.home.uri_of("lease.json"), clock=self.clock)

    @property
    def trouble(self) -> str | None:
        """Why something waits to reach the home."""
        return self._sync.trouble if self._sync is not None else None

    # ------------------------------------------------------------ the beginning

    def take_over(self, run_id: str, address: tuple[str, int]) -> EventsInOrder:
        """Take the lease; the run's events so far, in order. No earlier supervisor adds any after this.

        Raises:
            ConflictError: another supervisor holds the run.
        """
        replay = EventReplay(self.run_dir / "events")
        # Weeks of events take longer than a lease lasts: most of it before.
        self.home.mirror(self.run_dir, on_damage=self._damaged)
        replay.read_new_events()
        self.lease.take(address)
        with keeping(self.lease):
            if not self.home.is_folder:
                replay = self._end_earlier(run_id, replay)
            replay.read_new_events()
            for text in in_words(replay.damaged):
                self._damaged(text)
        return replay.in_order(self._damaged)

    def _end_earlier(self, run_id: str, replay: EventReplay) -> EventReplay:
        """Close the logs of earlier terms, wherever their supervisors are, and bring what they hold."""
        store, lease = self.home.store, self.home.uri_of("lease.json")
        replace_text(self.run_dir / "lease.json", store.get(lease).data.decode())  # for questions asked in this pod
        for term in self._terms_here():
            if not self._bring_rest(run_id, term):
                for path in files_of(self.run_dir / "events", "supervisor"):
                    if parts_pattern("supervisor", term).match(path.name):
                        path.unlink(missing_ok=True)
                replay = EventReplay(replay.directory)
        self.home.end_earlier(run_id, "supervisor", self.lease.term)
        self.home.mirror(self.run_dir, on_damage=self._damaged)
        replace_text(self.run_dir / TERMS, f"{self.lease.term}\n")
        return replay

    def _damaged(self, text: str) -> None:
        if text not in self.damage:
            self.damage.append(text)

    def _bring_rest(self, run_id: str, term: int) -> bool:
        """What a killed predecessor in this folder had written, and not brought home: it is part of the run, unless
        another machine's supervisor has closed that log (False)."""
        home = open_home(self.run_dir)
        try:
            with contextlib.closing(home.open_log(run_id, "supervisor", term)) as log:
                if not self._until(log.sync):
                    raise BackendError(f"the log of term {term} cannot be brought home: {log.unsealed}")
        except ConflictError:
            return False
        finally:
            for shipper in home.shippers.values() if isinstance(home, BucketHome) else ():
                shipper.release()
        return True

    def _terms_here(self) -> list[int]:
        """Terms whose log was written in this folder, by a process that may have been killed."""
        try:
            return [int(word) for word in (self.run_dir / TERMS).read_text().split()]
        except FileNotFoundError:
            return []

    def add_earlier(self, event: Event) -> None:
        """An event of earlier terms, in order."""
        if not self.home.is_folder:
            self.figures.add(event)

    def ended(self, before: Iterable[Event]) -> EndRecord | RunFinished | None:
        """How the run ended, where this submission of it has ended before: it is not started again. A supervisor that
        was slow to start may take the lease which another one gave back at the end.

        ``before``: the run's events. A supervisor that was killed between its ``run.finished`` and its ``end.json``
        has released the hosts: the end is put now.

        Raises:
            BackendError: the end cannot be put.
            ConflictError: another supervisor took the lease from us.
        """
        if not self.allocation:
            return None  # nothing says whose end it would be
        if not self.home.is_folder and (found := self._read_end()) is not None:
            return found
        with keeping(self.lease):  # it reads the whole log
            finished = finish_of(before, **self.allocation)
        if finished is None or finished.exit_code == AGAIN:  # the same job may go on after a preemption
            return None
        if self.home.is_folder:
            return finished
        end = End(exit_code=finished.exit_code, outcome=finished.outcome, reason=finished.reason)
        if not self._until(functools.partial(self._put_end, end)):
            raise BackendError(
                f"{self.home.uri_of(END)} cannot be written: the run has ended", hint="it is tried again"
            )
        return self._read_end()

    def _read_end(self) -> EndRecord | None:
        try:
            end = decode(EndRecord, self.home.store.get(self.home.uri_of(END)).data)
        except (FileNotFoundError, Unreadable):
            return None
        return end if (end.job, end.submission) == (self.job, self._submission()) else None

    @property
    def allocation(self) -> dict[str, str]:
        """What ``supervisor.started`` says of it: an end is matched to its submission by number, not by clocks."""
        number = self._submission()
        if self.home.is_folder:
            return {"submission": number} if number else {}
        return {"job": self.job, "submission": number} if self.job else {}

    def open_log(self, run_id: str) -> EventLog:
        """This term's."""
        return self.home.open_log(run_id, "supervisor", self.lease.term)

    def start(self) -> None:
        """Begin to ship what is written here."""
        self._sync = self.home.start("supervisor")
        if not self.home.is_folder:
            self._reporter = Reporter(home=self.home, clock=self.clock)
            self._reporter.start()

    # ------------------------------------------------------------ how it is

    def add(self, event: Event) -> None:
        """An event of this process or of a rank."""
        if self._reporter is not None:
            self.figures.add(event)

    def report_ns(self, phase: str) -> int | None:
        """When the status is to be written next, in ``phase``."""
        return self._reporter.due_ns(phase) if self._reporter is not None else None

    def report_is_due(self, phase: str) -> bool:
        """Whether it is to be written now."""
        due_ns = self.report_ns(phase)
        return due_ns is not None and self.clock.monotonic_ns() >= due_ns

    def report(self, status: SupervisorStatus, phase: str) -> None:
        """Have the status written. Never blocks."""
        if self._reporter is not None:
            self._reporter.offer(self._status(status), phase)

    def heads(self, run_id: str) -> Mapping[str, str]:
        """Of every event file, as far as it is sealed; empty where the home does not answer."""
        try:
            return self.home.heads(run_id, on_damage=self._damaged)
        except (MusterError, OSError):
            return {}

    def _status(self, status: SupervisorStatus) -> HomeStatus:
        figures = self.figures
        return HomeStatus(
            wall_ns=self.clock.wall_ns(),
            term=self.lease.term,
            status=status,
            loss=figures.loss,
            tokens=figures.tokens,
            tokens_per_s=figures.tokens_per_s,
            incidents=figures.incidents,
        )

    # ------------------------------------------------------------ the end

    def declare(self, end: End) -> None:
        """Put ``end.json``, first of all: if this supervisor is killed from here on, its successor starts nothing.

        One try; ``finish`` goes on. Raises ConflictError: another supervisor took the lease from us.
        """
        if not self.home.is_folder:
            self._declared = self._put_end(end)

    def finish(self, log: EventLog, end: End, status: SupervisorStatus) -> None:
        """Bring everything home, and release the lease: a standby supervisor reads then how the run ended.

        Without an ``end.json`` in the home the lease is kept until it expires: its end would start the run again.

        Raises:
            ConflictError: another supervisor took the lease from us.
        """
        self._until(log.sync)
        if self.home.is_folder:
            self.lease.give_back()
            return
        known = self._declared or self._until(functools.partial(self._put_end, end))
        if self._sync is not None:
            shipping = threading.Thread(target=self._sync.stop, args=(END_S,), daemon=True)
            shipping.start()
            while shipping.is_alive():  # outputs may be large
                shipping.join(LEASE_S / 3)
                if shipping.is_alive():
                    self.lease.renew()
        if self._reporter is not None:
            self._reporter.stop(self._status(status))
        if known:
            self.lease.give_back()

    def close(self) -> None:
        """Let go without an end: the next supervisor ships lines that wait."""
        if self._reporter is not None:
            self._reporter.stop(None)

    def _put_end(self, end: End) -> bool:
        """Only with a lease that was renewed this moment: a successor's end is not replaced."""
        if not self.lease.renew():
            return False
        record = EndRecord(
            job=self.job,
            submission=self._submission(),
            term=self.lease.term,
            outcome=end.outcome,
            exit_code=end.exit_code,
            reason=end.reason,
            wall_ns=self.clock.wall_ns(),
        )
        try:
            self.home.publish(END, encode(record))
        except ConflictError:
            raise
        except (MusterError, OSError):
            return False
        return True

    def _until(self, done: Callable[[], bool]) -> bool:
        """Try for ``END_S``; whether it was done."""
        until_ns = self.clock.monotonic_ns() + int(END_S * SECOND_NS)
        while not done():
            if self.clock.monotonic_ns() >= until_ns:
                return False
            self.lease.renew()
            self.clock.sleep(AGAIN_S)
        return True

    def _submission(self) -> str:
        with contextlib.suppress(OSError):
            if self.home.is_folder:
                return str(job_record.submission(self.run_dir) or "")
            return (self.run_dir / SUBMISSION_FILE).read_text().strip()
        return ""


class Reporter(threading.Thread):
    """Writes the newest status that it was given: never twice in a second, which an object store would refuse."""

    def __init__(self, *, home: Home, clock: Clock) -> None:
        super().__init__(name="home-status", daemon=True)
        self._home, self._clock = home, clock
        self._wake = threading.Condition()
        self._status: HomeStatus | None = None
        self._ending = False
        self._until_ns = 0
        self._generation: str | None = None
        self._offered_ns: int | None = None
        self._phase = ""

    def due_ns(self, phase: str) -> int:
        """When the next status is to be offered."""
        every_s = STATUS_LEAST_S if phase != self._phase else STATUS_S
        return 0 if self._offered_ns is None else self._offered_ns + int(every_s * SECOND_NS)

    def offer(self, status: HomeStatus, phase: str) -> None:
        """Write it soon."""
        self._offered_ns, self._phase = self._clock.monotonic_ns(), phase
        with self._wake:
            self._status = status
            self._wake.notify()

    def stop(self, last: HomeStatus | None) -> None:
        """End; ``last`` is written before, and waited for."""
        with self._wake:
            self._status, self._ending = last, True
            self._until_ns = self._clock.monotonic_ns() + int(END_S * SECOND_NS) if last is not None else 0
            self._wake.notify()
        if last is not None:
            self.join(END_S)

    def run(self) -> None:
        while True:
            with self._wake:
                while self._status is None and not self._ending:
                    self._wake.wait()
                status, self._status = self._status, None
            if status is None:
                return
            try:
                if not self._put(status):
                    return
            except (MusterError, OSError):
                if self._ending and self._clock.monotonic_ns() >= self._until_ns:
                    return
                time.sleep(AGAIN_S)
                with self._wake:
                    self._status = self._status or status

    def _put(self, status: HomeStatus) -> bool:
        """False: another supervisor writes it now."""
        try:
            self._generation = self._home.publish(STATUS, encode(status), generation=self._generation)
        except ConflictError:  # also of a write of ours that was given up and arrived later
            stored = self._home.store.get(self._home.uri_of(STATUS))
            with contextlib.suppress(Unreadable):
                if decode(HomeStatus, stored.data).term > status.term:
                    return False
            self._generation = stored.generation
            self._generation = self._home.publish(STATUS, encode(status), generation=self._generation)
        return True
