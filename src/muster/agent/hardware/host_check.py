"""A look at the host's hardware by ``muster.probe``: before ranks use it, and whenever the supervisor asks.

The agent says only what was seen: the supervisor judges. The first look begins with the agent and runs during the
imports. A passive one holds up the host's readiness for ``PASSIVE_S`` at most; a full one loads the GPUs, so standbys,
which open contexts there, wait for its end. There is one probe at most: a question that comes meanwhile gets the answer
of the one that runs.
"""

from __future__ import annotations

import math
import socket
from typing import Literal

from muster.agent.values.actions import Program, StartProgram, StopProgram
from muster.agent.values.events import ProgramEnded
from muster.agent.values.state import NEVER, HostContext, HostState
from muster.config.spec import RunSpec
from muster.protocol.to_agent import LookAtHost
from muster.protocol.to_supervisor import HostLooked
from muster.protocol.values import HostLook

NAME = "check"
#: So long a start waits for a passive look: importing torch takes longer.
PASSIVE_S = 2.0
#: A probe that has not ended by then is killed; what it wrote until then counts.
LIMIT_S = {"passive": 10.0, "full": 90.0}
#: Host-hours from which ``auto`` loads the GPUs (docs/how-to/check.md), and the length of a run that does not say it.
WORTH_HOST_HOURS, UNSAID_HOURS = 8.0, 1.0
#: Of a probe's output on the wire: what is cut is incomplete.
MOST_BYTES = 1 << 17
_Part = Literal["passive", "full"]


def is_over(ctx: HostContext) -> bool:
    """A start has nothing to wait for."""
    return ctx.now_s >= ctx.state.hardware.check.ready_by_s


def loads_gpus(state: HostState) -> bool:
    """Nothing else may use the GPUs."""
    return state.hardware.check.ready_by_s == math.inf


def begin(ctx: HostContext) -> None:
    """The host is new: look at it, as far as the run file wants that."""
    state, hardware = ctx.state, ctx.state.hardware
    whole = state.identity.hosts_here == 1 and hardware.is_whole
    part = part_of(state.spec, gpus=bool(hardware.gpus), ports=hardware.has_ports, whole=whole)
    if part is not None:
        hardware.check.ready_by_s = math.inf if part == "full" else ctx.now_s + PASSIVE_S
        _start(ctx, part, 0)


def ask(ctx: HostContext, order: LookAtHost) -> None:
    """Look now, while ranks run: nothing is loaded."""
    if ctx.state.hardware.check.part is not None:
        ctx.state.hardware.check.numbers.append(order.number)
    else:
        _start(ctx, "passive", order.number)


def _start(ctx: HostContext, part: _Part, number: int) -> None:
    check = ctx.state.hardware.check
    check.part, check.begun_s, check.numbers = part, ctx.now_s, [number]
    argv = ("muster.probe.main", "--part", part)
    program = Program(NAME, argv, reads="all", ends_with_output=True, most_bytes=MOST_BYTES)
    ctx.do(StartProgram(program))


def due_s(state: HostState) -> float:
    check = state.hardware.check
    limit_s = NEVER if check.part is None else check.begun_s + LIMIT_S[check.part]
    return min(limit_s, NEVER if check.ready_by_s < 0 else check.ready_by_s)


def tick(ctx: HostContext) -> bool:
    """Whether a start need not wait any longer, since now."""
    check = ctx.state.hardware.check
    if ctx.state.is_supervised:
        for looked in check.unsent:
            ctx.report(looked)
        check.unsent = []
    if check.part is not None and ctx.now_s >= check.begun_s + LIMIT_S[check.part]:
        ctx.do(StopProgram(NAME, leave=True))
        return False
    return check.ready_by_s > 0 and is_over(ctx) and _free(ctx.state)


def on_ended(ctx: HostContext, event: ProgramEnded) -> bool:
    """Report what was seen, with the probe's own code or not: a driver's call that never returns keeps the process.

    Whether a start need not wait any longer, since now.
    """
    check = ctx.state.hardware.check
    if check.part is None:
        return False
    look = _look(ctx.state, check.part, event.output, ctx.now_s - check.begun_s)
    # The agent's own look that could not be started is none.
    numbers = [number for number in check.numbers if number or event.failure is None]
    check.unsent += [HostLooked(number=number, look=look, at_ns=ctx.mono_ns) for number in numbers]
    check.part = None
    return _free(ctx.state)


def _free(state: HostState) -> bool:
    was_waited_for, state.hardware.check.ready_by_s = state.hardware.check.ready_by_s > 0, -NEVER
    return was_waited_for


def _look(state: HostState, part: _Part, output: bytes, seconds: float) -> HostLook:
    environ, own = state.identity.environ, state.hardware.own
    return HostLook(
        part=part,
        output=output.decode(errors="replace"),
        node=environ.get("MUSTER_NODE") or environ.get("SLURMD_NODENAME") or socket.gethostname(),
        own=tuple(sorted(own)) if own is not None else None,
        seconds=seconds,
    )


def part_of(spec: RunSpec, *, gpus: bool, ports: bool, whole: bool) -> _Part | None:
    """What is looked at before ranks use a host; None: nothing.

    ``gpus``, ``ports``: there are some (of RDMA). ``whole``: the GPUs are this host's alone; else they are not loaded.

    The rule of ``auto`` weighs 30 s of all hosts against what a bad one costs: docs/how-to/check.md has the sum.
    """
    mode, resources = spec.check.mode, spec.resources
    if mode == "off":
        return None
    if mode == "auto":
        wanted = resources.device == "cuda" or resources.accelerator or resources.machine
        if resources.device == "cpu" or not (gpus or ports or wanted):
            return None
        hours = resources.hosts * (spec.limits.max_hours or UNSAID_HOURS)
        mode = "full" if gpus and hours >= WORTH_HOST_HOURS else "passive"
    return "full" if mode == "full" and whole else "passive"
