"""A blocking, authenticated connection that carries JSON frames, raw bytes and open files.

Between replicators (TCP), and between a rank and its host's replicator (a Unix socket: only there files can be passed).
The handshake is ``transport.secure_session``'s. Frames and raw bytes never follow each other without an answer in
between: reading a frame may include what follows it.
"""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Mapping
from typing import Any

from muster.transport.secure_session import Session

CHUNK_BYTES = 4 * 1024 * 1024
TIMEOUT_S = 30.0
#: The replicator's socket in its host's memory folder (``storage.paths``), where ranks hand their shares over.
REPLICATOR_SOCKET = "replicator.sock"


class Stream:
    """One end. Making one exchanges the handshake.

    Raises (from every method):
        AccessError: the other end does not know the token.
        OSError: the connection broke (ConnectionError), or nothing came for ``TIMEOUT_S`` (TimeoutError).
    """

    def __init__(self, sock: socket.socket, token: bytes, *, server: bool) -> None:
        sock.settimeout(TIMEOUT_S)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.session = sock, Session(token, server=server)
        self._queued: list[dict[str, Any]] = []
        self._flush()
        while not self.session.ready:
            self._pump()

    def send(self, message: Mapping[str, Any]) -> None:
        self.session.send(message)
        self._flush()

    def receive(self) -> dict[str, Any]:
        while not self._queued:
            self._pump()
        return self._queued.pop(0)

    def send_bytes(self, data: memoryview) -> int:
        """Send raw bytes; returns their CRC-32."""
        crc = 0
        for start in range(0, len(data), CHUNK_BYTES):
            part = data[start : start + CHUNK_BYTES]
            crc = zlib.crc32(part, crc)
            self.sock.sendall(part)
        return crc

    def receive_bytes(self, into: memoryview) -> int:
        """Fill ``into`` with raw bytes; returns their CRC-32. Raises ConnectionError when they end early."""
        crc, done = 0, 0
        while done < len(into):
            count = self.sock.recv_into(into[done : done + CHUNK_BYTES])
            if not count:
                raise ConnectionError(f"ended after {done} of {len(into)} bytes")
            crc = zlib.crc32(into[done : done + count], crc)
            done += count
        return crc

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
        self._queued += self.session.receive(data)
        self._flush()
