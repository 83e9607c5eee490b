"""The ranks of one host: started from standbys, watched, ended, retained, each report made once."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from muster.agent.gpu_reset import GpuReset
from muster.agent.host_event_log import HostLog
from muster.agent.host_identity import HostIdentity
from muster.agent.ranks.dying_ranks import DyingRanks
from muster.agent.ranks.hang_detector import Limits, due_s, find_hung_ranks
from muster.agent.ranks.orphaned_processes import OrphanedProcesses
from muster.agent.ranks.pool_calls import Forks, Snapshots
from muster.agent.ranks.rank_exit import exit_report, last_reasons, last_words
from muster.agent.ranks.rank_process import Worker, kill, open_pidfd, parent_of
from muster.agent.ranks.retained_ranks import RetainedRanks
from muster.agent.ranks.standbys import Standby, Standbys
from muster.agent.ranks.starting import RankQueue
from muster.agent.ranks.step_clock import StepClock
from muster.config.spec import RunSpec
from muster.core.errors import MusterError
from muster.protocol.codec import reader_of
from muster.protocol.rank_agent import (
    FROM_RANK,
    FromRank,
    Pause,
    Paused,
    RankBeat,
    RankCaptured,
    RankHello,
    RankProgress,
    StandbyHello,
    StandbyUnfit,
    StandbyWarm,
    TakePlace,
)
from muster.protocol.ranks import RankContext
from muster.protocol.to_agent import EndAttempt, StartAttempt
from muster.protocol.to_supervisor import (
    FromAgent,
    RankExit,
    RankHang,
    RanksEnded,
    RanksProgress,
    ResetResult,
    StartFailed,
)
from muster.protocol.values import CommandRanks, LastWords, RankEvent
from muster.transport.connections import Connection, ConnectionPool

#: Progress outside of steps is forwarded this often at most.
PROGRESS_EVERY_S = 1.0


class RankPool:
    """The processes that are, or will be, ranks of the host's attempt."""

    def __init__(
        self,
        *,
        identity: HostIdentity,
        hub: ConnectionPool,
        log: HostLog,
        spec: Callable[[], RunSpec],
        send: Callable[[FromAgent], None],
        is_supervised: Callable[[], bool],
        is_prepared: Callable[[], bool],
        on_warm: Callable[[], None],
        forks: Forks,
        snapshots: Snapshots,
    ) -> None:
        """``send``: to a connected supervisor; ``is_prepared``: the data is there; ``on_warm``: a standby is."""
        self._identity, self._hub, self._log, self._spec = identity, hub, log, spec
        self._send, self._is_supervised = send, is_supervised
        self._on_warm, self._forks, self._snapshots = on_warm, forks, snapshots
        self.attempt = 0  # of the ranks here
        self.standbys = Standbys()
        self.workers: dict[int, Worker] = {}
        """By pid."""
        self.queue = RankQueue(
            run_dir=identity.run_dir,
            hub=hub,
            standbys=self.standbys,
            is_prepared=is_prepared,
            spawn=forks.spawn,
            register=lambda one, pid, peer: self.register_rank(pid, one.rank, one.attempt, peer, was_warm=True),
        )
        self.step = 0  # the highest that a rank here reported
        self.exits: dict[int, RankExit] = {}
        """Rank -> its report, of the current attempt."""
        self._ending: int | None = None  # attempt whose ranks are being ended
        self._ended = 0  # the newest attempt whose ranks were to be ended
        self.orphans = OrphanedProcesses(hub=hub, on_ended=self._report_drained)
        self._retained = RetainedRanks()
        self._dying = DyingRanks(
            hub=hub, memory=identity.memory, spec=spec, on_dying=self._tell_exit, on_ended=self._report_drained
        )
        self._steps, self._progress_sent_s = StepClock(), 0.0
        self.gpu_reset = GpuReset(hub=hub, on_done=self._on_reset)
        self._reset_result: ResetResult | None = None

    @property
    def ranks_per_host(self) -> int:
        return self._spec().resources.ranks_per_host or 1

    def living(self) -> list[Worker]:
        """Ranks whose processes exist."""
        return [worker for worker in self.workers.values() if worker.exists]

    # ------------------------------------------------------------ starting

    def start(self, order: StartAttempt) -> None:
        """Begin an attempt: its ranks here, fresh or retained, with the shards they start from."""
        if order.attempt <= self.attempt:
            return  # sent twice, or by a supervisor that does not know of a newer one
        try:
            self._start(order)
        except (OSError, MusterError) as error:
            # The supervisor then starts another attempt; without a word it would wait for this one's first step.
            self.queue.drop(order.attempt)
            host, reason = self._identity.host, str(error) or type(error).__name__
            self._send(StartFailed(reason=f"{host} cannot start attempt {order.attempt}: {reason}"))

    def _start(self, order: StartAttempt) -> None:
        retained = self._retained.assigned(self.living(), order.contexts)
        self._kill(order.attempt - 1, spared=retained)
        self.orphans.kill()
        self.attempt, self._ending = order.attempt, None
        self.exits.clear()
        self._log.open(order.attempt)
        moves: list[tuple[Worker, RankContext]] = []
        for context in self._snapshots.begin(order):
            worker = next((worker for worker in retained if worker.rank == context.kept_rank), None)
            if worker is None:
                self.queue.waiting.append(replace(context, kept_rank=None))
            else:
                moves.append((worker, context))
        for worker, context in moves:  # only now: a rank's new number may be another's old one
            self._reassign(worker, context)
        self.queue.assign()
        self._forks.order_store()  # each attempt has a rendezvous store of its own

    def _reassign(self, worker: Worker, context: RankContext) -> None:
        """A paused rank continues in the new attempt."""
        worker.begin(context.rank, context.attempt, now_s=time.monotonic())
        assert worker.peer is not None
        self._hub.send(worker.peer, TakePlace(context=context))
        self._log.write("rank.started", {"pid": worker.pid, "kept": True}, rank=worker.rank)

    def register_rank(self, pid: int, rank: int, attempt: int, peer: Connection | None, *, was_warm: bool) -> None:
        """From now on ``pid`` is a rank."""
        known, fd = self.workers.get(pid), open_pidfd(pid)
        if known is not None and peer is not None:  # it has connected again
            known.peer, peer.identity = peer, known
        if known is not None:
            return
        now, pidfd = time.monotonic(), -1 if fd is None else fd
        worker = Worker(
            pid=pid, rank=rank, attempt=attempt, peer=peer, pidfd=pidfd, parent=parent_of(pid), progress_s=now,
            seen_s=now,
        )  # fmt: skip
        self.workers[pid] = worker
        if peer is not None:
            peer.identity = worker
        self._log.write("rank.started", {"pid": pid, "standby": was_warm}, rank=rank)
        if fd is not None:
            self._hub.watch(fd, lambda: self._on_exit(worker))
        else:  # gone and reaped just before: its exit code may have been read and dropped as a standby's
            worker.assume_killed()
            self._report_exit(worker)

    # ------------------------------------------------------------ ending

    def send_command(self, command: CommandRanks) -> None:
        for worker in self.living():
            if worker.peer is not None:
                self._hub.send(worker.peer, command)

    def end(self, order: EndAttempt) -> None:
        """End the ranks up to an attempt, then reset GPUs; those to be kept have some time to pause."""
        attempt = order.attempt
        self.gpu_reset.order(order.reset)
        if order.reset and self._forks.opens_contexts():  # no GPU is reset while any process uses it
            self.orphans.add(self.standbys.pids)
            self.standbys.clear()
        self._ending = max(attempt, self._ending or 0)
        self._ended = max(attempt, self._ended)
        self.queue.drop(attempt)
        retained = self._retained.select(
            self.living(), attempt, set(order.keep), now_s=time.monotonic(), pause_s=order.pause_s
        )
        self._kill(attempt, spared=retained)
        self.orphans.kill()
        for worker in retained:
            if worker.peer is not None:
                self._hub.send(worker.peer, Pause())
        self._report_drained()

    def _kill(self, attempt: int, *, spared: Collection[Worker] = ()) -> None:
        """SIGKILL for every rank up to ``attempt``. Exits that came first are told like any other: one is the cause."""
        for worker in self.living():
            if worker.attempt <= attempt and worker not in spared:
                worker.kill()

    def _on_exit(self, worker: Worker) -> None:
        """The pidfd fired: the process is gone; its exit code comes from the fork server, its parent."""
        worker.close_pidfd(self._hub)
        if worker.was_killed or not self._forks.reaps(worker.parent):  # a fork server that stands still tells no code
            worker.assume_killed()
        self._report_exit(worker)

    def on_exit_code(self, pid: int, code: int) -> None:
        """The fork server reaped ``pid``."""
        self.standbys.remove(pid)
        self.orphans.mark_registered(pid)
        if (worker := self.workers.get(pid)) is not None:
            worker.exit_code = code
            self._report_exit(worker)

    def on_stopped(self, pid: int) -> None:
        if (worker := self.workers.get(pid)) is not None:
            worker.on_stop_reported(time.monotonic())

    def _report_exit(self, worker: Worker) -> None:
        """Once the process is gone and its code is known."""
        if worker.pidfd >= 0 or worker.exit_code is None or worker.pid not in self.workers:
            return
        del self.workers[worker.pid]
        if not worker.is_dying:
            self._tell_exit(worker)
        self._report_drained()

    def _tell_exit(self, worker: Worker) -> None:
        """Log and report it, once: of one that is dying, before it is gone. What has to wait for its end still does."""
        if worker.peer is not None:
            for event in self._hub.drain(worker.peer):
                self._hub.dispatch(event)  # its last message may still be in the socket
        had_said, last = worker.last is not None, last_words(worker, self._identity.run_dir)
        worker.last = last
        if last is not None and (had_said if worker.was_killed else worker.orphaned):  # it ended by itself
            worker.exit_code, worker.was_killed = 1 if last.left is None else last.left, False
        self._log.write("rank.exited", {"exit_code": worker.exit_code, **last_reasons(last)}, rank=worker.rank)
        if last is not None:
            self._snapshots.drop(last.rejected)
        if self._ending is None or worker.attempt > self._ending or not worker.was_killed:
            report = self.exits[worker.rank] = exit_report(worker)
            self._send(report)
            self.standbys.look(self._hub)

    def _report_drained(self) -> None:
        """Report once every rank of the ended attempt is gone but for its memory, told or paused, and GPUs reset."""
        ending, living = self._ending, self.living()
        if ending is None or self.orphans.ending:
            return
        # One that is gone and not told may be the cause, and once the next attempt has started nobody listens to it.
        if any(one.is_owed for one in self.workers.values() if one.attempt <= ending) or not self.gpu_reset.is_done():
            return
        kept = {one.rank: one.paused for one in living if one.attempt <= ending and one.paused is not None}
        self._send(RanksEnded(attempt=ending, snapshots=self._snapshots.held(), kept=kept, reset=self._reset_result))
        self._reset_result = self._ending = None
        self.replenish_standbys()

    def _on_reset(self, gpus: Sequence[int], ok: bool, evidence: str) -> None:
        self._reset_result = ResetResult(ok=ok, evidence=evidence)
        self._log.write("host.reset", {"gpus": list(gpus), "ok": ok, "evidence": evidence})
        self._report_drained()

    # ------------------------------------------------------------ messages and hangs

    def _on_message(self, peer: Connection, message: FromRank) -> None:
        """Of a standby, or of a rank."""
        match message:
            case StandbyWarm():
                self.standbys.on_warm(peer)
                self._on_warm()
            case StandbyUnfit():
                self.on_standby_lost(peer, unusable=True)
            case _ if isinstance(peer.identity, Worker):
                self.handle(peer.identity, message)

    def handle(self, worker: Worker, message: FromRank) -> None:
        """What a rank says."""
        now = time.monotonic()
        worker.heard(now)
        self._dying.watch(worker)
        match message:
            case RankBeat():
                if worker.beat(message.step, message.micro, now_s=now):
                    if worker.stepped:
                        self._on_step(worker)
                    self._snapshots.on_ready()
            case RankProgress(attempt=worker.attempt):
                worker.progress_s = now
                if now - self._progress_sent_s >= PROGRESS_EVERY_S:
                    self._progress_sent_s = now
                    self._send(RanksProgress(attempt=worker.attempt))
            case LastWords():
                worker.last = message
            case RankCaptured():
                worker.captured = message
            case Paused() if worker.retained:
                worker.paused = message.step
                self._report_drained()
            case RankEvent():
                worker.progress_s = now
                if message.kind == "step":
                    self.step = max(self.step, message.step or 0)
                self._on_event(worker, message)

    def _on_event(self, worker: Worker, event: RankEvent) -> None:
        try:
            if not self._log.write_rank(event):
                return
        except ValueError as error:  # another version's: like any message that cannot be read, it ends the connection
            self._log.note(f"rank {worker.rank} reported what is no event: {error}")
            if worker.peer is not None:
                self._hub.close(worker.peer)
            worker.peer = None
            return
        self._send(event)

    def _on_step(self, worker: Worker) -> None:
        """The first rank's steps are the step watchdog's clock, and a sign that standbys may be forked undisturbed."""
        if worker.rank == min((other.rank for other in self.living()), default=None):  # None: it has exited
            self._steps.on_step(time.monotonic())
            self.replenish_standbys()
            self._snapshots.on_step(worker.attempt)

    def watch(self) -> None:
        """Report ranks that hang; kill those that should have paused and have not."""
        limits, now_s = self._limits(), time.monotonic()
        for worker in self._retained.overdue(self.living(), now_s=now_s, silence_s=limits.timing.timeout_s):
            worker.kill()  # stopped, or busy with something long: it is replaced
        if not self._is_supervised():
            return  # a hang is reported once, and there is no one to receive it
        for worker, evidence in find_hung_ranks(self.living(), limits, host=self._identity.host, now_s=now_s):
            silent_s = now_s - worker.progress_s
            self._send(RankHang(attempt=worker.attempt, rank=worker.rank, evidence=evidence, silent_s=silent_s))

    def due_s(self) -> float:
        """When ``watch`` has something to look at, if no rank says anything until then."""
        limits, living = self._limits(), self.living()
        paused_s = self._retained.due_s(living, silence_s=limits.timing.timeout_s)
        return min(paused_s, due_s(living, limits)) if self._is_supervised() else paused_s

    def _limits(self) -> Limits:
        given = self._spec().recovery
        return Limits.of(given, step_s=self._steps.timeout_s(given.step_timeout_s), reports_stops=self._forks.reaps)

    def on_reconnect(self) -> None:
        """A newly connected supervisor has not heard of any hang."""
        for worker in self.workers.values():
            worker.reported_hang = False

    # ------------------------------------------------------------ registration and loss

    def adopt(self, peer: Connection, hello: RankHello) -> None:
        """A rank of a previous agent reconnects. It is killed if its attempt was ended in the meantime."""
        self.orphans.mark_registered(hello.pid)
        if hello.attempt <= self._ended or hello.attempt < self.attempt:
            kill(hello.pid)
            return
        self.attempt = max(self.attempt, hello.attempt)
        self._log.open(self.attempt)
        peer.expect(reader_of(FROM_RANK), self._on_message)
        self.register_rank(hello.pid, hello.rank, hello.attempt, peer, was_warm=False)

    def on_children(self, pids: Collection[int]) -> None:
        """The fork server's living children, by its own list."""
        self.orphans.add(set(pids) - set(self.standbys.pids) - set(self.workers))

    def add_standby(self, peer: Connection, hello: StandbyHello) -> None:
        """It has connected."""
        peer.expect(reader_of(FROM_RANK), self._on_message)
        self.standbys.add(Standby(pid=hello.pid, peer=peer, local_rank=hello.local_rank, bound=hello.bound))
        self.orphans.mark_registered(hello.pid)

    def is_warm(self) -> bool:
        return self.standbys.are_warm(self.ranks_per_host)

    def replenish_standbys(self) -> None:
        """Keep one standby for each rank of the host (or only what is needed, where the run file wants none)."""
        if self._spec().recovery.warm_standby or not self.workers:
            self._forks.spawn(self.standbys.missing(self.ranks_per_host))

    def on_fork_server_lost(self) -> None:
        """Exit codes that it has not reported will never be known."""
        for worker in [worker for worker in self.workers.values() if worker.pidfd < 0]:
            worker.assume_killed()
            self._report_exit(worker)

    def on_standby_lost(self, peer: Connection, *, unusable: bool = False) -> None:
        """A standby closed its connection, or could not open a context on its GPU: its CUDA state is unknown."""
        standby = self.standbys.remove_peer(peer)
        if standby is not None and unusable:
            self._forks.give_up_contexts()
            kill(standby.pid)
            self.replenish_standbys()

    def shutdown(self) -> None:
        self._kill(self.attempt)
        self.orphans.kill()
        for pid in self.standbys.pids:
            kill(pid)
