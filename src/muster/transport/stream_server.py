"""Accepts connections for blocking ``Stream``s, each in a thread of its own, so that strangers delay no peer."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from muster.core.errors import MusterError
from muster.transport.listening import is_reserved, off_reserve
from muster.transport.stream import Stream

Message = TypeVar("Message")

#: Connections, and threads, whose other end has not proved that it knows the token, at most: the oldest goes for a new
#: one.
STRANGERS = 64
#: Pause after an accept that failed: no descriptor, thread or memory is free for a new connection.
PAUSE_S = 0.05
#: How often strangers are logged.
LOG_EVERY_S = 60.0


def serve_streams(
    listener: socket.socket,
    token: bytes,
    talk: Callable[[Stream[Message]], None],
    *,
    decode: Callable[[bytes], Message],
    peer: str,
    log: Callable[[str], None],
) -> None:
    """Until ``stop_serving`` each connection has a thread in which ``talk`` uses it until it returns or raises.

    No error of a connection, and no want of descriptors or threads, ends it. ``peer``: who connects, for the ``log``.
    """
    strangers = _Strangers(peer, log)

    def answer(sock: socket.socket) -> None:
        with sock:
            try:
                stream = Stream(sock, token, server=True, decode=decode)
            except (OSError, MusterError, ValueError) as error:
                strangers.close(sock)
                strangers.on_refused(error)
                return
            strangers.remove(sock)
            try:
                talk(stream)
            except (OSError, MusterError, ValueError) as error:
                if not isinstance(error, ConnectionError):
                    log(f"answering {peer}: {error}")

    while True:
        try:
            sock, _ = listener.accept()
        except OSError:
            if listener.fileno() < 0:
                return
            time.sleep(PAUSE_S)
            continue
        if is_reserved(sock.fileno()):
            strangers.make_room()
            try:
                sock = off_reserve(sock)
            except OSError:
                sock.close()
                continue
        strangers.add(sock)
        try:
            threading.Thread(target=answer, args=(sock,), daemon=True).start()
        except RuntimeError:  # no more threads
            strangers.close(sock)
            time.sleep(PAUSE_S)


def stop_serving(listener: socket.socket) -> None:
    """Close ``listener`` and let ``serve_streams`` return.

    Closing alone does neither on Linux: a thread that waits in accept keeps the socket, and with it the port, until
    a peer connects, which is then answered.
    """
    with contextlib.suppress(OSError):  # closed, or no listener any more
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


class _Strangers:
    """Connections whose handshake is under way, oldest first. Their threads close them."""

    def __init__(self, peer: str, log: Callable[[str], None]) -> None:
        self._peer, self._log = peer, log
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._socks: dict[socket.socket, None] = {}
        self._refused = 0
        self._quiet_until_s = 0.0

    def add(self, sock: socket.socket) -> None:
        with self._lock:
            self._socks[sock] = None
            many = len(self._socks) > STRANGERS
        if many:
            self._drop_oldest()

    def remove(self, sock: socket.socket) -> None:
        with self._lock:
            self._socks.pop(sock, None)

    def close(self, sock: socket.socket) -> None:
        with self._lock:
            self._socks.pop(sock, None)
            sock.close()
        self._closed.set()

    def make_room(self) -> None:
        """Return once a descriptor is free, or could not be freed in a moment."""
        self._closed.clear()
        self._drop_oldest()
        self._closed.wait(PAUSE_S)

    def _drop_oldest(self) -> None:
        with self._lock:  # its thread cannot close it meanwhile: the number may then be another file's
            oldest = next(iter(self._socks), None)
            if oldest is None:
                return
            del self._socks[oldest]
            try:
                oldest.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it has gone by itself

    def on_refused(self, error: Exception) -> None:
        """One line a minute at most: who connects must not fill the disk."""
        with self._lock:
            self._refused += 1
            if time.monotonic() < self._quiet_until_s:
                return
            count, self._refused = self._refused, 0
            self._quiet_until_s = time.monotonic() + LOG_EVERY_S
        self._log(f"not answered: connections that did not prove to be {self._peer}: {count}, the last: {error}")
