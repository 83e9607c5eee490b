"""What every function of recovery works on: the settings, the state, the time, and the effects so far."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from muster.core import layout
from muster.core.snapshots import SnapshotCopy
from muster.core.typed_json import JsonObject
from muster.policy.cluster_state import Policy
from muster.protocol.held_snapshots import Choice, newest_complete
from muster.protocol.to_agent import DropCopies, ToAgent
from muster.supervise.recovery.inputs import SECOND_NS, Effect, Log, Send, Settings
from muster.supervise.recovery.phases import Draining, NextHosts, Phase, Running, Starting, Waiting
from muster.supervise.recovery.state import Host, State


@dataclass
class SupervisorContext:
    """One run's supervisor, between two inputs."""

    settings: Settings
    policy: Policy
    state: State = field(default_factory=State)
    now_ns: int = 0
    effects: list[Effect] = field(default_factory=list)

    def log(
        self,
        kind: str,
        detail: JsonObject,
        *,
        host: str | None = None,
        rank: int | None = None,
        step: int | None = None,
        phase: str | None = None,
        sync: bool = False,
    ) -> None:
        event = Log(kind=kind, detail=detail, host=host, rank=rank, step=step, phase=phase, sync=sync)
        self.effects.append(event)

    def send(self, host: str, message: ToAgent) -> None:
        self.effects.append(Send(host=host, message=message))

    def deadline(self, seconds: float) -> None:
        """Set the deadline of the current phase."""
        self.state.phase.deadline_ns = self.now_ns + int(seconds * SECOND_NS)

    def enter(self, phase: Phase) -> None:
        """The run is in ``phase`` now: a row of the table in ``docs/explanation/recovery.md``."""
        self.state.phase = phase

    def await_first_step(self) -> None:
        """From now on the ranks have ``start_timeout_s`` to step or to report progress.

        A script of the user's own that has never called ``muster.run`` has no deadline: it cannot be distinguished
        from one that hangs.
        """
        silent = self.settings.spec.command is not None and not self.state.last_applied_step
        if silent:
            self.state.phase.deadline_ns = None
        else:
            self.deadline(self.settings.spec.recovery.start_timeout_s)

    def alarm(self, name: str, seconds: float) -> None:
        """An additional deadline, by name (``RecoveryStateMachine`` handles them)."""
        self.state.alarms[name] = self.now_ns + int(seconds * SECOND_NS)

    def usable(self) -> list[str]:
        """Hosts that could run ranks now, in natural order."""
        return sorted((host.name for host in self.state.hosts.values() if usable(host)), key=natural_key)

    def largest_layout(self, num_hosts: int) -> layout.Layout | None:
        """As ``layout.largest_layout``."""
        return layout.largest_layout(self.settings.spec.rank_axes, num_hosts, self.settings.ranks_per_host)

    def newest_held(
        self, *, hosts: Collection[str] | None = None, without: Collection[tuple[int, int]] = ()
    ) -> Choice | None:
        """The newest complete version in the memory of connected hosts; None: none is newer than what is committed.

        Copies that were rejected, or that an error of memory may have spoilt, do not count. ``hosts``: only these.
        ``without``: not these (step, attempt).
        """
        held = [
            copy
            for name, host in self.state.hosts.items()
            if host.connected and (hosts is None or name in hosts)
            for copy in host.ranks.snapshots
            if copy.host == name
            and copy not in self.state.saves.rejected
            and (copy.step, copy.attempt) not in without
            and copy.step <= self.state.saves.distrusted.get(copy.attempt, copy.step)
        ]
        choice = newest_complete(held, local_steps=self.local_steps)
        return choice if choice is not None and choice.step >= self.state.saves.committed_step else None

    @property
    def local_steps(self) -> int:
        """Steps that replicas make by themselves, so that what one holds is no copy of another; 0: they do not."""
        training = self.settings.spec.training
        return 0 if training is None else training.local_steps

    def reject(self, copies: Iterable[SnapshotCopy], reason: str) -> None:
        """These copies are not intact: choose none of them again, and have their hosts drop them."""
        new = [copy for copy in dict.fromkeys(copies) if copy not in self.state.saves.rejected]
        if not new:
            return
        self.state.reject(new)
        for copy in new:
            self.log("snapshot.rejected", {"copy": vars(copy), "reason": reason}, host=copy.host, step=copy.step)
        for name in sorted({copy.host for copy in new}):
            if name in self.state.hosts and self.state.hosts[name].connected:
                self.send(name, DropCopies(copies=tuple(copy for copy in new if copy.host == name)))

    def needed(self, following: NextHosts) -> int:
        """With fewer hosts the next attempt is not started."""
        return max(1, self.settings.min_hosts, following.needed)

    def following(self) -> NextHosts:
        """The attempt to come, as far as it is known."""
        phase = self.state.phase
        return phase.next if isinstance(phase, Draining | Waiting) else NextHosts(hosts=self.members())

    def members(self) -> list[str]:
        """Hosts of the current attempt, or of the next one while ranks are being replaced or a resize is under way."""
        phase = self.state.phase
        if isinstance(phase, Running):
            return list(phase.resize.hosts if phase.resize is not None else self.state.active)
        if isinstance(phase, Draining | Waiting):
            return list(phase.next.hosts)
        return self.usable() if isinstance(phase, Starting) else []


def usable(host: Host) -> bool:
    """Whether it could run ranks now, and for longer than a moment."""
    present = host.connected and host.readiness.ready and not host.readiness.start_failed
    return present and not host.quarantined and host.notice.grace_s is None


def natural_key(name: str) -> tuple[int | str, ...]:
    """Sort ``host-2`` before ``host-10``."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name))
