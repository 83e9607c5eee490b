"""A rank's line to its host's agent: events out, orders in, a sign of life in between.

One daemon thread (started after the fork, never before) owns the socket, so that the training loop never
waits for a reader. When the agent dies the link reconnects to its successor and sends what it kept; when
none comes within ``orphan_s`` the rank ends itself, since nobody could ever stop it.
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

#: Events kept while no agent listens; the oldest go first.
KEPT_EVENTS = 10_000
#: Progress outside of steps is told this often at most.
PROGRESS_EVERY_S = 0.5
#: A rank that lost a peer waits so long to hear that it is kept; a real loss is known to the agents sooner.
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
        self.sock.sendall(self.session.outgoing())

    def wait(self, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """Block for the next messages. Raises ConnectionError at the agent's end, TimeoutError."""
        self.sock.settimeout(timeout_s)
        while True:
            found = self._pump()
            if found:
                return found

    def _pump(self) -> list[dict[str, Any]]:
        out = self.session.outgoing()
        if out:
            self.sock.sendall(out)
        data = self.sock.recv(1 << 16)
        if not data:
            raise ConnectionError("the agent closed the line")
        found = self.session.receive(data)
        out = self.session.outgoing()
        if out:
            self.sock.sendall(out)
        return found


@dataclass
class ProgressThrottle:
    """When to tell of progress outside of steps: seldom, and by itself for as long as somebody vouched for."""

    told_s: float = -math.inf
    until_s: float = -math.inf

    def claimed(self, now_s: float, *, for_s: float) -> bool:
        """Progress was made, and counts for the next ``for_s``: whether to tell it now."""
        self.until_s = now_s + for_s
        return self._due(now_s)

    def goes_on(self, now_s: float) -> bool:
        """Whether to tell what was vouched for before."""
        return now_s < self.until_s and self._due(now_s)

    def _due(self, now_s: float) -> bool:
        if now_s - self.told_s < PROGRESS_EVERY_S:
            return False
        self.told_s = now_s
        return True


class SocketAgentClient:
    """``core.ranks.Link`` over the agent's socket."""

    def __init__(
        self,
        line: AgentConnection,
        *,
        address: str,
        token: bytes,
        hello: Mapping[str, Any],
        attempt: int,
        rank: int,
        beat_every_s: float,
        orphan_s: float,
    ) -> None:
        self._line: AgentConnection | None = line
        self._address, self._token, self._hello = address, token, dict(hello)
        self._attempt, self._rank = attempt, rank
        self._beat_every_s, self._orphan_s = beat_every_s, orphan_s
        self._out: collections.deque[dict[str, Any]] = collections.deque(maxlen=KEPT_EVENTS)
        self._orders: collections.deque[Command] = collections.deque()
        self._paused = threading.Event()
        self._on_pause: Callable[[], None] = lambda: None
        self._standing: dict[str, Any] | None = None
        self._places: queue.SimpleQueue[RankContext] = queue.SimpleQueue()
        self._step = -1
        self._micro = 0
        self._hurry = False
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
            "attempt": self._attempt,
            "rank": self._rank,
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
        if new:  # a snapshot lies ready: the mover should hear of it now, not at the next beat
            self._hurry = True
            self._wake()

    def progress(self, *, for_s: float = 0.0) -> None:
        if self._progress_throttle.claimed(time.monotonic(), for_s=for_s):
            self._tell_progress()

    def _tell_progress(self) -> None:
        self._out.append({"t": "progress", "attempt": self._attempt, "rank": self._rank})
        self._wake()

    def order(self) -> Command | None:
        return self._orders.popleft() if self._orders else None

    def pause_requested(self) -> bool:
        return self._paused.is_set()

    def on_pause(self, act: Callable[[], None]) -> None:
        self._on_pause = act
        if self._paused.is_set():
            act()

    def wait_for_assignment(self, step: int) -> RankContext | None:
        """Blocks: without a pause asked of this rank for ``LOST_PEER_WAIT_S``, then for as long as it takes."""
        if not self._paused.wait(LOST_PEER_WAIT_S):
            return None
        self._standing = {"t": "paused", "step": step, "attempt": self._attempt}
        self._out.append(self._standing)
        self._wake()
        place = self._places.get()
        self._standing = None
        self._paused.clear()
        self._attempt, self._rank = place.attempt, place.rank
        self._hello.update(attempt=place.attempt, rank=place.rank)
        return place

    def last_words(self, words: Mapping[str, Any]) -> None:
        """Why this rank ends, for the agent's report."""
        self._out.append({"t": "last", "last": dict(words)})
        self._wake()

    def close(self, *, timeout_s: float = 2.0) -> None:
        """Send what is queued, at most ``timeout_s`` long."""
        self._closing.set()
        self._wake()
        self._thread.join(timeout_s)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_w, b"x")

    def _run(self) -> None:
        next_beat = time.monotonic()
        while True:
            line = self._line or self._reconnect()
            if line is None:
                return
            try:
                while self._out:
                    line.send(self._out[0])
                    self._out.popleft()
                now = time.monotonic()
                if now >= next_beat or self._hurry:  # before an end too: the step tells a repeated error
                    self._hurry = False
                    line.send({"t": "beat", "step": self._step, "micro": self._micro})
                    next_beat = now + self._beat_every_s
                if self._progress_throttle.goes_on(now):
                    self._tell_progress()
                if self._closing.is_set() and not self._out:
                    return
                watched: list[Any] = [line.sock, self._wake_r]
                ready, _, _ = select.select(watched, [], [], max(0.0, next_beat - now))
                if self._wake_r in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_r, 4096)
                if line.sock in ready:
                    for message in line.wait(1.0):
                        self._obey(message)
            except (OSError, AccessError, ValueError):
                self._line = None

    def _obey(self, message: Mapping[str, Any]) -> None:
        kind = message.get("t")
        if kind == "order":
            self._orders.append(Command(**message["order"]))
        elif kind == "pause":
            self._paused.set()
            self._on_pause()
            if self._standing is not None:  # asked again, by a supervisor or an agent that took over
                self._out.append(self._standing)
        elif kind == "place":
            self._places.put(RankContext.from_json(message["context"]))

    def _reconnect(self) -> AgentConnection | None:
        """The agent is gone: wait for its successor; without one this rank must not live on."""
        deadline = time.monotonic() + self._orphan_s
        while time.monotonic() < deadline:
            if self._closing.is_set():
                return None
            try:
                self._line = AgentConnection(self._address, self._token, {**self._hello, "step": self._step}, timeout_s=1.0)
                return self._line
            except (OSError, AccessError, ValueError):
                time.sleep(0.1)
        os._exit(1)
