"""The supervisor as a process: inputs of the state machine from sockets, its effects onto them.

It sleeps until the next message or deadline. Every decision is in the state machine; everything it knows is in the
log or on the hosts, so it may be killed between any two lines.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from muster.core.clock import SystemClock
from muster.core.errors import ConflictError, UsageError
from muster.core.event_details.attempts import AttemptStarted
from muster.core.events import Event
from muster.core.typed_json import JsonObject, Unreadable
from muster.policy.load import load_policy
from muster.protocol import client
from muster.protocol.hello import AgentHello, BeatHello, Refused, greeting_reader
from muster.protocol.to_supervisor import FROM_AGENT, FROM_WATCHDOG, GREETING, FromAgent, Greeting, Pong
from muster.protocol.values import RankEvent
from muster.supervise.checks.asked import AskedLooks
from muster.supervise.process.clock_offsets import ClockOffsets
from muster.supervise.process.decisions import RETRY_S, Decisions
from muster.supervise.process.handshake import ClientIdentity, health_of, identity_of, stop_of
from muster.supervise.process.heartbeats import Heartbeats
from muster.supervise.process.home_sync import SupervisorHome
from muster.supervise.process.journal import Journal
from muster.supervise.process.lease import LEASE_S, keeping
from muster.supervise.process.limits import LimitsGuard, LimitsTimer
from muster.supervise.process.live_requests import LiveRequests
from muster.supervise.process.liveness import HostLiveness
from muster.supervise.process.own_limits import OwnLimits
from muster.supervise.process.refusals import NEW, Refusals
from muster.supervise.process.run_file import corrected, mend, read_run_id, read_spec, settings_of
from muster.supervise.process.signals import caught
from muster.supervise.recovery.inputs import End, FromHost, HostDown, HostUp, Input, Log, Send, StopRequest
from muster.supervise.recovery.phases import Adopting, Held
from muster.supervise.recovery.state_machine import RecoveryStateMachine
from muster.supervise.recovery.status import status
from muster.supervise.replay.rebuild_state import rebuild_in_order
from muster.transport.connections import Connection, ConnectionPool
from muster.transport.secure_session import run_token

OFFSET_EVERY_S = 30.0
HANGUP = "its terminal was closed (SIGHUP)"


@dataclass
class Supervisor:
    """One term of one run's supervisor."""

    run_dir: Path
    on_event: Callable[[Event], None] | None = None
    """Must not block."""
    bind: str = "127.0.0.1"
    job: str = ""
    """The back end's name for the job that this process is part of."""
    ignore_term: bool = False
    """A scheduler signals every process of the job: the process that started us sends one message instead."""
    result: End | None = None
    run_id: str = ""
    _pending: list[Input] = field(default_factory=list)
    _notes: deque[str] = field(default_factory=deque)
    _alone: bool = False
    """Whoever looked on is gone."""
    _warned_timeout_s: float = 0.0
    """The shortest possible heartbeat timeout that was last logged."""

    def __post_init__(self) -> None:
        self.own_limits = OwnLimits(self.note)
        self.refusals = Refusals(
            log=lambda who, reason: self.journal.append("connection.refused", {"who": who, "reason": reason}),
            clock_ns=lambda: self.clock.monotonic_ns(),
        )
        self.decisions = Decisions(
            machine=lambda: self.machine,
            append=self._log_decided,
            sync=self._sync,
            act=self._act,
            note=lambda text: self.journal.say(text),
            clock_ns=lambda: self.clock.monotonic_ns(),
            doubt=lambda: self.lease.hold(),
        )

    def serve(self) -> int:
        """Block until the run has ended; return its exit code.

        Raises:
            ConflictError: another supervisor holds the run, or took it from us.
        """
        self.run_dir = self.run_dir.resolve()
        spec, self.run_id = read_spec(self.run_dir), read_run_id(self.run_dir)
        self.clock = SystemClock()
        self.pool = ConnectionPool(
            token=run_token(self.run_dir),
            on_accept=lambda peer: peer.expect(self._greeting_reader(), self._hello),
            on_gone=self._gone,
        )
        self.home = SupervisorHome(self.run_dir, job=self.job, clock=self.clock)
        self.lease = self.home.lease
        address = self.pool.listen(self.bind)
        before = self.home.take_over(self.run_id, (address[0], int(address[1])))
        if (ended := self.home.ended(before)) is not None:
            self.lease.give_back()
            self.pool.shutdown()
            return ended.exit_code
        guard = LimitsGuard(limits=spec.limits, grace_s=spec.recovery.grace_s)
        self.limits = LimitsTimer(guard, self.clock)
        with keeping(self.lease):
            now_ns = max(before.newest_ns, self.clock.wall_ns())
            state = rebuild_in_order(before.telling(guard.add, self.home.add_earlier), now_ns=now_ns)
        self.liveness = HostLiveness(timing=spec.recovery.timing)
        self.agents: dict[str, Connection] = {}
        self.heartbeats = Heartbeats(pool=self.pool, liveness=self.liveness, clock_ns=self.clock.monotonic_ns)
        self.clocks = ClockOffsets()
        self.looks = AskedLooks(lambda host, message: self.pool.send(self.agents[host], message))
        self.live = LiveRequests(self.pool.send, self.agents, lambda: self.machine.state, self._status, self.clock)
        settings = settings_of(spec, run_id=self.run_id, run_dir=self.run_dir)
        self.machine = RecoveryStateMachine(settings=settings, policy=load_policy(spec.recovery.policy), state=state)
        self._begin_journal(f"{address[0]}:{address[1]}")
        self.home.start()
        try:
            with caught(self.pool, self._on_signal, leaving=self._leaving):
                self._loop()
        except ConflictError:  # lost the lease: discard queued messages
            for peer in list(self.pool.peers):
                self.pool.close(peer)
            raise
        finally:
            self.pool.shutdown()
            self.home.close()
            self.journal.close()
        assert self.result is not None
        return self.result.exit_code

    def _begin_journal(self, address: str) -> None:
        self.journal = Journal(
            log=self.home.open_log(self.run_id),
            home=self.home,
            limits=self.limits,
            attempt=lambda: self.machine.state.attempt,
            on_event=self.on_event,
            notes=self._notes,
        )
        where: JsonObject = {"pid": os.getpid(), "address": address, **self.home.allocation}
        self.journal.append("supervisor.started", {"term": self.lease.term, **where})
        for text in self.home.damage:
            self.journal.say(f"the run goes on without a part of its log: {text}")

    def note(self, text: str) -> None:
        """Log a message for people soon. From any thread, or a signal handler."""
        self._notes.append(text)

    def detached(self, why: str) -> None:
        """Whoever looked on is gone: the run goes on, and its log says how to end it. From any thread; said once."""
        if not self._alone:
            self._alone = True
            self.note(f"{why}: the run goes on; muster stop {self.run_id or self.run_dir} ends it")

    # ------------------------------------------------------------ the loop

    def _loop(self) -> None:
        now = self.clock.monotonic_ns()
        self.decisions.start()
        next_renewal = now + int(LEASE_S / 3 * 1e9)
        next_offset = now
        while self.result is None:
            now = self.clock.monotonic_ns()
            if now >= next_renewal:
                wait_s = LEASE_S / 3 if self.lease.renew() else RETRY_S
                next_renewal = now + int(wait_s * 1e9)
                self.heartbeats.listen()
                mend(self.run_dir, self.machine.settings.spec, self.journal.say)
                self.own_limits.keep(self.run_id)
            self.journal.tend()
            if now >= next_offset:
                self._ping()
                next_offset = now + int(OFFSET_EVERY_S * 1e9)
            own = [self.decisions.deadline_ns, self.home.report_ns(self.machine.state.phase.name)]
            deadlines = [*own, self.liveness.deadline_ns(), self._next_limit(), self.live.deadline_ns()]
            due = min(next_renewal, next_offset, self._retry_ns(now), *(at for at in deadlines if at is not None))
            asleep_from = self.clock.monotonic_ns()
            self.pool.run_once(max(0.0, (due - asleep_from) / 1e9))
            awake = self.clock.monotonic_ns()
            if awake > due:
                self.pool.run_once(0.0)  # a stopped process wakes up as if nothing had come, whatever its sockets hold
            self.liveness.discount_pause(awake - max(due, asleep_from), awake)
            self._check_liveness()
            while self._pending:
                self._handle(self._pending.pop(0))
            self._tend()
            self.live.tend()
            self.home.report(self._status, self.machine.state.phase.name)
        self._shutdown()

    def _retry_ns(self, now: int) -> int:
        return now + int((RETRY_S if self.journal.log.trouble is not None else OFFSET_EVERY_S) * 1e9)

    def _next_limit(self) -> int | None:
        """When the run file's next limit is due, on our clock; once it is, the run is asked to save and stop."""
        at_ns, reached = self.limits.due()
        if reached is not None:
            self._pending.append(StopRequest(source=reached, exit_code=130))
        return at_ns

    def _shutdown(self) -> None:
        """Log the head of every writer's hash chain, then end; agents need a moment to read their last messages."""
        assert self.result is not None
        self.home.declare(self.result)
        with keeping(self.lease):
            until = time.monotonic() + 5.0
            while self.agents and time.monotonic() < until:
                self.pool.run_once(0.1)
            heads = self.home.heads(self.run_id)
        self.journal.tend()
        others = {name: head for name, head in heads.items() if name != self.journal.log.name}
        self.journal.append("log.hash_heads", {"heads": others})
        self.journal.append("supervisor.ended", {"reason": self.result.outcome})
        self.home.finish(self.journal.log, self.result, self._status())

    def _status(self) -> client.SupervisorStatus:
        """Of the run, and of its home where that holds it up."""
        result, trouble = status(self.machine), self.decisions.trouble
        if trouble is not None:
            return replace(result, reason=f"decided, and waiting for the run's home ({trouble}): {result.reason}")
        trouble = self.home.trouble
        return result if trouble is None else replace(result, reason=f"{result.reason}; not yet in its home: {trouble}")

    def _on_signal(self, number: int) -> None:
        """Ctrl-C is the user's stop (130), SIGTERM a preemption (75); a second one leaves at once.

        A closed terminal (SIGHUP) ends nothing.
        """
        if number == signal.SIGHUP:
            self.detached(HANGUP)
            return
        if number == signal.SIGTERM and self.ignore_term:
            return
        code = 75 if number == signal.SIGTERM else 130
        self._pending.append(StopRequest(source=signal.Signals(number).name, exit_code=code))

    def _leaving(self) -> bool:
        return self.result is not None and self.result.exit_code in (75, 130)

    def _check_liveness(self) -> None:
        now = self.clock.monotonic_ns()  # one moment for both: nobody is judged who was not listened to
        self.heartbeats.listen_to_silent(now)
        for host, reason in self.liveness.down(now):
            silent_s = self.liveness.silent_s(host, now)
            # A silent connection may stay silent long after a link has healed: both are opened again.
            for peer in (self.agents.pop(host, None), self.heartbeats.peers.pop(host, None)):
                if peer is not None:
                    self.pool.close(peer)
            self.liveness.forget(host)
            self.clocks.forget(host)
            self._handle(HostDown(host=host, reason=reason, silent_s=silent_s))

    # ------------------------------------------------------------ inputs

    def _handle(self, given: Input) -> None:
        self.decisions.give(given)

    def _tend(self) -> None:
        """A deadline of the state machine, or of what waits for the home; what was wrong with the lease."""
        self.decisions.tend()
        while self.lease.repairs:
            self.journal.say(self.lease.repairs.pop(0))

    def _greeting_reader(self) -> Callable[[bytes], Greeting | Refused]:
        return self.refusals.noting(greeting_reader(GREETING, me="the supervisor"), NEW)

    def _hello(self, peer: Connection, hello: Greeting | Refused) -> None:
        """Who is there, and what the connection carries from now on."""
        now = self.clock.monotonic_ns()
        if isinstance(hello, Refused):  # of another version
            self.refusals.add(NEW, hello.reason, about=hello.reason)
            self.pool.dismiss(peer, hello)
            return
        who = peer.identity = identity_of(hello)
        if isinstance(hello, AgentHello):
            peer.expect(self.refusals.reader(FROM_AGENT, who), functools.partial(self._from_agent, who.host))
            self.agents[who.host] = peer
            self.liveness.agent_connected(who.host, now)
            self._handle(HostUp(host=who.host, hello=hello))
            self._ping(who.host)
        elif isinstance(hello, BeatHello):
            decode = self.refusals.reader(FROM_WATCHDOG, who)
            self.heartbeats.add(who.host, peer, every_s=hello.every_s, decode=decode)
            self._warn_of_timeout()
        else:
            peer.expect(self.refusals.reader(client.FROM_CLIENT, who), self._from_client)

    def _warn_of_timeout(self) -> None:
        """A corrected file may ask for a timeout that is too short for the heartbeat interval of the running hosts."""
        least_s, timeout_s = self.liveness.least_s, self.liveness.timing.timeout_s
        if least_s > max(timeout_s, self._warned_timeout_s):
            self._warned_timeout_s = least_s
            requested = f"heartbeat_timeout_s={timeout_s:g}"
            text = f"{requested} is below three heartbeat intervals of the running hosts; using {least_s:g} s"
            self.journal.say(text)

    def _from_agent(self, host: str, peer: Connection, message: FromAgent) -> None:
        if self.agents.get(host) is peer:
            self.liveness.heartbeat(host, self.clock.monotonic_ns())
        if isinstance(message, Pong):
            self._offset(message, self.clock.monotonic_ns())
            return
        if isinstance(message, AgentHello):  # a rank has reconnected to it late
            if isinstance(self.machine.state.phase, Adopting):
                self._handle(HostUp(host=host, hello=message))
            return
        if self.looks.take(host, message):
            return
        if isinstance(message, RankEvent):
            event = Event(run_id=self.run_id, seq=-1, host=host, **vars(message))
            self.journal.show(event)
        self.live.on_evidence(host, message)
        self._handle(FromHost(host=host, message=message))

    def _from_client(self, peer: Connection, message: client.FromClient) -> None:
        """A verb of another terminal: stop, restart, status, profile."""
        if isinstance(message, client.StopRun):
            self._pending.append(stop_of(message))
        elif isinstance(message, client.HealthReport):
            try:
                self._pending.append(health_of(message))
            except Unreadable as error:
                self.refusals.add(str(peer.identity), str(error))
                self.pool.close(peer)
                return
        elif isinstance(message, client.RestartRun):
            self._restart()
        elif self.live.ask(peer, message):
            return
        self.pool.send(peer, self.looks.answer(message, self._status(), self.agents))

    def _restart(self) -> None:
        """The run file was corrected: its policy, limits and times apply; a file with a mistake changes nothing."""
        if not isinstance(self.machine.state.phase, Held):
            return
        try:
            spec, request = corrected(self.run_dir, self.run_id)
        except UsageError as error:
            self.journal.say(f"not restarted: {error}")
            return
        self.liveness.timing = spec.recovery.timing
        self._warned_timeout_s = 0.0
        self._warn_of_timeout()
        self.limits.change(spec.limits, spec.recovery.grace_s)
        self._pending.append(request)

    def _gone(self, peer: Connection, reason: str) -> None:
        identity, now = peer.identity, self.clock.monotonic_ns()
        if not isinstance(identity, ClientIdentity):
            return
        if identity.role == "agent" and self.agents.get(identity.host) is peer:
            del self.agents[identity.host]
            self.clocks.forget(identity.host)
            self.liveness.agent_disconnected(identity.host, now)
        elif identity.role == "beat":
            self.heartbeats.remove(identity.host, peer)

    # ------------------------------------------------------------ effects

    def _log_decided(self, effect: Log) -> None:
        if effect.kind == AttemptStarted.kind:
            mend(self.run_dir, self.machine.settings.spec, self.journal.say)
        self.journal.append(
            effect.kind, effect.detail, host=effect.host, rank=effect.rank, step=effect.step, phase=effect.phase
        )

    def _act(self, effect: Send | End) -> None:
        if isinstance(effect, End):
            self.result = effect
            return
        peer = self.agents.get(effect.host)
        if peer is not None:
            self.pool.send(peer, effect.message)

    def _sync(self, timeout_s: float) -> str | None:
        return None if self.journal.log.sync(timeout_s) else self.journal.log.unsealed or "no answer"

    # ------------------------------------------------------------ clocks

    def _ping(self, host: str | None = None) -> None:
        for name in [host] if host else list(self.agents):
            self.pool.send(self.agents[name], self.clocks.ping(name, self.clock.monotonic_ns()))

    def _offset(self, message: Pong, now: int) -> None:
        result = self.clocks.pong(message, now)
        if result is not None:
            host, offset = result
            self.journal.append("clock.offset", {"offset_ns": offset.offset_ns, "error_ns": offset.error_ns}, host=host)
