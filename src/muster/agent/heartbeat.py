"""A host's heartbeat to the supervisor that holds the lease."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.core.errors import AccessError
from muster.transport.secure_session import Session


def supervisor_address(run_dir: Path) -> tuple[str, int] | None:
    """Where the supervisor listens, from its lease; None while there is none."""
    try:
        host, port = json.loads((run_dir / "lease.json").read_text())["address"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(host), int(port)


@dataclass
class HeartbeatSender:
    """Sends a heartbeat every ``every_s`` while a supervisor is connected, and tries to connect while none is."""

    run_dir: Path
    host: str
    token: bytes
    every_s: float
    _sock: socket.socket | None = field(default=None, init=False)
    _session: Session | None = field(default=None, init=False)

    def send_until(self, fd: int) -> None:
        """Send heartbeats until ``fd`` (a pidfd) is readable."""
        next_beat = time.monotonic()
        while True:
            if self._sock is None:
                self._connect()
            now = time.monotonic()
            if now >= next_beat:
                self._beat()
                next_beat = now + self.every_s
            watched: list[Any] = [fd] + ([self._sock] if self._sock else [])
            ready, _, _ = select.select(watched, [], [], max(0.0, next_beat - time.monotonic()))
            if fd in ready:
                return  # the connection stays open: the host lives, only its agent died
            if self._sock in ready:
                self._read()

    def _connect(self) -> None:
        address = supervisor_address(self.run_dir)
        if address is None:
            return
        try:
            self._sock = socket.create_connection(address, timeout=0.5)
            self._sock.settimeout(0.5)
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # After a cut the kernel backs off its retries, and heartbeats stay lost long after the link is back:
            # give up the connection instead, and open a new one.
            limit_ms = max(1000, int(self.every_s * 6000))
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)
            self._session = Session(self.token, server=False)
            self._session.send(
                {"t": "hello", "role": "beat", "host": self.host, "pid": os.getpid(), "every_s": self.every_s}
            )
        except OSError:
            self._drop()

    def _beat(self) -> None:
        if self._sock is None or self._session is None:
            return
        try:
            self._session.send({"t": "beat"})
            self._sock.sendall(self._session.outgoing())
        except OSError:
            self._drop()

    def _read(self) -> None:
        assert self._sock is not None and self._session is not None
        try:
            data = self._sock.recv(1 << 16)
            if not data:
                raise ConnectionError("closed")
            self._session.receive(data)
            self._sock.sendall(self._session.outgoing())
        except (OSError, AccessError, ValueError):
            self._drop()

    def _drop(self) -> None:
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.close()
        self._sock = self._session = None
