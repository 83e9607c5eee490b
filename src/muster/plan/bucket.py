"""What a run's bucket costs in requests, and when faster storage pays. Sentences and sums, from the catalogue's prices.

How often a run's home is written to is in ``core.event_log.cadence``; shards of checkpoints are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from muster.catalog import rows
from muster.core.event_log import cadence
from muster.plan.constants import Constants
from muster.plan.format import dollars, gigabytes
from muster.plan.search import Candidate
from muster.plan.step_time import local_state_bytes
from muster.plan.workload import Workload

#: What all machines of a project read from buckets of a region together: Google's default quota, 200 Gbit/s (from
#: memory, unchecked). A cache in the zone does not count against it.
BUCKET_BYTES_PER_S = 25e9
#: A cache holds what it took in for at least a day.
CACHE_HOURS = 24.0
#: A save that takes more than this share of the time between two of them is worth a word.
SLOW_SAVE = 0.5


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Requests to a run's home in a bucket with a hierarchical namespace (which ``up`` makes), at most."""

    writes_per_hour: int
    """Class A: every writer has something to say in each interval."""
    reads_per_hour: int
    usd_per_hour: float
    prices: str
    """How far to trust them, and of when."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What hosts read before their first step."""

    bytes_: int
    from_hub: bool


def requests(hosts: int, ranks_per_host: int) -> Requests:
    """Of a run on so many hosts and a supervisor. Each rank, and the agent, has a file of output."""
    price = rows.storage()["hierarchical"]
    writes, reads = cadence.writes_an_hour(hosts, 1 + ranks_per_host), cadence.reads_an_hour(hosts)
    usd = writes / 1000 * price.usd_per_1000_writes + reads / 1000 * price.usd_per_1000_reads
    return Requests(
        writes_per_hour=writes,
        reads_per_hour=reads,
        usd_per_hour=usd,
        prices=f"{price.reliability}, {rows.table_date('storage.yaml')}",
    )


def advice(work: Workload, candidate: Candidate, weights: Weights | None, constants: Constants) -> Iterator[str]:
    """What would make starts, restores or saves of this plan faster for less than the wait costs."""
    nodes = candidate.num_nodes
    if weights is not None and weights.from_hub and nodes > 1:
        yield (
            f"each of {nodes} hosts downloads {gigabytes(weights.bytes_)} of weights from the hub at every start and "
            f"replacement ({gigabytes(nodes * weights.bytes_)} in all): model.weights: bucket has them there once"
        )
    if weights is not None:
        yield from _cache(candidate, weights, constants)
    yield from _rapid(work, candidate, constants)


def _cache(candidate: Candidate, weights: Weights, constants: Constants) -> Iterator[str]:
    """A cache takes the weights in once, and then hosts read as fast as each can."""
    nodes, usd_per_hour = candidate.num_nodes, candidate.cost.usd_per_hour
    each_s = weights.bytes_ / constants.store_bytes_per_s_per_node
    direct_s = max(each_s, nodes * weights.bytes_ / BUCKET_BYTES_PER_S)
    if usd_per_hour is None or direct_s <= each_s:
        return
    price, gib = rows.storage()["cache"], weights.bytes_ / 2**30
    usd = gib * (price.usd_per_gib_in + CACHE_HOURS * price.usd_per_gib_hour + nodes * price.usd_per_gib_out)
    saved = usd_per_hour * (direct_s - each_s) / 3600
    if saved > usd:
        yield (
            f"Anywhere Cache pays: {nodes} hosts read their weights in {each_s:.0f} s instead of {direct_s:.0f} s at "
            f"each start after the first, worth {dollars(saved)} of machines for {dollars(usd)} of cache a day"
        )


def _rapid(work: Workload, candidate: Candidate, constants: Constants) -> Iterator[str]:
    setting = candidate.setting
    state = local_state_bytes(work, setting) * setting.layout.ranks_per_replica
    rate = min(constants.store_bytes_per_s_per_node * candidate.num_nodes, BUCKET_BYTES_PER_S)
    save_s, every_s = state / rate, candidate.goodput.checkpoint_every_s
    if save_s > SLOW_SAVE * every_s:
        yield (
            f"a save of {gigabytes(state)} takes {save_s:.0f} s of the {every_s:.0f} s between two: more machines or a "
            "longer interval; a zonal bucket (Rapid) would be faster, but is written by gRPC alone, which Muster does "
            "not speak yet"
        )
