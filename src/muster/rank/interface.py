"""The interface that gloo is configured to use: the one of this host's own address, and of no other.

gloo takes the name of an interface (``GLOO_SOCKET_IFNAME``) and listens on that interface's first address; without a
name it listens wherever the host's name leads (``lookupAddrForIface`` and ``lookupAddrForHostname`` in its
``transport/tcp/device.cc``). Neither asks anybody, so both are compared with the address that was asked for.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
from collections.abc import Collection, Iterator

from muster.core.errors import UsageError

VARIABLE = "GLOO_SOCKET_IFNAME"
#: If one of these is set, the user has chosen NCCL's network.
NCCL_NETWORK = {"NCCL_SOCKET_IFNAME", "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_CONF_FILE"}


def variables(address: str, *, named: Collection[str]) -> dict[str, str]:
    """What tells gloo and NCCL where to listen; what the user has ``named`` stays his, and where the image or the place
    configures NCCL's network it stays as that has it.

    NCCL meets its peers there too ("=": this very name), since the other hosts reach this one by that address; left
    to itself it takes the first interface that is up, of a container bridge for example. Its bulk data goes through
    InfiniBand, RoCE or a plugin where there is one, independent of this; plain sockets use this interface alone.
    Raises UsageError: gloo would take another address.
    """
    if VARIABLE in named:
        return {}
    name = interface_for(address)
    return {VARIABLE: name} | ({} if NCCL_NETWORK & set(named) else {"NCCL_SOCKET_IFNAME": f"={name}"})


def interface_for(address: str) -> str:
    """The interface with which gloo listens on ``address`` of this machine (a host's name: on its first address).

    Raises:
        UsageError: gloo would take another address.
    """
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise UsageError(f"gloo cannot listen on {address}: {error.strerror}", hint="MUSTER_BIND names it") from None
    return interface_of(str(found), list(interface_addresses()))


def interface_of(address: str, known: list[tuple[str, str]]) -> str:
    """The interface whose first address is ``address``; ``known``: (interface, address) in the kernel's order.

    Raises:
        UsageError: there is none; it names what gloo would take instead.
    """
    wanted = ipaddress.ip_address(address)
    name = next((name for name, each in known if ipaddress.ip_address(each) == wanted), None)
    if name is None:
        firsts = {name: each for name, each in reversed(known)}
        there = ", ".join(f"{each} ({name})" for name, each in firsts.items()) or "none"
        raise UsageError(
            f"gloo cannot listen on {address}: no network interface of this machine has that address",
            hint=f"MUSTER_BIND names an address of this machine ({there})",
        )
    first = next(each for other, each in known if other == name)
    if ipaddress.ip_address(first) != wanted:
        raise UsageError(
            f"gloo would listen on {first} instead of {address}: it takes the first address of {name}",
            hint=f"MUSTER_BIND={first}, or {VARIABLE}={name} to accept it",
        )
    return name


class _SockAddr(ctypes.Structure):
    _fields_ = [("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26)]


class _IfAddrs(ctypes.Structure):
    """``struct ifaddrs`` of getifaddrs(3), up to what is read of it."""


_IfAddrs._fields_ = [
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SockAddr)),
]


def interface_addresses() -> Iterator[tuple[str, str]]:
    """(interface, IPv4 or IPv6 address) of this machine, in getifaddrs(3)'s order, which is gloo's. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    head = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(head)):
        raise OSError(ctypes.get_errno(), "getifaddrs failed")
    try:
        entry = head
        while entry:
            found = entry.contents
            if found.address:
                data = bytes(found.address.contents.data)
                if found.address.contents.family == socket.AF_INET:
                    yield found.name.decode(), socket.inet_ntop(socket.AF_INET, data[2:6])
                elif found.address.contents.family == socket.AF_INET6:
                    yield found.name.decode(), socket.inet_ntop(socket.AF_INET6, data[6:22])
            entry = found.next
    finally:
        libc.freeifaddrs(head)
