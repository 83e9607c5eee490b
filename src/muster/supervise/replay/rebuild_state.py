"""From a run's event log to the state in which a new supervisor continues."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from muster.core.errors import UsageError
from muster.core.event_details.attempts import AttemptEnded, AttemptResizing, AttemptStarted
from muster.core.event_details.checkpoints import SnapshotRejected
from muster.core.event_details.hosts import HostHealth, HostPlaced, HostQuarantined, HostReadmitted, TerminationNotice
from muster.core.event_details.incidents import IncidentDecided, IncidentDetected
from muster.core.event_details.run import (
    RunEnding,
    RunFinished,
    RunHeld,
    RunRestarted,
    RunStopping,
    RunWaiting,
    StopRequested,
    SupervisorStarted,
)
from muster.core.event_details.training import StragglerNamed
from muster.core.events import Event
from muster.core.incidents import counts_against_host, traits_of
from muster.core.layout import Layout
from muster.core.typed_json import JsonObject
from muster.core.types import Action
from muster.policy.snapshot_holders import logged_holders
from muster.supervise.recovery import phases
from muster.supervise.recovery.hosts import clear_notice
from muster.supervise.recovery.incidents import count_error, error_key, opened_by, readmit_host
from muster.supervise.recovery.inputs import SECOND_NS, StopRequest
from muster.supervise.recovery.phases import (
    Adopting,
    Draining,
    Flushing,
    Held,
    NextHosts,
    Resize,
    RunEnd,
    Running,
    Starting,
    Stopping,
    Waiting,
)
from muster.supervise.recovery.state import Attempt, Fault, Host, Quarantine, Saves, State, Steps

#: Writer of what supervisors log.
SUPERVISOR = "supervisor"


def finish_of(events: Iterable[Event], *, submission: str, job: str | None = None) -> RunFinished | None:
    """How the newest supervisor, if it was one of this job and submission, ended the run; None: it did not.

    ``events``: in their order; another machine's commands end nothing here.
    """
    mine, result = False, None
    for event in events:
        if event.kind == SupervisorStarted.kind:
            started, result = event.read(SupervisorStarted), None
            mine = (started.job, started.submission) == (job, submission)
        elif event.kind == RunFinished.kind and event.host == SUPERVISOR:
            result = event.read(RunFinished)
    return result if mine else None


def rebuild_state(events: Iterable[Event], *, now_wall_ns: int | None = None) -> State:
    """The state after ``events`` (in each file's order; files in any order).

    A run that has ended, or never started an attempt, begins at STARTING with the attempt counter where it was:
    numbers are never used twice. One that is held stays so. Any other begins at ADOPT, where the hosts' own reports
    (who runs what) decide whether it goes on where the log says that it is. Times are ages (nanoseconds before
    ``now_wall_ns``, or before the last event; negative), which ``RecoveryStateMachine.start`` puts on its own clock.

    Raises:
        MusterError: an event is not as a supervisor writes it.
    """
    ordered = sorted(events, key=attrgetter("wall_ns"))
    newest_ns = ordered[-1].wall_ns if ordered else 0
    return rebuild_in_order(ordered, now_ns=max(newest_ns, now_wall_ns or 0))


def rebuild_in_order(events: Iterable[Event], *, now_ns: int) -> State:
    """The same of events that are in the order of their wall times, none of them held; ``now_ns``: not before any."""
    replay = _Replay(now_ns=now_ns)
    for event in events:
        replay.add(event)
    return replay.result()


@dataclass
class _Replay:
    """Folds events; what they change is changed by the functions of the living supervisor."""

    now_ns: int
    state: State = field(default_factory=State)
    asked: StopRequest | None = None
    """A stop that is not carried out yet."""
    waiting_since_ns: int | None = None
    detected: Event | None = None
    newest_attempt: int = 0
    """Of any event: the log may lack the beginning of that attempt."""
    of_unknown: dict[int, set[str]] = field(default_factory=dict)
    """Hosts that ran ranks of attempts whose beginning the log lacks."""

    def add(self, event: Event) -> None:
        self.newest_attempt = max(self.newest_attempt, event.attempt)
        if event.rank is not None and event.attempt > self.state.attempt:
            self.of_unknown.setdefault(event.attempt, set()).add(event.host)
        if event.kind in _FOLDS:
            _FOLDS[event.kind](self, event, event.wall_ns - self.now_ns)

    def result(self) -> State:
        state, phase = self.state, self.state.phase
        if self.newest_attempt > state.attempt and isinstance(phase, Running):
            # Neither its ranks nor its layout are known: all that runs on any host is of an older attempt than this.
            phase = self._end_unknown_attempt()
        elif self.newest_attempt > state.attempt:  # its ranks, if it has any, are those before it, and are ended
            state.attempt = self.newest_attempt if state.ranks else self.newest_attempt + 1
        known = isinstance(phase, Held | Draining | Waiting | Flushing) or bool(state.ranks)
        if known and not isinstance(phase, Held):
            state.phase = Adopting(found=phase, asked_before=self.asked)
        elif not known:
            state.phase = Starting()
        return state

    def _end_unknown_attempt(self) -> Draining:
        """Every host that may run its ranks is to end them, and to say what it holds; they run the next attempt."""
        state = self.state
        names = dict.fromkeys((*state.active, *sorted(self.of_unknown.get(self.newest_attempt, ()))))
        members = [name for name in names if name not in state.hosts or not state.hosts[name].notice.lost_since]
        state.attempt = self.newest_attempt + 1
        state.abandon()
        return Draining(next=self._next(members, None))

    # ------------------------------------------------------------ attempts

    def attempt_started(self, event: Event, at_ns: int) -> None:
        state, detail = self.state, event.read(AttemptStarted)
        if event.attempt < state.attempt:
            return
        state.steps.batch_schedule = detail.batch_schedule
        state.steps.skipped |= set(detail.skip_steps)
        current = Attempt(
            hosts=tuple(detail.hosts),
            ranks={rank: host for host, ranks in detail.hosts.items() for rank in ranks},
            layout=Layout.of(detail.layout),
            resumed=detail.resumed,
            holders=logged_holders(tuple(detail.hosts), detail.copies),
        )
        state.begin_attempt(event.attempt, current, at_ns)
        state.phase, self.waiting_since_ns = Running(), None

    def attempt_ended(self, event: Event, _at_ns: int) -> None:
        detail, state = event.read(AttemptEnded), self.state
        if detail.next_hosts is None or event.attempt != state.attempt:
            return  # the run ends
        for host in state.hosts.values():
            if host.health.resetting and host.name in (*state.active, *detail.next_hosts):
                host.health.resettable, host.health.resetting = (), False
        state.phase = Draining(next=self._next(detail.next_hosts, detail.needed_hosts))

    def attempt_resizing(self, event: Event, at_ns: int) -> None:
        if isinstance(self.state.phase, Running):
            hosts = list(event.read(AttemptResizing).hosts)
            self.state.phase.resize = Resize(hosts=hosts, until_ns=at_ns)

    def attempt_abandoned(self, _event: Event, _at_ns: int) -> None:
        self.state.abandon()
        self.state.phase, self.waiting_since_ns = Starting(), None
        self.asked = None  # it was stopped, and everything ended: now it is started again

    def waiting(self, event: Event, at_ns: int) -> None:
        detail = event.read(RunWaiting)
        if self.waiting_since_ns is None:
            self.waiting_since_ns = at_ns
        if self.state.open is not None:
            self.state.open.stages_ns["collected"] = at_ns - self.state.open.detected_ns
        self.state.phase = Waiting(next=self._next(detail.hosts, detail.needed_hosts))

    def _next(self, hosts: Iterable[str], needed: int | None) -> NextHosts:
        return NextHosts(hosts=list(hosts), needed=needed or 0, waiting_since_ns=self.waiting_since_ns)

    # ------------------------------------------------------------ the run's end

    def stop_requested(self, event: Event, _at_ns: int) -> None:
        detail, phase = event.read(StopRequested), self.state.phase
        if isinstance(phase, Stopping | Flushing):
            phases.ends_for_good(phase, detail.exit_code)
            phase.by_user = True
            return
        self.asked = StopRequest(source=detail.source, exit_code=detail.exit_code, save=detail.save, force=detail.force)

    def stopping(self, event: Event, _at_ns: int) -> None:
        detail = event.read(RunStopping)
        self.asked = None
        self.state.phase = Stopping(
            outcome=detail.outcome,
            exit_code=detail.exit_code,
            source=detail.source,
            saves=detail.save,
            by_user=detail.by_user,
        )

    def ending(self, event: Event, at_ns: int) -> None:
        detail = event.read(RunEnding)
        end = RunEnd(outcome=detail.outcome, exit_code=detail.exit_code, reason=detail.reason)
        self.asked, self.state.open = None, None
        self.state.phase = Flushing(end=end, until_ns=at_ns, by_user=detail.by_user)

    def held(self, event: Event, at_ns: int) -> None:
        detail = event.read(RunHeld)
        deadline_ns = at_ns + int(detail.hold_s * SECOND_NS)
        self.state.phase = Held(exit_code=detail.exit_code, reason=detail.reason, deadline_ns=deadline_ns)

    def restarted(self, event: Event, _at_ns: int) -> None:
        self.asked, self.waiting_since_ns = None, None
        self.state.restart(elsewhere=event.read(RunRestarted).checkpoint_dir_changed)

    def finished(self, _event: Event, _at_ns: int) -> None:
        state = self.state
        self.asked, self.waiting_since_ns = None, None
        self.state = State(
            attempt=state.attempt,
            next_incident=state.next_incident,
            steps=Steps(batch_schedule=state.steps.batch_schedule, skipped=state.steps.skipped),
            # Else an older snapshot that a killed host left would come first.
            saves=Saves(committed_step=state.saves.committed_step),
        )

    # ------------------------------------------------------------ training

    def step(self, event: Event, _at_ns: int) -> None:
        if event.step is not None and event.attempt == self.state.attempt:
            self.state.add_step(event.step, event.detail)
        elif event.step is not None and event.attempt > self.state.attempt:  # the log lacks its attempt's beginning
            self.state.advance(event.step)

    def straggler(self, event: Event, _at_ns: int) -> None:
        if event.attempt == self.state.attempt:
            self.state.progress.stragglers.add((event.rank, event.read(StragglerNamed).cause))

    def restored(self, event: Event, _at_ns: int) -> None:
        if event.step is not None and event.attempt == self.state.attempt:
            self.state.advance(event.step)

    def committed(self, event: Event, _at_ns: int) -> None:
        self.state.saves.add_checkpoint(event.step, event.detail)

    def not_saved(self, event: Event, _at_ns: int) -> None:
        self.state.saves.failed = str(event.detail.get("reason", ""))

    def snapshot_rejected(self, event: Event, _at_ns: int) -> None:
        self.state.reject([event.read(SnapshotRejected).copy])

    # ------------------------------------------------------------ incidents

    def incident(self, event: Event, at_ns: int) -> None:
        """Count it as the supervisor that logged it did."""
        detail, state = event.read(IncidentDetected), self.state
        self.detected = event
        self._judged(self.state.hosts.get(event.host or ""), detail.evidence)
        self._count_incident(detail.incident_id)
        if event.rank is not None:
            state.progress.blamed.add(event.rank)
            if isinstance(state.phase, Draining) and not state.find_cause() and detail.part_of is not None:
                return  # it came with what is being answered, and counts as that
        elif event.step is not None:
            state.advance(event.step)  # the last one that was applied, perhaps known from a host's hello alone
        try:
            traits = traits_of(detail.incident)
        except UsageError:
            return  # of a later version, or of a package that is no longer installed
        host = event.host if event.host in state.hosts else None
        if host is not None and counts_against_host(traits, detail.culprit):
            state.hosts[host].failures_ns.append(at_ns)
        key = error_key(state, traits, event.step, event.detail, detail.evidence)
        count_error(state, key, host)

    def decided(self, event: Event, at_ns: int) -> None:
        detail, state, detected = event.read(IncidentDecided), self.state, self.detected
        self._count_incident(detail.incident_id)
        if detected is not None and detected.read(IncidentDetected).incident_id != detail.incident_id:
            detected = None  # the log lacks it
        state.steps.skipped |= set(detail.skip_steps)
        if detail.action is Action.IGNORE:
            if detected is not None and detected.read(IncidentDetected).sound_step is not None:
                state.saves.distrusted.pop(state.attempt, None)
            return
        if detected is not None:
            found_ns = detected.wall_ns - self.now_ns
            opened = opened_by(detected.detail, host=detected.host, at_ns=found_ns, step=state.last_applied_step)
            state.open_incident(opened)
        if detail.action is Action.RESET:
            state.reset_host(event.host)
        if detail.action is Action.WAIT and self.waiting_since_ns is None:
            self.waiting_since_ns = at_ns
        if isinstance(state.phase, Draining | Waiting) and detail.hosts is not None:
            needed = detail.wait_for if detail.action is Action.WAIT else state.phase.next.needed
            state.phase.next = self._next(detail.hosts, needed)

    def _count_incident(self, incident_id: str) -> None:
        """No number is used twice."""
        if incident_id[1:].isdecimal():
            self.state.next_incident = max(self.state.next_incident, int(incident_id[1:]) + 1)

    def resolved(self, _event: Event, _at_ns: int) -> None:
        self.state.open = None

    # ------------------------------------------------------------ hosts

    def allocated(self, event: Event, _at_ns: int) -> None:
        self._host(event).machine.allocated = True

    def placed(self, event: Event, _at_ns: int) -> None:
        self._host(event).machine.place = event.read(HostPlaced).place

    def released(self, event: Event, _at_ns: int) -> None:
        if event.host in self.state.hosts:
            self._host(event).machine.allocated = False

    def lost(self, event: Event, _at_ns: int) -> None:
        self._host(event).notice.lost_since = True

    def health(self, event: Event, _at_ns: int) -> None:
        state, host, detail = self.state, self._host(event), event.read(HostHealth)
        state.saves.distrust(detail.sound_attempt, detail.sound_step)
        before = host.health.resettable
        host.health.resettable = detail.resettable
        if state.keeps_faults_of(host.name):
            try:
                traits = traits_of(detail.incident)
            except UsageError:
                return  # of a later version, or of a package that is no longer installed
            known = {"class": detail.verdict, "sound_step": detail.sound_step}
            details: JsonObject = {key: value for key, value in known.items() if value is not None}
            fault = Fault(traits=traits, evidence=detail.evidence, resettable=detail.resettable, detail=details)
            host.health.keep(fault)
            host.health.resettable = before

    def _judged(self, host: Host | None, evidence: str) -> None:
        fault = host.health.fault if host is not None else None
        if host is not None and fault is not None and evidence == f"{host.name}: {fault.evidence}":
            host.health.take_fault()

    def notice(self, event: Event, _at_ns: int) -> None:
        if event.host in self.state.hosts:
            host = self._host(event)
            host.notice.grace_s, host.notice.lost_since = event.read(TerminationNotice).grace_s or 0.0, False

    def quarantined(self, event: Event, at_ns: int) -> None:
        host, detail = self._host(event), event.read(HostQuarantined)
        host.quarantine = Quarantine(
            for_s=detail.for_s or 0.0, until_return=detail.until_return, error=detail.quarantined_for_error
        )
        if isinstance(self.state.phase, Starting):
            host.health.take_fault()
        if detail.for_s:
            self.state.alarms[f"back:{host.name}"] = at_ns + int(detail.for_s * SECOND_NS)

    def readmitted(self, event: Event, _at_ns: int) -> None:
        host = self._host(event)
        match event.read(HostReadmitted).cause:
            case "returned":
                clear_notice(host)
            case "expired":
                host.quarantine = None
                self.state.alarms.pop(f"back:{host.name}", None)
            case _:
                readmit_host(self.state, host.name)

    def _host(self, event: Event) -> Host:
        return self.state.hosts.setdefault(event.host, Host(name=event.host))


_FOLDS: Mapping[str, Callable[[_Replay, Event, int], None]] = {
    "attempt.started": _Replay.attempt_started,
    "attempt.ended": _Replay.attempt_ended,
    "attempt.resizing": _Replay.attempt_resizing,
    "attempt.abandoned": _Replay.attempt_abandoned,
    "run.waiting": _Replay.waiting,
    "stop.requested": _Replay.stop_requested,
    "run.stopping": _Replay.stopping,
    "run.ending": _Replay.ending,
    "run.held": _Replay.held,
    "run.restarted": _Replay.restarted,
    "run.finished": _Replay.finished,
    "step": _Replay.step,
    "straggler.named": _Replay.straggler,
    "checkpoint.committed": _Replay.committed,
    "checkpoint.restored": _Replay.restored,
    "checkpoint.failed": _Replay.not_saved,
    "snapshot.rejected": _Replay.snapshot_rejected,
    "incident.detected": _Replay.incident,
    "incident.decided": _Replay.decided,
    "incident.resolved": _Replay.resolved,
    "host.allocated": _Replay.allocated,
    "host.placed": _Replay.placed,
    "host.released": _Replay.released,
    "host.lost": _Replay.lost,
    "host.health": _Replay.health,
    "termination.notice": _Replay.notice,
    "host.quarantined": _Replay.quarantined,
    "host.readmitted": _Replay.readmitted,
}
