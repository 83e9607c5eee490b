"""The schedule: fixed by (seed, step), free of the number of ranks, every sequence once an epoch."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.data import schedule
from muster.data.schedule import num_steps, plan_step, sequences_at

SIZES = {
    "seed": st.integers(0, 2**40),
    "step": st.integers(1, 60),
    "num_sequences": st.integers(1, 200),
    "global_batch_size": st.integers(1, 50),
    "micro_batch_size": st.integers(1, 9),
}


@settings(deadline=None, max_examples=150)
@given(**SIZES, ranks=st.lists(st.integers(1, 17), min_size=2, max_size=4))
def test_the_same_micro_batches_for_any_number_of_ranks(ranks, **sizes):
    plans = [plan_step(**sizes, data_ranks=count) for count in ranks]
    assert len({plan.micro_batches for plan in plans}) == 1
    for plan in plans:
        shares = [plan.for_rank(rank) for rank in range(plan.data_ranks)]
        assert {len(share) for share in shares} == {plan.rounds}
        done = [ref for share in shares for ref in share if ref is not None]
        assert sorted(ref.index for ref in done) == list(range(len(plan.micro_batches)))
        assert all(plan.micro_batches[ref.index] == ref.sequences for ref in done)
        padding = [(place, ref) for share in shares for place, ref in enumerate(share) if ref is None]
        assert all(place == plan.rounds - 1 for place, _ in padding)
        assert len(padding) == plan.padding_rounds < plan.data_ranks


@settings(deadline=None, max_examples=100)
@given(**SIZES)
def test_each_epoch_visits_every_sequence_exactly_once(**sizes):
    size, batch = sizes["num_sequences"], sizes["global_batch_size"]
    steps = -(-3 * size // batch)
    order = []
    for step in range(1, steps + 1):
        plan = plan_step(**{**sizes, "step": step}, data_ranks=1)
        assert sum(len(micro) for micro in plan.micro_batches) == batch
        order += [index for micro in plan.micro_batches for index in micro]
    for epoch in range(3):
        assert sorted(order[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_epochs_and_seeds_differ():
    orders = {
        tuple(sequences_at(seed=seed, start=epoch * 50, count=50, num_sequences=50))
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(orders) == 4


@pytest.mark.parametrize("size", [2, 3, 7, 64, 100, 1000, 4097])
def test_the_network_for_large_data_is_a_permutation_too(size, monkeypatch):
    monkeypatch.setattr(schedule, "MATERIALISED", 1)
    found = []
    for start in range(0, size, 37):
        found += sequences_at(seed=5, start=start, count=min(37, size - start), num_sequences=size)
    assert Counter(found) == Counter(range(size))


def test_large_data_needs_no_table():
    size = 10**12
    found = sequences_at(seed=1, start=size - 3, count=6, num_sequences=size)
    assert len(set(found)) == 6 and all(0 <= index < size for index in found)
    assert max(found) - min(found) > size // 100


def test_the_order_is_pinned():
    """A change of this order would silently change every resumed run's data."""
    assert sequences_at(seed=0, start=0, count=10, num_sequences=10) == PINNED
    assert sequences_at(seed=7, start=10**13, count=3, num_sequences=10**12) == PINNED_LARGE


PINNED = [9, 0, 3, 2, 1, 6, 5, 4, 8, 7]
PINNED_LARGE = [562620458140, 72196623358, 396707948134]


def test_steps_from_epochs():
    assert num_steps(steps=7, epochs=None, num_sequences=10, global_batch_size=4) == 7
    assert num_steps(steps=None, epochs=2, num_sequences=10, global_batch_size=4) == 5
    assert num_steps(steps=None, epochs=0.5, num_sequences=10, global_batch_size=4) == 2
    assert num_steps(steps=None, epochs=None, num_sequences=1, global_batch_size=4) == 1


@pytest.mark.parametrize("name", ["step", "num_sequences", "global_batch_size", "micro_batch_size", "data_ranks"])
def test_counts_below_one_are_refused(name):
    sizes = {"step": 1, "num_sequences": 1, "global_batch_size": 1, "micro_batch_size": 1, "data_ranks": 1, name: 0}
    with pytest.raises(ValueError, match=name):
        plan_step(seed=0, **sizes)
