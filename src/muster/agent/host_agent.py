"""The agent's loop: one selector over the supervisor, the fork server, the ranks and their deaths.

It never waits for a disk, a bucket or a peer (the mover does that) and never imports torch. What it knows
it can learn again: a restarted agent listens on the same socket file, its fork server and ranks come back
to it, and the snapshots lie where they lay.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from muster.agent.child_processes import Programs
from muster.agent.heartbeat import supervisor_address
from muster.agent.host_event_log import HostLog
from muster.agent.ranks.rank_pool import Crew
from muster.agent.ranks.rank_process import Standby, Worker, open_pidfd
from muster.agent.unsupervised_host import Alone
from muster.checkpoint_format.snapshot_ring import list_snapshots
from muster.config.spec import RunSpec
from muster.core.errors import MusterError
from muster.storage import uris
from muster.storage.paths import check_memory_dir, memory_dir
from muster.transport.connections import Connection, ConnectionPool
from muster.transport.secure_session import read_token

#: A host that joins a run under way is ready when its standbys are warm, or after so long.
WARM_S = 10.0
#: How often the lease is read while a supervisor is connected.
LEASE_LOOK_S = 1.0


class Agent:
    """One host of one run."""

    def __init__(self, *, run_dir: Path, run_id: str, host: str, bind: str) -> None:
        self.run_dir, self.run_id, self.host, self.bind = run_dir, run_id, host, bind
        self.spec = RunSpec.model_validate_json((run_dir / "resolved.json").read_text())
        self.token = read_token(str(run_dir / "token"))
        self.memory = memory_dir(run_dir, run_id, host)
        check_memory_dir(self.memory)
        self.memory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.hub = ConnectionPool(token=self.token, on_message=self._message, on_gone=self._gone)
        self.socket_path = self.memory / "agent.sock"
        self.socket_path.unlink(missing_ok=True)  # a dead predecessor's
        self.hub.listen(f"unix:{self.socket_path}")
        self.programs = Programs(agent=self)
        self.supervisor: Connection | None = None
        self.supervisor_at: tuple[str, int] | None = None
        self.lease_look_s = 0.0
        self.forkserver: Connection | None = None
        self.store: list[Any] | None = None
        self.crew = Crew(agent=self)
        self.log = HostLog(run_id=run_id, run_dir=run_dir, host=host)
        self.ready = False
        self.newest_attempt = 0
        """That a supervisor spoke of: in its name a flush is committed."""
        self.warm_by: float | None = None
        """When a host that joins late is ready, warm or not; None: it is not that far."""
        self.leaving: str | None = None
        self.failure: dict[str, Any] | None = None
        self.contact_after = time.monotonic()
        self.alone = Alone(agent=self)
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
        tick_s = min(0.25, self.spec.recovery.heartbeat_timeout_s / 4)
        while self.leaving is None:
            self.hub.run_once(tick_s)
            self._leave_deposed()
            if self.supervisor is None:
                self._find_supervisor()
            self.crew.watch()
            self.programs.mover.watch()
            if self.warm_by is not None:
                self.check_ready()
        self._leave()
        return 0

    def _watch_keeper(self) -> None:
        keeper = int(os.environ.get("MUSTER_KEEPER", "0"))
        fd = open_pidfd(keeper) if keeper else None
        if fd is not None:
            self.hub.watch(fd, lambda: self.depart("the keeper is gone"))

    def _signal(self, number: int) -> None:
        self.noticed(signal.Signals(number).name)

    def noticed(self, source: str) -> None:
        """Somebody ends this host in earnest (a scheduler, a preemption): save and leave, or be replaced."""
        grace_s = self.spec.recovery.grace_s
        notice = {"t": "notice", "notice": "preemption", "source": source, "grace_s": grace_s}
        if not self.crew.workers:
            self.depart(f"got {source}")
        elif self.supervisor is not None and len(self.spec_hosts) > 1:
            self.tell(notice)
        else:
            self.crew.order({"kind": "stop", "save": True, "exit_code": 75, "deadline_s": grace_s})

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
            self.alone.watch()
            return
        self.supervisor.who = "supervisor"
        self.hub.send(self.supervisor, self._hello())
        self.crew.heard_anew()
        for report in ([self.failure] if self.failure else []) + list(self.crew.exits.values()):
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
            "attempt": self.crew.attempt,
            "alive": {str(worker.rank): worker.pid for worker in self.crew.living()},
            "ready": self.ready,
            "store": self.store,
            "memory": self.programs.memory_address,
            "snapshots": [asdict(held) for held in list_snapshots(self.memory)],
            "step": self.crew.step,
            "exited": sorted(self.crew.exits),
            "mono_ns": time.monotonic_ns(),
        }

    def tell(self, message: Mapping[str, Any]) -> None:
        if self.supervisor is not None:
            self.hub.send(self.supervisor, message)

    def _from_supervisor(self, message: dict[str, Any]) -> None:
        kind = message["t"]
        if kind in ("welcome", "start", "end"):
            self.newest_attempt = max(self.newest_attempt, int(message["attempt"]))
        if kind == "start":
            self.crew.start(message)
        elif kind == "end":
            self.crew.end(
                int(message["attempt"]),
                keep={int(rank) for rank in message.get("keep", ())},
                pause_s=float(message.get("pause_s", 0.0)),
                reset=[int(gpu) for gpu in message.get("reset", ())],
            )
        elif kind == "order":
            self.crew.order(message["order"])
        elif kind == "peer":  # the peer's mover was started again: it listens elsewhere
            self.programs.mover.peer_moved(message["peer"])
        elif kind in ("flush", "flush_commit"):
            self.programs.mover.flush(message, fence=self.newest_attempt)
        elif kind == "ping":
            self.tell({"t": "pong", "id": message["id"], "mono_ns": time.monotonic_ns()})
        elif kind == "reload":
            self.spec = RunSpec.model_validate_json((self.run_dir / "resolved.json").read_text())
            self.failure = None
            self.programs.reload()
        elif kind == "shutdown":
            self.depart(str(message.get("reason", "shutdown")))

    # ------------------------------------------------------------ messages from below

    def _message(self, peer: Connection, message: dict[str, Any]) -> None:
        kind = message.get("t")
        if peer is self.supervisor:
            self._from_supervisor(message)
        elif kind == "hello":
            self._below_hello(peer, message)
        elif isinstance(peer.who, Worker):
            self.crew.hear(peer.who, message)
        elif peer is self.forkserver:
            self.programs.from_forkserver(message)
        elif kind == "warm":
            for standby in self.crew.standbys.values():
                standby.warm = standby.warm or standby.peer is peer
            self.check_ready()
        elif kind == "unfit":
            self.crew.unfit(peer)

    def _below_hello(self, peer: Connection, message: dict[str, Any]) -> None:
        pid = int(message["pid"])
        if message["role"] == "forkserver":
            self.forkserver, self.store = peer, message["store"]
            self.crew.listed([int(pid) for pid in message.get("children", ())])
            self.programs.forkserver_came(pid)
            self.check_ready()  # a dead one's standbys may still stand by
        elif "rank" in message:  # an adopted rank: its former agent died
            self.crew.adopt(pid, int(message["rank"]), int(message["attempt"]), peer)
            if self.supervisor is not None:
                self.hub.send(self.supervisor, self._hello())
        else:
            standby = Standby(pid=pid, peer=peer, local_rank=int(message["local_rank"]), bound=bool(message["bound"]))
            self.crew.standbys[pid] = standby
            self.crew.strays.spoke(pid)
            self.programs.came(standby)
            if self._joining():
                self.hub.send(peer, {"t": "warm"})
            self.check_ready()

    def new_store(self, store: list[Any]) -> None:
        """The fork server serves a fresh rendezvous store, for the attempt to come."""
        self.store = store
        self.tell({"t": "store", "store": store})

    def check_ready(self) -> None:
        """Tell the supervisor once everything that a start needs is there; start what waited for it."""
        self.crew.fill()
        if self.ready or not self.programs.prepared or self.forkserver is None or not self.crew.standbys:
            return
        if self._joining() and not self._warm():
            return
        self.ready = True
        self.tell({"t": "ready", "store": self.store, "memory": self.programs.memory_address})

    def _joining(self) -> bool:
        """Whether this host comes to a run that has begun without it: those that step need not wait for its warm-up."""
        return self.newest_attempt > 0 and self.crew.attempt == 0 and not self.ready

    def _warm(self) -> bool:
        """Every standby is warm, or took too long over it."""
        if self.warm_by is None:
            self.warm_by = time.monotonic() + WARM_S
        standbys = self.crew.standbys.values()
        return time.monotonic() > self.warm_by or (
            len(standbys) >= self.ranks_per_host and all(standby.warm for standby in standbys)
        )

    def failed(self, reason: str, *, exit_code: int = 1, hint: str | None = None) -> None:
        """Something below could not start; a supervisor that comes later hears of it too."""
        self.failure = {"t": "failed", "reason": reason, "exit_code": exit_code, "hint": hint}
        self.tell(self.failure)

    def _gone(self, peer: Connection, reason: str) -> None:
        if peer is self.supervisor:
            self.supervisor = None
            self.alone.begin()
        elif peer is self.forkserver:
            self.forkserver, self.ready, self.store = None, False, None
            self.tell({"t": "store_lost"})
            self.programs.forkserver_gone(reason)
            self.crew.parent_gone()
        elif isinstance(peer.who, Worker):
            peer.who.peer = None
        else:
            self.crew.standby_gone(peer)

    # ------------------------------------------------------------ events and the end

    def flushed(self, answer: dict[str, Any], order: Mapping[str, Any]) -> None:
        """The mover's answer to a flush, for whoever ordered it; and an event once a checkpoint stands."""
        if answer["t"] == "flush_committed" and answer["ok"]:
            detail = {"tier": "disk" if uris.is_local(str(order["uri"])) else "bucket"}
            detail |= {"uri": answer["uri"], "bytes": answer["bytes"]}
            event = {
                "kind": "checkpoint.committed",
                "attempt": max(self.newest_attempt, self.crew.attempt),
                "step": answer["step"],
                "mono_ns": time.monotonic_ns(),
                "wall_ns": time.time_ns(),
                "detail": detail,
            }
            self.log.write_rank(event)
            self.tell({"t": "event", "event": event})
        if order.get("alone"):
            self.alone.answered(answer, order)
        else:
            self.tell(answer)

    def log_event(self, kind: str, detail: Mapping[str, Any]) -> None:
        """One event of this host."""
        self.log.write(kind, detail)

    def depart(self, reason: str) -> None:
        """Leave once the messages at hand are answered."""
        self.leaving = self.leaving or reason

    def _leave(self) -> None:
        """End everything this agent started, give the memory back."""
        self.crew.disband()
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
