"""The address of a node, and what can be reached from it."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable, Mapping

from muster.core.errors import MusterError, UsageError
from muster.transport.connections import ConnectionPool


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


def request(
    address: tuple[str, int], token: bytes, message: Mapping[str, object], *, timeout_s: float = 5.0
) -> Mapping[str, object] | None:
    """Send the supervisor one message and return its answer; None when none comes."""
    answers: list[Mapping[str, object]] = []
    lost: list[str] = []
    hub = ConnectionPool(
        token=token, on_message=lambda _, answer: answers.append(answer), on_gone=lambda _, reason: lost.append(reason)
    )
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
            result = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", interface.encode()[:15]))  # SIOCGIFADDR
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise UsageError(
                f"slurm.interface: {socket.gethostname()} has no IPv4 address on {interface!r}",
                hint=f"its interfaces: {names}",
            ) from error
    return socket.inet_ntoa(result[20:24])
