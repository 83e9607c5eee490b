"""What every function of recovery works on: the settings, the state, the time, and the effects so far."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from muster.core.layout import Layout, layout_for
from muster.policy.cluster_state import Policy
from muster.protocol.held_snapshots import Choice, Snapshot, newest_complete
from muster.protocol.ranks import RESIZE_EXIT_CODE
from muster.supervise.recovery.classify import natural_key
from muster.supervise.recovery.state import SECOND_NS, Effect, Host, Log, Send, Settings, State

#: Exit codes of ranks that were asked to exit.
REQUESTED_EXIT_CODES = (130, 75, RESIZE_EXIT_CODE)


@dataclass
class SupervisorContext:
    """One run's supervisor, between two inputs."""

    settings: Settings
    policy: Policy
    state: State = field(default_factory=State)
    now_ns: int = 0
    effects: list[Effect] = field(default_factory=list)

    def log(self, kind: str, detail: Mapping[str, Any], **extra: Any) -> None:
        self.effects.append(Log(kind=kind, detail=detail, **extra))

    def send(self, host: str, message: Mapping[str, Any]) -> None:
        self.effects.append(Send(host=host, message=message))

    def deadline(self, seconds: float) -> None:
        """Set the deadline of the current phase."""
        self.state.deadline_ns = self.now_ns + int(seconds * SECOND_NS)

    def await_first_step(self) -> None:
        """From now on the ranks have ``start_timeout_s`` to step or to report progress.

        A script of the user's own that has never called ``muster.run`` cannot be told from one that hangs: it has no
        deadline.
        """
        silent = self.settings.spec.command is not None and not self.state.last_applied_step
        if silent:
            self.state.deadline_ns = None
        else:
            self.deadline(self.settings.spec.recovery.start_timeout_s)

    def alarm(self, name: str, seconds: float) -> None:
        """An additional deadline, by name (``RecoveryStateMachine`` handles them)."""
        self.state.alarms[name] = self.now_ns + int(seconds * SECOND_NS)

    def usable(self) -> list[str]:
        """Hosts that could run ranks now, in natural order."""
        return sorted((host.name for host in self.state.hosts.values() if usable(host)), key=natural_key)

    def ranks_on(self, host: str) -> list[int]:
        """Ranks of the current attempt on ``host``."""
        return [rank for rank, name in self.state.ranks.items() if name == host]

    def largest_layout(self, num_hosts: int) -> Layout | None:
        """The layout of the most hosts, of ``num_hosts``, that can form one; None: no number of them can."""
        axes, per_host = self.settings.spec.parallelism.axes, self.settings.ranks_per_host
        layouts = (layout_for(axes, hosts * per_host, resize=True) for hosts in range(num_hosts, 0, -1))
        return next((layout for layout in layouts if layout is not None), None)

    def newest_held(
        self, *, hosts: Collection[str] | None = None, without: Collection[tuple[int, int]] = ()
    ) -> Choice | None:
        """The newest complete version in the memory of connected hosts; None: none is newer than what is committed.

        ``hosts``: only these. ``without``: (step, attempt) of versions that must not be used.
        """
        held = [
            Snapshot.reported(name, item)
            for name, host in self.state.hosts.items()
            if host.connected and (hosts is None or name in hosts)
            for item in host.snapshots
        ]
        choice = newest_complete([each for each in held if (each.step, each.attempt) not in without])
        return choice if choice is not None and choice.step >= self.state.committed_step else None

    def needed(self) -> int:
        """With fewer hosts the next attempt is not started."""
        return max(1, self.settings.min_hosts, self.state.needed_hosts)


def usable(host: Host) -> bool:
    """Whether it could run ranks now, and for longer than a moment."""
    present = host.connected and host.ready and not host.start_failed
    return present and not host.quarantined and host.preemption_grace_s is None
