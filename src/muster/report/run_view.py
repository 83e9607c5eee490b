"""The current state of a run, folded event by event: for status, the live view and the end of ``train``.

The ledger folds a whole log on one time axis; this fold takes each event once, in order. Speed and MFU are
the ledger's: medians over the same clean steps of the same lineage (a test holds the two together).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from muster.core.events import Event
from muster.report.ledger.lineage import Step
from muster.report.ledger.reference_rate import typical_steps

_HOST_STATES = {
    "host.allocated": "ready",
    "host.lost": "lost",
    "host.quarantined": "quarantined",
    "host.readmitted": "ready",
    "host.released": "released",
}


@dataclass(kw_only=True)
class RankView:
    """One rank of the newest attempt."""

    rank: int
    pid: int
    phase: str = "start"


@dataclass(kw_only=True)
class HostView:
    """One host that was ever allocated."""

    name: str
    state: str = "ready"
    """training, spare, ready, lost, quarantined, released."""
    ranks: dict[int, RankView] = field(default_factory=dict)


@dataclass(kw_only=True)
class RunView:
    """Folded events. A step that was repeated after a recovery counts once, as last taken."""

    name: str | None = None
    outcome: str | None = None
    exit_code: int | None = None
    reason: str | None = None
    attempt: int = 0
    world_size: int = 0
    layout: dict[str, int] = field(default_factory=dict)
    hosts: dict[str, HostView] = field(default_factory=dict)
    evals: dict[int, dict[str, Any]] = field(default_factory=dict)
    samples: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    incident_count: int = 0
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    newest: Step | None = None
    committed: dict[str, tuple[int, int]] = field(default_factory=dict)
    """URI of a checkpoint that is there -> its step and the wall clock of its commit."""
    _taken: list[Step] = field(default_factory=list)
    """Every applied step, in order; ``final``: the last state rests on it."""
    _final: dict[int, Step] = field(default_factory=dict)
    _durable: int = 0
    """Newest step that a disk or bucket checkpoint ever held."""

    def add(self, event: Event) -> None:
        """Take one event, in order."""
        handler = _HANDLERS.get(event.kind)
        if handler is not None:
            handler(self, event)

    @property
    def step(self) -> int:
        """The step that was applied last; 0: none yet."""
        return self.newest.step if self.newest else 0

    @property
    def numbers(self) -> dict[str, Any]:
        """Detail of that step's event."""
        return self.newest.detail if self.newest else {}

    @property
    def last_step(self) -> int | None:
        return max(self._final, default=None)

    @property
    def final_loss(self) -> float | None:
        """Loss of the last step that has one."""
        losses = [step.detail["loss"] for _, step in sorted(self._final.items()) if step.detail["loss"] is not None]
        return float(losses[-1]) if losses else None

    @property
    def tokens(self) -> int:
        """Of the steps that count, padding excluded."""
        return sum(step.tokens for step in self._final.values() if self._counts(step))

    @property
    def tokens_per_s(self) -> float | None:
        """Median over clean steps."""
        rates = [step.tokens / step.measured_ns * 1e9 for step in self._typical()]
        return statistics.median(rates) if rates else None

    @property
    def mfu(self) -> float | None:
        """Median over clean steps that have one."""
        shares = [float(step.detail["mfu"]) for step in self._typical() if step.detail.get("mfu") is not None]
        return statistics.median(shares) if shares else None

    def applied_ns(self, step: int | None) -> int | None:
        """Wall clock of the step's end; None: it was never applied."""
        return next((taken.end_ns for taken in reversed(self._taken) if taken.step == step), None)

    def _typical(self) -> list[Step]:
        return typical_steps([step if self._counts(step) else replace(step, final=False) for step in self._taken])

    def _counts(self, step: Step) -> bool:
        """Of a run that ended without success only what can be restored counts."""
        return self.outcome in (None, "succeeded") or step.step <= self._durable

    def _host(self, name: str) -> HostView:
        return self.hosts.setdefault(name, HostView(name=name))

    def _discard(self, after: int | None, attempt: int) -> None:
        """``attempt`` continues ``after`` a step (None, -1: not known yet): later ones of earlier attempts are lost."""
        if after is not None and after >= 0:
            for lost in [step for step in self._final.values() if step.step > after and step.attempt < attempt]:
                self._final.pop(lost.step).final = False

    def _on_submitted(self, event: Event) -> None:
        self.name = event.detail.get("name", self.name)
        self.outcome = self.exit_code = self.reason = None

    def _on_finished(self, event: Event) -> None:
        self.outcome, self.exit_code, self.reason = (event.detail[key] for key in ("outcome", "exit_code", "reason"))

    def _on_attempt(self, event: Event) -> None:
        detail = event.detail
        self.attempt, self.world_size = event.attempt, int(detail["world_size"])
        self.layout = dict(detail["layout"])
        for host in self.hosts.values():
            host.ranks.clear()
            host.state = "ready" if host.state == "training" else host.state
        for name in detail["hosts"]:
            self._host(name).state = "training"
        self._discard(detail.get("resume_step"), event.attempt)

    def _on_step(self, event: Event) -> None:
        if event.step is None or event.attempt < self.attempt:
            return  # fenced: its attempt had been replaced
        step = Step(
            attempt=event.attempt,
            step=event.step,
            begin_ns=event.wall_ns - max(0, int(event.detail["step_ns"] or 0)),
            end_ns=event.wall_ns,
            world_size=self.world_size,
            detail=dict(event.detail),
            final=True,
        )
        if event.step in self._final:
            self._final[event.step].final = False
        self._taken.append(step)
        self._final[event.step] = self.newest = step

    def _on_eval(self, event: Event) -> None:
        if event.step is not None:
            self.evals[event.step] = {**self.evals.get(event.step, {}), **event.detail}

    def _on_generation(self, event: Event) -> None:
        if event.step is not None:
            detail, known = dict(event.detail), self.samples.setdefault(event.step, [])
            if detail not in known:
                known.append(detail)

    def _on_incident(self, event: Event) -> None:
        self.incident_count += 1

    def _on_host(self, event: Event) -> None:
        host = self._host(event.host)
        host.state = _HOST_STATES[event.kind]
        if event.kind != "host.allocated":
            host.ranks.clear()

    def _on_rank_started(self, event: Event) -> None:
        if event.rank is not None and event.attempt == self.attempt:
            self._host(event.host).ranks[event.rank] = RankView(rank=event.rank, pid=int(event.detail["pid"]))

    def _on_rank_exited(self, event: Event) -> None:
        if event.rank is not None and event.attempt == self.attempt:
            self._host(event.host).ranks.pop(event.rank, None)

    def _on_phase(self, event: Event) -> None:
        host = self.hosts.get(event.host)
        if host is None or event.phase is None:
            return
        if event.rank is None:
            host.state = event.phase if event.phase == "spare" else host.state
        elif event.rank in host.ranks and event.attempt == self.attempt:
            host.ranks[event.rank].phase = event.phase

    def _on_committed(self, event: Event) -> None:
        if event.detail.get("tier") in ("disk", "bucket"):
            self._durable = max(self._durable, event.step or 0)
        if event.step is not None:
            self.committed[str(event.detail["uri"])] = (event.step, event.wall_ns)

    def _on_removed(self, event: Event) -> None:
        self.committed.pop(str(event.detail["uri"]), None)  # its step is that of the save that made it one too many

    def _on_restored(self, event: Event) -> None:
        self._discard(event.step, event.attempt)

    def _on_model(self, event: Event) -> None:
        self.model = dict(event.detail)

    def _on_data(self, event: Event) -> None:
        self.data = dict(event.detail)


_HANDLERS: dict[str, Callable[[RunView, Event], None]] = {
    "run.submitted": RunView._on_submitted,
    "run.finished": RunView._on_finished,
    "attempt.started": RunView._on_attempt,
    "step": RunView._on_step,
    "eval": RunView._on_eval,
    "generation": RunView._on_generation,
    "incident.detected": RunView._on_incident,
    **dict.fromkeys(_HOST_STATES, RunView._on_host),
    "rank.started": RunView._on_rank_started,
    "rank.exited": RunView._on_rank_exited,
    "phase.changed": RunView._on_phase,
    "checkpoint.committed": RunView._on_committed,
    "checkpoint.removed": RunView._on_removed,
    "checkpoint.restored": RunView._on_restored,
    "model.ready": RunView._on_model,
    "data.prepared": RunView._on_data,
}


def run_view(events: Iterable[Event]) -> RunView:
    """Fold ``events``, in order."""
    view = RunView()
    for event in events:
        view.add(event)
    return view
