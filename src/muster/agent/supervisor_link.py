"""The agent's connection to the supervisor that holds the lease: found, kept, left when another one holds it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from muster.agent.heartbeat import supervisor_address
from muster.agent.host_identity import HostIdentity
from muster.protocol.codec import reader_of
from muster.protocol.hello import AgentHello
from muster.protocol.to_agent import TO_AGENT, ToAgent
from muster.protocol.to_supervisor import FromAgent, HostFault, StartFailed
from muster.protocol.values import Address, RankEvent
from muster.protocol.version import OtherVersion
from muster.transport.connections import Connection, ConnectionPool

#: How often the lease is read while a supervisor is connected.
LEASE_CHECK_S = 1.0


class SupervisorLink:
    """At most one connection. For a supervisor that is absent a failed start, the hardware's fault and the newest
    checkpoint are kept: a hello tells the rest."""

    def __init__(
        self,
        *,
        hub: ConnectionPool,
        identity: HostIdentity,
        hello: Callable[[], AgentHello],
        on_message: Callable[[ToAgent], None],
        on_refused: Callable[[str], None],
    ) -> None:
        """``hello``: the first message to each supervisor; ``on_refused``: the lease is held by one of another version;
        one line that names both."""
        self._hub, self._identity, self._hello = hub, identity, hello
        self._on_message, self._on_refused = on_message, on_refused
        self._peer: Connection | None = None
        self._address: Address | None = None
        self._lease_check_s = 0.0
        self._lease: tuple[int, int, int] | None = None
        """The lease's file when it was last read."""
        self._kept: dict[str, StartFailed] = {}
        self._committed: RankEvent | None = None
        """A checkpoint of which no supervisor was told: ranks say again what a dead agent may not have heard, before
        its successor looks for one. Unaware of it, a supervisor would start from an older version in memory."""
        self.fault: Callable[[], HostFault | None] = lambda: None
        """What is wrong with the hardware: told again to each supervisor that is found."""

    @property
    def connected(self) -> bool:
        return self._peer is not None

    def is_peer(self, peer: Connection) -> bool:
        return peer is self._peer

    def find_address(self) -> Address | None:
        """Where the holder of the lease listens; None: there is none, or not one to speak to."""
        try:
            return supervisor_address(self._identity.run_dir, me=self._identity.host)
        except OtherVersion as error:
            self._on_refused(str(error))
            return None

    def send(self, message: FromAgent) -> None:
        """To the supervisor, where one is connected."""
        if self._peer is not None:
            self._hub.send(self._peer, message)
        elif isinstance(message, RankEvent) and message.kind == "checkpoint.committed":
            self._committed = message

    def keep(self, what: str, failure: StartFailed | None) -> None:
        """What this host cannot start: for the supervisor, and for each one that connects later. None: it is mended."""
        self._kept.pop(what, None)
        if failure is not None:
            self._kept[what] = failure
            self.send(failure)

    def forget(self) -> None:
        """The run file was corrected: earlier failures say nothing."""
        self._kept.clear()

    def connect(self) -> bool:
        """Try once to reach the holder of the lease, and greet it."""
        self._address = self.find_address()
        if self._address is None:
            return False
        try:
            self._peer = self._hub.connect(*self._address, timeout_s=0.5)
        except OSError:
            return False
        self._peer.expect(reader_of(TO_AGENT), lambda _, message: self._on_message(message))
        self.greet()
        for failure in self._kept.values():
            self.send(failure)
        if self._committed is not None:
            self.send(self._committed)
            self._committed = None
        fault = self.fault()
        if fault is not None:
            self.send(fault)
        return True

    def greet(self) -> None:
        """Tell everything that a supervisor needs to know about this host, again where it has changed."""
        self.send(self._hello())

    def due_s(self) -> float:
        """When ``watch`` is to look at the lease at the latest: whoever is awake earlier does so then."""
        return math.inf if self._peer is None else self._lease_check_s + LEASE_CHECK_S / 2

    def watch(self) -> None:
        """A holder that is silent (its node lost power) keeps a connection open: the lease decides which one counts."""
        if self._peer is None or time.monotonic() < self._lease_check_s:
            return
        self._lease_check_s = time.monotonic() + LEASE_CHECK_S
        before, self._lease = self._lease, _identity(self._identity.run_dir / "lease.json")
        if self._lease == before is not None:
            return
        address = self.find_address()
        if address is not None and address != self._address:
            left = self._peer
            self._hub.close(left)
            # As if it had closed: a host without work counts its wait from now, not from when it last had any.
            self._hub.on_gone(left, "another supervisor holds the lease")
            self._peer = None

    def on_lost(self) -> None:
        """The connection is closed."""
        self._peer = None


def _identity(path: Path) -> tuple[int, int, int] | None:
    """What differs once the file was written again; None: it cannot be opened.

    Opened, not only looked up: a network file system asks its server then.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.fstat(fd)
    finally:
        os.close(fd)
    return found.st_ino, found.st_mtime_ns, found.st_size
