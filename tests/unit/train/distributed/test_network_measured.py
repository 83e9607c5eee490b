"""Ranks measure the network between hosts: gloo groups of real ranks, each in a thread."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch._C._distributed_c10d import HashStore
from torch.utils._python_dispatch import TorchDispatchMode

from muster.core.event_details.network import NetworkEnd, NetworkMeasured
from muster.core.types import Layout
from muster.protocol.ranks import RankContext
from muster.train.distributed import network, process_groups

here = threading.local()
"""``rank``: whose thread this is."""


class Agent:
    def __init__(self):
        self.said, self.progressed = [], 0

    def emit(self, kind, **detail):
        self.said.append((kind, detail))

    def progress(self):
        self.progressed += 1


def context(rank, *, a_host=1, world=2, attempt=1):
    return RankContext(
        run_id="r", run_dir="/unused", attempt=attempt, host=f"h{rank // a_host}", rank=rank, local_rank=rank % a_host,
        world_size=world, local_world_size=a_host, layout=Layout(), master_addr="127.0.0.1", master_port=1,
    )  # fmt: skip


def measured(*, a_host=1, world=2, attempt=1, store=None):
    """What each rank's agent heard."""
    store, agents = store or HashStore(), [Agent() for _ in range(world)]

    def measure(rank):
        here.rank = rank
        of = context(rank, a_host=a_host, world=world, attempt=attempt)
        network.measure(of, agents[rank], device=torch.device("cpu"), store=store)

    with ThreadPoolExecutor(world) as pool:
        list(pool.map(measure, range(world)))
    return agents


def event(agents):
    """Rank 0's, and nothing from anybody else."""
    ((kind, detail),), *others = [agent.said for agent in agents]
    assert kind == "network.measured" and not any(others)
    return NetworkMeasured.of(detail)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(network, "SIZES_GLOO", (4096, 16384))
    monkeypatch.setattr(network, "WITHIN_S", 20.0)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


class Group:
    """A gloo group that remembers what it was asked for."""

    def __init__(self, group):
        self.group, self.calls, self.ended = group, [], 0

    def __getattr__(self, name):
        return getattr(self.group, name)

    def allreduce(self, tensors, options):
        self.calls.append(("all_reduce", *(one.nbytes for one in tensors)))
        return self.after(tensors[0], self.group.allreduce(tensors, options))

    def _allgather_base(self, whole, part, options):
        self.calls.append(("all_gather", whole.nbytes, part.nbytes))
        return self.after(whole, self.group._allgather_base(whole, part, options))

    def after(self, tensor, work):
        return work

    def shutdown(self):
        self.ended += 1
        self.group.shutdown()


@pytest.fixture
def groups(small, monkeypatch):
    """By rank."""
    made, make = {}, network.gloo_group

    def remembered(store, *, rank, size, timeout):
        made[rank] = Group(make(store, rank=rank, size=size, timeout=timeout))
        return made[rank]

    monkeypatch.setattr(network, "gloo_group", remembered)
    return made


class Clock:
    """A call takes what ``seconds`` says of its rank, one after the other."""

    def __init__(self, *seconds):
        self.seconds, self.looks = seconds, [0] * len(seconds)

    def perf_counter(self):
        mine = self.seconds[here.rank]
        self.looks[here.rank] += 1
        call, ends = divmod(self.looks[here.rank] - 1, 2)
        return 100.0 + (mine[call % len(mine)] if ends else 0.0)


def test_rank_0_says_what_all_of_them_measured(small):
    agents = measured()
    found = event(agents)
    assert (found.hosts, found.ranks, found.library) == (("h0", "h1"), 2, "gloo")
    assert [(one.collective, one.size_bytes) for one in found.figures] == [
        ("all_gather", 4096), ("all_gather", 16384), ("all_reduce", 4096), ("all_reduce", 16384),
    ]  # fmt: skip
    assert all(0 < one.seconds < 5 and one.wrong == 0 for one in found.figures)
    assert found.ends == tuple(NetworkEnd(collective=one, reason="all") for one in network.COLLECTIVES)
    assert [agent.progressed for agent in agents] == [4, 4], "who measures is not taken for one that hangs"


def test_each_size_is_what_is_sent_once_to_warm_up_and_then_as_often_as_it_is_timed(groups):
    """And before each timed call, and at the beginning, the ranks meet."""
    clock = Clock([0.1], [0.1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "time", clock)
        measured()
    meet, room, result = ("all_reduce", 4), ("all_gather", 16, 8), ("all_gather", 48, 24)
    expected = [meet, room]
    for call in (("all_gather", 4096, 2048), ("all_gather", 16384, 8192), ("all_reduce", 4096), ("all_reduce", 16384)):
        expected += [call, *[meet, call] * network.REPEATS, result]
    assert [groups[rank].calls for rank in (0, 1)] == [expected, expected]
    assert clock.looks == [4 * 2 * network.REPEATS] * 2
    assert process_groups.ranks_of_groups["a1/network"] == (0, 1)
    assert [groups[rank].ended for rank in (0, 1)] == [1, 1]


def test_ranks_of_one_host_have_no_network(small):
    assert [agent.said for agent in measured(a_host=2)] == [[], []]


def test_of_hosts_of_several_ranks_each_is_named_once(small):
    found = event(measured(a_host=2, world=4))
    assert (found.hosts, found.ranks) == (("h0", "h1"), 4)


def test_a_size_is_cut_to_a_multiple_of_the_ranks(small):
    found = event(measured(world=3))
    assert [(one.size_bytes, one.wrong) for one in found.figures] == [(4092, 0), (16380, 0)] * 2


def test_an_attempts_measurement_is_its_own(small):
    """On the store of all attempts."""
    store = HashStore()
    for attempt in (1, 2):
        assert event(measured(attempt=attempt, store=store)).ranks == 2


def test_wrong_results_of_all_ranks_are_counted(small, monkeypatch):
    prepared = network.Ring.prepared

    def corrupting(ring, collective, share):
        call, wrong_elements = prepared(ring, collective, share)
        return call, lambda: wrong_elements() + 3 + ring.rank

    monkeypatch.setattr(network.Ring, "prepared", corrupting)
    assert [one.wrong for one in event(measured()).figures] == [7, 7, 7, 7]


@pytest.mark.parametrize("place", [5, 700])
def test_a_result_that_is_not_what_it_should_be_is_seen(groups, monkeypatch, place):
    """Of either collective, in each rank's part."""

    def flipped(group, tensor, work):
        work.wait()
        if tensor.nbytes == 4096 and group is groups[0]:
            tensor[place] += 1
        return work

    monkeypatch.setattr(Group, "after", flipped)
    assert [one.wrong for one in event(measured()).figures] == [1, 0, 1, 0]


def test_a_part_that_stays_as_it_was_is_wrong():
    """A collective that reports success and has done nothing."""
    share = 4096 // 2 // 4
    assert [one.wrong for one in Nothing.figures()] == [2 * share, 2 * share]


class Nothing:
    """A group of two whose collectives do nothing."""

    def allreduce(self, tensors, options):
        return SimpleNamespace(wait=lambda: True)

    def _allgather_base(self, whole, part, options):
        if part.dtype == torch.float64:  # what the ranks tell each other
            whole.copy_(torch.cat([part, torch.zeros_like(part)]))
        return SimpleNamespace(wait=lambda: True)

    @classmethod
    def figures(cls, size=4096):
        ring = network.Ring(cls(), 0, 2, torch.device("cpu"))
        return [network._figure(ring, collective, size) for collective in network.COLLECTIVES]


def test_the_slowest_ranks_median_counts_and_a_slow_network_is_measured_at_the_smaller_size(small, monkeypatch):
    """Only one rank is slow: all decide alike, else one would wait for ever."""
    monkeypatch.setattr(network, "time", Clock([0.001], [11.0, 99.0, 9.0, 10.0, 9.5]))
    found = event(measured())
    assert [(one.collective, one.size_bytes) for one in found.figures] == [("all_gather", 4096), ("all_reduce", 4096)]
    for one in found.figures:
        assert one.seconds == pytest.approx(10.0)
        assert one.spread == pytest.approx((99.0 - 9.0) / 2.326 / 10.0)
    assert found.ends == tuple(
        NetworkEnd(
            collective=one, reason="time", next_bytes=16384, needed=pytest.approx(4 * 10.0 * (network.REPEATS + 1)),
            available=network.MOST_S,
        )
        for one in network.COLLECTIVES
    )  # fmt: skip


@pytest.mark.parametrize(("seconds", "sizes"), [(0.8, [4096, 16384]), (0.9, [4096])])
def test_a_size_is_left_out_where_all_its_repeats_would_take_longer_than_the_most(small, monkeypatch, seconds, sizes):
    """Four times as large, six times each: 20 s are 0.833 s of the smaller one."""
    monkeypatch.setattr(network, "time", Clock([seconds], [seconds]))
    assert [one.size_bytes for one in event(measured()).figures] == sizes * 2


def test_who_comes_late_to_a_repeat_costs_the_others_nothing(small, monkeypatch):
    """They wait where they meet."""
    late = 0.05

    class Late:
        looks = 0

        def perf_counter(self):
            now = time.perf_counter()
            if here.rank == 1:
                self.looks += 1
                if self.looks % 2 == 0:  # after a call
                    time.sleep(late)
            return now

    monkeypatch.setattr(network, "time", Late())
    assert all(one.seconds < late / 2 for one in event(measured()).figures)


def test_a_size_that_does_not_fit_into_every_ranks_memory_is_left_out(small, monkeypatch):
    monkeypatch.setattr(network.Ring, "free_bytes", lambda ring: 8192.0 if ring.rank else 1e12)
    found = event(measured())
    assert [one.size_bytes for one in found.figures] == [4096, 4096]
    needed = network.memory(16384, 2)
    assert found.ends == tuple(
        NetworkEnd(collective=one, reason="memory", next_bytes=16384, needed=needed, available=8192.0)
        for one in network.COLLECTIVES
    )


@pytest.mark.parametrize(("room", "sizes"), [(1.0, [4096, 16384]), (0.99, [4096])])
def test_a_size_that_just_fits_is_measured(small, monkeypatch, room, sizes):
    monkeypatch.setattr(network.Ring, "free_bytes", lambda ring: room * network.memory(16384, 2))
    assert [one.size_bytes for one in event(measured()).figures] == sizes * 2


class Allocated(TorchDispatchMode):
    """Bytes of all tensors that are made."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else [out]:
            if isinstance(one, torch.Tensor):
                self.made[one.untyped_storage().data_ptr()] = one.untyped_storage()  # held: no address comes twice
        return out

    @property
    def bytes(self):
        return sum(one.nbytes() for one in self.made.values())


def test_the_memory_that_a_size_takes_is_what_is_asked_for():
    size, seen = 1 << 22, []
    ring = network.Ring(Nothing(), 0, 2, torch.device("cpu"))
    for collective in network.COLLECTIVES:
        with Allocated() as allocated:
            network._figure(ring, collective, size)
        seen.append(allocated.bytes)
    assert 0.9 * network.memory(size, 2) < max(seen) <= network.memory(size, 2), [one / size for one in seen]


def test_a_rank_that_never_comes_ends_it(small, monkeypatch):
    monkeypatch.setattr(network, "WITHIN_S", 1.0)
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        network.measure(context(0), Agent(), device=torch.device("cpu"), store=HashStore())
    assert time.monotonic() - began < 15


def test_a_rank_that_falls_silent_ends_it(groups, monkeypatch):
    """Its connection stays: nothing but the limit tells."""
    monkeypatch.setattr(network, "WITHIN_S", 2.0)
    silent, prepared = threading.Event(), network.Ring.prepared

    def waits(ring, collective, share):
        call, wrong_elements = prepared(ring, collective, share)
        return (silent.wait if ring.rank == 1 else call), wrong_elements

    monkeypatch.setattr(network.Ring, "prepared", waits)
    store, agent = HashStore(), Agent()
    with ThreadPoolExecutor(2) as pool:
        measures = [
            pool.submit(network.measure, context(rank), agent, device=torch.device("cpu"), store=store)
            for rank in (0, 1)
        ]
        try:
            with pytest.raises(RuntimeError):
                measures[0].result(timeout=30)
        finally:
            silent.set()
        with pytest.raises(RuntimeError):
            measures[1].result(timeout=30)
    assert not agent.said and groups[0].ended == 1, "what was begun is ended, and nothing is said of it"
