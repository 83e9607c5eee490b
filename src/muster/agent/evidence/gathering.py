"""Captures, before the ranks of an attempt are ended, what each of them does: within the order's limit, never waiting.

From outside: the kernel's words about the process, and its stacks by ``py-spy`` where that is installed, which works on
a process that is stopped or keeps Python's lock. From inside: a thread of the rank tells its stacks and PyTorch's
flight recorder. What has not come in time is named as missing.

When a rank exits the same is done with less, and nothing waits for it: the others' stacks as they come, what the kernel
says of the host. They are about to be ended, and late answers are ignored.
"""

from __future__ import annotations

from muster.agent.hardware.kernel_lines import findings_since
from muster.agent.values import actions as do
from muster.agent.values import events as ev
from muster.agent.values.rank import Gathering, Rank
from muster.agent.values.state import NEVER, HostContext, HostState
from muster.health.hang.evidence import RankEvidence
from muster.health.hang.process_state import GONE, CgroupState, ProcessState
from muster.protocol.rank_agent import CaptureRank, RankCaptured
from muster.protocol.ranks import REQUESTED_EXIT_CODES
from muster.protocol.to_agent import GatherEvidence, TraceRanks
from muster.protocol.to_supervisor import RankExit

SPY = "py-spy-"
#: How long ranks have to answer when another one has exited; nothing waits for it.
EXIT_LIMIT_S = 0.2
#: How far to look back for errors of a GPU where no rank is left that knows when the last step was.
UNKNOWN_STEP_S = 60.0


def begin(ctx: HostContext, order: GatherEvidence) -> None:
    """Ask everything; ``tick`` answers. Another order meanwhile for the same attempt is the same one."""
    state = ctx.state
    until_s = ctx.now_s + order.limit_s
    if state.gathering is not None and state.gathering.exited is not None:
        _end(ctx, state.gathering)
    if state.gathering is not None:  # a hang's report is not delayed by an explicit request
        state.gathering.until_s = min(state.gathering.until_s, until_s)
        return
    ranks = _ranks_of(state, order.attempt)
    gathering = state.gathering = Gathering(order.attempt, order.limit_s, until_s, ranks)
    for rank in ranks:
        if rank.peer is not None:
            ctx.do(do.SendTo(rank.peer, CaptureRank()))
    if state.hardware.gpus and any(rank.rank == 0 for rank in ranks):  # it knows of all hosts
        gathering.asks_ras = True
        ctx.do(do.AskRas(order.limit_s))
    for rank in ranks:
        argv = ("py-spy", "dump", "--nonblocking", "--json", "--pid", str(rank.pid))
        ctx.do(do.StartProgram(do.Program(f"{SPY}{rank.pid}", argv, is_tool=True, reads="all", most_bytes=4 << 20)))


def trace(ctx: HostContext, order: TraceRanks) -> None:
    """The ranks report traces themselves."""
    for rank in _ranks_of(ctx.state, order.attempt):
        if rank.rank in order.ranks and rank.peer is not None:
            ctx.do(do.SendTo(rank.peer, order.trace))


def after_exit(ctx: HostContext, report: RankExit) -> None:
    """After an exit with an error look around."""
    if report.code not in (0, *REQUESTED_EXIT_CODES):
        ctx.do(do.ReadOomKills(report))


def on_oom_kills(ctx: HostContext, found: ev.OomKills) -> None:
    state, report = ctx.state, found.exit
    if state.gathering is not None:  # a hang's evidence is on its way, or another rank's
        return
    ranks = _ranks_of(state, report.attempt)
    since_s = min((rank.watch.progress_s for rank in ranks), default=ctx.now_s - UNKNOWN_STEP_S)
    seen = RankEvidence(
        rank=report.rank, host=state.host, step=report.step, process=ProcessState(state=GONE),
        cgroup=CgroupState(oom_kills=found.new), findings=findings_since(state, report.rank, since_s),
    )  # fmt: skip
    state.gathering = Gathering(report.attempt, EXIT_LIMIT_S, ctx.now_s + EXIT_LIMIT_S, ranks, exited=seen)
    for rank in ranks:
        if rank.peer is not None:
            ctx.do(do.SendTo(rank.peer, CaptureRank(recorders=False)))


def on_captured(ctx: HostContext, pid: int, captured: RankCaptured) -> None:
    gathering = ctx.state.gathering
    if gathering is not None:
        gathering.captured[pid] = captured


def on_spy_started(state: HostState, program: str) -> None:
    if state.gathering is not None:
        state.gathering.has_spy = True
        state.gathering.spies[_pid_of(program)] = None


def on_spy_ended(state: HostState, event: ev.ProgramEnded) -> None:
    """Of one that fails the rank's own words are left."""
    gathering, pid = state.gathering, _pid_of(event.program)
    if gathering is None or pid not in gathering.spies:
        return
    if event.code == 0:
        gathering.spies[pid] = event.output
    else:
        del gathering.spies[pid]


def on_ras(ctx: HostContext, event: ev.RasAnswered) -> None:
    gathering = ctx.state.gathering
    if gathering is not None and gathering.asks_ras:
        gathering.ras = (event.report, event.problem)


def due_s(state: HostState) -> float:
    return NEVER if state.gathering is None else state.gathering.until_s


def tick(ctx: HostContext) -> None:
    """Answer once all have answered, or the time is over."""
    gathering = ctx.state.gathering
    if gathering is None:
        return
    answered = all(rank.pid in gathering.captured or rank.code is not None for rank in gathering.ranks)
    looked = None not in gathering.spies.values() and (gathering.ras is not None or not gathering.asks_ras)
    if (answered and looked) or ctx.now_s >= gathering.until_s:
        _end(ctx, gathering)


def _end(ctx: HostContext, gathering: Gathering) -> None:
    state = ctx.state
    state.gathering = None
    stands_still = gathering.ranks if gathering.exited is None else ()
    findings = {rank.rank: findings_since(state, rank.rank, rank.watch.progress_s) for rank in stands_still}
    ctx.do(do.ReportEvidence(gathering, findings))
    for pid, output in gathering.spies.items():
        if output is None:
            ctx.do(do.StopProgram(f"{SPY}{pid}", leave=True))


def _ranks_of(state: HostState, attempt: int) -> list[Rank]:
    return [rank for rank in state.ranks.living() if rank.attempt == attempt]


def _pid_of(program: str) -> int:
    return int(program.removeprefix(SPY))
