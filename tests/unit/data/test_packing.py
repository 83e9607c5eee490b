"""Packing: every document once, no sequence too long, close to full, fast, and the same every time."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.data import packing


def pack(*args, **named):
    return [each for window in packing.pack(*args, **named) for each in window]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 64), max_size=300), st.integers(1, 70))
def test_every_document_once_and_none_too_long(lengths, window):
    bins = pack(lengths, 64, window=window)
    assert sorted(place for each in bins for place in each) == list(range(len(lengths)))
    assert all(each and sum(lengths[place] for place in each) <= 64 for each in bins)
    assert pack(lengths, 64, window=window) == bins


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=300))
def test_within_the_bound_of_best_fit_decreasing(lengths):
    """11/9 of the optimum plus 4 bins (Johnson 1973); the optimum is at least the total over the capacity and at
    least the number of documents longer than half."""
    least = max(-(-sum(lengths) // 64), sum(length > 32 for length in lengths))
    assert len(pack(lengths, 64)) <= 11 / 9 * least * 1.25 + 4


def test_nearly_full_on_mixed_lengths():
    rng = random.Random(0)
    lengths = [min(2048, max(8, int(rng.lognormvariate(5.5, 0.8)))) for _ in range(5000)]
    bins = pack(lengths, 2048)
    assert sum(lengths) / (len(bins) * 2048) > 0.99


@pytest.mark.parametrize("lengths", [[65], [0], [3, -1]])
def test_impossible_lengths_are_refused(lengths):
    with pytest.raises(ValueError, match="1 to 64"):
        pack(lengths, 64)
