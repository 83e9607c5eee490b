"""Which hosts are there: heartbeats and connections turned into two facts, up and down. Pure.

A host speaks over two connections: its agent's and its keeper's, which does nothing but beat. Both closed
means the host's processes are gone (seen at once); silence on an open connection means a stopped host or
a cut link (seen after the heartbeat timeout); an agent alone may die and come back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SECOND_NS = 1_000_000_000
#: Time a dead agent's successor gets to come back while its keeper beats.
AGENT_RETURN_S = 8.0
#: Silence is none before so many beats are missing: a limit may be lowered while keepers beat as they did.
BEATS = 3


@dataclass
class HostSignals:
    """What is known of one host."""

    agent: bool = False
    keeper: bool = False
    keeper_seen_ns: int = 0
    every_s: float = 0.0
    """How often its keeper beats; 0: it has not said so."""
    agent_gone_ns: int | None = None
    keeper_gone_ns: int | None = None
    up: bool = False


@dataclass
class HostLiveness:
    """Folds connections and beats; ``down`` names hosts that count as lost, and why."""

    timeout_s: float
    hosts: dict[str, HostSignals] = field(default_factory=dict)

    def agent_came(self, host: str, now_ns: int) -> None:
        signs = self.hosts.setdefault(host, HostSignals())
        signs.agent, signs.up, signs.agent_gone_ns = True, True, None
        signs.keeper_seen_ns = max(signs.keeper_seen_ns, now_ns)

    def agent_went(self, host: str, now_ns: int) -> None:
        signs = self.hosts[host]
        signs.agent, signs.agent_gone_ns = False, now_ns

    def keeper_came(self, host: str, now_ns: int, *, every_s: float = 0.0) -> None:
        signs = self.hosts.setdefault(host, HostSignals())
        signs.every_s = every_s
        signs.keeper, signs.keeper_seen_ns, signs.keeper_gone_ns = True, now_ns, None

    def keeper_went(self, host: str, now_ns: int) -> None:
        signs = self.hosts[host]
        signs.keeper, signs.keeper_gone_ns = False, now_ns

    def beat(self, host: str, now_ns: int) -> None:
        self.hosts[host].keeper_seen_ns = now_ns

    @property
    def least_s(self) -> float:
        """No limit below it can be kept for every host."""
        return max((BEATS * signs.every_s for signs in self.hosts.values()), default=0.0)

    def discount_pause(self, late_ns: int, now_ns: int) -> None:
        """The supervisor itself was not run for so long after it should have been: silence in that time says nothing.

        Where a whole machine stands still for a moment (a paused virtual machine, cores taken by others), the
        supervisor may wake before the keepers that were to beat.
        """
        if late_ns > self.timeout_s * SECOND_NS / 10:
            for signs in self.hosts.values():
                if signs.keeper_seen_ns:
                    signs.keeper_seen_ns = max(signs.keeper_seen_ns, min(now_ns, signs.keeper_seen_ns + late_ns))

    def down(self, now_ns: int) -> list[tuple[str, str]]:
        """(host, why) for each host that has just gone; each is told once."""
        found = []
        for name, signs in self.hosts.items():
            why = self._why_down(signs, now_ns)
            if signs.up and why:
                signs.up = False
                found.append((name, why))
        return found

    def forget(self, host: str) -> None:
        """Both connections were closed by us: whoever comes again is looked at as for the first time."""
        self.hosts[host] = HostSignals()

    def silent_s(self, host: str, now_ns: int) -> float:
        """Since it last beat; 0 where that says nothing: a fault showed at once by a closed connection."""
        signs = self.hosts[host]
        if not signs.keeper_seen_ns or not (signs.agent or signs.keeper):
            return 0.0
        return (now_ns - signs.keeper_seen_ns) / SECOND_NS

    def deadline_ns(self) -> int | None:
        """When ``down`` could next have something to say, if nothing is heard until then."""
        times = [at for signs in self.hosts.values() if signs.up for at in self._limits(signs)]
        return min(times, default=None)

    def _limits(self, signs: HostSignals) -> list[int]:
        found = []
        if signs.keeper or signs.agent:
            found.append(signs.keeper_seen_ns + int(self._limit_s(signs) * SECOND_NS))
        if not signs.agent and signs.agent_gone_ns is not None:
            found.append(signs.agent_gone_ns + int(AGENT_RETURN_S * SECOND_NS))
        return found

    def _limit_s(self, signs: HostSignals) -> float:
        return max(self.timeout_s, BEATS * signs.every_s)

    def _why_down(self, signs: HostSignals, now_ns: int) -> str | None:
        limit_s = self._limit_s(signs)
        silent_s = (now_ns - signs.keeper_seen_ns) / SECOND_NS
        if not signs.agent and not signs.keeper:
            return "all its connections closed"
        if silent_s >= limit_s:
            if signs.keeper_seen_ns == 0 or (not signs.keeper and signs.keeper_gone_ns is None):
                # The keeper has not spoken yet: a starting host, watched by its agent's connection.
                return None if silent_s < 10 * limit_s else f"no heartbeat for {silent_s:.2f} s"
            return f"silent for {silent_s:.2f} s (limit {limit_s:g} s)"
        if not signs.agent and signs.agent_gone_ns is not None:
            away_s = (now_ns - signs.agent_gone_ns) / SECOND_NS
            if away_s >= AGENT_RETURN_S:
                return f"its agent did not come back within {AGENT_RETURN_S:g} s"
        return None
