"""Who holds whose copies: outside the rack wherever possible, one for each host, few moves when one is replaced."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.core.types import Topology
from muster.policy.snapshot_holders import leaves_rack, snapshot_holders


def racks(*sizes, block="b0"):
    return [Topology(block=block, rack=f"r{number}") for number, size in enumerate(sizes) for _ in range(size)]


def outside(places, holders):
    return [leaves_rack(places[host], places[holder]) for host, holder in enumerate(holders)]


def balanced(holders):
    return sorted(holders) == list(range(len(holders))) and all(host != holder for host, holder in enumerate(holders))


labels = st.lists(
    st.builds(Topology, block=st.sampled_from(["", "a", "b"]), rack=st.sampled_from(["", "1", "2", "3"])), max_size=24
)


@settings(max_examples=300, deadline=None)
@given(labels, labels)
def test_each_host_holds_one_others_copies_whatever_the_labels(places, earlier):
    assert len(places) < 2 or balanced(snapshot_holders(places))
    before = snapshot_holders(earlier)
    assert len(places) < 2 or balanced(snapshot_holders(places, before))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.randoms())
def test_as_many_copies_leave_the_rack_as_can(sizes, random):
    places = racks(*sizes)
    random.shuffle(places)
    if len(places) < 2:
        return
    kept = outside(places, snapshot_holders(places)).count(False)
    # Of a rack with x of n hosts at most n - x copies find room outside.
    assert kept == max(0, 2 * max(sizes) - sum(sizes))


def test_a_copy_stays_in_its_block_where_that_has_another_rack():
    places = [*racks(4, 4, 4, block="a"), *racks(4, 4, block="b")]
    holders = snapshot_holders(places)
    assert all(outside(places, holders))
    assert all(places[host].block == places[holder].block for host, holder in enumerate(holders))


def test_the_only_rack_of_a_block_copies_to_another_block():
    places = [*racks(3, block="a"), *racks(3, block="b")]
    assert all(outside(places, snapshot_holders(places)))
    only_blocks = [Topology(block=name) for name in "aabb"]
    assert all(outside(only_blocks, snapshot_holders(only_blocks)))


def test_without_labels_it_is_the_host_half_way_round():
    assert snapshot_holders([Topology()] * 6) == (3, 4, 5, 0, 1, 2)
    assert snapshot_holders([Topology()] * 2) == (1, 0)
    assert snapshot_holders([Topology()]) == ()
    assert leaves_rack(Topology(), Topology(rack="1")) is None
    assert leaves_rack(Topology(block="a", rack="1"), Topology(block="b", rack="1")) is True


@pytest.mark.parametrize("rack", ["r7", "r3", "new", ""])
def test_a_replaced_host_moves_two_copies_at_most(rack):
    places = racks(*[4] * 8)
    before = snapshot_holders(places)
    places[5] = Topology(block="b0", rack=rack)
    after = snapshot_holders(places, before)
    moved = [host for host in range(len(places)) if before[host] != after[host]]
    assert len(moved) <= 2 and outside(places, after).count(False) == 0


def test_a_replaced_host_in_the_rack_that_holds_its_copies_moves_them():
    places = racks(2, 2, 2)
    before = snapshot_holders(places)
    places[0] = places[before[0]]
    after = snapshot_holders(places, before)
    assert after != before and all(outside(places, after))


def test_a_thousand_hosts_are_chosen_for_in_no_time():
    places = [Topology(block=f"b{host // 32}", rack=f"r{host // 4}") for host in range(1024)]
    began = time.process_time()
    before = snapshot_holders(places)
    places[77] = places[500]
    assert all(outside(places, snapshot_holders(places, before)))
    assert all(holder != host for host, holder in enumerate(snapshot_holders([Topology()] * 1024)))
    assert time.process_time() - began < 2.0
