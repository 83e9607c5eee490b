"""Whose exit an agent tells while it ends an attempt's ranks: of those that went before it sent the signal."""

import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from fakes.host import RecordingHost
from waiting import eventually

from muster.agent.ranks.pool_calls import Forks
from muster.agent.ranks.rank_process import Worker, is_exiting, open_pidfd
from muster.protocol.to_agent import EndAttempt
from muster.protocol.to_supervisor import RankExit, RanksEnded


@pytest.mark.parametrize("first", [True, False])
def test_a_rank_that_somebody_killed_before_the_agent_did_is_told(first):
    """Its memory is freed before its exit code is known; a peer's broken connection ends the attempt meanwhile."""
    spec = SimpleNamespace(recovery=SimpleNamespace(warm_standby=False), resources=SimpleNamespace(ranks_per_host=1))
    host = RecordingHost(spec=spec)
    forks = Forks(
        spawn=lambda _: None,
        reaps=lambda _: True,
        opens_contexts=lambda: False,
        give_up_contexts=lambda: None,
        order_store=lambda: None,
    )
    pool = host.rank_pool(forks=forks)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as rank:
        worker = Worker(pid=rank.pid, rank=1, attempt=1, peer=None, pidfd=open_pidfd(rank.pid))
        pool.workers[rank.pid] = worker
        assert not is_exiting(rank.pid)
        if first:
            rank.kill()
            eventually(lambda: is_exiting(rank.pid))
        pool.end(EndAttempt(attempt=1, why="i1"))
        pool.end(EndAttempt(attempt=1, why="i1"))  # again, from a supervisor that took over
        assert host.sent == []
        rank.wait()
        pool._on_exit(worker)
        pool.on_exit_code(rank.pid, -signal.SIGKILL)
    told = [message for message in host.sent if isinstance(message, RankExit)]
    assert [(one.rank, one.code) for one in told] == ([(1, -9)] if first else [])
    assert isinstance(host.sent[-1], RanksEnded)
    assert is_exiting(rank.pid), "gone"
