"""The supervisor as a process: one term, from the lease to the exit code. ``loop`` is what it does meanwhile."""

from __future__ import annotations

import contextlib
import signal
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from muster.core.errors import ConflictError
from muster.core.events import Event
from muster.supervise.process.limits import OwnLimits
from muster.supervise.process.loop import SupervisorLoop
from muster.supervise.process.run_file import read_run_id
from muster.supervise.process.term import open_term
from muster.supervise.recovery.inputs import End, Input, StopRequest
from muster.transport.connections import ConnectionPool

HANGUP = "its terminal was closed (SIGHUP)"


@dataclass
class Supervisor:
    """Of one run. Everything it knows is in the log or on the hosts, so it may be killed between any two lines."""

    run_dir: Path
    on_event: Callable[[Event], None] | None = None
    """Must not block."""
    bind: str = "127.0.0.1"
    job: str = ""
    """The back end's name for the job that this process is part of."""
    ignore_term: bool = False
    """A scheduler signals every process of the job: the process that started us sends one message instead."""
    result: End | None = field(default=None, init=False)
    """How the run has ended."""
    run_id: str = field(default="", init=False)
    own_limits: OwnLimits = field(init=False)
    _notes: deque[str] = field(default_factory=deque, init=False)
    _requests: deque[Input] = field(default_factory=deque, init=False)
    """For the loop; signal handlers append to it."""
    _is_detached: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.own_limits = OwnLimits(self._notes)

    def note(self, text: str) -> None:
        """Log a message for people soon. From any thread, or a signal handler."""
        self._notes.append(text)

    def detached(self, why: str) -> None:
        """The terminal is gone: the run goes on, and its log says how to end it. From any thread; logged once."""
        if not self._is_detached:
            self._is_detached = True
            self.note(f"{why}: the run goes on; muster stop {self.run_id or self.run_dir} ends it")

    def serve(self) -> int:
        """Block until the run has ended; return its exit code.

        Raises:
            ConflictError: another supervisor holds the run, or took it from us.
        """
        self.run_dir = self.run_dir.resolve()
        self.run_id = read_run_id(self.run_dir)
        term = open_term(self.run_dir, bind=self.bind, job=self.job, on_event=self.on_event, notes=self._notes)
        if isinstance(term, int):
            return term
        loop = SupervisorLoop(term, self._requests, self.own_limits)
        try:
            with self._signals(term.world.pool):
                self.result = loop.run()
                loop.shut_down(self.result)
        except ConflictError:
            term.world.discard()
            raise
        finally:
            term.world.close()
        return self.result.exit_code

    @contextlib.contextmanager
    def _signals(self, pool: ConnectionPool) -> Iterator[None]:
        """Handle signals, which wake the loop."""
        try:
            before = {
                number: signal.signal(number, self._on_signal)
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            }
            old_fd = pool.wake_on_signals()
        except ValueError:  # not the main thread: a test
            yield
            return
        try:
            yield
        finally:
            signal.set_wakeup_fd(old_fd)
            # A late signal must not kill a process that leaves as it was asked to. Ignored, not left to the handler: an
            # interpreter that ends resets handlers to the default, which kills.
            is_leaving = self.result is not None and self.result.exit_code in (75, 130)
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if is_leaving else handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Ctrl-C is the user's stop (130), SIGTERM a preemption (75). A closed terminal (SIGHUP) ends nothing."""
        if number == signal.SIGHUP:
            self.detached(HANGUP)
        elif number != signal.SIGTERM or not self.ignore_term:
            code = 75 if number == signal.SIGTERM else 130
            self._requests.append(StopRequest(source=signal.Signals(number).name, exit_code=code))
