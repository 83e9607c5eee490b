"""Processes that answer no restarted agent, and ranks that hang while nobody listens. With real processes."""

import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from muster.agent.ranks.hang_detector import hanging
from muster.agent.ranks.orphaned_processes import Strays
from muster.agent.ranks.rank_pool import Crew
from muster.agent.ranks.rank_process import Worker
from muster.transport.connections import ConnectionPool


@pytest.fixture
def stopped():
    """Processes that the kernel holds, as a stopped rank is."""
    found = [
        subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        for _ in range(2)
    ]
    for child in found:
        child.send_signal(signal.SIGSTOP)
    yield found
    for child in found:
        child.kill()
        child.wait()
        child.stdin.close()


@pytest.fixture
def agent():
    hub = ConnectionPool(token=b"t" * 32, on_message=lambda *_: None, on_gone=lambda *_: None)
    told = []
    yield SimpleNamespace(
        hub=hub,
        tell=told.append,
        told=told,
        supervisor=None,
        host="host-0",
        memory=None,
        spec=SimpleNamespace(recovery=SimpleNamespace(heartbeat_timeout_s=3.0, start_timeout_s=60.0)),
        programs=SimpleNamespace(step_timeout_s=lambda: 30.0, refill=lambda: None, forkserver_pid=1),
        log=SimpleNamespace(open=lambda attempt: None, write=lambda *_, **__: None),
    )
    hub.shutdown()


def until(hub, condition):
    for _ in range(100):
        if condition():
            return
        hub.run_once(0.1)
    raise AssertionError("it did not come to pass")


def test_those_that_say_nothing_are_ended_and_their_end_is_waited_for(agent, stopped):
    ended = []
    strays = Strays(agent=agent, on_ended=lambda: ended.append(strays.ending))
    silent, spoke = stopped
    strays.listed([silent.pid, spoke.pid])
    strays.spoke(spoke.pid)
    assert not strays.ending
    strays.end()
    assert strays.ending
    until(agent.hub, lambda: ended)
    assert ended == [False] and silent.wait(10) == -signal.SIGKILL and spoke.poll() is None


def test_one_that_is_gone_already_holds_nothing_up(agent, stopped):
    strays = Strays(agent=agent, on_ended=lambda: None)
    gone = stopped[0]
    strays.listed([gone.pid])
    gone.kill()
    gone.wait()
    strays.end()
    until(agent.hub, lambda: not strays.ending)


def test_a_host_has_ended_its_ranks_once_those_that_answer_nobody_are_gone_too(agent, stopped, monkeypatch):
    monkeypatch.setattr("muster.agent.ranks.rank_pool.inventory", lambda memory: [])
    crew = Crew(agent=agent)
    crew.listed([child.pid for child in stopped])
    crew.end(4, keep=set(), pause_s=0.0, reset=[])
    assert agent.told == [], "they hold their GPUs yet"
    until(agent.hub, lambda: agent.told)
    assert [message["t"] for message in agent.told] == ["collected"]
    assert all(child.wait(10) == -signal.SIGKILL for child in stopped)


@pytest.mark.parametrize(("attempt", "killed"), [(3, True), (4, True), (5, False)])
def test_a_rank_that_wakes_up_after_its_attempt_was_ended_is(agent, stopped, monkeypatch, attempt, killed):
    monkeypatch.setattr("muster.agent.ranks.rank_pool.inventory", lambda memory: [])
    crew = Crew(agent=agent)
    crew.end(4, keep=set(), pause_s=0.0, reset=[])
    child = stopped[0]
    crew.adopt(child.pid, 0, attempt, SimpleNamespace(who=None))
    assert bool(crew.workers) != killed
    if killed:
        assert child.wait(10) == -signal.SIGKILL


# ---------------------------------------------------------------- hangs


def worker(**more):
    return Worker(pid=1, rank=0, attempt=1, peer=None, pidfd=5, progress_s=100.0, seen_s=10.0**6, **more)


def test_a_rank_in_its_first_step_is_given_as_long_as_a_start(agent):
    def named(found, now_s, step_s=30.0):
        return bool(hanging([found], host="h", now_s=now_s, silence_s=3.0, step_s=step_s, start_s=60.0))

    assert not named(worker(), 10_000.0), "the supervisor watches the start"
    assert not named(worker(first_step=1), 159.0) and named(worker(first_step=1), 161.0)
    assert not named(worker(first_step=1), 189.0, step_s=90.0), "nor less than a step"
    assert named(worker(first_step=1, stepped=True), 131.0)


def test_a_hang_is_named_once_to_each_supervisor_and_to_nobody_in_between(agent, monkeypatch):
    monkeypatch.setattr("muster.agent.ranks.rank_pool.time.monotonic", lambda: 1000.0)
    crew = Crew(agent=agent)
    crew.workers[1] = worker(first_step=1, stepped=True)
    crew.watch()
    assert agent.told == [] and not crew.workers[1].reported_hang
    for count in (1, 2):
        agent.supervisor = object()
        crew.heard_anew()
        crew.watch()
        crew.watch()
        assert [message["t"] for message in agent.told] == ["rank_hang"] * count
        agent.supervisor = None
        crew.watch()
