"""What a standby says to its agent while it waits. No GPU is here: one that is to open a context is really refused."""

import pytest
from fakes.small_model import spec_of

from muster.rank import fork_server, warmup

RUN = {"t": "run", "context": {}}


class AgentConnection:
    """The agent's end: what comes, in its order; what was said to it."""

    def __init__(self, *comes):
        self.comes, self.said = list(comes), []

    def wait(self, timeout_s):
        found = self.comes.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def send(self, message):
        self.said.append(message["t"])


def first(line, *, context, **changes):
    spec = spec_of().model_dump(mode="json") | changes
    return fork_server._first_assignment(line, spec, local_rank=1, context=context)


def test_one_that_gets_a_rank_at_once_does_nothing_before(monkeypatch):
    monkeypatch.setattr(warmup, "warm_up", lambda *_, **__: pytest.fail("nobody waits for that"))
    line = AgentConnection([RUN])
    assert first(line, context=True) == RUN and line.said == []


def test_one_that_cannot_open_a_context_says_so_and_still_takes_what_comes(capsys):
    line = AgentConnection(TimeoutError(), [{"t": "warm"}], [RUN])
    assert first(line, context=True) == RUN
    assert line.said == ["unfit"] and "could not warm up" in capsys.readouterr().err


@pytest.mark.parametrize("fits", [True, False])
def test_on_the_cpu_a_warm_up_that_fails_makes_nobody_unfit(fits, monkeypatch):
    asked = []
    monkeypatch.setattr(warmup, "warm_up", lambda spec, gpu: asked.append(gpu) or fits)
    line = AgentConnection([{"t": "warm"}], [RUN])
    assert first(line, context=False, resources={"device": "cpu"}) == RUN
    assert asked == [None] and line.said == ["warm"]


def test_imports_are_all_where_no_more_is_wanted(monkeypatch):
    monkeypatch.setattr(warmup, "warm_up", lambda *_, **__: pytest.fail("imports only"))
    line = AgentConnection(TimeoutError(), [RUN])
    assert first(line, context=False, recovery={"warm_standby": "imports"}) == RUN and line.said == ["warm"]
