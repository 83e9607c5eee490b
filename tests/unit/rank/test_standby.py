"""What a standby says to its agent while it waits. No GPU is here: one that is to open a context is really refused."""

import pytest
from fakes.small_model import spec_of

from muster.config.spec import RunSpec
from muster.core.layout import Layout
from muster.protocol.rank_agent import RunRank, StandbyUnfit, StandbyWarm, WarmUp
from muster.protocol.ranks import RankContext
from muster.rank import standby, warmup

CONTEXT = RankContext(
    run_id="run", run_dir="run", attempt=1, host="host-0", rank=0, local_rank=0, world_size=1, local_world_size=1,
    layout=Layout(), master_addr="127.0.0.1", master_port=1,
)  # fmt: skip
RUN = RunRank(context=CONTEXT, log="log")


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
        self.said.append(message)


def first(line, *, context, **changes):
    spec = RunSpec.model_validate(spec_of().model_dump(mode="json") | changes)
    return standby._first_assignment(line, spec, local_rank=1, context=context)


def test_one_that_gets_a_rank_at_once_does_nothing_before(monkeypatch):
    monkeypatch.setattr(warmup, "warm_up", lambda *_, **__: pytest.fail("nobody waits for that"))
    line = AgentConnection([RUN])
    assert first(line, context=True) == RUN and line.said == []


def test_one_that_cannot_open_a_context_says_so_and_still_takes_what_comes(capsys):
    line = AgentConnection(TimeoutError(), [WarmUp()], [RUN])
    assert first(line, context=True) == RUN
    assert line.said == [StandbyUnfit()] and "could not warm up" in capsys.readouterr().err


@pytest.mark.parametrize("fits", [True, False])
def test_on_the_cpu_a_warm_up_that_fails_makes_nobody_unfit(fits, monkeypatch):
    asked = []
    monkeypatch.setattr(warmup, "warm_up", lambda spec, gpu: asked.append(gpu) or fits)
    line = AgentConnection([WarmUp()], [RUN])
    assert first(line, context=False, resources={"device": "cpu"}) == RUN
    assert asked == [None] and line.said == [StandbyWarm()]


def test_imports_are_all_where_no_more_is_wanted(monkeypatch):
    monkeypatch.setattr(warmup, "warm_up", lambda *_, **__: pytest.fail("imports only"))
    line = AgentConnection(TimeoutError(), [RUN])
    assert first(line, context=False, recovery={"warm_standby": "imports"}) == RUN and line.said == [StandbyWarm()]


def test_one_whose_context_dies_while_it_waits_says_so_once_and_asks_the_gpu_no_more(monkeypatch):
    alive = [True, True, False]
    monkeypatch.setattr(warmup, "warm_up", lambda *_, **__: True)
    monkeypatch.setattr(warmup, "context_lives", lambda gpu: gpu == 1 and alive.pop(0))
    waits = []

    class Line(AgentConnection):
        def wait(self, timeout_s):
            waits.append(timeout_s)
            return super().wait(timeout_s)

    line = Line([WarmUp()], TimeoutError(), TimeoutError(), TimeoutError(), [RUN])
    assert first(line, context=True) == RUN and not alive
    assert line.said == [StandbyWarm(), StandbyUnfit()]
    assert waits[1:] == [standby.CONTEXT_LOOK_S] * 3 + [None]


def test_one_is_asked_before_it_may_get_a_rank_whether_its_context_lives(monkeypatch):
    monkeypatch.setattr(warmup, "warm_up", lambda *_, **__: True)
    monkeypatch.setattr(warmup, "context_lives", lambda gpu: False)
    line = AgentConnection([WarmUp()], [WarmUp(), RUN])
    assert first(line, context=True) == RUN
    assert line.said == [StandbyWarm(), StandbyUnfit()], "the agent ends it unless the rank was assigned already"


def test_one_without_a_context_has_nothing_to_look_at(monkeypatch):
    monkeypatch.setattr(warmup, "warm_up", lambda *_, **__: True)
    monkeypatch.setattr(warmup, "context_lives", lambda gpu: pytest.fail("it has none"))
    line = AgentConnection([WarmUp()], [WarmUp(), RUN])
    assert first(line, context=False, resources={"device": "cpu"}) == RUN


def test_whether_a_context_lives_is_asked_of_a_kernel(monkeypatch, capsys):
    monkeypatch.setattr(warmup, "device_of", lambda gpu: warmup.CPU)
    assert warmup.context_lives(0)

    def dead(gpu):
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    monkeypatch.setattr(warmup, "device_of", dead)
    assert not warmup.context_lives(0) and "uncorrectable ECC" in capsys.readouterr().err
