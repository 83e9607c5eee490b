"""Interval formulas against worked values of the literature's formulas (M = 17,280 s is five failures a day)."""

import math

import interval_formulas as formulas
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core import intervals
from muster.core.intervals import FailureRate, Tier

M = 17_280.0

#: C -> Young, Daly first order, Daly 2006, exact, goodput at the exact optimum for R = 1200, 120, 20.
WORKED = {
    43.0: (1219.05, 1176.05, 1190.55, 1190.55, 0.868636, 0.924659, 0.930025),
    30.0: (1018.23, 988.23, 998.33, 998.33, 0.879014, 0.935706, 0.941136),
    10.0: (587.88, 577.88, 581.23, 581.23, 0.901533, 0.959676, 0.965246),
    1.0: (185.90, 184.90, 185.24, 185.24, 0.922911, 0.982434, 0.988136),
    0.04: (37.18, 37.14, 37.15, 37.15, 0.930906, 0.990944, 0.996696),
}


@pytest.mark.parametrize("stall", WORKED)
def test_worked_values(stall):
    young, first, higher, exact, *goodputs = WORKED[stall]
    assert formulas.young(stall_s=stall, mtbf_s=M) == pytest.approx(young, abs=0.006)
    assert formulas.daly_first_order(stall_s=stall, mtbf_s=M) == pytest.approx(first, abs=0.006)
    assert formulas.daly(stall_s=stall, mtbf_s=M) == pytest.approx(higher, abs=0.006)
    best = formulas.exact(stall_s=stall, mtbf_s=M)
    assert best == pytest.approx(exact, abs=0.006)
    for recovery, goodput in zip((1200, 120, 20), goodputs, strict=True):
        found = formulas.complete_goodput(best, stall_s=stall, mtbf_s=M, recovery_s=recovery)
        assert found == pytest.approx(goodput, abs=6e-7)


@pytest.mark.parametrize(
    ("mtbf", "young", "first", "higher", "exact"),
    [(3600.0, 1469.69, 1169.69, 1276.498, 1276.877), (600.0, 600.0, 300.0, 416.667, 418.974)],
)
def test_hard_regime(mtbf, young, first, higher, exact):
    assert formulas.young(stall_s=300, mtbf_s=mtbf) == pytest.approx(young, abs=0.006)
    assert formulas.daly_first_order(stall_s=300, mtbf_s=mtbf) == pytest.approx(first, abs=0.006)
    assert formulas.daly(stall_s=300, mtbf_s=mtbf) == pytest.approx(higher, abs=6e-4)
    assert formulas.exact(stall_s=300, mtbf_s=mtbf) == pytest.approx(exact, abs=6e-4)


def test_daly_gives_up_at_twice_the_mtbf():
    assert formulas.daly(stall_s=1200, mtbf_s=600) == 600


@pytest.mark.parametrize(
    ("interval", "stall", "recovery", "complete", "first"),
    [
        (3600, 43, 1200, 0.82813, 0.81663),
        (1200, 43, 1200, 0.86863, 0.86484),
        (1200, 1, 1200, 0.90012, 0.89509),
        (1200, 1, 120, 0.95817, 0.95754),
    ],
)
def test_set_points(interval, stall, recovery, complete, first):
    known = {"stall_s": stall, "mtbf_s": M, "recovery_s": recovery}
    assert formulas.complete_goodput(interval, **known) == pytest.approx(complete, abs=6e-6)
    assert formulas.first_order_goodput(interval, **known) == pytest.approx(first, abs=6e-6)


def test_asynchronous():
    tier = Tier(stall_s=1, slowdown=0.01, drain_s=60, recovery_s=120, mtbf_s=M)
    best = intervals.asynchronous(tier)
    assert best == pytest.approx(235.15, abs=0.006)
    assert intervals.waste(best, tier) == pytest.approx(0.024025, abs=6e-7)
    slow = Tier(stall_s=1, drain_s=900, mtbf_s=M)
    assert intervals.asynchronous(slow) == 900  # one save in flight


def test_a_tier_that_nothing_falls_back_to_is_never_due():
    tier = Tier(stall_s=1, mtbf_s=math.inf)
    assert intervals.asynchronous(tier) == math.inf
    assert intervals.waste(math.inf, tier) == 0


@given(stall=st.floats(1e-6, 1e5), mtbf=st.floats(1.0, 1e8))
def test_exact_is_the_optimum_of_the_complete_model(stall, mtbf):
    best = formulas.exact(stall_s=stall, mtbf_s=mtbf)
    assert 0 < best <= mtbf * (1 + 1e-12)
    if stall > 20 * mtbf:
        return  # e^(C/M) leaves the range in which neighbours differ

    def goodput(interval):
        return formulas.complete_goodput(interval, stall_s=stall, mtbf_s=mtbf, recovery_s=0)

    for near in (best * 0.98, best * 1.02):
        assert goodput(best) >= goodput(near) * (1 - 1e-13)


@pytest.mark.parametrize("ratio", [1e-12, 1e-9, 1e-6, 1e-3, 0.03, 0.1, 0.5, 1.0, 3.0, 10.0])
def test_lambert_w_satisfies_its_equation(ratio):
    u = 1 + formulas._lambert_w0_near_branch(ratio)
    # -(u + log(1 - u)) = r, by a series that does not cancel (80 terms) or directly
    value = sum(u**n / n for n in range(2, 400)) if u < 0.9 else -(u + math.log1p(-u))
    assert value == pytest.approx(ratio, rel=1e-9)


def test_whole_steps_takes_the_best_neighbour():
    def goodput(interval):
        return formulas.complete_goodput(interval, stall_s=1, mtbf_s=M, recovery_s=120)

    best = formulas.exact(stall_s=1, mtbf_s=M)
    assert intervals.whole_steps(best, 8.0, goodput) in (23, 24)
    assert intervals.whole_steps(best, 1000.0, goodput) == 1
    found = intervals.whole_steps(best, 8.0, goodput)
    assert all(goodput(found * 8.0) >= goodput(k * 8.0) for k in range(1, 200))


def test_rate_is_learnt():
    rate = FailureRate.at_scale(1024)
    assert rate.mtbf_s == pytest.approx(4.8 * 3600)
    after = rate.observed(seconds=10 * 3600, failures=4)
    assert after.mtbf_s == pytest.approx((4.8 + 10) * 3600 / 5)
    assert FailureRate.at_scale(8).mtbf_s == pytest.approx(128 * 4.8 * 3600)


def test_adapt_is_clamped_to_a_factor_of_two_and_to_the_drain_time():
    quiet = Tier(stall_s=1, drain_s=60, mtbf_s=1e9)
    assert intervals.adapt(100, quiet) == 200
    assert intervals.adapt(100, quiet, since_restart_s=5) == 100
    stormy = Tier(stall_s=1, drain_s=60, mtbf_s=10.0)
    assert intervals.adapt(1000, stormy) == 500
    assert intervals.adapt(70, stormy) == 60
    steady = Tier(stall_s=1, drain_s=60, mtbf_s=M)
    assert intervals.adapt(200, steady) == pytest.approx(intervals.asynchronous(Tier(stall_s=1, mtbf_s=M)))


def test_automatic_is_the_optimum_within_bounds():
    tier = Tier(stall_s=1, drain_s=60, mtbf_s=M)
    assert intervals.automatic(tier) == intervals.asynchronous(tier) == pytest.approx(185.90, abs=0.01)
    assert intervals.automatic(tier, longest_s=100) == 100
    assert intervals.automatic(tier, shortest_s=300) == 300
    assert intervals.automatic(Tier(stall_s=1, mtbf_s=float("inf")), longest_s=3600) == 3600


def test_less_falls_back_to_the_disk_the_more_memory_holds():
    bare, own, copied = (
        intervals.disk_share(memory=m, peer=p) for m, p in ((False, False), (True, False), (True, True))
    )
    assert (bare, own, copied) == (1.0, 0.25, pytest.approx(0.0125))
