"""Virtual hosts for the real state machine: function calls instead of sockets.

It drives the real ``RecoveryStateMachine``. A host answers its messages as an agent would (``agent_model``), after
stage times drawn from a profile; a fault is a function of the cluster at a time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from muster.core.layout import Layout
from muster.core.types import Checksum, Topology
from muster.protocol.to_agent import (
    CommitFlushed,
    DropCopies,
    EndAttempt,
    FlushedFile,
    FlushSnapshots,
    PeerMoved,
    StartAttempt,
    ToAgent,
)
from muster.protocol.to_supervisor import FlushCommitted, HostNotice, RankExit, SnapshotsFlushed
from muster.protocol.values import CommandRanks, LastWords, RankEvent
from muster.simulate.host_time import Report, VirtualHost
from muster.simulate.stepping_hosts import SteppingHosts
from muster.supervise.recovery.inputs import (
    SECOND_NS,
    Effect,
    End,
    FromHost,
    HostDown,
    HostUp,
    Input,
    Log,
    Send,
    Tick,
)
from muster.supervise.recovery.phases import Ended
from muster.supervise.recovery.state_machine import RecoveryStateMachine

#: Of files that no virtual host writes.
_CHECKSUM = Checksum(value="0" * 16)


@dataclass
class Cluster(SteppingHosts):
    """Hosts, a clock and the state machine. ``run`` simulates until the run ends or ``until_s`` is reached."""

    on_log: Callable[[Log], None] = field(default=lambda log: None)
    on_end: Callable[[End], bool] = field(default=lambda end: False)
    """True: the run is started again (``resume``); False: the simulation is over."""
    log: list[tuple[float, Log]] = field(default_factory=list)
    """(seconds, Log) of everything that the state machine logged."""
    written: list[tuple[str, RankEvent]] = field(default_factory=list)
    """(host, event) of what the hosts wrote into their own logs."""
    result: End | None = None
    dies_at_send: bool = False
    """The supervisor is killed before it sends its next message."""
    supervised: bool = True
    _tick_ns: int | None = None
    _written_step: int = 0
    _inputs: int = 0
    _inbox: deque[Input] = field(default_factory=deque)
    _acting: bool = False
    """The effects of an input are being carried out: the next one is handled after them."""

    def run(self, until_s: float = 1e9) -> End | None:
        """Simulate; return how the run ended, or None when the time was up."""
        self._effects(self.machine.start(self.now_ns))
        for index, name in enumerate(self.names):
            self.hosts[name] = VirtualHost(name=name, place=self.places.get(name, Topology()))
            self.after(self.stages.agent_start_s + index * 1e-6, lambda name=name: self.join(name))  # type: ignore[misc]
        until_ns = round(until_s * SECOND_NS)
        while self.result is None and self._queue:
            if self._queue[0][0] > until_ns:
                self._advance(until_ns)
                break
            at_ns, _, act = heapq.heappop(self._queue)
            self._advance(at_ns)
            act()
        self._close()
        return self.result

    # ------------------------------------------------------------ faults, for callers

    def kill_rank(
        self, rank: int, *, code: int = -9, last: LastWords | None = None, detect_s: float | None = None
    ) -> bool:
        """A rank's process dies; its host's agent sees it. False: no host runs that rank now."""
        host = self.running(rank)
        if host is None:
            return False
        self.settle_steps()
        host.dead.add(rank)
        detect_s = self.stages.detect_exit_s if detect_s is None else detect_s
        self.break_world(host, self.exit_of(host, rank, code, last), detect_s)
        return True

    def kill_host(self, name: str, *, silent: bool = False, detect_s: float | None = None) -> None:
        """All processes of a host die (connections close), or it goes silent (a cut link, a stopped host)."""
        host = self.hosts[name]
        if not host.up:
            return
        self.settle_steps()
        if host.ranks:
            self.halt("detect")
        host.up = host.joined = host.linked = False
        host.forget()
        host.boots = boots = host.boots + 1
        reason = "silent" if silent else "all its connections closed"
        delay = self.stages.detect_silence_s if silent else self.stages.detect_exit_s
        self.after(delay if detect_s is None else detect_s, lambda: self._down(name, reason, boots))

    def return_host(self, name: str) -> None:
        """A repaired host's agent starts; a name not seen before is a new machine."""
        host = self.hosts.get(name)
        if host is None:
            host = self.hosts[name] = VirtualHost(
                name=name, place=self.places.get(name, Topology()), up=False, held_since_ns=None
            )
        if host.up:
            return
        host.up, host.joined, host.attempt = True, False, 0
        if host.held_since_ns is None:
            host.held_since_ns = self.now_ns
        boots = host.boots
        self.after(self.draw("agent_start", self.stages.agent_start_s), lambda: self.join(name, boots=boots))

    def receive_from(self, host: VirtualHost, message: Report) -> None:
        """Without a supervisor an agent keeps reports of exits, and acts on a notice itself."""
        if not host.up:
            return
        match message:
            case RankEvent():
                self._write(host, message)
            case RankExit() if message.attempt == host.attempt:
                host.exits[message.rank] = message
                exited = self.event("rank.exited", host.attempt, None, {"exit_code": message.code}, rank=message.rank)
                self._write(host, exited)
        if host.linked:
            self.give(FromHost(host=host.name, message=message))
        elif isinstance(message, HostNotice) and host.ranks:  # its ranks save and exit, and all others with them
            handle_command(self, CommandRanks(kind="stop", exit_code=75))
        elif isinstance(message, HostNotice):
            self.kill_host(host.name)

    def _write(self, host: VirtualHost, event: RankEvent) -> None:
        self.written.append((host.name, event))
        if event.kind == "step":
            self._written_step = event.step or 0
            host.step = max(host.step, self._written_step)

    def report_newest_step(self) -> None:
        """Report the newest step. Hosts report every step; here it is enough before their logs are read."""
        self.settle_steps()
        if self._step > self._written_step:
            self._report_step(self.machine.state.attempt)

    def lose_supervisor(self) -> None:
        """It is killed. Reports are not received until there is another; hosts continue with what they were sent."""
        self.supervised = self.dies_at_send = False
        for host in self.hosts.values():
            host.linked = False

    def replace_supervisor(self, machine: RecoveryStateMachine, *, apart_s: float = 0.0) -> None:
        """It died; another one takes over from the log. Hosts connect to it ``apart_s`` after each other."""
        self.lose_supervisor()
        self.start_supervisor(machine)
        for index, host in enumerate(list(self.hosts.values())):
            if host.up and apart_s:
                self.after(index * apart_s, lambda name=host.name, boots=host.boots: self.join(name, boots=boots))  # type: ignore[misc]
            elif host.up:
                self.join(host.name)

    def start_supervisor(self, machine: RecoveryStateMachine) -> None:
        """From now on this supervisor acts."""
        self.supervised, self.machine, self._tick_ns = True, machine, None
        self._effects(machine.start(self.now_ns))

    def resume(self, machine: RecoveryStateMachine) -> None:
        """The run had ended and is started again, on agents of its own: only the disk tier remembers."""
        self._job, self._world_size = "start", 0
        for host in self.hosts.values():
            host.forget()
            host.attempt, host.joined, host.linked, host.boots = 0, False, True, host.boots + 1
        self.start_supervisor(machine)
        for name, host in self.hosts.items():
            if host.up:
                self.after(self.draw("agent_start", self.stages.agent_start_s), lambda name=name: self.join(name))  # type: ignore[misc]

    def join(self, name: str, *, boots: int | None = None) -> None:
        """An agent connects (not one of an earlier boot): its hello, then earlier exits, and a rank that hangs."""
        host = self.hosts[name]
        if not host.up or boots not in (None, host.boots):
            return
        host.joined = True
        if host.ranks:
            self.report_newest_step()
        host.linked = self.supervised
        self.give(HostUp(host=name, hello=host.hello()))
        for message in list(host.exits.values()):
            self.give(FromHost(host=name, message=message))
        if (hung := host.hung) is not None:
            self.after(self.stages.detect_exit_s, lambda: self.receive_from(host, hung))
        if 0 in host.ranks and self.stepping:  # a new supervisor is sent the next step
            self.after(self.step_s, lambda segment=self._segment: self._report_step_of(segment, host.attempt))  # type: ignore[misc]

    def give(self, given: Input) -> None:
        """The supervisor is given an input, and handles it once it has carried out what earlier ones made of it."""
        self._inbox.append(given)
        if self._acting:
            return
        self._acting = True
        while self._inbox:
            given = self._inbox.popleft()
            if self.result is None and self.supervised:
                self._inputs += 1
                self._effects(self.machine.handle(given, self.now_ns))
        self._acting = False

    def _down(self, name: str, reason: str, boots: int) -> None:
        if self.hosts[name].boots == boots and not self.hosts[name].joined:
            self.give(HostDown(host=name, reason=reason))

    def break_world(self, host: VirtualHost, message: Report, detect_s: float) -> None:
        """No rank steps any more; the message with the cause comes ``detect_s`` later."""
        self.halt("detect")
        self.receive_later(detect_s, host, message)

    def _effects(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Log):
                self.log.append((self.now_s, effect))
                self.on_log(effect)
            elif isinstance(effect, Send):
                if self.dies_at_send and not isinstance(self.machine.state.phase, Ended):
                    self.lose_supervisor()
                    return
                handle_message(self, effect.host, effect.message)
            elif self.on_end(effect):
                self.halt("stopped")
                self._job = "stopped"
            else:
                self.result = effect
        deadline = self.machine.deadline_ns
        if deadline is not None and deadline != self._tick_ns:
            self._tick_ns = deadline
            self.at(deadline / SECOND_NS, lambda: self._tick(deadline))

    def _tick(self, deadline: int) -> None:
        if self.machine.deadline_ns == deadline:
            self.now_ns = max(self.now_ns, deadline)
            self.give(Tick())


def handle_message(cluster: SteppingHosts, name: str, message: ToAgent) -> None:
    """A message of the supervisor reaches a host, if that is up and linked."""
    host = cluster.hosts.get(name)
    if host is None or not host.up or not host.linked:
        return
    match message:
        case StartAttempt() if message.attempt > host.attempt:
            host.begin(message.attempt, [context.rank for context in message.contexts])
            host.copies_to = message.peer[0] if message.peer is not None else None
            host.starts_from = tuple(fetch.copy for fetch in message.fetch)
            cluster.maybe_begin(message)
        case PeerMoved():
            host.copies_to = message.peer[0]
        case EndAttempt():
            cluster.end_ranks(host, message)
        case CommandRanks():
            handle_command(cluster, message)
        case FlushSnapshots():
            flush(cluster, host, message)
        case CommitFlushed():
            commit_flushed(cluster, host, message)
        case DropCopies():
            host.drop(message.copies)


def handle_command(cluster: SteppingHosts, command: CommandRanks) -> None:
    """Save and exit (or only exit) after the current step; ranks that hang in their save do neither."""
    if not cluster.stepping:
        return
    if not cluster.ranks_obey:
        cluster.halt("detect")
        return
    cluster.leave_after_step(command.exit_code, save=command.save)


def flush(cluster: SteppingHosts, host: VirtualHost, order: FlushSnapshots) -> None:
    """Write the requested shards, if this host holds them, they are intact and the disk takes them."""
    copies = [shard.copy for shard in order.ranks]
    rotten = tuple(copy for copy in copies if copy in host.rotten)
    failure = None
    if not all(host.holds(copy) for copy in copies):
        failure = "no longer held"
    elif rotten:
        failure = f"the snapshot of rank {rotten[0].rank} is not intact"
    elif not cluster.disk_takes:
        failure = "no space left on device"
    files = () if failure else tuple(
        FlushedFile(rank=shard.rank, name=f"rank-{shard.rank}", bytes=1, checksum=_CHECKSUM, data_offset=0)
        for shard in order.ranks
    )  # fmt: skip
    answer = SnapshotsFlushed(step=order.step, attempt=order.attempt, files=files, failure=failure, rejected=rotten)
    cluster.receive_later(cluster.draw("flush", cluster.stages.flush_s), host, answer)


def commit_flushed(cluster: SteppingHosts, host: VirtualHost, order: CommitFlushed) -> None:
    """Put the marker, if every rank's shard was written once."""
    whole = sorted(file.rank for file in order.files) == list(range(Layout.from_key(order.layout).world_size))
    if not whole:
        answer = FlushCommitted(step=order.step, attempt=order.attempt, failure="a shard is missing")
    else:
        answer = FlushCommitted(step=order.step, attempt=order.attempt, uri=order.uri, bytes=1)
        cluster.report_checkpoint(host, order.step, order.attempt, order.uri)
    cluster.receive_from(host, answer)
