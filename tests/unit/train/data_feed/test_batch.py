"""Micro-batches and their static shapes."""

from dataclasses import dataclass

import numpy as np
import torch
from fakes.small_model import CPU

from muster.train.data_feed.batch import batch_from, make_batch, padding_batch


@dataclass
class Row:
    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    document_lengths: np.ndarray
    grades: None = None

    @property
    def tokens(self):
        return int(self.document_lengths.sum())


def row(start, lengths):
    size = sum(lengths)
    labels = np.arange(start + 1, start + 1 + size, dtype=np.int32)
    labels[: lengths[0]] = -100
    return Row(
        np.arange(start, start + size, dtype=np.int32),
        labels,
        np.concatenate([np.arange(n) for n in lengths]).astype(np.int32),
        np.array(lengths, dtype=np.int32),
    )


class Rows(list):
    cut_to = None


STORE = Rows([row(0, [3, 5]), row(10, [8]), row(20, [1, 1, 6])])


def test_a_batch_of_rows():
    batch = batch_from(STORE, (2, 0), CPU)
    assert batch.input_ids.dtype == torch.int64
    assert batch.input_ids.tolist() == [list(range(20, 28)), list(range(8))]
    assert batch.cu_seqlens.tolist() == [0, 1, 2, 8, 11, 16] and batch.cu_seqlens.dtype == torch.int32
    assert batch.max_seqlen == 6
    assert batch.supervised == 7 + 5
    assert batch.tokens == (8, 8) and bool(batch.real().all())
    assert batch.labels.flatten()[batch.targets].min() >= 0


def test_static_shapes_add_no_documents_and_say_that_their_number_changes():
    wide = Rows([row(0, [64]), row(0, [20, 44]), row(0, [2] * 32)])
    batches = [batch_from(wide, (index,), CPU, static_shapes=True) for index in (0, 1, 2)]
    assert [len(batch.cu_seqlens) for batch in batches] == [2, 3, 33]
    assert {batch.max_seqlen for batch in batches} == {64}
    assert all(batch.cu_seqlens._dynamo_weak_dynamic_indices == {0} for batch in batches)


def test_a_padding_batch_has_no_target_and_the_shapes_of_a_real_one():
    padding = padding_batch(2, 8, CPU, static_shapes=False)
    assert padding.supervised == 0 and padding.input_ids.shape == (2, 8)
    assert padding.cu_seqlens.tolist() == [0, 8, 16]
    static = padding_batch(1, 64, CPU, static_shapes=True)
    assert static.cu_seqlens.tolist() == [0, 64] and static.cu_seqlens._dynamo_weak_dynamic_indices == {0}


def test_documents_must_fill_the_batch():
    ids = torch.zeros(1, 4, dtype=torch.int64)
    try:
        make_batch(ids, ids, ids, [3], CPU)
    except AssertionError as error:
        assert "documents hold 3 tokens, the batch 4" in str(error)
    else:
        raise AssertionError("not refused")
