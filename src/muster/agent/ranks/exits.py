"""How a rank ends: what is learned in which order, and the one report that is made of it.

Nothing waits until the kernel has freed a rank's memory, which takes 20 ms or more of an exit: a code is known as soon
as a signal ends the process, and an attempt is drained as soon as no thread of its ranks runs.
"""

from __future__ import annotations

import re
import signal

from muster.agent.evidence import gathering
from muster.agent.programs import preparation
from muster.agent.ranks import standbys
from muster.agent.values.actions import DropCopies, Kill, ReportSnapshots
from muster.agent.values.events import Killed, ProcessGone, RankExiting, RankThreadsEnded
from muster.agent.values.rank import UNENDED, Rank, RankState
from muster.agent.values.state import HostContext
from muster.protocol.to_supervisor import RankExit, RanksEnded
from muster.protocol.values import LastWords

#: Lines of the GPU's and the network's libraries: torch's watchdog of NCCL, a C++ exception that nothing caught.
_LIBRARY = re.compile(r"CUDA error|NCCL|Xid")


def kill(ctx: HostContext, rank: Rank) -> None:
    """SIGKILL; it does not continue in another attempt."""
    rank.leave_out()
    ctx.do(Kill(rank.pid))


def on_killed(ctx: HostContext, event: Killed) -> None:
    """An exit that began before the signal is reported like any other: it may be the cause."""
    rank = ctx.state.ranks.table.get(event.pid)
    if rank is not None:
        rank.killed = rank.killed or not event.was_exiting


def on_exiting(ctx: HostContext, event: RankExiting) -> None:
    """A signal ends it. Of one that this agent ends nothing is reported; the end of one that is to continue may belong
    to the next attempt, which it may be given a place in until it is gone."""
    rank = ctx.state.ranks.table.get(event.pid)
    if rank is not None and rank.state is RankState.RUNNING and not rank.killed and event.signal is not None:
        rank.state, rank.code = RankState.EXITING, -event.signal
        _report(ctx, rank, event.tail)


def on_threads_ended(ctx: HostContext, event: RankThreadsEnded) -> None:
    """Its attempt may pass it by where all that it leaves is memory of the host, of which there is enough: Muster's
    own trainer on the CPU. A device's memory is given up later; what a user's program holds (ports, locks) is unknown.

    One that left by itself still has an exit code, which its parent alone learns.
    """
    rank, spec = ctx.state.ranks.table.get(event.pid), ctx.state.spec
    if rank is None or not (event.has_room and spec.command is None and spec.resources.on_cpu):
        return
    if rank.state is RankState.EXITING:
        rank.state = RankState.MEMORY_ONLY
    elif rank.state in UNENDED and rank.killed:
        rank.assume_killed()
        rank.state = RankState.MEMORY_ONLY
        _report(ctx, rank)
    report_drained(ctx)


def on_gone(ctx: HostContext, event: ProcessGone) -> None:
    """Its process no longer exists; its exit code comes from the fork server, if that is its parent and connected."""
    _on_unregistered_gone(ctx, event.pid)  # one that was killed as such may have registered since
    rank = ctx.state.ranks.table.get(event.pid)
    if rank is None:
        return
    if rank.state in UNENDED and (rank.killed or not ctx.state.reaps(rank.parent)):
        rank.assume_killed()
        _end(ctx, rank)
    elif rank.state in UNENDED:
        rank.state = RankState.GONE
    else:
        _end(ctx, rank)


def _on_unregistered_gone(ctx: HostContext, pid: int) -> None:
    ranks = ctx.state.ranks
    ranks.silent.discard(pid)
    if pid in ranks.ending_unregistered:
        ranks.ending_unregistered.discard(pid)
        if not ranks.ending_unregistered:
            report_drained(ctx)


def on_exit_code(ctx: HostContext, pid: int, code: int, tail: str) -> None:
    """The fork server reaped it."""
    rank = ctx.state.ranks.table.get(pid)
    if rank is None:
        return
    if rank.state in UNENDED:
        rank.state, rank.code = RankState.REAPED, code
        if not rank.killed:
            rank.words = rank.words or _library_words(code, tail)
    elif rank.state is RankState.GONE:
        rank.code = code
        _end(ctx, rank, tail)


def on_fork_server_lost(ctx: HostContext) -> None:
    """Exit codes that it has not reported will never be known."""
    for rank in [rank for rank in ctx.state.ranks.table.values() if rank.state is RankState.GONE]:
        rank.assume_killed()
        _end(ctx, rank)


def report_drained(ctx: HostContext) -> None:
    """Report once every rank of the ended attempt is gone but for its memory, reported or paused, and GPUs reset.

    A rank that is gone and not reported may be the cause, and reports of an old attempt are ignored once the next one
    has started.
    """
    state, ranks = ctx.state, ctx.state.ranks
    ending = ranks.ending
    if ending is None or ranks.ending_unregistered:
        return
    if any(rank.blocks_drain for rank in ranks.table.values() if rank.attempt <= ending) or preparation.reset_gpus(ctx):
        return
    kept = {
        rank.rank: rank.paused_step
        for rank in ranks.living()
        if rank.attempt <= ending and rank.paused_step is not None
    }
    ctx.do(ReportSnapshots(RanksEnded(attempt=ending, kept=kept, reset=state.reset.result)))
    ranks.ending = state.reset.result = None
    standbys.replenish(ctx)


def _end(ctx: HostContext, rank: Rank, tail: str = "") -> None:
    del ctx.state.ranks.table[rank.pid]
    was_reported = rank.state in (RankState.EXITING, RankState.MEMORY_ONLY)
    rank.state = RankState.REPORTED
    if not was_reported:
        _report(ctx, rank, tail)
    report_drained(ctx)


def _report(ctx: HostContext, rank: Rank, tail: str = "") -> None:
    """Once for each rank, in this order: the log, copies that are not intact, the supervisor, evidence."""
    assert rank.code is not None
    if rank.words is not None and (rank.killed or rank.code_is_guess):  # it ended by itself, before the signal
        rank.code, rank.killed = 1 if rank.words.left is None else rank.words.left, False
    rank.words = rank.words or _library_words(rank.code, tail)
    ctx.log("rank.exited", {"exit_code": rank.code, **_reasons(rank.words)}, rank=rank.rank)
    if rank.words is not None:
        ctx.do(DropCopies(rank.words.rejected))
    if rank.killed:
        return
    ranks = ctx.state.ranks
    place = {"attempt": rank.attempt, "rank": rank.rank, "pid": rank.pid}
    report = RankExit(**place, code=rank.code, step=rank.steps.step, last=rank.words)
    if rank.attempt == ranks.attempt:
        ranks.exits[rank.rank] = report
    ctx.report(report)
    standbys.check_contexts(ctx)
    gathering.after_exit(ctx, report)


def _library_words(code: int, tail: str) -> LastWords | None:
    """Of one that a library aborted: what that wrote to its log."""
    lines = [line.strip() for line in tail.splitlines() if _LIBRARY.search(line)] if code == -signal.SIGABRT else []
    return LastWords(exception="SIGABRT", message="\n".join(lines[-8:])) if lines else None


def _reasons(words: LastWords | None) -> dict[str, str]:
    """As details of its last event; what it did not say is left out."""
    if words is None:
        return {}
    texts = {"exception": words.exception, "reason": words.message[:500], "traceback": words.traceback[-2000:]}
    return {key: text for key, text in texts.items() if text}
