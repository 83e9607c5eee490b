"""A rank whose fork server died first: its exit code is unknown, but its last message tells a failure from a kill."""

from types import SimpleNamespace

import pytest
from fakes.host import RecordingHost

from muster.agent.rank_pool import RankPool
from muster.agent.ranks.rank_process import Worker

CASES = {
    "killed": (3, {}, -9),
    "it was done": (3, {"left": 0}, 0),
    "it was stopped": (3, {"left": 130}, 130),
    "it said why": (3, {"exception": "ValueError", "message": "bad row"}, 1),
    "its parent lives": (7, {"message": "x"}, 3),
}


@pytest.mark.parametrize(("parent", "last", "code"), CASES.values(), ids=list(CASES))
def test_the_code_of_an_orphan(monkeypatch, parent, last, code):
    monkeypatch.setattr("muster.agent.rank_pool.os.close", lambda fd: None)
    host = RecordingHost()
    host.fork_server, host.fork_server_pid = object(), 7
    pool = RankPool(host=host, children=SimpleNamespace())
    worker = Worker(pid=99, rank=1, attempt=1, peer=object(), pidfd=5, parent=parent, last=last)
    host.workers[99] = worker
    pool._on_exit(worker)
    if parent == 7:
        assert host.sent == [], "the fork server's report is waited for"
        pool.on_exit_code(99, 3)
    assert [(message["code"], message["last"]) for message in host.sent] == [(code, last)]
