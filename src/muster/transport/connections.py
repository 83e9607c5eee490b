"""Sessions over sockets, in one selector loop: the only place where bytes meet the network.

A ``ConnectionPool`` owns every connection of a process. ``poll`` yields what happens as values, and the owner acts on
each before the next one is read. The pool never blocks: what cannot be written now waits in a buffer, and a peer that
does not read is dropped when the buffer passes a limit. So is one that does not say in time who it is.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import select
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from muster.core.errors import AccessError
from muster.core.typed_json import Record, Unreadable
from muster.protocol.codec import encode
from muster.transport.listening import (
    BACKLOG,
    HELLO_S,
    NO_ROOM,
    bind_path,
    is_reserved,
    last_received_s,
    listen_on,
    off_reserve,
    soft_limit,
)
from muster.transport.secure_session import Session

BUFFER_LIMIT_BYTES = 64 * 1024 * 1024
#: A connection whose data is unacknowledged for this long is closed (after a cut the kernel would retry for minutes).
UNHEARD_MS = 10_000
#: Accepted connections that have not proved the token, at most: this or a quarter of the descriptors, up to
#: ``MOST_STRANGERS``. When a run starts all its hosts connect at once.
STRANGERS = 256
MOST_STRANGERS = 4096
#: Then the oldest goes for a new one, if it has had so long: a true peer answers within a round trip. Until it has,
#: those that come wait in the kernel's queue, and for so long at a time the listener is left alone.
ANSWER_S = 0.25
FULL_S = 0.01
#: So many are accepted at once before those that are here already are served again.
AT_ONCE = 32
#: After an accept for which there was no room, none is tried for this long: the listener would stay readable.
NO_ROOM_S = 0.1


#: Reads a frame. Raises Unreadable, which ends the connection.
Reader = Callable[[bytes], object]


def _refuse(_frame: bytes) -> object:
    raise Unreadable("nothing is expected here")


def _ignore(_frame: bytes) -> object:
    return None


@dataclass(eq=False)
class Connection:
    """One connection: its session, and a place for the owner to keep who it is."""

    sock: socket.socket
    session: Session
    read: Reader = _refuse
    pending: bytearray = field(default_factory=bytearray)
    number: int = field(default_factory=itertools.count(1).__next__)
    """Never used again in this process, as an ``id()`` would be."""
    identity: object = None
    """Who it is, as the owner knows it."""
    accepted: bool = False
    """The other end connected."""
    closed: bool = False

    def expect(self, read: Reader) -> None:
        """From the next frame on this connection carries the messages of one channel (``protocol.codec.reader_of``)."""
        self.read = read


@dataclass(frozen=True)
class Received:
    """A peer's message."""

    peer: Connection
    message: Any


@dataclass(frozen=True)
class Lost:
    """The connection is closed, by the other end or for ``reason``. Nothing follows from this peer."""

    peer: Connection
    reason: str
    unreadable: bool = False
    """A frame was no message of its channel."""


@dataclass(frozen=True)
class Ready:
    """A descriptor that the owner watches is readable."""

    token: object


PeerEvent = Received | Lost | Ready


@dataclass(frozen=True, eq=False)
class _Watched:
    token: object


class _Own(enum.Enum):
    """Descriptors of the pool itself."""

    LISTENER, ENDS, WAKE = range(3)


@dataclass
class ConnectionPool:
    """All sockets of a process.

    ``greeting`` reads the first message of an accepted connection, and ``channels`` has what reads the frames behind
    it, by the greeting's class: they may have come in the same read. The connecting side declares what is expected
    (``Connection.expect``). A frame that cannot be read ends its connection, with the reason. Within ``hello_s`` an
    accepted connection proves that it knows the token, and within as long again it says its first message; a server
    that we connect to proves it within ``hello_s``.
    """

    token: bytes
    greeting: Reader = _refuse
    channels: Mapping[type, Reader] = field(default_factory=dict)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    peers: set[Connection] = field(default_factory=set)
    hello_s: float = HELLO_S
    _strangers: dict[Connection, float] = field(default_factory=dict)
    """Accepted and without a proof, oldest first: when each is given up, by the monotonic clock."""
    _left: dict[int, Connection] = field(default_factory=dict)
    """Connections that are read by ``collect`` alone, by descriptor."""
    _ends: select.epoll | None = None  # sees their ends
    _silent: dict[Connection, float] = field(default_factory=dict)
    """The same of those that have proved the token and said nothing, and of servers that have not proved it."""
    _resting: dict[socket.socket, float] = field(default_factory=dict)
    """Listeners for whose connections there is no room, and when accepting is tried again."""
    _events: deque[PeerEvent] = field(default_factory=deque)
    """Of what was done outside of a read: a peer that took no more, one that was silent for too long."""

    def listen(self, address: str) -> tuple[str, int]:
        """Accept connections on any port; return the address bound. ``unix:PATH`` listens on a socket file."""
        if address.startswith("unix:"):
            server, bound = bind_path(address.removeprefix("unix:")), (address, 0)
        else:
            server = listen_on(address)
            bound = server.getsockname()[:2]
        server.listen(BACKLOG)
        server.setblocking(False)
        self._watch_listener(server)
        return bound

    def connect(self, address: str, port: int, *, timeout_s: float = 2.0) -> Connection:
        """Open a connection as the client. Raises OSError when there is no answer within ``timeout_s``."""
        if address.startswith("unix:"):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(timeout_s)
            sock.connect(address.removeprefix("unix:"))
        else:
            sock = socket.create_connection((address, port), timeout=timeout_s)
        return self.adopt(sock, server=False)

    def adopt(self, sock: socket.socket, *, server: bool) -> Connection:
        """Take a connected socket into the loop. ``server``: the other end connected."""
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNHEARD_MS)
        peer = Connection(sock=sock, session=Session(self.token, server=server), accepted=server)
        self.selector.register(sock, selectors.EVENT_READ, peer)
        self.peers.add(peer)
        (self._strangers if server else self._silent)[peer] = time.monotonic() + self.hello_s
        self._flush(peer)
        return peer

    def leave_socket_files(self) -> None:
        """Accept nothing more on socket files: they are deleted. Their connections stay."""
        for server in list(self._resting):
            self._watch_again(server)
        sockets = [key.fileobj for key in self.selector.get_map().values() if isinstance(key.fileobj, socket.socket)]
        for sock in sockets:
            if sock.family == socket.AF_UNIX and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                self.selector.unregister(sock)
                sock.close()

    def watch(self, fd: int, token: object) -> None:
        """Yield ``Ready(token)`` while ``fd`` is readable (a pidfd, a pipe)."""
        self.selector.register(fd, selectors.EVENT_READ, _Watched(token))

    def wake_on_signals(self) -> int:
        """A signal ends the wait of ``poll`` from now on; returns the wake-up descriptor that this replaces.

        Raises ValueError outside of the main thread.
        """
        wake, self._signals = socket.socketpair()
        self._signals.setblocking(False)
        self.selector.register(wake, selectors.EVENT_READ, _Own.WAKE)
        return signal.set_wakeup_fd(self._signals.fileno(), warn_on_full_buffer=False)

    def unwatch(self, fd: int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(fd)

    def send(self, peer: Connection, message: Record) -> None:
        """Queue and try to write; a peer that is gone swallows it (``Lost`` follows)."""
        if peer.closed:
            return
        peer.session.send(encode(message))
        self._flush(peer)

    def dismiss(self, peer: Connection, message: Record) -> None:
        """Send a last message. What the other end still says is dropped: closing at once could take the answer away."""
        self.send(peer, message)
        peer.read = _ignore
        with contextlib.suppress(OSError):
            peer.sock.shutdown(socket.SHUT_WR)

    def leave(self, peer: Connection) -> None:
        """Stop waking the loop for ``peer``'s data: ``collect`` reads it. A disconnect still wakes the loop."""
        if peer.closed:
            return
        if self._ends is None:
            self._ends = select.epoll()
            self.selector.register(self._ends, selectors.EVENT_READ, _Own.ENDS)
        self.selector.unregister(peer.sock)
        self._left[peer.sock.fileno()] = peer
        self._ends.register(peer.sock, select.EPOLLRDHUP)

    def collect(self, peer: Connection) -> float | None:
        """Read and drop what has come from a connection that was left: how many seconds ago the last of it came.

        By the kernel's account, to 10 ms; 0 where that is not to be had. None: nothing came. An end is yielded by the
        next ``poll``.
        """
        came = False
        for event in () if peer.closed else self._read(peer):
            came = came or isinstance(event, Received)
        return (0.0 if peer.closed else last_received_s(peer.sock)) if came else None

    def drain(self, peer: Connection) -> Iterator[PeerEvent]:
        """Everything already received in the socket (a dead peer's last messages)."""
        for _ in range(64):
            if peer.closed or not _readable(peer.sock):
                return
            yield from self._read(peer)

    def close(self, peer: Connection) -> None:
        """Close; no ``Lost`` follows."""
        if not peer.closed:
            peer.closed = True
            self.peers.discard(peer)
            if self._left.pop(peer.sock.fileno(), None) is not None and self._ends is not None:
                self._ends.unregister(peer.sock)
            self._strangers.pop(peer, None)
            self._silent.pop(peer, None)
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(peer.sock)
            peer.sock.close()

    def poll(self, timeout_s: float | None) -> Iterator[PeerEvent]:
        """Wait at most ``timeout_s`` for something to happen; yield all of it, one after the other.

        A generator: each event is handled before the next frame is decoded and the next descriptor is read.
        """
        oldest = [next(iter(waiting.values())) for waiting in (self._strangers, self._silent) if waiting]
        due_s = [*oldest, *self._resting.values()]
        if due_s:
            own_s = max(0.0, min(due_s) - time.monotonic())
            timeout_s = own_s if timeout_s is None else min(timeout_s, own_s)
        for key, mask in self.selector.select(0 if self._events else timeout_s):
            now = self.selector.get_map().get(key.fd)
            if now is not None and now.data is key.data:  # else what an event before has led to has closed this one
                yield from self._serve(key, mask)
        if due_s:
            self._expire()
        yield from self._queued()

    def shutdown(self, *, flush_s: float = 1.0) -> None:
        """Write what is still queued (bounded), then close everything."""
        for peer in list(self.peers):
            with contextlib.suppress(OSError):
                peer.sock.settimeout(flush_s)
                peer.sock.sendall(bytes(peer.pending))
            self.close(peer)
        for key in list(self.selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        for server in self._resting:
            server.close()
        if self._ends is not None:
            self._ends.close()
        self.selector.close()

    def _watch_listener(self, server: socket.socket) -> None:
        self.selector.register(server, selectors.EVENT_READ, _Own.LISTENER)

    def _serve(self, key: selectors.SelectorKey, mask: int) -> Iterator[PeerEvent]:
        match key.data:
            case Connection() as peer:
                if mask & selectors.EVENT_WRITE:
                    self._flush(peer)
                if mask & selectors.EVENT_READ and not peer.closed:
                    yield from self._read(peer)
            case _Watched(token=token):
                yield Ready(token)
            case _Own.LISTENER:
                yield from self._accept(cast(socket.socket, key.fileobj))
            case _Own.ENDS:
                assert self._ends is not None
                for peer in [self._left[fd] for fd, _ in self._ends.poll(0)]:
                    yield from self.drain(peer)
            case _Own.WAKE:
                cast(socket.socket, key.fileobj).recv(256)
        yield from self._queued()

    def _queued(self) -> Iterator[PeerEvent]:
        while self._events:
            yield self._events.popleft()

    def _accept(self, server: socket.socket) -> Iterator[PeerEvent]:
        for _ in range(AT_ONCE):
            if not (yield from self._make_room()):
                self._rest(server, FULL_S)
                return
            try:
                sock, _address = server.accept()
            except BlockingIOError:
                return
            except OSError as error:  # ECONNABORTED and the like: that one is gone, the next may be there
                if error.errno in NO_ROOM:
                    self._rest(server, NO_ROOM_S)
                    return
                continue
            if is_reserved(sock.fileno()):
                self._drop_oldest_stranger()
            try:
                peer = self.adopt(off_reserve(sock), server=True)
            except OSError:  # it is gone, or there was no descriptor for it
                sock.close()
                continue
            peer.read = self.greeting

    def _make_room(self) -> Generator[PeerEvent, None, bool]:
        """Whether one more stranger may come. The oldest goes for it, if it has had time to answer."""
        if len(self._strangers) < min(max(STRANGERS, soft_limit() // 4), MOST_STRANGERS):
            return True
        oldest, until = next(iter(self._strangers.items()))
        if time.monotonic() < until - self.hello_s + ANSWER_S:
            return False
        yield from self._read(oldest)  # this process may have been busy: the proof is here, unread
        if oldest in self._strangers:
            self._drop_oldest_stranger()
        return True

    def _rest(self, server: socket.socket, for_s: float) -> None:
        """No room (this process's own files have taken every descriptor, say): leave the listener alone."""
        self.selector.unregister(server)
        self._resting[server] = time.monotonic() + for_s

    def _watch_again(self, server: socket.socket) -> None:
        del self._resting[server]
        self._watch_listener(server)

    def _drop_oldest_stranger(self) -> None:
        oldest = next(iter(self._strangers), None)
        if oldest is not None:
            self._gone(oldest, "made way for a newer connection before it proved that it knows the run's token")

    def _expire(self) -> None:
        """Give up those that are silent for too long. What has come from them was read just before, so that a process
        that was stopped does not blame its peers for its own pause."""
        now = time.monotonic()
        for waiting in (self._strangers, self._silent):
            for peer in [peer for peer, until in waiting.items() if until <= now]:
                lacking = "speak" if peer.session.ready else "prove that it knows the run's token"
                self._gone(peer, f"did not {lacking} within {self.hello_s:g} s")
        for server in [server for server, until in self._resting.items() if until <= now]:
            self._watch_again(server)

    def _read(self, peer: Connection) -> Iterator[Received]:
        try:
            data = peer.sock.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError as error:
            self._gone(peer, error.strerror or str(error))
            return
        if not data:
            self._gone(peer, "connection closed")
            return
        try:
            frames = peer.session.frames(data)
        except (AccessError, ValueError) as error:
            self._gone(peer, str(error))
            return
        if peer.session.ready:
            self._on_proof(peer)
        self._flush(peer)
        for frame in frames:
            if peer.closed:
                return
            try:
                message = peer.read(frame)
            except Unreadable as error:
                self._gone(peer, str(error), unreadable=True)
                return
            self._silent.pop(peer, None)
            if peer.read is _ignore:
                continue
            peer.read = self.channels.get(type(message), peer.read)
            yield Received(peer, message)

    def _on_proof(self, peer: Connection) -> None:
        """It knows the token. A server need not speak; who connected has something to say."""
        if not peer.accepted:
            self._silent.pop(peer, None)
        elif self._strangers.pop(peer, None) is not None:
            self._silent[peer] = time.monotonic() + self.hello_s

    def _flush(self, peer: Connection) -> None:
        peer.pending += peer.session.outgoing()
        if not peer.pending:
            return
        try:
            while peer.pending:
                sent = peer.sock.send(peer.pending)
                del peer.pending[:sent]
        except BlockingIOError:
            pass
        except OSError:
            return  # the reading side reports it
        if len(peer.pending) > BUFFER_LIMIT_BYTES:
            self._gone(peer, f"does not read: {len(peer.pending)} bytes wait")
            return
        requested = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.pending else 0)
        with contextlib.suppress(KeyError, ValueError):
            key = self.selector.get_key(peer.sock)
            if key.events != requested:
                self.selector.modify(peer.sock, requested, key.data)

    def _gone(self, peer: Connection, reason: str, *, unreadable: bool = False) -> None:
        if not peer.closed:
            self.close(peer)
            self._events.append(Lost(peer, reason, unreadable))


def _readable(sock: socket.socket) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        return bool(selector.select(0))
