"""From one attempt to the next: end the ranks, learn which snapshots hosts hold, form a layout, start it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from muster.core.batch_schedule import changed
from muster.core.typed_json import Json, JsonObject
from muster.policy.cluster_state import NextAttempt
from muster.policy.snapshot_holders import holders_to_log, snapshot_holders
from muster.protocol.held_snapshots import Choice
from muster.protocol.ranks import REQUESTED_EXIT_CODES
from muster.protocol.to_agent import EndAttempt
from muster.protocol.values import CommandRanks
from muster.supervise.recovery.context import SupervisorContext
from muster.supervise.recovery.final_flush import finish, flush_and_finish
from muster.supervise.recovery.inputs import SECOND_NS
from muster.supervise.recovery.phases import Draining, EndOrder, NextHosts, Running, Stopping, Waiting
from muster.supervise.recovery.preemption_cost import expected_loss
from muster.supervise.recovery.retained_ranks import (
    PAUSE_S,
    pause_s,
    prefer_hosts_of_whole_replicas,
    rank_mapping,
    retainable_ranks,
    whole_replicas,
)
from muster.supervise.recovery.start_message import copies_leave_rack, has_replica, peer_of, start_message
from muster.supervise.recovery.state import Attempt

#: A GPU's reset takes some seconds; NVIDIA states no limit.
RESET_TIMEOUT_S = 60.0
#: A host that could not start tries again (``agent.fork_server_process``); an attempt that needs it waits this long.
AFTER_FAILURE_S = 60.0
UNWATCHED = (
    "start-up hangs are not detected until the script first calls muster.run; start_timeout_s applies from then on"
)
SPARE = "kept as a spare"


def drain(ctx: SupervisorContext, following: NextHosts) -> None:
    """End every rank of the attempt and learn which snapshots the hosts hold; ``following`` comes next."""
    state = ctx.state
    members = {name for name in (*state.active, *following.hosts) if state.hosts[name].connected}
    incident_id = state.open.incident_id if state.open else ""
    if state.attempt:
        log_end(ctx, following)
    draining = state.phase if isinstance(state.phase, Draining) else Draining(next=following)
    if draining is not state.phase:
        ctx.enter(draining)
    keep = retainable_ranks(ctx, following.hosts)
    for name in sorted(members):
        host, answer_s = state.hosts[name], ctx.settings.drain_timeout_s
        host.retained = {}
        message = EndAttempt(attempt=state.attempt, why=incident_id)
        local_ranks = tuple(rank for rank in sorted(keep) if state.ranks[rank] == name)
        if local_ranks:
            message = replace(message, keep=local_ranks, pause_s=pause_s(ctx))
            answer_s += message.pause_s - PAUSE_S
        if host.resetting:
            message = replace(message, reset=host.resettable)
            host.resettable, host.resetting = (), False
            answer_s = max(answer_s, RESET_TIMEOUT_S)
        draining.waiting[name] = EndOrder(message=message, answer_by_ns=ctx.now_ns + int(answer_s * SECOND_NS))
        ctx.send(name, message)
    draining.await_next()
    start_when_drained(ctx)


def log_end(ctx: SupervisorContext, following: NextHosts) -> None:
    """That the attempt ends, and what comes next; again where that changes without a decision."""
    reason = ctx.state.open.incident_id if ctx.state.open else "restart"
    end: JsonObject = {"reason": reason, "next_hosts": following.hosts[:], "needed_hosts": following.needed}
    ctx.log("attempt.ended", end)


def resend_end(ctx: SupervisorContext, draining: Draining, name: str) -> None:
    """Its agent restarted before it had answered, and does not know the message."""
    if name in draining.waiting:
        ctx.send(name, draining.waiting[name].message)


def start_when_drained(ctx: SupervisorContext) -> None:
    """Once every host has reported: start the attempt, or wait for more hosts."""
    state, phase = ctx.state, ctx.state.phase
    if not isinstance(phase, Draining) or phase.waiting:
        return
    if state.open is not None:
        state.open.stages_ns["collected"] = ctx.now_ns - state.open.detected_ns
    following, needed = phase.next, ctx.needed(phase.next)
    usable = ready_hosts(ctx, following)
    if len(usable) < needed:  # hosts that became ready meanwhile
        following.hosts += [name for name in ctx.usable() if name not in following.hosts]
        usable = ready_hosts(ctx, following)
    if len(usable) < needed or not has_rendezvous_store(ctx, usable):
        if following.waiting_since_ns is None:
            following.waiting_since_ns = ctx.now_ns
        ctx.enter(Waiting(next=following))
        missing = f"{len(usable)} of {needed} hosts" if len(usable) < needed else "no rendezvous store yet"
        log_waiting(ctx, following)
        ctx.log("phase.changed", {"reason": missing}, phase="wait")
        ctx.deadline(patience_s(ctx, following))
        return
    start_attempt(ctx, usable[: ctx.settings.wanted_hosts])


def patience_s(ctx: SupervisorContext, following: NextHosts) -> float:
    """How long to wait before the policy is asked: for hosts that are to come as long as it says, for one that is here
    and not ready as long as for a start; less where it has said that it cannot start."""
    spec = ctx.settings.spec
    name, limit_s = unready_host(ctx, following), spec.recovery.start_timeout_s
    limit_s += spec.setup_timeout_s if spec.setup else 0.0
    if name is None:
        return ctx.policy.max_wait_s
    return min(limit_s, AFTER_FAILURE_S) if ctx.state.hosts[name].start_failed else limit_s


def unready_host(ctx: SupervisorContext, following: NextHosts) -> str | None:
    """Where enough hosts for the next attempt are connected: one of them that could not start yet."""
    here = [name for name in following.hosts if ctx.state.hosts[name].connected]
    if len(here) < ctx.needed(following):
        return None
    ready = ready_hosts(ctx, following)
    return next((name for name in here if name not in ready or ctx.state.hosts[name].store is None), None)


def ready_hosts(ctx: SupervisorContext, following: NextHosts) -> list[str]:
    """Those of the next attempt that could start now."""
    return [name for name in following.hosts if ctx.state.hosts[name].connected and ctx.state.hosts[name].ready]


def log_waiting(ctx: SupervisorContext, following: NextHosts) -> None:
    """Which hosts there are; again whenever there is another one."""
    ctx.log("run.waiting", {"hosts": following.hosts[:], "needed_hosts": following.needed})


def has_rendezvous_store(ctx: SupervisorContext, names: list[str]) -> bool:
    """Whether one of these hosts has a rendezvous store: a killed fork server takes its store with it."""
    return any(ctx.state.hosts[name].store for name in names)


def start_attempt(ctx: SupervisorContext, hosts: list[str]) -> None:
    """Form the largest layout on ``hosts`` and start its ranks."""
    state, per_host = ctx.state, ctx.settings.ranks_per_host
    before, ranks_before = state.layout, state.ranks
    whole = whole_replicas(before, ranks_before, {name: set(host.retained) for name, host in state.hosts.items()})
    if len(hosts) < len(state.active):
        hosts = prefer_hosts_of_whole_replicas(hosts, ranks_before, whole)
    layout = ctx.largest_layout(len(hosts))
    if layout is None:
        reason = f"no layout fits {len(hosts)} hosts of {per_host} ranks"
        flush_and_finish(ctx, "failed", 3, reason)
        return
    choice = ctx.newest_held()
    chosen = tuple(hosts[: layout.world_size // per_host])
    current = Attempt(
        hosts=chosen,
        ranks={rank: hosts[rank // per_host] for rank in range(layout.world_size)},
        layout=layout,
        resumed=(choice.step, choice.attempt) if choice else None,
        holders=snapshot_holders([state.hosts[name].place for name in chosen], state.current.holders),
    )
    # What was applied once is not changed afterwards.
    if not adjust_batch(ctx, current, max(choice.step if choice else -1, state.last_applied_step)):
        return
    retained = rank_mapping(before, ranks_before, layout, current.ranks, whole) if choice is not None else {}
    _enter_attempt(ctx, current)
    _log_start(ctx, choice, retained)
    ctx.await_first_step()
    for name in ctx.usable():
        if name not in state.active:
            ctx.log("phase.changed", {"reason": SPARE}, host=name, phase="spare")
    for name in state.active:
        ctx.send(name, start_message(ctx, name, choice, retained))
        state.hosts[name].retained = {}


def _enter_attempt(ctx: SupervisorContext, current: Attempt) -> None:
    """The state of a new attempt."""
    ctx.state.begin_attempt(ctx.state.attempt + 1, current, ctx.now_ns)
    ctx.enter(Running())


def _log_start(ctx: SupervisorContext, choice: Choice | None, retained: Mapping[int, int]) -> None:
    state, hosts = ctx.state, ctx.state.active
    resume_step = choice.step if choice else -1
    optional: dict[str, Json] = {
        "copies": dict(holders_to_log(hosts, state.current.holders)),
        "tier": "memory" if choice else None,
        "resume_attempt": choice.attempt if choice else None,
        "kept": sorted(retained),
        "batch_schedule": [segment.to_json() for segment in state.batch_schedule],
        "skip_steps": sorted(state.skip_steps),
        "cause": state.open.incident_id if state.open else None,
    }
    ctx.log(
        "attempt.started",
        {
            "world_size": state.layout.world_size,
            "layout": state.layout.sizes,
            "hosts": {name: ctx.state.ranks_on(name) for name in hosts},
            "resume_step": resume_step,
            **{key: value for key, value in optional.items() if value},
        },
        sync=True,
    )
    if state.attempt == 1:
        copied = all(peer_of(ctx, name) or has_replica(ctx, name) for name in hosts)
        ctx.log("run.message", {"text": expected_loss(ctx.settings.spec, num_hosts=len(hosts), copied=copied)})
        if (outside := copies_leave_rack(ctx)) is not None:
            ctx.log("run.message", {"text": f"copies leave the rack: {outside}"})
        if ctx.settings.spec.command is not None:
            ctx.log("run.message", {"text": UNWATCHED})


def adjust_batch(ctx: SupervisorContext, current: Attempt, resume_step: int) -> bool:
    """Ask the policy for batch and rate of the new attempt; False: its answer ends the run."""
    state, training = ctx.state, ctx.settings.spec.training
    if ctx.policy.adjust is None or training is None:
        return True
    attempt = NextAttempt(
        num_hosts=len(current.hosts),
        wanted_hosts=ctx.settings.wanted_hosts,
        world_size=current.layout.world_size,
        data_ranks=current.layout.data_ranks,
        resume_step=resume_step,
        global_batch_size=training.global_batch_size,
    )
    try:
        requested = dict(ctx.policy.adjust(attempt) or {})
        state.batch_schedule = changed(
            state.batch_schedule, resume_step=resume_step, batch=training.global_batch_size, requested=requested
        )
    except Exception as error:  # noqa: BLE001 (the user's code: whatever it raises ends the run with its text)
        flush_and_finish(ctx, "failed", 2, f"{type(error).__name__} in the policy's adjust(): {error}")
        return False
    return True


def enter_stopping(ctx: SupervisorContext, stopping: Stopping) -> None:
    """Ranks leave: they were asked to, or do so by themselves."""
    grace_s = ctx.settings.spec.recovery.grace_s
    end: JsonObject = {"outcome": stopping.outcome, "exit_code": stopping.exit_code, "source": stopping.source}
    more: JsonObject = {"save": stopping.saves, "deadline_s": grace_s, "by_user": stopping.by_user}
    ctx.log("run.stopping", {**end, **more}, sync=True)
    ctx.enter(stopping)
    ctx.deadline(grace_s)


def ask_to_save(ctx: SupervisorContext, stopping: Stopping) -> None:
    """Ask the ranks to save (where it says so) and exit; the run then ends as it says."""
    grace_s = ctx.settings.spec.recovery.grace_s
    enter_stopping(ctx, stopping)
    command = CommandRanks(kind="stop", save=stopping.saves, exit_code=stopping.exit_code, deadline_s=grace_s)
    for name in ctx.state.active:
        ctx.send(name, command)


def check_ranks_exited(ctx: SupervisorContext) -> None:
    """Once all ranks that were asked to exit have: end the run, or start a larger attempt."""
    state, phase, exited = ctx.state, ctx.state.phase, ctx.state.progress.exited
    if set(state.ranks) - set(exited):
        return
    if isinstance(phase, Running):
        drain(ctx, ctx.following())
    elif isinstance(phase, Stopping):
        # A rank's exit code is the same where there was no time for a save: the committed step tells.
        saved = all(value in REQUESTED_EXIT_CODES or value == 0 for value in exited.values())
        saved = saved and (not phase.saves or state.committed_step >= state.last_applied_step)
        result = "saved and left" if saved and phase.saves else "left"
        result += ", but not every rank could save" if not saved else ""
        source = f"{phase.source}: " if phase.source else ""
        end_run = functools.partial(flush_and_finish, by_user=phase.by_user)
        end = finish if saved or not phase.saves else end_run
        end(ctx, phase.outcome, phase.exit_code, f"{source}{result} after step {state.last_applied_step}")
