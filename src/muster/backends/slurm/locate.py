"""Where a node is: its address, its rack, and what can be reached from it.

A lease holder that a node cannot reach while it reaches Slurm's controller is replaced by a conditional write; a node
that reaches neither is cut off.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import socket
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from muster.backends.host.run_state import RunState, is_of
from muster.backends.host.state import Lease, Looked
from muster.core.clock import SystemClock
from muster.core.errors import MusterError, UsageError
from muster.core.protocols import Clock
from muster.protocol.lease import LeaseRecord
from muster.protocol.values import Address

SILENCE_S, STAGGER_S = 4.0, 3.0
"""How long the second node waits for a silent holder, and how much longer each further node does."""


def place_of_this_node(environ: Mapping[str, str]) -> dict[str, str]:
    """``MUSTER_RACK`` and ``MUSTER_BLOCK`` by the names of the node's switches: its leaf switch, and the one above.

    ``SLURM_TOPOLOGY_ADDR`` holds them from the top down, the node last, its pattern what each is (``man srun``).
    Without a topology plugin there is the node alone, and nothing is known; nor where the two do not match (a name with
    a dot), or the address is another node's.
    """
    names = environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    kinds = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    if len(names) != len(kinds) or names[-1] != environ.get("SLURMD_NODENAME"):
        return {}
    above = [name for name, kind in zip(names, kinds, strict=True) if kind != "node"]
    return dict(zip(("MUSTER_RACK", "MUSTER_BLOCK"), reversed(above), strict=False))


def address_of_this_node(peers: Iterable[str], *, interface: str | None = None) -> str:
    """The address at which other nodes reach this one: of ``interface``, else of the route to the first known peer.

    ``peers``: names or addresses, nearest first. The host's own name is tried last, since ``/etc/hosts`` often maps it
    to 127.0.1.1.

    Raises:
        UsageError: the interface has no IPv4 address.
    """
    if interface is not None:
        return _address_of(interface)
    for peer in [*peers, socket.gethostname()]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((peer, 9))  # a datagram socket: selects a route, sends nothing
            except OSError:
                continue
            address = str(probe.getsockname()[0])
        if not ipaddress.ip_address(address).is_loopback:
            return address
    return "127.0.0.1"


def connects(address: tuple[str, int], *, timeout_s: float = 1.0) -> bool:
    """Whether the address accepts connections."""
    try:
        socket.create_connection(address, timeout=timeout_s).close()
    except OSError:
        return False
    return True


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            result = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", interface.encode()[:15]))  # SIOCGIFADDR
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise UsageError(
                f"slurm.interface: {socket.gethostname()} has no IPv4 address on {interface!r}",
                hint=f"its interfaces: {names}",
            ) from error
    return socket.inet_ntoa(result[20:24])


@dataclass(kw_only=True)
class Holder:
    """As one node sees it, look by look."""

    home: RunState
    controllers: Path
    rank: int
    cut_off_after_s: float
    say: Callable[[str], None]
    connects: Callable[[Address], bool] = connects
    clock: Clock = field(default_factory=SystemClock)
    _reached_s: float | None = None
    """When it was last reached, or there was none."""
    _is_cut_off: bool = False
    _ended_pid: int | None = None

    def look(self, ended_pid: int | None) -> Looked:
        """Of the lease. The first node's first look finds it free: what is there is an earlier job's, and a living
        holder wins the race. ``ended_pid``: of a supervisor that was started here and has ended."""
        is_first = self._reached_s is None
        if is_first or ended_pid != self._ended_pid:
            self._reached_s, self._ended_pid = self._now_s(), ended_pid
        try:
            record = self.home.current_lease()
        except (MusterError, OSError) as error:
            self.say(f"the run's folder does not answer: {error}")
            return Looked(lease=Lease(kind="unknown"))
        address = record.address if record is not None and record.expires_wall_ns else None
        if record is None or address is None or is_of(record, ended_pid) or (is_first and self.rank == 0):
            self._reached_s = self._now_s()
            return Looked(lease=Lease(kind="free"))
        return self._judge(record, address)

    def _judge(self, record: LeaseRecord, address: Address) -> Looked:
        held = Lease(kind="held", left_s=(record.expires_wall_ns - self.clock.wall_ns()) / 1e9)
        reached = self.connects(address)
        silent_s = self._now_s() - (self._reached_s or 0.0)
        if not reached and silent_s >= SILENCE_S + STAGGER_S * max(0, self.rank - 1):
            if not self._reaches_a_controller():
                self._is_cut_off = True
                return Looked(lease=held, cut_off=silent_s > self.cut_off_after_s)
            if not self._is_cut_off and not self.connects(address) and self.home.vacate(record.term):
                self.say(f"the lease's holder at {address[0]} has been silent for {silent_s:.1f} s: revoked")
                return Looked(lease=Lease(kind="vacated"))
            reached = self._is_cut_off  # the holder may well live: it gets its time again
        if reached:
            self._reached_s, self._is_cut_off = self._now_s(), False
        return Looked(lease=held)

    def _reaches_a_controller(self) -> bool:
        """Whether this node is on Slurm's side of a network cut; True where no controller is known."""
        try:
            known = json.loads(self.controllers.read_text())
        except (OSError, ValueError):
            known = []
        return not known or any(self.connects((str(host), int(port))) for host, port in known)

    def _now_s(self) -> float:
        return self.clock.monotonic_ns() / 1e9
