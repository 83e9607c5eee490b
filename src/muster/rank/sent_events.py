"""Events that a rank has sent, kept for a while: an agent that is killed takes along what it had not read yet.

Nothing is sent to say what arrived. An agent writes each event as it reads it, so its successor sees in the log what
the rank sends a second time (``agent.host_event_log``); and an agent that gives a paused rank its next place has read
what the rank sent before it paused.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

#: More than a socket's buffers hold of them on both sides: 416 kB, 0.5 kB and more each.
KEPT = 1024


class EventFrame(bytes):
    """An encoded event."""


class ToAgent(Protocol):
    """A connection to an agent."""

    @property
    def agent_pid(self) -> int:
        """The process at its other end."""
        ...

    def send_frame(self, frame: bytes) -> None: ...


@dataclass
class SentEvents:
    """The newest ``KEPT``. For the connection's own thread."""

    _frames: deque[bytes] = field(default_factory=lambda: deque(maxlen=KEPT))
    _agent_pid: int = 0

    def note(self, frame: bytes) -> None:
        """It was sent."""
        if isinstance(frame, EventFrame):
            self._frames.append(frame)

    def forget(self) -> None:
        """All of them arrived."""
        self._frames.clear()

    def send_to_successor(self, connection: ToAgent) -> None:
        """Send them again, where another process is there than the one that they were sent to. (An agent that lives
        closes a connection for what it could not read there, and would again.) Raises as the connection."""
        if connection.agent_pid != self._agent_pid:
            for frame in self._frames:
                connection.send_frame(frame)
            self._agent_pid = connection.agent_pid
