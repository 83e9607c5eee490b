"""What a host's agent reports, and what follows: one function for each message."""

from __future__ import annotations

from muster.core.event_details import training
from muster.core.incidents import HOST_UNHEALTHY, RANK_HANG, START_UP, STRAGGLER, traits_of
from muster.core.typed_json import Json, JsonObject, Unreadable
from muster.health.stragglers import NOT_ASSESSED, NotAssessed, find_straggler, usd_per_day
from muster.protocol.client import HealthReport
from muster.protocol.to_agent import GatherEvidence
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
from muster.supervise.checks import judging
from muster.supervise.hangs import gathering
from muster.supervise.hangs.gathering import Gathering
from muster.supervise.recovery import final_flush, preemption_notices
from muster.supervise.recovery.attempts import patience_s, unready_host
from muster.supervise.recovery.context import SupervisorContext
from muster.supervise.recovery.hosts import (
    consider_growth,
    host_ready,
    rejoin_after_timeout,
    set_apart,
    set_aside,
    start_if_enough,
)
from muster.supervise.recovery.incidents import (
    extend_resize_deadline,
    judge_fault,
    report_incident,
    start_unless_faulty,
)
from muster.supervise.recovery.inputs import SECOND_NS
from muster.supervise.recovery.phases import Draining, Flushing, Running, Starting, Waiting
from muster.supervise.recovery.rank_exits import rank_exit
from muster.supervise.recovery.start_message import on_replicator_address
from muster.supervise.recovery.state import Fault, Host


def on_message(ctx: SupervisorContext, host: Host, message: FromAgent | HealthReport) -> None:
    match message:
        case HostReady():
            host_ready(ctx, host, message)
        case ReplicatorAddress():
            on_replicator_address(ctx, host, message.memory)
        case StoreAddress():
            host.store = message.store
        case StoreLost():
            host.store = None
        case RanksProgress() | HostPreparing():
            _progress(ctx, host, message)
        case RankEvent():
            _event(ctx, message)
        case RankExit():
            rank_exit(ctx, host.name, message)
        case RankHang() | EvidenceReady():
            _stands_still(ctx, host, message)
        case RanksEnded():
            _ranks_ended(ctx, host, message)
        case SnapshotsFlushed() | FlushCommitted():
            final_flush.on_answer(ctx, host.name, message)
        case SnapshotsRejected():
            ctx.reject(message.copies, message.reason)
        case StartFailed():
            _start_failed(ctx, host, message)
        case HostNotice():
            preemption_notices.on_notice(ctx, host.name, message)
        case HealthReport() | HostFault() | HostLooked():
            _health(ctx, host, message)


def _preparing(ctx: SupervisorContext, host: Host) -> None:
    """What a start needs is on its way to a host: the time that it has for that begins again. A download of weights
    takes longer than a start."""
    phase = ctx.state.phase
    if host.start_failed:
        return
    if isinstance(phase, Starting) and len(ctx.usable()) < ctx.settings.min_hosts:
        ctx.deadline(ctx.settings.spec.recovery.start_timeout_s)
    elif isinstance(phase, Waiting) and unready_host(ctx, phase.next) is not None:
        ctx.deadline(patience_s(ctx, phase.next))


def _progress(ctx: SupervisorContext, host: Host, message: RanksProgress | HostPreparing) -> None:
    """Ranks before their first step report that a long start is alive: ``start_timeout_s`` begins again."""
    if isinstance(message, HostPreparing):
        _preparing(ctx, host)
        return
    state = ctx.state
    if message.attempt == state.attempt and isinstance(state.phase, Running) and not state.progress.stepped:
        ctx.deadline(ctx.settings.spec.recovery.start_timeout_s)  # a script that reports progress uses muster.run


def _event(ctx: SupervisorContext, event: RankEvent) -> None:
    state = ctx.state
    if event.kind == "checkpoint.committed":
        state.add_checkpoint(event.step, event.detail)
    elif event.kind == "checkpoint.failed":
        state.save_failed = str(event.detail.get("reason", ""))
    elif event.kind == "step" and event.attempt == state.attempt and event.step is not None:
        _step(ctx, event.step, event.detail)
    elif event.kind == "checkpoint.restored" and event.attempt == state.attempt and event.step is not None:
        state.advance(event.step)  # whose own event another life of the run has, or nobody


def _step(ctx: SupervisorContext, step: int, detail: JsonObject) -> None:
    state, phase = ctx.state, ctx.state.phase
    before = state.last_applied_step
    first = state.add_step(step, detail)
    if isinstance(phase, Running) and phase.resize is None:
        phase.deadline_ns = None
    elif isinstance(phase, Running) and phase.resize is not None:
        extend_resize_deadline(ctx, phase.resize)
    if step > before:
        _resolve(ctx, step)
    if first and isinstance(phase, Running):
        consider_growth(ctx, phase)
    if detail.get("pace") and isinstance(phase, Running):
        _pace(ctx, step, detail)


def _pace(ctx: SupervisorContext, step: int, detail: JsonObject) -> None:
    """One rank keeps coming last: whether it is a straggler, and why. Uneven work is no incident."""
    try:
        paces = training.Step.of(detail, skip_unknown=True).pace
    except Unreadable:  # no rank of Muster's own: training goes on
        return
    state, found = ctx.state, find_straggler(paces)
    if isinstance(found, NotAssessed):
        if (None, NOT_ASSESSED) not in state.progress.stragglers:  # once
            ctx.log("run.message", {"text": found.reason}, step=step)
        state.progress.stragglers.add((None, NOT_ASSESSED))
        return
    if found is None or (found.rank, found.cause.value) in state.progress.stragglers:
        return
    state.progress.stragglers.add((found.rank, found.cause.value))
    host = state.ranks.get(found.rank) if found.cause.blames_host else None
    price = ctx.settings.usd_per_host_hour
    usd = usd_per_day(found.lag_us, found.step_us, hosts=len(state.active), usd_per_host_hour=price)
    told: dict[str, Json] = {"cause": found.cause.value, "evidence": found.evidence, "last": found.last}
    told |= {"steps": found.steps, "lag_ns": int(found.lag_us * 1000), "step_ns": int(found.step_us * 1000)}
    if usd is not None:
        told["usd_per_day"] = round(usd, 2)
    ctx.log("straggler.named", told, host=host, rank=found.rank, step=step)
    if host is not None:
        report_incident(ctx, STRAGGLER, host=host, evidence=f"{host}: {found.evidence}", step=step)


def _resolve(ctx: SupervisorContext, step: int) -> None:
    """A step beyond all that were applied before: the open incident is resolved."""
    state, incident = ctx.state, ctx.state.open
    if incident is None:
        return
    if "started" in incident.stages_ns and isinstance(state.phase, Running):
        redone_from = incident.last_applied_step
        lost_ns = incident.stages_ns["first_step"] = ctx.now_ns - incident.detected_ns
        resumed = incident.stages_ns.pop("resume_step", redone_from)
        cost: JsonObject = {"lost_ns": lost_ns, "redone_steps": max(0, redone_from - resumed)}
        detail = {"incident_id": incident.incident_id, **cost, "stages_ns": dict(incident.stages_ns)}
        ctx.log("incident.resolved", detail, step=step)
        state.open = None


def _stands_still(ctx: SupervisorContext, host: Host, message: RankHang | EvidenceReady) -> None:
    """First all hosts capture what their ranks do: once these are ended, nobody can say who held the others up."""
    state, phase, settings = ctx.state, ctx.state.phase, ctx.settings
    if isinstance(message, EvidenceReady) and message.exited is not None:
        _seen_beside_exit(ctx, host, message)
        return
    if message.attempt != state.attempt or not isinstance(phase, Running):
        return
    if isinstance(message, EvidenceReady):
        if phase.gathering is not None and phase.gathering.add(host.name, message):
            judge_hang(ctx)
        return
    if phase.gathering is not None:
        return  # the same hang, seen on another rank
    hosts = {name for name in state.active if name in state.hosts and state.hosts[name].connected}
    phase.gathering = Gathering(host=host.name, report=message, begun_ns=ctx.now_ns, waiting=hosts)
    if settings.gather_evidence_s <= 0:
        judge_hang(ctx)
        return
    ctx.alarm(gathering.ALARM, settings.gather_evidence_s)
    for name in sorted(hosts):
        ctx.send(name, GatherEvidence(attempt=state.attempt))


def _seen_beside_exit(ctx: SupervisorContext, host: Host, answer: EvidenceReady) -> None:
    """What its host has seen of a rank's exit, which is judged already and waits for nothing of this."""
    incident_id = ctx.state.exits.pop((answer.attempt, answer.exited or 0), None)
    if incident_id is not None:
        analysis, ranks = gathering.of_exit(host.name, answer)
        ctx.log("evidence.gathered", gathering.event_of(analysis, ranks, incident_id=incident_id, took_ns=0))


def judge_hang(ctx: SupervisorContext) -> None:
    """All hosts have answered, or the time is over: the incident names who holds the others up, if anybody can."""
    state, phase = ctx.state, ctx.state.phase
    state.alarms.pop(gathering.ALARM, None)
    if not isinstance(phase, Running) or phase.gathering is None:
        return  # something else has ended the attempt meanwhile
    found, phase.gathering = phase.gathering, None
    report = found.report
    host, rank, evidence, detail = found.host, report.rank, report.evidence, dict[str, Json]()
    if found.answers:
        took_ns = ctx.now_ns - found.begun_ns
        analysis, ranks = found.conclude(len(state.ranks))
        told = gathering.event_of(analysis, ranks, incident_id=f"i{state.next_incident}", took_ns=took_ns)
        ctx.log("evidence.gathered", told)
        if analysis.culprits:
            culprit = analysis.culprits[0]
            host, rank = state.ranks.get(culprit.rank, host), culprit.rank
            evidence = f"{analysis.sentence}; noticed as: {evidence}"
            detail["culprit"] = culprit.kind.value
    silent_s = report.silent_s + (ctx.now_ns - found.begun_ns) / SECOND_NS
    report_incident(ctx, RANK_HANG, host=host, rank=rank, evidence=evidence, detail=detail, silent_s=silent_s)


def _ranks_ended(ctx: SupervisorContext, host: Host, message: RanksEnded) -> None:
    """A host has ended its ranks and lists the snapshots it holds."""
    if host.drain_timed_out and not host.connected:
        rejoin_after_timeout(ctx, host, message)
        return
    if message.attempt < ctx.state.attempt:
        return
    host.snapshots, host.retained, host.alive = message.snapshots, message.kept, {}
    if message.reset is not None and not message.reset.ok and isinstance(ctx.state.phase, Draining):
        evidence = f"{host.name}: its GPUs could not be reset: {message.reset.evidence}"
        report_incident(ctx, HOST_UNHEALTHY, host=host.name, evidence=evidence)
    phase = ctx.state.phase
    if isinstance(phase, Flushing):
        final_flush.on_drained(ctx, phase, host.name)
    elif isinstance(phase, Draining) and phase.waiting.pop(host.name, None) is not None:
        start_unless_faulty(ctx)


def _start_failed(ctx: SupervisorContext, host: Host, message: StartFailed) -> None:
    """An agent could not prepare: bad data, a missing library, no memory for a fork server. It tries again later.

    Ranks that take steps need none of it: they go on, and it is an incident once an attempt is to be started.
    """
    host.ready = host.ready and host.store is not None
    can_wait = set_aside(ctx, host.name, message.reason)
    if not can_wait and isinstance(ctx.state.phase, Starting | Running | Waiting):
        detail: JsonObject = {"exit_code": message.exit_code, "hint": message.hint}
        report_incident(ctx, START_UP, host=host.name, evidence=message.reason, detail=detail)


def _health(ctx: SupervisorContext, host: Host, message: HealthReport | HostFault | HostLooked) -> None:
    """A detector's report on a host, or its own look at its hardware: what is wrong, and what may heal it.

    Judged at once where ranks run or could, else before the next attempt starts.
    """
    if isinstance(message, HostLooked):
        fault = _fault_seen(ctx, host, message)
        if fault is None:
            return
        message = fault
    state, phase = ctx.state, ctx.state.phase
    traits, evidence, detail = HOST_UNHEALTHY, message.evidence[:500], dict[str, Json]()
    health: dict[str, Json] = {"resettable": list(message.resettable)}
    if isinstance(message, HostFault):
        told, host.told = host.told, (message.at_ns, evidence)
        if host.told == told:
            return
        health["verdict"] = detail["class"] = message.verdict
        if message.sound_step is not None:
            health["sound_step"] = detail["sound_step"] = message.sound_step
            health["sound_attempt"] = message.attempt
            state.distrust(message.attempt, message.sound_step)
    else:
        traits = traits_of(message.kind)
    ctx.log("host.health", {"incident": traits.kind, "evidence": evidence, **health}, host=host.name)
    if state.keeps_faults_of(host.name):
        host.keep(Fault(traits=traits, evidence=evidence, resettable=message.resettable, detail=detail))
        if isinstance(phase, Running | Waiting):
            judge_fault(ctx, host.name)
        elif isinstance(phase, Starting):
            start_if_enough(ctx)
        return
    host.resettable = message.resettable
    if isinstance(message, HostFault) and not host.quarantined:
        set_apart(ctx, host, evidence, message.resettable)


def _fault_seen(ctx: SupervisorContext, host: Host, message: HostLooked) -> HostFault | None:
    """What a host saw of its hardware: logged; what needs an action is a fault as any other."""
    spec = ctx.settings.spec
    found = judging.judge(host.name, message.look, spec)
    ctx.log("host.check", judging.event_of(host.name, message.look, found, spec), host=host.name)
    return judging.fault_of(found, message)
