"""What every part of the machine works on: the settings, the state, the time, and the effects so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from muster.policy.situation import Policy
from muster.supervise.judge import natural_key
from muster.supervise.state import SECOND_NS, Effect, Log, Send, Settings, State

#: A rank that leaves because it was asked to, without an end to the run (the world grows).
YIELDED = 76
#: Exit codes of ranks that left when told to.
LEFT = (130, 75, YIELDED)


@dataclass
class Context:
    """One run's supervisor, between two inputs. The functions beside it fold one thing each."""

    settings: Settings
    policy: Policy
    state: State = field(default_factory=State)
    now_ns: int = 0
    effects: list[Effect] = field(default_factory=list)

    def log(self, kind: str, detail: Mapping[str, Any], **more: Any) -> None:
        self.effects.append(Log(kind=kind, detail=detail, **more))

    def send(self, host: str, message: Mapping[str, Any]) -> None:
        self.effects.append(Send(host=host, message=message))

    def deadline(self, seconds: float) -> None:
        """Wake the machine then, if nothing sets another deadline before."""
        self.state.deadline_ns = self.now_ns + int(seconds * SECOND_NS)

    def usable(self) -> list[str]:
        """Hosts that could run ranks now, in natural order."""
        return sorted(
            (host.name for host in self.state.hosts.values() if host.connected and host.ready and not host.quarantined),
            key=natural_key,
        )

    def needed(self) -> int:
        """With fewer hosts the next attempt is not begun."""
        return max(1, self.settings.min_hosts, self.state.needed_hosts)
