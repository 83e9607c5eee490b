"""Standbys have a local rank: on GPUs each waits with a context on its device and takes no other."""

import os
from pathlib import Path
from typing import Any

import pytest
from fakes.host import VirtualHost
from test_rank_states import context

from muster.agent.programs import preparation
from muster.agent.ranks.rank_environment import opens_contexts
from muster.agent.ranks.standbys import standby_for
from muster.agent.values.actions import Kill
from muster.agent.values.events import ForkServerMessage, PeerLost, ProcessGone, RankMessage, SupervisorMessage
from muster.agent.values.state import Standby
from muster.config.spec import RunSpec
from muster.protocol.fork_server import ChildExited, ChildStopped, SpawnStandbys
from muster.protocol.rank_agent import RunRank, StandbyUnfit, WarmUp
from muster.protocol.to_agent import EndAttempt, StartAttempt
from muster.protocol.to_supervisor import RanksEnded


def spec(**changes: Any) -> RunSpec:
    given = {
        "name": "case",
        "model": {"source": "m"},
        "data": {"sources": [{"type": "random"}]},
        "resources": {"device": "cuda", "ranks_per_host": 2},
        **changes,
    }
    return RunSpec.model_validate(given)


ON_CPU = {"device": "cpu", "ranks_per_host": 2}


def host_of(**changes: Any) -> VirtualHost:
    """Its fork server has just connected, and nothing was ordered yet."""
    host = VirtualHost(spec=spec(**changes)).supervised()
    host.state.fork_server.peer, host.state.fork_server.pid = 1000, 7
    host.state.preparation.prepared = True
    return host


def spawns(host: VirtualHost) -> list[tuple[tuple[int, ...], bool]]:
    return [(m.local_ranks, m.contexts) for _, m in host.to if isinstance(m, SpawnStandbys)]


def runs(host: VirtualHost) -> dict[int, int]:
    """Local rank of the context -> the standby that it was handed to."""
    return {m.context.local_rank: peer for peer, m in host.to if isinstance(m, RunRank)}


def start(host: VirtualHost, *local_ranks: int, attempt: int = 1) -> None:
    contexts = tuple(context(rank, attempt=attempt) for rank in local_ranks)
    host.give(SupervisorMessage(StartAttempt(attempt=attempt, contexts=contexts)))


def exited(pid: int, code: int = 1) -> ForkServerMessage:
    return ForkServerMessage(ChildExited(pid=pid, code=code))


@pytest.mark.parametrize(
    ("there", "taken"),
    [
        ([(0, True), (1, True)], 1),
        ([(0, True)], None),
        ([(0, False)], 0),
        ([(0, False), (1, True)], 1),
        ([(0, True), (2, False)], 1),
        ([], None),
    ],
)
def test_which_standby_takes_local_rank_1(there: Any, taken: Any) -> None:
    standbys = [Standby(pid=n, peer=n, local_rank=place, bound=bound) for n, (place, bound) in enumerate(there)]
    found = standby_for(1, standbys)
    assert (None if found is None else found.pid) == taken


def test_each_local_rank_gets_a_standby_of_its_own() -> None:
    host = host_of()
    start(host, 0, 1)
    assert spawns(host) == [((0, 1), True)], "once: the first ones are still on their way"
    host.standby(11, 1, bound=True)
    host.standby(12, 0, bound=True)
    assert runs(host) == {0: 12, 1: 11} and not host.state.ranks.standbys
    assert [kind for kind, *_ in host.logged].count("rank.started") == 2
    # One local rank has no standby: the other's holds its context and stays for it.
    host.standby(13, 0, bound=True)
    host.to.clear()
    start(host, 1, attempt=2)
    assert list(host.state.ranks.standbys) == [13] and spawns(host) == [((1,), True)]


def test_ranks_wait_for_the_data() -> None:
    host = host_of(resources=ON_CPU)
    host.state.preparation.prepared = False
    host.standby(11)
    start(host, 0)
    assert runs(host) == {} and len(host.state.ranks.queue) == 1


def test_without_contexts_any_standby_takes_any_local_rank() -> None:
    host = host_of(resources=ON_CPU)
    host.standby(11, 0)
    start(host, 1)
    assert runs(host) == {1: 11}
    host.give(SupervisorMessage(EndAttempt(attempt=1, why="i")), ProcessGone(11))
    assert spawns(host) == [((0, 1), False)], "once the attempt has ended"


def test_after_one_that_could_not_plain_ones_are_forked() -> None:
    host = host_of()
    host.standby(11, 0, bound=True)
    host.standby(12, 1, bound=True)
    host.give(RankMessage(11, StandbyUnfit()))
    assert host.killed == [11], "its CUDA state is unknown"
    assert list(host.state.ranks.standbys) == [12] and spawns(host) == [((0,), False)]


def test_a_standby_outlives_its_fork_servers_connection_and_leaves_with_its_own() -> None:
    host = host_of()
    host.standby(11, 0)
    host.give(PeerLost(1000))
    assert list(host.state.ranks.standbys) == [11]
    host.give(PeerLost(11))
    assert not host.state.ranks.standbys


@pytest.mark.parametrize("bound", [True, False])
def test_after_a_ranks_exit_standbys_with_a_context_are_asked_whether_it_lives(bound: bool) -> None:
    host = host_of()
    host.rank(99, 0)
    host.standby(12, 1, bound=bound)
    host.give(exited(99), ProcessGone(99))
    assert [peer for peer, message in host.to if isinstance(message, WarmUp)] == ([12] if bound else [])


def test_no_standby_holds_a_gpu_that_is_to_be_reset() -> None:
    host = host_of()
    host.standby(11, 0, bound=True)
    host.state.hardware.usage.has_tool = True
    host.give(SupervisorMessage(EndAttempt(attempt=1, why="a test", reset=(0,))))
    assert not host.started(preparation.RESET) and not host.state.ranks.standbys, "it is on its way out"
    assert host.killed == [11] and not host.state.hardware.usage.has_tool
    host.give(ProcessGone(11))
    assert host.started(preparation.RESET)[0].argv == ("nvidia-smi", "--gpu-reset", "-i", "0")
    assert host.of(RanksEnded) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"recovery": {"warm_standby": "imports"}}, False),
        ({"recovery": {"warm_standby": False}}, False),
        ({"command": ["train.py"], "model": None, "data": None}, False),
        ({"resources": {"device": "cpu"}}, False),
        ({"resources": {"device": "auto"}}, os.path.exists("/dev/nvidiactl")),
    ],
)
def test_who_opens_contexts(changes: Any, expected: bool) -> None:
    assert opens_contexts(spec(**changes)) is expected


def test_a_machine_with_nvidia_devices_is_one_with_gpus(monkeypatch: Any) -> None:
    monkeypatch.setattr(Path, "exists", lambda self: str(self) == "/dev/nvidiactl")
    assert opens_contexts(spec(resources={"device": "auto"}))


def test_a_rank_that_its_parent_calls_stopped_is_looked_at_soon() -> None:
    host = host_of(resources=ON_CPU, recovery={"heartbeat_timeout_s": 0.4})
    host.rank(99, 0)
    host.rank(98, 1, peer=2)
    host.tick()
    undisturbed_s = host.due_s() - host.now_s
    for pid in (4_000_001, 99):  # the first one is unknown
        host.give(ForkServerMessage(ChildStopped(pid=pid)))
    assert undisturbed_s > 0.4 > host.due_s() - host.now_s
    assert [rank.watch.stop_reported for rank in host.state.ranks.table.values()] == [True, False]


@pytest.mark.parametrize("case", ["another parent", "no fork server", "stopped as a standby"])
def test_of_whom_nobody_tells_the_agent_looks_within_the_limit(case: str) -> None:
    host = host_of(resources=ON_CPU, recovery={"heartbeat_timeout_s": 0.4})
    host.standby(99)
    if case == "stopped as a standby":
        host.stopped.add(99)
    start(host, 0)
    host.tick()
    if case == "another parent":
        host.state.ranks.table[99].parent = 8
    if case == "no fork server":
        host.give(PeerLost(1000))
    assert 0.2 < host.due_s() - host.now_s <= 0.3


def test_one_that_ends_before_it_registers_is_forked_again_and_three_in_a_row_are_reported() -> None:
    host = host_of(resources=ON_CPU)
    start(host, 0, 1)
    host.standby(11, 0)
    host.give(exited(4_000_001), exited(4_000_002))
    assert [ranks for ranks, _ in spawns(host)] == [(0, 1), (1,), (1,)] and not host.state.link.kept
    host.standby(12, 1)
    host.give(exited(12))
    assert len(spawns(host)) == 3, "it had registered"
    start(host, 0, attempt=2)
    host.to.clear()
    host.give(*(exited(pid) for pid in (4_000_003, 4_000_004, 4_000_005)))
    failure = host.state.link.kept["fork server"]
    assert "before they reach their agent" in failure.reason and "code 1" in failure.reason
    host.to.clear()
    start(host, 1, attempt=3)
    assert spawns(host)[-1][0] == (0, 1), "a later order is a new try"


# ---------------------------------------------------------------- children that have not registered


def test_those_that_do_not_register_are_killed_and_their_exit_is_waited_for() -> None:
    host = VirtualHost().supervised().with_fork_server(21, 22)
    host.give(SupervisorMessage(EndAttempt(attempt=4, why="a test")))
    assert host.killed == [21, 22] and host.of(RanksEnded) == [], "they still hold their GPUs"
    host.give(ProcessGone(21))
    assert host.of(RanksEnded) == []
    host.give(ProcessGone(22))
    assert len(host.of(RanksEnded)) == 1


def test_one_that_is_gone_already_delays_nothing() -> None:
    host = VirtualHost().supervised()
    host.gone.add(21)
    host.with_fork_server(21).give(SupervisorMessage(EndAttempt(attempt=4, why="a test")))
    assert host.killed == [] and len(host.of(RanksEnded)) == 1


@pytest.mark.parametrize(("attempt", "killed"), [(3, True), (4, True), (5, False)])
def test_a_rank_that_wakes_up_after_its_attempt_was_ended_is(attempt: int, killed: bool) -> None:
    from muster.agent.values.events import Greeted
    from muster.protocol.rank_agent import RankHello

    host = VirtualHost().supervised().with_fork_server(21)
    host.give(SupervisorMessage(EndAttempt(attempt=4, why="a test")), ProcessGone(21))
    host.done.clear()
    host.give(Greeted(3, RankHello(pid=22, attempt=attempt, rank=0, step=1)))
    assert bool(host.state.ranks.table) != killed and [action.pid for action in host.did(Kill)] == [22] * killed
