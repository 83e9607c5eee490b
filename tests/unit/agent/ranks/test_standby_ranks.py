"""Standbys have a local rank: on GPUs each waits with a context on its device and takes no other."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.host import RecordingHost
from waiting import eventually

from muster.agent import gpu_reset
from muster.agent.ranks.pool_calls import Forks
from muster.agent.ranks.rank_environment import opens_contexts
from muster.agent.ranks.rank_process import is_stopped
from muster.agent.ranks.standbys import Standby, standby_for
from muster.config.spec import RunSpec
from muster.core.layout import Layout
from muster.protocol.fork_server import ChildExited, ChildStopped, ForkServerHello, SpawnStandbys
from muster.protocol.rank_agent import RunRank, StandbyHello, WarmUp
from muster.protocol.ranks import RankContext
from muster.protocol.to_agent import EndAttempt


def spec(**changes: Any) -> RunSpec:
    given = {
        "name": "case",
        "model": {"source": "m"},
        "data": {"sources": [{"type": "random"}]},
        "resources": {"device": "cuda", "ranks_per_host": 2},
        **changes,
    }
    return RunSpec.model_validate(given)


class Peer:
    identity: Any = None

    def expect(self, *_: Any) -> None:
        pass


class Host(RecordingHost):
    """A host with its fork server and ranks; ``messages`` are those to them."""

    def __init__(self, run_dir: Any, **changes: Any) -> None:
        self.messages: list[tuple[Any, Any]] = []
        self.watched: dict[int, Any] = {}
        hub = SimpleNamespace(
            send=lambda peer, message: self.messages.append((peer, message)),
            watch=self.watched.__setitem__,
            unwatch=self.watched.pop,
            drain=lambda peer: (),
        )
        super().__init__(run_dir, spec=spec(**changes), hub=hub)
        forks = self.forks = self.fork_server()
        peer: Any = Peer()
        forks.on_hello(peer, ForkServerHello(pid=1, store=("127.0.0.1", 1)))
        self.pool = self.rank_pool(
            forks=Forks(
                spawn=forks.spawn,
                reaps=forks.reaps,
                opens_contexts=lambda: forks.opens_contexts,
                give_up_contexts=forks.give_up_contexts,
                order_store=forks.order_store,
            )
        )

    def came(self, local_rank: int, pid: int) -> Any:
        """A forked standby says hello."""
        peer: Any = Peer()
        self.pool.add_standby(peer, StandbyHello(pid=pid, local_rank=local_rank, bound=self.forks.opens_contexts))
        self.forks.on_standby(local_rank, pid)
        return peer

    def standby_pids(self) -> list[int]:
        return list(self.pool.standbys.pids)

    def spawns(self) -> list[tuple[tuple[int, ...], bool]]:
        return [(m.local_ranks, m.contexts) for _, m in self.messages if isinstance(m, SpawnStandbys)]

    def runs(self) -> dict[int, int]:
        """Local rank of the context -> pid of the standby that it was handed to."""
        pids = {worker.peer: worker.pid for worker in self.pool.workers.values()}
        sent = [(peer, m.context) for peer, m in self.messages if isinstance(m, RunRank)]
        return {context.local_rank: pids[peer] for peer, context in sent if peer in pids}


@pytest.fixture
def processes():
    found = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(3)]
    yield found
    for process in found:
        process.kill()
        process.wait()
        process.stdin.close()


def context(local_rank: int) -> RankContext:
    return RankContext(
        run_id="run", run_dir="run", attempt=1, host="host-0", rank=local_rank, local_rank=local_rank, world_size=2,
        local_world_size=2, layout=Layout(dp_shard=2), master_addr="127.0.0.1", master_port=1,
    )  # fmt: skip


def standbys(*places: tuple[int, bool]) -> list[Any]:
    return [Standby(pid=n, peer=None, local_rank=place, bound=bound) for n, (place, bound) in enumerate(places)]  # type: ignore[arg-type]


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
    found = standby_for(1, standbys(*there))
    assert (None if found is None else found.pid) == taken


def test_each_local_rank_gets_a_standby_of_its_own(tmp_path: Any, processes: Any) -> None:
    host = Host(tmp_path)
    host.pool.replenish_standbys()
    host.pool.replenish_standbys()  # the first ones are still on their way
    assert host.spawns() == [((0, 1), True)]
    first, second, third = (process.pid for process in processes)
    host.came(1, first)
    host.came(0, second)
    host.pool.queue.waiting = [context(0), context(1)]
    host.pool.queue.assign()
    assert host.runs() == {0: second, 1: first} and not host.standby_pids()
    assert (tmp_path / "logs").stat().st_mode & 0o777 == 0o700
    # One local rank has no standby: the other's holds its context and stays for it.
    host.came(0, third)
    host.pool.queue.waiting = [context(1)]
    host.pool.queue.assign()
    assert host.standby_pids() == [third] and host.spawns()[1:] == [((1,), True)]


def test_without_contexts_any_standby_takes_any_local_rank(tmp_path: Any, processes: Any) -> None:
    host = Host(tmp_path, resources={"device": "cpu", "ranks_per_host": 2})
    host.came(0, processes[0].pid)
    host.pool.queue.waiting = [context(1)]
    host.pool.queue.assign()
    assert host.runs() == {1: processes[0].pid}
    host.pool.replenish_standbys()
    assert host.spawns() == [((0, 1), False)]


def test_after_one_that_could_not_plain_ones_are_forked(tmp_path: Any, processes: Any) -> None:
    host = Host(tmp_path)
    peer = host.came(0, processes[0].pid)
    host.came(1, processes[1].pid)
    host.pool.on_standby_lost(peer, unusable=True)
    assert processes[0].wait(5) == -9, "its CUDA state is unknown"
    assert host.standby_pids() == [processes[1].pid] and host.spawns() == [((0,), False)]
    host.came(0, processes[2].pid)
    assert not host.pool.standbys.take(0).bound


def test_after_a_ranks_exit_standbys_with_a_context_are_asked_whether_it_lives(tmp_path: Any, processes: Any) -> None:
    host = Host(tmp_path)
    peers = [host.came(local_rank, processes[local_rank].pid) for local_rank in (0, 1)]
    host.pool.standbys.take(0)
    host.pool.register_rank(processes[0].pid, 0, 1, peers[0], was_warm=True)
    host.pool.on_exit_code(processes[0].pid, 1)
    (gone,) = host.watched.values()
    gone()
    assert [peer for peer, message in host.messages if isinstance(message, WarmUp)] == [peers[1]]


def test_without_a_context_they_are_not_asked(tmp_path: Any, processes: Any) -> None:
    host = Host(tmp_path, resources={"device": "cpu", "ranks_per_host": 2})
    host.came(0, processes[0].pid)
    host.pool.standbys.look(host.hub)
    assert not host.messages


def test_no_standby_holds_a_gpu_that_is_to_be_reset(tmp_path: Any, processes: Any, monkeypatch: Any) -> None:
    resets = []
    monkeypatch.setattr(gpu_reset, "start", lambda hub, gpus, done: resets.append(gpus))
    host = Host(tmp_path)
    host.came(0, processes[0].pid)
    host.pool.end(EndAttempt(attempt=1, why="a test", reset=(0,)))
    assert not resets and not host.standby_pids(), "it is on its way out"
    assert processes[0].wait(5) == -9
    (gone,) = host.watched.values()
    gone()  # its pidfd fires
    assert resets == [(0,)]


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


def test_a_rank_that_its_parent_calls_stopped_is_looked_at_soon(tmp_path: Any, processes: Any) -> None:
    host = Host(tmp_path, resources={"device": "cpu", "ranks_per_host": 2}, recovery={"heartbeat_timeout_s": 0.4})
    pid, other = processes[0].pid, processes[1].pid
    for rank, one in enumerate((pid, other)):
        host.pool.register_rank(one, rank, 1, None, was_warm=True)
        host.pool.workers[one].parent = 1  # the fork server that said hello
    host.supervised = True
    undisturbed_s = host.pool.due_s() - time.monotonic()
    host.forks._on_message(Peer(), ChildStopped(pid=pid))  # type: ignore[arg-type]
    assert host.stopped == [pid]
    host.pool.on_stopped(4_000_001)  # unknown
    host.pool.on_stopped(pid)
    assert undisturbed_s > 2.0 > 0.4 > host.pool.due_s() - time.monotonic()
    assert [worker.stop_reported for worker in host.pool.workers.values()] == [True, False]


@pytest.mark.parametrize("case", ["another parent", "no fork server", "stopped as a standby"])
def test_of_whom_nobody_tells_the_agent_looks_within_the_limit(tmp_path: Any, processes: Any, case: str) -> None:
    host = Host(tmp_path, resources={"device": "cpu"}, recovery={"heartbeat_timeout_s": 0.4})
    host.supervised, pid = True, processes[0].pid
    if case == "stopped as a standby":
        os.kill(pid, signal.SIGSTOP)
        eventually(lambda: is_stopped(pid))
    host.pool.register_rank(pid, 0, 1, None, was_warm=True)
    host.pool.workers[pid].parent = 7 if case == "another parent" else 1
    if case == "no fork server":
        host.forks.on_lost()
    assert 0.2 < host.pool.due_s() - time.monotonic() <= 0.3


def test_one_that_ends_before_it_registers_is_forked_again_and_three_in_a_row_are_reported(
    tmp_path: Any, processes: Any
) -> None:
    host = Host(tmp_path, resources={"device": "cpu", "ranks_per_host": 2})

    def ends(pid: int) -> None:
        host.forks._on_message(Peer(), ChildExited(pid=pid, code=1))  # type: ignore[arg-type]

    host.pool.replenish_standbys()
    host.came(0, processes[0].pid)
    ends(4_000_001)
    ends(4_000_002)
    assert [ranks for ranks, _ in host.spawns()] == [(0, 1), (1,), (1,)] and not host.failures
    host.came(1, processes[1].pid)
    ends(processes[1].pid)
    assert len(host.spawns()) == 3, "it had registered: the pool orders the next one"
    host.pool.replenish_standbys()
    for pid in (4_000_003, 4_000_004, 4_000_005):
        ends(pid)
    (failure,) = host.failures
    assert "before they reach their agent" in failure.reason and "code 1" in failure.reason
    host.pool.replenish_standbys()
    assert host.spawns()[-1][0] == (1,), "a later order is a new try"
