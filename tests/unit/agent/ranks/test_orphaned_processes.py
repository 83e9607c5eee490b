"""Processes that do not register with a restarted agent, and ranks that hang without a supervisor. Real processes."""

import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from fakes.host import RecordingHost

from muster.agent.ranks.hang_detector import Limits, find_hung_ranks
from muster.agent.ranks.orphaned_processes import OrphanedProcesses
from muster.agent.ranks.rank_process import Worker
from muster.core.heartbeat_timing import HeartbeatTiming
from muster.protocol.rank_agent import RankHello
from muster.protocol.to_agent import EndAttempt
from muster.protocol.to_supervisor import RankHang, RanksEnded
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
def host():
    hub = ConnectionPool(token=b"t" * 32, on_gone=lambda *_: None)
    recovery = SimpleNamespace(
        timing=HeartbeatTiming(3.0), start_timeout_s=60.0, step_timeout_s=30.0, warm_standby=False
    )
    resources = SimpleNamespace(ranks_per_host=1)
    yield RecordingHost(spec=SimpleNamespace(recovery=recovery, resources=resources), hub=hub)
    hub.shutdown()


def until(hub, condition):
    for _ in range(100):
        if condition():
            return
        hub.run_once(0.1)
    raise AssertionError("it did not happen")


def test_those_that_do_not_register_are_killed_and_their_exit_is_waited_for(host, stopped):
    ended = []
    orphans = OrphanedProcesses(hub=host.hub, on_ended=lambda: ended.append(orphans.ending))
    silent, registered = stopped
    orphans.add([silent.pid, registered.pid])
    orphans.mark_registered(registered.pid)
    assert not orphans.ending
    orphans.kill()
    assert orphans.ending
    until(host.hub, lambda: ended)
    assert ended == [False] and silent.wait(10) == -signal.SIGKILL and registered.poll() is None


def test_one_that_is_gone_already_delays_nothing(host, stopped):
    orphans = OrphanedProcesses(hub=host.hub, on_ended=lambda: None)
    gone = stopped[0]
    orphans.add([gone.pid])
    gone.kill()
    gone.wait()
    orphans.kill()
    until(host.hub, lambda: not orphans.ending)


def test_a_host_has_ended_its_ranks_once_the_orphaned_ones_are_gone_too(host, stopped):
    pool = host.rank_pool()
    pool.on_children([child.pid for child in stopped])
    pool.end(EndAttempt(attempt=4, why="a test"))
    assert host.sent == [], "they still hold their GPUs"
    until(host.hub, lambda: host.sent)
    assert [type(message) for message in host.sent] == [RanksEnded]
    assert all(child.wait(10) == -signal.SIGKILL for child in stopped)


@pytest.mark.parametrize(("attempt", "killed"), [(3, True), (4, True), (5, False)])
def test_a_rank_that_wakes_up_after_its_attempt_was_ended_is(host, stopped, attempt, killed):
    pool = host.rank_pool()
    pool.end(EndAttempt(attempt=4, why="a test"))
    child = stopped[0]
    peer = SimpleNamespace(identity=None, expect=lambda *_: None)
    pool.adopt(peer, RankHello(pid=child.pid, attempt=attempt, rank=0, step=1))
    assert bool(pool.workers) != killed
    if killed:
        assert child.wait(10) == -signal.SIGKILL


# ---------------------------------------------------------------- hangs


def worker(**more):
    return Worker(pid=1, rank=0, attempt=1, peer=None, pidfd=5, progress_s=100.0, seen_s=10.0**6, **more)


def test_a_rank_in_its_first_step_is_given_as_long_as_a_start(host):
    def named(found, now_s, step_s=30.0):
        limits = Limits(timing=HeartbeatTiming(3.0), step_s=step_s, start_s=60.0)
        return bool(find_hung_ranks([found], limits, host="h", now_s=now_s))

    assert not named(worker(), 10_000.0), "the supervisor watches the start"
    assert not named(worker(first_step=1), 159.0) and named(worker(first_step=1), 161.0)
    assert not named(worker(first_step=1), 189.0, step_s=90.0), "nor less than a step"
    assert named(worker(first_step=1, stepped=True), 131.0)


def test_a_hang_is_reported_once_to_each_supervisor_and_not_in_between(host, monkeypatch):
    monkeypatch.setattr("muster.agent.rank_pool.time.monotonic", lambda: 1000.0)
    pool = host.rank_pool()
    pool.workers[1] = worker(first_step=1, stepped=True)
    pool.watch()
    assert host.sent == [] and not pool.workers[1].reported_hang
    for count in (1, 2):
        host.supervised = True
        pool.on_reconnect()
        pool.watch()
        pool.watch()
        assert [type(message) for message in host.sent] == [RankHang] * count
        host.supervised = False
        pool.watch()
