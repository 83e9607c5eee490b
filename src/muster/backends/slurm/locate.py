"""Where a node is: its address, its rack, and what can be reached from it."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable, Mapping

from muster.core.errors import UsageError


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
