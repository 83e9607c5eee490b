"""The statistics of ``benchmarks/evidence_cost.py``: what it may say of the goal."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from evidence_cost import CRASH_GOAL_S, interval, paired, summary, verdict


def pairs(added_s, noise_s, count=60):
    dice = random.Random(1)
    without = [0.3 + noise_s * dice.random() for _ in range(count)]
    return paired([each + added_s + noise_s * (dice.random() - 0.5) for each in without], without)


@pytest.mark.parametrize(
    ("added_s", "noise_s", "says"),
    [(0.0, 0.01, "within"), (0.012, 0.01, "within"), (0.04, 0.01, "over"), (0.02, 0.2, "not resolvable")],
)
def test_what_is_said_of_the_goal(added_s, noise_s, says):
    assert verdict(pairs(added_s, noise_s), CRASH_GOAL_S).startswith(says)


def test_few_pairs_say_nothing():
    assert verdict(pairs(0.0, 0.001, count=4), CRASH_GOAL_S).startswith("not resolvable with 4 pairs")


def test_the_interval_holds_what_was_added():
    low, high = interval(pairs(0.012, 0.02))
    assert low < 0.012 < high


def test_the_last_line_has_the_verdict_and_the_load():
    crash = {"interval_s": [-0.007, 0.012], "added_s": 0.002, "verdict": "within 0.02 s", "pairs": 40}
    found = summary({"crash": crash, "machine": {"cpus": 2, "load": [0.4, 1, 1]}, "load_at_the_end": [1.9, 1, 1]})
    assert found == (
        "verdict: a crash's evidence is within 0.02 s (+2.0 ms, 95 %: -7.0 to +12.0, 40 pairs); "
        "load 0.4 to 1.9 on 2 processors"
    )
