"""Whose exit an agent tells while it ends an attempt's ranks: of those that went before it sent the signal."""

import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from fakes.host import RecordingHost
from waiting import eventually

from muster.agent.ranks.rank_process import Worker, is_exiting, on_exit, open_pidfd
from muster.protocol.to_agent import EndAttempt
from muster.protocol.to_supervisor import RankExit, RanksEnded
from muster.protocol.values import LastWords

MEMORY = LastWords(exception="RuntimeError", message="DefaultCPUAllocator: can't allocate memory")

END = EndAttempt(attempt=1, why="i1")


def host_and_pool(run_dir=None):
    """Of one whose fork server will tell every exit code."""
    spec = SimpleNamespace(recovery=SimpleNamespace(warm_standby=False), resources=SimpleNamespace(ranks_per_host=1))
    host = RecordingHost(run_dir=run_dir, spec=spec)
    return host, host.rank_pool(reaps=True)


@pytest.mark.parametrize("first", [True, False])
def test_a_rank_that_somebody_killed_before_the_agent_did_is_told(first):
    """Its memory is freed before its exit code is known; a peer's broken connection ends the attempt meanwhile."""
    host, pool = host_and_pool()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as rank:
        worker = Worker(pid=rank.pid, rank=1, attempt=1, peer=None, pidfd=open_pidfd(rank.pid))
        pool.workers[rank.pid] = worker
        assert not is_exiting(rank.pid)
        if first:
            rank.kill()
            eventually(lambda: is_exiting(rank.pid))
        pool.end(END)
        pool.end(END)  # again, from a supervisor that took over
        assert host.sent == []
        rank.wait()
        pool._on_exit(worker)
        pool.on_exit_code(rank.pid, -signal.SIGKILL)
    told = [message for message in host.sent if isinstance(message, RankExit)]
    assert [(one.rank, one.code) for one in told] == ([(1, -9)] if first else [])
    assert isinstance(host.sent[-1], RanksEnded)
    assert is_exiting(rank.pid), "gone"


@pytest.mark.parametrize("known", ["its end", "its code"])
def test_the_ranks_have_ended_only_once_the_exit_of_each_is_told(known, monkeypatch):
    """An exit is known from a pidfd and from the fork server, in any order, and the order to end the ranks comes
    between the two: told after the answer it would be of an old attempt, and nobody would hear the cause."""
    monkeypatch.setattr("muster.agent.ranks.rank_process.os.close", lambda fd: None)
    host, pool = host_and_pool()
    worker = pool.workers[99] = Worker(pid=99, rank=1, attempt=1, peer=object(), pidfd=5, last=MEMORY)
    events = [lambda: pool._on_exit(worker), lambda: pool.on_exit_code(99, 1)]
    one, other = events if known == "its end" else reversed(events)
    one()
    pool.end(END)
    assert host.sent == []
    other()
    exited, ended = host.sent
    assert (exited.rank, exited.code, exited.last) == (1, 1, MEMORY) and isinstance(ended, RanksEnded)


@pytest.mark.parametrize("said", [MEMORY, LastWords(left=75), None])
def test_a_rank_that_had_said_why_it_ends_was_not_ended_by_the_agent(said):
    """Python takes a while from there to the end of the process, and peers may meet its broken connection meanwhile."""
    host, pool = host_and_pool()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as rank:
        worker = Worker(pid=rank.pid, rank=1, attempt=1, peer=object(), pidfd=open_pidfd(rank.pid))
        pool.workers[rank.pid] = worker
        host.hub.drain = lambda peer: (pool.handle(worker, said) if said is not None else None) or ()
        pool.end(END)
        rank.wait()
        pool._on_exit(worker)
        pool.on_exit_code(rank.pid, -signal.SIGKILL)
    told = [(message.code, message.last) for message in host.sent if isinstance(message, RankExit)]
    assert told == ([] if said is None else [(75 if said.left else 1, said)])
    assert isinstance(host.sent[-1], RanksEnded)


@pytest.mark.parametrize("code", [None, -signal.SIGABRT])
def test_what_the_agent_has_killed_is_not_waited_for_where_the_fork_server_stands_still(code, tmp_path):
    """Or the supervisor would count the host as lost. A line in its log is nothing that the rank had said before."""
    host, pool = host_and_pool(tmp_path)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-1.a1.log").write_text("terminate called: CUDA error: unspecified launch failure\n")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as rank:
        worker = Worker(pid=rank.pid, rank=1, attempt=1, peer=None, pidfd=open_pidfd(rank.pid))
        pool.workers[rank.pid] = worker
        pool.end(END)
        rank.wait()
        if code is not None:
            pool.on_exit_code(rank.pid, code)
        pool._on_exit(worker)
    (ended,) = host.sent
    assert isinstance(ended, RanksEnded) and pool.workers == {}


def test_a_process_that_has_gone_before_it_is_watched_is_told_at_once():
    """So an agent does not outlive a watchdog that ended while the agent was starting."""
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    told = []
    on_exit(None, gone.pid, lambda: told.append("gone"))
    assert told == ["gone"]
