"""Steps between snapshots: fixed, or by what they cost, and never different on two ranks."""

import itertools

import pytest

from muster.core.intervals import SNAPSHOT_SMALL_BYTES, snapshot_steps
from muster.train.state.snapshot_pace import SnapshotPace

LARGE = SNAPSHOT_SMALL_BYTES + 1


@pytest.mark.parametrize(
    ("stall_s", "step_s", "steps"),
    [(0.01, 1.0, 1), (0.011, 1.0, 2), (0.5, 1.0, 50), (2.64, 14.9, 18), (0.0, 1.0, 1), (1.0, 0.0, 1), (30.0, 10.0, 60),
     (900.0, 700.0, 1)],
)  # fmt: skip
def test_the_fewest_steps_at_which_snapshots_take_one_per_cent(stall_s, step_s, steps):
    assert snapshot_steps(stall_s, step_s, bytes_=LARGE) == steps
    if stall_s and step_s and 1 < steps < 600 / step_s:
        assert stall_s / (steps * step_s) <= 0.01 < stall_s / ((steps - 1) * step_s)


def test_a_small_state_is_copied_each_step_whatever_was_measured():
    assert snapshot_steps(5.0, 0.1, bytes_=SNAPSHOT_SMALL_BYTES) == 1


def test_where_failures_are_frequent_the_steps_that_they_throw_back_decide():
    """Young's optimum sqrt(2 C M), 0.5 s a snapshot: 31.6 s at a failure in 1,000 s, where 1 % would be 50 s."""
    steps = [snapshot_steps(0.5, 1.0, bytes_=LARGE, mtbf_s=mtbf_s) for mtbf_s in (1e9, 2500.0, 1000.0, 100.0, 0.1)]
    assert steps == [50, 50, 31, 10, 1]


class Ranks:
    """Ranks of one world, each with its own clock; what they agree on is the largest number."""

    def __init__(self, *stalls_s, setting="auto", step_s=1.0, bytes_=LARGE):
        self.now_s, self.step_s, self.stalls_s, self.step = 0.0, step_s, stalls_s, 0
        self.paces = [SnapshotPace(setting, bytes_, clock=lambda: self.now_s) for _ in stalls_s]
        self.taken = []

    def run(self, steps):
        for _ in range(steps):
            self.step += 1
            self.now_s += self.step_s
            agreed = max(pace.wants() for pace in self.paces)
            for pace in self.paces:
                pace.step_ended()
            due = {pace.due(self.step, [agreed].pop) for pace in self.paces}
            assert len(due) == 1, "on all ranks or on none"
            if due.pop():
                self.taken.append(self.step)
                for pace, stall_s in zip(self.paces, self.stalls_s, strict=True):
                    pace.took(stall_s)
                self.now_s += max(self.stalls_s)
        return self


def test_each_step_at_first_and_then_by_the_dearest_rank():
    ranks = Ranks(0.001, 0.2, 0.05).run(100)
    assert ranks.taken[:9] == [*range(1, 9), 20], "the first look is after 8 steps, and counts from the next"
    assert ranks.taken[9:] == [40, 60, 80, 100]
    assert {pace.every for pace in ranks.paces} == {20}
    assert "every 20 steps" in ranks.paces[1].describe() and "20% of a step of 1 s" in ranks.paces[1].describe()


def test_waiting_for_the_snapshot_before_asks_for_an_interval_that_holds_it_and_no_more():
    """On a GPU a snapshot takes 0.45 s beside steps of 0.15 s and holds them up by milliseconds: one every 3 steps
    waits for nothing. What one each step waited for is no cost of every third."""
    now_s, step, last = 0.0, 0, -1.0
    pace = SnapshotPace("auto", LARGE, clock=lambda: now_s)
    taken = []
    for step in range(1, 600):
        now_s += 0.15
        pace.step_ended()
        if pace.due(step, pace.wants):
            waited_s = max(0.0, last + 0.45 - now_s)
            now_s += waited_s + 0.001
            last = now_s
            pace.took(waited_s + 0.001, waited_s=waited_s, takes_s=0.45)
            taken.append(step)
    assert taken[:7] == [1, 2, 3, 4, 5, 6, 7]
    assert {b - a for a, b in itertools.pairwise(taken[9:])} == {3}, "at every look the same"
    assert "every 3 steps" in pace.describe() and "0.45 s until it counts" in pace.describe()


def test_the_interval_is_said_once_it_is_known_and_again_where_it_changes():
    said, rank = [], Ranks(0.2)
    for step in range(1, 101):
        rank.run(1)
        if (news := rank.paces[0].news()) is not None:
            said.append((step, news))
    assert [step for step, _ in said] == [9] and said[0][1].startswith("snapshots in memory every 20 steps: one takes")
    cheap = Ranks(0.001)
    assert [bool(cheap.run(1).paces[0].news()) for _ in range(12)].index(True) == 8, "a reason to stay is said, too"
    small = Ranks(0.2, bytes_=2 << 20).run(1).paces[0]
    assert "every step: a rank's state is small (2.1 MB)" in small.news() and small.news() is None
    assert Ranks(0.2, setting=3).run(3).paces[0].news() == (
        "snapshots in memory every 3 steps, as checkpoint.snapshot_every_steps says"
    )
    assert Ranks(0.2, setting=0).run(3).paces[0].news() is None


def test_measurements_that_scatter_change_nothing_and_another_pace_does():
    ranks = Ranks(0.2).run(40)
    ranks.stalls_s = (0.22,)
    ranks.run(200)
    assert ranks.paces[0].every == 20
    ranks.step_s = 10.0
    ranks.run(2000)
    assert ranks.paces[0].every == 3


@pytest.mark.parametrize(("setting", "taken"), [(0, []), (1, [1, 2, 3, 4, 5, 6]), (3, [3, 6])])
def test_a_number_of_the_run_file_is_kept_and_nobody_is_asked(setting, taken):
    pace = SnapshotPace(setting, LARGE)
    assert [step for step in range(1, 7) if pace.due(step, lambda: pytest.fail("asked"))] == taken


def test_a_baseline_without_snapshots_changes_nothing():
    """No snapshot was taken: nothing is known, and what is said of it is not measured."""
    pace = SnapshotPace("auto", LARGE)
    for _ in range(64):
        pace.step_ended()
    assert pace.wants() == 1 and "every step" in pace.describe()
