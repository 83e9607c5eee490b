"""The ranks of one host: started from standbys, watched, ended, retained, each report made once."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from muster.agent import gpu_reset
from muster.agent.child_processes import ChildProcesses
from muster.agent.host_state import HostState
from muster.agent.ranks.hang_detector import find_hung_ranks
from muster.agent.ranks.orphaned_processes import OrphanedProcesses
from muster.agent.ranks.rank_process import Worker, kill, open_pidfd, parent_of, standby_for
from muster.agent.ranks.retained_ranks import RetainedRanks
from muster.checkpoint_format.snapshot_ring import list_snapshots
from muster.transport.connections import Connection

#: Progress outside of steps is forwarded this often at most.
PROGRESS_EVERY_S = 1.0


class RankPool:
    """The processes that are, or will be, ranks of the host's attempt."""

    def __init__(self, *, host: HostState, children: ChildProcesses) -> None:
        self._host, self._children = host, children
        self.queue: list[dict[str, Any]] = []
        """Contexts that wait for a standby."""
        self.step = 0
        """Highest step that a rank here reported."""
        self.exits: dict[int, dict[str, Any]] = {}
        """Rank -> its report, of the current attempt."""
        self._ending: int | None = None
        """Attempt whose ranks are being ended."""
        self._ended = 0
        """The newest attempt whose ranks were to be ended."""
        self._orphans = OrphanedProcesses(hub=host.hub, on_ended=self._report_drained)
        self._retained = RetainedRanks()
        self._progress_sent_s = 0.0
        self._gpus_to_reset: list[int] = []
        """GPUs to be reset once the ranks are gone."""
        self._resetting = False
        self._reset_result: dict[str, Any] | None = None

    # ------------------------------------------------------------ starting

    def start(self, message: dict[str, Any]) -> None:
        """Begin an attempt: its ranks here, fresh or retained, with the shards they start from."""
        host, attempt = self._host, int(message["attempt"])
        if attempt <= host.attempt:
            return  # sent twice, or by a supervisor that does not know of a newer one
        retained = self._retained.assigned(host.living(), message["contexts"])
        self._kill(attempt - 1, spared=retained)
        self._orphans.kill()
        host.attempt, self._ending = attempt, None
        self.exits.clear()
        host.log.open(attempt)
        sources = self._children.fetch(message)
        moves: list[tuple[Worker, dict[str, Any]]] = []
        for context in message["contexts"]:
            if host.spec.checkpoint.snapshot_every_steps:
                context["snapshot_dir"] = str(host.memory)
            if context.get("restore") is not None:
                context["restore"]["shards"] = sources
            worker = next((worker for worker in retained if worker.rank == context["kept_rank"]), None)
            if worker is None:
                context["kept_rank"] = None
                self.queue.append(context)
            else:
                moves.append((worker, context))
        for worker, context in moves:  # only now: a rank's new number may be another's old one
            self._reassign(worker, context)
        self.assign_pending()
        if host.fork_server is not None:
            host.hub.send(host.fork_server, {"t": "store"})  # each attempt has a rendezvous store of its own

    def _reassign(self, worker: Worker, context: dict[str, Any]) -> None:
        """A paused rank continues in the new attempt."""
        worker.begin(int(context["rank"]), int(context["attempt"]), now_s=time.monotonic())
        assert worker.peer is not None
        self._host.hub.send(worker.peer, {"t": "place", "context": context})
        self._host.log.write("rank.started", {"pid": worker.pid, "kept": True}, rank=worker.rank)

    def assign_pending(self) -> None:
        """Hand waiting ranks to standbys, once the data is there; fork what is missing."""
        host = self._host
        if not self._children.prepared:
            return
        for context in list(self.queue):
            standby = standby_for(int(context["local_rank"]), host.standbys.values())
            if standby is None:
                continue
            self.queue.remove(context)
            del host.standbys[standby.pid]
            log = host.run_dir / "logs" / f"rank-{context['rank']}.a{context['attempt']}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            host.hub.send(standby.peer, {"t": "run", "context": context, "log": str(log)})
            self.register_rank(standby.pid, context["rank"], context["attempt"], standby.peer, was_warm=True)
        if self.queue and host.fork_server is not None:
            self._children.spawn(int(context["local_rank"]) for context in self.queue)

    def register_rank(self, pid: int, rank: int, attempt: int, peer: Connection | None, *, was_warm: bool) -> None:
        """From now on ``pid`` is a rank."""
        fd = open_pidfd(pid)
        if fd is None:
            return
        now = time.monotonic()
        worker = Worker(
            pid=pid, rank=rank, attempt=attempt, peer=peer, pidfd=fd, parent=parent_of(pid), progress_s=now, seen_s=now
        )
        self._host.workers[pid] = worker
        if peer is not None:
            peer.identity = worker
        self._host.hub.watch(fd, lambda: self._on_exit(worker))
        self._host.log.write("rank.started", {"pid": pid, "standby": was_warm}, rank=rank)

    # ------------------------------------------------------------ ending

    def send_command(self, command: dict[str, Any]) -> None:
        for worker in self._host.living():
            if worker.peer is not None:
                self._host.hub.send(worker.peer, {"t": "order", "order": command})

    def end(self, attempt: int, *, keep: set[int], pause_s: float, reset: list[int]) -> None:
        """End the ranks up to ``attempt``, then reset GPUs; those in ``keep`` have ``pause_s`` to pause."""
        host = self._host
        self._gpus_to_reset = reset
        if reset and self._children.opens_contexts:  # no GPU is reset while any process uses it
            self._orphans.add(host.standbys)
            host.standbys.clear()
        self._ending = max(attempt, self._ending or 0)
        self._ended = max(attempt, self._ended)
        self.queue = [context for context in self.queue if context["attempt"] > attempt]
        now_s = time.monotonic()
        retained = self._retained.select(host.living(), attempt, keep, now_s=now_s, pause_s=pause_s)
        self._kill(attempt, spared=retained)
        self._orphans.kill()
        for worker in retained:
            if worker.peer is not None:
                host.hub.send(worker.peer, {"t": "pause"})
        self._report_drained()

    def _kill(self, attempt: int, *, spared: Collection[Worker] = ()) -> None:
        """SIGKILL for every rank up to ``attempt``; their exits are handled like any other's."""
        for worker in self._host.living():
            if worker.attempt <= attempt and worker not in spared:
                kill(worker.pid)

    def _on_exit(self, worker: Worker) -> None:
        """The pidfd fired: the process is gone; its exit code comes from the fork server, its parent."""
        self._host.hub.unwatch(worker.pidfd)
        os.close(worker.pidfd)
        worker.pidfd = -1
        if self._host.fork_server is None or worker.parent != self._host.fork_server_pid:
            self._assume_killed(worker)
        self._report_exit(worker)

    def _assume_killed(self, worker: Worker) -> None:
        """Its parent died first, so its exit code cannot be known."""
        if worker.exit_code is None:
            worker.exit_code, worker.orphaned = -9, True

    def on_exit_code(self, pid: int, code: int) -> None:
        """The fork server reaped ``pid``."""
        self._host.standbys.pop(pid, None)
        self._orphans.mark_registered(pid)
        worker = self._host.workers.get(pid)
        if worker is not None:
            worker.exit_code = code
            self._report_exit(worker)

    def _report_exit(self, worker: Worker) -> None:
        """Once the process is gone and its code is known: log and report it, once."""
        host = self._host
        if worker.pidfd >= 0 or worker.exit_code is None or worker.pid not in host.workers:
            return
        del host.workers[worker.pid]
        if worker.peer is not None:
            host.hub.drain(worker.peer)  # its last message may still be in the socket
        last = dict(worker.last)
        if last and worker.orphaned:  # a rank that sent its last message was not killed
            worker.exit_code = int(last.get("left", 1))
        detail = {
            "exception": str(last.get("exception") or ""),
            "reason": str(last.get("message") or "")[:500],
            "traceback": str(last.get("traceback") or "")[-2000:],
        }
        detail = {key: text for key, text in detail.items() if text}
        host.log.write("rank.exited", {"exit_code": worker.exit_code, **detail}, rank=worker.rank)
        if self._ending is None or worker.attempt > self._ending:
            report = {"t": "rank_exit", "attempt": worker.attempt, "rank": worker.rank, "pid": worker.pid}
            report |= {"code": worker.exit_code, "step": worker.step, "last": last}
            self.exits[worker.rank] = report
            host.send(report)
        self._report_drained()

    def _report_drained(self) -> None:
        """Report once every rank of the ended attempt is gone or paused, and the GPUs are reset."""
        ending, living = self._ending, self._host.living()
        if ending is None or self._orphans.ending:
            return
        ended = [worker for worker in living if worker.attempt <= ending]
        if any(worker.paused is None for worker in ended):
            return
        if self._gpus_to_reset:
            gpus, self._gpus_to_reset = self._gpus_to_reset, []
            self._resetting = True
            gpu_reset.start(self._host.hub, gpus, functools.partial(self._on_reset, gpus))
        if self._resetting:
            return
        message: dict[str, Any] = {"t": "collected", "attempt": ending}
        message["snapshots"] = [asdict(snapshot) for snapshot in list_snapshots(self._host.memory)]
        if ended:
            message["kept"] = {str(worker.rank): worker.paused for worker in ended}
        if self._reset_result:
            message["reset"] = self._reset_result
        self._host.send(message)
        self._reset_result = None
        self._ending = None
        self._children.replenish_standbys()

    def _on_reset(self, gpus: list[int], ok: bool, evidence: str) -> None:
        self._resetting, self._reset_result = False, {"ok": ok, "evidence": evidence}
        self._host.log.write("host.reset", {"gpus": gpus, "ok": ok, "evidence": evidence})
        self._report_drained()

    # ------------------------------------------------------------ messages and hangs

    def handle(self, worker: Worker, message: dict[str, Any]) -> None:
        now = time.monotonic()
        worker.seen_s = now
        kind = message.get("t")
        if kind == "beat":
            self._on_beat(worker, int(message["step"]), int(message["micro"]))
        elif kind == "progress" and message["attempt"] == worker.attempt:
            worker.progress_s = now
            if now - self._progress_sent_s >= PROGRESS_EVERY_S:
                self._progress_sent_s = now
                self._host.send({"t": "progress", "attempt": worker.attempt})
        elif kind == "last":
            worker.last = message["last"]
        elif kind == "paused" and worker.retained:
            worker.paused = int(message["step"])
            self._report_drained()
        elif kind == "event":
            event = message["event"]
            worker.progress_s = now
            if event["kind"] == "step":
                self.step = max(self.step, int(event["step"]))
            self._host.log.write_rank(event)
            self._host.send({"t": "event", "event": event})

    def _on_beat(self, worker: Worker, step: int, micro: int) -> None:
        """A new micro-batch is progress; a new step means that a snapshot is ready."""
        if (step, micro) == (worker.step, worker.micro):
            return
        worker.progress_s = time.monotonic()
        if step != worker.step:
            if worker.first_step is None:
                worker.first_step = step
                self._children.replicator.copy(step - 1)  # what the attempt starts from
            elif step > worker.first_step:
                worker.stepped = True
                self._children.on_step(worker, step)
        worker.step, worker.micro = step, micro

    def watch(self) -> None:
        """Report ranks that hang; kill those that should have paused and have not."""
        host, now_s = self._host, time.monotonic()
        silence_s = host.spec.recovery.heartbeat_timeout_s
        for worker in self._retained.overdue(host.living(), now_s=now_s, silence_s=silence_s):
            kill(worker.pid)  # stopped, or busy with something long: it is replaced
        if host.supervisor is None:
            return  # a hang is reported once, and there is no one to receive it
        for worker, evidence in find_hung_ranks(
            host.living(),
            host=host.host,
            now_s=now_s,
            silence_s=silence_s,
            step_s=self._children.step_timeout_s(),
            start_s=host.spec.recovery.start_timeout_s,
        ):
            report = {"t": "rank_hang", "attempt": worker.attempt, "rank": worker.rank, "evidence": evidence}
            host.send({**report, "silent_s": now_s - worker.progress_s})

    def on_reconnect(self) -> None:
        """A newly connected supervisor has not heard of any hang."""
        for worker in self._host.workers.values():
            worker.reported_hang = False

    # ------------------------------------------------------------ registration and loss

    def adopt(self, pid: int, rank: int, attempt: int, peer: Connection) -> None:
        """A rank of a previous agent reconnects. It is killed if its attempt was ended in the meantime."""
        self._orphans.mark_registered(pid)
        if attempt <= self._ended or attempt < self._host.attempt:
            kill(pid)
            return
        self._host.attempt = max(self._host.attempt, attempt)
        self._host.log.open(self._host.attempt)
        self.register_rank(pid, rank, attempt, peer, was_warm=False)

    def on_children(self, pids: Collection[int]) -> None:
        """The fork server's living children, by its own list."""
        self._orphans.add(set(pids) - set(self._host.standbys) - set(self._host.workers))

    def on_standby(self, pid: int) -> None:
        self._orphans.mark_registered(pid)

    def on_fork_server_lost(self) -> None:
        """Exit codes that it has not reported will never be known."""
        for worker in [worker for worker in self._host.workers.values() if worker.pidfd < 0]:
            self._assume_killed(worker)
            self._report_exit(worker)

    def on_standby_lost(self, peer: Connection, *, unusable: bool = False) -> None:
        """A standby closed its connection, or could not open a context on its GPU."""
        for standby in [standby for standby in self._host.standbys.values() if standby.peer is peer]:
            del self._host.standbys[standby.pid]
            if unusable:
                self._children.on_standby_unusable(standby)

    def shutdown(self) -> None:
        self._kill(self._host.attempt)
        self._orphans.kill()
        for pid in self._host.standbys:
            kill(pid)
