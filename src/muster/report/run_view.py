"""The current state of a run, folded event by event: for status, the live view and the end of ``train``.

The ledger folds a whole log on one time axis; this fold takes each event once, in order. Speed and MFU are
the ledger's: medians over the same clean steps of the same lineage (a test holds the two together).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from muster.core.event_details import attempts, checkpoints, hosts, incidents, run, training
from muster.core.events import Event
from muster.report.ledger.lineage import Step
from muster.report.ledger.reference_rate import typical_steps

_HOST_STATES = {
    hosts.HostAllocated.kind: "ready",
    hosts.HostLost.kind: "lost",
    hosts.HostQuarantined.kind: "quarantined",
    hosts.HostReadmitted.kind: "ready",
    hosts.HostReleased.kind: "released",
}

RECENT_STEPS = 50
"""Steps that say how fast a run is now."""


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


@dataclass
class _Held:
    """A host's time that is paid for."""

    usd_per_hour: float | None = None
    since_ns: int | None = None
    before_ns: int = 0

    def ns(self, now_ns: int) -> int:
        return self.before_ns + (max(0, now_ns - self.since_ns) if self.since_ns is not None else 0)


@dataclass(kw_only=True)
class RunView:
    """Folded events. A step that was repeated after a recovery counts once, as last taken."""

    name: str | None = None
    outcome: str | None = None
    exit_code: int | None = None
    reason: str | None = None
    attempt: int = 0
    world_size: int = 0
    layout: Mapping[str, int] = field(default_factory=dict)
    hosts: dict[str, HostView] = field(default_factory=dict)
    evals: dict[int, training.Eval] = field(default_factory=dict)
    samples: dict[int, list[training.Generation]] = field(default_factory=dict)
    incident_count: int = 0
    data: training.DataPrepared | None = None
    snapshots: checkpoints.SnapshotInterval | None = None
    """How often the ranks take snapshots in memory, as they said last."""
    newest: Step | None = None
    committed: dict[str, tuple[int, int]] = field(default_factory=dict)
    """URI of a checkpoint that is there -> its step and the wall clock of its commit."""
    _taken: list[Step] = field(default_factory=list)
    """Every applied step, in order; ``final``: the last state rests on it."""
    _final: dict[int, Step] = field(default_factory=dict)
    _durable: int = 0
    """Newest step that a disk or bucket checkpoint ever held."""
    began_ns: int | None = None
    """Wall clock of the first event."""
    newest_ns: int = 0
    """Wall clock of the newest event."""
    _held: dict[str, _Held] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Take one event, in order."""
        self.began_ns = event.wall_ns if self.began_ns is None else self.began_ns
        self.newest_ns = max(self.newest_ns, event.wall_ns)
        handler = _HANDLERS.get(event.kind)
        if handler is not None:
            handler(self, event)

    @property
    def step(self) -> int:
        """The step that was applied last; 0: none yet."""
        return self.newest.step if self.newest else 0

    @property
    def numbers(self) -> training.Step | None:
        """What that step's event says."""
        return self.newest.detail if self.newest else None

    @property
    def last_step(self) -> int | None:
        return max(self._final, default=None)

    @property
    def final_loss(self) -> float | None:
        """Loss of the last step that has one."""
        losses = (step.detail.loss for _, step in sorted(self._final.items(), reverse=True))
        return next((loss for loss in losses if loss is not None), None)

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
        shares = [step.detail.mfu for step in self._typical() if step.detail.mfu is not None]
        return statistics.median(shares) if shares else None

    @property
    def step_every_s(self) -> float | None:
        """From step to step, evaluations and saves included: over the newest attempt's last 50; None: not yet known."""
        recent = [step for step in self._taken[-RECENT_STEPS:] if step.attempt == self.attempt]
        gaps = len(recent) - 1
        return (recent[-1].end_ns - recent[0].end_ns) / 1e9 / gaps if gaps > 0 else None

    def usd(self, now_ns: int | None = None) -> float | None:
        """Price of the hosts' time, those still held until ``now_ns``, or the newest event; None: a price is unknown.

        What the ledger says, too: from allocation to release.
        """
        end_ns = max(self.newest_ns, now_ns or 0)
        if not self._held or any(host.usd_per_hour is None for host in self._held.values()):
            return None
        return sum(host.ns(end_ns) / 3.6e12 * (host.usd_per_hour or 0.0) for host in self._held.values())

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
        self.name = event.read(run.RunSubmitted).name or self.name
        self.outcome = self.exit_code = self.reason = None

    def _on_finished(self, event: Event) -> None:
        end = event.read(run.RunFinished)
        self.outcome, self.exit_code, self.reason = end.outcome, end.exit_code, end.reason

    def _on_attempt(self, event: Event) -> None:
        detail = event.read(attempts.AttemptStarted)
        self.attempt, self.world_size, self.layout = event.attempt, detail.world_size, detail.layout
        for host in self.hosts.values():
            host.ranks.clear()
            host.state = "ready" if host.state == "training" else host.state
        for name in detail.hosts:
            self._host(name).state = "training"
        self._discard(detail.resume_step, event.attempt)

    def _on_step(self, event: Event) -> None:
        if event.step is None or event.attempt < self.attempt:
            return  # fenced: its attempt had been replaced
        detail = event.read(training.Step)
        step = Step(
            attempt=event.attempt,
            step=event.step,
            begin_ns=event.wall_ns - max(0, detail.step_ns),
            end_ns=event.wall_ns,
            world_size=self.world_size,
            detail=detail,
            final=True,
        )
        if event.step in self._final:
            self._final[event.step].final = False
        self._taken.append(step)
        self._final[event.step] = self.newest = step

    def _on_eval(self, event: Event) -> None:
        if event.step is not None:
            self.evals[event.step] = event.read(training.Eval)

    def _on_generation(self, event: Event) -> None:
        if event.step is not None:
            detail, known = event.read(training.Generation), self.samples.setdefault(event.step, [])
            if detail not in known:
                known.append(detail)

    def _on_incident(self, event: Event) -> None:
        self.incident_count += event.read(incidents.IncidentDetected).part_of is None

    def _on_host(self, event: Event) -> None:
        host = self._host(event.host)
        host.state = _HOST_STATES[event.kind]
        if event.kind != hosts.HostAllocated.kind:
            host.ranks.clear()
        if event.kind == hosts.HostAllocated.kind:
            price = event.read(hosts.HostAllocated).usd_per_hour
            held = self._held.setdefault(event.host, _Held())
            held.usd_per_hour = held.usd_per_hour if price is None else price
            held.since_ns = event.wall_ns if held.since_ns is None else held.since_ns
        elif event.kind == hosts.HostReleased.kind and event.host in self._held:
            held = self._held[event.host]
            held.before_ns, held.since_ns = held.ns(event.wall_ns), None

    def _on_rank_started(self, event: Event) -> None:
        if event.rank is not None and event.attempt == self.attempt:
            pid = event.read(attempts.RankStarted).pid
            self._host(event.host).ranks[event.rank] = RankView(rank=event.rank, pid=pid)

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
        detail = event.read(checkpoints.CheckpointCommitted)
        if detail.tier in checkpoints.DURABLE:
            self._durable = max(self._durable, event.step or 0)
        if event.step is not None:
            self.committed[detail.uri] = (event.step, event.wall_ns)

    def _on_removed(self, event: Event) -> None:
        uri = event.read(checkpoints.CheckpointRemoved).uri
        self.committed.pop(uri, None)  # the event's step is that of the save that made it one too many

    def _on_restored(self, event: Event) -> None:
        self._discard(event.step, event.attempt)

    def _on_interval(self, event: Event) -> None:
        self.snapshots = event.read(checkpoints.SnapshotInterval)

    def _on_data(self, event: Event) -> None:
        self.data = event.read(training.DataPrepared)


_HANDLERS: dict[str, Callable[[RunView, Event], None]] = {
    run.RunSubmitted.kind: RunView._on_submitted,
    run.RunFinished.kind: RunView._on_finished,
    attempts.AttemptStarted.kind: RunView._on_attempt,
    training.Step.kind: RunView._on_step,
    training.Eval.kind: RunView._on_eval,
    training.Generation.kind: RunView._on_generation,
    incidents.IncidentDetected.kind: RunView._on_incident,
    **dict.fromkeys(_HOST_STATES, RunView._on_host),
    attempts.RankStarted.kind: RunView._on_rank_started,
    attempts.RankExited.kind: RunView._on_rank_exited,
    attempts.PhaseChanged.kind: RunView._on_phase,
    checkpoints.CheckpointCommitted.kind: RunView._on_committed,
    checkpoints.CheckpointRemoved.kind: RunView._on_removed,
    checkpoints.CheckpointRestored.kind: RunView._on_restored,
    checkpoints.SnapshotInterval.kind: RunView._on_interval,
    training.DataPrepared.kind: RunView._on_data,
}


def run_view(events: Iterable[Event]) -> RunView:
    """Fold ``events``, in order."""
    view = RunView()
    for event in events:
        view.add(event)
    return view
