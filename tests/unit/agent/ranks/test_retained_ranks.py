"""Ranks that are to pause: how long they may take, and which are not waited for."""

import math
import os
import signal
import subprocess
import sys

import pytest

from muster.agent.ranks.rank_process import Worker, is_stopped
from muster.agent.ranks.retained_ranks import RetainedRanks


def worker(pid=1, rank=0, *, attempt=2, peer=True, seen_s=0.0):
    line = object() if peer else None
    return Worker(pid=pid, rank=rank, attempt=attempt, peer=line, pidfd=-1, seen_s=seen_s)  # type: ignore[arg-type]


def test_they_have_the_time_that_the_supervisor_gives():
    mine, other = worker(rank=0), worker(rank=1)
    retained = RetainedRanks()
    assert retained.select([mine, other], 2, {0}, now_s=100.0, pause_s=31.0) == [mine]
    assert retained.overdue([mine, other], now_s=130.9, silence_s=60.0) == []
    assert retained.overdue([mine, other], now_s=131.0, silence_s=60.0) == [mine]
    mine.paused = 7
    assert retained.overdue([mine, other], now_s=500.0, silence_s=60.0) == []


def test_one_that_does_not_go_when_it_is_killed_is_named_once():
    """Its driver may hold it for minutes; the agent has other things to do."""
    mine, retained = worker(seen_s=100.0), RetainedRanks()
    retained.select([mine], 2, {0}, now_s=100.0, pause_s=4.0)
    assert retained.due_s([mine], silence_s=60.0) == 104.0
    assert retained.overdue([mine], now_s=104.0, silence_s=60.0) == [mine]
    assert retained.overdue([mine], now_s=104.1, silence_s=60.0) == []
    assert retained.due_s([mine], silence_s=60.0) == math.inf


def test_a_rank_that_cannot_be_asked_is_not_retained():
    assert RetainedRanks().select([worker(peer=False), worker(attempt=1)], 2, {0}, now_s=0.0, pause_s=4.0) == []


@pytest.fixture
def process():
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield child
    child.kill()
    child.wait()
    child.stdin.close()


def test_a_stopped_one_is_not_waited_for(process):
    """It will never pause: after the silence that a stopped rank is allowed elsewhere it counts as lost."""
    mine = worker(process.pid, seen_s=100.0)
    retained = RetainedRanks()
    retained.select([mine], 2, {0}, now_s=100.0, pause_s=90.0)
    assert retained.overdue([mine], now_s=110.0, silence_s=3.0) == [], "silent, but it runs: it may be in a long kernel"
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert is_stopped(process.pid)
    assert retained.due_s([mine], silence_s=3.0) == 112.25, "silence since it was last looked at"
    assert retained.overdue([mine], now_s=112.25, silence_s=3.0) == [], "it may be held for a moment"
    assert retained.due_s([mine], silence_s=3.0) == 113.0
    assert retained.overdue([mine], now_s=112.9, silence_s=3.0) == []
    assert retained.overdue([mine], now_s=113.0, silence_s=3.0) == [mine]
