"""Train: submit on this machine with the supervisor in the foreground. The same code path as anywhere."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from muster import backends
from muster.app.inspect.event_format import Narrator
from muster.app.run import submit
from muster.app.run.event_writer import EventWriter, Lines, Sink
from muster.app.run.metrics_page import metrics_sinks
from muster.app.run.notifications import notification_sinks
from muster.app.run.revive import revivals
from muster.app.run.submit import Intent
from muster.backends.protocols import Launcher
from muster.config.load import Loaded, given
from muster.core import processes
from muster.core.errors import ConflictError, UsageError
from muster.core.types import JobHandle
from muster.storage.run_registry import RunDir
from muster.supervise.process.supervisor import HANGUP, Supervisor
from muster.transport.listening import raise_soft_limit

#: What agents get to leave after the run has ended, before they are made to: a tracker that is away holds one for
#: ``trackers.main.END_S``.
LEAVE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    run: RunDir
    exit_code: int
    shown: bool = True
    """False: what shows the run took nothing for a while, and its thread is stuck. Leave by ``os._exit``."""


def train(
    run_file: Loaded | str | Path,
    overrides: Sequence[str] = (),
    *,
    argv: Sequence[str] = (),
    on_start: Callable[[RunDir, tuple[str, ...]], None] | None = None,
    sinks: Sequence[Sink] = (),
    tell: Callable[[str], None] = lambda _text: None,
) -> Ended:
    """Run to the end; Ctrl-C saves and leaves (130), SIGTERM too (75), a second one leaves at once.

    A terminal that is closed (SIGHUP) ends nothing. ``on_start`` gets what may go wrong with the run besides.
    ``sinks`` get its events, each in a thread of its own. ``tell``: what was packed of the user's code.

    Raises:
        UsageError: the run file names another back end.
        ConflictError: the folder holds a run that is running.
    """
    loaded = given(run_file, overrides)
    backend = backends.get(loaded.spec.backend)
    if not backend.capabilities.supervised_in_terminal:
        raise UsageError(
            f"muster train runs on this machine, and the run file says backend: {backend.name}",
            hint="muster submit, or backend=local",
        )
    intent = submit.begin(loaded, argv=argv, tell=tell)
    if intent.running:
        raise ConflictError(f"{intent.run.run_id} is running already", hint=f"muster logs -f {intent.run.run_id}")
    return supervise(intent, on_start=on_start, sinks=sinks)


def supervise(
    intent: Intent,
    *,
    on_start: Callable[[RunDir, tuple[str, ...]], None] | None = None,
    sinks: Sequence[Sink] = (),
) -> Ended:
    """Start everything of ``intent`` but the supervisor, be the supervisor, and leave nothing behind."""
    launcher = intent.launcher
    assert launcher.attach is not None, "capabilities.supervised_in_terminal"
    others = tuple(task for task in intent.request.tasks if task.name != "supervisor")
    raise_soft_limit()
    supervisor = Supervisor(run_dir=intent.run.path)
    code = None
    with _hangup(supervisor.detached):
        handle = submit.start(intent, dataclasses.replace(intent.request, tasks=others))
        if on_start is not None:
            on_start(intent.run, handle.warnings)
        with processes.open_log(intent.run.logs / "supervisor.log") as log:
            own_log = Lines(processes.forgiving(log.fileno()), Narrator(intent.run.path))
            observers = (*revivals(supervisor), *metrics_sinks(supervisor), *notification_sinks(supervisor))
            writer = EventWriter.of(supervisor, [own_log, *observers, *sinks])
            try:
                launcher.attach(handle, task="supervisor", pid=os.getpid())
                code = supervisor.serve()
            finally:
                try:
                    _clear(launcher, handle)
                finally:
                    shown = writer.close(code)
    if intent.spec.resources.on_gpus:
        from muster.app.planning import calibrate

        calibrate.keep(intent.run.path, intent.spec)
    return Ended(run=intent.run, exit_code=code, shown=shown)


@contextlib.contextmanager
def _hangup(tell: Callable[[str], None]) -> Iterator[None]:
    """A closed terminal leaves agents their supervisor, before and after it serves too.

    Programs that are started here do not inherit this: a handler that is a function ends with the program.
    """
    try:
        before = signal.signal(signal.SIGHUP, lambda _number, _frame: tell(HANGUP))
    except ValueError:  # not the main thread, which owns signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@contextlib.contextmanager
def _interrupted_by_term() -> Iterator[None]:
    """SIGTERM ends a wait as Ctrl-C does; where it is ignored, since the run ends by one, it stays so."""
    before = signal.getsignal(signal.SIGTERM)
    if before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _clear(launcher: Launcher, handle: JobHandle) -> None:
    """The agents leave by themselves; one that does not, or not before Ctrl-C, is ended."""
    until = time.monotonic() + LEAVE_S
    with contextlib.suppress(KeyboardInterrupt), _interrupted_by_term():  # the run has ended: its verdict is final
        while time.monotonic() < until and launcher.remaining(handle):
            time.sleep(0.05)
    if launcher.remaining(handle):
        launcher.cancel(handle)
