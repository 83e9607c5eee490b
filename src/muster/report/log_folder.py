"""Reads a run's event files for the ledger: the one module that does. (``audit`` reads for itself, on purpose.)"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from muster.core.event_details.run import HashHeads, SupervisorStarted
from muster.core.event_log import Damage, EventReader, Verdict, genesis
from muster.core.event_log.names import LogName
from muster.core.event_log.order import merge_by_monotonic_clock
from muster.core.events import Event
from muster.report.ledger.figures import Speed, speed
from muster.report.ledger.file_log import FileLog, known
from muster.report.ledger.fold import finished
from muster.report.ledger.lineage import trace
from muster.report.ledger.time_axis import align
from muster.report.run_view import RECENT_STEPS, RunView, pace_s, run_view


@dataclass
class LogFolder:
    """What the event files of one run hold; in ``damaged`` places were left out."""

    files: dict[str, FileLog]
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    damaged: tuple[Damage, ...] = ()


def read(run_dir_or_log: str | Path) -> LogFolder:
    """Read a run's folder, its ``events`` folder, or a single ``.jsonl`` file, each line once."""
    location = Path(run_dir_or_log)
    directory = location / "events" if (location / "events").is_dir() else location
    single = location.suffix == ".jsonl" and location.is_file()
    paths = [location] if single else sorted(directory.glob("*.jsonl"))
    reader = EventReader(location.parent if single else directory)
    files = {path.name: FileLog.of(reader.read_file(path)) for path in paths}
    run_id = next((log.events[0].run_id for log in files.values() if log.events), "")
    verdicts = {name: reader.verdict(name, run_id) for name in files if LogName.of(name) is not None}
    if not single:
        verdicts = _check_cited_heads(reader, files, run_id, verdicts)
    return LogFolder(files, verdicts, tuple(reader.damaged))


def _check_cited_heads(
    reader: EventReader, files: Mapping[str, FileLog], run_id: str, verdicts: Mapping[str, Verdict]
) -> dict[str, Verdict]:
    """A file cut short still has a whole chain: what the supervisor cited of it must be in it."""
    result = dict(verdicts)
    cited: dict[str, set[str]] = defaultdict(set)
    for log in files.values():
        for event in log.events:
            for name, head in _cited_heads(event).items():
                cited[name].add(head)
    for name, heads in cited.items():
        found = result.get(name, Verdict(events=0, head=""))
        if found.problem is None and not _holds(reader.line_hashes(name), heads - {genesis(run_id, name)}):
            result[name] = replace(found, problem="a line that the supervisor cited is missing: cut short or changed")
    return result


def _cited_heads(event: Event) -> Mapping[str, str]:
    if event.kind == HashHeads.kind:
        return event.read(HashHeads).heads
    return event.read(SupervisorStarted).heads or {} if event.kind == SupervisorStarted.kind else {}


def _holds(lines: array[int], heads: set[str]) -> bool:
    try:
        return bool(np.isin(np.array([int(head[:16], 16) for head in heads], np.uint64), lines).all())
    except (ValueError, OverflowError):
        return False  # an edited one, which is no hash


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
