"""Ranks that exit: done, asked to, or failed."""

from __future__ import annotations

from muster.core.incidents import RANK_EXIT, IncidentTraits
from muster.core.typed_json import JsonObject
from muster.protocol.ranks import REQUESTED_EXIT_CODES, RESIZE_EXIT_CODE
from muster.protocol.to_supervisor import RankExit
from muster.supervise.recovery import classify
from muster.supervise.recovery.attempts import check_ranks_exited, enter_stopping
from muster.supervise.recovery.context import SupervisorContext
from muster.supervise.recovery.final_flush import finish_training
from muster.supervise.recovery.incidents import report_incident
from muster.supervise.recovery.phases import Draining, Running, Stopping

#: Of ranks that end together so many are told: where a whole host's are killed, the log need not name each.
MOST_NAMED = 8


def rank_exit(ctx: SupervisorContext, host: str, message: RankExit) -> None:
    """A rank of ``host`` has exited. One of another attempt changes nothing; each is counted once."""
    state, phase = ctx.state, ctx.state.phase
    if message.attempt != state.attempt:
        return
    if isinstance(phase, Draining):
        _while_answered(ctx, host, message)
    if not isinstance(phase, Running | Stopping):
        return
    rank, code, exited = message.rank, message.code, state.progress.exited
    if rank in exited:
        return
    exited[rank] = code
    if isinstance(phase, Stopping):
        check_ranks_exited(ctx)
        return
    if code == RESIZE_EXIT_CODE and phase.resize is not None:
        check_ranks_exited(ctx)
    elif code == 0:
        if ctx.settings.spec.command is None:  # a loop of the user's own may leave in mid-step
            state.advance(message.step)  # its event may be lost
        if len(exited) == len(state.ranks) and not any(exited.values()):
            finish_training(ctx)
    elif code in REQUESTED_EXIT_CODES:
        outcome, code = ("stopped", 130) if code == 130 else ("preempted", 75)
        enter_stopping(ctx, Stopping(outcome=outcome, exit_code=code))
        check_ranks_exited(ctx)
    else:
        _failed(ctx, host, message)


def _failed(ctx: SupervisorContext, host: str, message: RankExit, *, part_of: str | None = None) -> None:
    kind, evidence, detail = _classified(ctx, host, message)
    if part_of is not None:
        detail = {**detail, "part_of": part_of}
    if message.last is not None and message.last.rejected:
        ctx.reject(message.last.rejected, evidence)  # the host that holds them may have said so already
        detail = {**detail, "snapshot_rejected": True}
    named = detail.get("step")  # the rank may be at the next step by the time it checks the numbers
    step = named if isinstance(named, int) else message.step
    _await_evidence(ctx, message)
    report_incident(ctx, kind, host=host, rank=message.rank, step=step, evidence=evidence, detail=detail)


def _await_evidence(ctx: SupervisorContext, message: RankExit) -> None:
    """What its host has seen beside this exit belongs to the incident that is logged next."""
    state = ctx.state
    state.exits = {of: told for of, told in state.exits.items() if of[0] >= message.attempt - 1}
    state.exits[message.attempt, message.rank] = f"i{state.next_incident}"


def _while_answered(ctx: SupervisorContext, host: str, message: RankExit) -> None:
    """A rank's own error or its death, told while its attempt is being ended: a part of what is answered already.

    Where that is a consequence (the peer's broken connection was told first) this is its cause, on which the policy is
    asked. Else it is told alone: of two causes one is answered, and if the other is left it comes again.
    Agents report no rank that they have killed themselves.
    """
    state, last = ctx.state, message.last
    if last is not None:
        ctx.reject(last.rejected, f"rank {message.rank} on {host}: {last.message}")
    if state.open is None or message.code in (0, *REQUESTED_EXIT_CODES):
        return
    kind, evidence, detail = _classified(ctx, host, message)
    killed, named = "signal" in detail, state.progress.blamed
    if kind is RANK_EXIT and not killed:
        return  # a consequence as well
    part_of = state.open.incident_id
    if state.find_cause():
        _failed(ctx, host, message, part_of=part_of)
    elif (killed or kind.kind != state.open.kind) and message.rank not in named and len(named) < MOST_NAMED:
        _await_evidence(ctx, message)
        identity: JsonObject = {"incident_id": f"i{state.next_incident}", "incident": kind.kind, "evidence": evidence}
        state.next_incident += 1
        named.add(message.rank)
        told = {**identity, **detail, "part_of": part_of}
        ctx.log("incident.detected", told, host=host, rank=message.rank, step=message.step)


def _classified(ctx: SupervisorContext, host: str, message: RankExit) -> tuple[IncidentTraits, str, JsonObject]:
    return classify.classify_rank_exit(host, message, classify.own_numbers(ctx.settings.spec.check))
