"""The recovery state machine. Pure: inputs and a time in, effects out; no clock, no sockets, no sleep.

``docs/explanation/recovery.md`` says how a run gets from one phase to another; this module hands each input to the
function of its phase. Every decision is logged before the first message that carries it out, and an attempt's number
is used once: a message of an older attempt changes nothing on the host that gets it. So a supervisor killed between
any two effects leaves a state from which the next one continues.
"""

from __future__ import annotations

import functools

from muster.core.incidents import CAPACITY, RANK_HANG, START_UP
from muster.core.typed_json import JsonObject
from muster.policy.cluster_state import Policy
from muster.protocol.client import HealthReport
from muster.protocol.to_agent import Reload
from muster.protocol.to_supervisor import (
    EvidenceReady,
    FlushCommitted,
    FromAgent,
    HostFault,
    HostLooked,
    HostNotice,
    HostPreparing,
    HostReady,
    RankExit,
    RankHang,
    RanksEnded,
    RanksProgress,
    ReplicatorAddress,
    SnapshotsFlushed,
    SnapshotsRejected,
    StartFailed,
    StoreLost,
)
from muster.protocol.values import RankEvent, StoreAddress
from muster.supervise.recovery import final_flush, hangs, progress
from muster.supervise.recovery.adoption import adopt_failed
from muster.supervise.recovery.attempts import drain, on_replicator_address, patience_s, start_attempt, unready_host
from muster.supervise.recovery.context import SupervisorContext
from muster.supervise.recovery.final_flush import finish, flush_and_finish
from muster.supervise.recovery.host_health import on_health
from muster.supervise.recovery.hosts import (
    consider_growth,
    end_quarantine,
    host_down,
    host_ready,
    host_up,
    judge_faulty,
    on_store,
    ranks_ended,
    start_failed,
)
from muster.supervise.recovery.incidents import report_incident
from muster.supervise.recovery.inputs import (
    SECOND_NS,
    Effect,
    FromHost,
    HostDown,
    HostUp,
    Input,
    RestartRequest,
    Settings,
    StopRequest,
    Tick,
)
from muster.supervise.recovery.phases import (
    Adopting,
    Draining,
    Ended,
    Flushing,
    Held,
    NextHosts,
    Phase,
    Running,
    Starting,
    Stopping,
    Waiting,
)
from muster.supervise.recovery.rank_exits import rank_exit
from muster.supervise.recovery.state import Host, Link, State
from muster.supervise.recovery.stopping import NOTICES_ALARM, judge_notices, on_notice, on_stop

#: Reports that are judged only once every host of the attempt has answered a new supervisor.
DEFERRED = (RankExit, RankHang, StartFailed, HealthReport, HostFault, HostLooked)


class RecoveryStateMachine:
    """One run's supervisor, as a fold. Call ``handle`` with each input; call it with ``Tick`` at ``deadline_ns``."""

    def __init__(self, *, settings: Settings, policy: Policy, state: State | None = None) -> None:
        self._ctx = SupervisorContext(settings=settings, policy=policy, state=state or State())

    @property
    def settings(self) -> Settings:
        return self._ctx.settings

    @property
    def state(self) -> State:
        return self._ctx.state

    @property
    def deadline_ns(self) -> int | None:
        """When ``Tick`` is due, if nothing happens before."""
        state = self._ctx.state
        own = [] if state.phase.deadline_ns is None else [state.phase.deadline_ns]
        return min([*own, *state.alarms.values()], default=None)

    def start(self, now_ns: int) -> list[Effect]:
        """The first effects, before any input."""
        ctx, settings = self._ctx, self._ctx.settings
        ctx.now_ns = now_ns
        ctx.state.shift(now_ns)  # times from a log are ages
        if isinstance(ctx.state.phase, Starting):
            ctx.deadline(settings.spec.recovery.start_timeout_s)
            ctx.log("host.requested", {"count": settings.wanted_hosts + settings.spec.resources.spare_hosts})
        elif isinstance(ctx.state.phase, Adopting):
            ctx.deadline(settings.adopt_timeout_s)
        elif isinstance(ctx.state.phase, Held):  # what its hosts hold is written at its end: let them connect first
            connected_ns = now_ns + int(settings.adopt_timeout_s * SECOND_NS)
            ctx.state.phase.deadline_ns = max(ctx.state.phase.deadline_ns or 0, connected_ns)
        return self._taken()

    def postpone(self, by_ns: int) -> None:
        """Its last effects were carried out ``by_ns`` late: deadlines of their answers move by as much."""
        self._ctx.state.postpone(by_ns)

    def handle(self, given: Input, now_ns: int) -> list[Effect]:
        """Fold one input; return what is to be done, in order."""
        ctx, state = self._ctx, self._ctx.state
        ctx.now_ns = now_ns
        before = state.phase
        if isinstance(before, Ended):
            return []
        match given:
            case HostUp():
                host_up(ctx, given)
            case HostDown():
                host_down(ctx, given)
            case FromHost():
                self._from_host(given)
            case StopRequest():
                asked: JsonObject = {"source": given.source, "exit_code": given.exit_code}
                ctx.log("stop.requested", {**asked, "save": given.save, "force": given.force}, sync=True)
                on_stop(ctx, given)
            case RestartRequest():
                self._restart_request(given)
            case Tick():
                self._tick()
        if isinstance(before, Adopting) and state.phase is not before:
            self._adopted(before)
        return self._taken()

    def _adopted(self, adopting: Adopting) -> None:
        """It is known whether the attempt continues: judge, in their order, the reports that were deferred."""
        ctx, state = self._ctx, self._ctx.state
        for given in adopting.deferred:
            if not isinstance(state.phase, Ended):
                self._from_host(given)
        phase, asked = state.phase, adopting.asked or adopting.asked_before
        if isinstance(phase, Running) and state.progress.stepped and not state.progress.exited and not asked:
            consider_growth(ctx, phase)
        if isinstance(state.phase, Ended):
            return
        if any(host.notice.grace_s is not None for host in state.hosts.values()):
            at_ns = ctx.now_ns + int(ctx.settings.gather_notices_s * SECOND_NS)
            state.alarms.setdefault(NOTICES_ALARM, at_ns)
        if asked is not None:
            on_stop(ctx, asked)

    def _from_host(self, given: FromHost) -> None:
        """A message of a host's agent."""
        state, host = self._ctx.state, self._ctx.state.hosts.get(given.host)
        if isinstance(state.phase, Adopting) and isinstance(given.message, DEFERRED):
            state.phase.deferred.append(given)
        elif host is not None:
            _on_message(self._ctx, host, given.message)

    def _restart_request(self, given: RestartRequest) -> None:
        ctx, state = self._ctx, self._ctx.state
        if not isinstance(state.phase, Held):
            return
        ctx.policy = given.policy or ctx.policy
        elsewhere = given.settings.spec.checkpoint.dir != ctx.settings.spec.checkpoint.dir
        ctx.settings = given.settings
        state.restart(elsewhere=elsewhere)
        following = NextHosts(hosts=ctx.usable()[: ctx.settings.wanted_hosts])
        reason = "restarted by the user with a corrected run file"
        ctx.log("run.restarted", {"reason": reason, "checkpoint_dir_changed": elsewhere}, sync=True)
        for name in following.hosts:
            ctx.send(name, Reload())
        drain(ctx, following)

    def _tick(self) -> None:
        ctx, state = self._ctx, self._ctx.state
        for alarm in [name for name, at_ns in state.alarms.items() if at_ns <= ctx.now_ns]:
            del state.alarms[alarm]
            kind, _colon, host = alarm.partition(":")
            if kind == NOTICES_ALARM:
                judge_notices(ctx)
            elif kind == hangs.ALARM:
                hangs.judge_hang(ctx)
            elif host in state.hosts:
                end_quarantine(ctx, host)
        phase = state.phase
        if phase.deadline_ns is not None and ctx.now_ns >= phase.deadline_ns:
            phase.deadline_ns = None
            _on_deadline(ctx, phase)

    def _taken(self) -> list[Effect]:
        effects, self._ctx.effects = self._ctx.effects, []
        return effects


def _on_message(ctx: SupervisorContext, host: Host, message: FromAgent | HealthReport) -> None:
    """What follows from a message of a host's agent, or of a detector."""
    match message:
        case HostReady():
            host_ready(ctx, host, message)
        case ReplicatorAddress():
            on_replicator_address(ctx, host, message.memory)
        case StoreAddress() | StoreLost():
            on_store(ctx, host, message)
        case HostPreparing():
            progress.on_preparing(ctx, host)
        case RanksProgress():
            progress.on_progress(ctx, message)
        case RankEvent():
            progress.on_rank_event(ctx, message)
        case RankExit():
            rank_exit(ctx, host.name, message)
        case RankHang() | EvidenceReady():
            hangs.on_hang(ctx, host, message)
        case RanksEnded():
            ranks_ended(ctx, host, message)
        case SnapshotsFlushed() | FlushCommitted():
            final_flush.on_answer(ctx, host.name, message)
        case SnapshotsRejected():
            ctx.reject(message.copies, message.reason)
        case StartFailed():
            start_failed(ctx, host, message)
        case HostNotice():
            on_notice(ctx, host.name, message)
        case HealthReport() | HostFault() | HostLooked():
            on_health(ctx, host, message)


def _on_deadline(ctx: SupervisorContext, phase: Phase) -> None:
    match phase:
        case Starting():
            _start_deadline(ctx)
        case Adopting():
            adopt_failed(ctx, phase)
        case Running():
            _run_deadline(ctx, phase)
        case Draining():
            _drain_deadline(ctx, phase)
        case Waiting():
            _wait_deadline(ctx, phase)
        case Stopping():
            reason = f"not saved within {ctx.settings.spec.recovery.grace_s:g} s; the newest checkpoint remains"
            end = functools.partial(flush_and_finish, by_user=phase.by_user) if phase.saves else finish
            end(ctx, phase.outcome, phase.exit_code, reason)
        case Held():
            flush_and_finish(ctx, "failed", phase.exit_code, phase.reason)
        case Flushing():
            final_flush.on_deadline(ctx, phase)


def _start_deadline(ctx: SupervisorContext) -> None:
    if judge_faulty(ctx):
        return
    ready = ctx.usable()
    if len(ready) >= ctx.settings.min_hosts:
        start_attempt(ctx, ready)
    else:
        evidence = f"{len(ready)} of {ctx.settings.min_hosts} hosts were ready in time"
        report_incident(ctx, CAPACITY, evidence=evidence)


def _wait_deadline(ctx: SupervisorContext, waiting: Waiting) -> None:
    name = unready_host(ctx, waiting.next)
    if name is None:
        report_incident(ctx, CAPACITY, evidence="too few hosts")
    else:
        evidence = f"{name} is connected and has not got ready within {patience_s(ctx, waiting.next):g} s"
        report_incident(ctx, START_UP, host=name, evidence=evidence)


def _run_deadline(ctx: SupervisorContext, running: Running) -> None:
    if running.resize is not None:
        drain(ctx, ctx.following())
    elif not ctx.state.progress.stepped:
        evidence = f"no step within start_timeout_s={ctx.settings.spec.recovery.start_timeout_s:g} s"
        report_incident(ctx, RANK_HANG, evidence=evidence)


def _drain_deadline(ctx: SupervisorContext, draining: Draining) -> None:
    late = sorted(name for name, order in draining.waiting.items() if order.answer_by_ns <= ctx.now_ns)
    for name in late:
        host, was_ready = ctx.state.hosts[name], ctx.state.hosts[name].readiness.ready
        host_down(ctx, HostDown(host=name, reason="did not end its ranks in time"))
        host.link = Link.LATE if was_ready else Link.AWAY
    draining.await_next()
