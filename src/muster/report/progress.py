"""How far a run is, for a look at it: the steps of the ledger's lineage, without the ledger."""

from __future__ import annotations

from dataclasses import dataclass

from muster.core.event_log.order import merge_by_monotonic_clock
from muster.report.ledger.figures import Speed, speed
from muster.report.ledger.file_log import known
from muster.report.ledger.fold import finished
from muster.report.ledger.lineage import trace
from muster.report.ledger.time_axis import align
from muster.report.log_folder import LogFolder
from muster.report.run_view import RECENT_STEPS, RunView, pace_s, run_view


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The report's figures, as far as they need no time axis of hosts."""

    view: RunView
    """Of all other events: it knows of no step but the first of each attempt."""
    last_step: int | None
    """How far it came, whether that can be restored or not."""
    final_loss: float | None
    """The newest of the last steps."""
    tokens: int
    speed: Speed
    step_every_s: float | None


def progress(folder: LogFolder) -> Progress:
    aligned = align(folder.files)
    end = finished(aligned.events)
    steps = trace(aligned, end.outcome if end else None).steps
    applied = trace(aligned, None).steps if end else steps
    view = run_view(event for _, _, event in merge_by_monotonic_clock({n: f.events for n, f in folder.files.items()}))
    walls = aligned.steps.ints("wall_ns")
    view.newest_ns = max(view.newest_ns, int(walls.max(initial=0)))
    losses = known(applied.numbers("loss")[applied.in_lineage[-RECENT_STEPS:]])
    recent = steps.rows[-RECENT_STEPS:][steps.attempt[-RECENT_STEPS:] == view.attempt]
    return Progress(
        view=view,
        last_step=int(applied.step[applied.in_lineage[-1]]) if len(applied.in_lineage) else None,
        final_loss=next((loss for loss in reversed(losses) if loss is not None), None),
        tokens=int(steps.tokens[steps.final].sum()),
        speed=speed(steps),
        step_every_s=pace_s(walls[recent].tolist()),
    )
