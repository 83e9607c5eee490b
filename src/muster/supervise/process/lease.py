"""The supervisor's lease: one object in the run's home, changed only by conditional writes.

Its holder may act. ``term`` rises by one with each holder and is never used twice, so two supervisors never both
act for long: a renewal that finds a successor ends its process at once. One that cannot show its lease, because the
store does not answer, holds back its decisions until the store shows whose it is.

Where the object is gone or damaged, its holder writes it again; a supervisor that would take it waits for as long as a
lease lasts, to see whether that happens. The term then follows from the event logs of earlier supervisors.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from muster.core import processes
from muster.core.clock import SystemClock
from muster.core.errors import ConflictError, MusterError
from muster.core.protocols import Clock, Store
from muster.core.typed_json import Unreadable
from muster.protocol.lease import LEASE_S, LeaseRecord, read_lease, write_lease
from muster.protocol.version import MINE, OtherVersion, incompatible
from muster.storage import uris
from muster.storage.store.patient import start_thread

#: ``supervisor.TERM.jsonl``, or ``supervisor.partN.TERM.jsonl`` where a damaged file was left and continued in another.
_LOG = re.compile(r"^supervisor\.(?:part\d+\.)?(\d+)\.jsonl$")
#: How often one that waits for a holder to show itself looks.
LOOK_S = 0.5


@dataclass
class LeaseKeeper:
    """Acquires, renews and releases the lease at ``uri``. ``hold`` and ``renew`` are thread-safe."""

    store: Store
    uri: str
    clock: Clock = field(default_factory=SystemClock)
    term: int = field(default=0, init=False)
    _generation: str = field(default="", init=False)
    _until_ns: tuple[int, int] = field(default=(0, 0), init=False)
    """When it expires, by the monotonic clock (which may pause with the machine) and by the wall clock."""
    repairs: list[str] = field(default_factory=list, init=False)
    """What was found gone or damaged, and written again: a sentence each, to be logged."""
    _doubt: str | None = field(default=None, init=False)
    """It has expired, and nothing shows that it is still ours."""
    _address: tuple[str, int] | None = field(default=None, init=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False)

    def take(self, address: tuple[str, int]) -> int:
        """Become the holder; return the new term.

        Raises:
            ConflictError: a live supervisor holds it, or another one was faster.
        """
        self._address = address
        generation, record, problem = first = self._look()
        is_held = record is not None and not self._vacant(record)
        is_lost = record is None and (generation is not None or newest_term(self.store, self.uri) > 0)
        if is_lost or (is_held and record is not None and not _is_of_this_boot(record)):
            generation, record, problem = self._look_longer(generation)
            is_held = record is not None and generation != first[0] and record.expires_wall_ns > 0
        if is_held and record is not None:
            raise _held_by(record)
        known = record.term if record is not None else 0
        self.term = 1 + newest_term(self.store, self.uri, at_least=known)
        self._write(generation)
        if problem is not None and self.term > 1:
            self.repairs.append(f"{problem}, and was not written again in {LEASE_S:g} s: this is term {self.term}")
        return self.term

    def _look(self) -> tuple[str | None, LeaseRecord | None, str | None]:
        """The object's generation, its record, and why there is none of either. Raises as the store."""
        try:
            stored = self.store.get(self.uri)
        except FileNotFoundError:
            return None, None, "lease.json was gone"
        try:
            return stored.generation, read_lease(stored.data, me="this supervisor", any_version=True), None
        except Unreadable as error:
            return stored.generation, None, f"lease.json was damaged ({error})"

    def _look_longer(self, seen: str | None) -> tuple[str | None, LeaseRecord | None, str | None]:
        """What a holder that lives writes instead of generation ``seen``; the same again where none does.

        It renews within a lease's length, by this machine's monotonic clock: wall clocks of two machines, or of two
        boots, may differ by hours, and a record that is lost or damaged is written again.
        """
        until_ns = self.clock.monotonic_ns() + int(LEASE_S * 1e9)
        while True:
            generation, record, _ = result = self._look()
            is_written = record is not None and (generation != seen or self._vacant(record))
            if is_written or self.clock.monotonic_ns() >= until_ns:
                return result
            self.clock.sleep(LOOK_S)

    def hold(self) -> str | None:
        """None: the lease is ours at this moment. Else why one cannot know: do not act, ``renew``, and ask again.

        Call it before acting on anything: a process that was stopped, or whose machine was, wakes up with its inputs
        waiting and perhaps with a successor. Raises ConflictError then. Costs nothing while the lease has not expired.
        """
        with self._lock:
            if self._expired() and self._doubt is None:
                self.renew()
            return self._doubt

    def renew(self) -> bool:
        """Extend the lease; False where the store refuses the write for now (a full disk, no answer): try again soon.

        Where it has expired meanwhile, ``hold`` says whether we may act. Raises ConflictError when the store shows
        that the lease was taken from us: stop acting at once.
        """
        with self._lock:
            try:
                self._extend()
            except ConflictError:
                raise
            except (MusterError, OSError) as error:
                if self._expired():
                    self._doubt = self._doubted(error)
                return False
            self._doubt = None
            return True

    def _extend(self) -> None:
        try:
            self._write(self._generation)
        except ConflictError:
            generation, problem = self._shown_as_ours()
            self._write(generation)
            if problem is not None:
                self.repairs.append(f"{problem}: written again")

    def _doubted(self, error: Exception) -> str | None:
        try:
            _, problem = self._shown_as_ours()
        except ConflictError:
            raise
        except (MusterError, OSError):
            return f"the lease of this run expired, and one cannot see whose it is: {error}"
        return problem and f"the lease of this run expired: {problem}, and cannot be written: {error}"

    def _write(self, generation: str | None) -> None:
        """Replace ``generation`` (None: nothing) by our record."""
        record = self._record()
        if generation is None:
            self._generation = self.store.put_if_absent(self.uri, write_lease(record))
        else:
            self._generation = self.store.put_if(self.uri, write_lease(record), generation)
        self._until_ns = (record.expires_mono_ns, record.expires_wall_ns)

    def _expired(self) -> bool:
        monotonic, wall = self._until_ns
        return self.clock.monotonic_ns() >= monotonic or self.clock.wall_ns() >= wall

    def _shown_as_ours(self) -> tuple[str | None, str | None]:
        """The generation to replace (None: nothing is there), and why the object does not show our record.

        Raises ConflictError where a successor is shown, by the object or by its event log; as the store where it does
        not say.
        """
        generation, record, problem = self._look()
        if record is not None:
            ours = (self.term, os.getpid(), socket.gethostname(), processes.boot_id())
            if (record.term, record.pid, record.machine, record.boot_id) == ours:
                if not record.expires_wall_ns:
                    raise ConflictError("the lease was taken from us: another process let it expire")
                return generation, None
            if record.term >= self.term:
                raise ConflictError(f"the lease was taken from us: term {record.term} is held by pid {record.pid}")
            problem = f"lease.json was of an older term, {record.term}"
        if newest_term(self.store, self.uri, at_least=self.term) > self.term:
            raise ConflictError(f"the lease was taken from us: there is a log of a later term than {self.term}")
        return generation, problem

    def give_back(self) -> None:
        """Release it; a successor does not have to wait."""
        record = replace(self._record(), expires_wall_ns=0, address=None, pid=0)
        try:
            self.store.put_if(self.uri, write_lease(record), self._generation)
        except (MusterError, OSError):
            pass  # another supervisor has it, or it expires by itself

    def _record(self) -> LeaseRecord:
        length = int(LEASE_S * 1e9)
        return LeaseRecord(
            version=MINE,
            term=self.term,
            address=self._address,
            pid=os.getpid(),
            machine=socket.gethostname(),
            boot_id=processes.boot_id(),
            expires_wall_ns=self.clock.wall_ns() + length,
            expires_mono_ns=self.clock.monotonic_ns() + length,
        )

    def _vacant(self, record: LeaseRecord) -> bool:
        """Whether it is free at first sight. No wall clock counts: it may have been set, and another machine's may
        differ by hours. There a holder is gone once it has not renewed for a lease's length (``_look_longer``)."""
        if not record.expires_wall_ns or not _is_of_this_boot(record):
            return not record.expires_wall_ns
        return self.clock.monotonic_ns() >= record.expires_mono_ns or processes.look(record.pid) is None


def _is_of_this_boot(record: LeaseRecord) -> bool:
    """Whether its holder's monotonic clock and pid are this machine's."""
    return (record.boot_id, record.machine) == (processes.boot_id(), socket.gethostname())


def _held_by(record: LeaseRecord) -> MusterError:
    other = incompatible(MINE, record.version, me="this supervisor", them="the run's supervisor")
    if other is not None:
        return OtherVersion(other)
    return ConflictError(
        f"a supervisor (pid {record.pid} on {record.machine}) holds this run",
        hint="muster status shows it; muster stop ends it",
    )


@contextlib.contextmanager
def keeping(lease: LeaseKeeper) -> Iterator[None]:
    """A thread renews ``lease`` while the block does what may take longer than a lease lasts.

    Raises:
        ConflictError: another supervisor took it; at the block's end.
    """
    done, lost = threading.Event(), list[ConflictError]()

    def renew() -> None:
        while not done.wait(LEASE_S / 3):
            try:
                lease.renew()
            except ConflictError as error:
                lost.append(error)
                return

    thread = start_thread(renew, "lease")
    try:
        yield
    finally:
        done.set()
        thread.join()
    if lost:
        raise lost[0]


def newest_term(store: Store, lease_uri: str, *, at_least: int = 0) -> int:
    """The highest term that left a log next to the lease; ``at_least`` where none is higher. Raises as the store.

    In a bucket a log is a folder of segments, and each supervisor ends those of all earlier terms: where a term has
    none, no later one has. So a few short lists tell it, where one of all events would take seconds in a long run.
    """
    home = lease_uri.rpartition("/")[0]
    events = uris.join(home, "events")
    if uris.is_local(events):
        found = (_LOG.match(uris.name(uri)) for uri in store.list(events))
        return max([at_least, *(int(match.group(1)) for match in found if match is not None)])
    newest = max(at_least, _ended_up_to(store, home))
    while store.list(uris.join(events, f"supervisor.{newest + 1}")):
        newest += 1
    return newest


def _ended_up_to(store: Store, home: str) -> int:
    """What the last takeover noted (``BucketHome.end_earlier``); 0: there was none."""
    try:
        return int(store.get(uris.join(home, "ended", "supervisor")).data)
    except (FileNotFoundError, ValueError):
        return 0
