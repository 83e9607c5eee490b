"""A host's heartbeat to the supervisor that holds the lease."""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from muster.agent.edge.lease import supervisor_address
from muster.core.errors import AccessError
from muster.core.heartbeat_timing import HeartbeatTiming
from muster.protocol.codec import encode
from muster.protocol.hello import BeatHello
from muster.protocol.to_supervisor import BEAT_FRAME
from muster.protocol.version import MINE, OtherVersion
from muster.transport.listening import HELLO_S
from muster.transport.secure_session import Session
from muster.transport.stream import write

#: So many beats are authenticated at once. One at a time, that costs as much as sending it: the ranks' work has put the
#: code of it out of the processor's caches meanwhile.
AHEAD = 64


@dataclass
class HeartbeatSender:
    """Sends a heartbeat every ``timing.interval_s`` while connected to a supervisor, else tries to connect."""

    run_dir: Path
    host: str
    token: bytes
    timing: HeartbeatTiming
    _sock: socket.socket | None = field(default=None, init=False)
    _session: Session | None = field(default=None, init=False)
    _ahead: list[bytes] = field(default_factory=list, init=False)
    """The session's next beats, the first one last."""
    _proof_until_s: float = field(default=0.0, init=False)
    """Who listens there has proved by then that it is this run's supervisor, or the connection is given up."""

    def send_until(self, fd: int) -> None:
        """Send heartbeats until ``fd`` (a pidfd) is readable."""
        next_beat = time.monotonic()
        poll, polled = _poll(fd, None), None
        while True:
            if self._sock is None:
                self._connect()
            now = time.monotonic()
            if now >= next_beat:
                self._beat()
                next_beat = now + self.timing.interval_s
            if self._sock is not polled:
                poll, polled = _poll(fd, self._sock), self._sock
            # In milliseconds, rounded up: woken too early it would only wait again.
            ready = poll.poll(math.ceil(1e3 * max(0.0, next_beat - time.monotonic())))
            if any(each == fd for each, _ in ready):
                return  # the connection stays open: the host lives, only its agent died
            if ready:
                self._read()

    def _connect(self) -> None:
        try:
            address = supervisor_address(self.run_dir, me=self.host)
        except OtherVersion:
            return  # the agent says so, and ends
        if address is None:
            return
        try:
            self._sock = socket.create_connection(address, timeout=0.5)
            self._sock.settimeout(0.5)
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            limit_ms = int(1e3 * self.timing.unacknowledged_s)
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)
            self._session = Session(self.token, server=False)
            self._proof_until_s = time.monotonic() + HELLO_S
            hello = BeatHello(version=MINE, host=self.host, pid=os.getpid(), every_s=self.timing.interval_s)
            self._session.send(encode(hello))  # once who listens has proved the token
        except OSError:
            self._drop()

    def _beat(self) -> None:
        if self._sock is None or self._session is None:
            return
        if not self._session.ready and time.monotonic() > self._proof_until_s:
            self._drop()  # a dead supervisor's port may be anybody's by now
            return
        if not self._ahead:
            for _ in range(AHEAD if self._session.ready else 1):
                self._session.send(BEAT_FRAME)
                self._ahead.append(self._session.outgoing())
            self._ahead.reverse()
        try:
            write(self._sock, self._ahead.pop())
        except OSError:
            self._drop()

    def _read(self) -> None:
        assert self._sock is not None and self._session is not None
        try:
            data = self._sock.recv(1 << 16)
            if not data:
                raise ConnectionError("closed")
            if self._session.frames(data):
                raise ConnectionError("refused")  # nothing else is said to a watchdog
            write(self._sock, self._session.outgoing())
        except (OSError, AccessError, ValueError):
            self._drop()

    def _drop(self) -> None:
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.close()
        self._sock = self._session = None
        self._ahead.clear()


def _poll(fd: int, sock: socket.socket | None) -> select.poll:
    result = select.poll()
    result.register(fd, select.POLLIN)
    if sock is not None:
        result.register(sock, select.POLLIN)
    return result
