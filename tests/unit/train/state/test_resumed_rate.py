"""What a resume with another length or rate does to the learning rate is said, with figures."""

import pytest

from muster.config.spec import Optimizer
from muster.train.state.resume import SCHEDULE, rate_jump, schedule_extra

COSINE = Optimizer(learning_rate=0.01, schedule="cosine")


def jump(before, here, *, after, steps=(12, 24)):
    saved, mine = (schedule_extra(settings, count) for settings, count in zip((before, here), steps, strict=True))
    return rate_jump(saved[SCHEDULE], mine[SCHEDULE], after=after)


def test_more_steps_after_the_last_one():
    assert jump(COSINE, COSINE, after=12) == (
        "the learning rate jumps 4.9 times, from 0.001 at step 12 to 0.00491: its schedule was of 12 steps and a peak "
        "of 0.01, and is of 24 and 0.01"
    )


@pytest.mark.parametrize(
    ("before", "here", "after", "steps"),
    [
        (COSINE, COSINE, 6, (12, 12)),
        (Optimizer(schedule="constant"), Optimizer(schedule="constant"), 12, (12, 24)),
        (Optimizer(warmup_steps=8, learning_rate=0.01), Optimizer(warmup_steps=8, learning_rate=0.01), 4, (12, 24)),
    ],
    ids=["the same", "constant", "in the warm-up"],
)
def test_what_goes_on_as_planned_is_no_news(before, here, after, steps):
    assert jump(before, here, after=after, steps=steps) is None


def test_another_peak_and_fewer_steps_are_news_too():
    assert "jumps 10 times" in jump(
        Optimizer(schedule="constant", learning_rate=1e-3), Optimizer(schedule="constant", learning_rate=1e-2), after=3
    )
    assert "jumps 0.1" in jump(COSINE, COSINE, after=1, steps=(120, 2))


def test_a_save_that_does_not_say_is_passed_over():
    here = schedule_extra(COSINE, 24)[SCHEDULE]
    assert rate_jump(None, here, after=12) is None and rate_jump("?", here, after=12) is None
