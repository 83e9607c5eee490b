"""Which address a node is reached at, and who can be reached from it."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable, Mapping

from muster.core.errors import MusterError, UsageError
from muster.transport.connections import ConnectionPool


def address_of_this_node(peers: Iterable[str], *, interface: str | None = None) -> str:
    """The address that other nodes reach us at: of ``interface``, else of the way that leads to the first peer known.

    ``peers``: names or addresses, nearest first. A host's own name is asked last, since ``/etc/hosts`` often says
    127.0.1.1 for it.

    Raises:
        UsageError: the interface has no IPv4 address.
    """
    if interface is not None:
        return _address_of(interface)
    for peer in [*peers, socket.gethostname()]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((peer, 9))  # of a datagram socket: chooses a way, sends nothing
            except OSError:
                continue
            found = str(probe.getsockname()[0])
        if not ipaddress.ip_address(found).is_loopback:
            return found
    return "127.0.0.1"


def connects(address: tuple[str, int], *, timeout_s: float = 1.0) -> bool:
    """Does somebody answer there?"""
    try:
        socket.create_connection(address, timeout=timeout_s).close()
    except OSError:
        return False
    return True


def tell(
    address: tuple[str, int], token: bytes, message: Mapping[str, object], *, timeout_s: float = 5.0
) -> Mapping[str, object] | None:
    """Say one thing to the supervisor and return its answer; None when none comes."""
    answers: list[Mapping[str, object]] = []
    lost: list[str] = []
    hub = ConnectionPool(token=token, on_message=lambda _, answer: answers.append(answer), on_gone=lambda _, why: lost.append(why))
    try:
        peer = hub.connect(*address, timeout_s=timeout_s)
        hub.send(peer, {"t": "hello", "role": "client"})
        hub.send(peer, message)
        for _ in range(int(timeout_s / 0.1)):
            if answers or lost:
                break
            hub.run_once(0.1)
    except (OSError, MusterError):
        return None
    finally:
        hub.shutdown()
    return answers[0] if answers else None


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", interface.encode()[:15]))  # SIOCGIFADDR
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise UsageError(
                f"slurm.interface: {socket.gethostname()} has no IPv4 address on {interface!r}",
                hint=f"its interfaces: {names}",
            ) from error
    return socket.inet_ntoa(found[20:24])
