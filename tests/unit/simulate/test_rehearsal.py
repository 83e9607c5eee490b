"""Rehearsals: every host-second has a name, the same seed gives the same blows, and the supervisor is the real one."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rehearsing import everything, formula, spec_for

from muster.app.planning.rehearsal_page import ledger_of
from muster.core.errors import UsageError
from muster.report.render.document import document
from muster.simulate import ensembles
from muster.simulate.fault_schedule import Fault, schedule
from muster.simulate.rehearsal import Simulation, rehearse
from muster.simulate.scenario import FaultKind, Saves, Scenario, read_trace
from muster.simulate.stage_times import Recovery, constant, measured, names, shipped

TRACES = Path(__file__).parents[4] / "shared" / "data" / "oracles" / "traces"


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    hosts=st.integers(1, 8),
    spares=st.integers(0, 2),
    quantum=st.sampled_from([None, 1, 2, 3]),
    failures=st.floats(0, 60),
    policy=st.sampled_from(["default", "conservative", "none"]),
    memory=st.booleans(),
    detection=st.booleans(),
)
def test_every_host_second_has_a_name(seed, hosts, spares, quantum, failures, policy, memory, detection):
    scenario = everything(
        hosts=hosts, spares=spares, quantum_hosts=quantum, min_hosts=min(hosts, quantum or 1), policy=policy,
        failures_per_day=failures, memory_tier=memory, fast_detection=detection, hours=12.0,
    )  # fmt: skip
    found = rehearse(scenario, seed)
    assert found.identity_error < 1e-9
    assert sum(found.host_s.values()) == pytest.approx(found.purchased_host_s, rel=1e-9)
    assert all(value > -1e-5 for value in found.host_s.values()), found.host_s
    assert 0 <= found.goodput_active <= 1


def test_the_same_seed_is_the_same_rehearsal_and_another_is_not():
    assert rehearse(everything(), 3) == rehearse(everything(), 3)
    assert rehearse(everything(), 3) != rehearse(everything(), 4)


def test_policy_spares_and_interval_meet_the_same_blows():
    scenario = everything()
    blows = schedule(scenario, 1)
    assert blows == schedule(scenario.with_(spares=4, policy="conservative", saves=None, memory_tier=False), 1)
    slow = schedule(scenario.with_(fast_detection=False), 1)
    assert [dataclasses.replace(fault, detect_s=0) for fault in slow] == [
        dataclasses.replace(fault, detect_s=0) for fault in blows
    ]
    more = schedule(scenario.with_(false_alarms_per_day=9.0), 1)
    assert [fault for fault in more if fault.kind != "false_alarm"] == [
        fault for fault in blows if fault.kind != "false_alarm"
    ]


def test_the_ledger_folds_a_rehearsals_log_to_the_same_account():
    scenario = Scenario(spec=spec_for(), hosts=16, spares=2, hours=20.0, failures_per_day=24.0)
    ours = rehearse(scenario, 1)
    ledger = document(ledger_of(scenario, 1), {}).to_json()
    assert ours.faults and ours.goodput_active < 0.99
    assert ledger["goodput"]["active"] == pytest.approx(ours.goodput_active, abs=0.004), "it starts at the first grant"
    shares = {name: row["host_s"] / ours.purchased_host_s for name, row in ledger["categories"].items()}
    own = {name: host_s / ours.purchased_host_s for name, host_s in ours.host_s.items()}
    assert shares["productive"] == pytest.approx(own["productive"] + own["overhead"], abs=0.001)
    assert shares["redone"] == pytest.approx(own["redone"], abs=0.001)
    assert shares["checkpoint"] == pytest.approx(own["checkpoint"], abs=0.001)
    assert shares.get("unattributed", 0) < 1e-9
    assert ledger["steps"] == round(ours.productive_s / 8.0)


def one_fault(scenario, fault):
    """A rehearsal in which only this happens."""
    play = Simulation(scenario.with_(failures_per_day=0.0), 0)
    play.cluster.at(fault.at_s, lambda: play.inject(fault))
    return play, play.run()


QUIET = Scenario(
    spec=spec_for(), hosts=4, spares=1, min_hosts=2, hours=4.0, saves=None, repair_cv=0.0,
    profile=constant(step=1.0, end=0.5, start=3.0, warmup=1.5, agent_start=20.0, first_start=100.0),
)  # fmt: skip


def actions(play):
    return [log.detail["action"] for _, log in play.cluster.log if log.kind == "incident.decided"]


def test_a_dead_process_costs_its_stages_and_nothing_else():
    play, found = one_fault(QUIET, Fault(at_s=1000.25, kind="process", detect_s=2.0))
    assert actions(play) == ["restart"]
    assert found.host_s["detect"] == pytest.approx(4 * 2.0)
    assert found.host_s["restart"] == pytest.approx(4 * 3.5)
    assert found.host_s["warmup"] == pytest.approx(4 * 1.5)
    assert found.host_s["unfinished"] < 4 * 1.0 and found.host_s["redone"] == 0
    (seen,) = found.interruptions
    assert seen.lost_s == pytest.approx(2.0 + 0.5 + 3.0 + 1.5 + 1.0, abs=0.01), "to the end of the next step"


def test_a_lost_host_is_swapped_and_comes_back_as_a_spare():
    play, found = one_fault(QUIET, Fault(at_s=1000, kind="host", where=0.3, swap=True, detect_s=1.0, repair_s=3600.0))
    assert actions(play) == ["swap"], "it is held as a spare, without a question"
    assert found.host_s["out"] == pytest.approx(3600.0 - 1.0 + 1.0, rel=0.01)


def test_without_a_spare_the_world_shrinks_and_pays_for_rounds():
    scenario = QUIET.with_(spares=0, micro_batches=8, data_ranks_per_host=2)
    play, found = one_fault(scenario, Fault(at_s=1000, kind="host", swap=True, detect_s=1.0, repair_s=3600.0))
    assert actions(play) == ["shrink", "grow"]
    # Eight micro-batches on six ranks take two rounds instead of one: three hosts at half the pace.
    assert found.host_s["degraded"] == pytest.approx(3600 * (3 - 2), rel=0.02)


def test_several_hosts_without_copies_fall_back_to_the_save():
    scenario = QUIET.with_(hosts=6, spares=3, saves=Saves(every_s=500.0, stall_s=1.0, drain_s=0.0, restore_s=60.0))
    three = Fault(at_s=2000, kind="several_hosts", hosts=3, swap=True, detect_s=1.0, repair_s=9e3)
    _, found = one_fault(scenario.with_(replicate_snapshots=False), three)
    assert 300 < found.redone_steps < 500, found.redone_steps
    assert found.host_s["restore"] == pytest.approx(6 * 60.0)
    _, copied = one_fault(scenario.with_(quantum_hosts=1), three)
    assert copied.redone_steps == 0, "another replica holds the state"


def test_a_lost_rack_costs_no_step_where_its_copies_are_in_another():
    scenario = QUIET.with_(hosts=32, spares=4, rack_hosts=4, saves=Saves(every_s=500.0, stall_s=1.0, drain_s=0.0))
    rack = Fault(at_s=2000, kind="rack", hosts=4, swap=True, detect_s=1.0, repair_s=9e3)
    for where in (0.0, 0.3, 0.6, 0.9):
        play, found = one_fault(scenario, dataclasses.replace(rack, where=where))
        assert found.redone_steps == 0 and found.host_s["restore"] == 0
        lost = [log.host for _, log in play.cluster.log if log.kind == "host.lost"]
        struck = {name for name, rack in play.racks.items() if rack == play.rack_of(lost[0])}
        assert len(lost) == 4 and sum(name in struck for name in lost) >= 2, "the rest were spares, or stand beside"
    # Where nobody says what is a rack, a copy is anywhere: some rack holds both.
    assert any(
        one_fault(scenario.with_(rack_labels=False), dataclasses.replace(rack, where=host / 32))[1].redone_steps
        for host in range(32)
    )


def test_a_slow_host_stretches_steps_and_is_named():
    _, found = one_fault(QUIET, Fault(at_s=1000, kind="slow", factor=2.0, repair_s=600.0))
    assert found.host_s["straggler"] == pytest.approx(4 * 300.0, rel=0.01)


def test_a_false_alarm_costs_a_recovery():
    play, found = one_fault(QUIET, Fault(at_s=1000.5, kind="false_alarm"))
    assert actions(play) == ["restart"] and found.host_s["detect"] == 0
    assert found.host_s["restart"] > 0


def test_maintenance_is_announced_and_swapped():
    play, found = one_fault(QUIET, Fault(at_s=1000.5, kind="maintenance", swap=True, repair_s=1800.0))
    assert actions(play)[0] == "swap"
    assert "host-0+1" in play.cluster.hosts, "its machine is replaced by another"
    assert found.identity_error < 1e-9


def test_a_run_that_gives_up_is_started_again_and_says_so():
    scenario = QUIET.with_(spares=0, min_hosts=4, policy="none", hours=6.0)
    play, found = one_fault(scenario, Fault(at_s=1000, kind="process", detect_s=1.0))
    assert found.gave_up == 1
    assert found.host_s["stopped"] > 4 * 3500
    assert found.identity_error < 1e-9
    assert play.cluster.machine.state.attempt == 2, "attempts are numbered once"


def test_failures_during_recovery_start_it_again():
    play = Simulation(formula(every_s=600.0, stall_s=1.0, recovery_s=3000.0, mtbf_s=6000.0, hours=100.0), 0)
    interruptions = play.run().interruptions
    assert play.cluster.machine.state.attempt > len(interruptions) + 1


def test_contributions_are_paired_and_leave_one_out():
    scenario = Scenario(spec=spec_for(), hosts=8, spares=1, min_hosts=4, hours=20.0, failures_per_day=24.0)
    told = []
    found = ensembles.study(
        scenario, seeds=3, paired=2, workers=1, progress=lambda done, total: told.append((done, total))
    )
    by_name = {each.name: each for each in found.contributions}
    assert {"state in memory", "warm standby", "spares", "copy on a peer"} <= set(by_name)
    assert by_name["state in memory"].change_active < -0.01
    assert found.spares[0].change_active == 0 and found.spares[0].name == "1"
    assert ensembles.best(found.spares) is not None
    assert told == [(done, told[-1][1]) for done in range(told[-1][1] + 1)], "from nothing to all"


def test_a_profile_from_recoveries_and_what_is_wrong_with_one():
    seen = [Recovery(kind="process", detect_s=0.1, started_s=0.25, first_step_s=2.0)]
    found = measured("r", step_s=[0.5, 0.7], recoveries=seen)
    assert found.mean_s("step") == pytest.approx(0.6)
    assert found.mean_s("start") == pytest.approx(2.0 - 0.25 - 0.6)
    assert found.detect_s == {"process": (0.1,)}
    with pytest.raises(UsageError, match="no healed incidents"):
        measured("r", step_s=[1.0], recoveries=[])
    with pytest.raises(UsageError, match="no profile"):
        shipped("nothing")
    assert all(stage.source for name in names() for stage in shipped(name).stages.values())


def test_wrong_traces_are_refused(tmp_path):
    for text in (
        "{}",
        "[1]",
        '{"metadata": {"gap_seconds": 0}, "data": [1]}',
        '{"metadata": {"gap_seconds": 5}, "data": [-1]}',
    ):
        path = tmp_path / "t.json"
        path.write_text(text)
        with pytest.raises(UsageError, match="not a capacity trace"):
            read_trace(path)
    with pytest.raises(UsageError, match="cannot read"):
        read_trace(tmp_path / "none.json")


def spot(found, **changes):
    return Scenario(
        spec=spec_for(), hosts=max(found.counts), spares=0, min_hosts=1, hours=found.hours, failures_per_day=0.0,
        trace=found, kinds={"host": FaultKind(share=1, slow_s=2, fast_s=2, swap=1)},
    ).with_(**changes)  # fmt: skip


def test_a_trace_takes_and_gives_hosts(tmp_path):
    path = tmp_path / "made.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": [2] * 6 + [1] * 6 + [0] * 30 + [2] * 12}))
    found = read_trace(path)
    assert (found.counts, found.times_s, found.hours) == ((2, 1, 0, 2), (0, 3600, 7200, 25_200), 9.0)
    outcome = rehearse(spot(found), 0)
    assert outcome.purchased_host_s == pytest.approx(2 * 3600 + 3600 + 2 * 7200, rel=0.01), "gone hosts cost nothing"
    assert outcome.identity_error < 1e-9
    assert outcome.faults["preempted"] == 2
    assert outcome.goodput_active >= outcome.goodput_purchased > outcome.productive_s / outcome.wall_s
    assert outcome.goodput_active == pytest.approx(outcome.goodput_purchased), "without spares they are one"


@pytest.mark.skipif(not TRACES.is_dir(), reason="no recorded traces beside the repository")
@pytest.mark.parametrize("name", ["availability_16-node", "preemption_4-node"])
def test_recorded_spot_traces_under_two_policies_name_the_cheaper(name):
    found = read_trace(next(TRACES.glob(f"{name}*.json")))
    outcomes = {
        policy: rehearse(spot(found, policy=policy, min_hosts=1 if policy == "default" else max(found.counts)), 0)
        for policy in ("default", "conservative")
    }
    cost = {policy: one.purchased_host_s / (one.productive_s * one.hosts) for policy, one in outcomes.items()}
    assert all(one.identity_error < 1e-9 for one in outcomes.values())
    assert outcomes["default"].productive_s > outcomes["conservative"].productive_s, "fewer hosts are better than none"
    assert min(cost, key=cost.get) == "default", cost
