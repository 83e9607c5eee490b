"""The agent's loop: one selector over the supervisor, the fork server, the ranks and their exits.

It never waits for a disk, a bucket or a peer (the replicator does that) and never imports torch. Its state can be
rebuilt: a restarted agent listens on the same socket file, its fork server and ranks reconnect, and the snapshots are
still in memory.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time

from muster.agent.evidence.gatherer import EvidenceGatherer
from muster.agent.fork_server_process import ForkServer
from muster.agent.hardware.host_check import HostCheck
from muster.agent.hardware.usage import UsageMeter
from muster.agent.heartbeat import supervisor_address
from muster.agent.host_event_log import HostLog, committed_event
from muster.agent.host_home import HostHome
from muster.agent.host_identity import HostIdentity
from muster.agent.kernel_log_follower import KernelLogFollower
from muster.agent.memory_watch import MemoryWatch, memory_lost
from muster.agent.preemption import Preemption
from muster.agent.programs import Programs
from muster.agent.rank_pool import RankPool
from muster.agent.ranks.pool_calls import Forks, Snapshots
from muster.agent.ranks.rank_process import Worker, on_exit
from muster.agent.readiness import Readiness
from muster.agent.replicator_process import FlushAnswer, ReplicatorProcess
from muster.agent.snapshot_store import SnapshotStore
from muster.agent.supervisor_link import SupervisorLink
from muster.agent.unsupervised_host import UnsupervisedHost
from muster.agent.watchdog import parse_arguments
from muster.core import environment, processes, typed_json
from muster.core.errors import MusterError
from muster.protocol import to_agent, to_supervisor
from muster.protocol.codec import reader_of
from muster.protocol.exit_codes import UNSUPERVISED
from muster.protocol.fork_server import ForkServerHello
from muster.protocol.hello import AgentHello, Refused
from muster.protocol.rank_agent import HOST_GREETING, TO_RANK, HostGreeting, RankHello, StandbyHello, WarmUp
from muster.protocol.replicator_orders import FlushOrder
from muster.protocol.values import Address, CommandRanks, RankEvent
from muster.protocol.version import MINE, OtherVersion
from muster.storage.home import open_home
from muster.transport.connections import Connection, ConnectionPool
from muster.transport.secure_session import run_token

#: A restarted agent listens for this long to its predecessor's ranks before it answers a supervisor (they try to
#: reconnect every 0.1 s), and while some that live are missing, which a busy host delays, for so much longer at most.
ADOPTION_S, MISSING_S = 0.5, 3.0
SEARCH_S = 0.1  # how often a supervisor is looked for while none is connected


class HostAgent:
    """One host of one run: makes the parts, gives each what it needs, and passes on what one of them reports."""

    def __init__(self, identity: HostIdentity) -> None:
        self.identity = identity
        self.spec = identity.read_spec()
        self.newest_attempt = 0  # that a supervisor named: a flush is committed in its name
        self.exit_reason: str | None = None  # set once this agent is to exit
        self.exit_code, self._refusal, self._contact_after = 0, "", time.monotonic()
        self.hub = ConnectionPool(
            token=run_token(identity.run_dir),
            on_accept=lambda peer: peer.expect(reader_of(HOST_GREETING), self._on_hello),
            on_gone=self._on_disconnect,
        )
        self.memory_watch = MemoryWatch(
            identity=identity,
            hub=self.hub,
            on_renewed=self._on_memory_renewed,
            on_unreachable=lambda: self.replicator.restart(),
            on_note=lambda text: self.log.note(text),
        )
        self.memory_watch.listen()
        home, boot = open_home(identity.run_dir), processes.boot_id()
        self.log = HostLog(home=home, run_id=identity.run_id, host=identity.host, pod=identity.pod)
        self.home = HostHome(home=home, hub=self.hub, on_note=self.log.note)
        self._make_parts()
        self.log.write("agent.started", {"pid": os.getpid(), "ranks": self.pool.ranks_per_host, "boot_id": boot})

    def _make_parts(self) -> None:
        identity, hub, log = self.identity, self.hub, self.log
        self.link = SupervisorLink(
            hub=hub, identity=identity, hello=self._hello, on_message=self._from_supervisor, on_refused=self._on_refused
        )
        self.replicator = ReplicatorProcess(
            identity=identity, hub=hub, limit_s=lambda: self.spec.recovery.timing.replicator_stopped_after_s,
            is_ending=lambda: self.exit_reason is not None, on_flush=self._on_flush,
            on_moved=self._on_replicator_moved, on_note=log.note,
            on_rejected=lambda found: self.link.send(self.snapshots.rejected(found)),
        )  # fmt: skip
        self.snapshots = SnapshotStore(
            memory=lambda: identity.memory.folder, host=identity.host, takes_snapshots=self._takes_snapshots,
            copy_to=self.replicator.copy_to, fetch=self.replicator.fetch, forget_fetches=self.replicator.forget_fetches,
        )  # fmt: skip
        self.programs = Programs(
            identity=identity, hub=hub, log=log, spec=lambda: self.spec,
            exit_reason=lambda: self.exit_reason, on_prepared=self._check_ready, on_set_up=self._on_set_up,
            living=lambda: self.pool.living(), tell=self._tell,
            on_failure=lambda failure: self.link.keep("data", failure),
            on_notice=lambda source: self.preemption.on_notice(source), on_progress=self.link.send,
        )  # fmt: skip
        self.fork_server = ForkServer(
            identity=identity, hub=hub, spec=lambda: self.spec, is_ending=lambda: self.exit_reason is not None,
            on_failure=lambda failure: self.link.keep("fork server", failure), on_note=log.note,
            on_exited=lambda pid, code: self.pool.on_exit_code(pid, code), on_store=self.link.send,
            on_stopped=lambda pid: self.pool.on_stopped(pid),
        )  # fmt: skip
        self.readiness = Readiness(
            has_all=lambda: (
                self.programs.prepared and self.fork_server.connected and len(self.pool.standbys) > 0
                and self.host_check.over
            ),
            is_joining=self._is_joining, is_warm=lambda: self.pool.is_warm(), on_ready=self._on_ready,
        )  # fmt: skip
        self._make_pool()

    def _make_pool(self) -> None:
        identity, hub, log = self.identity, self.hub, self.log
        self.pool = RankPool(
            identity=identity, hub=hub, log=log, spec=lambda: self.spec, on_warm=self._check_ready,
            send=lambda told: self.evidence.report(told), is_supervised=lambda: self.link.connected,
            is_prepared=lambda: self.programs.prepared,
            forks=Forks(
                spawn=self.fork_server.spawn, reaps=self.fork_server.reaps,
                opens_contexts=lambda: self.fork_server.opens_contexts,
                give_up_contexts=self.fork_server.give_up_contexts, order_store=self.fork_server.order_store,
            ),
            snapshots=Snapshots(
                begin=self.snapshots.begin, held=self.snapshots.held, drop=self.snapshots.drop,
                on_ready=self.replicator.copy, on_step=self.snapshots.on_step,
            ),
        )  # fmt: skip
        self.kernel_log = KernelLogFollower(
            identity=identity, hub=hub, log=log, spec=lambda: self.spec, living=self.pool.living, send=self.link.send,
            resets=lambda: self.pool.gpu_reset.ended, start_program=identity.start_program,
        )  # fmt: skip
        self.link.fault = self.kernel_log.standing
        self.host_check = HostCheck(
            start_program=identity.start_program, environ=identity.environ, alone=identity.hosts_here == 1, hub=hub,
            spec=lambda: self.spec, send=self.link.send, is_supervised=lambda: self.link.connected,
            on_over=self._on_checked,
        )  # fmt: skip
        self.evidence = EvidenceGatherer(
            hub=hub, host=identity.host, living=self.pool.living, send=self.link.send,
            findings=self.kernel_log.since, environ=identity.environ,
        )  # fmt: skip
        self.usage = UsageMeter(
            hub=hub, living=self.pool.living, tell=self._tell, hosts=lambda: self.spec.resources.hosts,
            environ=identity.environ,
        )  # fmt: skip
        self.preemption = Preemption(
            spec=lambda: self.spec, has_ranks=lambda: bool(self.pool.workers),
            is_supervised=lambda: self.link.connected, send=self.link.send, command=self.pool.send_command,
            on_exit=self.request_exit,
        )  # fmt: skip
        self.unsupervised = UnsupervisedHost(
            identity=identity, spec=lambda: self.spec, is_working=lambda: bool(self.pool.living()),
            held=self.snapshots.held, on_note=log.note, on_exit=self._leave_unsupervised,
            flush=lambda order: self.replicator.flush(order, fence=self._fence(), alone=True),
        )  # fmt: skip

    def _takes_snapshots(self) -> bool:
        return bool(self.spec.checkpoint.snapshot_every_steps)

    def _fence(self) -> int:
        """The newest attempt that this host knows of."""
        return max(self.newest_attempt, self.pool.attempt)

    def request_exit(self, reason: str) -> None:
        """Exit once the messages at hand are answered."""
        self.exit_reason = self.exit_reason or reason

    def _leave_unsupervised(self, reason: str) -> None:
        self.exit_code = UNSUPERVISED
        self.request_exit(reason)

    # ------------------------------------------------------------ the loop

    def run(self, *, watchdog: int | None, ignore_term: bool) -> int:
        """Serve until the supervisor ends the host, or the wait for one is over. ``watchdog``: exit with this pid."""
        self.hub.wake_on_signals()
        self.preemption.take_signals(ignore_term=ignore_term)
        if watchdog:
            on_exit(self.hub, watchdog, lambda: self.request_exit("the watchdog is gone"))
        self._start()
        mine = (
            self.memory_watch, self.link, self.preemption, self.programs, self.pool, self.evidence, self.replicator,
            self.host_check, self.fork_server,
        )  # fmt: skip
        while self.exit_reason is None:
            search_s = math.inf if self.link.connected else time.monotonic() + SEARCH_S
            due_s = min(search_s, self.readiness.due_s(), *(part.due_s() for part in mine))
            self.hub.run_once(max(0.0, due_s - time.monotonic()))
            for part in (*mine, self.usage):
                part.watch()
            if not self.link.connected:
                self._find_supervisor()
            self.home.watch(self.link.connected)
            if time.monotonic() >= self.readiness.due_s():
                self._check_ready()
        self._shutdown()
        return self.exit_code

    def _start(self) -> None:
        self.home.start(self.log.writer)
        for part in (self.kernel_log, self.programs, self.replicator):  # the last is waited for: ranks' imports go on
            part.start()
        self._contact_after = time.monotonic() + ADOPTION_S * self.fork_server.follows  # from when they are listened to
        typed_json.prepare(*to_agent.TO_AGENT.messages, *to_supervisor.FROM_AGENT.messages, *TO_RANK.messages)

    def _on_set_up(self) -> None:
        """What ranks import is there: the fork server starts, the first time."""
        if self.fork_server.started:
            return
        if self.fork_server.start():
            self.host_check.begin()
        if self.fork_server.follows:
            self._contact_after = time.monotonic() + ADOPTION_S

    # ------------------------------------------------------------ supervisor

    def _find_supervisor(self) -> None:
        if time.monotonic() < self._contact_after + (MISSING_S if self.pool.orphans.silent else 0.0):
            return  # a predecessor's ranks are still reconnecting: report when all are here
        if not self.link.connect():
            self.unsupervised.watch()
            return
        self.pool.on_reconnect()
        for report in self.pool.exits.values():
            self.link.send(report)

    def _on_refused(self, reason: str) -> None:
        """The supervisor is of another version: this host has none. Without ranks and snapshots it exits at once."""
        if self.pool.workers or self.snapshots.held():
            if reason != self._refusal:
                self.log.note(reason)
        else:
            print(f"error: {reason}", file=sys.stderr)
            self.exit_code = OtherVersion.exit_code
            self.request_exit(reason)
        self._refusal = reason

    def _hello(self) -> AgentHello:
        return AgentHello(
            version=MINE, host=self.identity.host, pid=os.getpid(), attempt=self.pool.attempt,
            alive={worker.rank: worker.pid for worker in self.pool.living()}, step=self.pool.step,
            exited=tuple(sorted(self.pool.exits)), ready=self.readiness.is_ready, store=self.fork_server.store,
            memory=self._memory_address(), snapshots=self.snapshots.held(), place=self.identity.place,
        )  # fmt: skip

    def _memory_address(self) -> Address | None:
        """Where other hosts fetch this one's snapshots; None where it holds none."""
        return self.replicator.address if self._takes_snapshots() else None

    def _from_supervisor(self, message: to_agent.ToAgent) -> None:
        if isinstance(message, to_agent.Welcome | to_agent.StartAttempt | to_agent.EndAttempt):
            self.newest_attempt = max(self.newest_attempt, message.attempt)
        match message:
            case to_agent.StartAttempt():
                self.memory_watch.check()  # its state may be fetched into that folder
                self.programs.on_start()
                self.pool.start(message)
            case to_agent.EndAttempt():
                self.usage.release()
                self.pool.end(message)
            case CommandRanks():
                self.pool.send_command(message)
            case to_agent.PeerMoved():
                self.replicator.on_peer_moved(message.peer)
            case to_agent.FlushSnapshots() | to_agent.CommitFlushed():
                self.replicator.flush(message, fence=self.newest_attempt)
            case to_agent.Ping():
                self.link.send(to_supervisor.Pong(number=message.number, mono_ns=time.monotonic_ns()))
            case to_agent.Reload():
                self.programs.prepared = False
                self.home.fetch(self._reload)
            case to_agent.DropCopies():
                self.snapshots.drop(message.copies)
            case to_agent.GatherEvidence() | to_agent.TraceRanks():
                self.evidence.begin(message)
            case to_agent.LookAtHost():
                self.host_check.ask(message)
            case to_agent.Shutdown():
                self.request_exit(message.reason)
            case Refused():
                self._on_refused(message.reason)

    def _reload(self) -> None:
        """The run file changed. Fork server and standbys stay: a model that one built is used for the same config."""
        self.spec = self.identity.read_spec()
        self.link.forget()
        self.programs.prepare_again()

    # ------------------------------------------------------------ messages of this host's processes

    def _on_hello(self, peer: Connection, hello: HostGreeting) -> None:
        match hello:
            case ForkServerHello():
                self.fork_server.on_hello(peer, hello)
                self.pool.on_children(hello.children)
                self._on_checked()  # a dead one's standbys may still be usable
            case RankHello():  # its former agent died
                self.pool.adopt(peer, hello)
                self.link.greet()
            case StandbyHello():
                self.pool.add_standby(peer, hello)
                self.fork_server.on_standby(hello.local_rank, hello.pid)
                if self._is_joining() and not self.readiness.is_ready:
                    self.hub.send(peer, WarmUp())
                self._check_ready()

    def _check_ready(self) -> None:
        """Something that a start needs may have come: start what waited for it, report when all is there."""
        self.pool.queue.assign()
        self.readiness.check()

    def _on_checked(self) -> None:
        """Standbys may open contexts, unless the GPUs are being loaded."""
        if not self.host_check.loads:
            self.pool.replenish_standbys()
        self._check_ready()

    def _on_ready(self) -> None:
        self.link.send(to_supervisor.HostReady(store=self.fork_server.store, memory=self._memory_address()))

    def _is_joining(self) -> bool:
        """Whether the run began without this host."""
        return self.newest_attempt > 0 and self.pool.attempt == 0

    def _on_replicator_moved(self, address: Address) -> None:
        if self._takes_snapshots():
            self.link.send(to_supervisor.ReplicatorAddress(memory=address))

    def _on_memory_renewed(self, reason: str) -> None:
        """The host's folder in memory is new and empty. Ranks make their rings in it by themselves."""
        self.replicator.restart()
        self.fork_server.on_memory_renewed()
        self._tell(memory_lost(reason, attempt=self._fence()))

    def _tell(self, event: RankEvent) -> None:
        """Log an event of this host, and have it shown where the run is watched."""
        self.log.write_rank(event)
        self.link.send(event)

    def _on_disconnect(self, peer: Connection, _reason: str) -> None:
        if self.link.is_peer(peer):
            self.link.on_lost()
            self.unsupervised.begin()
        elif self.fork_server.is_peer(peer):
            self.readiness.lose()
            self.fork_server.on_lost()
            self.link.send(to_supervisor.StoreLost())
            self.pool.on_fork_server_lost()
        elif isinstance(peer.identity, Worker):
            peer.identity.lose(peer)
        else:
            self.pool.on_standby_lost(peer)

    # ------------------------------------------------------------ flushes, and the end

    def _on_flush(self, answer: FlushAnswer, order: FlushOrder) -> None:
        """Forward the replicator's answer to where the order came from; an event once a checkpoint is committed."""
        if isinstance(answer, to_supervisor.FlushCommitted) and answer.failure is None:
            self._tell(committed_event(answer, directory=order.flush.uri, attempt=self._fence()))
        elif isinstance(answer, to_supervisor.SnapshotsFlushed):
            self.snapshots.drop(answer.rejected)
        if order.alone:
            self.unsupervised.on_flush(answer)
        else:
            self.link.send(answer)

    def _shutdown(self) -> None:
        """End everything this agent started and free the memory."""
        self.usage.release()
        # Programs last: trackers may take some seconds, for which GPUs and memory need not be held.
        for part in (self.pool, self.replicator, self.kernel_log, self.host_check, self.fork_server, self.programs):
            part.shutdown()
        self.log.write("agent.ended", {"reason": self.exit_reason or ""})
        self.hub.shutdown()
        self.log.close()
        self.home.stop()
        with contextlib.suppress(OSError):
            self.identity.memory.remove()


def main() -> None:
    processes.forgive_outputs()
    arguments, variables = parse_arguments("Muster's agent (started by its watchdog)"), environment.current()
    try:
        supervisor_address(arguments.run_dir, me=arguments.host)  # refuse another version before touching anything
        agent = HostAgent(HostIdentity.of_this_process(arguments))
        code = agent.run(watchdog=variables.watchdog_pid, ignore_term=variables.term_ignored)
    except MusterError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)


if __name__ == "__main__":
    main()
