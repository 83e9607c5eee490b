"""The ranks of one host: started from standbys, watched, ended, kept, each report made once."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Collection
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from muster.agent import gpu_reset
from muster.agent.ranks.hang_detector import hanging
from muster.agent.ranks.orphaned_processes import Strays
from muster.agent.ranks.rank_process import Standby, Worker, open_pidfd, parent_of, standby_for
from muster.agent.ranks.retained_ranks import Keep
from muster.checkpoint_format.snapshot_ring import list_snapshots
from muster.transport.connections import Connection

if TYPE_CHECKING:
    from muster.agent.host_agent import Agent


#: Progress outside of steps is passed on this often at most.
PROGRESS_EVERY_S = 1.0


class Crew:
    """Processes that are, or will be, ranks of ``attempt``."""

    def __init__(self, *, agent: Agent) -> None:
        self.agent = agent
        self.standbys: dict[int, Standby] = {}
        self.workers: dict[int, Worker] = {}
        """By pid."""
        self.queue: list[dict[str, Any]] = []
        """Contexts that wait for a standby."""
        self.attempt = 0
        self.step = 0
        """Highest step that a rank here reported."""
        self.exits: dict[int, dict[str, Any]] = {}
        """Rank -> its report, of the current attempt."""
        self.ending: int | None = None
        """Attempt whose ranks are being ended."""
        self.ended = 0
        """The newest attempt whose ranks were to be ended."""
        self.strays = Strays(agent=agent, on_ended=self._collected)
        self.keep = Keep()
        self.progress_told_s = 0.0
        self.resetting: list[int] = []
        """GPUs to be reset once the ranks are gone."""
        self.reset_under_way = False
        self.reset_result: dict[str, Any] | None = None

    # ------------------------------------------------------------ starting

    def start(self, message: dict[str, Any]) -> None:
        """Begin an attempt: its ranks here, fresh or kept, with the shards they start from."""
        attempt = int(message["attempt"])
        if attempt <= self.attempt:
            return  # told twice, or by a supervisor that does not know of a newer one
        kept = self.keep.chosen(self.living(), message["contexts"])
        self.kill(attempt - 1, but=kept)
        self.strays.end()
        self.attempt, self.ending = attempt, None
        self.exits.clear()
        self.agent.log.open(attempt)
        sources = self.agent.programs.fetch(message)
        moves: list[tuple[Worker, dict[str, Any]]] = []
        for context in message["contexts"]:
            if self.agent.spec.checkpoint.snapshot_every_steps:
                context["snapshot_dir"] = str(self.agent.memory)
            if context.get("restore") is not None:
                context["restore"]["shards"] = sources
            worker = next((worker for worker in kept if worker.rank == context["kept_rank"]), None)
            if worker is None:
                context["kept_rank"] = None
                self.queue.append(context)
            else:
                moves.append((worker, context))
        for worker, context in moves:  # only now: a rank's new number may be another's old one
            self._move(worker, context)
        self.fill()
        if self.agent.forkserver is not None:
            self.agent.hub.send(self.agent.forkserver, {"t": "store"})  # the next attempt meets in a store of its own

    def _move(self, worker: Worker, context: dict[str, Any]) -> None:
        """A rank that stood still goes on in the new attempt."""
        worker.begin(int(context["rank"]), int(context["attempt"]), now_s=time.monotonic())
        assert worker.peer is not None
        self.agent.hub.send(worker.peer, {"t": "place", "context": context})
        self.agent.log.write("rank.started", {"pid": worker.pid, "kept": True}, rank=worker.rank)

    def fill(self) -> None:
        """Hand waiting ranks to standbys, once the data is there; fork what is missing."""
        if not self.agent.programs.prepared:
            return
        for context in list(self.queue):
            standby = standby_for(int(context["local_rank"]), self.standbys.values())
            if standby is None:
                continue
            self.queue.remove(context)
            del self.standbys[standby.pid]
            log = self.agent.run_dir / "logs" / f"rank-{context['rank']}.a{context['attempt']}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            self.agent.hub.send(standby.peer, {"t": "run", "context": context, "log": str(log)})
            self.employ(standby.pid, context["rank"], context["attempt"], standby.peer, was_warm=True)
        if self.queue and self.agent.forkserver is not None:
            self.agent.programs.spawn(int(context["local_rank"]) for context in self.queue)

    def employ(self, pid: int, rank: int, attempt: int, peer: Connection | None, *, was_warm: bool) -> None:
        """From now on ``pid`` is a rank."""
        fd = open_pidfd(pid)
        if fd is None:
            return
        now = time.monotonic()
        worker = Worker(
            pid=pid, rank=rank, attempt=attempt, peer=peer, pidfd=fd, parent=parent_of(pid), progress_s=now, seen_s=now
        )
        self.workers[pid] = worker
        if peer is not None:
            peer.who = worker
        self.agent.hub.watch(fd, lambda: self._died(worker))
        self.agent.log.write("rank.started", {"pid": pid, "standby": was_warm}, rank=rank)

    # ------------------------------------------------------------ ending

    def order(self, order: dict[str, Any]) -> None:
        """Hand an order to every rank."""
        for worker in self.living():
            if worker.peer is not None:
                self.agent.hub.send(worker.peer, {"t": "order", "order": order})

    def end(self, attempt: int, *, keep: set[int], pause_s: float, reset: list[int]) -> None:
        """End the ranks up to ``attempt``, then reset GPUs; those in ``keep`` have ``pause_s`` to stand still."""
        self.resetting = reset
        if reset and self.agent.programs.contexts:  # no GPU is reset while any process uses it
            self.strays.listed(self.standbys)
            self.standbys.clear()
        self.ending = max(attempt, self.ending or 0)
        self.ended = max(attempt, self.ended)
        self.queue = [context for context in self.queue if context["attempt"] > attempt]
        kept = self.keep.begin(self.living(), attempt, keep, now_s=time.monotonic(), pause_s=pause_s)
        self.kill(attempt, but=kept)
        self.strays.end()
        for worker in kept:
            if worker.peer is not None:
                self.agent.hub.send(worker.peer, {"t": "pause"})
        self._collected()

    def kill(self, attempt: int, *, but: Collection[Worker] = ()) -> None:
        """SIGKILL for every rank up to ``attempt``; their ends are seen like any other's."""
        for worker in self.living():
            if worker.attempt <= attempt and worker not in but:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)

    def _died(self, worker: Worker) -> None:
        """The pidfd fired: the process is gone; its exit code comes from the fork server, its parent."""
        self.agent.hub.unwatch(worker.pidfd)
        os.close(worker.pidfd)
        worker.pidfd = -1
        if self.agent.forkserver is None or worker.parent != self.agent.programs.forkserver_pid:
            self._unknown_end(worker)
        self._settle(worker)

    def _unknown_end(self, worker: Worker) -> None:
        """Its parent died before it, so nobody can know its exit code."""
        if worker.exit_code is None:
            worker.exit_code, worker.orphaned = -9, True

    def exited(self, pid: int, code: int) -> None:
        """The fork server reaped ``pid``."""
        self.standbys.pop(pid, None)
        self.strays.spoke(pid)
        worker = self.workers.get(pid)
        if worker is not None:
            worker.exit_code = code
            self._settle(worker)

    def _settle(self, worker: Worker) -> None:
        """Gone, and the code known: say so once."""
        if worker.pidfd >= 0 or worker.exit_code is None or worker.pid not in self.workers:
            return
        del self.workers[worker.pid]
        if worker.peer is not None:
            self.agent.hub.drain(worker.peer)  # last words may still lie in the socket
        last = dict(worker.last)
        if last and worker.orphaned:  # whoever says how it ends was not killed
            worker.exit_code = int(last.get("left", 1))
        self.agent.log.write(
            "rank.exited",
            {
                "exit_code": worker.exit_code,
                **({"exception": str(last["exception"])} if last.get("exception") else {}),
                **({"reason": str(last["message"])[:500]} if last.get("message") else {}),
                **({"traceback": str(last["traceback"])[-2000:]} if last.get("traceback") else {}),
            },
            rank=worker.rank,
        )
        if self.ending is None or worker.attempt > self.ending:
            report = {
                "t": "rank_exit",
                "attempt": worker.attempt,
                "rank": worker.rank,
                "pid": worker.pid,
                "code": worker.exit_code,
                "step": worker.step,
                "last": last,
            }
            self.exits[worker.rank] = report
            self.agent.tell(report)
        self._collected()

    def _collected(self) -> None:
        ended = [worker for worker in self.living() if self.ending is not None and worker.attempt <= self.ending]
        if self.ending is None or self.strays.ending or any(worker.paused is None for worker in ended):
            return
        if self.resetting:
            gpus, self.resetting = self.resetting, []
            self.reset_under_way = True
            gpu_reset.start(self.agent.hub, gpus, functools.partial(self._was_reset, gpus))
        if self.reset_under_way:
            return
        held = [asdict(version) for version in list_snapshots(self.agent.memory)]
        kept = {str(worker.rank): worker.paused for worker in ended}
        found = {"t": "collected", "attempt": self.ending, "snapshots": held, **({"kept": kept} if kept else {})}
        self.agent.tell({**found, "reset": self.reset_result} if self.reset_result else found)
        self.reset_result = None
        self.ending = None
        self.agent.programs.refill()

    def _was_reset(self, gpus: list[int], ok: bool, said: str) -> None:
        self.reset_under_way, self.reset_result = False, {"ok": ok, "evidence": said}
        self.agent.log.write("host.reset", {"gpus": gpus, "ok": ok, "evidence": said})
        self._collected()

    def living(self) -> list[Worker]:
        """Ranks whose processes exist."""
        return [worker for worker in self.workers.values() if worker.exit_code is None and worker.pidfd >= 0]

    # ------------------------------------------------------------ hearing and watching

    def hear(self, worker: Worker, message: dict[str, Any]) -> None:
        """Take one message of a rank."""
        now = time.monotonic()
        worker.seen_s = now
        kind = message.get("t")
        if kind == "beat":
            self._progress(worker, int(message["step"]), int(message["micro"]))
        elif kind == "progress" and message["attempt"] == worker.attempt:
            worker.progress_s = now
            if now - self.progress_told_s >= PROGRESS_EVERY_S:
                self.progress_told_s = now
                self.agent.tell({"t": "progress", "attempt": worker.attempt})
        elif kind == "last":
            worker.last = message["last"]
        elif kind == "paused" and worker.kept:
            worker.paused = int(message["step"])
            self._collected()
        elif kind == "event":
            event = message["event"]
            worker.progress_s = now
            if event["kind"] == "step":
                self.step = max(self.step, int(event["step"]))
            self.agent.log.write_rank(event)
            self.agent.tell({"t": "event", "event": event})

    def _progress(self, worker: Worker, step: int, micro: int) -> None:
        """A rank's beat: a new micro-batch is progress, a new step means that a snapshot lies ready."""
        if (step, micro) == (worker.step, worker.micro):
            return
        worker.progress_s = time.monotonic()
        if step != worker.step:
            if worker.first_step is None:
                worker.first_step = step
                self.agent.programs.mover.copy(step - 1)  # what the world starts from
            elif step > worker.first_step:
                worker.stepped = True
                self.agent.programs.stepped(worker, step)
        worker.step, worker.micro = step, micro

    def watch(self) -> None:
        """Report ranks that hang; end those that should stand still and do not."""
        self._end_unpaused()
        if self.agent.supervisor is None:
            return  # a hang is named once, and nobody would hear of it
        for worker, evidence in hanging(
            self.living(),
            host=self.agent.host,
            now_s=time.monotonic(),
            silence_s=self.agent.spec.recovery.heartbeat_timeout_s,
            step_s=self.agent.programs.step_timeout_s(),
            start_s=self.agent.spec.recovery.start_timeout_s,
        ):
            self.agent.tell(
                {
                    "t": "rank_hang",
                    "attempt": worker.attempt,
                    "rank": worker.rank,
                    "evidence": evidence,
                    "silent_s": time.monotonic() - worker.progress_s,
                }
            )

    def heard_anew(self) -> None:
        """Whoever supervises from now on knows of no hang."""
        for worker in self.workers.values():
            worker.reported_hang = False

    def _end_unpaused(self) -> None:
        """A rank that was to be kept does not stand still: it is stopped or in something long, and is replaced."""
        silence_s = self.agent.spec.recovery.heartbeat_timeout_s
        for worker in self.keep.lagging(self.living(), now_s=time.monotonic(), silence_s=silence_s):
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)

    # ------------------------------------------------------------ who comes and goes

    def adopt(self, pid: int, rank: int, attempt: int, peer: Connection) -> None:
        """A rank whose former agent died found this one. One that was to be ended meanwhile is."""
        self.strays.spoke(pid)
        if attempt <= self.ended or attempt < self.attempt:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return
        self.attempt = max(self.attempt, attempt)
        self.agent.log.open(self.attempt)
        self.employ(pid, rank, attempt, peer, was_warm=False)

    def listed(self, pids: Collection[int]) -> None:
        """The fork server's living children, in its own words."""
        self.strays.listed(set(pids) - set(self.standbys) - set(self.workers))

    def parent_gone(self) -> None:
        """The fork server died: exit codes that it has not told will never be known."""
        for worker in [worker for worker in self.workers.values() if worker.pidfd < 0]:
            self._unknown_end(worker)
            self._settle(worker)

    def unfit(self, peer: Connection) -> None:
        """A standby could not open a context on its GPU."""
        for standby in [standby for standby in self.standbys.values() if standby.peer is peer]:
            del self.standbys[standby.pid]
            self.agent.programs.unfit(standby)

    def standby_gone(self, peer: Connection) -> None:
        """A standby closed its line."""
        self.standbys = {pid: standby for pid, standby in self.standbys.items() if standby.peer is not peer}

    def disband(self) -> None:
        """End everything."""
        self.kill(self.attempt)
        self.strays.end()
        for pid in self.standbys:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
