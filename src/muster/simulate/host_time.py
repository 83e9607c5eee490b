"""Host-seconds by category. The parts add up to the purchased time without a residual category."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TypeAlias

from muster.core.snapshots import SnapshotCopy, Tier
from muster.core.types import Topology
from muster.protocol.client import HealthReport
from muster.protocol.hello import AgentHello
from muster.protocol.to_supervisor import FromAgent, RankExit, RankHang
from muster.protocol.version import MINE
from muster.simulate.stage_arithmetic import Parts
from muster.supervise.recovery.phases import Ended, Starting, Waiting
from muster.supervise.recovery.state import State

#: Category -> one sentence; those of the ledger where it has the same. The order is that of tables.
CATEGORIES: dict[str, str] = {
    "productive": "steps that the final state rests on, at the reference's pace",
    "overhead": "what fault tolerance costs every step",
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


#: Step and attempt of a snapshot.
Version: TypeAlias = tuple[int, int]
#: What the supervisor hears of a host: from its agent, or from a detector.
Report: TypeAlias = FromAgent | HealthReport


@dataclass(kw_only=True)
class VirtualHost:
    """An agent with its ranks, as a supervisor sees it."""

    name: str
    place: Topology = field(default_factory=Topology)
    copies_to: str | None = None
    """The host that gets copies of its snapshots, as the supervisor says."""
    up: bool = True
    attempt: int = 0
    ranks: list[int] = field(default_factory=list)
    starts_from: tuple[SnapshotCopy, ...] = ()
    """What its ranks read when they start."""
    dead: set[int] = field(default_factory=set)
    """Of ``ranks``: their processes have exited, whether or not the agent has noticed."""
    exits: dict[int, RankExit] = field(default_factory=dict)
    """By rank; sent to every supervisor that the agent connects to."""
    step: int = 0
    """The highest step that a rank here reported."""
    hung: RankHang | None = None
    """The report of a rank that hangs, repeated at each check."""
    linked: bool = True
    """Its agent is connected to a supervisor."""
    snapshots: dict[tuple[str, int, Tier], tuple[Version, ...]] = field(default_factory=dict)
    """(layout, rank, tier) -> the versions held, newest first."""
    rotten: set[SnapshotCopy] = field(default_factory=set)
    """Copies whose bytes have changed; those that are no longer held count for nothing."""
    boots: int = 0
    joined: bool = False
    held_since_ns: int | None = 0
    """Paid for since; None: released."""

    def list_snapshots(self) -> tuple[SnapshotCopy, ...]:
        """Its snapshots as an agent reports them."""
        return tuple(
            SnapshotCopy(step=step, attempt=attempt, rank=rank, layout=layout, host=self.name, tier=tier)
            for (layout, rank, tier), versions in self.snapshots.items()
            for step, attempt in versions
        )

    def holds(self, copy: SnapshotCopy) -> bool:
        return (copy.step, copy.attempt) in self.snapshots.get((copy.layout, copy.rank, copy.tier), ())

    def drop(self, copies: Iterable[SnapshotCopy]) -> None:
        for copy in copies:
            if copy.host == self.name and self.holds(copy):
                key = (copy.layout, copy.rank, copy.tier)
                left = [version for version in self.snapshots[key] if version != (copy.step, copy.attempt)]
                self.snapshots[key] = tuple(left)

    def hello(self) -> AgentHello:
        return AgentHello(
            version=MINE, host=self.name, pid=1, attempt=self.attempt, ready=True, step=self.step,
            alive={rank: 1 for rank in self.ranks if rank not in self.dead}, exited=tuple(sorted(self.exits)),
            store=(self.name, 1), memory=(self.name, 2), snapshots=self.list_snapshots(), place=self.place,
        )  # fmt: skip

    def begin(self, attempt: int, ranks: Sequence[int]) -> None:
        """It runs ``ranks`` of ``attempt``, and nothing else."""
        self.attempt, self.ranks, self.starts_from = attempt, list(ranks), ()
        self.dead, self.exits, self.hung = set(), {}, None

    def forget(self) -> None:
        """All its processes are lost, and its memory with them."""
        self.begin(self.attempt, [])
        self.snapshots, self.rotten, self.step = {}, set(), 0


def hold_snapshots(hosts: Sequence[VirtualHost], layout: str, step: int, before: int | None) -> None:
    """Every host holds its ranks' state of ``step`` and of the snapshot before it (None: what it held is that), and the
    one that the supervisor named has copies; what those hosts held of another layout has served (the agent tidies up at
    the new world's first step)."""

    def hold(holder: VirtualHost, rank: int, tier: Tier, attempt: int) -> None:
        newest, held = (step, attempt), holder.snapshots.get((layout, rank, tier), ())
        if held and held[0] == newest:
            return
        older = held[:1] if before is None else ((before, attempt),)
        holder.snapshots[layout, rank, tier] = (newest, *older)

    for host in hosts:
        host.snapshots = {key: held for key, held in host.snapshots.items() if key[0] == layout}
    named = {host.name: host for host in hosts}
    for host in hosts:
        peer = named.get(host.copies_to or "")
        for rank in host.ranks:
            hold(host, rank, "memory", host.attempt)
            if peer is not None:
                hold(peer, rank, "peer", host.attempt)


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

    def classify(self, parts: Parts, hosts: int, *, good_host_s: float, overhead: float) -> None:
        """The time of a segment on ``hosts`` hosts. ``good_host_s``: its applied steps at the
        reference's pace."""
        slow, overhead_s = parts.slow_s * hosts, good_host_s * overhead
        excess = parts.applied_s * hosts - good_host_s - overhead_s - slow
        # Fewer hosts can pad less than all of them do: then a host-second yields more than the reference's.
        self.add("productive", good_host_s + min(0.0, excess))
        self.add("degraded", max(0.0, excess))
        self.add("overhead", overhead_s)
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
        named = world if world is not None else set(state.counted_on)
        booting = isinstance(state.phase, Starting | Ended)
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
                self.add("wait" if isinstance(state.phase, Waiting) else job, counts["world"] * span_s)
            self.add(idle, counts["joined"] * span_s)
            self.add("provision", counts["provision"] * span_s)
        self.add("out", counts["out"] * span_s)

    @property
    def identity_error(self) -> float:
        """|sum of the parts - purchased| / purchased."""
        total = sum(self.by.values()) + self.stepping_s
        return abs(total - self.purchased_s) / self.purchased_s if self.purchased_s else abs(total)
