"""What is made of a run's events while it runs: lines in a file, a terminal's display, work that they ask for.

The supervisor's loop hands an event over and goes on. A terminal that is stopped, a pipe without a reader, a disk that
is full holds up the thread of the one sink that writes there: neither the run nor another sink.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO

from muster.app.inspect.event_format import Narrator
from muster.core.event_details.checkpoints import CheckpointFailed, CheckpointRejected
from muster.core.event_details.hosts import HostLost, TerminationNotice
from muster.core.event_details.incidents import IncidentDetected
from muster.core.event_details.run import ConnectionRefused, RunFinished
from muster.core.event_details.training import Step
from muster.core.events import Event
from muster.storage import run_output
from muster.supervise.process.supervisor import Supervisor

#: Of event kinds that are more than information.
_SEVERITY = {
    IncidentDetected.kind: "ERROR",
    HostLost.kind: "WARNING",
    TerminationNotice.kind: "WARNING",
    CheckpointFailed.kind: "WARNING",
    CheckpointRejected.kind: "WARNING",
    ConnectionRefused.kind: "WARNING",
}
#: Events that wait for one sink.
MOST_WAITING = 1_000
#: At the end a sink is waited for while it takes something at least this often,
PATIENCE_S = 2.0
#: and so long for its first words or its last ones, which are several in one call: a slow line, a machine that swaps.
WORDS_PATIENCE_S = 10.0
#: Patience is counted in naps of this process: of those it misses while it is stopped (Ctrl-Z) only one counts.
NAP_S = 0.05
#: What a sink raises without being gone: a full disk has room again one day.
PASSING = (errno.ENOSPC, errno.EDQUOT)


class Sink:
    """Something that events are handed to. Every call comes from one thread, which may be held up in it.

    An OSError of a full disk leaves the event out. What else it raises ends the sink (``gone``), not the run.
    """

    name = "a listener"
    shows_run = False
    """A user watches this sink."""
    tend_every_s: float | None = None
    """``tend`` is called about so often, between events."""

    def open(self) -> None:
        """The first call."""

    def event(self, event: Event) -> None:
        raise NotImplementedError

    def left_out(self, count: int) -> None:
        """So many events before the next one were not handed over."""

    def tend(self) -> None:
        """Now and then."""

    def gone(self, why: str) -> bool:
        """It raised. True: it goes on without what is broken, and wants the next event and the end."""
        return False

    def end(self, code: int | None) -> None:
        """Nothing more comes. ``code``: the run's exit code; None: it goes on elsewhere, or was not begun."""


@dataclass
class Lines(Sink):
    """A line an event, as ``muster logs`` shows them."""

    stream: IO[str]
    """Takes everything (``processes.forgiving``): a log on a full disk has a gap, which it names."""
    name = "the supervisor's log"
    line: Narrator = field(default_factory=Narrator)

    def event(self, event: Event) -> None:
        text = self.line(event)
        if text is not None:
            print(text, file=self.stream, flush=True)

    def left_out(self, count: int) -> None:
        print(f"({count} events left out)", file=self.stream, flush=True)


class JsonLines(Lines):
    """The same as JSON, for a collector of logs that groups by run and by severity (``output.json_logs``)."""

    def event(self, event: Event) -> None:
        text = self.line(event)
        if text is not None:
            severity = _SEVERITY.get(event.kind, "INFO")
            if event.kind == RunFinished.kind and event.read(RunFinished).outcome == "failed":
                severity = "ERROR"
            print(run_output.json_line(text, severity, run=event.run_id), file=self.stream, flush=True)


class EventWriter:
    """Hands events to sinks, each in a thread of its own.

    ``put`` never blocks: of a sink that lags ``MOST_WAITING`` behind the oldest steps are left out, then the oldest of
    anything, and it gets their number. ``on_gone(sink, why)``: a sink raised; called from its thread.
    """

    def __init__(self, sinks: Sequence[Sink], *, on_gone: Callable[[Sink, str], None]) -> None:
        self._outlets = [_Outlet(sink, on_gone) for sink in sinks]
        for outlet in self._outlets:
            outlet.thread.start()

    @classmethod
    def of(cls, supervisor: Supervisor, sinks: Sequence[Sink]) -> EventWriter:
        """Of what ``supervisor`` logs. That a sink is gone is logged, too."""

        def gone(sink: Sink, why: str) -> None:
            (supervisor.detached if sink.shows_run else supervisor.note)(why)

        writer = cls(sinks, on_gone=gone)
        supervisor.on_event = writer.put
        return writer

    def put(self, event: Event) -> None:
        """The next event, for every sink that is not gone."""
        for outlet in self._outlets:
            outlet.put(event)

    def close(self, code: int | None) -> bool:
        """Hand over what waits, then the end. False: a sink that shows the run took nothing for ``PATIENCE_S``
        (``WORDS_PATIENCE_S`` in ``open`` and ``end``) or until Ctrl-C, and its thread is stuck.

        A process with such a thread ends by ``os._exit``: the interpreter would wait for the stream's lock. Threads of
        other sinks hold no lock that it wants.
        """
        for outlet in self._outlets:
            outlet.finish(code)
        try:
            waited = [outlet.wait() or not outlet.sink.shows_run for outlet in self._outlets]
        except KeyboardInterrupt:
            return False
        return all(waited)


@dataclass(eq=False)
class _Outlet:
    """One sink, its thread and what waits for it."""

    sink: Sink
    on_gone: Callable[[Sink, str], None]
    waiting: deque[Event] = field(default_factory=deque)
    left_out: int = 0
    closed: bool = False
    ended: bool = False
    finished: bool = False
    code: int | None = None
    taken: int = 0
    """Calls of the sink that have returned."""
    patience_s: float = WORDS_PATIENCE_S
    """Of the call that is under way."""

    def __post_init__(self) -> None:
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self._serve, name=f"events for {self.sink.name}", daemon=True)

    def put(self, event: Event) -> None:
        with self.changed:
            if self.closed:
                return
            if len(self.waiting) >= MOST_WAITING:
                steps = (index for index, each in enumerate(self.waiting) if each.kind == Step.kind)
                del self.waiting[next(steps, 0)]
                self.left_out += 1
            self.waiting.append(event)
            self.changed.notify()

    def finish(self, code: int | None) -> None:
        with self.changed:
            self.code, self.finished = code, True
            self.changed.notify()

    def wait(self) -> bool:
        waited_s, taken = 0.0, self.taken
        while self.thread.is_alive():
            if taken != self.taken:
                waited_s, taken = 0.0, self.taken
            if waited_s >= self.patience_s:
                return False
            self.thread.join(NAP_S)
            waited_s += NAP_S
        return True

    def _serve(self) -> None:
        todo: Callable[[], object] | None = self.sink.open
        while todo is not None:
            try:
                todo()
            except (Exception, SystemExit) as error:  # noqa: BLE001 (what people see never ends a run)
                if not self._goes_on(error):
                    return
            self.patience_s = PATIENCE_S
            self.taken += 1
            todo = self._next()

    def _next(self) -> Callable[[], object] | None:
        """What is to be done next, once there is something; None: no more."""
        with self.changed:
            if not self.waiting and not self.finished:
                self.changed.wait(self.sink.tend_every_s)
            if self.waiting:
                lost, self.left_out = self.left_out, 0
                return functools.partial(self._hand_over, self.waiting.popleft(), lost)
            if not self.finished:
                return self.sink.tend
            if self.ended:
                return None
            self.ended, self.patience_s = True, WORDS_PATIENCE_S
            return functools.partial(self.sink.end, self.code)

    def _hand_over(self, event: Event, lost: int) -> None:
        try:
            if lost:
                self.sink.left_out(lost)
                lost = 0
            self.sink.event(event)
        except OSError as error:
            if error.errno not in PASSING:
                raise
            with self.changed:
                self.left_out += lost + 1

    def _goes_on(self, error: BaseException) -> bool:
        if isinstance(error, OSError) and error.errno in PASSING:
            return True
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        why = f"{self.sink.name} takes no more ({reason})"
        self.on_gone(self.sink, why)
        with contextlib.suppress(Exception):
            if not self.ended and self.sink.gone(why):
                return True
        with self.changed:
            self.closed = True
            self.waiting.clear()
        return False
