"""What the supervisor acts on: its journal, and the agents that are connected."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from muster.core.event_details.attempts import AttemptStarted
from muster.core.event_log import CLOSE_PATIENCE_S, EventLog
from muster.core.events import Event
from muster.core.typed_json import JsonObject
from muster.protocol.to_agent import ToAgent
from muster.supervise.process import run_file
from muster.supervise.process.home_sync import SupervisorHome
from muster.supervise.process.limits import LimitsTimer
from muster.supervise.recovery.inputs import End, Log, Send
from muster.supervise.recovery.state_machine import RecoveryStateMachine
from muster.transport.connections import Connection, ConnectionPool


@dataclass(kw_only=True)
class Journal:
    """One term's events: into its log, the home, the limits, ``on_event``. A full disk blocks nothing."""

    log: EventLog
    home: SupervisorHome
    limits: LimitsTimer
    machine: RecoveryStateMachine
    on_event: Callable[[Event], None] | None
    """Must not block: the loop calls it."""
    notes: deque[str] = field(default_factory=deque)
    """Messages for people from other threads and signal handlers (``deque.append``), logged by ``tend``."""
    _trouble: str | None = None
    """Why events could not be written."""

    def append(
        self,
        kind: str,
        detail: JsonObject,
        *,
        host: str | None = None,
        rank: int | None = None,
        step: int | None = None,
        phase: str | None = None,
    ) -> None:
        """Log one event of this moment and pass it on. Never raises for disk errors."""
        attempt = self.machine.state.attempt
        event = self.log.append(kind, detail=detail, attempt=attempt, host=host, rank=rank, step=step, phase=phase)
        self.limits.add_now(event)
        self.show(event)
        if kind == "host.allocated" and len(self.limits.guard.unpriced) == 1:
            name = self.limits.guard.unpriced[0]
            self.say(f"limits.max_usd cannot be kept: the price of {name} is unknown (set resources.usd_per_host_hour)")

    def show(self, event: Event) -> None:
        """Pass on an event that is logged here or on its host."""
        self.home.add(event)
        if self.on_event is not None:
            self.on_event(event)

    def say(self, text: str | None) -> None:
        """Log a message for people, where there is one."""
        if text is not None:
            self.append("run.message", {"text": text})

    def tend(self) -> None:
        """Log the notes; write again what the disk did not take, and log that once it has."""
        while self.notes:
            self.say(self.notes.popleft())
        if self.log.trouble is None:
            return
        self._trouble = self._trouble or self.log.trouble
        if self.log.tend():
            text = f"the event log could not be written for a while ({self._trouble}); it is complete again"
            self._trouble = None
            self.say(text)


@dataclass(kw_only=True)
class World:
    """Carries out what is decided (``decisions``)."""

    run_dir: Path
    run_id: str
    machine: RecoveryStateMachine
    journal: Journal
    home: SupervisorHome
    pool: ConnectionPool
    agents: dict[str, Connection] = field(default_factory=dict)
    """Host -> its agent's connection, where there is one."""
    result: End | None = None
    """How the run has ended."""

    def append(self, effect: Log) -> None:
        """Log what was decided. Before an attempt begins, its run file is repaired: ranks read it."""
        if effect.kind == AttemptStarted.kind:
            self.repair_run_file()
        self.journal.append(
            effect.kind, effect.detail, host=effect.host, rank=effect.rank, step=effect.step, phase=effect.phase
        )

    def repair_run_file(self) -> None:
        """Write the run file again where it is damaged or gone, and log that."""
        self.journal.say(run_file.repair(self.run_dir, self.machine.settings.spec))

    def sync(self, timeout_s: float) -> str | None:
        """Make what was logged durable; why it is not yet."""
        log = self.journal.log
        return None if log.sync(timeout_s) else log.unsealed or "no answer"

    def doubt(self) -> str | None:
        """Why nothing may be decided or sent now: the lease. Raises ConflictError where another supervisor has it."""
        return self.home.lease.hold()

    def note(self, text: str) -> None:
        """Log a message for people."""
        self.journal.say(text)

    def act(self, effect: Send | End) -> None:
        """Send a host's message, or end the run."""
        if isinstance(effect, End):
            self.result = effect
        else:
            self.send(effect.host, effect.message)

    def send(self, host: str, message: ToAgent) -> None:
        """To a host's agent; dropped where none is connected."""
        if (peer := self.agents.get(host)) is not None:
            self.pool.send(peer, message)

    def discard(self) -> None:
        """The lease was lost: close every connection without sending what is queued."""
        for peer in list(self.pool.peers):
            self.pool.close(peer)

    def close(self) -> None:
        """The end of this term: how the run ended is in the log alone, so a full disk is waited for."""
        self.pool.shutdown()
        self.home.close()
        self.journal.log.close(patience_s=CLOSE_PATIENCE_S)
