"""What every listener of ours owes its process: the right address, and descriptors left for the process's own files.

Anybody who reaches a port may connect. Until an end has proved that it knows the run's token it is a stranger, and
strangers may cost little: each has ``HELLO_S``, there is a number of them at most, and they never get the last
``RESERVE`` descriptors.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
import struct

#: The time in which an end proves that it knows the run's token, and then again the time for its first message.
HELLO_S = 5.0
#: Descriptors that no accepted connection may take: the lease, event log and run file are reopened for each access.
RESERVE = 32
#: Soft limit on descriptors, where the hard one allows it: 8,192 hosts have two connections each to the supervisor.
#: Not the hard limit itself, which may be 2^30: some programs close every number below their limit.
WANTED = 65_536
#: Accepting fails with these while the process, the machine or the kernel has no room; what waits stays in the queue.
NO_ROOM = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
BACKLOG = 1024
#: The twelfth of the 32-bit fields that follow eight bytes in ``struct tcp_info`` (linux/tcp.h).
_LAST_DATA_RECV = struct.Struct("52xI")


def bind_path(path: str) -> socket.socket:
    """A Unix socket bound to ``path``, which its owner alone may connect to under any umask. Not listening yet."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    os.fchmod(sock.fileno(), 0o600)  # before the path is there: Linux takes the path's mode from the socket's
    sock.bind(path)
    return sock


def raise_soft_limit() -> None:
    """Raise this process's soft limit on open descriptors as far as ``WANTED``; what it starts inherits that.

    1,024 is the usual soft limit (because of select(2), which nothing here uses on many descriptors).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def soft_limit() -> int:
    """Descriptors that this process may have now; where that is not limited, more than there are."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 31


def is_reserved(fd: int) -> bool:
    """Whether ``fd``, just opened, is one of the last ``RESERVE``: the kernel gives the lowest free number."""
    return fd >= soft_limit() - RESERVE


def off_reserve(sock: socket.socket) -> socket.socket:
    """The same socket under a descriptor that is not reserved; the one given may be closed.

    Raises OSError: all others are taken.
    """
    if not is_reserved(sock.fileno()):
        return sock
    with sock:
        lower = sock.dup()
    if is_reserved(lower.fileno()):
        lower.close()
        raise OSError(errno.EMFILE, "the last descriptors are for this process's own files")
    return lower


def last_received_s(sock: socket.socket) -> float:
    """How long ago the last data came, by the kernel's account (``tcpi_last_data_recv`` of tcp(7), milliseconds in
    steps of a jiffy); 0 where it keeps none."""
    try:
        found = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_RECV.size)
        return float(_LAST_DATA_RECV.unpack(found)[0]) / 1e3
    except (OSError, struct.error):
        return 0.0


def listen_on(address: str, port: int = 0) -> socket.socket:
    """A TCP listener on this very IPv4 or IPv6 address (``port`` 0: any). Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=BACKLOG)
