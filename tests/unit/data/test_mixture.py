"""Cutting, holding out and mixing: arithmetic that loses no prediction and repeats nothing it should not."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.config.spec import TrainedTokenizer
from muster.data.formats import Document, Segment
from muster.data.mixture import Documents, cut, hold_out, mix
from muster.data.tokenise import _by_offsets, _by_segments
from muster.data.tokenizer import train

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=20)


@settings(deadline=None, max_examples=150)
@given(LENGTHS, st.integers(1, 12), st.sampled_from(["drop", "truncate", "split"]))
def test_every_prediction_is_kept_once_or_counted(lengths, length, rule):
    tokens = np.array(lengths, dtype=np.int64)
    documents, counts = cut(tokens, np.ones(tokens.sum(), dtype=np.uint8), length=length, on_overlong=rule)
    long = sum(count - 1 > length for count in lengths)
    assert (counts["dropped"], counts["truncated"], counts["split"]) == {
        "drop": (long, 0, 0),
        "truncate": (0, long, 0),
        "split": (0, 0, long),
    }[rule]
    assert counts["empty"] == sum(count < 2 for count in lengths) and counts["masked"] == 0
    targets = [
        target
        for start, size in zip(documents.starts, documents.lengths, strict=True)
        for target in range(start + 1, start + size + 1)
    ]
    assert len(targets) == len(set(targets)) and (documents.lengths <= length).all()
    if rule == "split":
        assert len(targets) == sum(max(0, count - 1) for count in lengths)


def test_documents_without_a_target_are_left_out():
    # Rows of 4 tokens; supervised: none, only the first token (nobody's target), only the last.
    mask = np.array([0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1], dtype=np.uint8)
    documents, counts = cut(np.array([4, 4, 4]), mask, length=8, on_overlong="drop")
    assert documents.rows.tolist() == [2] and (counts["masked"], counts["masked_rows"]) == (2, 2)
    # A completion that truncation cuts off goes with it.
    documents, counts = cut(np.array([4, 4, 4]), mask, length=2, on_overlong="truncate")
    assert (len(documents), counts["truncated"], counts["masked_rows"]) == (0, 3, 3)


@settings(deadline=None, max_examples=80)
@given(st.integers(2, 60), st.floats(0.001, 0.9))
def test_whole_rows_are_held_out(rows, fraction):
    documents = Documents(rows=np.repeat(np.arange(rows), 2), starts=np.arange(rows * 2), lengths=np.ones(rows * 2))
    train, out, chosen = hold_out(documents, fraction)
    assert set(train.rows) | set(out.rows) == set(range(rows)) and not set(train.rows) & set(out.rows)
    assert set(out.rows) == set(chosen.tolist()) and 1 <= len(chosen) < rows
    assert abs(len(chosen) - fraction * rows) <= 1


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 300), st.floats(0.1, 10)), min_size=1, max_size=4))
def test_shares_follow_the_weights(sources):
    counts, weights = [count for count, _ in sources], [weight for _, weight in sources]
    uses = mix(counts, weights)
    assert [len(each) for each in uses] == counts
    assert all(each.max() - each.min() <= 1 and each.min() >= 1 for each in uses)
    assert any((each == 1).all() for each in uses)
    total = sum(each.sum() for each in uses)
    for each, weight in zip(uses, weights, strict=True):
        assert abs(each.sum() - total * weight / sum(weights)) <= 1 + len(sources)


def test_equal_sources_of_equal_size_are_used_once():
    assert [each.tolist() for each in mix([3, 3], [1.0, 1.0])] == [[1, 1, 1], [1, 1, 1]]


@pytest.fixture
def encoder(tmp_path):
    return train(lambda: ["abab " * 50], TrainedTokenizer(kind="bpe", vocab_size=261), tmp_path)


def test_a_token_across_the_edge_of_a_turn_is_not_supervised(encoder):
    assert len(encoder.encode(["ab"])[0]) == 1
    segments = (Segment("ab", False), Segment("aba", True), Segment("b", False))
    ((ids, mask),) = _by_offsets([Document(segments=segments, whole=True, ends=False)], encoder)
    texts = [encoder.decode([token]) for token in ids]
    assert "".join(texts) == "ababab"
    place = 0
    for text, flag in zip(texts, mask, strict=True):
        assert bool(flag) == (place >= 2 and place + len(text) <= 5)
        place += len(text)
    assert any(mask)


def test_segments_are_tokenised_apart_and_ended(encoder):
    segments = (Segment("a", False), Segment("b", True))
    ((ids, mask),) = _by_segments([Document(segments=segments, whole=False, ends=True)], encoder)
    assert ids == [*encoder.encode_prompt("a"), *encoder.encode(["b"])[0], encoder.eos_id]
    assert mask == b"\0\1\1"
