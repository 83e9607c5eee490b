"""The takeover of a run: what the log says of it, and what its hosts answer."""

from __future__ import annotations

from muster.core.incidents import HOST_LOST, RANK_EXIT
from muster.supervise.recovery.attempts import ask_to_save, drain, log_end, start_attempt, start_when_drained
from muster.supervise.recovery.context import SupervisorContext
from muster.supervise.recovery.final_flush import begin_flush, finish, flush_and_finish
from muster.supervise.recovery.incidents import report_incident, request_resize
from muster.supervise.recovery.inputs import SECOND_NS, StopRequest
from muster.supervise.recovery.phases import (
    Adopting,
    Draining,
    Flushing,
    Phase,
    Running,
    Starting,
    Stopping,
    Waiting,
)
from muster.supervise.recovery.state import Host

#: While no host answers, what is awaited is said so often.
SAY_EVERY_S = 60.0
NAMED = 4


def try_adopt(ctx: SupervisorContext, adopting: Adopting) -> None:
    """Continue where the log says that the run is, once every host that belongs to it has answered."""
    state, found = ctx.state, adopting.found
    awaited = _awaited(ctx, adopting)
    members = [state.hosts[name] for name in awaited if name in state.hosts and state.hosts[name].connected]
    if adopting.until_ns is not None:  # hosts come after all: the others have as long as they would have had
        ctx.deadline(ctx.settings.adopt_timeout_s)
    if len(members) < len(awaited) or (isinstance(found, Flushing) and not awaited):
        return
    if isinstance(found, Flushing) and any(host.attempt or host.snapshots for host in members):
        begin_flush(ctx, found.end, by_user=found.by_user)
        return
    alive = {rank for host in members for rank in (*host.alive, *host.exited)}
    if members and not alive and all(host.attempt == 0 for host in members):
        # New agents: every process of the run was lost (a reboot, a kill of everything), and it is started again.
        reason = f"no rank of attempt {state.attempt} survived: resuming from the newest checkpoint"
        ctx.log("attempt.abandoned", {"reason": reason})
        state.abandon()
        ctx.enter(Starting())
        ctx.deadline(ctx.settings.spec.recovery.start_timeout_s)
        adopting.asked_before = None  # it was stopped, and everything ended: now it is started again
        ready = ctx.usable()
        if len(ready) >= ctx.settings.wanted_hosts and adopting.asked is None:
            start_attempt(ctx, ready[: ctx.settings.wanted_hosts])
    elif isinstance(found, Draining | Waiting):
        drain(ctx, found.next)
    elif set(state.ranks) <= alive and all(host.attempt == state.attempt for host in members):
        _continue(ctx, found)
    elif all(host.ready for host in members):
        adopt_failed(ctx, adopting)


def _awaited(ctx: SupervisorContext, adopting: Adopting) -> tuple[str, ...]:
    found = adopting.found
    return tuple(found.next.hosts) if isinstance(found, Draining | Waiting) else ctx.state.active


def _continue(ctx: SupervisorContext, found: Phase) -> None:
    """All its ranks are there, or their exits will be reported."""
    ctx.log("attempt.adopted", {})
    if isinstance(found, Stopping):  # the ranks may not have heard of it, or may hang in their save
        ask_to_save(ctx, found)
        return
    running = Running()
    ctx.enter(running)
    if not ctx.state.progress.stepped:
        ctx.await_first_step()
    if isinstance(found, Running) and found.resize is not None:
        request_resize(ctx, running, found.resize.hosts)


def ask_while_adopting(ctx: SupervisorContext, adopting: Adopting, asked: StopRequest) -> None:
    """A stop from before the hosts have answered: they must hear of it too, and are awaited no longer than they would
    have for their save."""
    adopting.asked = asked
    if adopting.until_ns is not None:
        latest_ns = ctx.now_ns + int(ctx.settings.spec.recovery.grace_s * SECOND_NS)
        adopting.until_ns = min(adopting.until_ns, latest_ns)
        adopting.deadline_ns = min(adopting.deadline_ns or latest_ns, latest_ns)


def _await_first_host(ctx: SupervisorContext, adopting: Adopting, awaited: list[str]) -> None:
    """No host is connected. They may be starting again, or others in their place: back ends replace hosts, and a
    supervisor whose own machine restarts is away for minutes. Wait as for the hosts of a run that starts."""
    recovery, asked = ctx.settings.spec.recovery, adopting.asked
    limit, limit_s = ("start_timeout_s", recovery.start_timeout_s) if asked is None else ("grace_s", recovery.grace_s)
    if adopting.until_ns is None:
        adopting.until_ns = ctx.now_ns + int(limit_s * SECOND_NS)
    left_s = (adopting.until_ns - ctx.now_ns) / SECOND_NS
    if left_s > 0:
        text = f"no host has answered this supervisor yet: waiting for {_some(awaited)}, at most {left_s:.0f} s more"
        ctx.log("run.message", {"text": f"{text} (recovery.{limit})"})
        ctx.deadline(min(SAY_EVERY_S, left_s))
    elif asked is not None:
        outcome = "preempted" if asked.exit_code == 75 else "stopped"
        finish(ctx, outcome, asked.exit_code, f"{asked.source}: no host answered; the newest checkpoint remains")
    else:
        reason = f"no host answered a new supervisor within {limit_s:g} s (recovery.start_timeout_s)"
        finish(ctx, "failed", 6, f"{reason}; start the run again to resume from its checkpoint")


def _some(names: list[str]) -> str:
    more = len(names) - NAMED
    return (", ".join(names[:NAMED]) or "any host") + (f" and {more} more" if more > 0 else "")


def adopt_failed(ctx: SupervisorContext, adopting: Adopting) -> None:
    """Not every host or rank is there: an incident like any other."""
    state, found = ctx.state, adopting.found
    if isinstance(found, Flushing):
        begin_flush(ctx, found.end, by_user=found.by_user)
        return
    awaited = _awaited(ctx, adopting)
    for name in awaited:
        state.hosts.setdefault(name, Host(name=name))
    lost = [name for name in awaited if not state.hosts[name].connected]
    if not any(host.connected for host in state.hosts.values()) and not isinstance(found, Waiting):
        _await_first_host(ctx, adopting, lost)
        return
    if isinstance(found, Stopping):
        end = flush_and_finish if found.saves else finish
        end(ctx, found.outcome, found.exit_code, f"{found.source}: ranks were lost while they left")
        return
    replaced = isinstance(found, Draining | Waiting)
    ctx.enter(Draining(next=found.next) if isinstance(found, Draining | Waiting) else Running())
    if lost:
        report_incident(ctx, HOST_LOST, host=lost[0], evidence=f"{lost[0]} did not answer a new supervisor")
    elif not replaced:
        report_incident(ctx, RANK_EXIT, evidence="ranks were missing when a new supervisor took over")
    if isinstance(state.phase, Draining):
        following = state.phase.next
        following.hosts = [name for name in following.hosts if name not in lost]
        if replaced:
            drain(ctx, following)
        else:
            if len(lost) > 1:
                log_end(ctx, following)  # the decision left out the first one alone
            start_when_drained(ctx)
