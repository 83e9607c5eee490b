"""A rank's connection to its host's agent: events and steps out, commands in, and in silence nothing.

One daemon thread (started after the fork, never before) owns the socket, so that the training loop never waits for a
reader. When the agent dies the client reconnects to its successor and sends what it queued, and before that the newest
events that it had sent (``sent_events``); if none accepts within ``orphan_s`` the rank ends itself, because nothing
could stop it any more.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from muster.core.errors import AccessError
from muster.core.typed_json import Json, Record
from muster.protocol.codec import encode, reader_of
from muster.protocol.rank_agent import (
    TO_RANK,
    CaptureRank,
    Pause,
    Paused,
    RankBeat,
    RankHello,
    RankProgress,
    TakePlace,
    ToRank,
)
from muster.protocol.ranks import Command, RankContext
from muster.protocol.values import CommandRanks, LastWords, RankEvent, TraceSteps
from muster.rank.capture import captured
from muster.rank.sent_events import EventFrame, SentEvents
from muster.transport.secure_session import Session
from muster.transport.stream import write

Message = TypeVar("Message")

#: Messages queued while no agent is connected; the oldest are dropped first.
MAX_QUEUED = 10_000
#: Sent at once, about: of this much it is not known, where an agent takes no more in time, what has arrived.
BATCH_BYTES = 64 << 10
#: Shortest interval between reports of progress outside of steps.
PROGRESS_EVERY_S = 0.5
#: How long a rank that lost a peer waits for a pause request; the agents detect a real loss sooner.
LOST_PEER_WAIT_S = 10.0


class AgentConnection(Generic[Message]):
    """A blocking connection to the agent's socket file, which starts no thread. ``decode`` reads what the agent sends.

    Raises (from every method):
        OSError: the connection broke.
        AccessError, Unreadable (a ValueError): what is there is no agent of this run, or of another version.
    """

    def __init__(
        self, address: str, token: bytes, hello: Record, decode: Callable[[bytes], Message], *, timeout_s: float = 5.0
    ) -> None:
        self._decode = decode
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(timeout_s)
        self.sock.connect(address)
        credentials = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.agent_pid: int = struct.unpack("3i", credentials)[0]
        """The process that listens there."""
        self.session = Session(token, server=False)
        while not self.session.ready:
            self._pump()
        self.send(hello)

    def send(self, message: Record) -> None:
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        self.send_frames([frame])

    def send_frames(self, frames: Iterable[bytes]) -> None:
        """All in one write, which wakes the agent once."""
        for frame in frames:
            self.session.send(frame)
        self._flush()

    def wait(self, timeout_s: float | None = None) -> list[Message]:
        """Block for the next messages. Raises ConnectionError when the agent closes, TimeoutError."""
        self.sock.settimeout(timeout_s)
        while True:
            frames = self._pump()
            if frames:
                return [self._decode(frame) for frame in frames]

    def _pump(self) -> list[bytes]:
        self._flush()
        data = self.sock.recv(1 << 16)
        if not data:
            raise ConnectionError("the agent closed the connection")
        frames = self.session.frames(data)
        self._flush()
        return frames

    def _flush(self) -> None:
        write(self.sock, self.session.outgoing())


@dataclass(frozen=True)
class AgentAddress:
    """Where a host's agent and its successors listen, and what a process owes them."""

    path: str
    token: bytes
    orphan_s: float
    """How long to look for a successor."""
    beat_every_s: float

    def connection(
        self, hello: Record, decode: Callable[[bytes], Message], *, timeout_s: float = 5.0
    ) -> AgentConnection[Message]:
        return AgentConnection(self.path, self.token, hello, decode, timeout_s=timeout_s)

    def wait_for_connection(
        self, hello: Callable[[], Record], decode: Callable[[bytes], Message], *, timeout_s: float = 5.0
    ) -> AgentConnection[Message] | None:
        """Try until an agent accepts; None: none did within ``orphan_s``."""
        deadline = time.monotonic() + self.orphan_s
        while time.monotonic() < deadline:
            try:
                return self.connection(hello(), decode, timeout_s=timeout_s)
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

    def wait_s(self, now_s: float) -> float | None:
        """Until ``repeat`` may say so; None: it will not."""
        return max(0.0, self.sent_s + PROGRESS_EVERY_S - now_s) if now_s < self.until_s else None

    def _due(self, now_s: float) -> bool:
        if now_s - self.sent_s < PROGRESS_EVERY_S:
            return False
        self.sent_s = now_s
        return True


class SocketAgentClient:
    """``protocol.ranks.AgentClient`` over the agent's socket."""

    def __init__(self, connection: AgentConnection[ToRank], agent: AgentAddress, *, attempt: int, rank: int) -> None:
        self._connection: AgentConnection[ToRank] | None = connection
        self._agent = agent
        self._attempt, self._rank = attempt, rank
        self._out: collections.deque[bytes] = collections.deque(maxlen=MAX_QUEUED)
        """Frames: what cannot be encoded fails where it is sent, not in the connection's thread."""
        self._batch: list[bytes] = []
        """What is being sent, out of the queue: what is queued meanwhile may drop the queue's oldest."""
        self._sent = SentEvents()
        self._commands: collections.deque[Command] = collections.deque()
        self._traces: collections.deque[TraceSteps] = collections.deque(maxlen=16)
        self._paused = threading.Event()
        self._on_pause: Callable[[], None] = lambda: None
        self._pause_report: Paused | None = None
        self._assignments: queue.SimpleQueue[RankContext] = queue.SimpleQueue()
        self._step = -1
        self._micro = 0
        self._beat_s = 0.0
        """When the step and micro-batch were last reported to the agent."""
        self._beat_now = False
        self._progress_throttle = ProgressThrottle()
        # Nothing is ever read from it, since only its edges count. Each system call of the connection's thread gives
        # the interpreter's lock away, and then competes for it with the training loop.
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._events = select.epoll()
        self._events.register(self._wake_fd, select.EPOLLIN | select.EPOLLET)
        self._events.register(connection.sock, select.EPOLLIN)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="muster-link", daemon=True)
        self._thread.start()

    def emit(self, kind: str, *, step: int | None = None, phase: str | None = None, **detail: Json) -> None:
        now = {"mono_ns": time.monotonic_ns(), "wall_ns": time.time_ns()}
        event = RankEvent(
            kind=kind, attempt=self._attempt, rank=self._rank, step=step, phase=phase, detail=detail, **now
        )
        self._out.append(EventFrame(encode(event)))
        self._wake()

    def _send(self, message: Record) -> None:
        self._out.append(encode(message))
        self._wake()

    def beat(self, step: int) -> None:
        new = step != self._step  # a snapshot is complete: the replicator can start
        self._step, self._micro = step, self._micro + 1
        if new or time.monotonic() - self._beat_s >= self._agent.beat_every_s:
            self._beat_now = True
            self._wake()

    def progress(self, *, for_s: float = 0.0) -> None:
        if self._progress_throttle.grant(time.monotonic(), for_s=for_s):
            self._send_progress()
        elif for_s:
            self._wake()  # the connection's thread may sleep without limit: it is to repeat this from now on

    def _send_progress(self) -> None:
        self._send(RankProgress(attempt=self._attempt, rank=self._rank))

    def next_command(self) -> Command | None:
        return self._commands.popleft() if self._commands else None

    def next_trace(self) -> TraceSteps | None:
        return self._traces.popleft() if self._traces else None

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
        self._pause_report = Paused(step=step, attempt=self._attempt)
        self._send(self._pause_report)
        assignment = self._assignments.get()
        self._pause_report = None
        self._paused.clear()
        self._attempt, self._rank = assignment.attempt, assignment.rank
        return assignment

    def report_exit(self, last: LastWords) -> None:
        """Why this rank ends, for the agent's report."""
        self._send(last)

    def close(self, *, timeout_s: float = 2.0) -> None:
        """Send what is queued, within ``timeout_s``; where the agent is away, to its successor, within ``orphan_s``:
        the last steps of a rank that ends meanwhile are known nowhere else."""
        self._closing.set()
        self._wake()
        self._thread.join(timeout_s)
        if self._connection is None:
            self._thread.join(self._agent.orphan_s)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # 2**64 wakes
            os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        with contextlib.suppress(OSError), open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as name:
            name.write(self._thread.name)  # for `top -H`, and for who measures what it costs
        while True:
            connection = self._connection or self._reconnect()
            if connection is None:
                return
            try:
                self._sent.send_to_successor(connection)
                self._send_waiting(connection)
                now = time.monotonic()
                if self._progress_throttle.repeat(now):
                    self._send_progress()
                if self._closing.is_set() and not self._out:
                    return
                ready = dict(self._events.poll(0.0 if self._out else self._progress_throttle.wait_s(now)))
                if connection.sock.fileno() in ready:
                    for message in connection.wait(1.0):
                        self._handle(message)
            except (OSError, AccessError, ValueError):
                self._connection = None
                with contextlib.suppress(OSError):  # processes that the script has forked may hold it open for long
                    self._events.unregister(connection.sock)

    def _send_waiting(self, connection: AgentConnection[ToRank]) -> None:
        """A batch of what is queued; and where this rank is, if it has moved on. Nothing is sent in silence: of
        a stop the rank's parent tells."""
        size = sum(map(len, self._batch))
        while self._out and size < BATCH_BYTES:
            self._batch.append(self._out.popleft())
            size += len(self._batch[-1])
        frames = list(self._batch)
        if self._beat_now:  # before exit too: the step identifies a repeated error
            self._beat_now, self._beat_s = False, time.monotonic()
            frames.append(encode(RankBeat(step=self._step, micro=self._micro)))
        if frames:
            connection.send_frames(frames)
        for frame in self._batch:
            self._sent.note(frame)
        self._batch.clear()

    def _handle(self, message: ToRank) -> None:
        match message:
            case CommandRanks():
                self._commands.append(Command.received(message))
            case Pause():
                self._paused.set()
                self._on_pause()
                if self._pause_report is not None:  # requested again, by a supervisor or agent that took over
                    self._send(self._pause_report)
            case TakePlace():
                self._sent.forget()
                self._assignments.put(message.context)
            case TraceSteps():
                self._traces.append(message)
            case CaptureRank():
                self._send(captured(self._rank, recorders=message.recorders))

    def _reconnect(self) -> AgentConnection[ToRank] | None:
        """Connect to the agent's successor; without one within ``orphan_s`` the process exits."""
        self._connection = self._agent.wait_for_connection(
            lambda: RankHello(pid=os.getpid(), attempt=self._attempt, rank=self._rank, step=self._step),
            reader_of(TO_RANK),
            timeout_s=1.0,
        )
        if self._connection is None and not self._closing.is_set():
            os._exit(1)
        if self._connection is not None:
            self._events.register(self._connection.sock, select.EPOLLIN)
        self._beat_now = True
        return self._connection
