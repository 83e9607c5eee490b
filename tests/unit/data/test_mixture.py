"""Cutting, holding out and mixing: arithmetic that loses no prediction and repeats nothing it should not."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.config.spec import TrainedTokenizer
from muster.data.formats import Document, Segment
from muster.data.mixture import Documents, cut, hold_out, mix, mix_rows
from muster.data.tokenise import _by_segments
from muster.data.tokenizer import Encoder, train

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


def test_segments_are_tokenised_apart_and_ended(encoder):
    segments = (Segment("a", False), Segment("b", True))
    ((ids, mask),) = _by_segments([Document(segments=segments, ends=True)], encoder)
    assert ids == [*encoder.encode_prompt("a"), *encoder.encode(["b"])[0], encoder.eos_id]
    assert mask == b"\0\1\1"


def test_tokens_that_texts_have_already_are_not_added(tmp_path, encoder):
    config = json.loads((encoder.folder / "tokenizer_config.json").read_text())
    (encoder.folder / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": True}))
    encoder = Encoder(encoder.folder)
    begin = encoder.fast.token_to_id("<s>")
    assert encoder.prefix == (begin,)
    rows = [("a", "b"), ("<s>a", "b</s>")]
    documents = [Document(segments=(Segment(prompt, False), Segment(text, True)), ends=True) for prompt, text in rows]
    plain, given = _by_segments(documents, encoder)
    assert plain == given and plain[0].count(begin) == 1 and plain[0].count(encoder.eos_id) == 1


def test_a_conversation_is_held_out_and_weighed_as_a_whole():
    chats = Documents(rows=np.repeat(np.arange(10), 3), starts=np.arange(30), lengths=np.ones(30))
    train, out, chosen = hold_out(chats, 0.3, parts_are_apart=False)
    assert not set(train.rows) & set(out.rows) and len(chosen) == 3
    one = Documents(rows=np.zeros(3, dtype=np.int64), starts=np.arange(3), lengths=np.ones(3))
    assert len(hold_out(one, 0.5, parts_are_apart=False)[1]) == 0, "its documents begin alike"
    assert len(hold_out(one, 0.5)[1]) == 1
    others = Documents(rows=np.arange(10), starts=np.arange(10), lengths=np.ones(10))
    assert [len(each) for each in mix_rows([chats, others], [1.0, 1.0], [True, True])] == [30, 10]
    assert [len(each) for each in mix_rows([chats, others], [1.0, 1.0], [False, False])] == [30, 30]
    assert [len(each) for each in mix_rows([chats.take(np.arange(0)), others], [1.0, 1.0], [True, False])] == [0, 10]


def test_of_a_conversation_the_answers_that_fit_are_kept():
    tokens, rows = np.array([4, 9, 9, 4, 9]), np.array([0, 0, 1, 2, 2])
    found, counts = cut(tokens, np.ones(35, dtype=np.uint8), length=5, on_overlong="drop", of_rows=rows)
    assert found.rows.tolist() == [0, 2] and found.starts.tolist() == [0, 22]
    assert (counts["dropped"], counts["dropped_answers"]) == (1, 2)
