"""A host that nobody supervises and whose ranks have ended: it keeps what it holds, then writes it, then leaves.

A supervisor that comes within the wait finds all of it in memory. What only this host would lose by leaving is written
by its mover as a checkpoint, where it is the whole state; a part of it is kept for as long, and then said to be lost.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from muster.checkpoint_format.snapshot_ring import SnapshotInfo, list_snapshots
from muster.core.types import Layout
from muster.storage import uris

if TYPE_CHECKING:
    from muster.agent.host_agent import Agent

#: Without a supervisor and without work an agent stays for so long, or for ``recovery.keep_hosts_after_failure_s`` where that is longer.
LONELY_S = 120.0
REASON = "no supervisor and no work"
"""Why it left, as its last event says (a back end may look for it)."""


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A version of which every rank's shard is on this host."""

    step: int
    attempt: int
    layout: str
    ranks: tuple[Mapping[str, Any], ...]
    """As a flush is ordered: rank, tier, held_as (a replica's shard may lie under its twin's rank)."""


def newest_whole(held: Iterable[SnapshotInfo], *, without: Iterable[tuple[int, int]] = ()) -> Whole | None:
    """The newest version that is all here, own snapshots and copies for others together; None: there is none."""
    versions: dict[tuple[int, int, str], dict[int, str]] = defaultdict(dict)
    for one in held:
        tiers = versions[(one.step, one.attempt, one.layout)]
        if one.tier == "memory" or one.rank not in tiers:
            tiers[one.rank] = one.tier
    for (step, attempt, key), tiers in sorted(versions.items(), reverse=True):
        layout = Layout.from_key(key)
        ranks = []
        for rank in range(layout.world_size):
            twins = range(rank % layout.ranks_per_replica, layout.world_size, layout.ranks_per_replica)
            holder = next((twin for twin in (rank, *twins) if twin in tiers), None)
            if holder is not None:
                ranks.append({"rank": rank, "tier": tiers[holder], "held_as": holder})
        if len(ranks) == layout.world_size and (step, attempt) not in without:
            return Whole(step=step, attempt=attempt, layout=key, ranks=tuple(ranks))
    return None


class Alone:
    """Counts from the later of two moments: the supervisor was lost, the last rank ended."""

    def __init__(self, *, agent: Agent) -> None:
        self.agent = agent
        self._since_s = time.monotonic()
        self._writing: Whole | None = None
        self._until_s = 0.0
        self._given_up: set[tuple[int, int]] = set()

    def begin(self) -> None:
        """A supervisor was here until now."""
        self._since_s, self._writing = time.monotonic(), None

    def watch(self) -> None:
        """No supervisor answers: when the wait is over have the newest version written, and leave."""
        now = time.monotonic()
        if self.agent.crew.living():
            self.begin()
        elif self._writing is not None:
            if now > self._until_s:
                self._leave(f"step {self._writing.step} was not written within {self._patience_s():g} s")
        elif now - self._since_s > self._patience_s():
            self._write(now)

    def answered(self, answer: Mapping[str, Any], order: Mapping[str, Any]) -> None:
        """The mover's word on what ``watch`` ordered."""
        version = self._writing
        if version is None or (version.step, version.attempt) != (answer["step"], answer["attempt"]):
            return  # a supervisor came back meanwhile
        if not answer["ok"]:
            self.agent.log_event("run.message", {"text": f"step {version.step} was not written: {answer['reason']}"})
            self._given_up.add((version.step, version.attempt))
            self._writing = None  # an older version may be sound
        elif answer["t"] == "flushed" and answer["files"]:
            self._order("flush_commit", version, files=answer["files"])
        else:  # committed, now or by somebody before
            self.agent.depart(REASON)

    def _patience_s(self) -> float:
        return max(LONELY_S, self.agent.spec.recovery.keep_hosts_after_failure_s)

    def _write(self, now: float) -> None:
        held = list(list_snapshots(self.agent.memory))
        version = newest_whole(held, without=self._given_up)
        if version is None:
            self._leave(_partly(held))
            return
        first = any(one.rank == 0 and one.tier == "memory" for one in held)
        if not first and now - self._since_s < self._patience_s() + self.agent.spec.recovery.grace_s:
            return  # the host of rank 0 may hold it too, and two must not write the same files
        self._writing, self._until_s = version, now + self._patience_s()
        self._order("flush", version, ranks=list(version.ranks))

    def _order(self, kind: str, version: Whole, **more: Any) -> None:
        directory = self.agent.spec.checkpoint.dir or uris.join(str(self.agent.run_dir), "checkpoints")
        order = {"t": kind, "step": version.step, "attempt": version.attempt, "layout": version.layout}
        fence = max(self.agent.newest_attempt, self.agent.crew.attempt)
        self.agent.programs.mover.flush({**order, "uri": directory, "alone": True, **more}, fence=fence)

    def _leave(self, lost: str | None) -> None:
        if lost is not None:
            self.agent.log_event("run.message", {"text": f"{self.agent.host} leaves without a supervisor: {lost}"})
        self.agent.depart(REASON)


def _partly(held: Iterable[SnapshotInfo]) -> str | None:
    """What of a version lies here without the rest of it; None: nothing does."""
    newest = max(((one.step, one.attempt, one.layout) for one in held), default=None)
    if newest is None:
        return None
    ranks = sorted({one.rank for one in held if (one.step, one.attempt, one.layout) == newest})
    size = Layout.from_key(newest[2]).world_size
    return (
        f"its memory held step {newest[0]} of {', '.join(f'rank {rank}' for rank in ranks)} "
        f"(of {size}), not the whole state, and was not written"
    )
