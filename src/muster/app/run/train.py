"""Train: submit on this machine with the supervisor in the foreground. The same code path as anywhere."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from muster import backends
from muster.app.run import submit
from muster.app.run.submit import Intent
from muster.backends.protocols import Launcher
from muster.config.load import Loaded
from muster.core.errors import ConflictError, UsageError
from muster.core.events import Event
from muster.core.types import JobHandle
from muster.storage.run_registry import RunDir
from muster.supervise.process.server import Supervisor

#: What agents get to leave after the run has ended, before they are made to.
LEAVE_S = 15.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a foreground run ended."""

    run: RunDir
    exit_code: int


def train(
    loaded: Loaded,
    *,
    argv: Sequence[str] = (),
    on_start: Callable[[RunDir], None] | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> Ended:
    """Run to the end; Ctrl-C saves and leaves (130), SIGTERM too (75), a second one leaves at once.

    Raises:
        UsageError: the run file names another back end.
        ConflictError: the folder holds a run that is running.
    """
    backend = backends.get(loaded.spec.backend)
    if not backend.capabilities.supervised_in_terminal:
        raise UsageError(
            f"muster train runs on this machine, and the run file says backend: {backend.name}",
            hint="muster submit, or backend=local",
        )
    intent = submit.begin(loaded, argv=argv)
    if intent.running:
        raise ConflictError(f"{intent.run.run_id} is running already", hint=f"muster logs -f {intent.run.run_id}")
    return supervise(intent, on_start=on_start, on_event=on_event)


def supervise(
    intent: Intent, *, on_start: Callable[[RunDir], None] | None = None, on_event: Callable[[Event], None] | None = None
) -> Ended:
    """Start everything of ``intent`` but the supervisor, be the supervisor, and leave nothing behind."""
    launcher = intent.launcher
    assert launcher.attach is not None, "capabilities.supervised_in_terminal"
    others = tuple(task for task in intent.request.tasks if task.name != "supervisor")
    handle = submit.start(intent, dataclasses.replace(intent.request, tasks=others))
    try:
        launcher.attach(handle, task="supervisor", pid=os.getpid())
        if on_start is not None:
            on_start(intent.run)
        code = Supervisor(run_dir=intent.run.path, on_event=on_event).serve()
    finally:
        _clear(launcher, handle)
    return Ended(run=intent.run, exit_code=code)


def _clear(launcher: Launcher, handle: JobHandle) -> None:
    """The agents leave by themselves; one that does not is ended."""
    until = time.monotonic() + LEAVE_S
    while time.monotonic() < until and launcher.remaining(handle):
        time.sleep(0.05)
    if launcher.remaining(handle):
        launcher.cancel(handle)
