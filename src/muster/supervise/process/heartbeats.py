"""The watchdogs' connections. Heartbeats are read when they matter, and do not wake the loop."""

from __future__ import annotations

from dataclasses import dataclass, field

from muster.core.protocols import Clock
from muster.protocol.codec import reader_of
from muster.protocol.to_supervisor import BEAT_FRAME, FROM_WATCHDOG, Beat
from muster.supervise.process.liveness import SECOND_NS, HostLiveness
from muster.transport.connections import Connection, ConnectionPool

_BEAT, _decode = Beat(), reader_of(FROM_WATCHDOG)


def read_heartbeat(frame: bytes) -> Beat:
    """A watchdog's frame; nearly all are alike, and are not decoded. Raises Unreadable."""
    return _BEAT if frame == BEAT_FRAME else _decode(frame)


@dataclass(kw_only=True)
class Heartbeats:
    """At most one connection of each host. When its beats came is the kernel's account."""

    pool: ConnectionPool
    liveness: HostLiveness
    clock: Clock
    peers: dict[str, Connection] = field(default_factory=dict)

    def add(self, host: str, peer: Connection, *, every_s: float) -> None:
        """A watchdog has connected, and beats from now on."""
        self.peers[host] = peer
        self.liveness.watchdog_connected(host, self.clock.monotonic_ns(), every_s=every_s)
        self.pool.leave(peer)

    def listen_to_silent(self, now_ns: int) -> None:
        """Read the beats of those hosts that would be given up at ``now_ns`` otherwise."""
        for host in self.liveness.silent(now_ns):
            self._collect(host)

    def listen(self) -> None:
        """Read all heartbeats: unread ones fill a socket's buffer."""
        for host in list(self.peers):
            self._collect(host)

    def remove(self, host: str, peer: Connection) -> None:
        """It is closed."""
        if self.peers.get(host) is peer:
            del self.peers[host]
            self.liveness.watchdog_disconnected(host, self.clock.monotonic_ns())

    def _collect(self, host: str) -> None:
        peer = self.peers.get(host)
        if peer is None:
            return
        ago_s = self.pool.collect(peer)
        if ago_s is not None:
            self.liveness.heartbeat(host, self.clock.monotonic_ns() - int(ago_s * SECOND_NS))
        if peer.closed:
            self.remove(host, peer)
