"""The run's course: no sequence twice, none left out, whatever a policy changes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core.batch_schedule import BatchSchedule, BatchSegment, changed
from muster.core.errors import UsageError


def test_without_changes_it_is_the_run_files_batch():
    batch_schedule = BatchSchedule.of(12)
    assert batch_schedule.sequences_before(1) == 0 and batch_schedule.sequences_before(11) == 120
    assert (batch_schedule.at(1).global_batch_size, batch_schedule.at(999).learning_rate_scale) == (12, 1.0)


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), max_size=5), st.integers(1, 9), st.integers(1, 120))
def test_each_step_begins_where_the_one_before_ended(pieces, batch, steps):
    changes, first = [], 1
    for length, size in pieces:
        first += length
        changes.append(BatchSegment(first_step=first, global_batch_size=size))
    batch_schedule, at = BatchSchedule.of(batch, changes), 0
    for step in range(1, steps + 1):
        assert batch_schedule.sequences_before(step) == at
        at += batch_schedule.at(step).global_batch_size
    last = batch_schedule.last_step(at)
    assert last == steps


def test_a_change_begins_after_the_step_that_is_resumed_from_and_undoes_later_ones():
    one = changed([], resume_step=40, batch=12, requested={"global_batch_size": 8, "learning_rate_scale": 0.8})
    assert one == (BatchSegment(first_step=41, global_batch_size=8, learning_rate_scale=0.8),)
    assert changed(one, resume_step=60, batch=12, requested={"global_batch_size": 8, "learning_rate_scale": 0.8}) == one
    assert changed(one, resume_step=60, batch=12, requested={})[-1] == BatchSegment(first_step=61, global_batch_size=12)
    assert changed(one, resume_step=30, batch=12, requested={}) == ()


@pytest.mark.parametrize(
    "wanted", [{"batch": 3}, {"global_batch_size": 0}, {"global_batch_size": 2.5}, {"learning_rate_scale": -1},
               {"learning_rate_scale": "half"}],
)  # fmt: skip
def test_nonsense_is_refused_in_one_line(wanted):
    with pytest.raises(UsageError, match="adjust"):
        changed([], resume_step=3, batch=12, requested=wanted)
