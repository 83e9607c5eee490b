"""The agent's edge: reads what happens as events, carries out what was decided, and decides nothing itself."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from muster.agent.edge import lease
from muster.agent.edge.background import Background
from muster.agent.edge.children import FULL_S, Children, Ended, Output
from muster.agent.edge.home import HostHome
from muster.agent.edge.host_event_log import HostLog
from muster.agent.edge.snapshots import MemoryWatch, SnapshotStore
from muster.agent.evidence.assemble import assemble, cgroup_state, counters
from muster.agent.evidence.ras_query import ask
from muster.agent.hardware.kernel_log import KernelLog, list_hardware
from muster.agent.programs import fork_server, trackers
from muster.agent.programs.preparation import SETUP_DONE
from muster.agent.ranks.processes import MEMORY, Gone, Lock, RankProcesses
from muster.agent.ranks.setup_program import steps_of
from muster.agent.values import actions as do
from muster.agent.values import events as ev
from muster.agent.values.events import Event, PeerId
from muster.agent.values.host_identity import HostIdentity
from muster.config.spec import RunSpec
from muster.core import processes
from muster.core.errors import AccessError, MusterError
from muster.core.typed_json import Unreadable, decode
from muster.core.typed_json import encode as encode_record
from muster.protocol.codec import reader_of
from muster.protocol.fork_server import FROM_FORK_SERVER, ChildExited, ForkServerHello
from muster.protocol.hello import AgentHello
from muster.protocol.pipes import RunOver
from muster.protocol.rank_agent import FROM_RANK, HOST_GREETING, RankHello, StandbyHello
from muster.protocol.replicator_orders import ReplicatorRecord
from muster.protocol.to_agent import TO_AGENT
from muster.protocol.to_supervisor import FromAgent
from muster.protocol.version import OtherVersion
from muster.storage.home import open_home
from muster.transport.connections import Connection, ConnectionPool, Lost, PeerEvent, Ready, Received
from muster.transport.secure_session import run_token

#: In the host's folder in memory: the fork server's pid, and when it started in the kernel's ticks.
PID_FILE = "forkserver.pid"
_REPLICATOR_RECORD = "replicator.json"
#: At the end of the run trackers take ``trackers.main.END_S`` at most, and this is more.
TRACKERS_END_S = 10.0
_RANK, _SERVER = reader_of(FROM_RANK), reader_of(FROM_FORK_SERVER)


class Edge:
    """Owns everything of one agent that is not a value."""

    def __init__(self, identity: HostIdentity) -> None:
        self.identity = identity
        self.pool = ConnectionPool(
            token=run_token(identity.run_dir), greeting=reader_of(HOST_GREETING),
            channels={RankHello: _RANK, StandbyHello: _RANK, ForkServerHello: _SERVER},
        )  # fmt: skip
        self.memory = MemoryWatch(identity=identity, pool=self.pool)
        self.memory.listen()
        home = open_home(identity.run_dir)
        self.log = HostLog(home=home, run_id=identity.run_id, host=identity.host, pod=identity.pod)
        self.home = HostHome(home)
        self.children = Children(self.pool, identity)
        self.processes = RankProcesses(self.pool, identity.memory)
        self.snapshots = SnapshotStore(memory=identity.memory, host=identity.host)
        self.kernel_log = KernelLog(self.pool)
        self.background = Background(self.pool)
        self._peers: dict[PeerId, Connection] = {}
        self._supervisor: Connection | None = None
        self._lease: tuple[int, int, int] | None = None
        """The lease's file when it was last read."""
        self._oom_kills = cgroup_state(os.getpid()).oom_kills or 0

    # ------------------------------------------------------------ events

    def start(self, *, watchdog: int | None, ignore_term: bool) -> None:
        """SIGTERM and SIGINT are notices; ``ignore_term``: SIGTERM is ignored, the supervisor handles it (Slurm)."""
        self.pool.wake_on_signals()
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._on_signal)
        if ignore_term:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # inherited by all children of this process
        if watchdog:
            try:
                self.pool.watch(os.pidfd_open(watchdog), ev.WatchdogGone())
            except ProcessLookupError:
                self.background.post(ev.WatchdogGone())
        self.home.start(self.log.writer)

    def _on_signal(self, number: int, _frame: object) -> None:
        self.background.post(ev.Noticed(signal.Signals(number).name))

    def poll(self, wait_s: float) -> Iterator[Event]:
        """Each event is to be handled before the next one is read."""
        if self.children.has_pending:
            wait_s = min(wait_s, FULL_S)
        for event in self.pool.poll(wait_s):
            yield from self._of_pool(event)
        self.children.flush()
        yield from self.home.watch(supervised=self._supervisor is not None)

    def _of_pool(self, event: PeerEvent) -> Iterator[Event]:
        match event:
            case Received(peer=peer, message=message):
                yield from self._received(peer, message)
            case Lost(peer=peer):
                yield from self._forget(peer)
            case Ready(token=Gone(pid=pid) as token):
                yield from self._drained(pid)
                yield from self.processes.gone(token)
            case Ready(token=Lock(pid=pid) as token):
                yield from self._drained(pid)
                yield from self.processes.woken(token)
            case Ready(token=Output() as token):
                yield from self.children.on_output(token)
            case Ready(token=Ended() as token):
                yield from self.children.on_ended(token)
            case Ready(token=KernelLog()):
                yield from self.kernel_log.read()
            case Ready(token=Background()):
                for result in self.background.results():
                    yield self._connected(result) if isinstance(result, socket.socket) else result
            case Ready(token=ev.WatchdogGone() as gone):
                yield gone

    def _received(self, peer: Connection, message: Any) -> Iterator[Event]:
        if peer is self._supervisor:
            yield ev.SupervisorMessage(message)
        elif isinstance(message, RankHello | StandbyHello | ForkServerHello):
            peer.identity = message.pid
            yield ev.Greeted(self._number(peer), message)
        elif peer.read is _SERVER:
            tail = self.processes.tail(message.pid, message.code) if isinstance(message, ChildExited) else ""
            yield ev.ForkServerMessage(message, tail)
        else:
            assert isinstance(peer.identity, int)
            self.processes.heard(peer.identity)
            yield ev.RankMessage(self._number(peer), message)

    def _number(self, peer: Connection) -> PeerId:
        self._peers[peer.number] = peer
        return peer.number

    def _forget(self, peer: Connection) -> Iterator[Event]:
        """It is closed. One that has said nothing is unknown."""
        if peer is self._supervisor:
            self._supervisor = None
        if self._peers.pop(peer.number, None) is not None:
            yield ev.PeerLost(peer.number)

    def _drained(self, pid: int) -> Iterator[Event]:
        """What a process that ends has sent: its last messages may still be in the socket."""
        for peer in [peer for peer in self._peers.values() if peer.identity == pid]:
            for event in self.pool.drain(peer):
                yield from self._of_pool(event)

    def _connected(self, sock: socket.socket) -> Event:
        try:
            self._supervisor = self.pool.adopt(sock, server=False)
        except OSError:
            sock.close()
            return ev.SupervisorUnreachable()
        self._supervisor.expect(reader_of(TO_AGENT))
        return ev.SupervisorConnected(self._number(self._supervisor))

    # ------------------------------------------------------------ actions

    def carry_out(self, action: do.Action) -> Iterator[Event]:
        """Its answers."""
        match action:
            case _ if isinstance(action, do.ConnectionAction):
                yield from self._of_connections(action)
            case _ if isinstance(action, do.ProcessAction):
                yield from self._of_processes(action)
            case _ if isinstance(action, do.ProgramAction):
                yield from self._of_programs(action)
            case _ if isinstance(action, do.FileAction):
                yield from self._of_files(action)
            case _:
                yield from self._of_hardware(action)

    def _of_connections(self, action: do.ConnectionAction) -> Iterator[Event]:
        match action:
            case do.SendTo():
                if (peer := self._peers.get(action.peer)) is not None:
                    self.pool.send(peer, action.message)
            case do.ReportSnapshots():
                self._report(replace(action.message, snapshots=self.snapshots.held()))
            case do.Connect():
                self.background.connect(action.address)
            case do.Disconnect():
                if self._supervisor is not None:
                    self.pool.close(self._supervisor)
                    yield from self._forget(self._supervisor)

    def _of_processes(self, action: do.ProcessAction) -> Iterator[Event]:
        match action:
            case do.WatchProcess():
                yield from self.processes.watch(action.pid, action.log)
            case do.Kill():
                yield from self.processes.kill(action.pid)
            case do.Look():
                yield from self.processes.look(action.pid)
            case do.FindForkServer():
                yield self._find_fork_server()
            case do.RecordForkServer():
                if (started := processes.look(action.pid)) is not None:
                    with contextlib.suppress(OSError):  # a full memory: a successor of this agent starts another one
                        self.identity.memory.replace(PID_FILE, f"{started.pid} {started.start_ticks}".encode())

    def _of_programs(self, action: do.ProgramAction) -> Iterator[Event]:
        match action:
            case do.StartProgram():
                yield from self.children.start(action.program)
            case do.StopProgram():
                yield from self.children.stop(action)
            case do.WriteProgram():
                if not action.unless or not self.identity.memory.exists(action.unless):
                    self.children.write(action)
            case do.FinishTrackers():
                yield from self.children.finish(trackers.NAME, RunOver(outcome=action.outcome), TRACKERS_END_S)

    def _of_files(self, action: do.FileAction) -> Iterator[Event]:
        match action:
            case do.OpenLog():
                self.log.open(action.attempt)
            case do.Log():
                self.log.write(action.kind, action.detail, **({} if action.rank is None else {"rank": action.rank}))
            case do.LogRankEvent():
                yield from self._log_event(action)
            case do.PrepareState():
                yield self._prepare(action)
            case do.DropCopies():
                self.snapshots.drop(action.copies)
            case do.StateStepped():
                self.snapshots.on_step(action.attempt)
            case do.ListSnapshots():
                yield ev.SnapshotsListed(self.snapshots.held(), action.refusal)
            case do.ReadLease():
                yield self._read_lease()
            case do.CheckMemory():
                yield self.memory.check()
            case do.CheckSetup():
                yield self._find_setup(action.spec)
            case do.WriteReplicatorRecord():
                with contextlib.suppress(OSError):
                    self.identity.memory.replace(_REPLICATOR_RECORD, encode_record(action.record))
            case do.FetchRunFile():
                if self.home.is_folder:
                    yield ev.RunFileRead(self.identity.read_spec())
                else:
                    self.background.run("home-fetch", self._fetch_run_file)

    def _of_hardware(self, action: do.HardwareAction) -> Iterator[Event]:
        match action:
            case do.ListHardware():
                yield list_hardware(self.identity.environ)
            case do.OpenKernelLog():
                yield from self.kernel_log.open()
            case do.ReadCounters():
                memory = processes.host_memory(MEMORY)
                yield ev.CountersRead(action.step, action.attempt, counters(action.pids), memory)
            case do.ReadOomKills():
                kills = cgroup_state(os.getpid()).oom_kills or 0  # the ranks' group is the agent's own
                new, self._oom_kills = max(0, kills - self._oom_kills), kills
                yield ev.OomKills(action.exit, new)
            case do.AskRas():
                self.background.run("ras", lambda: ev.RasAnswered(*ask(self.identity.environ, action.limit_s)))
            case do.ReportEvidence():
                self._report(assemble(action, self.identity.host))

    def _report(self, message: FromAgent | AgentHello) -> None:
        if self._supervisor is not None:
            self.pool.send(self._supervisor, message)

    def _log_event(self, action: do.LogRankEvent) -> Iterator[Event]:
        try:
            if self.log.write_rank(action.event):
                yield ev.EventLogged(action.event)
        except ValueError as error:
            if action.peer is None:
                raise
            yield ev.EventRefused(action.peer, str(error))
            if (peer := self._peers.pop(action.peer, None)) is not None:
                self.pool.close(peer)

    def _prepare(self, action: do.PrepareState) -> Event:
        attempt = action.order.attempt
        try:
            self.log.open(attempt)
            # Without a shared folder the supervisor's run folder may have another path than this host's.
            here = tuple(replace(one, run_dir=str(self.identity.run_dir)) for one in action.order.contexts)
            return self.snapshots.prepare(replace(action.order, contexts=here), action.spec)
        except (OSError, MusterError) as error:
            return ev.StateNotPrepared(attempt, str(error) or type(error).__name__)

    def _read_lease(self) -> Event:
        run_dir, me = self.identity.run_dir, self.identity.host
        before, self._lease = self._lease, lease.lease_file(run_dir)
        is_changed = self._lease is None or self._lease != before
        try:
            record = lease.read(run_dir, me=me)
        except OtherVersion as error:
            return ev.LeaseRead(None, is_changed, False, refusal=str(error))
        address = record.address if record is not None else None
        return ev.LeaseRead(address, is_changed, is_released=record is not None and address is None)

    def _find_setup(self, spec: RunSpec) -> Event:
        memory, digest = self.identity.memory, _digest(spec) if steps_of(spec) else ""
        is_done = bool(digest) and memory.exists(SETUP_DONE) and memory.read(SETUP_DONE) == digest.encode()
        return ev.SetupFound(digest, is_done)

    def _find_fork_server(self) -> Event:
        """By the record that a dead agent left: pids are used again."""
        memory = self.identity.memory
        follows = memory.exists(PID_FILE)
        try:
            pid, ticks = (int(word) for word in memory.read(PID_FILE).split())
            found = processes.look(pid)
            is_ours = os.stat(f"/proc/{pid}").st_uid == os.geteuid()
            if is_ours and found is not None and found.start_ticks == ticks and fork_server.MODULE in found.argv:
                self.children.adopt(do.Program(fork_server.NAME, (fork_server.MODULE,)), pid)
                return ev.ForkServerFound(pid, follows)
        except (OSError, ValueError, AccessError):
            pass
        return ev.ForkServerFound(None, follows)

    def replicator_record(self) -> ReplicatorRecord:
        """The orders of a dead agent's replicator."""
        try:
            return decode(ReplicatorRecord, self.identity.memory.read(_REPLICATOR_RECORD))
        except (OSError, AccessError, Unreadable):
            return ReplicatorRecord(port=0)

    def _fetch_run_file(self) -> Event:
        self.home.fetch(self.background)
        return ev.RunFileRead(self.identity.read_spec())

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        """Everything that this agent started was ended before: wait for it, ship the rest, free the memory."""
        self.kernel_log.close()
        self.children.wait()
        self.pool.shutdown()
        self.log.close()
        self.home.stop()
        with contextlib.suppress(OSError):
            self.identity.memory.remove()


def _digest(spec: RunSpec) -> str:
    """Of what a setup runs, and in which code."""
    script = b""
    if isinstance(spec.setup, str):
        with contextlib.suppress(OSError):
            script = (Path(spec.workdir or "/") / spec.setup).read_bytes()
    words = json.dumps([spec.setup, spec.workdir]).encode()
    return hashlib.sha256(words + script).hexdigest()
