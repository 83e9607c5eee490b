"""A rank whose processor is slower than the others' is named, and nobody is where all are alike (at night, on a machine
with nothing else to do: a neighbour that takes one rank's caches or processor for seconds does make it slow; where
others are at work the two tests of the night are skipped). How: ``slow_ranks``; ``benchmarks/stragglers.py`` does the
same with a verdict.
"""

import contextlib
import os

import pytest
from slow_ranks import (
    HEALTHY_STEPS,
    OTHERS,
    WITHIN,
    alone,
    beside,
    budget_error,
    named,
    quiet,
    run_of,
    slowed,
    told,
    usable,
)  # fmt: skip

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not usable(), reason="needs a cpu controller (cgroup v1) that it may write"),
]


def wait_for_quiet():
    """Skips the test where other programs do not end."""
    share = quiet()
    if share > OTHERS:
        pytest.skip(f"others take {share:.0%} of the processors, load {os.getloadavg()[0]:.1f}")


@contextlib.contextmanager
def judged_when_quiet(run):
    """A failure counts unless others (Muster's own agents included) took too much of the machine meanwhile."""
    share = beside([pid for pid, _ in run.ranks().values()])
    try:
        yield
    except AssertionError as error:
        if (share := share()) <= OTHERS:
            raise
        pytest.skip(f"failed while others took {share:.0%} of the processors: {str(error)[:300]}")


def test_a_slow_rank_is_named(tmp_path):
    """And training goes on. Before, for too few steps to be judged, nobody is."""
    with run_of(tmp_path / "run") as run:
        run.under_way(3)
        with alone(run) as groups:
            run.wait_for_step(15)
            assert not named(run), told(run)
            assert budget_error(run) < 0.01
            slowed(run, groups, 0.5, within=60)
            run.wait_until(run.actions, "a decision")
            assert set(run.actions()) == {"ignore"}, run.story()


def test_ten_percent_is_named_within_thirty_steps_five_times_of_five(tmp_path):
    taken = []
    for number in range(5):
        wait_for_quiet()
        with run_of(tmp_path / f"{number}") as run:
            run.under_way(3)
            with judged_when_quiet(run), alone(run) as groups:
                run.wait_for_step(12)
                taken.append(slowed(run, groups, 0.8, within=WITHIN))  # its steps: 11 to 12 % longer
    assert max(taken) <= WITHIN, taken


def test_nobody_is_named_in_five_healthy_runs(tmp_path):
    for number in range(5):
        wait_for_quiet()
        with run_of(tmp_path / f"{number}") as run:
            run.under_way(3)
            with judged_when_quiet(run):
                with alone(run):
                    run.wait_for_step(2 * HEALTHY_STEPS)
                assert not named(run), told(run)
