"""A supervisor dies while something happens: its successor hears of it, and of what was under way. In virtual time."""

import dataclasses
from types import SimpleNamespace

import pytest
from fakes.virtual_run import actions, check_invariants, cluster, events_of, kinds, machine, spec

from muster.policy.builtin import SHIPPED
from muster.protocol.to_supervisor import HostNotice, RankExit, RanksProgress
from muster.protocol.values import LastWords
from muster.simulate import fault_schedule
from muster.simulate.stage_arithmetic import Stages
from muster.supervise.recovery.inputs import StopRequest
from muster.supervise.recovery.phases import Draining, Running
from muster.supervise.recovery.rank_exits import rank_exit
from muster.supervise.recovery.state import Progress
from muster.supervise.replay.rebuild_state import rebuild_state

OWN = LastWords(exception="ValueError", message="bad row 17")


def replaced(found, of, apart_s=0.5):
    """A new supervisor, which the hosts find one after the other."""
    found.replace_supervisor(machine(of, state=rebuild_state(events_of(found))), apart_s=apart_s)


def without_supervisor(found, of, at, until):
    found.at(at, lambda: found.lose_supervisor())
    found.at(until, lambda: replaced(found, of))


@pytest.mark.parametrize("apart_s", [0.0, 0.5])
def test_a_run_that_ended_while_nobody_supervised_has_succeeded(apart_s):
    of = spec(hosts=3)
    found = cluster(of)
    found.at(10.0, lambda: found.lose_supervisor())
    found.at(60.0, lambda: replaced(found, of, apart_s))
    end = found.run(until_s=1000.0)
    assert end is not None and (end.exit_code, end.outcome) == (0, "succeeded")
    assert len(kinds(found, "attempt.started")) == 1 and actions(found) == []


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_that_failed_while_nobody_supervised_is_judged_by_its_words(rank):
    of = spec(hosts=3)
    found = cluster(of)
    without_supervisor(found, of, 10.0, 15.0)
    found.at(12.0, lambda: found.kill_rank(rank, code=1, last=OWN))
    assert found.run(until_s=1000.0).exit_code == 0
    ((_, seen),) = kinds(found, "incident.detected")
    assert seen.detail["incident"] == "rank_exception" and "bad row 17" in seen.detail["evidence"]
    assert seen.rank == rank and actions(found) == ["restart"]


@pytest.mark.parametrize("at", [12.0, 15.1])
def test_a_hang_is_told_to_the_supervisor_that_comes(at):
    """Noticed while there was none, and while it waited for the other hosts."""
    of = spec(hosts=3)
    found = cluster(of)
    without_supervisor(found, of, 10.0, 15.0)
    found.at(at, lambda: fault_schedule.hang_rank(found, 0, detect_s=0.1))
    assert found.run(until_s=1000.0).exit_code == 0
    assert [log.detail["incident"] for _, log in kinds(found, "incident.detected")] == ["rank_hang"]


def test_a_notice_that_comes_while_hosts_are_awaited_counts():
    of = spec(hosts=3, min_hosts=2)
    found = cluster(of)
    notice = HostNotice(notice="preemption", source="SIGTERM", grace_s=30.0)
    found.at(10.0, lambda: replaced(found, of))
    found.at(10.2, lambda: found.receive_from(found.hosts["host-0"], notice))
    assert found.run(until_s=1000.0).exit_code == 0
    assert actions(found) == ["shrink"] and 11.0 < kinds(found, "incident.decided")[0][0] < 12.0


@pytest.mark.parametrize("gap_s", [0.0, 2.0])
def test_a_growth_outlives_the_supervisor_that_began_it(gap_s):
    """Its ranks leave so that the world can grow: nobody was preempted."""
    of = spec(hosts=3, min_hosts=2)
    found = cluster(of, steps=400)
    found.at(10.0, lambda: found.kill_host("host-2"))
    found.at(20.0, lambda: found.return_host("host-2"))
    found.at(25.1, lambda: found.lose_supervisor())
    found.at(25.1 + gap_s, lambda: replaced(found, of, 0.0))
    asked = []
    found.at(25.09, lambda: asked.append(found.machine.state.phase.resize is not None))
    assert found.run(until_s=1000.0).exit_code == 0
    assert asked == [True] and set(actions(found)) == {"shrink", "grow"}
    worlds = [log.detail["world_size"] for _, log in kinds(found, "attempt.started")]
    assert worlds[:2] == [3, 2] and worlds[-1] == 3 and len(worlds) <= 4
    assert all(log.detail["redone_steps"] == 0 for _, log in kinds(found, "incident.resolved"))
    check_invariants(found)


def test_a_rank_that_leaves_with_that_code_by_itself_grows_nothing():
    of = spec(hosts=1)
    found = cluster(of)
    found.at(10.0, lambda: found.kill_rank(0, code=76))
    assert found.run(until_s=1000.0).exit_code == 75


def test_a_killed_supervisor_between_its_word_and_its_deed():
    of = spec(hosts=3, min_hosts=2)
    found = cluster(of, steps=300)
    found.at(10.0, lambda: (setattr(found, "dies_at_send", True), found.kill_rank(1)))
    found.at(13.0, lambda: replaced(found, of))
    assert found.run(until_s=1000.0).exit_code == 0
    assert len(kinds(found, "attempt.started")) == 2
    check_invariants(found)


def test_a_start_that_hangs_is_noticed_by_the_next_supervisor_too():
    of = spec(hosts=2)
    found = cluster(of, stages=Stages(start_s=10**6))
    found.at(20.0, lambda: replaced(found, of, 0.0))
    found.at(21.0, lambda: setattr(found, "stages", Stages()))
    assert found.run(until_s=1000.0).exit_code == 0
    ((at, seen),) = kinds(found, "incident.detected")
    assert "no step within" in seen.detail["evidence"] and at == pytest.approx(80.0)


def test_a_host_that_waits_is_taken_in_by_the_supervisor_that_finds_ranks_stepping():
    """It has answered before them: nothing else that it says will remind anybody of it."""
    of = spec(hosts=3, min_hosts=2)
    found = cluster(of, steps=400)
    found.at(10.0, lambda: found.kill_host("host-0"))
    found.at(21.0, lambda: found.lose_supervisor())
    found.at(22.0, lambda: found.return_host("host-0"))
    found.at(30.0, lambda: replaced(found, of))
    assert found.run(until_s=1000.0).exit_code == 0
    assert actions(found) == ["shrink", "grow"]


def script(**more):
    of = spec(hosts=2, **more)
    return of.model_copy(update={"command": ["train.py"], "model": None, "data": None, "training": None})


def test_a_script_that_never_speaks_is_not_ended_for_a_slow_start():
    of = script()
    found = cluster(of, stages=Stages(start_s=10**6))
    found.at(500.0, lambda: replaced(found, of, 0.0))
    found.at(900.0, lambda: [rank_done(found, rank) for rank in (0, 1)])
    assert found.run(until_s=10_000.0).exit_code == 0
    assert actions(found) == [] and found.now_s == pytest.approx(900.0)
    assert any("start_timeout_s applies from then on" in log.detail["text"] for _, log in kinds(found, "run.message"))


def rank_done(found, rank):
    host = found.running(rank)
    found.receive_from(host, RankExit(attempt=host.attempt, rank=rank, pid=1, code=0, step=0))


@pytest.mark.parametrize("how", ["it stepped before", "it says that it is at something long"])
def test_one_that_speaks_is(how):
    found = cluster(script())

    def speak():
        found.receive_from(found.hosts["host-0"], RanksProgress(attempt=found.machine.state.attempt))

    if how == "it stepped before":
        found.at(10.0, lambda: (setattr(found, "stages", Stages(start_s=10**6)), found.kill_rank(0)))
    else:
        found.stages = Stages(start_s=10**6)
        found.at(10.0, speak)
    found.at(60.0, lambda: setattr(found, "stages", Stages()))
    assert found.run(until_s=10_000.0).exit_code == 0
    assert "no step within" in kinds(found, "incident.detected")[-1][1].detail["evidence"]
    assert kinds(found, "incident.detected")[-1][0] == pytest.approx(70.0, abs=1.0)


def test_what_was_deferred_says_nothing_once_the_run_is_over():
    """The first of the two ends it."""
    of = spec(hosts=2)
    found = cluster(of)
    without_supervisor(found, of, 10.0, 60.0)
    notice = HostNotice(notice="preemption", source="SIGTERM", grace_s=30.0)
    found.at(60.2, lambda: found.receive_from(found.hosts["host-0"], notice))
    assert found.run(until_s=1000.0).outcome == "succeeded"
    assert found.log[-1][1].kind == "host.released"


def test_an_exit_of_another_attempt_changes_nothing():
    state = SimpleNamespace(attempt=3, phase=Running(), progress=Progress())
    rank_exit(SimpleNamespace(state=state), "host-0", RankExit(attempt=2, rank=0, pid=1, code=1, step=0))
    assert not state.progress.exited


def test_every_host_that_was_lost_with_the_supervisor_is_left_out_in_the_log():
    of = spec(hosts=4, min_hosts=2)
    found = cluster(of)
    without_supervisor(found, of, 10.0, 15.0)
    found.at(12.0, lambda: [found.kill_host(name) for name in ("host-1", "host-2")])
    assert found.run(until_s=1000.0).exit_code == 0
    assert kinds(found, "attempt.ended")[-1][1].detail["next_hosts"] == ["host-0", "host-3"]


def test_the_log_says_that_no_host_is_left():
    of = spec(hosts=2)
    found = cluster(of)
    found.at(10.0, lambda: found.kill_host("host-1"))
    found.at(15.0, lambda: found.kill_host("host-0"))
    found.run(until_s=20.0)
    assert rebuild_state(events_of(found)).phase.found.next.hosts == found.machine.state.phase.next.hosts == []
    assert kinds(found, "incident.decided")[-1][1].detail["hosts"] == []


def test_a_stop_of_a_run_that_lost_everything_does_not_stop_the_next_attempt():
    of = spec(hosts=2)
    found = cluster(of)
    stop = StopRequest(source="muster stop", exit_code=130, save=True)
    found.at(10.0, lambda: replaced(found, of))
    found.at(10.2, lambda: found.give(stop))
    found.at(10.3, lambda: found.lose_supervisor())
    for name in ("host-0", "host-1"):
        found.at(10.3, lambda name=name: found.kill_host(name))
        found.at(11.0, lambda name=name: found.return_host(name))
    found.at(12.0, lambda: replaced(found, of))
    found.run(until_s=40.0)
    assert len(kinds(found, "attempt.abandoned")) == 1 and isinstance(found.machine.state.phase, Running)
    assert rebuild_state(events_of(found)).phase.asked_before is None


def waits(found, of, *, lost, order):
    """``lost`` leaves; the run waits; it returns while nobody supervises; hosts then connect in ``order``."""
    found.at(10.0, lambda: found.kill_host(lost))
    found.at(20.0, found.lose_supervisor)
    found.at(21.0, lambda: found.return_host(lost))
    found.at(40.0, lambda: found.start_supervisor(machine(of, state=rebuild_state(events_of(found)))))
    found.at(40.0, lambda: [found.join(name) for name in order])


@pytest.mark.parametrize("order", [("host-2", "host-0", "host-1"), ("host-0", "host-1", "host-2")])
def test_a_host_that_returned_before_the_takeover_ends_the_wait(order):
    of = spec(hosts=3, min_hosts=3)
    found = cluster(of)
    waits(found, of, lost="host-2", order=order)
    assert found.run(until_s=1000.0).exit_code == 0
    assert [list(log.detail["hosts"]) for _, log in kinds(found, "run.waiting")][:1] == [["host-0", "host-1"]]
    assert [at for at, _ in kinds(found, "attempt.started")][1] < 45.0


def test_a_host_that_returns_while_ranks_are_ended_ends_the_wait():
    found = cluster(spec(hosts=3, min_hosts=3))
    found.at(10.0, lambda: found.kill_host("host-2", detect_s=0.1))

    def return_at_once():
        assert isinstance(found.machine.state.phase, Draining)
        host = found.hosts["host-2"]
        host.up = True
        found.join("host-2")

    found.at(10.1001, return_at_once)
    assert found.run(until_s=1000.0).exit_code == 0 and kinds(found, "run.waiting") == []


def test_a_run_that_waits_with_no_host_at_all_starts_with_the_first():
    of = spec(hosts=2, min_hosts=1)
    found = cluster(of)
    found.at(9.0, lambda: found.kill_host("host-1"))
    waits(found, of, lost="host-0", order=("host-0",))
    assert found.run(until_s=1000.0).exit_code == 0
    assert kinds(found, "run.waiting")[-1][1].detail["hosts"] == [] and kinds(found, "attempt.abandoned") == []
    assert [at for at, _ in kinds(found, "attempt.started")][-1] < 45.0


def test_agents_that_are_all_new_and_ready_start_at_once():
    of = spec(hosts=2)
    found = cluster(of)
    found.at(10.0, found.lose_supervisor)
    for name in ("host-0", "host-1"):
        found.at(11.0, lambda name=name: found.kill_host(name))
        found.at(12.0, lambda name=name: found.return_host(name))
    found.at(40.0, lambda: replaced(found, of, 0.0))
    assert found.run(until_s=1000.0).exit_code == 0
    ((abandoned, _),) = kinds(found, "attempt.abandoned")
    assert kinds(found, "attempt.started")[1][0] < abandoned + 5.0


def late(found):
    return rebuild_state(events_of(found), now_wall_ns=int(found.now_s * 1e9))


def test_what_is_held_is_written_by_a_supervisor_that_comes_after_the_deadline():
    of = spec(hosts=2, recovery={"keep_hosts_after_failure_s": 100.0})
    found = cluster(of, policy=SHIPPED["none"])
    found.at(10.0, lambda: found.kill_rank(0, code=1, last=OWN))
    found.at(20.0, found.lose_supervisor)
    found.at(150.0, lambda: found.start_supervisor(machine(of, state=late(found))))
    for name in ("host-0", "host-1"):
        found.at(150.5, lambda name=name: found.join(name))
    end = found.run(until_s=1000.0)
    assert end.exit_code == 1
    assert len(kinds(found, "run.ending")) == 1 and 150.0 < kinds(found, "run.finished")[0][0] < 160.0


def silent(found, of, *, from_s=10.0):
    """The supervisor's machine restarts, and no host hears of its successor for a while: a bucket that answers late."""
    found.at(from_s, found.lose_supervisor)
    found.at(from_s + 1.0, lambda: found.start_supervisor(machine(of, state=rebuild_state(events_of(found)))))


@pytest.mark.parametrize("after_s", [1.0, 30.0])
def test_hosts_that_answer_a_new_supervisor_late_go_on_with_their_attempt(after_s):
    of = spec(hosts=2)
    found = cluster(of)
    silent(found, of)
    found.at(11.0 + after_s, lambda: found.join("host-0"))
    found.at(11.0 + after_s + 4.0, lambda: found.join("host-1"))  # within 5 s of the first
    assert found.run(until_s=1000.0).exit_code == 0
    assert len(kinds(found, "attempt.started")) == 1 and len(kinds(found, "attempt.adopted")) == 1
    said = [log for _, log in kinds(found, "run.message") if "no host has answered" in log.detail["text"]]
    assert len(said) == (after_s > 5.0)


def test_one_that_answers_late_waits_for_the_others_as_long_as_always():
    of = spec(hosts=2, min_hosts=1)
    found = cluster(of)
    silent(found, of)
    found.at(10.0, lambda: found.kill_host("host-1"))
    found.at(60.0, lambda: found.join("host-0"))
    assert found.run(until_s=1000.0).exit_code == 0
    (at, log), *_ = kinds(found, "incident.decided")
    assert log.detail["hosts"] == ["host-0"] and at == pytest.approx(65.0)


def test_a_run_of_which_no_host_answers_for_as_long_as_a_start_may_take_has_failed():
    of = spec(hosts=2)
    found = cluster(of)
    silent(found, of)
    end = found.run(until_s=1000.0)
    assert (end.exit_code, end.outcome) == (6, "failed") and "no host answers" in end.reason
    assert found.now_s == pytest.approx(11.0 + of.recovery.start_timeout_s)


@pytest.mark.parametrize("saving", [False, True])
def test_a_run_that_was_asked_to_stop_waits_for_its_hosts_too(saving):
    """Their ranks may hold what was not saved; or it is `muster recover`, and its hosts have just been started."""
    of = spec(hosts=2)
    found = cluster(of)
    found.at(9.9, lambda: found.give(StopRequest(source="muster stop", exit_code=130)))
    silent(found, of, from_s=9.95 if saving else 9.9)
    found.at(41.0, lambda: (found.join("host-0"), found.join("host-1")))
    end = found.run(until_s=1000.0)
    assert (end.exit_code, end.outcome) == (130, "stopped") and found.now_s >= 41.0, end


@pytest.mark.parametrize(("at_s", "ends_s"), [(12.0, 16.0), (40.0, 45.0)])
def test_a_stop_does_not_wait_so_long_for_hosts_that_do_not_answer(at_s, ends_s):
    of = spec(hosts=2)
    found = cluster(of)
    silent(found, of)
    found.at(at_s, lambda: found.give(StopRequest(source="muster stop", exit_code=130)))
    end = found.run(until_s=1000.0)
    assert (end.exit_code, end.outcome) == (130, "stopped") and "no host answers" in end.reason
    assert found.now_s == pytest.approx(ends_s)


def test_where_hosts_learn_of_a_supervisor_from_a_bucket_they_have_longer():
    of = spec(hosts=2)
    settings = machine(of).settings
    in_bucket = dataclasses.replace(settings, spec=of.model_copy(update={"run_dir": "gs://bucket/runs/r"}))
    assert (settings.adopt_timeout_s, in_bucket.adopt_timeout_s) == (5.0, 15.0)
    slow = of.model_copy(update={"recovery": of.recovery.model_copy(update={"heartbeat_timeout_s": 20.0})})
    assert dataclasses.replace(in_bucket, spec=slow).adopt_timeout_s == 20.0
