"""One trial of a sweep: a run that is started, looked at, continued and ended by the ordinary verbs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from muster.app.inspect.status import job, mirror
from muster.app.run import recover, stop, submit
from muster.config.load import Loaded
from muster.core import environment
from muster.core.errors import BusyError, ConflictError, MusterError, UsageError
from muster.core.event_details.hosts import HostAllocated, HostReleased
from muster.core.event_details.training import Eval, Step
from muster.core.event_log import EventReader
from muster.core.events import Event
from muster.core.types import JobState, JobStatus
from muster.storage import run_registry
from muster.storage.run_registry import RunDir

RECOVERIES = 3
"""So often without a new step; then a trial has failed."""


@dataclass
class Trial:
    number: int
    run: RunDir
    step: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    """Step -> held-out loss."""
    held: list[Event] = field(default_factory=list)
    """When hosts were bought and released."""
    ending: bool = False
    """It was asked to end early."""
    _reader: EventReader | None = None
    _recovered_at: list[int] = field(default_factory=list)

    @property
    def loss(self) -> float | None:
        """The last one."""
        return self.losses[max(self.losses)] if self.losses else None

    def look(self) -> JobStatus:
        """How its run is, then what has happened in it: nothing that happened before its end is missed."""
        launcher, handle = job(self.run)
        result = launcher.poll(handle)
        mirror(launcher, self.run)
        if self._reader is None:
            self._reader = EventReader(self.run.events)
        for _, event in self._reader.read():
            self._take(event)
        return result

    def _take(self, event: Event) -> None:
        if event.kind == Step.kind and event.step is not None:
            self.step = max(self.step, event.step)
        elif event.kind == Eval.kind and event.step:
            loss = event.read(Eval).loss
            if loss is not None:
                self.losses[event.step] = loss
        elif event.kind in (HostAllocated.kind, HostReleased.kind):
            self.held.append(event)

    def lost_its_machine(self, status: JobStatus) -> bool:
        """It did not end by itself, and can go on from its last save or from what its hosts hold."""
        if status.state in (JobState.PREEMPTED, JobState.ABSENT):
            return True
        if status.state is JobState.FAILED:
            return status.exit_code is None  # no verdict: its supervisor is gone too
        return status.state is JobState.RUNNING and status.tasks.get("supervisor") == "ended"

    def continue_(self, gpus: str | None, overrides: tuple[str, ...] = ()) -> None:
        """Start what is missing of its run.

        Raises:
            CapacityError, BusyError: not now.
            MusterError: it was continued ``RECOVERIES`` times without a new step, or cannot be.
        """
        if len(self._recovered_at) >= RECOVERIES and self._recovered_at[-RECOVERIES] >= self.step:
            raise MusterError(f"continued {RECOVERIES} times without a new step beyond {self.step}")
        with visible(gpus):
            try:
                recover.recover(self.run.run_id, overrides, argv=("muster", "sweep"))
            except ConflictError:  # a supervisor holds it: another recover was faster
                pass
        self._recovered_at.append(self.step)

    def end_early(self, why: str, *, save: bool) -> None:
        """Ask its run to end, and do not wait for it. Without a supervisor everything of it is ended now.

        Raises:
            BusyError: its back end does not answer.
            BackendError: something of it could not be ended.
        """
        try:
            stop.stop(self.run.run_id, save=save, force=not save, wait=False, source=why)
        except BusyError:
            raise
        except MusterError:  # no supervisor holds it: it waits in a queue, or the supervisor is gone
            stop.down(self.run.run_id)
        self.ending = True


def start(number: int, loaded: Loaded, gpus: str | None) -> Trial:
    """The trial's run, started; one that runs already is left alone. Raises as ``submit``."""
    with visible(gpus):
        return Trial(number=number, run=submit.submit(loaded, argv=("muster", "sweep")).run)


def find(number: int, run_id: str | None) -> Trial | None:
    """The trial whose run is there already."""
    try:
        return Trial(number=number, run=run_registry.find(run_id)) if run_id is not None else None
    except UsageError:
        return None


@contextlib.contextmanager
def visible(gpus: str | None) -> Iterator[None]:
    """Hosts that are started meanwhile see these GPUs alone (``CUDA_VISIBLE_DEVICES``); None: those that we see."""
    if gpus is None:
        yield
        return
    before = environment.inherited()
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    try:
        yield
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        os.environ.update(before)
