"""The agent's loop: one selector over the supervisor, the fork server, the ranks and their deaths.

It never waits for a disk, a bucket or a peer (the mover does that) and never imports torch. What it knows
it can learn again: a restarted agent listens on the same socket file, its fork server and ranks come back
to it, and the snapshots lie where they lay.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from muster.agent import reset
from muster.agent.hostlog import HostLog
from muster.agent.keep import Keep
from muster.agent.lifeline import supervisor_address
from muster.agent.programs import Programs
from muster.agent.ranks import Standby, Worker, open_pidfd, parent_of
from muster.agent.watch import hanging
from muster.core.channel import Hub, Peer
from muster.core.errors import MusterError
from muster.core.places import memory_dir
from muster.core.ring import inventory
from muster.core.spec import RunSpec
from muster.core.wire import read_token

#: Without a supervisor and without work an agent leaves after so long.
LONELY_S = 120.0
#: How often the lease is read while a supervisor is connected.
LEASE_LOOK_S = 1.0


class Agent:
    """One host of one run."""

    def __init__(self, *, run_dir: Path, run_id: str, host: str, bind: str) -> None:
        self.run_dir, self.run_id, self.host, self.bind = run_dir, run_id, host, bind
        self.spec = RunSpec.model_validate_json((run_dir / "resolved.json").read_text())
        self.token = read_token(str(run_dir / "token"))
        self.memory = memory_dir(run_dir, run_id, host)
        self.memory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.hub = Hub(token=self.token, on_message=self._message, on_gone=self._gone)
        self.socket_path = self.memory / "agent.sock"
        self.socket_path.unlink(missing_ok=True)  # a dead predecessor's
        self.hub.listen(f"unix:{self.socket_path}")
        self.programs = Programs(agent=self)
        self.supervisor: Peer | None = None
        self.supervisor_at: tuple[str, int] | None = None
        self.lease_look_s = 0.0
        self.forkserver: Peer | None = None
        self.store: list[Any] | None = None
        self.standbys: dict[int, Standby] = {}
        self.workers: dict[int, Worker] = {}  # pid -> worker
        self.queue: list[dict[str, Any]] = []  # contexts that wait for a standby
        self.attempt = 0
        self.log = HostLog(run_id=run_id, run_dir=run_dir, host=host)
        self.ready = False
        self.ending: int | None = None  # attempt whose ranks are being ended
        self.keep = Keep()
        self.resetting: list[int] = []  # GPUs to be reset once the ranks are gone
        self.reset_under_way = False
        self.reset_result: dict[str, Any] | None = None
        self.leaving: str | None = None
        self.step = 0  # highest step that a rank here reported
        self.exits: dict[int, dict[str, Any]] = {}  # rank -> its report, of the current attempt
        self.failure: dict[str, Any] | None = None
        self.contact_after = time.monotonic()
        self.lonely_since = time.monotonic()
        self.ranks_per_host = self.spec.resources.ranks_per_host or 1
        self.log.write("agent.started", {"pid": os.getpid(), "ranks": self.ranks_per_host})

    # ------------------------------------------------------------ the loop

    def run(self) -> int:
        """Serve until the supervisor says so, or nobody is left to serve."""
        wake_r, wake_w = socket.socketpair()
        wake_w.setblocking(False)
        signal.set_wakeup_fd(wake_w.fileno(), warn_on_full_buffer=False)
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda number, _frame: self._signal(number))
        if os.environ.get("MUSTER_TERM") == "ignored":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # and so do all children of this process
        self.hub.watch(wake_r.fileno(), functools.partial(_empty, wake_r))
        self._watch_keeper()
        self.programs.start()
        tick_s = min(0.25, self.spec.recovery.heartbeat_timeout_s / 6)
        while self.leaving is None:
            self.hub.run_once(tick_s)
            self._leave_deposed()
            if self.supervisor is None:
                self._find_supervisor()
            self._watchdog()
            self._end_unpaused()
        self._leave()
        return 0

    def _watch_keeper(self) -> None:
        keeper = int(os.environ.get("MUSTER_KEEPER", "0"))
        fd = open_pidfd(keeper) if keeper else None
        if fd is not None:
            self.hub.watch(fd, lambda: self._depart("the keeper is gone"))

    def _signal(self, number: int) -> None:
        self.noticed(signal.Signals(number).name)

    def noticed(self, source: str) -> None:
        """Somebody ends this host in earnest (a scheduler, a preemption): save and leave, or be replaced."""
        grace_s = self.spec.recovery.grace_s
        notice = {"t": "notice", "notice": "preemption", "source": source, "grace_s": grace_s}
        if not self.workers:
            self._depart(f"got {source}")
        elif self.supervisor is not None and len(self.spec_hosts) > 1:
            self._tell(notice)
        else:
            self._order({"kind": "stop", "save": True, "exit_code": 75, "deadline_s": grace_s})

    @property
    def spec_hosts(self) -> range:
        return range(self.spec.resources.hosts)

    # ------------------------------------------------------------ supervisor

    def _find_supervisor(self) -> None:
        if time.monotonic() < self.contact_after:
            return  # a predecessor's ranks are still finding us: speak when all are here
        address = supervisor_address(self.run_dir)
        self.supervisor_at = address
        if address is not None:
            try:
                self.supervisor = self.hub.connect(*address, timeout_s=0.5)
            except OSError:
                self.supervisor = None
        if self.supervisor is None:
            if time.monotonic() - self.lonely_since > LONELY_S and not self._living():
                self._depart("no supervisor and no work")
            return
        self.supervisor.who = "supervisor"
        self.hub.send(self.supervisor, self._hello())
        for report in ([self.failure] if self.failure else []) + list(self.exits.values()):
            self.hub.send(self.supervisor, report)

    def _leave_deposed(self) -> None:
        """A holder that is silent (its node lost power) keeps a connection open: the lease says who counts."""
        if self.supervisor is None or time.monotonic() < self.lease_look_s:
            return
        self.lease_look_s = time.monotonic() + LEASE_LOOK_S
        address = supervisor_address(self.run_dir)
        if address is not None and address != self.supervisor_at:
            self.hub.close(self.supervisor)
            self.supervisor = None

    def _hello(self) -> dict[str, Any]:
        return {
            "t": "hello",
            "role": "agent",
            "host": self.host,
            "pid": os.getpid(),
            "attempt": self.attempt,
            "alive": {str(worker.rank): worker.pid for worker in self._living()},
            "ready": self.ready,
            "store": self.store,
            "memory": self.programs.memory_address,
            "snapshots": [asdict(held) for held in inventory(self.memory)],
            "step": self.step,
            "exited": sorted(self.exits),
            "mono_ns": time.monotonic_ns(),
        }

    def _tell(self, message: Mapping[str, Any]) -> None:
        if self.supervisor is not None:
            self.hub.send(self.supervisor, message)

    def _from_supervisor(self, message: dict[str, Any]) -> None:
        kind = message["t"]
        if kind == "start":
            self._start(message)
        elif kind == "end":
            self.resetting = [int(gpu) for gpu in message.get("reset", ())]
            self._end(int(message["attempt"]), keep={int(rank) for rank in message.get("keep", ())})
        elif kind == "order":
            self._order(message["order"])
        elif kind == "ping":
            self._tell({"t": "pong", "id": message["id"], "mono_ns": time.monotonic_ns()})
        elif kind == "reload":
            self.spec = RunSpec.model_validate_json((self.run_dir / "resolved.json").read_text())
            self.failure = None
            self.programs.reload()
        elif kind == "shutdown":
            self._depart(str(message.get("reason", "shutdown")))

    def _start(self, message: dict[str, Any]) -> None:
        attempt = int(message["attempt"])
        if attempt <= self.attempt:
            return  # told twice, or by a supervisor that does not know of a newer one
        kept = self.keep.chosen(self._living(), message["contexts"])
        self._kill(attempt - 1, but=kept)
        self.attempt, self.ending = attempt, None
        self.exits.clear()
        self.log.open(attempt)
        sources = self.programs.fetch(message)
        moves: list[tuple[Worker, dict[str, Any]]] = []
        for context in message["contexts"]:
            if self.spec.checkpoint.memory_every_steps:
                context["snapshot_dir"] = str(self.memory)
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
        self._fill()
        if self.forkserver is not None:
            self.hub.send(self.forkserver, {"t": "store"})  # the next attempt meets in a store of its own

    def _move(self, worker: Worker, context: dict[str, Any]) -> None:
        """A rank that stood still goes on in the new attempt."""
        worker.begin(int(context["rank"]), int(context["attempt"]), now_s=time.monotonic())
        assert worker.peer is not None
        self.hub.send(worker.peer, {"t": "place", "context": context})
        self.log.write("rank.started", {"pid": worker.pid, "kept": True}, rank=worker.rank)

    def _fill(self) -> None:
        """Hand waiting ranks to standbys, once the data is there; fork what is missing."""
        if not self.programs.prepared:
            return
        while self.queue and self.standbys:
            context = self.queue.pop(0)
            standby = self.standbys.pop(next(iter(self.standbys)))
            log = self.run_dir / "logs" / f"rank-{context['rank']}.a{context['attempt']}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            self.hub.send(standby.peer, {"t": "run", "context": context, "log": str(log)})
            self._employ(standby.pid, context["rank"], context["attempt"], standby.peer, was_warm=True)
        if self.queue and self.forkserver is not None:
            self.programs.spawn(len(self.queue) - self.programs.coming)

    def _employ(self, pid: int, rank: int, attempt: int, peer: Peer | None, *, was_warm: bool) -> None:
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
        self.hub.watch(fd, lambda: self._died(worker))
        self.log.write("rank.started", {"pid": pid, "standby": was_warm}, rank=rank)

    # ------------------------------------------------------------ ending ranks

    def _order(self, order: dict[str, Any]) -> None:
        for worker in self._living():
            if worker.peer is not None:
                self.hub.send(worker.peer, {"t": "order", "order": order})

    def _end(self, attempt: int, *, keep: set[int]) -> None:
        self.ending = max(attempt, self.ending or 0)
        self.queue = [context for context in self.queue if context["attempt"] > attempt]
        kept = self.keep.begin(self._living(), attempt, keep, now_s=time.monotonic())
        self._kill(attempt, but=kept)
        for worker in kept:
            if worker.peer is not None:
                self.hub.send(worker.peer, {"t": "pause"})
        self._collected()

    def _kill(self, attempt: int, *, but: Collection[Worker] = ()) -> None:
        for worker in self._living():
            if worker.attempt <= attempt and worker not in but:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)

    def _died(self, worker: Worker) -> None:
        """The pidfd fired: the process is gone; its exit code comes from the fork server, its parent."""
        self.hub.unwatch(worker.pidfd)
        os.close(worker.pidfd)
        worker.pidfd = -1
        if self.forkserver is None or worker.parent != self.programs.forkserver_pid:
            self._unknown_end(worker)
        self._settle(worker)

    def _unknown_end(self, worker: Worker) -> None:
        """Its parent died before it, so nobody can know its exit code."""
        if worker.exit_code is None:
            worker.exit_code = -9

    def exited(self, pid: int, code: int) -> None:
        """The fork server reaped ``pid``."""
        self.standbys.pop(pid, None)
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
            self.hub.drain(worker.peer)  # last words may still lie in the socket
        last = dict(worker.last)
        self.log.write(
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
            self._tell(report)
        self._collected()

    def _collected(self) -> None:
        ended = [worker for worker in self._living() if self.ending is not None and worker.attempt <= self.ending]
        if self.ending is None or any(worker.paused is None for worker in ended):
            return
        if self.resetting:
            gpus, self.resetting = self.resetting, []
            self.reset_under_way = True
            reset.start(self.hub, gpus, functools.partial(self._was_reset, gpus))
        if self.reset_under_way:
            return
        held = [asdict(version) for version in inventory(self.memory)]
        kept = {str(worker.rank): worker.paused for worker in ended}
        found = {"t": "collected", "attempt": self.ending, "snapshots": held, **({"kept": kept} if kept else {})}
        self._tell({**found, "reset": self.reset_result} if self.reset_result else found)
        self.reset_result = None
        self.ending = None
        self.programs.refill()

    def _was_reset(self, gpus: list[int], ok: bool, said: str) -> None:
        self.reset_under_way, self.reset_result = False, {"ok": ok, "evidence": said}
        self.log.write("host.reset", {"gpus": gpus, "ok": ok, "evidence": said})
        self._collected()

    def _living(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.exit_code is None and worker.pidfd >= 0]

    # ------------------------------------------------------------ messages from below

    def _message(self, peer: Peer, message: dict[str, Any]) -> None:
        kind = message.get("t")
        if peer is self.supervisor:
            self._from_supervisor(message)
        elif kind == "hello":
            self._below_hello(peer, message)
        elif isinstance(peer.who, Worker):
            self._from_rank(peer.who, message)
        elif peer is self.forkserver:
            self.programs.from_forkserver(message)

    def _below_hello(self, peer: Peer, message: dict[str, Any]) -> None:
        pid = int(message["pid"])
        if message["role"] == "forkserver":
            self.forkserver, self.store = peer, message["store"]
            self.programs.forkserver_came(pid)
            self.check_ready()  # a dead one's standbys may still stand by
        elif "rank" in message:  # an adopted rank: its former agent died
            self.attempt = max(self.attempt, int(message["attempt"]))
            self.log.open(self.attempt)
            self._employ(pid, int(message["rank"]), int(message["attempt"]), peer, was_warm=False)
            if self.supervisor is not None:
                self.hub.send(self.supervisor, self._hello())
        else:
            self.standbys[pid] = Standby(pid=pid, peer=peer)
            self.programs.came()
            self.check_ready()

    def _from_rank(self, worker: Worker, message: dict[str, Any]) -> None:
        now = time.monotonic()
        worker.seen_s = now
        kind = message.get("t")
        if kind == "beat":
            self._progress(worker, int(message["step"]), int(message["micro"]))
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
            self.log.write_rank(event)
            self._tell({"t": "event", "event": event})

    def _progress(self, worker: Worker, step: int, micro: int) -> None:
        """A rank's beat: a new micro-batch is progress, a new step means that a snapshot lies ready."""
        if (step, micro) == (worker.step, worker.micro):
            return
        worker.progress_s = time.monotonic()
        if step != worker.step:
            if worker.first_step is None:
                worker.first_step = step
            elif step > worker.first_step:
                worker.stepped = True
                self.programs.stepped(worker, step)
        worker.step, worker.micro = step, micro

    def new_store(self, store: list[Any]) -> None:
        """The fork server serves a fresh rendezvous store, for the attempt to come."""
        self.store = store
        self._tell({"t": "store", "store": store})

    def check_ready(self) -> None:
        """Tell the supervisor once everything that a start needs is there; start what waited for it."""
        self._fill()
        if not self.ready and self.programs.prepared and self.forkserver is not None and self.standbys:
            self.ready = True
            self._tell({"t": "ready", "store": self.store, "memory": self.programs.memory_address})

    def failed(self, reason: str, *, exit_code: int = 1, hint: str | None = None) -> None:
        """Something below could not start; a supervisor that comes later hears of it too."""
        self.failure = {"t": "failed", "reason": reason, "exit_code": exit_code, "hint": hint}
        self._tell(self.failure)

    def _gone(self, peer: Peer, reason: str) -> None:
        if peer is self.supervisor:
            self.supervisor = None
            self.lonely_since = time.monotonic()
        elif peer is self.forkserver:
            self.forkserver, self.ready, self.store = None, False, None
            self._tell({"t": "store_lost"})
            self.programs.forkserver_gone(reason)
            for worker in [worker for worker in self.workers.values() if worker.pidfd < 0]:
                self._unknown_end(worker)
                self._settle(worker)
        elif isinstance(peer.who, Worker):
            peer.who.peer = None
        else:
            self.standbys = {pid: standby for pid, standby in self.standbys.items() if standby.peer is not peer}

    # ------------------------------------------------------------ watching

    def _watchdog(self) -> None:
        for worker, evidence in hanging(
            self._living(),
            host=self.host,
            now_s=time.monotonic(),
            silence_s=self.spec.recovery.heartbeat_timeout_s,
            step_s=self.programs.step_timeout_s(),
        ):
            self._tell(
                {
                    "t": "rank_hang",
                    "attempt": worker.attempt,
                    "rank": worker.rank,
                    "evidence": evidence,
                    "silent_s": time.monotonic() - worker.progress_s,
                }
            )

    def _end_unpaused(self) -> None:
        """A rank that was to be kept does not stand still: it is in something long, and is replaced like others."""
        for worker in self.keep.too_slow(self._living(), now_s=time.monotonic()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)

    # ------------------------------------------------------------ events and the end

    def log_event(self, kind: str, detail: Mapping[str, Any]) -> None:
        """One event of this host."""
        self.log.write(kind, detail)

    def _depart(self, reason: str) -> None:
        self.leaving = self.leaving or reason

    def _leave(self) -> None:
        """End everything this agent started, give the memory back."""
        self._kill(self.attempt)
        for pid in self.standbys:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.programs.end()
        self.log.write("agent.ended", {"reason": self.leaving or ""})
        self.hub.shutdown()
        shutil.rmtree(self.memory, ignore_errors=True)


def _empty(sock: socket.socket) -> None:
    sock.recv(256)


def main() -> None:
    parser = argparse.ArgumentParser(description="Muster's agent (started by its keeper)")
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--bind", required=True)
    arguments = parser.parse_args()
    try:
        code = Agent(run_dir=arguments.run_dir, run_id=arguments.run_id, host=arguments.host, bind=arguments.bind).run()
    except MusterError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)


if __name__ == "__main__":
    main()
