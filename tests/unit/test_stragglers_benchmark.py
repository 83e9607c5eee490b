"""What ``benchmarks/stragglers.py`` may say, and of which runs it says nothing."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from stragglers import verdict


def run(steps=None, problem="", others=0.05):
    return {"steps": steps, "problem": problem, "others": others, "load": 1.0}


NAMED, HEALTHY, MISSED = run(24), run(), run(problem="not within 30 steps")


@pytest.mark.parametrize(
    ("slow", "healthy", "says"),
    [
        ([NAMED] * 5, [HEALTHY] * 5, "SHOWN: named in 5 of 5 slow runs (after 24, 24, 24, 24, 24 steps)"),
        ([NAMED] * 4 + [MISSED], [HEALTHY] * 5, "NOT SHOWN: named in 4 of 5"),
        ([NAMED] * 5, [HEALTHY] * 4 + [run(problem="rank 0 is named")], "NOT SHOWN: named in 5 of 5"),
        ([NAMED] * 4 + [run(problem="missed", others=0.6)], [HEALTHY] * 5, "NOT RESOLVED, 1 runs failed while others"),
        ([MISSED, run(problem="missed", others=0.6)], [HEALTHY], "NOT SHOWN: named in 0 of 2"),
    ],
)
def test_the_verdict(slow, healthy, says):
    found = verdict(slow, healthy, 0.25)
    assert found.startswith(says) and "load 1.0 to 1.0" in found
