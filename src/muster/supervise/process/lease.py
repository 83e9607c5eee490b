"""The supervisor's lease: one object in the run's folder, changed only by conditional writes.

Its holder may act. ``term`` rises by one with each holder and is never used twice, so two supervisors never both
act for long: a renewal that loses its condition ends its process at once.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field, replace

from muster.core import processes
from muster.core.clock import SystemClock
from muster.core.errors import ConflictError, MusterError
from muster.core.protocols import Clock, Store
from muster.core.typed_json import Unreadable, encode
from muster.protocol.lease import LeaseRecord, read_lease
from muster.protocol.version import MINE

#: A holder that has not renewed for this time may be replaced (one whose process is dead on this host at once).
LEASE_S = 10.0


@dataclass
class LeaseKeeper:
    """Takes, renews and gives back the lease at ``uri``."""

    store: Store
    uri: str
    clock: Clock = field(default_factory=SystemClock)
    term: int = 0
    _generation: str = ""
    _until_ns: tuple[int, int] = (0, 0)
    """When it expires, by the monotonic clock (which may pause with the machine) and by the wall clock."""
    _unsure: bool = False
    """A renewal failed: the object may be ours under another generation."""
    _address: tuple[str, int] | None = None

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

    def hold(self) -> None:
        """Make sure that the lease is ours at this moment; costs nothing while it has not expired.

        Call it before acting on anything: a process that was stopped, or whose machine was, wakes up with its inputs
        waiting and perhaps with a successor. Raises ConflictError then.
        """
        if self._expired():
            self.renew()

    def renew(self) -> bool:
        """Extend the lease; False where the store refuses the write for now (a full disk): try again soon.

        That is tolerated until the lease has expired, and afterwards while the store shows that no other supervisor
        has it. Raises ConflictError when the lease was taken from us, or might be: stop acting at once.
        """
        try:
            self._write(self._generation)
        except ConflictError:
            if not self._unsure or not self._shown_as_ours():
                raise
            self._write(self._generation)
        except (MusterError, OSError) as error:
            self._unsure = True
            if self._expired() and not self._shown_as_ours():
                raise ConflictError(f"the lease expired and could not be renewed: {error}") from error
            return False
        self._unsure = False
        return True

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
        """Whether the store holds our own record, under any generation."""
        try:
            stored = self.store.get(self.uri)
            record = read_lease(stored.data, me="this supervisor")
        except (MusterError, OSError, Unreadable):
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
