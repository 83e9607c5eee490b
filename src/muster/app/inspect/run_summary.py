"""What a run's events say so far, folded for people: status, the end of ``train``, the short report.

Speed and MFU are the report's: medians over the same clean steps of the same lineage (a test holds the two together).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from muster.core.events import Event
from muster.report.ledger.reference_rate import WARMUP_STEPS


@dataclass(kw_only=True)
class Summary:
    """Folded events. A step that was taken again after a recovery counts once, as last taken."""

    name: str | None = None
    outcome: str | None = None
    exit_code: int | None = None
    reason: str | None = None
    attempt: int = 0
    world_size: int | None = None
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    evals: dict[int, dict[str, Any]] = field(default_factory=dict)
    samples: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    incidents: list[dict[str, Any]] = field(default_factory=list)
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    _places: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Step -> its attempt, and its place among that one's steps, from 1."""
    _taken: Counter[int] = field(default_factory=Counter)
    _durable: int = 0
    """Newest step that a disk or bucket checkpoint holds."""

    def add(self, event: Event) -> None:
        """Take one event, in order."""
        detail = dict(event.detail)
        if event.kind == "step" and event.step is not None:
            if event.attempt < self.attempt:
                return  # fenced: its attempt had been replaced
            self._taken[event.attempt] += 1
            self.steps[event.step] = detail
            self._places[event.step] = (event.attempt, self._taken[event.attempt])
        elif event.kind == "eval" and event.step is not None:
            self.evals[event.step] = {**self.evals.get(event.step, {}), **detail}
        elif event.kind == "generation" and event.step is not None:
            known = self.samples.setdefault(event.step, [])
            if detail not in known:
                known.append(detail)
        elif event.kind == "incident.detected":
            self.incidents.append(detail)
        elif event.kind == "attempt.started":
            self.attempt, self.world_size = event.attempt, detail["world_size"]
            self._go_back(detail.get("resume_step"), event.attempt)
        elif event.kind == "checkpoint.restored":
            self._go_back(event.step, event.attempt)
        elif event.kind == "checkpoint.committed" and detail.get("tier") in ("disk", "bucket"):
            self._durable = max(self._durable, event.step or 0)
        elif event.kind == "run.submitted":
            self.name = detail.get("name", self.name)
            self.outcome = self.exit_code = self.reason = None
        elif event.kind == "run.finished":
            self.outcome, self.exit_code, self.reason = detail["outcome"], detail["exit_code"], detail["reason"]
        elif event.kind == "model.ready":
            self.model = detail
        elif event.kind == "data.prepared":
            self.data = detail

    def _go_back(self, step: int | None, attempt: int) -> None:
        """``attempt`` goes on after ``step`` (None, -1: not known yet): later ones of earlier attempts were lost."""
        if step is not None and step >= 0:
            for lost in [known for known in self.steps if known > step and self._places[known][0] < attempt]:
                del self.steps[lost]

    @property
    def last_step(self) -> int | None:
        return max(self.steps, default=None)

    @property
    def final_loss(self) -> float | None:
        """Loss of the last step that says one."""
        known = [step["loss"] for _, step in sorted(self.steps.items()) if step["loss"] is not None]
        return float(known[-1]) if known else None

    @property
    def tokens(self) -> int:
        """Of the steps that count, padding excluded."""
        return sum(int(step["tokens"] or 0) for _, step in self._counting())

    @property
    def tokens_per_s(self) -> float | None:
        """Median over clean steps."""
        rates = [int(step["tokens"] or 0) / int(step["step_ns"]) * 1e9 for step in self._clean()]
        return statistics.median(rates) if rates else None

    @property
    def mfu(self) -> float | None:
        """Median over clean steps that say one."""
        found = [float(step["mfu"]) for step in self._clean() if step.get("mfu") is not None]
        return statistics.median(found) if found else None

    def _counting(self) -> list[tuple[int, dict[str, Any]]]:
        """Steps that the last state rests on; of a run that ended without success what can be restored."""
        limit = None if self.outcome in (None, "succeeded") else self._durable
        return [(number, step) for number, step in self.steps.items() if limit is None or number <= limit]

    def _clean(self) -> list[dict[str, Any]]:
        """Beyond each attempt's warm-up; where there are none yet, all that took time."""
        timed = [(number, step) for number, step in self._counting() if int(step["step_ns"] or 0) > 0]
        clean = [step for number, step in timed if self._places[number][1] > WARMUP_STEPS and step["tokens"]]
        return clean or [step for _, step in timed]

    def figure(self, name: str, *, last: bool = True) -> Any:
        """``name`` of the last (or first) evaluation that has it."""
        for step in sorted(self.evals, reverse=last):
            if self.evals[step].get(name) is not None:
                return self.evals[step][name]
        return None


def summarise(events: Iterable[Event]) -> Summary:
    """Fold ``events``, in order."""
    found = Summary()
    for event in events:
        found.add(event)
    return found
