"""What travels between ``muster check --network`` and its programs on the hosts, and what its figures mean.

Sizes as nccl-tests count them: the whole output of all_gather, the whole input of reduce_scatter and all_to_all, the
buffer of all_reduce. Bus bandwidth = size / time times a factor that makes it comparable with a link's speed
(nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from muster.core.typed_json import Count, Name, Port, Record, Seconds
from muster.health.hang.evidence import RankEvidence

COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")


@dataclass(frozen=True, kw_only=True)
class Order(Record):
    """Orders a host's program to take part in a group of ranks. One line of JSON on its input."""

    name: Name
    """A secret of the members: their keys in the store begin with it."""
    store: Name
    port: Port
    world: Count
    """Ranks of all members; this host's are ``first`` and those after it."""
    first: Count
    collectives: tuple[Name, ...]
    sizes: tuple[Count, ...]
    limit_s: Seconds
    """Of each figure, with all its repeats."""
    start_s: Seconds
    """For all ranks to meet."""


@dataclass(frozen=True, kw_only=True)
class Measured(Record):
    """One figure of one rank: the median of its repeats."""

    rank: Count
    collective: Name
    size_bytes: Count
    seconds: Seconds
    spread: Seconds = 0.0
    """Standard deviation of one repeat, as share of the median; estimated from the range."""
    wrong: Count = 0
    """Elements that were not what they should be."""


@dataclass(frozen=True, kw_only=True)
class HostLine(Record):
    """What a host's program says: who it is, then for each order its figures and an end."""

    order: str = ""
    hello: Hello | None = None
    met: bool = False
    """A rank has met all the others."""
    measured: Measured | None = None
    failed: str = ""
    """Why the order ended before its last figure."""
    ranks: tuple[RankEvidence, ...] = ()
    """What its ranks did when a limit was over."""
    done: bool = False


@dataclass(frozen=True, kw_only=True)
class Hello(Record):
    """A host that is ready. Its store listens at ``address`` and ``port``."""

    address: Name
    port: Port
    ranks: Count
    device: str
    """Of its GPUs; empty: no GPU, then gloo on processors takes their place."""
    torch: str
    nccl: str = ""


def factor(collective: str, ranks: int) -> float:
    """Bus bandwidth is this times size / time.

    Raises:
        KeyError: another collective.
    """
    share = (ranks - 1) / ranks
    return {"all_gather": share, "reduce_scatter": share, "all_to_all": share, "all_reduce": 2 * share}[collective]


@dataclass(frozen=True, kw_only=True)
class SizeResult:
    """One size of one collective over a group: the slowest rank's median."""

    collective: str
    size_bytes: int
    ranks: int
    seconds: float
    spread: float
    wrong: int

    @property
    def algbw(self) -> float:
        """GB/s (1e9)."""
        return self.size_bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    @property
    def busbw(self) -> float:
        """GB/s (1e9)."""
        return self.algbw * factor(self.collective, self.ranks)


def size_results(measured: list[Measured], *, ranks: int) -> list[SizeResult]:
    """The figures that all ranks have, in the order in which they were taken."""
    found: dict[tuple[str, int], list[Measured]] = {}
    for one in measured:
        found.setdefault((one.collective, one.size_bytes), []).append(one)
    return [
        SizeResult(
            collective=collective, size_bytes=size, ranks=ranks, seconds=max(one.seconds for one in ones),
            spread=max(one.spread for one in ones), wrong=sum(one.wrong for one in ones),
        )
        for (collective, size), ones in found.items() if len({one.rank for one in ones}) == ranks
    ]  # fmt: skip
