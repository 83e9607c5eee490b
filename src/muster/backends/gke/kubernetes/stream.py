"""Connections to the API server that stay open; standard library alone.

A WebSocket as the server speaks it (``v4.channel.k8s.io``) is how a command in a pod is reached: the first byte of
every message is its channel. ``Lines`` is an answer that goes on: a followed log, a watch.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import os
import socket
import ssl
import struct
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

STDIN, STDOUT, STDERR, ERROR, RESIZE = range(5)
PROTOCOL = "v4.channel.k8s.io"
_ACCEPT = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3
_TEXT, _BINARY, _CLOSE, _PING, _PONG = 1, 2, 8, 9, 10
_LARGEST_BYTES = 64 * 1024 * 1024


class Refused(Exception):
    """The server answered the handshake with something else; ``status`` and ``text`` are its words."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"status {status}: {text[:300]}")
        self.status, self.text = status, text


class Lines(Protocol):
    """Lines of an answer that goes on. May be closed from another thread, which ends the reading one."""

    def __iter__(self) -> Iterator[bytes]:
        """Each line with its end. Raises OSError where the connection broke, or fell silent for too long."""
        ...

    def close(self) -> None: ...


class Stream(Protocol):
    """Messages both ways, each on a channel."""

    def send(self, channel: int, data: bytes) -> None: ...

    def receive(self) -> tuple[int, bytes] | None:
        """The next message; None once the other side has closed. Raises OSError where the connection broke."""
        ...

    def close(self) -> None: ...


@dataclass
class WebSocket:
    """The client's end of one connection. ``send`` may be called from another thread than ``receive``."""

    sock: socket.socket
    _buffer: bytearray = field(default_factory=bytearray)
    _sending: threading.Lock = field(default_factory=threading.Lock)

    def send(self, channel: int, data: bytes) -> None:
        self._frame(_BINARY, bytes([channel]) + data)

    def receive(self) -> tuple[int, bytes] | None:
        whole = bytearray()
        while True:
            first, code, payload = self._next()
            if code == _CLOSE:
                with contextlib.suppress(OSError):
                    self._frame(_CLOSE, payload[:2])
                return None
            if code == _PING:
                self._frame(_PONG, payload)
            elif code != _PONG:
                whole += payload
                if len(whole) > _LARGEST_BYTES:
                    raise OSError("a message without end")
                if first & 0x80 and whole:
                    return whole[0], bytes(whole[1:])

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._frame(_CLOSE, struct.pack(">H", 1000))
        with contextlib.suppress(OSError):
            self.sock.close()

    def _frame(self, code: int, payload: bytes) -> None:
        """A client masks what it sends (RFC 6455, section 5.3)."""
        size = len(payload)
        if size < 126:
            head = struct.pack(">BB", 0x80 | code, 0x80 | size)
        elif size < 1 << 16:
            head = struct.pack(">BBH", 0x80 | code, 0x80 | 126, size)
        else:
            head = struct.pack(">BBQ", 0x80 | code, 0x80 | 127, size)
        mask = os.urandom(4)
        masked = bytes(byte ^ mask[index % 4] for index, byte in enumerate(payload))
        with self._sending:
            self.sock.sendall(head + mask + masked)

    def _next(self) -> tuple[int, int, bytes]:
        first, second = self._exactly(2)
        size = second & 0x7F
        if size == 126:
            (size,) = struct.unpack(">H", self._exactly(2))
        elif size == 127:
            (size,) = struct.unpack(">Q", self._exactly(8))
        if size > _LARGEST_BYTES:
            raise OSError(f"a frame of {size} bytes")
        return first, first & 0x0F, self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            data = self.sock.recv(1 << 16)
            if not data:
                raise ConnectionError("the API server hung up")
            self._buffer += data
        found = bytes(self._buffer[:size])
        del self._buffer[:size]
        return found


def open_stream(url: str, headers: Mapping[str, str], context: ssl.SSLContext | None, *, timeout_s: float) -> WebSocket:
    """Connect and shake hands.

    Raises:
        Refused: an HTTP answer instead of a WebSocket.
        OSError: nobody answered.
    """
    where = urllib.parse.urlsplit(url)
    port = where.port or (443 if where.scheme == "https" else 80)
    sock = socket.create_connection((where.hostname or "", port), timeout=timeout_s)
    try:
        if where.scheme == "https":
            sock = (context or ssl.create_default_context()).wrap_socket(sock, server_hostname=where.hostname)
        key = base64.b64encode(os.urandom(16)).decode()
        lines = [
            f"GET {where.path}?{where.query} HTTP/1.1",
            f"Host: {where.netloc}",
            "Connection: Upgrade",
            "Upgrade: websocket",
            f"Sec-WebSocket-Key: {key}",
            "Sec-WebSocket-Version: 13",
            f"Sec-WebSocket-Protocol: {PROTOCOL}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        sock.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        found = WebSocket(sock)
        _shake_hands(found, key)
    except BaseException:
        sock.close()
        raise
    sock.settimeout(None)
    return found


@dataclass
class HttpLines:
    """The real one, over one connection of its own."""

    response: http.client.HTTPResponse
    sock: socket.socket

    def __iter__(self) -> Iterator[bytes]:
        try:
            while line := self.response.readline():
                yield line
        except (http.client.HTTPException, ValueError) as error:
            raise ConnectionError(f"the answer broke off: {error!r}") from error

    def close(self) -> None:
        # The socket itself: closing the response would wait for the thread that reads it.
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self.sock.close()


def open_lines(
    url: str, headers: Mapping[str, str], context: ssl.SSLContext | None, *, timeout_s: float, silence_s: float
) -> HttpLines:
    """Ask for an answer that goes on; a connection on which nothing comes for ``silence_s`` counts as broken.

    Raises:
        Refused: the server will not.
        OSError: nobody answered.
    """
    where = urllib.parse.urlsplit(url)
    connection: http.client.HTTPConnection
    if where.scheme == "https":
        connection = http.client.HTTPSConnection(where.netloc, timeout=timeout_s, context=context)
    else:
        connection = http.client.HTTPConnection(where.netloc, timeout=timeout_s)
    try:
        connection.request("GET", f"{where.path}?{where.query}", headers=dict(headers))
        sock = connection.sock  # the response takes it over
        response = connection.getresponse()
        if response.status != 200:
            raise Refused(response.status, response.read().decode(errors="replace"))
    except http.client.HTTPException as error:
        connection.close()
        raise ConnectionError(f"no HTTP answer: {error!r}") from error
    except BaseException:
        connection.close()
        raise
    sock.settimeout(silence_s)
    return HttpLines(response, sock)


def _shake_hands(found: WebSocket, key: str) -> None:
    while b"\r\n\r\n" not in found._buffer:
        data = found.sock.recv(1 << 16)
        if not data:
            raise ConnectionError("the API server hung up")
        found._buffer += data
    head, _, rest = bytes(found._buffer).partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    status = int(first.split(" ", 2)[1])
    if status != 101:
        raise Refused(status, (rest + _rest_of(found, fields, rest)).decode(errors="replace"))
    wanted = base64.b64encode(hashlib.sha1((key + _ACCEPT).encode(), usedforsecurity=False).digest()).decode()
    if fields.get("sec-websocket-accept") != wanted:
        raise ConnectionError("the other side is no WebSocket server")
    found._buffer[:] = rest


def _rest_of(found: WebSocket, fields: Mapping[str, str], rest: bytes) -> bytes:
    left, more = int(fields.get("content-length", "0")) - len(rest), b""
    while left > len(more) and (data := found.sock.recv(1 << 16)):
        more += data
    return more
