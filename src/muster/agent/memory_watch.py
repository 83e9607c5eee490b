"""Whether the host's folder in memory is still there, and what to do where somebody emptied it under the run.

The agent looks when it is awake anyway, at the latest after a moment, and before it starts ranks. What was in the
folder is lost; the processes go on, with the next tier until there are snapshots again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from muster.agent.host_identity import SOCKET, HostIdentity
from muster.core.errors import MusterError
from muster.protocol.values import RankEvent
from muster.transport.connections import ConnectionPool
from muster.transport.stream import REPLICATOR_SOCKET

#: How often it is looked at, at most.
EVERY_S = 1.0


def memory_lost(reason: str, *, attempt: int) -> RankEvent:
    """What is logged where the folder was made anew."""
    mono_ns, wall_ns = time.monotonic_ns(), time.time_ns()
    return RankEvent(kind="memory.lost", attempt=attempt, mono_ns=mono_ns, wall_ns=wall_ns, detail={"reason": reason})


class MemoryWatch:
    """Owns the socket file on which the agent listens."""

    def __init__(
        self,
        *,
        identity: HostIdentity,
        hub: ConnectionPool,
        on_renewed: Callable[[str], None],
        on_unreachable: Callable[[], None],
        on_note: Callable[[str], None],
    ) -> None:
        """``on_renewed``: the folder was made anew, empty; why. ``on_unreachable``: the replicator's socket file is
        gone. ``on_note``: a line for the run's log."""
        self._identity, self._hub = identity, hub
        self._on_renewed, self._on_unreachable, self._on_note = on_renewed, on_unreachable, on_note
        self._next_s = 0.0
        self._trouble = ""
        self._renewed = ""
        """How the folder was lost and made anew, until that is reported."""
        self._listens = False

    def listen(self) -> None:
        """Accept the host's processes on the socket file, bound anew. Raises OSError."""
        self._listens = False  # a bound file that nobody accepts on looks like one that is served
        self._hub.leave_socket_files()
        self._hub.listen(f"unix:{self._identity.memory.bind_address(SOCKET)}")
        self._listens = True

    def due_s(self) -> float:
        """When ``watch`` is to look at the latest: whoever is awake earlier does so then."""
        return self._next_s + EVERY_S / 2

    def watch(self) -> None:
        """Look, unless that was done a moment ago."""
        if time.monotonic() >= self._next_s:
            self.check()

    def check(self) -> None:
        """Look now; never raises: what cannot be mended yet is tried again."""
        self._next_s = time.monotonic() + EVERY_S
        try:
            self._mend()
            self._trouble = ""
        except (OSError, MusterError) as error:
            if self._trouble != str(error):
                self._trouble = str(error)
                self._on_note(f"the memory of {self._identity.host} is lost and cannot be made anew: {error}")

    def _mend(self) -> None:
        identity, memory = self._identity, self._identity.memory
        if memory.is_lost():
            before = memory.folder
            memory.renew(identity.run_dir, run_id=identity.run_id, host=identity.host)
            name = "" if memory.folder == before else f" as {memory.folder}, for the name is taken"
            found = f"{before} was deleted from outside, with the snapshots in it"
            self._renewed, self._listens = f"{found}; it is made anew{name}", False
        if not self._listens or not memory.exists(SOCKET):
            self.listen()
            if not self._renewed:
                self._on_note(f"{memory.path(SOCKET)} was deleted, and is bound again")
        if self._renewed:
            self._on_renewed(self._renewed)
            self._renewed = ""
        if not memory.exists(REPLICATOR_SOCKET):
            self._on_unreachable()
