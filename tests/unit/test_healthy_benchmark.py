"""The statistics of ``benchmarks/healthy.py``: what it may say about an overhead and about false alarms."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from beat_gaps import Gaps, edges_of, rows
from healthy import LIMIT, Steps, overhead, steps_of, upper_rate
from processor_time import LINK, RANK, Share, beside_the_ranks, shares

from muster.core.events import Event


def run(dice, step_s, noise, steps=60):
    return Steps(busy=tuple(step_s * (1 + noise * dice.gauss(0, 1)) for _ in range(steps)), stall=(0.0,) * steps)


def pairs(true, *, noise, drift=0.0, count=10, seed=1, steps=60):
    """Pairs of runs of a machine that drifts from pair to pair."""
    dice, found = random.Random(seed), []
    for _ in range(count):
        speed = 0.3 * (1 + drift * dice.gauss(0, 1))
        found.append((run(dice, speed * (1 + true), noise, steps), run(dice, speed, noise, steps)))
    return found


def test_a_quiet_machine_resolves_what_a_pair_has_not_in_common():
    """Pairs drift by a tenth: only their differences count."""
    small = overhead(pairs(0.001, noise=0.003, drift=0.1), draws=200)
    assert small.low <= 0.001 <= small.high and small.verdict(LIMIT) == "within 0.5%"
    large = overhead(pairs(0.03, noise=0.003, drift=0.1), draws=200)
    assert large.low > 0.02 and large.verdict(LIMIT) == "over 0.5%"


def test_a_noisy_machine_resolves_nothing():
    found = overhead(pairs(0.0, noise=0.1), draws=200)
    assert found.verdict(LIMIT).startswith("not resolvable")


def test_the_interval_covers_the_truth():
    """About 95 of 100 times; with ten pairs it may be a little less."""
    covers = 0
    for seed in range(40):
        found = overhead(pairs(0.01, noise=0.02, seed=seed, steps=20), draws=100)
        covers += found.low <= 0.01 <= found.high
    assert covers >= 34


def test_few_pairs_of_long_runs_are_not_surer_than_they_are():
    """What differs from run to run, whatever their length, is in the interval."""
    dice, made = random.Random(3), []
    for _ in range(4):
        made.append((run(dice, 0.3 * (1 + 0.03 * dice.gauss(0, 1)), 0.001, 200), run(dice, 0.3, 0.001, 200)))
    found = overhead(made, draws=200)
    assert found.high - found.low > 0.01
    assert found.verdict(LIMIT) == "not resolvable with 4 pairs: 6 are the fewest"


def test_no_alarm_is_the_rule_of_three_and_some_are_more():
    assert upper_rate(0, 1.0) == pytest.approx(2.996, abs=0.001)
    assert upper_rate(0, 0.5) == pytest.approx(5.991, abs=0.002)
    assert upper_rate(1, 1.0) == pytest.approx(4.744, abs=0.001)  # the exact Poisson bound
    assert upper_rate(10, 1.0) == pytest.approx(16.96, abs=0.01)


def test_the_stall_is_taken_out_of_the_step_and_the_warm_up_out_of_the_run():
    details = [{"step_ns": 900_000_000}, {"step_ns": 310_000_000, "stall_ns": 10_000_000}, {"step_ns": 300_000_000}]
    events = [
        Event(run_id="r", attempt=1, seq=n, mono_ns=n, wall_ns=n, host="h", kind="step", step=n + 1, detail=detail)
        for n, detail in enumerate(details)
    ]
    found = steps_of(events[::-1], warm_up=1)
    assert found == Steps(busy=(0.3, 0.3), stall=(0.01, 0.0))


def test_gaps_between_beats_are_counted_by_sixths_of_the_limit_and_the_worst_is_kept():
    gaps = [Gaps(edges_of(0.3)), Gaps(edges_of(0.3))]
    for at in (100.0, 100.04, 100.11, 100.18, 100.4, 100.72):
        gaps[0].add(at)
    gaps[1].add(5.0)
    assert round(gaps[0].worst_s, 3) == 0.32 and gaps[1].worst_s == 0.0
    assert [count for _, count in rows(gaps)] == [1, 2, 0, 0, 1, 0, 1]
    assert rows(gaps)[0][0] == "under 0.05 s" and rows(gaps)[-1] == ("0.3 s and more", 1)


def test_processor_time_is_what_came_between_two_readings_and_is_set_against_the_ranks():
    before = {("agent", 1, 1): (5.0, 100), (RANK, 2, 2): (50.0, 10), (LINK, 2, 3): (0.5, 7)}
    after = {
        ("agent", 1, 1): (5.1, 120), ("agent", 1, 9): (0.1, 1), (RANK, 2, 2): (59.5, 11), (LINK, 2, 3): (1.0, 9),
    }  # fmt: skip
    found = shares(before, after)
    assert found["agent"].wakes == 21 and found["agent"].cpu_s == pytest.approx(0.2)
    assert found[LINK] == Share(cpu_s=0.5, wakes=2)
    assert beside_the_ranks(found) == pytest.approx((0.2 + 0.5) / (9.5 + 0.5)), "the link is no work of the rank's"
