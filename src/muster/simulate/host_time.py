"""Host-seconds by category. The parts add up to the purchased time without a residual category."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from muster.simulate.stage_arithmetic import Parts
from muster.supervise.recovery.state import Phase, State

#: Category -> one sentence; those of the ledger where it has the same. The order is that of tables.
CATEGORIES: dict[str, str] = {
    "productive": "steps that the final state rests on, at the reference's pace",
    "tax": "what fault tolerance costs every step",
    "provision": "bought, our agent on it not ready yet",
    "start": "processes, rendezvous, weights, warm-up of the first attempt",
    "restart": "noticed, not yet reading state: ending, deciding, processes, communicators",
    "restore": "training state being read back from the disk or bucket tier",
    "warmup": "compilation and what the first steps took beyond a normal one",
    "checkpoint": "training paused for a save",
    "straggler": "steps at the pace of a slow host: the excess",
    "degraded": "fewer hosts than wanted: what a step cost per host beyond its share",
    "detect": "something was broken and not detected yet",
    "wait": "held, waiting for enough hosts to continue",
    "unfinished": "work of a step that was never applied",
    "redone": "applied steps that were lost and redone",
    "spare": "held as a spare, or too few for another replica",
    "out": "broken, in repair, still paid for",
    "stopped": "the run had ended by its own decision and was not started again yet",
}


@dataclass(kw_only=True)
class VirtualHost:
    """An agent with its ranks, as a supervisor sees it."""

    name: str
    up: bool = True
    attempt: int = 0
    ranks: list[int] = field(default_factory=list)
    dead: set[int] = field(default_factory=set)
    """Of ``ranks``: their processes have exited, whether or not the agent has noticed."""
    exits: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Rank -> the report of its exit, sent to every supervisor the agent connects to."""
    hung: Mapping[str, Any] | None = None
    """The report of a rank that hangs, repeated at each check."""
    linked: bool = True
    """Its agent is connected to a supervisor."""
    snapshots: dict[tuple[str, int, str], tuple[int, int]] = field(default_factory=dict)
    """(layout, rank, tier) -> (step, attempt): the newest version held."""
    boots: int = 0
    joined: bool = False
    held_since_ns: int | None = 0
    """Paid for since; None: given back."""

    def list_snapshots(self) -> list[dict[str, Any]]:
        """Its snapshots as an agent reports them."""
        return [
            {"layout": layout, "rank": rank, "tier": tier, "step": step, "attempt": attempt}
            for (layout, rank, tier), (step, attempt) in self.snapshots.items()
        ]

    def hello(self, step: int) -> dict[str, Any]:
        """Its agent's first message."""
        return {
            "t": "hello", "attempt": self.attempt, "ready": True, "step": step,
            "alive": {str(rank): 1 for rank in self.ranks if rank not in self.dead}, "exited": sorted(self.exits),
            "store": [self.name, 1], "memory": [self.name, 2], "snapshots": self.list_snapshots(),
        }  # fmt: skip

    def begin(self, attempt: int, ranks: Sequence[int]) -> None:
        """It runs ``ranks`` of ``attempt``, and nothing else."""
        self.attempt, self.ranks = attempt, list(ranks)
        self.dead, self.exits, self.hung = set(), {}, None

    def forget(self) -> None:
        """All its processes are lost, and its memory with them."""
        self.begin(self.attempt, [])
        self.snapshots = {}


def hold_snapshots(ring: Sequence[VirtualHost], layout: str, step: int, *, replicate_snapshots: bool) -> None:
    """Every host holds its ranks' state of ``step``, and the next one in the ring a copy; what those hosts held of
    another layout has served (the agent tidies up at the new world's first step)."""
    for host in ring:
        host.snapshots = {key: held for key, held in host.snapshots.items() if key[0] == layout}
    for index, host in enumerate(ring):
        peer = ring[(index + 1) % len(ring)]
        for rank in host.ranks:
            host.snapshots[(layout, rank, "memory")] = (step, host.attempt)
            if replicate_snapshots and peer is not host:
                peer.snapshots[(layout, rank, "peer")] = (step, host.attempt)


@dataclass
class HostTime:
    """Host-seconds. ``purchased_s`` is summed by itself, host by host held, to check the parts against."""

    by: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0.0))
    stepping_s: float = 0.0
    """Of a segment that is not over: not yet classified."""
    credit_s: float = 0.0
    """What the applied steps of the final lineage are worth at the reference's pace: tokens, not time."""
    purchased_s: float = 0.0

    def add(self, category: str, host_s: float) -> None:
        """Raises KeyError on an unknown category."""
        self.by[category] += host_s

    def lose(self, good_host_s: float) -> None:
        """Applied steps of this worth are lost: their time becomes redone."""
        if self.credit_s > 0 and good_host_s > 0:
            took_s = self.by["productive"] * good_host_s / self.credit_s
            self.by["productive"] -= took_s
            self.by["redone"] += took_s
            self.credit_s -= good_host_s

    def classify(self, parts: Parts, hosts: int, *, good_host_s: float, tax: float) -> None:
        """The time of a segment on ``hosts`` hosts. ``good_host_s``: its applied steps at the
        reference's pace."""
        slow, taxed = parts.slow_s * hosts, good_host_s * tax
        excess = parts.applied_s * hosts - good_host_s - taxed - slow
        # Fewer hosts can pad less than all of them do: then a host-second yields more than the reference's.
        self.add("productive", good_host_s + min(0.0, excess))
        self.add("degraded", max(0.0, excess))
        self.add("tax", taxed)
        self.add("straggler", slow)
        self.credit_s += good_host_s
        self.add("unfinished", parts.unfinished_s * hosts)
        self.add("checkpoint", parts.stall_s * hosts)
        self.stepping_s -= parts.elapsed_s * hosts

    def pass_by(
        self, span_s: float, job: str, hosts: Iterable[VirtualHost], state: State, world: AbstractSet[str] | None
    ) -> None:
        """``span_s`` have passed, in which nothing changed. ``world``: the hosts whose ranks are there; None: those
        that the machine counts on for the next attempt."""
        named = (
            world
            if world is not None
            else set(state.active if state.phase in (Phase.RUN, Phase.FLUSH) else state.target)
        )
        booting = state.phase in (Phase.STARTING, Phase.ENDED)
        counts = dict.fromkeys(("world", "joined", "provision", "out"), 0)
        for host in hosts:
            if host.held_since_ns is None:
                continue
            known = state.hosts.get(host.name)
            if host.name in named and (host.up or world is not None):
                counts["world"] += 1
            elif not host.up or (known is not None and known.quarantined):
                counts["out"] += 1
            else:
                counts["joined" if host.joined else "provision"] += 1
        idle = "start" if booting else "spare"
        if job == "stopped":
            self.add("stopped", (counts["world"] + counts["joined"] + counts["provision"]) * span_s)
        else:
            if job == "stepping":
                self.stepping_s += counts["world"] * span_s
            else:
                self.add("wait" if state.phase is Phase.WAIT else job, counts["world"] * span_s)
            self.add(idle, counts["joined"] * span_s)
            self.add("provision", counts["provision"] * span_s)
        self.add("out", counts["out"] * span_s)

    @property
    def identity_error(self) -> float:
        """|sum of the parts - purchased| / purchased."""
        total = sum(self.by.values()) + self.stepping_s
        return abs(total - self.purchased_s) / self.purchased_s if self.purchased_s else abs(total)
