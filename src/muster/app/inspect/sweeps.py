"""Sweeps as people look at them: their trials, the best first, and the runs that they are."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from muster.app.inspect.status import RunStatus, status
from muster.core.errors import MusterError
from muster.core.typed_json import JsonObject
from muster.core.types import JobState
from muster.storage import sweep_record
from muster.storage.sweep_record import SweepRecord, TrialRecord

_ORDER = ("complete", "open", "pruned", "failed")


@dataclass(frozen=True, kw_only=True)
class TrialView:
    trial: TrialRecord
    run: RunStatus | None
    """None: not begun, or it cannot be read."""

    @property
    def state(self) -> str:
        """``complete``, ``pruned`` or ``failed``; of an open one, what its run is in."""
        if self.trial.state != "open":
            return self.trial.state
        return self.run.status.state.value if self.run is not None else "not begun"


@dataclass(frozen=True, kw_only=True)
class SweepView:
    folder: Path
    record: SweepRecord
    trials: Sequence[TrialView]
    """The best first; then those that are open, were ended early, and have failed."""

    @property
    def best(self) -> TrialView | None:
        return self.trials[0] if self.trials and self.trials[0].trial.state == "complete" else None

    @property
    def counts(self) -> dict[str, int]:
        """State -> how many trials are in it; those of the record first."""
        found: dict[str, int] = {}
        for each in self.trials:
            found[each.state] = found.get(each.state, 0) + 1
        return found

    @property
    def usd(self) -> float | None:
        """Of all trials so far; None: not known of one."""
        costs = [each.run.summary.usd for each in self.trials if each.run is not None]
        known = [cost for cost in costs if cost is not None]
        return sum(known) if len(known) == len(costs) else None

    @property
    def alive(self) -> bool:
        """Whether one of its trials runs, or waits."""
        return any(each.state in (JobState.RUNNING, JobState.WAITING) for each in self.trials)

    def to_json(self) -> JsonObject:
        return {
            "sweep": self.record.name,
            "folder": str(self.folder),
            "over": list(self.record.over),
            "sampler": self.record.sampler,
            "pruner": self.record.pruner,
            "usd": self.usd,
            "best": self.best.trial.number if self.best else None,
            "trials": [
                {
                    "number": each.trial.number,
                    "values": dict(each.trial.values),
                    "state": each.state,
                    "reason": each.trial.reason or None,
                    "heldout_loss": each.trial.loss,
                    "run": each.run.to_json() if each.run is not None else None,
                }
                for each in self.trials
            ],
        }


def find(reference: str) -> SweepView | None:
    """The sweep of this name or folder; None: it names none. Raises UsageError: several."""
    found = sweep_record.find(reference)
    return view(*found) if found is not None else None


def view(folder: Path, record: SweepRecord) -> SweepView:
    """The sweep with a look at each of its runs."""
    return SweepView(folder=folder, record=record, trials=_best_first([_look(each) for each in record.trials]))


def grouped(found: Sequence[RunStatus]) -> tuple[list[SweepView], list[RunStatus]]:
    """The sweeps that these runs are trials of, and the runs that are none."""
    by_id = {each.run.run_id: each for each in found}
    sweeps = []
    for folder, record in sweep_record.every().items():
        looks = [TrialView(trial=each, run=by_id.pop(each.run_id or "", None)) for each in record.trials]
        sweeps.append(SweepView(folder=folder, record=record, trials=_best_first(looks)))
    return sweeps, [each for each in found if each.run.run_id in by_id]


def best_runs(reference: str, most: int) -> list[str] | None:
    """Ids of a sweep's trials that are complete, the best first; None: it is no sweep."""
    found = sweep_record.find(reference)
    if found is None:
        return None
    complete = [each for each in found[1].trials if each.state == "complete" and each.run_id is not None]
    return [each.run_id or "" for each in sorted(complete, key=lambda each: each.loss or 0.0)][:most]


def _look(trial: TrialRecord) -> TrialView:
    found = None
    if trial.run_id is not None:
        with contextlib.suppress(MusterError):  # removed meanwhile
            found = status(trial.run_id)
    return TrialView(trial=trial, run=found)


def _best_first(found: Sequence[TrialView]) -> list[TrialView]:
    def order(each: TrialView) -> tuple[int, float, int]:
        loss = each.trial.loss
        return _ORDER.index(each.trial.state), loss if loss is not None else float("inf"), each.trial.number

    return sorted(found, key=order)
