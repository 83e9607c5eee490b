"""Whether the host's folder in memory is still there; one that was emptied under the run is made again.

What was in the folder is lost; the processes go on, with the next tier until there are snapshots again.
"""

from __future__ import annotations

from muster.agent.values.events import MemoryChecked
from muster.agent.values.host_identity import SOCKET, HostIdentity
from muster.core.errors import MusterError
from muster.transport.connections import ConnectionPool
from muster.transport.stream import REPLICATOR_SOCKET


class MemoryWatch:
    """Owns the socket file on which the agent listens."""

    def __init__(self, *, identity: HostIdentity, pool: ConnectionPool) -> None:
        self._identity, self._pool = identity, pool
        self._renewed = ""
        """How the folder was lost and made again, until that is reported."""
        self._listens = False

    def listen(self) -> None:
        """Accept the host's processes on the socket file, bound again. Raises OSError."""
        self._listens = False  # a bound file on which nothing accepts looks like one that is served
        self._pool.leave_socket_files()
        self._pool.listen(f"unix:{self._identity.memory.bind_address(SOCKET)}")
        self._listens = True

    def check(self) -> MemoryChecked:
        """Never raises: what cannot be repaired yet is tried again."""
        memory = self._identity.memory
        try:
            rebound = self._repair()
        except (OSError, MusterError) as error:
            return MemoryChecked(str(memory.path(SOCKET)), trouble=str(error))
        renewed, self._renewed = self._renewed, ""
        return MemoryChecked(str(memory.path(SOCKET)), renewed, rebound, memory.exists(REPLICATOR_SOCKET))

    def _repair(self) -> bool:
        """Whether the socket file was bound again."""
        identity, memory = self._identity, self._identity.memory
        if memory.is_lost():
            before = memory.folder
            memory.renew(identity.run_dir, run_id=identity.run_id, host=identity.host)
            name = "" if memory.folder == before else f" as {memory.folder}, for the name is taken"
            lost = f"{before} was deleted from outside, with the snapshots in it"
            self._renewed, self._listens = f"{lost}; recreated{name}", False
        if self._listens and memory.exists(SOCKET):
            return False
        self.listen()
        return True
