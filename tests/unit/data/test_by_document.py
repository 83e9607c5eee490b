"""Packed sequences read a document a row: the same documents, each with its own labels and positions."""

import numpy as np
import pytest

from muster.data.prepare import prepare

TEXT2SQL = {"type": "text2sql", "rows": 60, "heldout_rows": 6, "level": 1}


@pytest.fixture
def stores(make_spec, tmp_path):
    packed = prepare(make_spec([TEXT2SQL]), run_dir=tmp_path / "packed").train
    apart = prepare(make_spec([TEXT2SQL], packing=False), run_dir=tmp_path / "apart").train
    return packed, apart


def rows_of(store):
    return sorted(
        (tuple(row.input_ids[: row.tokens].tolist()), tuple(row.labels.tolist()), row.supervised_tokens)
        for row in store
    )


def test_they_are_the_rows_of_data_that_was_never_packed(stores):
    packed, apart = stores
    rows = packed.by_document()
    assert len(rows) == len(apart) == packed.counts["documents"] > len(packed)
    assert rows_of(rows) == rows_of(apart)
    assert (rows.tokens, rows.supervised_tokens) == (packed.tokens, packed.supervised_tokens)
    assert rows.longest_document == packed.longest_document == max(row.tokens for row in apart)
    for mine, other in zip(sorted(rows, key=lambda r: r.tokens), sorted(apart, key=lambda r: r.tokens), strict=True):
        assert np.array_equal(mine.position_ids, other.position_ids)
        assert np.array_equal(mine.document_lengths, other.document_lengths)
    with pytest.raises(IndexError, match=f"document {len(rows)} of {len(rows)}"):
        rows[len(rows)]


def test_a_row_is_cut_to_its_tokens_and_padding_has_no_high_positions(stores):
    packed, _ = stores
    rows = packed.by_document()
    rows.highest_position = 3
    row = rows[0]
    assert row.position_ids.max() == 3
    cut = row.cut(row.tokens)
    assert len(cut.input_ids) == len(cut.labels) == len(cut.position_ids) == row.tokens
    assert cut.document_lengths.tolist() == [row.tokens]
    assert row.cut(row.tokens + 2).document_lengths.tolist() == [row.tokens, 2]
    with pytest.raises(AssertionError):
        row.cut(row.tokens - 1)
