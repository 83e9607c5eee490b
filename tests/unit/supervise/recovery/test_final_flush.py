"""What only memory holds is written before the hosts go, whichever way a run ends. In virtual time."""

from dataclasses import replace

import pytest
from fakes.virtual_run import cluster, events_of, kinds, machine, spec

from muster.core.event_details.kinds import check
from muster.core.events import Event
from muster.core.types import Checksum
from muster.policy.builtin import SHIPPED, DefaultPolicy
from muster.protocol.to_agent import FlushedFile
from muster.protocol.to_supervisor import HostNotice, SnapshotsFlushed
from muster.protocol.values import LastWords
from muster.simulate.stage_arithmetic import Stages
from muster.supervise.recovery.inputs import FromHost, StopRequest
from muster.supervise.recovery.phases import Flushing
from muster.supervise.replay.rebuild_state import rebuild_state


def ended(found, until_s=10_000):
    end = found.run(until_s)
    assert end is not None, found.machine.state.phase
    return end


def committed(found):
    return found.machine.state.saves.committed_step


def stop(found, **more):
    found.give(StopRequest(source="SIGINT", exit_code=130, **more))


def start_again(found, of):
    """Every process was lost: the only host boots, and a new supervisor reads the log."""
    host = found.hosts["host-0"]
    host.forget()
    host.attempt, host.boots = 0, host.boots + 1
    found.replace_supervisor(machine(of, state=rebuild_state(events_of(found))))


def test_no_capacity_writes_the_steps_that_only_memory_holds_and_answers_75():
    found = cluster(spec(hosts=2), policy=DefaultPolicy(max_wait_s=60.0))
    found.at(10.0, lambda: found.kill_host("host-0"))
    end = ended(found)
    assert (end.exit_code, end.outcome) == (75, "preempted")
    applied = found.machine.state.last_applied_step
    assert applied > 10 and committed(found) == found.disk_step == applied
    assert f"step {applied} was written from memory" in end.reason
    assert len(kinds(found, "run.finished")) == 1


def test_the_users_own_error_is_still_the_verdict_and_the_state_is_written():
    found = cluster(spec(hosts=2), policy=SHIPPED["none"])
    last = LastWords(exception="ValueError", message="bad row 17", exit_code=3)
    found.at(10.0, lambda: found.kill_rank(1, code=1, last=last))
    end = ended(found)
    assert (end.exit_code, end.outcome) == (3, "failed")
    assert "bad row 17" in end.reason and committed(found) > 10
    assert len(kinds(found, "attempt.ended")) == 1


def test_ranks_that_hang_in_their_last_save_do_not_take_the_state_with_them():
    found = cluster(spec(hosts=2, recovery={"grace_s": 10.0}))
    found.ranks_obey = False
    found.at(10.0, lambda: stop(found))
    end = ended(found)
    assert end.exit_code == 130 and "not saved within 10 s" in end.reason and "was written from memory" in end.reason
    assert committed(found) == found._step > 10
    assert 20.0 < found.now_s < 30.0


def test_a_stop_while_recovering_writes_first_and_one_without_a_save_does_not():
    for save, written in ((True, True), (False, False)):
        found = cluster(spec(hosts=2), stages=Stages(end_ranks_s=2.0))
        found.at(10.0, lambda found=found: found.kill_rank(0))
        found.at(11.0, lambda found=found, save=save: stop(found, save=save))
        end = ended(found)
        assert end.exit_code == 130 and "before training continued" in end.reason
        assert (committed(found) > 10) is written


def test_a_held_run_writes_when_the_hold_ends():
    found = cluster(spec(hosts=1, recovery={"keep_hosts_after_failure_s": 30.0}), policy=SHIPPED["none"])
    found.at(10.0, lambda: found.kill_rank(0, code=1, last=LastWords(exception="ValueError", message="no")))
    end = ended(found)
    assert end.exit_code == 1 and committed(found) > 10 and 40.0 < found.now_s < 45.0


def test_what_is_committed_already_is_not_written_again():
    found = cluster(spec(hosts=2), policy=SHIPPED["none"])

    def commit():
        found.settle_steps()
        found._report_step(1)
        event = found.event("checkpoint.committed", 1, found._step, {"tier": "disk"})
        found.receive_from(found.hosts["host-0"], event)
        found.kill_rank(0, code=1, last=LastWords(exception="ValueError", message="no"))

    found.at(10.0, commit)
    end = ended(found)
    assert end.exit_code == 1 and not kinds(found, "run.ending") and "memory" not in end.reason


@pytest.mark.parametrize("again", [{"force": True}, {}])
def test_a_second_ctrl_c_does_not_wait_for_it(again):
    found = cluster(spec(hosts=2), stages=Stages(end_ranks_s=2.0, flush_s=20.0))
    found.at(10.0, lambda: found.kill_rank(0))
    found.at(11.0, lambda: stop(found))
    found.at(14.0, lambda: stop(found, **again))
    end = ended(found)
    assert end.exit_code == 130 and found.now_s == pytest.approx(14.0)
    assert "not written (SIGINT: left at once)" in end.reason and "there is no checkpoint" in end.reason


def test_the_first_ctrl_c_of_a_run_that_ends_by_itself_waits():
    found = cluster(spec(hosts=2), policy=SHIPPED["none"], stages=Stages(flush_s=5.0))
    found.at(10.0, lambda: found.kill_rank(0))
    found.at(12.0, lambda: stop(found))
    end = ended(found)
    assert end.exit_code == 1 and committed(found) > 10


def test_a_disk_that_does_not_take_it_ends_the_run_with_a_word():
    found = cluster(spec(hosts=2), policy=SHIPPED["none"])
    found.disk_takes = False
    found.at(10.0, lambda: found.kill_rank(0))
    end = ended(found)
    assert end.exit_code == 1 and committed(found) == 0
    assert "was only in memory and was not written (host-" in end.reason and "no space left" in end.reason


def test_a_disk_that_has_room_again_takes_the_newest_version():
    """It was full when the run ended: nothing is lost, and people read once why it takes longer."""
    found = cluster(spec(hosts=3), policy=SHIPPED["none"])
    found.disk_takes = False
    found.at(10.0, lambda: found.kill_rank(0))
    found.at(18.0, lambda: setattr(found, "disk_takes", True))
    end = ended(found)
    step = found.machine.state.last_applied_step
    assert committed(found) == step > 10 and 18.0 < found.now_s < 20.5
    assert f"step {step} was written from memory" in end.reason and "could not be" not in end.reason
    notes = [log.detail["text"] for _, log in kinds(found, "run.message")]
    assert len([text for text in notes if "cannot be written from memory yet: host-" in text]) <= 3, notes


def test_a_version_that_is_refused_is_followed_by_the_next_older_one_and_that_is_said():
    found = cluster(spec(hosts=2), policy=SHIPPED["none"])

    def newer_on_paper():
        for host in found.hosts.values():
            real = host.list_snapshots
            host.list_snapshots = lambda real=real: (*(replace(item, step=item.step + 1) for item in real()), *real())

    found.at(9.0, newer_on_paper)
    found.at(10.0, lambda: found.kill_rank(0))
    end = ended(found)
    step = found.machine.state.last_applied_step
    assert end.exit_code == 1 and committed(found) == step > 10
    assert f"step {step} was written from memory" in end.reason
    assert f"and step {step + 1} could not be (host-" in end.reason
    notes = [(log.step, log.detail["text"]) for _, log in kinds(found, "run.message")]
    assert any(at == step + 1 and "cannot be written from memory: host-" in text for at, text in notes), notes


def test_hosts_that_do_not_answer_are_waited_for_no_longer_than_the_grace():
    found = cluster(spec(hosts=2, recovery={"grace_s": 20.0}), policy=SHIPPED["none"], stages=Stages(flush_s=1e6))
    found.at(10.0, lambda: found.kill_rank(0))
    end = ended(found)
    assert 29.0 < found.now_s < 32.0 and "not within grace_s=20 s" in end.reason


@pytest.mark.parametrize("at", [10.05, 10.3, 11.5])
@pytest.mark.parametrize("name", ["host-0", "host-1", "host-2"])
def test_a_host_lost_meanwhile_is_replaced_by_the_copies_of_its_shards(name, at):
    found = cluster(spec(hosts=3), policy=SHIPPED["none"], stages=Stages(flush_s=2.0))
    found.at(10.0, lambda: found.kill_rank(0))
    found.at(at, lambda: found.kill_host(name))
    end = ended(found)
    assert end.exit_code == 1 and committed(found) > 10, end


def test_two_hosts_lost_meanwhile_leave_an_older_version_or_a_word():
    found = cluster(spec(hosts=3), policy=SHIPPED["none"], stages=Stages(flush_s=2.0))
    found.at(10.0, lambda: found.kill_rank(0))
    found.at(11.0, lambda: (found.kill_host("host-1"), found.kill_host("host-2")))
    end = ended(found)
    assert end.exit_code == 1 and "was not written" in end.reason and committed(found) == 0


def test_an_agent_that_comes_back_is_asked_again():
    found = cluster(spec(hosts=2), policy=SHIPPED["none"], stages=Stages(flush_s=2.0, end_ranks_s=1.0))
    found.at(10.0, lambda: found.kill_rank(0))

    def agent_restarts():
        found.hosts["host-1"].boots += 1  # what it was asked is forgotten
        found.join("host-1")

    found.at(11.0, agent_restarts)
    found.at(13.0, agent_restarts)
    assert ended(found).exit_code == 1 and committed(found) > 10


@pytest.mark.parametrize("at", [10.2, 12.0, 14.4])
def test_a_supervisor_killed_meanwhile_is_followed_by_one_that_ends_the_run_alike(at):
    of = spec(hosts=2)
    found = cluster(of, policy=SHIPPED["none"], stages=Stages(flush_s=2.0, end_ranks_s=2.0))
    found.at(10.0, lambda: found.kill_rank(0, code=1, last=LastWords(exception="ValueError", message="bad row 17")))
    found.at(at, lambda: found.replace_supervisor(machine(of, SHIPPED["none"], rebuild_state(events_of(found)))))
    end = ended(found)
    assert (end.exit_code, end.outcome) == (1, "failed") and "bad row 17" in end.reason
    assert committed(found) > 10
    assert len(kinds(found, "attempt.started")) == 1 and len(kinds(found, "run.finished")) == 1


def test_a_run_that_was_ending_and_lost_all_its_hosts_is_resumed_where_it_is_started_again():
    of = spec(hosts=1)
    found = cluster(of, policy=SHIPPED["none"], stages=Stages(flush_s=20.0))
    found.at(10.0, lambda: found.kill_rank(0))

    found.at(12.0, lambda: start_again(found, of))
    assert ended(found).exit_code == 0


def test_an_answer_to_an_order_that_was_overtaken_does_not_count():
    found = cluster(spec(hosts=3), policy=SHIPPED["none"], stages=Stages(flush_s=2.0))
    found.at(10.0, lambda: found.kill_rank(0))
    found.at(10.5, lambda: found.kill_host("host-1"))
    found.run(11.0)
    state = found.machine.state
    assert isinstance(state.phase, Flushing) and state.phase.choice is not None
    file = FlushedFile(rank=0, name="f", bytes=1, checksum=Checksum(algorithm="xxh3-64", value="0" * 16), data_offset=0)
    answer = SnapshotsFlushed(step=state.phase.choice.step, attempt=1, files=(file,))
    found.give(FromHost(host="host-0", message=answer))
    assert state.phase.files == []


def test_the_event_fits_the_schema():
    found = cluster(spec(hosts=1), policy=SHIPPED["none"])
    found.at(10.0, lambda: found.kill_rank(0))
    ended(found)
    ((_, log),) = kinds(found, "run.ending")
    check(Event(run_id="r", attempt=1, seq=0, mono_ns=0, wall_ns=0, host="s", kind=log.kind, detail=log.detail))


def test_a_held_run_writes_at_once_when_its_last_host_is_told_to_go():
    found = cluster(spec(hosts=2, recovery={"keep_hosts_after_failure_s": 300.0}), policy=SHIPPED["none"])
    found.at(10.0, lambda: found.kill_rank(0, code=1, last=LastWords(exception="ValueError", message="no")))
    for second, name in ((20.0, "host-0"), (25.0, "host-1")):
        message = HostNotice(notice="preemption", source="SIGTERM", grace_s=30.0)
        found.at(second, lambda name=name, message=message: found.receive_from(found.hosts[name], message))
    end = ended(found)
    assert end.exit_code == 1 and committed(found) > 10 and 25.0 < found.now_s < 30.0


def test_a_stop_is_not_forgotten_by_the_next_supervisor_though_ranks_hang_in_their_save():
    of = spec(hosts=2, recovery={"grace_s": 10.0})
    found = cluster(of)
    found.ranks_obey = False
    found.at(10.0, lambda: stop(found))
    found.at(12.0, lambda: found.replace_supervisor(machine(of, state=rebuild_state(events_of(found)))))
    end = ended(found)
    assert end.exit_code == 130 and committed(found) > 10 and found.now_s < 30.0


def test_a_run_that_is_started_again_forgets_the_stop_that_ended_it_badly():
    of = spec(hosts=1)
    found = cluster(of)
    found.ranks_obey = False
    found.at(10.0, lambda: stop(found))

    found.at(12.0, lambda: start_again(found, of))
    assert ended(found).exit_code == 0


def test_a_stop_without_a_save_writes_nothing_where_a_rank_dies_meanwhile():
    found = cluster(spec(hosts=2))
    found.at(10.0, lambda: stop(found, save=False))
    found.at(10.05, lambda: found.kill_rank(0))
    end = ended(found)
    assert end.exit_code == 130 and committed(found) == 0
