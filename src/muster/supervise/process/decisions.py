"""From the state machine to the world: what was decided is made durable, then it is acted on.

Effects are carried out in their order. Before the first message (or the end) that follows a decision, everything logged
so far is made to survive this machine, in one write. Where that fails (a bucket that does not answer) nothing is sent
that is not durable: the messages wait, and so does the state machine, whose deadlines are put off by as long. The
lease, heartbeats and the log go on meanwhile. All of it waits as well while the lease holder is unknown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from muster.core.event_details.training import Step
from muster.core.event_log import SEAL_TIMEOUT_S
from muster.core.protocols import Clock
from muster.protocol.values import RankEvent
from muster.supervise.process.world import World
from muster.supervise.recovery.inputs import SECOND_NS, Effect, End, FromHost, Input, Log, Send, Tick
from muster.supervise.recovery.state_machine import RecoveryStateMachine

#: How soon a write that failed is tried again, and how long it is waited for then: the loop has others to answer, and
#: a write that is under way goes on.
RETRY_S, LOOK_S = 1.0, 0.1
#: So many inputs wait at least before steps that later ones overtook are left out: they are the bulk of hours, and what
#: is decided depends on a host's newest.
MOST_WAITING = 10_000


@dataclass
class Decisions:
    """Gives inputs to the state machine and carries out what it answers."""

    machine: RecoveryStateMachine
    world: World
    clock: Clock
    trouble: str | None = field(default=None, init=False)
    """Why effects wait; None: none does."""
    _decided: bool = field(default=False, init=False)
    """A decision was logged that is not durable yet."""
    _effects: deque[Send | End] = field(default_factory=deque, init=False)
    _inputs: deque[Input] = field(default_factory=deque, init=False)
    _most: int = field(default=MOST_WAITING, init=False)
    _since_ns: int = field(default=0, init=False)
    _retry_ns: int = field(default=0, init=False)

    @property
    def deadline_ns(self) -> int | None:
        """When ``tend`` has something to do, if no input comes before."""
        return self.machine.deadline_ns if self.trouble is None else self._retry_ns

    def start(self) -> None:
        """The first effects, before any input."""
        self._carry_out(self.machine.start(self.clock.monotonic_ns()))

    def give(self, given: Input) -> None:
        """Have the state machine answer ``given``, now or once earlier decisions are carried out."""
        if self._waits():
            self._inputs.append(given)
            if len(self._inputs) > self._most:
                self._inputs = deque(_without_old_steps(self._inputs))
                self._most = max(MOST_WAITING, 2 * len(self._inputs))
            return
        self._carry_out(self.machine.handle(given, self.clock.monotonic_ns()))

    def tend(self) -> None:
        """At ``deadline_ns``: tell the state machine, or try again what waits."""
        if self.deadline_ns is None or self.clock.monotonic_ns() < self.deadline_ns:
            return
        if self.trouble is None:
            self.give(Tick())
            return
        self.trouble = self._sync(LOOK_S)
        if self.trouble is None:
            self._release()

    def _waits(self) -> bool:
        """Whether nothing may be decided now."""
        if self.trouble is None and (reason := self.world.doubt()) is not None:
            self._begin_to_wait(reason)
        return self.trouble is not None

    def _begin_to_wait(self, reason: str) -> None:
        self.trouble, self._since_ns = reason, self.clock.monotonic_ns()
        self._retry_ns = self._since_ns + int(RETRY_S * SECOND_NS)
        self.world.note(f"the run's home cannot be written ({reason}): decisions wait until it can")

    def _release(self) -> None:
        held_ns = self.clock.monotonic_ns() - self._since_ns
        self.machine.postpone(held_ns)  # Nothing was sent while waiting, so no deadline has passed.
        self.world.note(f"the run's home can be written again: decisions waited {held_ns / SECOND_NS:.1f} s for it")
        effects, self._effects = list(self._effects), deque()
        self._carry_out(effects)
        while self._inputs and not self._waits():
            self._carry_out(self.machine.handle(self._inputs.popleft(), self.clock.monotonic_ns()))

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Log):
                self.world.append(effect)
                self._decided |= effect.sync
            elif self.trouble is not None or (self._decided and not self._durable()):
                self._effects.append(effect)
            else:
                self.world.act(effect)
        if self._decided and self.trouble is None:
            self._durable()

    def _durable(self) -> bool:
        """Whether every decision so far is; if not, from here on effects wait."""
        reason = self._sync(SEAL_TIMEOUT_S)
        if reason is None:
            return True
        self._begin_to_wait(reason)
        return False

    def _sync(self, timeout_s: float) -> str | None:
        reason = self.world.doubt() or self.world.sync(timeout_s)
        if reason is None:
            self._decided = False
        else:
            self._retry_ns = self.clock.monotonic_ns() + int(RETRY_S * SECOND_NS)
        return reason


def _without_old_steps(inputs: Sequence[Input]) -> list[Input]:
    """In their order, without steps of which a newer one of the same rank waits too."""
    result: list[Input] = []
    newer: set[tuple[str, int | None, int]] = set()
    for given in reversed(inputs):
        if isinstance(given, FromHost) and isinstance(given.message, RankEvent) and given.message.kind == Step.kind:
            of = (given.host, given.message.rank, given.message.attempt)
            if of in newer:
                continue
            newer.add(of)
        result.append(given)
    return result[::-1]
