"""The fork server: started or adopted, ordered to fork ranks, restarted when it dies."""

from __future__ import annotations

import math
from collections.abc import Collection

from muster.agent.values import actions as do
from muster.agent.values import events as ev
from muster.agent.values.state import NEVER, HostContext, HostState
from muster.config.spec import Recovery
from muster.core import processes
from muster.protocol.fork_server import ForkServerHello, NewStore
from muster.protocol.to_supervisor import StartFailed, StoreLost
from muster.protocol.values import Address

NAME = "forkserver"
MODULE = "muster.rank.fork_server"
#: One that died this often before it connected will die again, for a while: it is reported, and tried again later.
DEATHS = 3
#: First after this time, then after twice as long each time: an import of torch slows the ranks that train.
AGAIN_S, MOST_S = 15.0, 300.0


def beat_every_s(recovery: Recovery) -> float:
    """How often a rank reports its micro-batches. A new step is reported at once, and no stop is found by silence.

    Each beat wakes the agent while the ranks compute, so only the step timeout says how many there have to be.
    """
    return min(1.0, (recovery.step_timeout_s or math.inf) / 4)


def find(ctx: HostContext) -> None:
    """What ranks import is there: adopt a dead agent's, or start one. The first time alone."""
    if not ctx.state.fork_server.started:
        ctx.state.fork_server.started = True
        ctx.do(do.FindForkServer())


def on_found(ctx: HostContext, found: ev.ForkServerFound) -> None:
    """One that lives connects by itself."""
    server = ctx.state.fork_server
    server.follows, server.pid, server.awaited = found.follows, found.pid, found.pid is not None
    if found.pid is None:
        start(ctx)


def start(ctx: HostContext) -> None:
    state, identity = ctx.state, ctx.state.identity
    state.fork_server.again_s = NEVER
    argv = (
        MODULE, "--run-dir", str(identity.run_dir), "--bind", identity.bind, "--agent-socket",
        state.fork_server.socket, "--beat-every-s", str(beat_every_s(state.spec.recovery)),
    )  # fmt: skip
    ctx.do(do.StartProgram(do.Program(NAME, argv, env="ranks", spec=state.spec)))


def on_started(ctx: HostContext, pid: int) -> None:
    ctx.state.fork_server.pid = pid
    ctx.do(do.RecordForkServer(pid))


def on_ended(ctx: HostContext, event: ev.ProgramEnded) -> None:
    """Start another one. Without a code it was a dead agent's."""
    server, code = ctx.state.fork_server, event.code
    if event.failure is not None:
        server.again_s = ctx.now_s + AGAIN_S
        ctx.keep_failure("fork server", event.failure)
        return
    if ctx.state.leaving.reason is not None:
        return
    server.deaths, server.awaited = server.deaths + 1, False
    if server.deaths >= DEATHS and code:
        server.again_s = ctx.now_s + min(AGAIN_S * 2 ** (server.deaths - DEATHS), MOST_S)
        tail, limit = event.output.decode(errors="replace") or "no output", processes.memory_limit()
        tail += f" (it may have {limit >> 20} MiB of addresses, RLIMIT_AS: ulimit -v)" if limit else ""
        reason = f"the fork server on {ctx.state.host} died with code {code}: {tail}"
        ctx.keep_failure("fork server", StartFailed(reason=reason))
    else:
        start(ctx)


def tick(ctx: HostContext) -> None:
    """What kept one from starting may be over: room in memory, a library that is there again."""
    if ctx.now_s >= ctx.state.fork_server.again_s:
        start(ctx)


def on_memory(ctx: HostContext, checked: ev.MemoryChecked) -> None:
    """The host's folder in memory was made again. Under another name a fork server that knows it takes over."""
    server = ctx.state.fork_server
    if server.pid is not None:
        ctx.do(do.RecordForkServer(server.pid))
        if server.socket != checked.socket:
            ctx.do(do.StopProgram(NAME))
    server.socket = checked.socket


def on_hello(ctx: HostContext, peer: ev.PeerId, hello: ForkServerHello) -> None:
    """It has imported everything, or has found this agent after the death of another one."""
    server = ctx.state.fork_server
    server.peer, server.pid, server.store = peer, hello.pid, hello.store
    server.deaths, server.again_s, server.awaited, server.may_miss_start = 0, NEVER, False, server.follows
    ctx.keep_failure("fork server", None)
    server.spawning.clear()
    server.registered = set(hello.children)
    if hello.unforkable:
        reason = "ranks are new processes, each in the seconds that its imports take, instead of forks"
        ctx.note(f"{ctx.state.host}: {reason}: {hello.unforkable}")


def on_stores_given(ctx: HostContext, stores: Collection[Address]) -> None:
    """An attempt's ranks were given these stores. If this host's is one of them, the next attempt needs another one."""
    if ctx.state.fork_server.store in stores:
        _renew_store(ctx)


def on_missed_start(ctx: HostContext) -> None:
    """An attempt ends that this host has not begun. Ranks elsewhere have its store if the order to start was lost."""
    server = ctx.state.fork_server
    if server.may_miss_start and server.store is not None:
        _renew_store(ctx)


def _renew_store(ctx: HostContext) -> None:
    """Withdraw the store and order another one. The supervisor gives a store to the next attempt until it hears that
    it is lost: this is called before ``RanksEnded`` is reported, so that no attempt starts in between.
    """
    server = ctx.state.fork_server
    assert server.peer is not None
    server.store, server.may_miss_start = None, False
    ctx.report(StoreLost())
    ctx.do(do.SendTo(server.peer, NewStore()))


def on_lost(ctx: HostContext) -> None:
    """Its connection is closed: the next start of ranks needs another store."""
    server = ctx.state.fork_server
    server.peer = server.store = None
    server.spawning.clear()
    ctx.report(StoreLost())


def due_s(state: HostState) -> float:
    return state.fork_server.again_s
