"""What a host program does about its agent and the run's supervisor, second by second, on a virtual clock."""

import signal

import pytest
from fakes.host_program import OneHost as AnyHost

from muster.backends.host import decide
from muster.backends.host.decide import NOTICE_S
from muster.backends.host.state import AGENT, RESUME, SUPERVISOR, Lease, LeaveAt, Looked, Noticed, Outcome
from muster.backends.slurm import node as slurm
from muster.backends.vertex.host import rules


def OneHost(index=0, *, whole_job_goes=False, leave_at_s=None):
    """A host of a custom job."""
    host = AnyHost(rules(index, whole_job_goes=whole_job_goes))
    if leave_at_s is not None:
        host.program.post(LeaveAt(at_s=leave_at_s))
    return host


def test_the_chief_starts_both_at_once_and_starts_nothing_twice():
    host = OneHost().holds()
    host.lasts(120, renewed_by=host.children.pid(SUPERVISOR))
    assert sorted(host.children.log) == [AGENT, SUPERVISOR] and host.leaving is None


def test_another_host_waits_for_the_chief_and_then_takes_its_turn():
    host = OneHost(index=3)
    host.lasts(decide.FIRST_HOST_S)
    assert host.children.log == [AGENT], "the chief's machine may be the last one to come"
    host.lasts(20)
    assert host.children.log == [AGENT, SUPERVISOR]


def test_a_lease_that_was_held_is_taken_over_soon_by_one_after_the_other():
    host = OneHost(index=3)
    host.lasts(60, renewed_by=7)
    host.lasts(10)
    assert SUPERVISOR not in host.children.log, "it is out only now"
    host.lasts(10)
    assert SUPERVISOR in host.children.log


def test_an_agent_is_started_again_ever_later_and_without_end():
    host = OneHost()
    host.holds()
    starts = []
    for _ in range(12):
        host.children.end(AGENT, 1)
        before = host.clock.now_s
        while host.children.pid(AGENT) is None:
            host.lasts(0.5, renewed_by=host.children.pid(SUPERVISOR))
        starts.append(host.clock.now_s - before)
    assert starts[0] < 5 and starts == sorted(starts) and 28 < starts[-1] <= 32
    host.lasts(60, renewed_by=host.children.pid(SUPERVISOR))
    host.children.end(AGENT, 0)  # no supervisor had connected to it
    host.lasts(3, renewed_by=host.children.pid(SUPERVISOR))
    assert host.children.pid(AGENT) is not None, "it had lived for long: soon again"


@pytest.mark.parametrize("code", [0, 1, 6, 130])
def test_the_runs_end_in_its_home_is_the_end_whatever_the_code(code):
    host = OneHost(index=2)
    host.lasts(30, renewed_by=7)
    host.home.end, host.home.until_s = code, 0.0
    host.lasts(5)
    assert host.leaving == (Outcome.RUN_ENDED, code) and host.children.log == [AGENT]


def test_the_end_is_seen_though_the_agent_left_first_and_no_agent_comes_after_it():
    host = OneHost().holds()
    host.home.end, host.home.until_s = 0, 0.0
    host.children.end(AGENT, 0)
    host.children.end(SUPERVISOR, 0)
    host.lasts(5)
    assert host.leaving == (Outcome.RUN_ENDED, 0) and host.children.log.count(AGENT) == 1


EVERYWHERE = pytest.mark.parametrize("of", [rules(0, whole_job_goes=False), slurm.rules(0)])
FREE, VACATED = Looked(lease=Lease(kind="free")), Looked(lease=Lease(kind="vacated"))
OUT = Looked(lease=Lease(kind="held", left_s=-60.0))
"""What an earlier job's supervisor left, if its node was lost."""


@EVERYWHERE
@pytest.mark.parametrize("lease", [FREE, OUT, VACATED])
@pytest.mark.parametrize(
    ("code", "tries"), [(1, decide.TRIES), (5, decide.TRIES), (137, decide.TRIES), (2, decide.CONFIG_TRIES), (3, 3)]
)
def test_ten_crashes_or_three_configuration_errors_are_the_end_whatever_the_lease_says(of, lease, code, tries):
    host = AnyHost(of)
    for number in range(tries):
        host.home.says = FREE
        while host.children.pid(SUPERVISOR) is None:
            assert host.leaving is None, f"after {number}"
            host.lasts(0.5)
        host.home.says = lease
        host.children.end(SUPERVISOR, code)
        host.lasts(1)
    host.lasts(60)
    assert host.leaving == (Outcome.GIVEN_UP, code) and host.children.log.count(SUPERVISOR) == tries


@EVERYWHERE
def test_one_that_lost_the_race_stands_by_and_did_not_crash(of):
    host = AnyHost(of)
    host.lasts(2)
    for _ in range(2 * decide.TRIES):
        host.home.until_s, host.home.pid = host.clock.now_s + 10, 7
        if host.children.pid(SUPERVISOR) is not None:
            host.children.end(SUPERVISOR, 1)
        host.lasts(30)  # the other one dies, this one tries
    assert host.leaving is None and host.state.crashes == ()


def test_a_verdict_that_the_home_does_not_have_is_a_failed_job():
    host = OneHost().holds()
    host.children.end(SUPERVISOR, 0)
    host.lasts(20)
    assert host.leaving == (Outcome.END_UNWRITTEN, 0), "a job that SUCCEEDED would be all that is left to see"


def test_a_home_that_does_not_answer_starts_and_ends_nothing():
    host = OneHost()
    host.home.answers = False
    host.lasts(300)
    assert host.children.log == [AGENT] and host.leaving is None


# ---------------------------------------------------------------- notices


def test_a_notice_for_this_machine_goes_to_the_agent_and_the_supervisor_makes_room():
    host = OneHost().holds()
    host.program.post(Noticed())
    host.lasts(1)
    assert host.children.sent == [(AGENT, signal.SIGTERM), (SUPERVISOR, signal.SIGKILL)] and not host.asked
    assert host.home.shipped == [AGENT, SUPERVISOR]
    host.lasts(NOTICE_S - 10)
    assert host.children.running == {} and host.leaving is None, "nothing starts, and this process stays"


def test_a_notice_for_the_whole_job_saves_the_run_once():
    host = OneHost(whole_job_goes=True).holds()
    for _ in range(3):
        host.program.post(Noticed())
        host.lasts(1, renewed_by=host.children.pid(SUPERVISOR))
    assert len(host.asked) == 1 and host.children.sent == []
    host.home.end, host.home.until_s = RESUME, 0.0
    host.children.end(SUPERVISOR, RESUME)
    host.children.end(AGENT, 0)
    host.lasts(NOTICE_S - 10)
    assert host.leaving is None, "exit 0 on the chief would end the job as done"


def test_where_no_supervisor_answers_the_agent_is_told():
    host = OneHost(whole_job_goes=True, index=2)
    host.reached = False
    host.lasts(5, renewed_by=7)
    host.program.post(Noticed())
    host.lasts(1, renewed_by=7)
    assert host.children.sent == [(AGENT, signal.SIGTERM)]


def test_after_a_notice_that_came_to_nothing_the_run_goes_on():
    host = OneHost(whole_job_goes=True).holds()
    host.program.post(Noticed())
    host.lasts(1, renewed_by=host.children.pid(SUPERVISOR))
    host.home.end, host.home.until_s = RESUME, 0.0
    host.children.end(SUPERVISOR, RESUME)
    host.children.end(AGENT, 0)
    host.lasts(2.5 * NOTICE_S)
    assert host.home.end is None and set(host.children.running) == {AGENT, SUPERVISOR}


def test_a_host_without_a_notice_waits_with_the_others_and_is_killed_with_them():
    """Not every host gets a signal before the job is taken away."""
    host = OneHost(whole_job_goes=True)
    host.lasts(30, renewed_by=7)
    host.home.end, host.home.until_s = RESUME, 0.0
    host.children.end(AGENT, 0)
    host.lasts(NOTICE_S - 10)
    assert host.leaving is None and host.children.running == {} and host.home.end == RESUME


def test_the_first_start_after_the_jobs_restart_goes_on():
    host = OneHost(whole_job_goes=True)
    host.home.end = RESUME
    host.lasts(5)
    assert host.home.end is None and set(host.children.running) == {AGENT, SUPERVISOR}


def test_before_the_jobs_time_is_up_the_run_saves_and_the_job_ends():
    host = OneHost(leave_at_s=1000.0).holds()
    host.reached = False
    host.lasts(1004 - host.clock.now_s, renewed_by=host.children.pid(SUPERVISOR))
    assert len(host.asked) == 1
    host.reached = True
    host.lasts(60, renewed_by=host.children.pid(SUPERVISOR))
    assert host.asked == ["time"] * 2, "asked again, until it answers, and not after that"
    host.home.end, host.home.until_s = RESUME, 0.0
    host.children.end(SUPERVISOR, RESUME)
    host.lasts(5)
    assert host.leaving == (Outcome.RUN_ENDED, RESUME)


def test_at_the_end_an_agent_that_never_heard_of_it_is_told_and_then_killed():
    host = OneHost().holds()
    host.children.obey = False
    host.home.end, host.home.until_s = 0, 0.0
    host.children.end(SUPERVISOR, 0)
    assert host.ends().outcome is Outcome.RUN_ENDED
    assert [number for name, number in host.children.sent if name == AGENT] == [signal.SIGTERM, signal.SIGKILL]
    assert host.children.running == {}
