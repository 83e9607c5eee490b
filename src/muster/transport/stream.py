"""A blocking, authenticated connection that carries JSON frames, raw bytes and open files.

Between replicators (TCP), and between a rank and its host's replicator (a Unix socket: only there files can be passed).
The handshake is ``transport.secure_session``'s. Frames and raw bytes never follow each other without an answer in
between: reading a frame may include what follows it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from muster.core.typed_json import Record
from muster.protocol.codec import encode
from muster.transport.listening import HELLO_S
from muster.transport.secure_session import Session

Message = TypeVar("Message")
CHUNK_BYTES = 4 * 1024 * 1024
TIMEOUT_S = 30.0
#: The replicator's socket in its host's memory folder (``storage.memory_dir``), where ranks hand their shares over.
REPLICATOR_SOCKET = "replicator.sock"


def write(sock: socket.socket, data: bytes) -> None:
    """As ``sendall`` on a socket with a timeout, which polls before it sends: here only where there is no room yet. A
    call to the system gives the interpreter's lock away.

    Raises:
        OSError: as ``sendall``.
    """
    sent = 0
    with contextlib.suppress(BlockingIOError):
        sent = os.write(sock.fileno(), data) if data else 0
    if sent < len(data):
        sock.sendall(data[sent:])


class Stream(Generic[Message]):
    """One end. Making one exchanges the handshake, in ``handshake_s`` altogether. ``decode`` reads a frame
    (``protocol.codec.reader_of``).

    ``handshake_s``: ``HELLO_S`` for a server, since anybody may connect; ``timeout_s`` for who connected.

    Raises (from every method):
        AccessError: the other end does not know the token.
        Unreadable: a frame is no message of this channel.
        OSError: the connection broke (ConnectionError), or nothing came for ``timeout_s`` (TimeoutError).
    """

    def __init__(
        self,
        sock: socket.socket,
        token: bytes,
        *,
        server: bool,
        decode: Callable[[bytes], Message],
        timeout_s: float = TIMEOUT_S,
        handshake_s: float | None = None,
    ) -> None:
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.session = sock, Session(token, server=server)
        self._decode = decode
        self._queued: list[bytes] = []
        self._shake_hands((HELLO_S if server else timeout_s) if handshake_s is None else handshake_s)
        sock.settimeout(timeout_s)

    def _shake_hands(self, limit_s: float) -> None:
        until = time.monotonic() + limit_s
        self.sock.settimeout(limit_s)
        self._flush()
        while not self.session.ready:
            left_s = until - time.monotonic()
            if left_s <= 0:  # a byte now and then buys no more time
                raise TimeoutError(f"the other end did not prove within {limit_s:g} s that it knows the run's token")
            self.sock.settimeout(left_s)
            self._pump()

    def send(self, message: Record) -> None:
        self.session.send(encode(message))
        self._flush()

    def receive(self) -> Message:
        while not self._queued:
            self._pump()
        return self._decode(self._queued.pop(0))

    def send_bytes(self, data: memoryview) -> None:
        """Send raw bytes."""
        for start in range(0, len(data), CHUNK_BYTES):
            self.sock.sendall(data[start : start + CHUNK_BYTES])

    def receive_bytes(self, into: memoryview) -> None:
        """Fill ``into`` with raw bytes, which the caller verifies. Raises ConnectionError when they end early."""
        done = 0
        while done < len(into):
            count = self.sock.recv_into(into[done : done + CHUNK_BYTES])
            if not count:
                raise ConnectionError(f"ended after {done} of {len(into)} bytes")
            done += count

    def send_file(self, fd: int) -> None:
        """Pass an open file, as one raw byte. Unix sockets only."""
        socket.send_fds(self.sock, [b"F"], [fd])

    def receive_file(self) -> int:
        """The file descriptor that ``send_file`` passed; the caller closes it."""
        data, fds, _, _ = socket.recv_fds(self.sock, 1, 1)
        if not data or len(fds) != 1:
            for fd in fds:
                os.close(fd)
            raise ConnectionError("no file arrived")
        return fds[0]

    def close(self) -> None:
        self.sock.close()

    def _flush(self) -> None:
        out = self.session.outgoing()
        if out:
            self.sock.sendall(out)

    def _pump(self) -> None:
        data = self.sock.recv(1 << 16)
        if not data:
            raise ConnectionError("the other end closed the connection")
        self._queued += self.session.frames(data)
        self._flush()
