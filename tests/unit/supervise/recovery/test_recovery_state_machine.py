"""The recovery state machine in virtual time: every kind of fault, and thousands of random sequences."""

import random

import pytest
from fakes.virtual_run import actions, check_invariants, cluster, events_of, kinds, machine, spec, without_copies
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.policy.builtin import SHIPPED, DefaultPolicy
from muster.protocol.values import LastWords
from muster.simulate.stage_arithmetic import Stages
from muster.supervise.recovery.inputs import StopRequest
from muster.supervise.recovery.phases import Ended
from muster.supervise.replay.rebuild_state import rebuild_state


def test_a_healthy_run_costs_few_inputs():
    found = cluster(spec(hosts=2), steps=1_000_000)
    end = found.run()
    assert (end.exit_code, end.outcome) == (0, "succeeded")
    assert found._inputs < 20


def test_a_killed_rank_restarts_in_place_and_loses_no_applied_step():
    found = cluster(spec(hosts=2))
    found.at(10.0, lambda: found.kill_rank(1))
    assert found.run().exit_code == 0
    assert actions(found) == ["restart"]
    ((_, recovered),) = kinds(found, "incident.resolved")
    assert recovered.detail["redone_steps"] == 0
    stages = Stages()
    expected = stages.end_ranks_s + stages.start_s + stages.step_s
    assert recovered.detail["lost_ns"] / 1e9 == pytest.approx(expected, abs=0.01)


def test_a_lost_host_is_swapped_for_the_spare():
    found = cluster(spec(hosts=3, spare_hosts=1))
    found.at(10.0, lambda: found.kill_host("host-1"))
    assert found.run().exit_code == 0
    assert actions(found) == ["swap"]
    started = kinds(found, "attempt.started")[-1][1].detail
    assert list(started["hosts"]) == ["host-0", "host-3", "host-2"], "the spare takes the lost host's ranks"
    assert started["resume_step"] > 0


def test_without_a_spare_the_world_shrinks_and_grows_again():
    found = cluster(spec(hosts=4, min_hosts=2), steps=200)
    found.at(10.0, lambda: found.kill_host("host-2"))
    found.at(20.0, lambda: found.return_host("host-2"))
    assert found.run().exit_code == 0
    assert actions(found) == ["shrink", "grow"]
    worlds = [log.detail["world_size"] for _, log in kinds(found, "attempt.started")]
    assert worlds == [4, 3, 4]
    assert all(log.detail["redone_steps"] == 0 for _, log in kinds(found, "incident.resolved"))


def test_without_a_copy_a_lost_host_costs_the_steps_since_the_last_checkpoint():
    found = cluster(without_copies(spec(hosts=2, spare_hosts=1)))
    found.at(10.0, lambda: found.kill_host("host-1"))
    assert found.run().exit_code == 0
    assert kinds(found, "attempt.started")[-1][1].detail["resume_step"] == -1


def test_conservative_waits_rather_than_shrinks():
    found = cluster(spec(hosts=3, min_hosts=2), policy=SHIPPED["conservative"])
    found.at(10.0, lambda: found.kill_host("host-0"))
    found.at(60.0, lambda: found.return_host("host-0"))
    assert found.run().exit_code == 0
    assert actions(found)[0] == "wait"
    assert {log.detail["world_size"] for _, log in kinds(found, "attempt.started")} == {3}


def test_no_capacity_ends_with_75_after_the_wait():
    found = cluster(spec(hosts=2), policy=DefaultPolicy(max_wait_s=120.0))
    found.at(10.0, lambda: found.kill_host("host-0"))
    end = found.run()
    assert (end.exit_code, end.outcome) == (75, "preempted")
    assert 125 < found.now_s < 140


def test_an_error_before_any_step_is_the_users_and_stops_at_once():
    found = cluster(spec(hosts=2), stages=Stages(start_s=5.0))
    last = LastWords(exception="UsageError", message="no such file: x", exit_code=2, hint="look")
    found.at(6.0, lambda: found.kill_rank(0, code=1, last=last))
    end = found.run()
    assert end.exit_code == 2
    assert "no such file: x" in end.reason and "hint: look" in end.reason
    assert len(kinds(found, "attempt.started")) == 1


def test_a_run_whose_checkpoints_another_copy_holds_is_not_restarted():
    found = cluster(spec(hosts=1))
    last = LastWords(exception="ConflictError", message="held by another copy", exit_code=1, hint="a folder of its own")
    found.at(11.0, lambda: found.kill_rank(0, code=1, last=last))
    end = found.run()
    assert end.exit_code == 1 and "held by another copy" in end.reason and "a folder of its own" in end.reason
    assert found.now_s < 30 and len(kinds(found, "attempt.started")) == 1


def test_the_same_error_at_the_same_step_stops_after_the_second_time():
    found = cluster(spec(hosts=1))
    last = LastWords(exception="ValueError", message="bad row 17")

    def fail():
        if found.now_s > 9 and found.running(0):
            found._step = 20
            found._segment_began_ns = None
            found.kill_rank(0, code=1, last=last)

    found.at(11.0, fail)
    found.at(12.0, fail)
    end = found.run()
    assert end.exit_code == 1 and "same error" in end.reason


def test_restarts_are_counted_by_progress_not_in_all():
    found = cluster(spec(hosts=1), steps=2000)
    for second in range(10, 60, 2):
        found.at(float(second), lambda: found.kill_rank(0))
    end = found.run()
    assert end.exit_code == 0
    assert actions(found).count("restart") == 25


def test_restarts_without_progress_are_bounded():
    found = cluster(spec(hosts=1))
    for tenth in range(100, 1000):
        found.at(tenth / 10 * 0.9, lambda: found.kill_rank(0))
    end = found.run()
    assert end.exit_code == 1 and "without a new step" in end.reason


def test_a_host_that_keeps_failing_is_quarantined_for_a_spare():
    found = cluster(spec(hosts=2, spare_hosts=1), steps=400)
    for second in (10, 14, 18, 22):
        found.at(float(second), lambda: found.kill_rank(1) if found.running(1).name == "host-1" else None)
    assert found.run().exit_code == 0
    assert "swap" in actions(found)
    assert [log.host for _, log in kinds(found, "host.quarantined")] == ["host-1"]


def test_a_failure_during_recovery_restarts_once_and_converges():
    found = cluster(spec(hosts=3, spare_hosts=1))
    found.at(10.0, lambda: found.kill_rank(0))
    found.at(10.05, lambda: found.kill_host("host-1"))
    assert found.run().exit_code == 0
    assert len(kinds(found, "attempt.started")) <= 3


def test_two_hosts_that_hold_each_others_copies():
    found = cluster(spec(hosts=4, min_hosts=2))
    found.at(10.0, lambda: (found.kill_host("host-1"), found.kill_host("host-3")))
    assert found.run().exit_code == 0
    assert kinds(found, "attempt.started")[-1][1].detail["resume_step"] == -1, "no tier holds rank 1's shard"


def test_ctrl_c_saves_and_leaves_with_130_and_a_second_one_at_once():
    found = cluster(spec(hosts=2))
    found.at(10.0, lambda: found.give(StopRequest(source="SIGINT", exit_code=130)))
    end = found.run()
    assert (end.exit_code, end.outcome) == (130, "stopped")
    assert "saved and left" in end.reason

    found = cluster(spec(hosts=2))
    found.at(10.0, lambda: found.give(StopRequest(source="SIGINT", exit_code=130)))
    found.at(10.1, lambda: found.give(StopRequest(source="SIGINT", exit_code=130)))
    end = found.run()
    assert end.exit_code == 130 and found.now_s == pytest.approx(10.1)


@pytest.mark.parametrize(("force", "takeover"), [(False, False), (False, True), (True, False)])
def test_a_persons_stop_while_it_saves_for_a_scheduler_is_the_last_word(force, takeover):
    """Slurm's time limit is near, the run saves in order to go on in the next job, and then `muster stop` is typed."""
    of = spec(hosts=2)
    found = cluster(of)
    found.at(10.0, lambda: found.give(StopRequest(source="Slurm's time limit", exit_code=75)))
    found.at(10.1, lambda: found.give(StopRequest(source="muster stop", exit_code=130, force=force)))
    if takeover:
        found.at(10.2, lambda: found.replace_supervisor(machine(of, state=rebuild_state(events_of(found)))))
    end = found.run()
    assert (end.exit_code, end.outcome) == (130, "stopped")
    assert force == (found.now_s == pytest.approx(10.1)), "without force it saves first"
    assert force or "saved and left" in end.reason


def test_sigterm_is_75():
    found = cluster(spec(hosts=1))
    found.at(10.0, lambda: found.give(StopRequest(source="SIGTERM", exit_code=75)))
    assert found.run().exit_code == 75


def test_hosts_that_never_come_are_a_capacity_incident():
    found = cluster(spec(hosts=2), policy=DefaultPolicy(max_wait_s=10.0))
    found.at(0.0, lambda: found.kill_host("host-1"))
    end = found.run()
    assert end.exit_code == 75


def test_a_new_supervisor_adopts_stepping_ranks():
    of = spec(hosts=2)
    found = cluster(of)
    found.at(10.0, lambda: found.replace_supervisor(machine(of, state=rebuild_state(events_of(found)))))
    assert found.run().exit_code == 0
    assert len(kinds(found, "attempt.started")) == 1, "training went on"


def test_a_new_supervisor_waits_for_hosts_as_long_as_their_silence_is_no_failure():
    """A busy bucket tells them late who it is, and a cut link delays them: with 20 s allowed, 15 s cost nothing."""
    of = spec(hosts=2, recovery={"heartbeat_timeout_s": 20.0})
    found = cluster(of)
    found.at(10.0, found.lose_supervisor)
    found.at(12.0, lambda: found.start_supervisor(machine(of, state=rebuild_state(events_of(found)))))
    for at, name in ((13.0, "host-0"), (27.0, "host-1")):
        found.at(at, lambda name=name: found.join(name))
    assert found.run(until_s=1000.0).exit_code == 0
    assert len(kinds(found, "attempt.started")) == len(kinds(found, "attempt.adopted")) == 1 and actions(found) == []


@pytest.mark.parametrize("seed", range(40))
def test_a_supervisor_killed_at_random_moments_of_a_faulty_run(seed):
    rng = random.Random(seed)
    of = spec(hosts=3, min_hosts=2, spare_hosts=1)
    found = cluster(of, steps=300)
    for _ in range(5):
        found.at(rng.uniform(6, 80), lambda: found.kill_rank(rng.randrange(3)))
    found.at(rng.uniform(6, 80), lambda: found.kill_host(f"host-{rng.randrange(4)}"))
    for _ in range(20):
        found.at(
            rng.uniform(5.1, 90), lambda: found.replace_supervisor(machine(of, state=rebuild_state(events_of(found))))
        )
    end = found.run(until_s=5000)
    assert end is not None and end.exit_code == 0, (end, found.machine.state.phase)
    check_invariants(found)


FAULTS = st.lists(
    st.tuples(
        st.sampled_from(["rank", "host", "silent", "return", "exception", "supervisor"]),
        st.floats(0, 120),
        st.integers(0, 4),
    ),
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(
    faults=FAULTS,
    hosts=st.integers(1, 4),
    spares=st.integers(0, 1),
    policy=st.sampled_from(["default", "conservative"]),
)
def test_random_fault_sequences_end_and_keep_the_invariants(faults, hosts, spares, policy):
    of = spec(hosts=hosts, spare_hosts=spares, min_hosts=1)
    found = cluster(of, steps=200, policy=SHIPPED[policy])
    names = [f"host-{n}" for n in range(hosts + spares)]
    for kind, at, index in faults:
        name = names[index % len(names)]
        if kind == "rank":
            found.at(at, lambda index=index: found.kill_rank(index % hosts))
        elif kind == "exception":
            last = LastWords(exception="RuntimeError", message=f"once {at}")
            found.at(at, lambda index=index, last=last: found.kill_rank(index % hosts, code=1, last=last))
        elif kind in ("host", "silent"):
            found.at(
                at, lambda name=name, kind=kind: name in found.hosts and found.kill_host(name, silent=kind == "silent")
            )
        elif kind == "return":
            found.at(at, lambda name=name: name in found.hosts and found.return_host(name))
        else:
            found.at(
                at,
                lambda: (
                    not isinstance(found.machine.state.phase, Ended)
                    and found.hosts
                    and found.replace_supervisor(machine(of, SHIPPED[policy], rebuild_state(events_of(found))))
                ),
            )
    end = found.run(until_s=20_000)
    assert end is not None, found.machine.state
    check_invariants(found)


def test_hosts_of_one_group_that_return_together_are_all_taken_in():
    """With the replica's size given, one host of a pair is of no use: the world grows when both are there."""
    of = spec(hosts=4, min_hosts=2)
    of = of.model_copy(update={"parallelism": of.parallelism.model_copy(update={"dp_shard": 2, "dp_replicate": 2})})
    found = cluster(of, steps=400)
    found.at(10.0, lambda: found.kill_host("host-2"))
    found.at(10.0, lambda: found.kill_host("host-3"))
    found.at(20.0, lambda: found.return_host("host-2"))
    found.at(40.0, lambda: found.return_host("host-3"))
    assert found.run().exit_code == 0
    assert actions(found).count("grow") == 1
    assert [log.detail["world_size"] for _, log in kinds(found, "attempt.started")] == [4, 2, 4]


def test_hosts_lost_in_one_burst_cost_one_attempt_of_the_allowance():
    found = cluster(spec(hosts=8, min_hosts=2, recovery={"max_restarts_without_progress": 3}))
    for number in range(2, 7):
        found.at(10.0, lambda number=number: found.kill_host(f"host-{number}"))
    found.at(10.3, lambda: found.kill_rank(0))
    assert found.run().exit_code == 0
    assert "stop" not in actions(found)


def test_a_host_that_joins_a_world_begun_without_it_is_taken_in():
    found = cluster(spec(hosts=3, min_hosts=2), steps=400)
    found.names.remove("host-2")
    found.at(80.0, lambda: found.return_host("host-2"))
    assert found.run().exit_code == 0
    assert [log.detail["world_size"] for _, log in kinds(found, "attempt.started")] == [2, 3]


def test_a_committed_checkpoint_beats_an_older_version_in_memory():
    found = cluster(spec(hosts=2))
    found.snapshot_every_steps = 50
    committed = found.event("checkpoint.committed", 1, 9, {"tier": "disk", "uri": "u", "bytes": 1})
    found.at(6.0, lambda: found.receive_from(found.hosts["host-0"], committed))
    found.at(8.0, lambda: (setattr(found, "disk_step", 9), found.kill_rank(0)))
    assert found.run().exit_code == 0
    assert kinds(found, "attempt.started")[-1][1].detail["resume_step"] == -1, "the ranks read the checkpoint"
