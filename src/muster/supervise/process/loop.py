"""The supervisor's loop: what hosts and terminals send becomes inputs of the state machine.

It sleeps until the next message or deadline. Every decision is the state machine's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, cast

from muster.core.errors import UsageError
from muster.core.events import Event
from muster.core.typed_json import JsonObject, Unreadable
from muster.protocol.client import (
    AskStacks,
    CheckHosts,
    FromClient,
    HealthReport,
    RestartRun,
    StopRun,
    SupervisorStatus,
    TraceRun,
)
from muster.protocol.hello import AgentHello, BeatHello, ClientHello, Refused
from muster.protocol.lease import LEASE_S
from muster.protocol.to_supervisor import EvidenceReady, FromAgent, HostLooked, Pong
from muster.protocol.values import RankEvent
from muster.supervise.process.client_requests import ClientRequests, Reply, RunView, ToHost, health_of, stop_of
from muster.supervise.process.clock_offsets import ClockOffsets
from muster.supervise.process.decisions import RETRY_S
from muster.supervise.process.lease import keeping
from muster.supervise.process.limits import OwnLimits
from muster.supervise.process.run_file import corrected
from muster.supervise.process.term import Term
from muster.supervise.recovery.inputs import SECOND_NS, End, FromHost, HostDown, HostUp, Input, StopRequest
from muster.supervise.recovery.phases import Adopting, Held
from muster.supervise.recovery.status import status
from muster.transport.connections import Connection, Lost, PeerEvent, Received

#: Clock offsets are measured this often.
PING_S = 30.0
#: A peer that has not sent its greeting yet.
NEW = "a new connection"
#: A peer's refusal is logged this often: one that is refused connects again at once.
REFUSED_EVERY_NS = 60 * 10**9
#: At the run's end agents need a moment to read their last messages.
FAREWELL_S = 5.0


@dataclass(frozen=True)
class PeerIdentity:
    """The other end of a connection."""

    role: Literal["agent", "watchdog", "client"]
    """client: a verb of another terminal."""
    host: str = ""

    def __str__(self) -> str:
        return self.host or "a client"


@dataclass
class Refusals:
    """Connections that end because of what they have sent: which of them to log."""

    _logged_ns: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, who: str, reason: str, *, now_ns: int, about: str = "") -> JsonObject | None:
        """The detail of the event; None: this peer's was logged a moment ago. ``about``: tells peers apart that are
        all the same ``who``."""
        self._logged_ns = {key: at_ns for key, at_ns in self._logged_ns.items() if now_ns - at_ns < REFUSED_EVERY_NS}
        if (who, about) in self._logged_ns:
            return None
        self._logged_ns[who, about] = now_ns
        return {"who": who or NEW, "reason": reason[:300]}


@dataclass
class SupervisorLoop:
    """Of one term."""

    term: Term
    pending: deque[Input]
    """Inputs that wait until liveness is checked; signal handlers append, too."""
    own_limits: OwnLimits
    clocks: ClockOffsets = field(default_factory=ClockOffsets, init=False)
    requests: ClientRequests = field(default_factory=ClientRequests, init=False)
    refusals: Refusals = field(default_factory=Refusals, init=False)
    _renew_ns: int = field(default=0, init=False)
    _ping_ns: int = field(default=0, init=False)
    _warned_timeout_s: float = field(default=0.0, init=False)
    """The shortest possible heartbeat timeout that was last logged."""

    def run(self) -> End:
        """Until the run has ended."""
        self._renew_ns = self._now_ns() + int(LEASE_S / 3 * SECOND_NS)
        self.term.decisions.start()
        while (result := self.term.world.result) is None:
            self.turn()
        return result

    def turn(self) -> None:
        """Wait for messages or the next deadline; handle what is due."""
        term, now_ns = self.term, self._now_ns()
        if now_ns >= self._renew_ns:
            self._renew(now_ns)
        term.world.journal.tend()
        if now_ns >= self._ping_ns:
            self._ping(term.world.agents)
            self._ping_ns = now_ns + int(PING_S * SECOND_NS)
        due_ns, asleep_ns = self._due_ns(now_ns), self._now_ns()
        self._poll(max(0.0, (due_ns - asleep_ns) / SECOND_NS))
        awake_ns = self._now_ns()
        if awake_ns > due_ns:
            self._poll(0.0)  # a stopped process wakes up as if nothing had come, though its sockets hold data
        term.heartbeats.liveness.discount_pause(awake_ns - max(due_ns, asleep_ns), awake_ns)
        self._check_liveness()
        while self.pending:
            term.decisions.give(self.pending.popleft())
        term.decisions.tend()
        self._report()

    def shut_down(self, result: End) -> None:
        """Log the head of every writer's hash chain, then end."""
        world = self.term.world
        home, log = world.home, world.journal.log
        home.declare(result)
        with keeping(home.lease):
            until_s = time.monotonic() + FAREWELL_S
            while world.agents and time.monotonic() < until_s:
                self._poll(0.1)
            heads = home.heads(world.run_id)
        world.journal.tend()
        others = {name: head for name, head in heads.items() if name != log.name}
        world.journal.append("log.hash_heads", {"heads": others})
        world.journal.append("supervisor.ended", {"reason": result.outcome})
        home.finish(log, result, self.status())

    def status(self) -> SupervisorStatus:
        """Of the run, and of its home where that holds it up."""
        result, trouble = status(self.term.world.machine), self.term.decisions.trouble
        if trouble is not None:
            return replace(result, reason=f"decided, and waiting for the run's home ({trouble}): {result.reason}")
        trouble = self.term.world.home.trouble
        return result if trouble is None else replace(result, reason=f"{result.reason}; not yet in its home: {trouble}")

    # ------------------------------------------------------------ deadlines

    def _now_ns(self) -> int:
        return self.term.clock.monotonic_ns()

    def _due_ns(self, now_ns: int) -> int:
        """When there is something to do, if nothing is received until then."""
        term, world = self.term, self.term.world
        limit_ns, reached = term.limits.due()
        if reached is not None:
            self.pending.append(StopRequest(source=reached, exit_code=130))
        deadlines = (
            limit_ns,
            term.decisions.deadline_ns,
            term.heartbeats.liveness.deadline_ns(),
            self.requests.deadline_ns(),
            world.home.report_ns(world.machine.state.phase.name),
            now_ns + int(RETRY_S * SECOND_NS) if world.journal.log.trouble is not None else None,
        )
        return min(self._renew_ns, self._ping_ns, *(at_ns for at_ns in deadlines if at_ns is not None))

    def _renew(self, now_ns: int) -> None:
        world = self.term.world
        wait_s = LEASE_S / 3 if world.home.lease.renew() else RETRY_S
        self._renew_ns = now_ns + int(wait_s * SECOND_NS)
        self.term.heartbeats.listen()
        world.repair_run_file()
        self.own_limits.keep(world.run_id)

    def _check_liveness(self) -> None:
        world, heartbeats, now_ns = self.term.world, self.term.heartbeats, self._now_ns()
        # One time for both: a host is never declared silent before its socket was read.
        heartbeats.listen_to_silent(now_ns)
        for host, reason in heartbeats.liveness.down(now_ns):
            silent_s = heartbeats.liveness.silent_s(host, now_ns)
            # A silent connection may stay silent long after a link has healed: both are opened again.
            for peer in (world.agents.pop(host, None), heartbeats.peers.pop(host, None)):
                if peer is not None:
                    world.pool.close(peer)
            heartbeats.liveness.forget(host)
            self.clocks.forget(host)
            self.term.decisions.give(HostDown(host=host, reason=reason, silent_s=silent_s))

    def _report(self) -> None:
        """Answer clients that wait no longer; log repairs of the lease; have the status written if it is due."""
        world, now_ns = self.term.world, self._now_ns()
        while world.home.lease.repairs:
            world.journal.say(world.home.lease.repairs.pop(0))
        if (due_ns := self.requests.deadline_ns()) is not None and now_ns >= due_ns:
            self._send(self.requests.due(self.status(), now_ns))
        phase = world.machine.state.phase.name
        if world.home.report_is_due(phase):
            world.home.report(self.status(), phase)

    # ------------------------------------------------------------ events

    def _poll(self, timeout_s: float) -> None:
        for event in self.term.world.pool.poll(timeout_s):
            self.on_event(event)

    def on_event(self, event: PeerEvent) -> None:
        """Handle what one connection has sent, or its end."""
        match event:
            case Received(peer=peer, message=message):
                self._received(peer, message)
            case Lost(peer=peer, reason=reason, unreadable=unreadable):
                if unreadable:
                    self._refuse(str(peer.identity or ""), reason)
                self._lost(peer)

    def _received(self, peer: Connection, message: object) -> None:
        world = self.term.world
        match peer.identity, message:
            case PeerIdentity("agent", host), _:
                self._from_agent(host, peer, cast(FromAgent, message))  # the channel of its greeting
            case PeerIdentity("client"), _:
                self._from_client(peer, cast(FromClient, message))
            case None, AgentHello(host=host) as hello:
                peer.identity, world.agents[host] = PeerIdentity("agent", host), peer
                self.term.heartbeats.liveness.agent_connected(host, self._now_ns())
                self.term.decisions.give(HostUp(host=host, hello=hello))
                self._ping([host])
            case None, BeatHello(host=host) as hello:
                peer.identity = PeerIdentity("watchdog", host)
                self.term.heartbeats.add(host, peer, every_s=hello.every_s)
                self._warn_of_timeout()
            case None, ClientHello():
                peer.identity = PeerIdentity("client")
            case None, Refused(reason=reason) as refusal:  # of another version
                self._refuse("", reason, about=reason)
                world.pool.dismiss(peer, refusal)

    def _from_agent(self, host: str, peer: Connection, message: FromAgent) -> None:
        world, decisions = self.term.world, self.term.decisions
        if world.agents.get(host) is peer:
            self.term.heartbeats.liveness.heartbeat(host, self._now_ns())
        match message:
            case Pong():
                if (offset := self.clocks.pong(message, self._now_ns())) is not None:
                    detail = {"offset_ns": offset.offset_ns, "error_ns": offset.error_ns}
                    world.journal.append("clock.offset", detail, host=offset.host)
                return
            case AgentHello():  # a rank has reconnected to it late
                if isinstance(world.machine.state.phase, Adopting):
                    decisions.give(HostUp(host=host, hello=message))
                return
            case HostLooked() | EvidenceReady():
                if self.requests.on_host(host, message):
                    return
            case RankEvent():
                world.journal.show(Event(run_id=world.run_id, seq=-1, host=host, **vars(message)))
        decisions.give(FromHost(host=host, message=message))

    def _from_client(self, peer: Connection, message: FromClient) -> None:
        """A verb of another terminal: stop, restart, status, profile."""
        world = self.term.world
        match message:
            case StopRun():
                self.pending.append(stop_of(message))
            case HealthReport():
                try:
                    self.pending.append(health_of(message))
                except Unreadable as error:
                    self._refuse(str(peer.identity), str(error))
                    world.pool.close(peer)
                    return
            case RestartRun():
                self._restart()
            case TraceRun() | AskStacks() | CheckHosts():
                run = RunView(world.machine.state, self.status(), world.agents.keys())
                self._send(self.requests.on_client(peer, message, run, self._now_ns()))
                return
        world.pool.send(peer, self.status())

    def _restart(self) -> None:
        """The run file was corrected: its policy, limits and times apply; a file with a mistake changes nothing."""
        world = self.term.world
        if not isinstance(world.machine.state.phase, Held):
            return
        try:
            spec, request = corrected(world.run_dir, world.run_id)
        except UsageError as error:
            world.journal.say(f"not restarted: {error}")
            return
        self.term.heartbeats.liveness.timing = spec.recovery.timing
        self._warned_timeout_s = 0.0
        self._warn_of_timeout()
        self.term.limits.change(spec.limits, spec.recovery.grace_s)
        self.pending.append(request)

    def _lost(self, peer: Connection) -> None:
        match peer.identity:
            case PeerIdentity(role="agent", host=host) if self.term.world.agents.get(host) is peer:
                del self.term.world.agents[host]
                self.clocks.forget(host)
                self.term.heartbeats.liveness.agent_disconnected(host, self._now_ns())
            case PeerIdentity(role="watchdog", host=host):
                self.term.heartbeats.remove(host, peer)

    # ------------------------------------------------------------ what is sent and logged

    def _send(self, results: Iterable[Reply | ToHost]) -> None:
        for result in results:
            match result:
                case Reply(client=client, status=answer):
                    self.term.world.pool.send(client, answer)
                case ToHost(host=host, message=message):
                    self.term.world.send(host, message)

    def _ping(self, hosts: Iterable[str]) -> None:
        for host in hosts:
            self.term.world.send(host, self.clocks.ping(host, self._now_ns()))

    def _refuse(self, who: str, reason: str, *, about: str = "") -> None:
        """Log that a connection ends because of what it has sent."""
        detail = self.refusals.add(who, reason, about=about, now_ns=self._now_ns())
        if detail is not None:
            self.term.world.journal.append("connection.refused", detail)

    def _warn_of_timeout(self) -> None:
        """A corrected file may set a timeout that is too short for the heartbeat interval of the running hosts."""
        liveness = self.term.heartbeats.liveness
        least_s, timeout_s = liveness.least_s, liveness.timing.timeout_s
        if least_s > max(timeout_s, self._warned_timeout_s):
            self._warned_timeout_s = least_s
            requested = f"heartbeat_timeout_s={timeout_s:g}"
            text = f"{requested} is below three heartbeat intervals of the running hosts; using {least_s:g} s"
            self.term.world.journal.say(text)
