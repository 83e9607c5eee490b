"""Track: deliver what an ended run's trackers lack, from its event files."""

from __future__ import annotations

from collections.abc import Callable

from muster.app.inspect.home_view import bring
from muster.app.inspect.status import job, spec_of
from muster.core.errors import ConflictError, MusterError, UsageError
from muster.core.event_details.run import RunFinished
from muster.core.event_log import EventReader
from muster.storage import run_registry
from muster.storage.run_registry import RunDir
from muster.trackers.main import begin, finish

#: A tracker that has not accepted everything by then does not do so today.
LIMIT_S = 600.0


def track(reference: str, *, tell: Callable[[str], None]) -> RunDir:
    """Block until the trackers have all figures of the run and how it ended.

    Raises:
        UsageError: no such run, or its run file names no tracker.
        ConflictError: it has not ended.
        MusterError: a tracker did not accept everything within ``LIMIT_S``.
    """
    run = run_registry.find(reference)
    launcher, handle = job(run)
    bring(run, spec_of(run).backend, "events")
    ends = [event for _, event in EventReader(run.events).read() if event.kind == RunFinished.kind]
    if not ends or not launcher.poll(handle).state.ended:
        raise ConflictError(f"{run.run_id} has not ended: its figures are sent while it trains")
    made = begin(run.path, run.run_id, writer=None, report=tell)
    if not made:
        raise UsageError(f"the run file of {run.run_id} names no tracker", hint="output.tracker: wandb")
    newest = max(ends, key=lambda event: event.wall_ns).read(RunFinished)
    if not finish(made, newest.outcome, tell, within_s=LIMIT_S) or any(each.failed for each in made):
        raise MusterError("not everything was accepted")
    return run
