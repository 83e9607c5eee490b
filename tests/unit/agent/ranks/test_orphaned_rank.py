"""A rank whose fork server died first: its exit code is unknown, but its last message tells a failure from a kill."""

import subprocess

import pytest
from fakes.host import RecordingHost

from muster.agent.ranks.pool_calls import Forks
from muster.agent.ranks.rank_process import Worker
from muster.protocol.rank_agent import RankBeat
from muster.protocol.to_supervisor import RankExit
from muster.protocol.values import LastWords

CASES = {
    "killed": (3, None, -9),
    "it was done": (3, LastWords(left=0), 0),
    "it was stopped": (3, LastWords(left=130), 130),
    "it said why": (3, LastWords(exception="ValueError", message="bad row"), 1),
    "its parent lives": (7, LastWords(message="x"), 3),
}


@pytest.mark.parametrize(("parent", "last", "code"), CASES.values(), ids=list(CASES))
def test_the_code_of_an_orphan(monkeypatch, parent, last, code):
    monkeypatch.setattr("muster.agent.ranks.rank_process.os.close", lambda fd: None)
    host = RecordingHost()
    forks = Forks(
        spawn=lambda _: None,
        reaps=lambda process: process == 7,
        opens_contexts=lambda: False,
        give_up_contexts=lambda: None,
        order_store=lambda: None,
    )
    pool = host.rank_pool(forks=forks)
    worker = Worker(pid=99, rank=1, attempt=1, peer=object(), pidfd=5, parent=parent, last=last)
    pool.workers[99] = worker
    pool._on_exit(worker)
    if parent == 7:
        assert host.sent == [], "the fork server's report is waited for"
        pool.on_exit_code(99, 3)
    assert [(message.code, message.last) for message in host.sent] == [(code, last)]


def test_a_new_step_that_is_read_after_the_last_ranks_exit_does_not_prevent_its_report(monkeypatch):
    monkeypatch.setattr("muster.agent.ranks.rank_process.os.close", lambda fd: None)
    host = RecordingHost()
    pool = host.rank_pool()
    worker = Worker(pid=99, rank=0, attempt=1, peer=object(), pidfd=5, step=3, first_step=2)
    host.hub.drain = lambda peer: pool.handle(worker, RankBeat(step=4, micro=0)) or ()
    pool.workers[99] = worker
    pool._on_exit(worker)
    assert worker.step == 4
    assert [(message.rank, message.code) for message in host.sent] == [(0, -9)]


def test_a_standby_that_was_reaped_before_it_became_a_rank_is_reported():
    """Nothing was: its attempt waited for ``start_timeout_s``."""
    child = subprocess.Popen(["true"])
    child.wait()  # reaped: no descriptor can be opened for it
    host = RecordingHost()
    pool = host.rank_pool()
    pool.register_rank(child.pid, 2, 1, None, was_warm=True)
    exits = [message for message in host.sent if isinstance(message, RankExit)]
    assert [(message.rank, message.code) for message in exits] == [(2, -9)] and pool.workers == {}
    pool.on_exit_code(child.pid, 0)
    assert len([message for message in host.sent if isinstance(message, RankExit)]) == 1, "reported once"
