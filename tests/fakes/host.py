"""An agent behind a virtual edge: what it decides is kept, and answered as a host would answer it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from muster.agent.decide import decide, due_s
from muster.agent.edge.edge import Edge
from muster.agent.ranks.processes import RankProcesses
from muster.agent.values import actions as do
from muster.agent.values import events as ev
from muster.agent.values.host_identity import HostIdentity
from muster.agent.values.rank import Rank, Steps, Watch
from muster.agent.values.state import HostState
from muster.config.spec import RunSpec
from muster.protocol.fork_server import ForkServerHello
from muster.protocol.rank_agent import StandbyHello
from muster.protocol.to_supervisor import StartFailed

FORK_SERVER, SUPERVISOR = 1000, 2000
"""Peers; the fork server's pid is 7."""


def spec_of(**changes: Any) -> RunSpec:
    given = {"name": "case", "command": ["train.py"], "resources": {"device": "cpu", "ranks_per_host": 1}}
    given["recovery"] = {"warm_standby": False}
    return RunSpec.model_validate({**given, **changes})


class VirtualHost:
    """``sent``: what the supervisor hears. ``to``: (peer, message) to processes. ``logged``: (kind, detail, rank).

    Answers are a host's where all is well: ``exiting`` are pids that had begun to go before a signal, ``gone`` those
    that do not exist, ``stopped`` those that the kernel holds, ``refused`` programs that cannot be started.
    """

    def __init__(self, folder: Path | None = None, *, spec: RunSpec | None = None, environ: Any = None) -> None:
        folder = folder or Path("run")
        memory: Any = SimpleNamespace(folder=folder, path=lambda name: folder / name)
        identity = HostIdentity(
            run_dir=folder, run_id="run", host="host-0", bind="127.0.0.1", memory=memory, environ=environ or {}
        )
        self.state = HostState(identity=identity, spec=spec or spec_of(), writer="host-0")
        self.now_s, self.pid = 1000.0, 5000
        self.done: list[do.Action] = []
        self.order: list[str] = []
        self.sent: list[Any] = []
        self.to: list[tuple[int, Any]] = []
        self.logged: list[tuple[str, Any, int | None]] = []
        self.killed: list[int] = []
        self.exiting: set[int] = set()
        self.gone: set[int] = set()
        self.stopped: set[int] = set()
        self.refused: dict[str, StartFailed] = {}
        self.held: tuple[Any, ...] = ()
        self.full: str | None = None
        """Why no state can be prepared."""
        self.lease: ev.LeaseRead = ev.LeaseRead(None, False, False)
        self.memory = ev.MemoryChecked("socket")
        self.answers: dict[type, Any] = {}
        """Of an action's class: a function that gives its answers instead."""

    # ------------------------------------------------------------ the loop

    def give(self, *events: ev.Event) -> VirtualHost:
        for event in events:
            for action in decide(self.state, event, now_s=self.now_s, wall_ns=int(self.now_s * 1e9) + 10**18):
                self.done.append(action)
                self.give(*self._answers(action))
        return self

    def tick(self, after_s: float = 0.0) -> VirtualHost:
        self.now_s += after_s
        return self.give(ev.Tick())

    def due_s(self) -> float:
        return due_s(self.state)

    def _answers(self, action: do.Action) -> list[ev.Event]:  # noqa: C901 (a table)
        if type(action) in self.answers:
            return list(self.answers[type(action)](action))
        state = self.state
        match action:
            case do.SendTo() if action.peer == state.link.peer:
                self.sent.append(action.message)
            case do.SendTo():
                self.to.append((action.peer, action.message))
            case do.ReportSnapshots() if state.is_supervised:
                self.sent.append(replace(action.message, snapshots=self.held))
            case do.Log():
                self.logged.append((action.kind, action.detail, action.rank))
            case do.LogRankEvent():
                self.logged.append((action.event.kind, action.event.detail, action.event.rank))
                return [ev.EventLogged(action.event)]
            case do.Kill():
                self.killed.append(action.pid)
                return [ev.Killed(action.pid, action.pid in self.exiting | self.gone)]
            case do.WatchProcess():
                if action.pid in self.gone:
                    return [ev.ProcessGone(action.pid)]
                return [ev.RankWatched(action.pid, 7, action.pid in self.stopped)] if action.log else []
            case do.Look():
                return [ev.Looked(action.pid, action.pid in self.stopped)]
            case do.StartProgram():
                if action.program.name in self.refused:
                    failure = self.refused[action.program.name]
                    return [ev.ProgramEnded(action.program.name, None, failure=failure)]
                self.pid += 1
                return [ev.ProgramStarted(action.program.name, self.pid)]
            case do.StopProgram() if action.leave:
                return [ev.ProgramEnded(action.program, None)]
            case do.PrepareState():
                attempt = action.order.attempt
                if self.full is not None:
                    return [ev.StateNotPrepared(attempt, self.full)]
                return [ev.StatePrepared(attempt, action.order.contexts)]
            case do.ListSnapshots():
                return [ev.SnapshotsListed(self.held, action.refusal)]
            case do.ReadLease():
                return [self.lease]
            case do.CheckMemory():
                return [self.memory]
            case do.CheckSetup():
                return [ev.SetupFound("", False)]
            case do.ReadOomKills():
                return [ev.OomKills(action.exit, 0)]
            case do.FindForkServer():
                return [ev.ForkServerFound(None, False)]
            case do.Disconnect() if state.link.peer is not None:
                return [ev.PeerLost(state.link.peer)]
        return []

    # ------------------------------------------------------------ set-ups

    def supervised(self) -> VirtualHost:
        """A supervisor is connected, and has been greeted."""
        self.give(ev.SupervisorConnected(SUPERVISOR))
        self.sent.clear()
        return self

    def with_fork_server(self, *children: int) -> VirtualHost:
        """Whose pid is the parent of every rank."""
        hello = ForkServerHello(pid=7, store=("127.0.0.1", 1), children=children)
        return self.give(ev.Greeted(FORK_SERVER, hello))

    def rank(self, pid: int = 99, number: int = 0, attempt: int = 1, *, peer: int | None = 1, **more: Any) -> Rank:
        """One that runs. ``more``: its fields, ``step``, ``first``, ``stepped``, and those of its watch."""
        steps = Steps(**{name: more.pop(name) for name in ("step", "first", "stepped") if name in more})
        times = {name: more.pop(name, self.now_s) for name in ("progress_s", "seen_s")}
        rank = Rank(pid, number, attempt, Watch(**times), peer=peer, parent=7, steps=steps, **more)
        self.state.ranks.table[pid] = rank
        self.state.ranks.attempt = max(self.state.ranks.attempt, attempt)
        return rank

    def standby(self, pid: int, local_rank: int = 0, *, bound: bool = False) -> int:
        """One that has connected; its peer."""
        self.give(ev.Greeted(pid, StandbyHello(pid=pid, local_rank=local_rank, bound=bound)))
        return pid

    def says(self, rank: Rank, message: Any) -> VirtualHost:
        assert rank.peer is not None
        return self.give(ev.RankMessage(rank.peer, message))

    # ------------------------------------------------------------ what happened

    @property
    def notes(self) -> list[str]:
        return [detail["text"] for kind, detail, _ in self.logged if kind == "run.message"]

    @property
    def exit_reason(self) -> str | None:
        return self.state.leaving.reason

    def of(self, kind: type) -> list[Any]:
        """Messages to the supervisor."""
        return [message for message in self.sent if isinstance(message, kind)]

    def did(self, kind: type) -> list[Any]:
        """Actions."""
        return [action for action in self.done if isinstance(action, kind)]

    def started(self, name: str) -> list[do.Program]:
        return [action.program for action in self.did(do.StartProgram) if action.program.name == name]

    def orders(self, program: str) -> list[Any]:
        return [action.message for action in self.did(do.WriteProgram) if action.program == program]


class RealProcesses:
    """The ranks' processes of a virtual host are real: their ends reach it through a pool of descriptors."""

    def __init__(self, host: VirtualHost, pool: Any, memory: Any) -> None:
        self.host, self.pool, self.part = host, pool, RankProcesses(pool, memory)
        host.answers |= {
            do.Kill: lambda action: (host.killed.append(action.pid), *self.part.kill(action.pid))[1:],
            do.WatchProcess: lambda action: self.part.watch(action.pid, action.log),
        }

    def turn(self, timeout_s: float = 0.1) -> None:
        for event in self.pool.poll(timeout_s):
            token: Any = event.token  # type: ignore[union-attr]
            for each in self.part.woken(token) if hasattr(token, "woken") else self.part.gone(token):
                self.host.give(each)

    def until(self, happened: Any) -> None:
        for _ in range(300):
            if happened():
                return
            self.turn()
        raise AssertionError("it did not happen")


def answer_programs(host: VirtualHost, edge: Edge) -> None:
    """Programs of a virtual host are real, and their words and ends reach it by ``turn``."""
    for action in (do.StartProgram, do.StopProgram, do.WriteProgram, do.FinishTrackers):
        host.answers[action] = edge.carry_out


def turn(host: VirtualHost, edge: Edge, timeout_s: float = 0.1) -> None:
    for event in edge.poll(timeout_s):
        host.give(event)
