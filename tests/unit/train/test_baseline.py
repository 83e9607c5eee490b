"""The reference window: which steps run without fault tolerance, and what they come to."""

import pytest

from muster.config import load
from muster.core.errors import RunFileError
from muster.core.event_details.kinds import KINDS
from muster.train.baseline import BaselineWindow

MS = 1_000_000


def run_through(window, steps, length_ns):
    """The events' details that the window gives, by step."""
    found = {}
    for step in steps:
        detail = {"step_ns": length_ns(step) + 5 * MS, "data_wait_ns": 5 * MS, "tokens": 1000, "mfu": 0.4}
        told = window.add(step, detail)
        if told is not None:
            found[step] = told
    return found


def test_the_window_is_measured_once_after_it_has_settled():
    window = BaselineWindow.planned(20, resumed_at=0, world_size=2)
    assert [step for step in range(1, 60) if window.covers(step)] == list(range(11, 31))
    slow = {11, 12, 13}  # copies of earlier snapshots are still on their way
    (told,) = run_through(window, range(1, 60), lambda step: (30 if step in slow else 10 + step % 2) * MS).values()
    assert told["steps"] == 17 and told["world_size"] == 2 and told["first_step"] == 11
    assert told["tokens_per_s"] == pytest.approx(1000 / 0.010)  # the wait for data is not in it
    assert told["mfu"] == 0.4 and 0 <= told["spread"] < 0.2
    assert set(told) <= {*KINDS["baseline_rate"].required(), *KINDS["baseline_rate"].optional()}


@pytest.mark.parametrize(("steps", "resumed_at"), [(0, 0), (20, 8), (20, 15), (20, 500)])
def test_there_is_none_unless_asked_for_and_none_after_a_restart(steps, resumed_at):
    window = BaselineWindow.planned(steps, resumed_at=resumed_at, world_size=2)
    assert not any(window.covers(step) for step in range(1, 1000))
    assert run_through(window, range(resumed_at + 1, 100), lambda step: MS) == {}


def test_a_restart_before_it_still_measures():
    assert BaselineWindow.planned(20, resumed_at=7, world_size=2).covers(11)


RUN = """
name: short
model: {config: {model_type: llama, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4}}
data: {sources: [{type: random}]}
training: {steps: 40}
"""


@pytest.mark.parametrize(("wanted", "words"), [(10, "too few"), (31, "does not fit")])
def test_a_window_that_cannot_be_is_refused(wanted, words):
    with pytest.raises(RunFileError) as caught:
        load.loads(RUN, [f"recovery.baseline_steps={wanted}"], source="run.yaml")
    assert words in str(caught.value.problems[0])
    assert load.loads(RUN, ["recovery.baseline_steps=30"], source="run.yaml").spec.recovery.baseline_steps == 30
