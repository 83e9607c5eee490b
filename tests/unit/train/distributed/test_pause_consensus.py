"""Ranks that share a model leave together, behind the same micro-batch."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from muster.core.types import Layout
from muster.protocol.ranks import LOST_PEER
from muster.rank.worker import try_reassign
from muster.train.distributed.pause_consensus import PauseConsensus
from muster.train.training_run import Paused, TrainingRun


class Replica:
    """A group whose ranks are asked one after another; the last one's word completes the message."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.said: list[Tensor] = []

    def allreduce(self, tensors: Any, options: Any) -> "Replica":
        self.said.append(tensors[0])
        return self

    def wait(self) -> None:
        assert len(self.said) == self.size, "a rank would wait for ever"
        most = torch.stack(self.said).amax()
        for tensor in self.said:
            tensor.fill_(int(most))


class AgentClient:
    heard = False

    def pause_requested(self) -> bool:
        return self.heard


def ranks_of(count: int) -> tuple[list[PauseConsensus], list[AgentClient]]:
    links = [AgentClient() for _ in range(count)]
    group: Any = Replica(count)
    return [PauseConsensus(agent, group) for agent in links], links  # type: ignore[arg-type]


def test_all_of_them_leave_where_one_has_heard_of_it() -> None:
    ranks, links = ranks_of(3)
    links[1].heard = True
    for rank in ranks:
        rank.start()
    links[0].heard = links[2].heard = True  # too late for this micro-batch, and it does not matter
    assert [rank.result() for rank in ranks] == [True, True, True]


def test_one_that_hears_of_it_later_does_not_leave_alone() -> None:
    ranks, links = ranks_of(2)
    for rank in ranks:
        rank.start()
    links[0].heard = True
    assert [rank.result() for rank in ranks] == [False, False]


def test_each_question_is_answered_once() -> None:
    ranks, links = ranks_of(1)
    links[0].heard = True
    assert not ranks[0].result(), "nobody was asked"
    ranks[0].start()
    assert ranks[0].result() and not ranks[0].result()


def test_where_there_is_nobody_to_agree_with_nothing_is_sent() -> None:
    alone = PauseConsensus()
    alone.start()
    assert not alone.result()


def test_a_peer_of_the_same_replica_that_is_lost_is_told_as_such() -> None:
    class Broken(Replica):
        def wait(self) -> None:
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1")

    rank = PauseConsensus(AgentClient(), Broken(2))  # type: ignore[arg-type]
    rank.start()
    with pytest.raises(RuntimeError) as caught:
        rank.result()
    assert LOST_PEER.search(str(caught.value))


# ---------------------------------------------------------------- in the loop and beyond it


def test_the_loop_is_left_where_all_agreed_though_this_rank_has_not_heard() -> None:
    here: Any = SimpleNamespace(pause_consensus=SimpleNamespace(result=lambda: True), agent=AgentClient())
    with pytest.raises(Paused):
        TrainingRun.flush_pending_metrics(here)


def test_a_rank_that_shares_its_replica_does_not_leave_because_it_alone_has_heard() -> None:
    agent = AgentClient()
    agent.heard = True
    recorded: list[str] = []
    here: Any = SimpleNamespace(
        pause_consensus=SimpleNamespace(result=lambda: False),
        agent=agent,
        context=SimpleNamespace(layout=Layout(dp_replicate=2, dp_shard=2)),
        _emit_pending=lambda: recorded.append("step"),
    )
    TrainingRun.flush_pending_metrics(here)
    assert recorded == ["step"]


@pytest.mark.parametrize("layout", [Layout(dp_replicate=2, dp_shard=2), Layout(dp_shard=2)])
def test_it_waits_for_its_place_though_it_has_not_heard_itself(layout: Layout) -> None:
    did: list[str] = []
    here: Any = SimpleNamespace(
        context=SimpleNamespace(layout=layout),
        agent=SimpleNamespace(pause_requested=lambda: False, wait_for_assignment=lambda step: f"a place after {step}"),
        state=SimpleNamespace(step=7),
        spec=SimpleNamespace(replicas_survive=True),
        pause=lambda: did.append("stood still"),
        abandon=lambda: did.append("let go"),
    )
    assert try_reassign(here, Paused()) == "a place after 7" and did == ["stood still", "let go"]  # type: ignore[comparison-overlap]
