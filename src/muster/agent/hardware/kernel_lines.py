"""Errors of the GPU driver: read from the kernel log, judged, reported to the supervisor with what they ask for.

``/dev/kmsg`` gives one record a read, from the moment it is opened at its end, so what was before the run is never
judged. Where it may not be opened ``dmesg --follow-new`` is tried (it may have a permission of its own). Where neither
works that is noted once, and in a pod of GKE the node's condition is read instead: it holds the numbers of Xids,
neither their GPUs nor how often they came, and GKE puts 48 alone there unless more are configured. A number is an error
when it appears; those that stood there before this agent are not judged.
"""

from __future__ import annotations

from datetime import datetime

from muster.agent.values.actions import OpenKernelLog, Program, StartProgram, StopProgram
from muster.agent.values.events import HardwareListed, KernelLine, KernelLogLost, ProgramEnded
from muster.agent.values.state import HostContext, HostState
from muster.core.typed_json import Unreadable
from muster.health.hardware.driver_errors import Burst, finding_of
from muster.health.hardware.error_table import OwnNumbers
from muster.health.hardware.kernel_log import KernelFault
from muster.health.hardware.node_condition import CONDITION, fault_of, numbers_in
from muster.health.verdicts import Finding, Verdict
from muster.protocol.codec import reader_of
from muster.protocol.pipes import NODE_CONDITIONS, NodeCondition

DMESG, NODE = "dmesg", "node"
#: What comes from now on, from the kernel alone (programs can write to the log, too).
FOLLOW = ("dmesg", "--follow-new", "--kernel", "--nopager", "--color=never")
WATCHER = "muster.backends.gke.pod.node_watcher"
_read_condition = reader_of(NODE_CONDITIONS)


def begin(ctx: HostContext, listed: HardwareListed) -> None:
    """Nothing is followed on a host without the driver."""
    hardware = ctx.state.hardware
    hardware.gpus, hardware.own = listed.gpus, listed.own
    hardware.has_ports, hardware.sees_all_pids = listed.has_ports, listed.sees_all_pids
    hardware.faults.gpus, hardware.faults.own = listed.gpus, listed.own
    on_spec(ctx.state)
    if listed.gpus:
        ctx.do(OpenKernelLog())


def on_spec(state: HostState) -> None:
    check = state.spec.check
    state.hardware.faults.numbers = OwnNumbers(ignore=frozenset(check.xid_ignore), fatal=frozenset(check.xid_fatal))


def end(ctx: HostContext) -> None:
    ctx.do(StopProgram(DMESG, leave=True), StopProgram(NODE, leave=True))


# ---------------------------------------------------------------- where lines come from


def on_line(ctx: HostContext, line: str) -> None:
    fault = ctx.state.hardware.faults.reader.read(line)
    if fault is not None:
        _on_fault(ctx, fault)


def on_kernel_line(ctx: HostContext, event: KernelLine) -> None:
    on_line(ctx, event.text)


def on_lost(ctx: HostContext, event: KernelLogLost) -> None:
    """``/dev/kmsg`` cannot be opened, or read any longer."""
    if event.once_open:
        _lost(ctx, event.reason)
        return
    ctx.state.hardware.no_kmsg = event.reason
    ctx.do(StartProgram(Program(DMESG, FOLLOW, is_tool=True, reads="lines", ends_with_output=True)))


def on_dmesg_lost(ctx: HostContext, event: ProgramEnded) -> None:
    reason = " ended" if event.failure is None else f": {event.failure.reason}"
    _lost(ctx, f"{ctx.state.hardware.no_kmsg}; {FOLLOW[0]}{reason}")


def _lost(ctx: HostContext, reason: str) -> None:
    state, host = ctx.state, ctx.state.host
    node, lost = state.identity.environ.get("MUSTER_NODE"), f"{host}: kernel log not readable ({reason})"
    if not node:
        ctx.note(f"{lost}, so an Xid of a GPU is not seen")
        return
    ctx.note(f"{lost}: of its GPUs' Xids only what GKE says of node {node} is known")
    state.hardware.node_since_ns = ctx.wall_ns
    ctx.do(StartProgram(Program(NODE, (WATCHER, node), reads="lines", writes=True, ends_with_output=True)))


def on_node_ended(ctx: HostContext, event: ProgramEnded) -> None:
    reason = " ended, so an Xid of a GPU is not seen" if event.failure is None else f": {event.failure.reason}"
    ctx.note(f"{ctx.state.host}: {WATCHER}{reason}")


def on_node_line(ctx: HostContext, line: bytes) -> None:
    try:
        found = _read_condition(line)
    except Unreadable as error:
        ctx.note(f"{ctx.state.host}: a line of {WATCHER}: {error}")
        return
    _on_condition(ctx, found)


def _on_condition(ctx: HostContext, found: NodeCondition) -> None:
    host, node, known = ctx.state.host, ctx.state.identity.environ.get("MUSTER_NODE"), ctx.state.hardware.node_xids
    if found.problem:
        reason = f"node {node} is not read, so an Xid of a GPU is not seen: {found.problem}"
        ctx.note(f"{host}: {reason} (its pod's account needs get on nodes)")
        return
    if found.status != "True":  # another boot: what comes now is new
        known.clear()
        return
    text = f"node {node}: {CONDITION} {found.reason} since {found.since}"
    numbers = numbers_in(found.reason)
    if not numbers:
        ctx.note(f"{host}: {text} cannot be read")
    is_first, new = not known, [number for number in numbers if number not in known]
    known.update(numbers)
    if new and is_first and _seconds(found.since, ctx) < ctx.state.hardware.node_since_ns / 1e9:
        ctx.note(f"{host}: {text}: from before this agent, not judged")
        return
    for number in new:
        _on_fault(ctx, fault_of(number, text, ctx.wall_ns / 1e9))


def _seconds(since: str, ctx: HostContext) -> float:
    """RFC 3339 in Unix seconds; what cannot be read counts as now."""
    try:
        return datetime.fromisoformat(since.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return ctx.wall_ns / 1e9


# ---------------------------------------------------------------- what they mean


def findings_since(state: HostState, rank: int, since_s: float) -> tuple[Finding, ...]:
    return state.hardware.faults.since(rank, since_s, ranks_here=state.ranks_per_host, host=state.host)


def _on_fault(ctx: HostContext, fault: KernelFault) -> None:
    news = ctx.state.hardware.faults.add(fault, ctx.now_s)
    if isinstance(news, str):
        ctx.note(f"{ctx.state.host}: {news}")
    elif news is not None:
        _report(ctx, news)


def _report(ctx: HostContext, burst: Burst) -> None:
    faults = ctx.state.hardware.faults
    evidence = finding_of(burst, gpus=faults.gpus).message
    rank = _rank_of(ctx.state, burst.decisive.fault)
    if rank is not None:
        evidence = f"rank {rank}: {evidence}"
    if burst.verdict.faulty:
        ctx.report(faults.fault_of(burst, evidence, ctx.mono_ns, _sound_step(ctx.state)))
    else:
        whose = "the program's own" if burst.verdict is Verdict.APP else "no action"
        ctx.note(f"{ctx.state.host}: {evidence} ({whose})")


def _sound_step(state: HostState) -> tuple[int, int] | None:
    """(step, attempt). A rank reports that it is at a step once it has taken the one before, snapshot included."""
    ranks = [rank for rank in state.ranks.living() if rank.steps.step >= 0]
    attempt = max((rank.attempt for rank in ranks), default=0)
    steps = [rank.steps.step - 1 for rank in ranks if rank.attempt == attempt]
    return (max(0, min(steps)), attempt) if steps else None


def _rank_of(state: HostState, fault: KernelFault) -> int | None:
    """The rank that the line names. In a container the numbers of its processes are not those of the log."""
    if fault.pid is None or not state.hardware.sees_all_pids:
        return None
    return next((rank.rank for rank in state.ranks.living() if rank.pid == fault.pid), None)
