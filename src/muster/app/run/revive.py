"""Hosts of this machine that ended while their run waits for them: started again, by a thread of the supervisor's.

A run waits for hosts when too few are left, and when a supervisor has just begun: the hosts that a submit found alive
may have been those of the run's end before it, on their way out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from muster import backends
from muster.app.run.event_writer import Sink
from muster.backends.protocols import Launcher
from muster.core.errors import MusterError
from muster.core.event_details.attempts import AttemptAdopted, AttemptStarted
from muster.core.event_details.run import RunEnding, RunFinished, RunWaiting, StopRequested, SupervisorStarted
from muster.core.events import Event
from muster.core.types import JobHandle
from muster.supervise.process.run_file import read_run_id, read_spec
from muster.supervise.process.supervisor import Supervisor

#: How often one looks while the run waits: an agent whose keeper was killed takes a moment to end.
LOOK_S = 1.0
#: So often a host is started in ``WITHIN_S`` seconds; then it is given up, and the log says so.
MOST, WITHIN_S = 3, 60.0
#: What still keeps a host from being started is said again so often.
AGAIN_S = 60.0
_BEGIN = (SupervisorStarted.kind, RunWaiting.kind)
_END = (AttemptAdopted.kind, AttemptStarted.kind, StopRequested.kind, RunEnding.kind, RunFinished.kind)


@dataclass
class HostRevival(Sink):
    """Looks for ended hosts while the run waits for some. So with spares, or where it shrinks, they stay away.

    ``say``: logs a sentence, from any thread; ``over``: the run has ended.
    """

    launcher: Launcher
    handle: JobHandle
    say: Callable[[str], None]
    over: Callable[[], bool]
    before: Callable[[], None] = lambda: None
    """Called before each look."""
    now_s: Callable[[], float] = time.monotonic
    name = "what starts hosts again"
    tend_every_s: float | None = None
    _starts: dict[str, list[float]] = field(default_factory=dict)
    """When each host was started here."""
    _told: set[str] = field(default_factory=set)
    """Those that were said to be started again since the run waits."""
    _named: set[str] = field(default_factory=set)
    """Those that were said to end again and again."""
    _failure: str = ""
    """Why one could not be started, as it was last said; empty where nothing is wrong any more."""
    _said_s: float = 0.0

    def event(self, event: Event) -> None:
        if event.kind in _BEGIN:
            self.tend_every_s = LOOK_S
            self.tend()
        elif event.kind in _END:
            self.tend_every_s = None
            self._named.clear()
            self._told.clear()

    def tend(self) -> None:
        if self.over():
            return
        self.before()
        try:
            status = self.launcher.poll(self.handle)
            wanted = [name for name, text in status.tasks.items() if text == "ended" and self._may(name)]
            started = self.launcher.revive(self.handle, wanted) if wanted and self.launcher.revive is not None else []
        except Exception as error:  # noqa: BLE001 (the next look is due after any error)
            what = str(error) if isinstance(error, MusterError) else f"{type(error).__name__}: {error}"
            hint = f" ({error.hint})" if isinstance(error, MusterError) and error.hint else ""
            self._fail(
                f"a host that ended could not be started again: {what}{hint}; it is tried every {LOOK_S:g} s, and "
                f"muster down {self.handle.run_id}, then muster recover {self.handle.run_id} restarts everything"
            )
            return
        if not status.tasks:
            self._fail(f"hosts that ended cannot be found, so none is started again: {status.reason}")
        elif started or not wanted:
            self._failure = ""
        for name in started:
            self._starts.setdefault(name, []).append(self.now_s())
            if name in self._told:
                continue
            self._told.add(name)
            self.say(f"{name} had ended while the run waits for hosts: it was started again")

    def _fail(self, text: str) -> None:
        """Say it, unless that was the last to be said, a while ago at most."""
        if text != self._failure or self.now_s() - self._said_s >= AGAIN_S:
            self._failure, self._said_s = text, self.now_s()
            self.say(text)

    def _may(self, name: str) -> bool:
        """Whether it has not just ended again and again."""
        self._starts[name] = [at_s for at_s in self._starts.get(name, []) if self.now_s() - at_s < WITHIN_S]
        if len(self._starts[name]) < MOST:
            return True
        if name not in self._named:
            self._named.add(name)
            self.say(
                f"{name} ended {MOST} times within {WITHIN_S:g} s (logs/{name}.log says why): it is started again "
                f"more slowly; muster stop {self.handle.run_id} ends the run"
            )
        return False


def revivals(supervisor: Supervisor) -> Sequence[Sink]:
    """What starts this run's hosts again, where its back end leaves that to us."""
    run_dir = supervisor.run_dir.resolve()
    try:
        run_id, backend = read_run_id(run_dir), backends.get(read_spec(run_dir).backend)
    except (MusterError, OSError, ValueError, KeyError):
        return ()  # ``serve`` says so
    if not backend.capabilities.uses_this_machine:
        return ()
    launcher = backends.load(backend.name)
    if launcher.revive is None:
        return ()
    handle = JobHandle(run_id=run_id, backend=backend.name, job_id=run_id, run_dir=str(run_dir))
    over, before = lambda: supervisor.result is not None, lambda: supervisor.own_limits.keep(run_id)
    return [HostRevival(launcher, handle, say=supervisor.note, over=over, before=before)]
