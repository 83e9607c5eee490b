"""Rehearsals against closed forms: where a formula exists, the simulator must give it."""

import math
from statistics import fmean, stdev

import interval_formulas as formulas
import pytest
from rehearsing import MTBF_S, formula, spec_for

from muster.simulate.cluster import Cluster
from muster.simulate.rehearsal import Simulation, rehearse
from muster.simulate.scenario import FaultKind, Saves, Scenario
from muster.simulate.stage_arithmetic import Stages
from muster.supervise.recovery.inputs import Settings
from muster.supervise.recovery.state_machine import RecoveryStateMachine


def test_without_failures_goodput_is_one_minus_the_stall():
    every_s, stall_s, cycles = 100.0, 7.0, 500
    hours = cycles * (every_s + stall_s) / 3600
    found = rehearse(formula(every_s=every_s, stall_s=stall_s, recovery_s=0, mtbf_s=0, hours=hours), 0)
    assert found.goodput_active == pytest.approx(1 - stall_s / (every_s + stall_s), abs=1e-9)


@pytest.mark.parametrize(
    ("every_s", "stall_s", "recovery_s", "step_s"),
    [(3600, 43, 1200, 1.0), (1200, 43, 1200, 1.0), (1200, 1, 120, 1.0), (185.24, 1, 20, 0.1)],
)
def test_synchronous_saves_follow_dalys_complete_model_within_three_sigma(every_s, stall_s, recovery_s, step_s):
    scenario = formula(every_s=every_s, stall_s=stall_s, recovery_s=recovery_s, step_s=step_s)
    found = [rehearse(scenario, seed).goodput_active for seed in range(24)]
    error = stdev(found) / math.sqrt(len(found))
    expected = formulas.complete_goodput(every_s, stall_s=stall_s, mtbf_s=MTBF_S, recovery_s=recovery_s)
    assert fmean(found) == pytest.approx(expected, abs=3 * error)
    assert error < 0.004, "a test that cannot fail"


def test_metas_closed_form_in_its_regime_within_five_percent_of_the_loss():
    every_s, stall_s, recovery_s = 300.0, 1.0, 60.0
    found = fmean(
        rehearse(
            formula(every_s=every_s, stall_s=stall_s, recovery_s=recovery_s, step_s=0.1, hours=4000), seed
        ).goodput_active
        for seed in range(8)
    )
    expected = formulas.first_order_goodput(every_s, stall_s=stall_s, mtbf_s=MTBF_S, recovery_s=recovery_s)
    assert found == pytest.approx(expected, rel=0.05)
    assert 1 - found == pytest.approx(1 - expected, rel=0.05), "of what is lost, too"


def test_the_best_interval_is_lambert_ws_within_two_percent():
    stall_s, recovery_s = 43.0, 120.0
    best = formulas.exact(stall_s=stall_s, mtbf_s=MTBF_S)
    lengths = [best * factor for factor in (0.4, 0.7, 1.0, 1.4, 2.5)]
    overhead = []
    for every_s in lengths:
        scenario = formula(every_s=every_s, stall_s=stall_s, recovery_s=recovery_s, hours=1000)
        overhead.append(1 / fmean(rehearse(scenario, seed).goodput_active for seed in range(16)))
    # 1 / goodput = A + B / t + D t to first order; its minimum lies at sqrt(B / D).
    _, per_save, per_second = least_squares([[1.0, 1 / t, t] for t in lengths], overhead)
    assert math.sqrt(per_save / per_second) == pytest.approx(best, rel=0.02)


def least_squares(rows, values):
    """Solve the normal equations by elimination."""
    size = len(rows[0])
    table = [
        [sum(row[i] * row[j] for row in rows) for j in range(size)]
        + [sum(row[i] * value for row, value in zip(rows, values, strict=True))]
        for i in range(size)
    ]
    for i in range(size):
        pivot = table[i][i]
        table[i] = [value / pivot for value in table[i]]
        for k in range(size):
            if k != i:
                table[k] = [a - table[k][i] * b for a, b in zip(table[k], table[i], strict=True)]
    return [row[size] for row in table]


def only_hosts(**changes):
    """Nothing but lost hosts, eight a day; four hours of repair."""
    return Scenario(
        spec=spec_for(),
        hosts=24,
        spares=2,
        min_hosts=1,
        quantum_hosts=1,
        hours=1200.0,
        failures_per_day=8.0,
        kinds={"host": FaultKind(share=1, slow_s=1, fast_s=1, swap=1)},
    ).with_(**changes)


def test_mean_hosts_out_is_rate_times_repair_time():
    scenario = only_hosts()
    found = fmean(rehearse(scenario, seed).mean_out for seed in (0, 1))
    expected = scenario.swaps_per_day * scenario.repair_h / 24  # Little
    strikes = 2 * scenario.failures_per_day * scenario.hours / 24
    cv = math.sqrt(1 + scenario.repair_cv**2)
    # Booting agents are no longer out; the last repairs are cut off by the horizon.
    assert found == pytest.approx(expected, rel=3 * cv / math.sqrt(strikes) + 0.005)


def test_spares_run_out_as_often_as_the_poisson_tail_says():
    plays = [Simulation(only_hosts(), seed) for seed in (0, 1)]
    answers = []
    for play in plays:
        play.run()
        answers += [
            log.detail["action"]
            for _, log in play.cluster.log
            if log.kind == "incident.decided" and log.detail["action"] in ("swap", "shrink")
        ]
    mean = 8 * 4 / 24
    expected = 1 - math.exp(-mean) * (1 + mean)  # two or more are out when one more is lost (M/G/inf)
    share = answers.count("shrink") / len(answers)
    # Shrunken worlds come back together, so answers are correlated: about one independent answer in two.
    error = math.sqrt(expected * (1 - expected) / (len(answers) / 2))
    assert share == pytest.approx(expected, abs=3 * error)
    assert error < 0.03


@pytest.mark.parametrize(("stall_s", "expected"), [(600.0, 0.444), (180.0, 0.833)])
def test_an_interruption_every_eighteen_minutes(stall_s, expected):
    """FT-HSDP's figures: 1 - 600/1080 and 1 - 180/1080."""
    settings = Settings(
        spec=spec_for(max_restarts_without_progress=1000, start_timeout_s=1e5),
        run_id="r",
        run_dir="/",
        ranks_per_host=1,
    )
    from muster.policy.builtin import SHIPPED

    stages = Stages(step_s=0.1, end_ranks_s=0.0, start_s=stall_s, first_start_s=0.0, agent_start_s=0.0, detect_exit_s=0)
    cluster = Cluster(machine=RecoveryStateMachine(settings=settings, policy=SHIPPED["default"]), names=["host-0"],
                      total_steps=10**9, stages=stages)  # fmt: skip
    rounds = 100
    for number in range(rounds):
        cluster.at(1080.0 * number + 1e-3, lambda: cluster.kill_rank(0))
    cluster.run(until_s=1080.0 * rounds)
    assert cluster.time.by["productive"] / (1080.0 * rounds) == pytest.approx(expected, abs=0.001)


@pytest.mark.parametrize("drain_s", [0.0, 120.0])
def test_lost_work_is_half_a_cycle_and_the_drain(drain_s):
    every_s, stall_s = 600.0, 20.0
    scenario = formula(every_s=every_s, stall_s=stall_s, recovery_s=1.0, step_s=0.1, drain_s=drain_s, hours=8000)
    found = rehearse(scenario, 0)
    failures = found.faults["process"]
    lost_s = (found.host_s["redone"] + found.host_s["unfinished"]) / failures
    # Of (t + C)/2 + D seconds of the clock a share of t/(t + C) was work; the rest was the save's standstill.
    expected = every_s / (every_s + stall_s) * ((every_s + stall_s) / 2 + drain_s)
    error = every_s / math.sqrt(12 * failures)
    # The stall lies at the cycle's end, where all of its work is at stake; stretches shorter than t + C + D start anew.
    assert lost_s == pytest.approx(expected, abs=3 * error + 0.04 * expected)


def test_saves_at_the_formulas_interval_where_none_is_given():
    given = formula(every_s=None, stall_s=1.0, recovery_s=20.0)
    assert given.every_s == pytest.approx(formulas.young(stall_s=1.0, mtbf_s=MTBF_S))
    assert given.with_(saves=Saves(every_s=None, stall_s=1.0, drain_s=500.0)).every_s == 500.0
    assert given.with_(saves=None).every_s == math.inf
