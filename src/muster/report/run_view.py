"""The current state of a run, folded event by event: for status, the live view and the end of ``train``.

It takes each event once, in order, and of steps keeps the newest: what many steps make, tokens and speed, is the
ledger's (``report.log_folder.progress``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from muster.core.event_details import attempts, checkpoints, hosts, incidents, run, training
from muster.core.events import Event

_HOST_STATES = {
    hosts.HostAllocated.kind: "ready",
    hosts.HostLost.kind: "lost",
    hosts.HostQuarantined.kind: "quarantined",
    hosts.HostReadmitted.kind: "ready",
    hosts.HostReleased.kind: "released",
}

RECENT_STEPS = 50
"""Steps that say how fast a run is now."""
_KEPT_STEPS = 4096
"""Steps whose end is known."""


@dataclass(kw_only=True)
class RankView:
    rank: int
    pid: int
    phase: str = "start"


@dataclass(kw_only=True)
class HostView:
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
    """Folded events."""

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
    newest: Event | None = None
    """Of the step that was applied last."""
    committed: dict[str, tuple[int, int]] = field(default_factory=dict)
    """URI of a checkpoint that is there -> its step and the wall clock of its commit."""
    _taken: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS))
    """(attempt, step, wall clock of its end) of the newest applied steps, in order."""
    began_ns: int | None = None
    """Wall clock of the first event."""
    newest_ns: int = 0
    """Wall clock of the newest event."""
    _held: dict[str, _Held] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        self.began_ns = event.wall_ns if self.began_ns is None else self.began_ns
        self.newest_ns = max(self.newest_ns, event.wall_ns)
        handler = _HANDLERS.get(event.kind)
        if handler is not None:
            handler(self, event)

    @property
    def step(self) -> int:
        """The step that was applied last; 0: none yet."""
        return self.newest.step or 0 if self.newest else 0

    @property
    def numbers(self) -> training.Step | None:
        return self.newest.read(training.Step) if self.newest else None

    @property
    def step_every_s(self) -> float | None:
        """From step to step, evaluations and saves included: over the newest attempt's last 50; None: not yet known."""
        recent = list(self._taken)[-RECENT_STEPS:]
        return pace_s([end_ns for attempt, _, end_ns in recent if attempt == self.attempt])

    def usd(self, now_ns: int | None = None) -> float | None:
        """Price of the hosts' time, those still held until ``now_ns``, or the newest event; None: a price is unknown.

        What the ledger says, too: from allocation to release.
        """
        end_ns = max(self.newest_ns, now_ns or 0)
        if not self._held or any(host.usd_per_hour is None for host in self._held.values()):
            return None
        return sum(host.ns(end_ns) / 3.6e12 * (host.usd_per_hour or 0.0) for host in self._held.values())

    def applied_ns(self, step: int | None) -> int | None:
        """Wall clock of the step's end; None: it was not applied, or long ago."""
        return next((end_ns for _, applied, end_ns in reversed(self._taken) if applied == step), None)

    def _host(self, name: str) -> HostView:
        return self.hosts.setdefault(name, HostView(name=name))

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

    def _on_step(self, event: Event) -> None:
        if event.step is None or event.attempt < self.attempt:
            return  # fenced: its attempt had been replaced
        self.newest = event
        self._taken.append((event.attempt, event.step, event.wall_ns))

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
        if event.step is not None:
            self.committed[event.read(checkpoints.CheckpointCommitted).uri] = (event.step, event.wall_ns)

    def _on_removed(self, event: Event) -> None:
        uri = event.read(checkpoints.CheckpointRemoved).uri
        self.committed.pop(uri, None)  # the event's step is that of the save that made it one too many

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
    checkpoints.SnapshotInterval.kind: RunView._on_interval,
    training.DataPrepared.kind: RunView._on_data,
}


def pace_s(ends_ns: Sequence[int]) -> float | None:
    """From step to step; None: there are fewer than two."""
    return (ends_ns[-1] - ends_ns[0]) / 1e9 / (len(ends_ns) - 1) if len(ends_ns) > 1 else None


def run_view(events: Iterable[Event]) -> RunView:
    view = RunView()
    for event in events:
        view.add(event)
    return view
