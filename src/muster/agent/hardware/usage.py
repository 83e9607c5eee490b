"""What the steps of a host's ranks use: processors, memory, network, GPUs; the event ``host.usage``.

It costs the ranks nothing: the agent reads a few files of ``/proc`` where a step ends, every 10 s at most, and of many
hosts more rarely, so that the supervisor hears ten of them a second. GPUs are asked by one ``nvidia-smi`` that goes on
while ranks live: the driver's library in the agent itself would hang with a broken GPU.
"""

from __future__ import annotations

import contextlib

from muster.agent.values.actions import Program, ReadCounters, StartProgram, StopProgram
from muster.agent.values.events import Counters, CountersRead
from muster.agent.values.state import HostContext, Usage
from muster.core.event_details.hosts import HostUsage
from muster.core.typed_json import Json
from muster.health.hardware.kernel_log import pci_address

TOOL = "nvidia-smi"
EVERY_S = 10.0
#: What each host of a run adds to that.
EVERY_S_PER_HOST = 0.1
#: A pass over eight GPUs takes the tool tens of milliseconds of a processor.
ASK_GPUS = ("--query-gpu=pci.bus_id,utilization.gpu,memory.used", "--format=csv,noheader,nounits", "--loop=5")


def tick(ctx: HostContext) -> None:
    """Nothing waits for it: it reports at the ends of steps, and is silent while there are none."""
    usage = ctx.state.hardware.usage
    if ctx.now_s < usage.next_s:
        return
    ranks = ctx.state.ranks.living()
    attempt = max((rank.attempt for rank in ranks), default=0)
    ranks = [rank for rank in ranks if rank.attempt == attempt]
    now = (attempt, min((rank.steps.step for rank in ranks), default=-1))
    before, usage.seen = usage.seen, now
    if not ranks:
        release(ctx)
    if not ranks or now[0] != before[0] or now[1] < before[1]:
        usage.since = None
    elif now[1] > before[1] >= 0:  # a step has ended
        usage.next_s = ctx.now_s + EVERY_S + EVERY_S_PER_HOST * ctx.state.spec.resources.hosts
        ctx.do(ReadCounters(now[1] - 1, attempt, tuple(rank.pid for rank in ranks)))


def release(ctx: HostContext) -> None:
    """Leave the GPUs: a reset needs that nothing asks them anything."""
    usage = ctx.state.hardware.usage
    if usage.has_tool:
        usage.has_tool = False
        ctx.do(StopProgram(TOOL, leave=True))


def on_counters(ctx: HostContext, read: CountersRead) -> None:
    usage = ctx.state.hardware.usage
    before, usage.since = usage.since, (read.step, read.counters)
    if before is None:
        _ask_gpus(ctx, read.attempt)
        return
    memory: dict[str, Json] = {}
    if read.memory is not None:
        memory = {"memory_bytes": read.memory[0], "memory_total_bytes": sum(read.memory)}
    detail = {**used(*before, read.step, read.counters), **memory, **_of_gpus(ctx)}
    ctx.tell(HostUsage.kind, detail, attempt=read.attempt, step=read.step)


def _ask_gpus(ctx: HostContext, attempt: int) -> None:
    usage = ctx.state.hardware.usage
    if ctx.state.hardware.gpus and not usage.has_tool and usage.asked != attempt:
        usage.asked, usage.has_tool = attempt, True
        program = Program(TOOL, (TOOL, *ASK_GPUS), is_tool=True, reads="lines", ends_with_output=True)
        ctx.do(StartProgram(program))


def on_tool_ended(usage: Usage) -> None:
    usage.has_tool = False
    usage.busy = {}


def on_tool_line(usage: Usage, line: str) -> None:
    """``00000000:19:00.0, 97, 40321``; a GPU that does not say a number is left out."""
    with contextlib.suppress(ValueError):
        address, busy, memory_mib = (part.strip() for part in line.split(","))
        share, held = int(busy) / 100, int(memory_mib) << 20
        usage.busy.setdefault(pci_address(address), []).append(share)
        usage.memory_bytes[pci_address(address)] = held


def _of_gpus(ctx: HostContext) -> dict[str, Json]:
    """In the order of their addresses, of those that the run may use; nothing where one of them does not answer."""
    usage, own = ctx.state.hardware.usage, ctx.state.hardware.own
    if not usage.busy:
        return {}
    shares = {address: sum(all_) / len(all_) for address, all_ in sorted(usage.busy.items())}
    usage.busy = {}
    known = [address for address in shares if own is None or address in own]
    return {
        "gpu_busy": [round(shares[address], 3) for address in known],
        "gpu_memory_bytes": [usage.memory_bytes[address] for address in known],
    }


def used(first: int, before: Counters, step: int, now: Counters) -> dict[str, Json]:
    """Of the steps after ``first`` up to ``step``, as the event has it; what is not known is left out."""
    ranks_s = (
        seconds - before.ranks_cpu_s[pid] for pid, seconds in now.ranks_cpu_s.items() if pid in before.ranks_cpu_s
    )
    result: dict[str, Json] = {
        "steps": step - first,
        "interval_ns": now.at_ns - before.at_ns,
        "cpu_ns": int(sum(max(0.0, one) for one in ranks_s) * 1e9),
    }
    ticks = _grown(before.all_ticks, now.all_ticks)
    busy = _grown(before.busy_ticks, now.busy_ticks)
    if ticks and busy is not None:
        result["busy"] = round(min(1.0, busy / ticks), 4)
    for name in ("received_bytes", "sent_bytes"):
        grown = _grown(getattr(before, name), getattr(now, name))
        if grown is not None:  # an interface that went away took its count with it
            result[name] = grown
    return result


def _grown(before: int | None, now: int | None) -> int | None:
    return now - before if before is not None and now is not None and now >= before else None
