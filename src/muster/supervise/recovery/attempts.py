"""From one attempt to the next: end the ranks, learn which snapshots hosts hold, form a layout, start it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.core.batch_schedule import changed
from muster.core.layout import Layout
from muster.policy.cluster_state import NextAttempt
from muster.protocol.held_snapshots import Choice, has_replica_on_other_host
from muster.supervise.recovery.context import REQUESTED_EXIT_CODES, SupervisorContext
from muster.supervise.recovery.final_flush import finish, flush_and_finish
from muster.supervise.recovery.preemption_cost import expected_loss
from muster.supervise.recovery.retained_ranks import (
    PAUSE_S,
    pause_s,
    prefer_hosts_of_whole_replicas,
    rank_mapping,
    retainable_ranks,
    whole_replicas,
)
from muster.supervise.recovery.start_message import peer_of, start_message
from muster.supervise.recovery.state import SECOND_NS, Phase

#: A GPU's reset takes some seconds; NVIDIA states no limit.
RESET_TIMEOUT_S = 60.0
UNWATCHED = (
    "start-up hangs are not detected until the script first calls muster.run; start_timeout_s applies from then on"
)
SPARE = "kept as a spare"


def drain(ctx: SupervisorContext) -> None:
    """End every rank of the attempt and learn which snapshots the hosts hold."""
    state = ctx.state
    members = {name for name in [*state.active, *state.target] if state.hosts[name].connected}
    if state.attempt:
        ctx.log("attempt.ended", {"reason": state.open.incident_id if state.open else "restart"})
    state.phase = Phase.DRAINING
    state.resizing = False
    state.draining = set(members)
    keep = retainable_ranks(ctx)
    why = state.open.incident_id if state.open else ""
    for name in sorted(members):
        host, answer_s = state.hosts[name], ctx.settings.drain_timeout_s
        host.retained = {}
        message: dict[str, Any] = {"t": "end", "attempt": state.attempt, "why": why}
        local_ranks = [rank for rank in sorted(keep) if state.ranks[rank] == name]
        if local_ranks:
            message |= {"keep": local_ranks, "pause_s": pause_s(ctx)}
            answer_s += message["pause_s"] - PAUSE_S
        if host.resetting:
            message["reset"] = list(host.resettable)
            host.resettable, host.resetting = (), False
            answer_s = max(answer_s, RESET_TIMEOUT_S)
        host.end_message, host.answer_by_ns = message, ctx.now_ns + int(answer_s * SECOND_NS)
        ctx.send(name, message)
    await_answers(ctx)
    start_when_drained(ctx)


def await_answers(ctx: SupervisorContext) -> None:
    """Set the deadline to the first host's time limit."""
    state = ctx.state
    if state.phase is Phase.DRAINING and state.draining:
        state.deadline_ns = min(state.hosts[name].answer_by_ns for name in state.draining)


def resend_end(ctx: SupervisorContext, name: str) -> None:
    """Its agent restarted before it had answered, and does not know the message."""
    if ctx.state.phase is Phase.DRAINING and name in ctx.state.draining:
        ctx.send(name, ctx.state.hosts[name].end_message)


def start_when_drained(ctx: SupervisorContext) -> None:
    """Once every host has reported: start the attempt, or wait for more hosts."""
    state = ctx.state
    if state.phase is not Phase.DRAINING or state.draining:
        return
    if state.open is not None:
        state.open.stages_ns["collected"] = ctx.now_ns - state.open.detected_ns
    usable = [name for name in state.target if state.hosts[name].connected and state.hosts[name].ready]
    if len(usable) < ctx.needed() or not has_rendezvous_store(ctx, usable):
        state.phase = Phase.WAIT
        state.waiting_since_ns = state.waiting_since_ns if state.waiting_since_ns is not None else ctx.now_ns
        missing = f"{len(usable)} of {ctx.needed()} hosts" if len(usable) < ctx.needed() else "no rendezvous store yet"
        ctx.log("phase.changed", {"reason": missing}, phase="wait")
        ctx.deadline(ctx.policy.max_wait_s)
        return
    state.target = usable
    start_attempt(ctx)


def has_rendezvous_store(ctx: SupervisorContext, names: list[str]) -> bool:
    """Whether one of these hosts has a rendezvous store: a killed fork server takes its store with it."""
    return any(ctx.state.hosts[name].store for name in names)


def start_attempt(ctx: SupervisorContext) -> None:
    """Form the largest layout on ``target`` and start its ranks."""
    state = ctx.state
    before, ranks_before = state.layout, state.ranks
    whole = whole_replicas(before, ranks_before, {name: set(host.retained) for name, host in state.hosts.items()})
    hosts = list(state.target)
    if len(hosts) < len(state.active):
        hosts = prefer_hosts_of_whole_replicas(hosts, ranks_before, whole)
    layout = ctx.largest_layout(len(hosts))
    if layout is None:
        reason = f"no layout fits {len(hosts)} hosts of {ctx.settings.ranks_per_host} ranks"
        flush_and_finish(ctx, "failed", 3, reason)
        return
    _enter_attempt(ctx, hosts[: layout.world_size // ctx.settings.ranks_per_host], layout)
    choice = ctx.newest_held(without=state.unreadable_snapshots)
    state.resumed = (choice.step, choice.attempt) if choice else None
    retained = rank_mapping(before, ranks_before, layout, state.ranks, whole) if choice is not None else {}
    resume_step = choice.step if choice else -1
    # What was applied once is not changed afterwards.
    if not adjust_batch(ctx, max(resume_step, state.last_applied_step)):
        return
    _log_start(ctx, choice, retained)
    ctx.await_first_step()
    for name in ctx.usable():
        if name not in state.active:
            ctx.log("phase.changed", {"reason": SPARE}, host=name, phase="spare")
    for name in state.active:
        ctx.send(name, start_message(ctx, name, choice, retained))
        state.hosts[name].retained = {}


def _enter_attempt(ctx: SupervisorContext, hosts: list[str], layout: Layout) -> None:
    """The state of a new attempt on ``hosts``."""
    state, per_host = ctx.state, ctx.settings.ranks_per_host
    state.active, state.target, state.layout = hosts, [], layout
    state.ranks = {rank: hosts[rank // per_host] for rank in range(layout.world_size)}
    state.attempt += 1
    if state.open is not None:  # several hosts lost at once cost one attempt, not one each
        state.restarts_without_progress += 1
        state.failures += 1
    state.watched_from_ns = ctx.now_ns if state.watched_from_ns is None else state.watched_from_ns
    state.phase, state.stepped, state.exited, state.blamed = Phase.RUN, False, {}, set()
    state.waiting_since_ns, state.needed_hosts = None, 0


def _log_start(ctx: SupervisorContext, choice: Choice | None, retained: Mapping[int, int]) -> None:
    state, hosts = ctx.state, ctx.state.active
    resume_step = choice.step if choice else -1
    if state.open is not None:
        state.open.stages_ns["resume_step"] = max(resume_step, 0)
        state.open.stages_ns["started"] = ctx.now_ns - state.open.detected_ns
    optional = {
        "tier": "memory" if choice else None,
        "resume_attempt": choice.attempt if choice else None,
        "kept": sorted(retained),
        "batch_schedule": state.batch_schedule,
        "skip_steps": sorted(state.skip_steps),
        "cause": state.open.incident_id if state.open else None,
    }
    ctx.log(
        "attempt.started",
        {
            "world_size": state.layout.world_size,
            "layout": state.layout.sizes,
            "hosts": {name: ctx.ranks_on(name) for name in hosts},
            "resume_step": resume_step,
            **{key: value for key, value in optional.items() if value},
        },
        sync=True,
    )
    if state.attempt == 1:
        copied = all(peer_of(ctx, name) or has_replica_on_other_host(state.layout, state.ranks, name) for name in hosts)
        ctx.log("run.message", {"text": expected_loss(ctx.settings.spec, num_hosts=len(hosts), copied=copied)})
        if ctx.settings.spec.command is not None:
            ctx.log("run.message", {"text": UNWATCHED})


def adjust_batch(ctx: SupervisorContext, resume_step: int) -> bool:
    """Ask the policy for batch and rate of the new attempt; False: its answer ends the run."""
    state, training = ctx.state, ctx.settings.spec.training
    if ctx.policy.adjust is None or training is None:
        return True
    attempt = NextAttempt(
        num_hosts=len(state.active),
        wanted_hosts=ctx.settings.wanted_hosts,
        world_size=state.layout.world_size,
        data_ranks=state.layout.data_ranks,
        resume_step=resume_step,
        global_batch_size=training.global_batch_size,
    )
    try:
        requested = dict(ctx.policy.adjust(attempt) or {})
        state.batch_schedule = changed(
            state.batch_schedule, resume_step=resume_step, batch=training.global_batch_size, wanted=requested
        )
    except Exception as error:  # noqa: BLE001 (the user's code: whatever it raises ends the run with its text)
        flush_and_finish(ctx, "failed", 2, f"{type(error).__name__} in the policy's adjust(): {error}")
        return False
    return True


def ask_to_save(ctx: SupervisorContext, outcome: str, code: int, *, source: str, save: bool = True) -> None:
    """Ask the ranks to save and exit; the run then ends with ``code``."""
    state, grace_s = ctx.state, ctx.settings.spec.recovery.grace_s
    state.phase, state.stop, state.stop_source, state.stop_saves = Phase.STOPPING, (outcome, code), source, save
    ctx.deadline(grace_s)
    command = {"kind": "stop", "save": save, "exit_code": code, "deadline_s": grace_s}
    for name in state.active:
        ctx.send(name, {"t": "order", "order": command})


def check_ranks_exited(ctx: SupervisorContext) -> None:
    """Once all ranks that were asked to exit have: end the run, or start a larger attempt."""
    state = ctx.state
    if set(state.ranks) - set(state.exited):
        return
    if state.resizing and state.phase is Phase.RUN:
        drain(ctx)
        return
    outcome, code = state.stop or ("stopped", 130)
    # A rank's exit code is the same where there was no time for a save: the committed step tells.
    saved = all(value in REQUESTED_EXIT_CODES or value == 0 for value in state.exited.values())
    saved = saved and (not state.stop_saves or state.committed_step >= state.last_applied_step)
    result = "saved and left" if saved and state.stop_saves else "left"
    result += ", but not every rank could save" if not saved else ""
    source = f"{state.stop_source}: " if state.stop_source else ""
    end = finish if saved or not state.stop_saves else flush_and_finish
    end(ctx, outcome, code, f"{source}{result} after step {state.last_applied_step}")
