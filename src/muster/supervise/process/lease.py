"""The supervisor's lease: one object in the run's folder, changed only by conditional writes.

Its holder may act. ``term`` rises by one with each holder and is never used twice, so two supervisors never both
act for long: a renewal that loses its condition ends its process at once. One that cannot show its lease, because the
store does not answer, holds back whatever it decides until the store shows whose it is.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from muster.core import processes
from muster.core.clock import SystemClock
from muster.core.errors import ConflictError, MusterError
from muster.core.protocols import Clock, Store
from muster.core.typed_json import Unreadable, encode
from muster.protocol.lease import LeaseRecord, read_lease
from muster.protocol.version import MINE
from muster.storage.store.patient import start_thread

#: A holder that has not renewed for this time may be replaced (one whose process is dead on this host at once).
LEASE_S = 10.0


@dataclass
class LeaseKeeper:
    """Takes, renews and gives back the lease at ``uri``. ``hold`` and ``renew`` are thread-safe."""

    store: Store
    uri: str
    clock: Clock = field(default_factory=SystemClock)
    term: int = 0
    _generation: str = ""
    _until_ns: tuple[int, int] = (0, 0)
    """When it expires, by the monotonic clock (which may pause with the machine) and by the wall clock."""
    _unsure: bool = False
    """A renewal failed: the object may be ours under another generation."""
    _doubt: str | None = None
    """It has expired, and nothing shows that it is still ours."""
    _address: tuple[str, int] | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def take(self, address: tuple[str, int]) -> int:
        """Become the holder; return the new term.

        Raises:
            ConflictError: a live supervisor holds it, or another one was faster.
        """
        self._address = address
        try:
            stored = self.store.get(self.uri)
        except FileNotFoundError:
            self.term = 1
            self._write(None)
            return self.term
        try:
            record = read_lease(stored.data, me="this supervisor")
        except Unreadable as error:
            raise ConflictError(f"the lease of this run cannot be taken: {error}") from None
        if not self._vacant(record):
            raise ConflictError(
                f"a supervisor (pid {record.pid} on {record.machine}) holds this run",
                hint="muster status shows it; muster stop ends it",
            )
        self.term = record.term + 1
        self._write(stored.generation)
        return self.term

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
                self._unsure = True
                if self._expired():
                    self._doubt = self._doubted(error)
                return False
            self._unsure, self._doubt = False, None
            return True

    def _extend(self) -> None:
        try:
            self._write(self._generation)
        except ConflictError:
            if not self._unsure or not self._shown_as_ours():
                raise
            self._write(self._generation)

    def _doubted(self, error: Exception) -> str | None:
        try:
            ours = self._shown_as_ours()
        except (MusterError, OSError):
            return f"the lease of this run expired, and one cannot see whose it is: {error}"
        if not ours:
            raise ConflictError(f"the lease was taken from us; it could not be renewed: {error}") from error
        return None

    def _write(self, generation: str | None) -> None:
        """Replace ``generation`` (None: nothing) by our record."""
        record = self._record()
        if generation is None:
            self._generation = self.store.put_if_absent(self.uri, encode(record))
        else:
            self._generation = self.store.put_if(self.uri, encode(record), generation)
        self._until_ns = (record.expires_mono_ns, record.expires_wall_ns)

    def _expired(self) -> bool:
        monotonic, wall = self._until_ns
        return self.clock.monotonic_ns() >= monotonic or self.clock.wall_ns() >= wall

    def _shown_as_ours(self) -> bool:
        """Whether the store holds our own record, under any generation. Raises as the store where it does not say."""
        try:
            stored = self.store.get(self.uri)
            record = read_lease(stored.data, me="this supervisor")
        except (FileNotFoundError, Unreadable):
            return False
        ours = (self.term, os.getpid(), socket.gethostname(), processes.boot_id())
        if (record.term, record.pid, record.machine, record.boot_id) != ours:
            return False
        self._generation = stored.generation
        return True

    def give_back(self) -> None:
        """Release it; a successor does not have to wait."""
        record = replace(self._record(), expires_wall_ns=0, address=None, pid=0)
        try:
            self.store.put_if(self.uri, encode(record), self._generation)
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
        """Whether it is free. On the holder's own machine the wall clock does not count: it may have been set."""
        if not record.expires_wall_ns:
            return True
        if record.boot_id != processes.boot_id() or record.machine != socket.gethostname():
            return self.clock.wall_ns() >= record.expires_wall_ns
        return self.clock.monotonic_ns() >= record.expires_mono_ns or processes.look(record.pid) is None


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
