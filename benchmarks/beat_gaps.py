"""How long the hosts of a run were silent: the gaps between what their supervisor's machine got from each watchdog.

By the kernel's time stamps of the packets (a packet socket on loopback, with a filter in the kernel): neither the
product nor the scheduler's delay of this program is in the figures. Needs CAP_NET_RAW; Linux only.
"""

import bisect
import contextlib
import ctypes
import itertools
import select
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_SO_ATTACH_FILTER, _SO_TIMESTAMPNS, _ETH_P_IP, _OUTGOING = 26, 35, 0x0800, 4
_STAMP = struct.Struct("qq")


@dataclass
class Gaps:
    """Of one connection, in seconds: a count for each bin between ``edges``, and one beyond the last."""

    edges: Sequence[float]
    counts: list[int] = field(default_factory=list)
    worst_s: float = 0.0
    last_s: float | None = None

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.edges) + 1)

    def add(self, at_s: float) -> None:
        """Something came at ``at_s``."""
        if self.last_s is not None:
            gap_s = at_s - self.last_s
            self.counts[bisect.bisect_right(self.edges, gap_s)] += 1
            self.worst_s = max(self.worst_s, gap_s)
        self.last_s = at_s


def edges_of(limit_s: float) -> list[float]:
    """Sixths of the limit: what is in the last bin was an alarm, or would have been without what else came."""
    return [round(limit_s * sixth / 6, 6) for sixth in range(1, 7)]


def rows(gaps: Sequence[Gaps]) -> list[tuple[str, int]]:
    """The histogram of all together, for people."""
    edges = gaps[0].edges
    names = [f"under {edges[0]:g} s", *(f"{low:g} to {high:g} s" for low, high in itertools.pairwise(edges))]
    counts = [sum(column) for column in zip(*(each.counts for each in gaps), strict=True)]
    return list(zip([*names, f"{edges[-1]:g} s and more"], counts, strict=True))


class Listening(threading.Thread):
    """Looks at the packets to ``port`` of this machine from the watchdogs' ports (``name -> port``) until ``stop``.

    Raises PermissionError: without CAP_NET_RAW.
    """

    def __init__(self, port: int, watchdogs: Mapping[str, int], limit_s: float) -> None:
        super().__init__(daemon=True)
        self.gaps = {name: Gaps(edges_of(limit_s)) for name in watchdogs}
        self._names = {number: name for name, number in watchdogs.items()}
        self._sock = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)  # of no protocol until the filter is there
        _keep_only(self._sock, port)
        self._sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self._sock.bind(("lo", _ETH_P_IP))
        self._stopping = threading.Event()

    def run(self) -> None:
        while not self._stopping.is_set():
            if select.select([self._sock], [], [], 1.0)[0]:
                self._take()

    def stop(self) -> None:
        self._stopping.set()
        self.join()
        self._sock.close()

    def _take(self) -> None:
        packet, messages, _, address = self._sock.recvmsg(2048, 64)
        if address[2] == _OUTGOING:  # loopback shows each packet twice
            return
        header = 4 * (packet[0] & 15)
        name = self._names.get(int.from_bytes(packet[header : header + 2], "big"))
        has_data = int.from_bytes(packet[2:4], "big") > header + 4 * (packet[header + 12] >> 4)
        if name is not None and has_data:
            seconds, nanoseconds = _STAMP.unpack(messages[0][2])
            self.gaps[name].add(seconds + nanoseconds / 1e9)


class _Program(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def _keep_only(sock: socket.socket, port: int) -> None:
    """A filter of the kernel's (bpf(4)): of IPv4 packets those of TCP to ``port``; gloo's own are tens of thousands."""
    code = [
        (0x30, 0, 0, 9),  # load the protocol
        (0x15, 0, 4, socket.IPPROTO_TCP),
        (0xB1, 0, 0, 0),  # x: the length of the IP header
        (0x48, 0, 0, 2),  # load the port that it goes to
        (0x15, 0, 1, port),
        (0x06, 0, 0, 0xFFFF),
        (0x06, 0, 0, 0),
    ]
    data = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
    program = _Program(len(code), ctypes.cast(data, ctypes.c_void_p))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, bytes(program))


def watchdogs_of(run: object) -> tuple[int, dict[str, int]]:
    """The supervisor's port, and each host's watchdog's own, of a ``LiveRun``."""
    import psutil

    from muster.agent.edge.lease import supervisor_address

    address = supervisor_address(run.dir, me="the benchmark")  # type: ignore[attr-defined]
    assert address is not None
    ports = {}
    for name, process in run.agents.items():  # type: ignore[attr-defined]
        with contextlib.suppress(psutil.Error):
            for each in psutil.Process(process.pid).net_connections("tcp"):
                if each.raddr and each.raddr.port == address[1]:
                    ports[name] = each.laddr.port
    return address[1], ports
