"""Ranks that exit: done, asked to, or failed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.core.incidents import RANK_EXIT
from muster.protocol.ranks import RESIZE_EXIT_CODE
from muster.supervise.recovery import classify
from muster.supervise.recovery.attempts import check_ranks_exited
from muster.supervise.recovery.context import REQUESTED_EXIT_CODES, SupervisorContext
from muster.supervise.recovery.final_flush import finish_training
from muster.supervise.recovery.incidents import continue_resize, report_incident
from muster.supervise.recovery.state import Phase


def rank_exit(ctx: SupervisorContext, host: str, message: Mapping[str, Any]) -> None:
    """A rank of ``host`` has exited. One of another attempt changes nothing; each is counted once."""
    state = ctx.state
    if message["attempt"] == state.attempt and state.phase is Phase.DRAINING:
        _cause(ctx, host, message)
    if message["attempt"] != state.attempt or state.phase not in (Phase.RUN, Phase.STOPPING):
        return
    rank, code = int(message["rank"]), int(message["code"])
    if rank in state.exited:
        return
    state.exited[rank] = code
    if code == RESIZE_EXIT_CODE and state.phase is Phase.RUN and not state.resizing and state.adopted == state.attempt:
        continue_resize(ctx)
    if state.phase is Phase.STOPPING or (state.resizing and code == RESIZE_EXIT_CODE):
        check_ranks_exited(ctx)
    elif code == 0:
        if len(state.exited) == len(state.ranks) and not any(state.exited.values()):
            finish_training(ctx)
    elif code in REQUESTED_EXIT_CODES:
        state.phase = Phase.STOPPING
        state.stop = ("stopped", 130) if code == 130 else ("preempted", 75)
        ctx.deadline(ctx.settings.spec.recovery.grace_s)
        check_ranks_exited(ctx)
    else:
        _failed(ctx, host, rank, message)


def _failed(ctx: SupervisorContext, host: str, rank: int, message: Mapping[str, Any]) -> None:
    state = ctx.state
    kind, evidence, detail = classify.classify_rank_exit(host, message)
    if detail.get("unreadable") and state.resumed is not None and not state.stepped:
        state.unreadable_snapshots.add(state.resumed)
        detail["unreadable_snapshot"] = list(state.resumed)
    step = detail.get("step", message.get("step"))
    report_incident(ctx, kind, host=host, rank=rank, step=step, evidence=evidence, detail=detail)


def _cause(ctx: SupervisorContext, host: str, message: Mapping[str, Any]) -> None:
    """A rank's own error, reported after its peer's broken connection: it is the cause, and an incident of its own."""
    state = ctx.state
    code = int(message["code"])
    if state.open is None or not state.open.secondary or code <= 0 or code in REQUESTED_EXIT_CODES:
        return
    kind, _, detail = classify.classify_rank_exit(host, message)
    if kind is RANK_EXIT and not detail.get("unreadable"):
        return
    state.open.secondary = False
    _failed(ctx, host, int(message["rank"]), message)
