"""What a host's first program does about its agent and the run's supervisor, second by second, on a virtual clock."""

import signal

import pytest
from fakes.clock import VirtualClock

from muster.backends.vertex.on_host import keeper
from muster.backends.vertex.on_host.keeper import AGAIN, AGENT, NOTICE_S, Keeper, Program

SUPERVISOR = "supervisor"


class Children:
    """Programs that end when they are told to, or when a test says so."""

    def __init__(self):
        self.running, self.over, self.log, self.sent, self.next_pid = {}, [], [], [], 100
        self.heeds = True

    def start(self, name, argv, env, log):
        assert name not in self.running, "one of each at a time"
        self.next_pid += 1
        self.running[name] = self.next_pid
        self.log.append(name)
        return self.next_pid

    def pid(self, name):
        return self.running.get(name)

    def ended(self):
        found, self.over = self.over, []
        return found

    def end(self, name, code):
        del self.running[name]
        self.over.append((name, code))

    def send(self, name, number):
        self.sent.append((name, number))
        if name in self.running and (number == signal.SIGKILL or self.heeds):
            self.end(name, 128 + number)


class State:
    """The run's home: who holds its lease until when, and how it ended."""

    def __init__(self, clock):
        self.clock, self.until_s, self.pid, self.end, self.shipped = clock, 0.0, None, None, []
        self.answers = True

    def held_s(self):
        return max(0.0, self.until_s - self.clock.now_s) if self.answers else 3.0

    def held_by(self):
        return self.pid

    def ended(self):
        return self.end

    def withdraw_end(self, code):
        assert self.end == code
        self.end = None

    def catch_up(self):
        pass

    def ship(self, writer, timeout_s):
        self.shipped.append(writer)


class OneHost:
    def __init__(self, index=0, **fields):
        self.clock = VirtualClock()
        self.state, self.children, self.told = State(self.clock), Children(), []
        program = Program(argv=["x"], env={})
        self.keeper = Keeper(
            index=index, agent=program, supervisor=program, children=self.children, state=self.state,
            clock=self.clock, **{"stop_run": self.stop_run, "whole_job_goes": False, **fields},
        )  # fmt: skip
        self.reached = True

    def stop_run(self, source):
        self.told.append(source)
        return self.reached

    def lasts(self, seconds, *, renewed_by=None):
        """Turns for so long; ``renewed_by``: the process that keeps the lease meanwhile."""
        until = self.clock.now_s + seconds
        while self.clock.now_s < until and self.keeper.said is None:
            if renewed_by is not None:
                self.state.until_s, self.state.pid = self.clock.now_s + 10.0, renewed_by
            self.keeper.turn()
            self.clock.sleep(keeper.LOOK_S)

    def holds(self):
        """Its supervisor has taken the lease."""
        self.lasts(2)
        self.lasts(5, renewed_by=self.children.pid(SUPERVISOR))
        return self


def test_the_chief_starts_both_at_once_and_starts_nothing_twice():
    host = OneHost().holds()
    host.lasts(120, renewed_by=host.children.pid(SUPERVISOR))
    assert sorted(host.children.log) == [AGENT, SUPERVISOR] and host.keeper.said is None


def test_another_host_waits_for_the_chief_and_then_takes_its_turn():
    host = OneHost(index=3)
    host.lasts(keeper.CHIEF_COMES_S)
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
    host.state.end, host.state.until_s = code, 0.0
    host.lasts(5)
    assert host.keeper.said is True and host.children.log == [AGENT]


def test_the_end_is_seen_though_the_agent_left_first_and_no_agent_comes_after_it():
    host = OneHost().holds()
    host.state.end, host.state.until_s = 0, 0.0
    host.children.end(AGENT, 0)
    host.children.end(SUPERVISOR, 0)
    host.lasts(5)
    assert host.keeper.said is True and host.children.log.count(AGENT) == 1


@pytest.mark.parametrize("code", [1, 5, 6, 137])
def test_a_crash_is_no_end_and_ten_of_them_are(code):
    host = OneHost().holds()
    for number in range(keeper.TRIES):
        while host.children.pid(SUPERVISOR) is None:
            assert host.keeper.said is None, f"after {number}"
            host.lasts(0.5)
        host.children.end(SUPERVISOR, code)
        host.lasts(1)
    host.lasts(60)
    assert host.keeper.said is False and host.children.log.count(SUPERVISOR) == keeper.TRIES


def test_words_that_are_wrong_three_times_are_believed():
    host = OneHost().holds()
    for _ in range(keeper.WORDS_TRIES):
        while host.children.pid(SUPERVISOR) is None:
            host.lasts(0.5)
        host.children.end(SUPERVISOR, 2)
        host.lasts(1)
    host.lasts(30)
    assert host.keeper.said is False and host.children.log.count(SUPERVISOR) == keeper.WORDS_TRIES


def test_a_verdict_that_the_home_does_not_have_is_a_failed_job():
    host = OneHost().holds()
    host.children.end(SUPERVISOR, 0)
    host.lasts(20)
    assert host.keeper.said is False, "a job that SUCCEEDED would be all that is left to see"


def test_one_that_lost_the_race_stands_by_and_did_not_crash():
    host = OneHost()
    host.lasts(2)
    for _ in range(2 * keeper.TRIES):
        host.state.until_s, host.state.pid = host.clock.now_s + 10, 7
        if host.children.pid(SUPERVISOR) is not None:
            host.children.end(SUPERVISOR, 1)
        host.lasts(30)  # the other one dies, this one tries
    assert host.keeper.said is None


def test_a_home_that_does_not_answer_starts_and_ends_nothing():
    host = OneHost()
    host.state.answers = False
    host.lasts(300)
    assert host.children.log == [AGENT] and host.keeper.said is None


# ---------------------------------------------------------------- notices


def test_a_notice_for_this_machine_goes_to_the_agent_and_the_supervisor_makes_room():
    host = OneHost().holds()
    host.keeper.notice()
    host.lasts(1)
    assert host.children.sent == [(SUPERVISOR, signal.SIGKILL), (AGENT, signal.SIGTERM)] and not host.told
    assert host.state.shipped == [SUPERVISOR]
    host.lasts(NOTICE_S - 10)
    assert host.children.running == {} and host.keeper.said is None, "nothing starts, and this process stays"


def test_a_notice_for_the_whole_job_saves_the_run_once():
    host = OneHost(whole_job_goes=True).holds()
    for _ in range(3):
        host.keeper.notice()
        host.lasts(1, renewed_by=host.children.pid(SUPERVISOR))
    assert len(host.told) == 1 and host.children.sent == []
    host.state.end, host.state.until_s = AGAIN, 0.0
    host.children.end(SUPERVISOR, AGAIN)
    host.children.end(AGENT, 0)
    host.lasts(NOTICE_S - 10)
    assert host.keeper.said is None, "exit 0 on the chief would end the job as done"


def test_where_no_supervisor_answers_the_agent_is_told():
    host = OneHost(whole_job_goes=True, index=2)
    host.reached = False
    host.lasts(5, renewed_by=7)
    host.keeper.notice()
    host.lasts(1, renewed_by=7)
    assert host.children.sent == [(AGENT, signal.SIGTERM)]


def test_after_a_notice_that_came_to_nothing_the_run_goes_on():
    host = OneHost(whole_job_goes=True).holds()
    host.keeper.notice()
    host.lasts(1, renewed_by=host.children.pid(SUPERVISOR))
    host.state.end, host.state.until_s = AGAIN, 0.0
    host.children.end(SUPERVISOR, AGAIN)
    host.children.end(AGENT, 0)
    host.lasts(2.5 * NOTICE_S)
    assert host.state.end is None and set(host.children.running) == {AGENT, SUPERVISOR}


def test_a_host_without_a_notice_waits_with_the_others_and_is_killed_with_them():
    """Not every host gets a signal before the job is taken away."""
    host = OneHost(whole_job_goes=True)
    host.lasts(30, renewed_by=7)
    host.state.end, host.state.until_s = AGAIN, 0.0
    host.children.end(AGENT, 0)
    host.lasts(NOTICE_S - 10)
    assert host.keeper.said is None and host.children.running == {} and host.state.end == AGAIN


def test_the_first_start_after_the_jobs_restart_goes_on():
    host = OneHost(whole_job_goes=True)
    host.state.end = AGAIN
    host.lasts(5)
    assert host.state.end is None and set(host.children.running) == {AGENT, SUPERVISOR}


def test_before_the_jobs_time_is_up_the_run_saves_and_the_job_ends():
    host = OneHost(leave_at_s=1000.0).holds()
    host.reached = False
    host.lasts(1004 - host.clock.now_s, renewed_by=host.children.pid(SUPERVISOR))
    assert len(host.told) == 1
    host.reached = True
    host.lasts(60, renewed_by=host.children.pid(SUPERVISOR))
    assert host.told == ["the custom job's time is nearly up"] * 2, "asked again, until it answers, and not after that"
    host.state.end, host.state.until_s = AGAIN, 0.0
    host.children.end(SUPERVISOR, AGAIN)
    host.lasts(5)
    assert host.keeper.said is True


def test_at_the_end_an_agent_that_never_heard_of_it_is_told_and_then_killed():
    host = OneHost().holds()
    host.children.heeds = False
    host.state.end, host.state.until_s = 0, 0.0
    host.children.end(SUPERVISOR, 0)
    before = (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    try:
        assert host.keeper.run() is True
    finally:
        signal.signal(signal.SIGTERM, before[0]), signal.signal(signal.SIGINT, before[1])
    assert [number for name, number in host.children.sent if name == AGENT] == [signal.SIGTERM, signal.SIGKILL]
    assert host.children.running == {}
