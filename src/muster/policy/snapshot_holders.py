"""Which host holds the copies of which other one's snapshots, so that one fault seldom takes a state and its copy.

Hosts fail together by rack (its power, its switch) far more often than by anything larger, so a copy leaves the rack
first of all; within that it stays in the block, whose network is the nearest. Pure: the supervisor and the simulator
ask the same function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from muster.core.types import Topology

#: What a pair costs, so that any pair that leaves the rack is better than one that does not, even if a swap makes
#: the other pair worse; a host is never its own.
_SAME_BLOCK, _OTHER_BLOCK, _NOT_OUTSIDE, _ITSELF = 0, 1, 3, 7


def snapshot_holders(places: Sequence[Topology], before: Sequence[int] = ()) -> tuple[int, ...]:
    """For each host (by its index in the world's order) the index of the one that holds its copies; fewer than two
    hosts: nothing.

    Each host holds one other's. As many as possible leave the rack: all, unless a rack has more than half of the
    hosts. Without labels, or among hosts that have the same, it is the host half way round, since hosts next to each
    other in the order are often neighbours in the rack.

    Args:
        places: the hosts' labels, in the order of their ranks.
        before: the answer for the attempt before. Where it is of as many hosts (one was replaced in its place) only
            pairs move whose new labels demand it, and what the others hold stays of use.
    """
    if len(places) < 2:
        return ()
    holders = list(before) if len(before) == len(places) else _half_way_round(places)
    for host, least in enumerate(_least_costs(places)):
        if _cost(places, host, holders[host]) > least:
            _swap_with_the_best(places, holders, host)
    return tuple(holders)


def holders_to_log(hosts: Sequence[str], holders: Sequence[int]) -> Mapping[str, str]:
    """The same as names; nothing where they are what hosts without labels get."""
    if tuple(holders) == snapshot_holders([Topology()] * len(hosts)):
        return {}
    return {host: hosts[holder] for host, holder in zip(hosts, holders, strict=True)}


def logged_holders(hosts: Sequence[str], logged: Mapping[str, str]) -> tuple[int, ...]:
    """The inverse of ``holders_to_log``; what cannot be the answer for these hosts counts as nothing."""
    if not set(hosts) == set(logged) == set(logged.values()):
        return snapshot_holders([Topology()] * len(hosts))
    return tuple(hosts.index(logged[host]) for host in hosts)


def leaves_rack(one: Topology, other: Topology) -> bool | None:
    """Whether the two are in different racks; None: their labels do not say."""
    blocks_differ = bool(one.block and other.block) and one.block != other.block
    if blocks_differ or (one.rack and other.rack):
        return blocks_differ or one.rack != other.rack
    return None


def _half_way_round(places: Sequence[Topology]) -> list[int]:
    """Within each block, in the order of its racks: a rack of at most half the block is left."""
    holders = [0] * len(places)
    order = sorted(range(len(places)), key=lambda host: (places[host].block, places[host].rack, host))
    for block in dict.fromkeys(places[host].block for host in order):
        hosts = [host for host in order if places[host].block == block]
        for index, host in enumerate(hosts):
            holders[host] = hosts[(index + len(hosts) // 2) % len(hosts)]
    return holders


def _least_costs(places: Sequence[Topology]) -> list[int]:
    """For each host the least cost of a pair: a host with such a holder needs no better one."""
    racks = {(place.block, place.rack) for place in places if place.rack}
    blocks = {place.block for place in places if place.block}
    racks_in = Counter(block for block, _ in racks)
    costs = []
    for place in places:
        other_block = (place.block and len(blocks) > 1) or (place.rack and len(racks) > 1)
        same_block = place.rack and racks_in[place.block] > 1
        costs.append(_SAME_BLOCK if same_block else _OTHER_BLOCK if other_block else _NOT_OUTSIDE)
    return costs


def _cost(places: Sequence[Topology], host: int, holder: int) -> int:
    if host == holder:
        return _ITSELF
    if not leaves_rack(places[host], places[holder]):
        return _NOT_OUTSIDE
    return _SAME_BLOCK if places[host].block == places[holder].block else _OTHER_BLOCK


def _swap_with_the_best(places: Sequence[Topology], holders: list[int], host: int) -> None:
    """Exchange holders with the host by which most is gained, if anything is.

    A pair within rack X can always be swapped with a pair that does not touch X. Each pair touches X by its host or its
    holder, this one by both: where X has at most half of the hosts, one is left that does not.
    """
    own = _cost(places, host, holders[host])
    best, gain = host, 0
    for other, holder in enumerate(holders):
        now = own + _cost(places, other, holder)
        saved = now - _cost(places, host, holder) - _cost(places, other, holders[host])
        if saved > gain:
            best, gain = other, saved
    holders[host], holders[best] = holders[best], holders[host]
