"""A rank's connection to its host's agent: events out, commands in, heartbeats between.

One daemon thread (started after the fork, never before) owns the socket, so that the training loop never
waits for a reader. When the agent dies the client reconnects to its successor and sends what it queued; if none
accepts within ``orphan_s`` the rank ends itself, because nothing could stop it any more.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from muster.core.errors import AccessError
from muster.protocol.ranks import Command, RankContext
from muster.transport.secure_session import Session

#: Messages queued while no agent is connected; the oldest are dropped first.
MAX_QUEUED = 10_000
#: Shortest interval between reports of progress outside of steps.
PROGRESS_EVERY_S = 0.5
#: How long a rank that lost a peer waits for a pause request; the agents detect a real loss sooner.
LOST_PEER_WAIT_S = 10.0


class AgentConnection:
    """A blocking connection to the agent's socket file, before any thread exists (standby)."""

    def __init__(self, address: str, token: bytes, hello: Mapping[str, Any], *, timeout_s: float = 5.0) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(timeout_s)
        self.sock.connect(address)
        self.session = Session(token, server=False)
        while not self.session.ready:
            self._pump()
        self.send(hello)

    def send(self, message: Mapping[str, Any]) -> None:
        self.session.send(message)
        self._flush()

    def wait(self, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """Block for the next messages. Raises ConnectionError when the agent closes, TimeoutError."""
        self.sock.settimeout(timeout_s)
        while True:
            messages = self._pump()
            if messages:
                return messages

    def _pump(self) -> list[dict[str, Any]]:
        self._flush()
        data = self.sock.recv(1 << 16)
        if not data:
            raise ConnectionError("the agent closed the connection")
        messages = self.session.receive(data)
        self._flush()
        return messages

    def _flush(self) -> None:
        out = self.session.outgoing()
        if out:
            self.sock.sendall(out)


@dataclass(frozen=True)
class AgentAddress:
    """Where a host's agent and its successors listen, and what a process owes them."""

    path: str
    token: bytes
    orphan_s: float
    """How long to look for a successor."""
    beat_every_s: float

    def connection(self, hello: Mapping[str, Any], *, timeout_s: float = 5.0) -> AgentConnection:
        return AgentConnection(self.path, self.token, hello, timeout_s=timeout_s)

    def wait_for_connection(
        self,
        hello: Callable[[], Mapping[str, Any]],
        *,
        timeout_s: float = 5.0,
        no_longer: Callable[[], bool] = lambda: False,
    ) -> AgentConnection | None:
        """Try until an agent accepts; None: none did within ``orphan_s``, or ``no_longer`` said so."""
        deadline = time.monotonic() + self.orphan_s
        while time.monotonic() < deadline and not no_longer():
            try:
                return self.connection(hello(), timeout_s=timeout_s)
            except (OSError, AccessError, ValueError):
                time.sleep(0.1)
        return None


@dataclass
class ProgressThrottle:
    """When to report progress outside of steps: rarely, and repeatedly until the end of a granted period."""

    sent_s: float = -math.inf
    until_s: float = -math.inf

    def grant(self, now_s: float, *, for_s: float) -> bool:
        """Progress was made, and counts as such for the next ``for_s``: whether to report it now."""
        self.until_s = now_s + for_s
        return self._due(now_s)

    def repeat(self, now_s: float) -> bool:
        """Whether to report again within the granted period."""
        return now_s < self.until_s and self._due(now_s)

    def _due(self, now_s: float) -> bool:
        if now_s - self.sent_s < PROGRESS_EVERY_S:
            return False
        self.sent_s = now_s
        return True


class SocketAgentClient:
    """``protocol.ranks.AgentClient`` over the agent's socket."""

    def __init__(
        self, connection: AgentConnection, agent: AgentAddress, hello: Mapping[str, Any], *, attempt: int, rank: int
    ) -> None:
        self._connection: AgentConnection | None = connection
        self._agent, self._hello = agent, hello
        self._place = {"attempt": attempt, "rank": rank}
        self._out: collections.deque[dict[str, Any]] = collections.deque(maxlen=MAX_QUEUED)
        self._commands: collections.deque[Command] = collections.deque()
        self._paused = threading.Event()
        self._on_pause: Callable[[], None] = lambda: None
        self._pause_report: dict[str, Any] | None = None
        self._assignments: queue.SimpleQueue[RankContext] = queue.SimpleQueue()
        self._step = -1
        self._micro = 0
        self._beat_now = False
        self._progress_throttle = ProgressThrottle()
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_r, False)
        os.set_blocking(self._wake_w, False)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="muster-link", daemon=True)
        self._thread.start()

    def emit(self, kind: str, *, step: int | None = None, phase: str | None = None, **detail: Any) -> None:
        event = {
            "kind": kind,
            **self._place,
            "mono_ns": time.monotonic_ns(),
            "wall_ns": time.time_ns(),
            "detail": detail,
        }
        if step is not None:
            event["step"] = step
        if phase is not None:
            event["phase"] = phase
        self._out.append({"t": "event", "event": event})
        self._wake()

    def beat(self, step: int) -> None:
        new = step != self._step
        self._step, self._micro = step, self._micro + 1
        if new:  # a snapshot is complete: the replicator can start now instead of at the next heartbeat
            self._beat_now = True
            self._wake()

    def progress(self, *, for_s: float = 0.0) -> None:
        if self._progress_throttle.grant(time.monotonic(), for_s=for_s):
            self._send_progress()

    def _send_progress(self) -> None:
        self._out.append({"t": "progress", **self._place})
        self._wake()

    def next_command(self) -> Command | None:
        return self._commands.popleft() if self._commands else None

    def pause_requested(self) -> bool:
        return self._paused.is_set()

    def on_pause(self, act: Callable[[], None]) -> None:
        self._on_pause = act
        if self._paused.is_set():
            act()

    def wait_for_assignment(self, step: int) -> RankContext | None:
        """Blocks up to ``LOST_PEER_WAIT_S`` for a pause request, then without limit for the assignment."""
        if not self._paused.wait(LOST_PEER_WAIT_S):
            return None
        self._pause_report = {"t": "paused", "step": step, "attempt": self._place["attempt"]}
        self._out.append(self._pause_report)
        self._wake()
        assignment = self._assignments.get()
        self._pause_report = None
        self._paused.clear()
        self._place = {"attempt": assignment.attempt, "rank": assignment.rank}
        return assignment

    def report_exit(self, reason: Mapping[str, Any]) -> None:
        """Why this rank ends, for the agent's report."""
        self._out.append({"t": "last", "last": dict(reason)})
        self._wake()

    def close(self, *, timeout_s: float = 2.0) -> None:
        """Send what is queued, within ``timeout_s``."""
        self._closing.set()
        self._wake()
        self._thread.join(timeout_s)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_w, b"x")

    def _run(self) -> None:
        next_beat = time.monotonic()
        while True:
            connection = self._connection or self._reconnect()
            if connection is None:
                return
            try:
                while self._out:
                    connection.send(self._out[0])
                    self._out.popleft()
                now = time.monotonic()
                if now >= next_beat or self._beat_now:  # before exit too: the step identifies a repeated error
                    self._beat_now = False
                    connection.send({"t": "beat", "step": self._step, "micro": self._micro})
                    next_beat = now + self._agent.beat_every_s
                if self._progress_throttle.repeat(now):
                    self._send_progress()
                if self._closing.is_set() and not self._out:
                    return
                watched: list[Any] = [connection.sock, self._wake_r]
                ready, _, _ = select.select(watched, [], [], max(0.0, next_beat - now))
                if self._wake_r in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_r, 4096)
                if connection.sock in ready:
                    for message in connection.wait(1.0):
                        self._handle(message)
            except (OSError, AccessError, ValueError):
                self._connection = None

    def _handle(self, message: Mapping[str, Any]) -> None:
        kind = message.get("t")
        if kind == "order":
            self._commands.append(Command(**message["order"]))
        elif kind == "pause":
            self._paused.set()
            self._on_pause()
            if self._pause_report is not None:  # requested again, by a supervisor or agent that took over
                self._out.append(self._pause_report)
        elif kind == "place":
            self._assignments.put(RankContext.from_json(message["context"]))

    def _reconnect(self) -> AgentConnection | None:
        """Connect to the agent's successor; without one within ``orphan_s`` the process exits."""
        self._connection = self._agent.wait_for_connection(
            lambda: {**self._hello, **self._place, "step": self._step}, timeout_s=1.0, no_longer=self._closing.is_set
        )
        if self._connection is None and not self._closing.is_set():
            os._exit(1)
        return self._connection
