"""What a run's events say so far, folded for people: status, the end of ``train``, the short report."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from muster.core.events import Event


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
    first_of_attempt: set[int] = field(default_factory=set)
    _first: bool = True

    def add(self, event: Event) -> None:
        """Take one event, in order."""
        detail = dict(event.detail)
        if event.kind == "step" and event.step is not None:
            self.steps[event.step] = detail
            if self._first:
                self.first_of_attempt.add(event.step)
                self._first = False
        elif event.kind == "eval" and event.step is not None:
            self.evals[event.step] = {**self.evals.get(event.step, {}), **detail}
        elif event.kind == "sample" and event.step is not None:
            known = self.samples.setdefault(event.step, [])
            if detail not in known:
                known.append(detail)
        elif event.kind == "incident":
            self.incidents.append(detail)
        elif event.kind == "attempt.started":
            self.attempt, self.world_size = event.attempt, detail["world_size"]
            self._first = True
        elif event.kind == "run.submitted":
            self.name = detail.get("name", self.name)
            self.outcome = self.exit_code = self.reason = None
        elif event.kind == "run.finished":
            self.outcome, self.exit_code, self.reason = detail["outcome"], detail["exit_code"], detail["reason"]
        elif event.kind == "model.ready":
            self.model = detail
        elif event.kind == "data.prepared":
            self.data = detail

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
        """Of all steps, padding excluded."""
        return sum(int(step["tokens"] or 0) for step in self.steps.values())

    @property
    def tokens_per_s(self) -> float | None:
        """Over all steps except the first of each attempt, which holds the warm-up."""
        counted = [step for number, step in self.steps.items() if number not in self.first_of_attempt]
        spent_ns = sum(int(step["step_ns"]) for step in counted)
        return sum(int(step["tokens"] or 0) for step in counted) / spent_ns * 1e9 if spent_ns else None

    @property
    def mfu(self) -> float | None:
        """Median over the same steps."""
        found = [
            float(step["mfu"])
            for number, step in self.steps.items()
            if number not in self.first_of_attempt and step.get("mfu") is not None
        ]
        return statistics.median(found) if found else None

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
