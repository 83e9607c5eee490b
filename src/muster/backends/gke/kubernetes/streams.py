"""Connections to the API server that stay open: lines of a followed log or a watch, and commands in pods.

Commands use a WebSocket (``v4.channel.k8s.io``): the first byte of every message is its channel.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import httpx2
    from httpx2.websockets import WebSocketSession

STDIN, STDOUT, STDERR, ERROR, RESIZE = range(5)
PROTOCOL = "v4.channel.k8s.io"
LARGEST_BYTES = 1024 * 1024
"""Of one message; servers send at most tens of KiB. Also what one read allocates."""


class Lines(Protocol):
    """Lines of a response that goes on. Closing it from another thread ends the reading one."""

    def __iter__(self) -> Iterator[bytes]:
        """Each line with its end. Raises OSError where the connection broke, or was silent for too long."""
        ...

    def close(self) -> None: ...


class Stream(Protocol):
    """Messages both ways, each on a channel."""

    def send(self, channel: int, data: bytes) -> None:
        """May be called from another thread than ``receive``. Raises OSError where the connection broke."""
        ...

    def receive(self) -> tuple[int, bytes] | None:
        """The next message; None once the server has closed. Raises OSError where the connection broke."""
        ...

    def abort(self) -> None:
        """From another thread: makes ``receive`` raise OSError."""
        ...

    def close(self) -> None: ...


@dataclass
class HttpLines:
    """Over a streamed response."""

    response: httpx2.Response

    def __iter__(self) -> Iterator[bytes]:
        import httpx2

        rest = b""
        try:
            for data in self.response.iter_bytes():
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    yield line + b"\n"
        except httpx2.RemoteProtocolError:
            pass  # an end like any other: the caller asks whether the container ended
        except (httpx2.TransportError, httpx2.StreamError) as error:
            raise ConnectionError(f"the response broke off: {error!r}") from error
        finally:
            self.response.close()
        if rest:
            yield rest

    def close(self) -> None:
        # The socket itself: closing the response would not wake the thread that reads it.
        _shut_down(self.response.extensions.get("network_stream"))


@dataclass
class WebSocket:
    """The client's end of a command in a pod."""

    session: WebSocketSession
    opened: contextlib.ExitStack

    def send(self, channel: int, data: bytes) -> None:
        with _broken_is_oserror():
            self.session.send_bytes(bytes([channel]) + data)

    def receive(self) -> tuple[int, bytes] | None:
        from httpx2.websockets import WebSocketDisconnect

        with _broken_is_oserror():
            try:
                data = self.session.receive_bytes()
            except WebSocketDisconnect:
                return None
            return (data[0], data[1:]) if data else (STDOUT, b"")

    def abort(self) -> None:
        _shut_down(self.session.stream)

    def close(self) -> None:
        from wsproto.events import CloseConnection

        with contextlib.suppress(OSError), _broken_is_oserror():
            self.session.send(CloseConnection(1000))
        self.abort()  # else a reading thread of the library would wait for a server that is gone
        self.opened.close()


def open_stream(client: httpx2.Client, path: str, query: Sequence[tuple[str, str]], timeout_s: float) -> Stream:
    """Connect. Raises ``httpx2.websockets.WebSocketUpgradeError`` with the server's refusal."""
    opened = contextlib.ExitStack()
    # No pings: a kubelet's proxy need not answer them, and an idle shell is no fault.
    session = opened.enter_context(
        client.websocket(
            path, params=list(query), subprotocols=[PROTOCOL], timeout=timeout_s,
            max_message_size_bytes=LARGEST_BYTES, keepalive_ping_interval_seconds=None,
        )
    )  # fmt: skip
    return WebSocket(session, opened)


@contextlib.contextmanager
def _broken_is_oserror() -> Iterator[None]:
    from httpx2.websockets import HTTPXWSException
    from wsproto.utilities import LocalProtocolError  # sent after the server's close

    try:
        yield
    except (HTTPXWSException, LocalProtocolError) as error:
        raise ConnectionError(f"the API server closed the connection: {error!r}") from error


def _shut_down(stream: object) -> None:
    get = getattr(stream, "get_extra_info", None)  # absent where a test answers from memory
    sock = get("socket") if get is not None else None
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
