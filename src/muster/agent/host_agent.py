"""The agent's loop: one selector over the supervisor, the fork server, the ranks and their exits.

It never waits for a disk, a bucket or a peer (the replicator does that) and never imports torch. Its state can be
rebuilt: a restarted agent listens on the same socket file, its fork server and ranks reconnect, and the snapshots are
still in memory.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from muster.agent.child_processes import ADOPTION_S, ChildEvents, ChildProcesses
from muster.agent.heartbeat import supervisor_address
from muster.agent.host_event_log import HostLog
from muster.agent.host_state import METADATA_URL, HostState
from muster.agent.rank_pool import RankPool
from muster.agent.ranks.rank_process import Standby, Worker, open_pidfd
from muster.agent.unsupervised_host import UnsupervisedHost
from muster.agent.watchdog import parse_arguments
from muster.checkpoint_format.snapshot_ring import list_snapshots
from muster.config.spec import RunSpec
from muster.core import environment
from muster.core.errors import MusterError
from muster.storage import uris
from muster.storage.paths import check_memory_dir, memory_dir
from muster.transport.connections import Connection, ConnectionPool
from muster.transport.secure_session import read_token

#: A host that joins a run under way is ready when its standbys are warm, or after this long.
WARM_S = 10.0
#: How often the lease is read while a supervisor is connected.
LEASE_CHECK_S = 1.0


class HostAgent:
    """One host of one run."""

    def __init__(
        self, *, run_dir: Path, run_id: str, host: str, bind: str, environ: Mapping[str, str], hosts_here: int = 1,
        metadata_url: str | None = None,
    ) -> None:  # fmt: skip
        memory = memory_dir(run_dir, run_id, host)
        check_memory_dir(memory)
        memory.mkdir(mode=0o700, parents=True, exist_ok=True)
        token = read_token(str(run_dir / "token"))
        self.hub = ConnectionPool(token=token, on_message=self._on_message, on_gone=self._on_disconnect)
        self.host = HostState(
            run_dir=run_dir, run_id=run_id, host=host, bind=bind, memory=memory, spec=_read_spec(run_dir),
            hub=self.hub, log=HostLog(run_id=run_id, run_dir=run_dir, host=host), environ=environ,
            hosts_here=hosts_here, metadata_url=metadata_url,
        )  # fmt: skip
        self.host.socket_path.unlink(missing_ok=True)  # a dead predecessor's
        self.hub.listen(f"unix:{self.host.socket_path}")
        events = ChildEvents(
            on_prepared=self._check_ready,
            on_failure=self._on_failure,
            on_notice=self._on_notice,
            on_flush=self._on_flush,
        )
        self.children = ChildProcesses(host=self.host, events=events)
        self.pool = RankPool(host=self.host, children=self.children)
        self.unsupervised = UnsupervisedHost(host=self.host, flush=self.children.replicator.flush)
        self._supervisor_address: tuple[str, int] | None = None
        self._lease_check_s = 0.0
        self._store: list[Any] | None = None
        """The fork server's rendezvous store for the next attempt."""
        self._ready = False
        self._warm_by: float | None = None
        """When a host that joins late is ready, warm or not; None: it is not yet warming up."""
        self._failure: Mapping[str, Any] | None = None
        self._contact_after = time.monotonic()
        self.host.log.write("agent.started", {"pid": os.getpid(), "ranks": self.host.ranks_per_host})

    # ------------------------------------------------------------ the loop

    def run(self, *, watchdog: int | None, ignore_term: bool) -> int:
        """Serve until the supervisor ends the host, or the wait for one is over. ``watchdog``: exit with this pid."""
        self.hub.wake_on_signals()
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda number, _frame: self._on_notice(signal.Signals(number).name))
        if ignore_term:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # inherited by all children of this process
        fd = open_pidfd(watchdog) if watchdog else None
        if fd is not None:
            self.hub.watch(fd, lambda: self.host.request_exit("the watchdog is gone"))
        if not self.children.start():
            self._contact_after = time.monotonic() + ADOPTION_S
        tick_s = min(0.25, self.host.spec.recovery.heartbeat_timeout_s / 4)
        while self.host.exit_reason is None:
            self.hub.run_once(tick_s)
            self._leave_deposed_supervisor()
            if self.host.supervisor is None:
                self._find_supervisor()
            self.pool.watch()
            self.children.replicator.watch()
            if self._warm_by is not None:
                self._check_ready()
        self._shutdown()
        return 0

    def _on_notice(self, source: str) -> None:
        """The host is being taken away (a scheduler, a preemption): save and exit, or be replaced."""
        grace_s = self.host.spec.recovery.grace_s
        if not self.host.workers:
            self.host.request_exit(f"got {source}")
        elif self.host.supervisor is not None and self.host.spec.resources.hosts > 1:
            self.host.send({"t": "notice", "notice": "preemption", "source": source, "grace_s": grace_s})
        else:
            self.pool.send_command({"kind": "stop", "save": True, "exit_code": 75, "deadline_s": grace_s})

    # ------------------------------------------------------------ supervisor

    def _find_supervisor(self) -> None:
        if time.monotonic() < self._contact_after:
            return  # a predecessor's ranks are still reconnecting: report when all are here
        host, address = self.host, supervisor_address(self.host.run_dir)
        self._supervisor_address = address
        if address is not None:
            try:
                host.supervisor = self.hub.connect(*address, timeout_s=0.5)
            except OSError:
                host.supervisor = None
        if host.supervisor is None:
            self.unsupervised.watch()
            return
        host.supervisor.identity = "supervisor"
        host.send(self._hello())
        self.pool.on_reconnect()
        for report in ([self._failure] if self._failure else []) + list(self.pool.exits.values()):
            host.send(report)

    def _leave_deposed_supervisor(self) -> None:
        """A holder that is silent (its node lost power) keeps a connection open: the lease decides which one counts."""
        if self.host.supervisor is None or time.monotonic() < self._lease_check_s:
            return
        self._lease_check_s = time.monotonic() + LEASE_CHECK_S
        address = supervisor_address(self.host.run_dir)
        if address is not None and address != self._supervisor_address:
            self.hub.close(self.host.supervisor)
            self.host.supervisor = None

    def _hello(self) -> dict[str, Any]:
        return {
            "t": "hello",
            "role": "agent",
            "host": self.host.host,
            "pid": os.getpid(),
            "attempt": self.host.attempt,
            "alive": {str(worker.rank): worker.pid for worker in self.host.living()},
            "ready": self._ready,
            "store": self._store,
            "memory": self.children.memory_address,
            "snapshots": [asdict(snapshot) for snapshot in list_snapshots(self.host.memory)],
            "step": self.pool.step,
            "exited": sorted(self.pool.exits),
            "mono_ns": time.monotonic_ns(),
        }

    def _from_supervisor(self, message: dict[str, Any]) -> None:
        host, kind = self.host, message["t"]
        if kind in ("welcome", "start", "end"):
            host.newest_attempt = max(host.newest_attempt, int(message["attempt"]))
        if kind == "start":
            self.pool.start(message)
        elif kind == "end":
            self.pool.end(
                int(message["attempt"]),
                keep={int(rank) for rank in message.get("keep", ())},
                pause_s=float(message.get("pause_s", 0.0)),
                reset=[int(gpu) for gpu in message.get("reset", ())],
            )
        elif kind == "order":
            self.pool.send_command(message["order"])
        elif kind == "peer":  # the peer's replicator was restarted at another address
            self.children.replicator.on_peer_moved(message["peer"])
        elif kind in ("flush", "flush_commit"):
            self.children.replicator.flush(message, host.newest_attempt)
        elif kind == "ping":
            host.send({"t": "pong", "id": message["id"], "mono_ns": time.monotonic_ns()})
        elif kind == "reload":
            host.spec = _read_spec(host.run_dir)
            self._failure = None
            self.children.reload()
        elif kind == "shutdown":
            host.request_exit(str(message.get("reason", "shutdown")))

    # ------------------------------------------------------------ messages of this host's processes

    def _on_message(self, peer: Connection, message: dict[str, Any]) -> None:
        kind = message.get("t")
        if peer is self.host.supervisor:
            self._from_supervisor(message)
        elif kind == "hello":
            self._on_hello(peer, message)
        elif isinstance(peer.identity, Worker):
            self.pool.handle(peer.identity, message)
        elif peer is self.host.fork_server:
            self._from_fork_server(message)
        elif kind == "warm":
            for standby in self.host.standbys.values():
                standby.warm = standby.warm or standby.peer is peer
            self._check_ready()
        elif kind == "unfit":
            self.pool.on_standby_lost(peer, unusable=True)

    def _from_fork_server(self, message: dict[str, Any]) -> None:
        if message.get("t") == "exited":
            self.pool.on_exit_code(int(message["pid"]), int(message["code"]))
        elif message.get("t") == "store":
            self._store = message["store"]
            self.host.send({"t": "store", "store": self._store})

    def _on_hello(self, peer: Connection, message: dict[str, Any]) -> None:
        pid = int(message["pid"])
        if message["role"] == "forkserver":
            self.host.fork_server, self._store = peer, message["store"]
            self.pool.on_children([int(child) for child in message.get("children", ())])
            self.children.on_fork_server(pid)
            self._check_ready()  # a dead one's standbys may still be usable
        elif "rank" in message:  # an adopted rank: its former agent died
            self.pool.adopt(pid, int(message["rank"]), int(message["attempt"]), peer)
            self.host.send(self._hello())
        else:
            standby = Standby(pid=pid, peer=peer, local_rank=int(message["local_rank"]), bound=bool(message["bound"]))
            self.host.standbys[pid] = standby
            self.pool.on_standby(pid)
            self.children.on_standby_ready(standby)
            if self._is_joining():
                self.hub.send(peer, {"t": "warm"})
            self._check_ready()

    def _check_ready(self) -> None:
        """Report to the supervisor once everything that a start needs is there; start what waited for it."""
        self.pool.assign_pending()
        if self._ready or not self.children.prepared or self.host.fork_server is None or not self.host.standbys:
            return
        if self._is_joining() and not self._is_warm():
            return
        self._ready = True
        self.host.send({"t": "ready", "store": self._store, "memory": self.children.memory_address})

    def _is_joining(self) -> bool:
        """Whether the run began without this host: the ranks that take steps need not wait for its warm-up."""
        return self.host.newest_attempt > 0 and self.host.attempt == 0 and not self._ready

    def _is_warm(self) -> bool:
        """Every standby is warm, or took too long."""
        if self._warm_by is None:
            self._warm_by = time.monotonic() + WARM_S
        standbys = self.host.standbys.values()
        return time.monotonic() > self._warm_by or (
            len(standbys) >= self.host.ranks_per_host and all(standby.warm for standby in standbys)
        )

    def _on_failure(self, failure: Mapping[str, Any]) -> None:
        """A child could not start; a supervisor that connects later is told too."""
        self._failure = failure
        self.host.send(failure)

    def _on_disconnect(self, peer: Connection, _reason: str) -> None:
        host = self.host
        if peer is host.supervisor:
            host.supervisor = None
            self.unsupervised.begin()
        elif peer is host.fork_server:
            host.fork_server, self._ready, self._store = None, False, None
            host.send({"t": "store_lost"})
            self.children.on_fork_server_lost()
            self.pool.on_fork_server_lost()
        elif isinstance(peer.identity, Worker):
            peer.identity.peer = None
        else:
            self.pool.on_standby_lost(peer)

    # ------------------------------------------------------------ flushes, and the end

    def _on_flush(self, answer: dict[str, Any], order: Mapping[str, Any]) -> None:
        """Forward the replicator's answer to where the order came from; an event once a checkpoint is committed."""
        host = self.host
        if answer["t"] == "flush_committed" and answer["ok"]:
            tier = "disk" if uris.is_local(str(order["uri"])) else "bucket"
            detail = {"tier": tier, "uri": answer["uri"], "bytes": answer["bytes"]}
            now = {"mono_ns": time.monotonic_ns(), "wall_ns": time.time_ns()}
            committed = {"attempt": max(host.newest_attempt, host.attempt), "step": answer["step"], "detail": detail}
            event = {"kind": "checkpoint.committed", **now, **committed}
            host.log.write_rank(event)
            host.send({"t": "event", "event": event})
        if order.get("alone"):
            self.unsupervised.on_flush(answer, order)
        else:
            host.send(answer)

    def _shutdown(self) -> None:
        """End everything this agent started and free the memory."""
        self.pool.shutdown()
        self.children.shutdown()
        self.host.log.write("agent.ended", {"reason": self.host.exit_reason or ""})
        self.hub.shutdown()
        shutil.rmtree(self.host.memory, ignore_errors=True)


def _read_spec(run_dir: Path) -> RunSpec:
    return RunSpec.model_validate_json((run_dir / "resolved.json").read_text())


def main() -> None:
    arguments = parse_arguments("Muster's agent (started by its watchdog)")
    variables = environment.current()
    metadata_url = variables.metadata_url or (None if arguments.no_metadata_server else METADATA_URL)
    try:
        agent = HostAgent(
            run_dir=arguments.run_dir, run_id=arguments.run_id, host=arguments.host, bind=arguments.bind,
            environ=environment.inherited(), hosts_here=arguments.hosts_here, metadata_url=metadata_url,
        )  # fmt: skip
        code = agent.run(watchdog=variables.watchdog_pid, ignore_term=variables.term_ignored)
    except MusterError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)


if __name__ == "__main__":
    main()
