"""The supervisor as a process: the machine's inputs from sockets, its effects onto them.

It sleeps until the next message or deadline. Everything it decides is in the machine; everything it knows
is in the log or on the hosts, so it may be killed between any two lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from muster.config.spec import RunSpec
from muster.core import event_log
from muster.core.clock import SystemClock
from muster.core.errors import ConflictError, MusterError
from muster.core.event_log import EventLog
from muster.core.events import Event
from muster.policy.load import load_policy
from muster.storage.store import open_store
from muster.supervise.process.clock_offsets import ClockOffsets
from muster.supervise.process.handshake import UNUSABLE, health_of, parse_hello, stop_of
from muster.supervise.process.lease import LEASE_S, LeaseKeeper
from muster.supervise.process.limits import LimitsGuard
from muster.supervise.process.liveness import HostLiveness
from muster.supervise.process.signals import caught
from muster.supervise.recovery.state import (
    Effect,
    End,
    FromHost,
    HostDown,
    HostUp,
    Input,
    Log,
    Phase,
    RestartRequest,
    Send,
    Settings,
    StopRequest,
    Tick,
)
from muster.supervise.recovery.state_machine import RecoveryStateMachine
from muster.supervise.recovery.status import status
from muster.supervise.replay.event_files import EventReplay
from muster.supervise.replay.rebuild_state import rebuild_state
from muster.transport.connections import Connection, ConnectionPool
from muster.transport.secure_session import read_token

OFFSET_EVERY_S = 30.0
#: How soon a disk that took nothing is tried again.
RETRY_S = 1.0


@dataclass
class Supervisor:
    """One term of one run's supervisor."""

    run_dir: Path
    on_event: Callable[[Event], None] | None = None
    bind: str = "127.0.0.1"
    ignore_term: bool = False
    """A scheduler signals every process of the job: whoever started us tells us once, in a message."""
    result: End | None = None
    _orders: list[Input] = field(default_factory=list)
    _troubled: str | None = None
    """What kept events from the disk."""
    _limited: bool = False
    """A limit of the run file was reached, and the run told so."""
    _least_told_s: float = 0.0
    """Which limit of silence the run was told to be the least possible."""
    _wall_ahead_ns: int | None = None
    """Of the monotonic clock, when this term began."""

    def serve(self) -> int:
        """Block until the run has ended; return its exit code.

        Raises:
            ConflictError: another supervisor holds the run, or took it from us.
        """
        spec = RunSpec.model_validate_json((self.run_dir / "resolved.json").read_text())
        job = json.loads((self.run_dir / "job.json").read_text())
        self.run_id = str(job["run_id"])
        self.clock = SystemClock()
        self.hub = ConnectionPool(
            token=read_token(str(self.run_dir / "token")), on_message=self._message, on_gone=self._gone
        )
        self.lease = LeaseKeeper(open_store(), str(self.run_dir / "lease.json"))
        address = self.hub.listen(self.bind)
        past = EventReplay(self.run_dir / "events")
        past.read_new_events()
        term = self.lease.take((address[0], int(address[1])))
        past.read_new_events()
        before = past.in_order()
        state = rebuild_state(before)
        self.guard = LimitsGuard(limits=spec.limits, grace_s=spec.recovery.grace_s)
        for event in before:
            self.guard.add(event)
        del past, before  # the events of weeks
        self.log = EventLog(self.run_id, self.run_dir / "events", "supervisor", term)
        self.presence = HostLiveness(timeout_s=spec.recovery.heartbeat_timeout_s)
        self.agents: dict[str, Connection] = {}
        self.keepers: dict[str, Connection] = {}
        self.clocks = ClockOffsets()
        self.machine = RecoveryStateMachine(
            settings=self._settings(spec), policy=load_policy(spec.recovery.policy), state=state
        )
        self._append("supervisor.started", {"term": term, "pid": os.getpid(), "address": f"{address[0]}:{address[1]}"})
        try:
            with caught(self.hub, self._on_signal, leaving=self._leaving):
                self._loop()
        except ConflictError:  # deposed: what still waits to be sent must not be
            for peer in list(self.hub.peers):
                self.hub.close(peer)
            raise
        finally:
            self.hub.shutdown()
            self.log.close()
        assert self.result is not None
        return self.result.exit_code

    def _settings(self, spec: RunSpec) -> Settings:
        return Settings(
            spec=spec,
            run_id=self.run_id,
            run_dir=str(self.run_dir),
            ranks_per_host=spec.resources.ranks_per_host or 1,
            usd_per_host_hour=spec.resources.usd_per_host_hour,
        )

    # ------------------------------------------------------------ the loop

    def _loop(self) -> None:
        now = self.clock.monotonic_ns()
        self._carry_out(self.machine.start(now))
        next_renewal = now + int(LEASE_S / 3 * 1e9)
        next_offset = now
        while self.result is None:
            now = self.clock.monotonic_ns()
            if now >= next_renewal:
                wait_s = LEASE_S / 3 if self.lease.renew() else RETRY_S
                next_renewal = now + int(wait_s * 1e9)
            self._tend_log()
            if now >= next_offset:
                self._ping()
                next_offset = now + int(OFFSET_EVERY_S * 1e9)
            deadlines = [self.machine.deadline_ns, self.presence.deadline_ns(), self._limit()]
            due = min(next_renewal, next_offset, self._retry_ns(now), *(at for at in deadlines if at is not None))
            asleep_from = self.clock.monotonic_ns()
            self.hub.run_once(max(0.0, (due - asleep_from) / 1e9))
            awake = self.clock.monotonic_ns()
            if awake > due:
                self.hub.run_once(0.0)  # a stopped process wakes up with "nothing came", whatever lies in its sockets
            self.presence.discount_pause(awake - max(due, asleep_from), awake)
            self._judge_presence()
            while self._orders:
                self._give(self._orders.pop(0))
            if self.machine.deadline_ns is not None and self.clock.monotonic_ns() >= self.machine.deadline_ns:
                self._give(Tick())
        self._farewell()

    def _tend_log(self) -> None:
        """Events that the disk did not take wait in memory: try again, and say so once it took them."""
        if self.log.trouble is None:
            return
        self._troubled = self._troubled or self.log.trouble
        if self.log.tend():
            text = f"the event log could not be written for a while ({self._troubled}); it is whole again"
            self._troubled = None
            self._append("run.message", {"text": text})

    def _retry_ns(self, now: int) -> int:
        return now + int((RETRY_S if self.log.trouble is not None else OFFSET_EVERY_S) * 1e9)

    def _limit(self) -> int | None:
        """When the run file's next limit is due, on our clock; once it is, the run is asked to save and leave."""
        now_ns = self._steady_ns()
        found = None if self._limited else self.guard.next(now_ns, clock_ns=self.clock.wall_ns())
        if found is None:
            return None
        left_ns = found.at_wall_ns - now_ns
        if left_ns <= 0:
            self._limited = True
            self._orders.append(StopRequest(source=found.why, exit_code=130))
        return self.clock.monotonic_ns() + max(0, left_ns)

    def _steady_ns(self) -> int:
        """Wall time by a clock that nobody steps: hours and dollars are not an hour more when the wall clock is."""
        now = self.clock.monotonic_ns()
        if self._wall_ahead_ns is None:
            self._wall_ahead_ns = self.clock.wall_ns() - now
        return now + self._wall_ahead_ns

    def _farewell(self) -> None:
        """Cite every writer's chain, then leave; agents still need a moment to read their orders."""
        until = time.monotonic() + 5.0
        while self.agents and time.monotonic() < until:
            self.hub.run_once(0.1)
        heads = event_log.heads(self.run_dir / "events", run_id=self.run_id)
        self._append("log.hash_heads", {"heads": {name: head for name, head in heads.items() if name != self.log.name}})
        self._append("supervisor.ended", {"reason": self.result.outcome if self.result else ""})
        self.log.sync()
        self.lease.give_back()

    def _on_signal(self, number: int) -> None:
        """Ctrl-C is the user's stop (130), SIGTERM a preemption (75); a second one leaves at once."""
        if number == signal.SIGTERM and self.ignore_term:
            return
        code = 75 if number == signal.SIGTERM else 130
        self._orders.append(StopRequest(source=signal.Signals(number).name, exit_code=code))

    def _leaving(self) -> bool:
        return self.result is not None and self.result.exit_code in (75, 130)

    def _judge_presence(self) -> None:
        now = self.clock.monotonic_ns()
        for host, why in self.presence.down(now):
            silent_s = self.presence.silent_s(host, now)
            # A connection that went silent may stay so long after a link has healed: both begin anew.
            for peer in (self.agents.pop(host, None), self.keepers.pop(host, None)):
                if peer is not None:
                    self.hub.close(peer)
            self.presence.forget(host)
            self.clocks.forget(host)
            self._give(HostDown(host=host, why=why, silent_s=silent_s))

    # ------------------------------------------------------------ inputs

    def _give(self, given: Input) -> None:
        self.lease.hold()
        self._carry_out(self.machine.handle(given, self.clock.monotonic_ns()))

    def _message(self, peer: Connection, message: dict[str, Any]) -> None:
        now = self.clock.monotonic_ns()
        who = peer.who
        if who is None:
            self._hello(peer, message, now)
        elif who.role == "client":
            self._from_client(peer, message)
        elif who.role == "beat" and self.keepers.get(who.host) is peer:
            self.presence.beat(who.host, now)
        elif who.role == "agent":
            self._from_agent(who.host, message, now)

    def _hello(self, peer: Connection, message: dict[str, Any], now: int) -> None:
        if message.get("t") != "hello":
            self.hub.close(peer)
            return
        try:
            peer.who = parse_hello(message)
        except UNUSABLE as error:
            self._refuse(peer, error)
            return
        if peer.who.role == "beat":
            self.keepers[peer.who.host] = peer
            self.presence.keeper_came(peer.who.host, now, every_s=float(message.get("every_s", 0.0)))
            self._tell_least()
        elif peer.who.role == "agent":
            self.agents[peer.who.host] = peer
            self.presence.agent_came(peer.who.host, now)
            self._give(HostUp(host=peer.who.host, hello=message))
            self._ping(peer.who.host)

    def _refuse(self, peer: Connection, error: Exception) -> None:
        """Somebody with the token sends what cannot be used: that ends the connection, not the run."""
        text = f"a connection was closed: a message on it cannot be used ({type(error).__name__}: {str(error)[:200]})"
        self._append("run.message", {"text": text})
        self.hub.close(peer)

    def _tell_least(self) -> None:
        """A corrected file may ask for a shorter limit of silence than hosts beat that were started with another."""
        least_s = self.presence.least_s
        if least_s > max(self.presence.timeout_s, self._least_told_s):
            self._least_told_s = least_s
            wanted = f"heartbeat_timeout_s={self.presence.timeout_s:g}"
            text = f"{wanted} counts as {least_s:g} s: that is three beats of hosts that were started with another"
            self._append("run.message", {"text": text})

    def _from_agent(self, host: str, message: dict[str, Any], now: int) -> None:
        if message.get("t") == "pong":
            self._offset(message, now)
            return
        if message.get("t") == "event" and self.on_event is not None:
            with contextlib.suppress(ValueError):
                self.on_event(Event.from_json({"run_id": self.run_id, "seq": -1, "host": host, **message["event"]}))
        self._give(FromHost(host=host, message=message))

    def _from_client(self, peer: Connection, message: dict[str, Any]) -> None:
        """A verb of another terminal: stop, restart, status."""
        kind = message.get("t")
        if kind == "stop":
            self._orders.append(stop_of(message))
        elif kind == "health":
            try:
                self._orders.append(health_of(message))
            except UNUSABLE as error:
                self._refuse(peer, error)
                return
        elif kind == "restart":
            self._restart()
        self.hub.send(peer, {"t": "status", **status(self.machine)})

    def _restart(self) -> None:
        """The run file was corrected: its policy, limits and times count too; one with a mistake changes nothing."""
        if self.machine.state.phase is not Phase.HELD_AFTER_FAILURE:
            return
        try:
            spec = RunSpec.model_validate_json((self.run_dir / "resolved.json").read_text())
            policy = load_policy(spec.recovery.policy)
        except (MusterError, ValueError, OSError) as error:
            self._append("run.message", {"text": f"not restarted: {str(error)[:500]}"})
            return
        self.presence.timeout_s = spec.recovery.heartbeat_timeout_s
        self._least_told_s = 0.0
        self._tell_least()
        self.guard.limits, self.guard.grace_s, self._limited = spec.limits, spec.recovery.grace_s, False
        self._orders.append(RestartRequest(settings=self._settings(spec), policy=policy))

    def _gone(self, peer: Connection, reason: str) -> None:
        who, now = peer.who, self.clock.monotonic_ns()
        if who is None:
            return
        if who.role == "agent" and self.agents.get(who.host) is peer:
            del self.agents[who.host]
            self.clocks.forget(who.host)
            self.presence.agent_went(who.host, now)
        elif who.role == "beat" and self.keepers.get(who.host) is peer:
            del self.keepers[who.host]
            self.presence.keeper_went(who.host, now)

    # ------------------------------------------------------------ effects

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Log):
                self._append(
                    effect.kind, effect.detail, host=effect.host, rank=effect.rank, step=effect.step, phase=effect.phase
                )
                if effect.sync:
                    self.log.sync()
            elif isinstance(effect, Send):
                peer = self.agents.get(effect.host)
                if peer is not None:
                    self.hub.send(peer, effect.message)
            else:
                self.result = effect

    def _append(self, kind: str, detail: Any, **more: Any) -> None:
        attempt = self.machine.state.attempt if hasattr(self, "machine") else 0
        event = self.log.append(kind, detail=detail, attempt=attempt, **more)
        self.guard.add(replace(event, wall_ns=self._steady_ns()))
        if kind == "host.allocated" and len(self.guard.unpriced) == 1:
            name = self.guard.unpriced[0]
            text = f"limits.max_usd cannot be kept: what {name} costs is unknown (resources.usd_per_host_hour says it)"
            self._append("run.message", {"text": text})
        if self.on_event is not None:
            self.on_event(event)

    # ------------------------------------------------------------ clocks

    def _ping(self, host: str | None = None) -> None:
        for name in [host] if host else list(self.agents):
            self.hub.send(self.agents[name], self.clocks.ping(name, self.clock.monotonic_ns()))

    def _offset(self, message: dict[str, Any], now: int) -> None:
        found = self.clocks.pong(message, now)
        if found is not None:
            host, offset = found
            self._append("clock.offset", {"offset_ns": offset.offset_ns, "error_ns": offset.error_ns}, host=host)


def serve(
    run_dir: Path,
    *,
    foreground: bool = False,
    on_event: Callable[[Event], None] | None = None,
    bind: str = "127.0.0.1",
    ignore_term: bool = False,
) -> int:
    """Supervise the run in ``run_dir`` until it has ended; return its exit code.

    Raises:
        ConflictError: another supervisor holds the run.
    """
    supervisor = Supervisor(run_dir=Path(run_dir).resolve(), on_event=on_event, bind=bind, ignore_term=ignore_term)
    return supervisor.serve()


__all__ = ["ConflictError", "Phase", "Supervisor", "serve"]
