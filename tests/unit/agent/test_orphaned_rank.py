"""A rank whose fork server died before it: nobody knows its exit code, but last words tell a failure from a kill."""

from types import SimpleNamespace

import pytest

from muster.agent.ranks.rank_pool import Crew
from muster.agent.ranks.rank_process import Worker


class Agent:
    """What a crew needs of its agent; remembers what was told and logged."""

    def __init__(self):
        self.told, self.forkserver = [], None
        self.programs = SimpleNamespace(forkserver_pid=7)
        self.hub = SimpleNamespace(unwatch=lambda fd: None, drain=lambda peer: None)
        self.log = SimpleNamespace(write=lambda *words, **more: None)

    def tell(self, message):
        self.told.append(message)


CASES = {
    "killed": (3, {}, -9),
    "it was done": (3, {"left": 0}, 0),
    "it was stopped": (3, {"left": 130}, 130),
    "it said why": (3, {"exception": "ValueError", "message": "bad row"}, 1),
    "its parent lives": (7, {"message": "x"}, 3),
}


@pytest.mark.parametrize(("parent", "last", "code"), CASES.values(), ids=list(CASES))
def test_the_code_of_an_orphan(monkeypatch, parent, last, code):
    monkeypatch.setattr("muster.agent.ranks.rank_pool.os.close", lambda fd: None)
    agent = Agent()
    agent.forkserver = object()
    crew = Crew(agent=agent)
    worker = Worker(pid=99, rank=1, attempt=1, peer=object(), pidfd=5, parent=parent, last=last)
    crew.workers[99] = worker
    crew._died(worker)
    if parent == 7:
        assert agent.told == [], "the fork server's word is waited for"
        crew.exited(99, 3)
    assert [(message["code"], message["last"]) for message in agent.told] == [(code, last)]
