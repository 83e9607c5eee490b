"""Context parallel without other ranks: who has which tokens, what they attend to, and how even the work is."""

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.core.errors import UsageError
from muster.train.data_feed.batch import make_batch
from muster.train.model import context_parallel
from muster.train.model.attention_needs import Needs
from muster.train.model.context_parallel import Context, lower_right, pieces

CPU = torch.device("cpu")


def batch_of(*rows):
    ids = torch.arange(sum(map(sum, rows))).view(len(rows), -1)
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])
    labels = ids.clone()
    labels[:, ::3] = -100
    return make_batch(ids, labels, positions, [length for row in rows for length in row], CPU)


@given(
    size=st.sampled_from([1, 2, 4]),
    cuts=st.lists(st.lists(st.integers(1, 15), max_size=4), min_size=1, max_size=3),
)
@settings(deadline=None, max_examples=60)
def test_every_token_attends_to_its_own_document_up_to_itself(size, cuts):
    """By the pieces of all ranks together, whatever the documents."""
    length = 16
    rows = []
    for each in cuts:
        bounds = [0, *sorted(set(each)), length]
        rows.append([end - start for start, end in pairwise(bounds)])
    batch = batch_of(*rows)
    seen = {}
    for rank in range(size):
        part = Context(None, rank, size).part_of(batch)
        assert part.input_ids.shape == (len(rows), length // size)
        assert part.supervised == int((part.labels != -100).sum())
        for row, of_row in enumerate(pieces(tuple(batch.cu_seqlens.tolist()), len(rows), length, rank, size)):
            at = 0
            for start, count, first, last in of_row:
                assert start == at, "the pieces are this rank's tokens, in their order"
                at += count
                mask = lower_right(count, last - first, CPU)
                for query in range(count):
                    token = int(part.input_ids[row, start + query])
                    seen[token] = [row * length + first + int(key) for key in mask[query].nonzero()]
            assert at == length // size
    for row, lengths in enumerate(rows):
        for start, count in zip(accumulate([0, *lengths]), lengths, strict=False):
            for place in range(start, start + count):
                assert seen[row * length + place] == [row * length + key for key in range(start, place + 1)]


def test_one_long_document_is_the_same_work_for_every_rank():
    work = []
    for rank in range(4):
        (of_row,) = pieces((0, 64), 1, 64, rank, 4)
        work.append(sum(int(lower_right(count, last - first, CPU).sum()) for _, count, first, last in of_row))
    assert len(set(work)) == 1 and sum(work) == 64 * 65 // 2


def test_a_model_that_it_cannot_attend_for_is_refused():
    able = Needs(
        window=None, softcap=False, sinks=False, head_dim=8, dropout=False, own_kernels=True, sdpa=True, flash=True,
        flex=True,
    )  # fmt: skip
    context_parallel.check(able, 16, 2)
    unable = Needs(**{**vars(able), "window": 8})
    with pytest.raises(UsageError, match="cp 2 is not possible: the model has a sliding window"):
        context_parallel.check(unable, 16, 2)
