"""The loop of a host program: events in, ``decide``, actions out. What may be slow runs in threads."""

from __future__ import annotations

import contextlib
import queue
import select
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType

from muster.backends.host.children import Children, RealChildren
from muster.backends.host.decide import LAST_UPLOAD_S, decide
from muster.backends.host.place import Place, Program, Service, say
from muster.backends.host.state import (
    AGENT,
    NEVER,
    RESUME,
    SUPERVISOR,
    Action,
    AskSave,
    AskScope,
    AskTime,
    Child,
    ChildEnded,
    EndHere,
    Event,
    Exit,
    Lease,
    LeaveAt,
    Look,
    Looked,
    Noticed,
    NotStarted,
    Requeued,
    RequeueRest,
    Rules,
    Saved,
    Say,
    ScopeKnown,
    Send,
    Ship,
    Shipped,
    Start,
    State,
    Tick,
    WithdrawEnd,
)
from muster.core.clock import SystemClock
from muster.core.errors import BackendError
from muster.core.protocols import Clock
from muster.storage.store.patient import start_thread

LONGEST_WAIT_S = 0.5


@dataclass(kw_only=True)
class HostProgram:
    """One host's. ``turn`` decides once; ``run`` until it exits."""

    place: Place
    rules: Rules
    programs: Mapping[str, Program]
    services: Sequence[Service] = ()
    notices: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT)
    ignored: Sequence[signal.Signals] = ()
    children: Children = field(default_factory=RealChildren)
    clock: Clock = field(default_factory=SystemClock)
    in_thread: Callable[[Callable[[], None], str], object] = start_thread
    say: Callable[[str], None] = say
    ended: Exit | None = None
    _supervisor_pid: int | None = None
    _events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)
    _wake: socket.socket | None = None

    def __post_init__(self) -> None:
        programs = {name: Child() for name in self.programs if name != SUPERVISOR}
        self.state = State(programs=programs)

    def now_s(self) -> float:
        return self.clock.monotonic_ns() / 1e9

    def up_s(self, name: str) -> float:
        """For how long a program has been running; 0: it does not. For any thread."""
        child = self.state.child(name)
        return self.now_s() - child.began_s if child.running else 0.0

    def post(self, event: Event) -> None:
        """For any thread."""
        self._events.put(event)
        if self._wake is not None:
            with contextlib.suppress(OSError):  # full: it wakes up anyway
                self._wake.send(b"x")

    def run(self) -> int:
        """Keep the programs until the run is over or this host goes; the exit code."""
        with self._woken_by_signals() as wake:
            for service in self.services:
                service.start()
            while self.ended is None:
                self.turn()
                if self.ended is None:
                    select.select([wake], [], [], LONGEST_WAIT_S)
                    with contextlib.suppress(BlockingIOError):
                        wake.recv(256)
            for service in self.services:
                service.stop()
            return self.place.leave(self.ended, self.state)

    def turn(self) -> None:
        """Take in what has happened, decide, act."""
        for name, code in self.children.ended():
            self.post(ChildEnded(name=name, code=code))
        while self.ended is None:
            while not self._events.empty():
                self._decide(self._events.get())
            self._decide(Tick())
            if self._events.empty():
                return

    def _decide(self, event: Event) -> None:
        self.state, actions = decide(self.state, event, self.now_s(), self.rules)
        for action in actions:
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case Start(name):
                self._start(name)
            case Send(name, number):
                self.children.send(name, number)
            case Say(text):
                self.say(text)
            case Exit():
                self.ended = action
            case EndHere():
                self.children.send(AGENT, signal.SIGKILL)
                self.place.end_here()
            case Look():
                ended_pid = None if self.state.supervises else self._supervisor_pid
                self._ask(lambda: self.place.look(ended_pid), Looked(lease=Lease(kind="unknown")))
            case AskScope():
                self._ask(lambda: ScopeKnown(scope=self.place.notice_scope()), ScopeKnown(scope=None))
            case AskSave(reason):
                unsaved = Saved(reason=reason, delivered=False)
                self._ask(lambda: replace(unsaved, delivered=self.place.save(reason)), unsaved)
            case Ship(name):
                self._ask(lambda: self._ship(name), Shipped(name=name))
            case RequeueRest():
                failed = Requeued(text="cannot queue the rest of the run yet", code=RESUME, again=True)
                self._ask(self.place.requeue, failed)
            case AskTime():
                self._ask(lambda: LeaveAt(at_s=self.now_s() + self.place.time_left_s()), LeaveAt(at_s=NEVER))
            case WithdrawEnd():
                self.place.home.withdraw_end(RESUME)

    def _ask(self, call: Callable[[], Event], failed: Event) -> None:
        """Post the answer of ``call``, or ``failed`` where it raises: the state waits for one of them."""

        def ask() -> None:
            try:
                answer = call()
            except Exception as error:  # noqa: BLE001 (a thread's edge)
                self.say(f"{type(error).__name__}: {error}")
                answer = failed
            self.post(answer)

        self.in_thread(ask, type(failed).__name__.lower())

    def _start(self, name: str) -> None:
        program = self.programs[name]
        try:
            pid = self.children.start(name, program.argv, program.env, program.log)
        except (BackendError, OSError) as error:
            self.say(f"error: {error}")
            self.post(NotStarted(name=name))
            return
        if name == SUPERVISOR:
            self._supervisor_pid = pid

    def _ship(self, name: str) -> Event:
        program = self.programs[name]
        if program.home is not None:
            program.home.ship(program.writer, LAST_UPLOAD_S)
        return Shipped(name=name)

    # ------------------------------------------------------------ signals

    @contextlib.contextmanager
    def _woken_by_signals(self) -> Iterator[socket.socket]:
        """A socket that becomes readable at every signal, at the end of a child, and at every event."""
        wake, self._wake = socket.socketpair()
        wake.setblocking(False)
        self._wake.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {
            **{number: lambda _number, _frame: None for number in (signal.SIGCHLD, *self.ignored)},
            **{number: lambda _number, _frame: self.post(Noticed()) for number in self.notices},
            signal.SIGALRM: lambda _number, _frame: self.post(LeaveAt(at_s=self.now_s())),
        }
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield wake
        finally:
            signal.set_wakeup_fd(-1)
            for number, old in before.items():
                signal.signal(number, old)
