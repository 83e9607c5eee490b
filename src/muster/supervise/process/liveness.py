"""Which hosts are alive: heartbeats and connections turned into up and down. Pure.

A host has two connections: its agent's and its watchdog's, which only sends heartbeats. Both closed means the host's
processes are gone (seen at once); silence on an open connection means a stopped host or a cut link (seen after the
heartbeat timeout); an agent alone may die and be restarted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from muster.core.heartbeat_timing import HeartbeatTiming

SECOND_NS = 1_000_000_000
#: Time for the watchdog to restart a dead agent.
AGENT_RETURN_S = 8.0


@dataclass
class HostSignals:
    """What was received from one host."""

    agent: bool = False
    watchdog: bool = False
    heartbeat_ns: int = 0
    every_s: float = 0.0
    """Interval of its heartbeats; 0: not announced yet."""
    agent_gone_ns: int | None = None
    watchdog_gone_ns: int | None = None
    up: bool = False


@dataclass
class HostLiveness:
    """Folds connections and heartbeats; ``down`` names hosts that count as lost, and why."""

    timing: HeartbeatTiming
    hosts: dict[str, HostSignals] = field(default_factory=dict)

    def agent_connected(self, host: str, now_ns: int) -> None:
        signs = self.hosts.setdefault(host, HostSignals())
        signs.agent, signs.up, signs.agent_gone_ns = True, True, None
        signs.heartbeat_ns = max(signs.heartbeat_ns, now_ns)

    def agent_disconnected(self, host: str, now_ns: int) -> None:
        signs = self.hosts[host]
        signs.agent, signs.agent_gone_ns = False, now_ns

    def watchdog_connected(self, host: str, now_ns: int, *, every_s: float = 0.0) -> None:
        signs = self.hosts.setdefault(host, HostSignals())
        signs.every_s = every_s
        signs.watchdog, signs.heartbeat_ns, signs.watchdog_gone_ns = True, now_ns, None

    def watchdog_disconnected(self, host: str, now_ns: int) -> None:
        signs = self.hosts[host]
        signs.watchdog, signs.watchdog_gone_ns = False, now_ns

    def heartbeat(self, host: str, at_ns: int) -> None:
        """It has said something, by whichever connection."""
        signs = self.hosts[host]
        signs.heartbeat_ns = max(signs.heartbeat_ns, at_ns)

    @property
    def least_s(self) -> float:
        """The shortest timeout that works for every host."""
        return self.timing.shortest_s(signs.every_s for signs in self.hosts.values())

    def discount_pause(self, late_ns: int, now_ns: int) -> None:
        """The supervisor itself ran this late: silence during that time does not count.

        When a whole machine pauses for a moment (a paused virtual machine, cores taken by others), the supervisor may
        wake before the watchdogs.
        """
        if late_ns > self.timing.own_pause_s * SECOND_NS:
            for signs in self.hosts.values():
                if signs.heartbeat_ns:
                    signs.heartbeat_ns = max(signs.heartbeat_ns, min(now_ns, signs.heartbeat_ns + late_ns))

    def down(self, now_ns: int) -> list[tuple[str, str]]:
        """(host, reason) for each host that was just lost; each is returned once."""
        lost = []
        for name, signs in self.hosts.items():
            reason = self._down_reason(signs, now_ns)
            if signs.up and reason:
                signs.up = False
                lost.append((name, reason))
        return lost

    def forget(self, host: str) -> None:
        """We closed both connections: a host that reconnects is treated as new."""
        self.hosts[host] = HostSignals()

    def silent_s(self, host: str, now_ns: int) -> float:
        """Time since its last heartbeat; 0 where a closed connection showed the fault at once."""
        signs = self.hosts[host]
        if not signs.heartbeat_ns or not (signs.agent or signs.watchdog):
            return 0.0
        return (now_ns - signs.heartbeat_ns) / SECOND_NS

    def silent(self, now_ns: int) -> list[str]:
        """Hosts of which nothing has been heard for their limit: to be listened to before ``down`` judges them."""

        return [
            name
            for name, signs in self.hosts.items()
            if signs.up and now_ns >= signs.heartbeat_ns + self._limit_ns(signs)
        ]

    def deadline_ns(self) -> int | None:
        """When ``down`` could next name a host, if nothing is received until then."""
        times = [at for signs in self.hosts.values() if signs.up for at in self._limits(signs)]
        return min(times, default=None)

    def _limits(self, signs: HostSignals) -> list[int]:
        limits = []
        if signs.watchdog or signs.agent:
            limits.append(signs.heartbeat_ns + self._limit_ns(signs))
        if not signs.agent and signs.agent_gone_ns is not None:
            limits.append(signs.agent_gone_ns + int(AGENT_RETURN_S * SECOND_NS))
        return limits

    def _limit_ns(self, signs: HostSignals) -> int:
        return int(self._limit_s(signs) * SECOND_NS)

    def _limit_s(self, signs: HostSignals) -> float:
        timing = self.timing
        return (timing.first_heartbeat_after_s if _is_starting(signs) else timing.host_lost_after_s)(signs.every_s)

    def _down_reason(self, signs: HostSignals, now_ns: int) -> str | None:
        limit_s = self._limit_s(signs)
        silent_s = (now_ns - signs.heartbeat_ns) / SECOND_NS
        if not signs.agent and not signs.watchdog:
            return "all its connections closed"
        if silent_s >= limit_s:
            if _is_starting(signs):
                return f"no heartbeat for {silent_s:.2f} s"
            return f"silent for {silent_s:.2f} s (limit {limit_s:g} s)"
        if not signs.agent and signs.agent_gone_ns is not None:
            away_s = (now_ns - signs.agent_gone_ns) / SECOND_NS
            if away_s >= AGENT_RETURN_S:
                return f"its agent did not come back within {AGENT_RETURN_S:g} s"
        return None


def _is_starting(signs: HostSignals) -> bool:
    """No heartbeat yet: it is watched by its agent's connection."""
    return signs.heartbeat_ns == 0 or (not signs.watchdog and signs.watchdog_gone_ns is None)
