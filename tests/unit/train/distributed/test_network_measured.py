"""Ranks measure the network between hosts: gloo groups of real ranks, each in a thread."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from muster.core.event_details.network import NetworkMeasured
from muster.core.types import Layout
from muster.health.network.figures import factor
from muster.protocol.ranks import RankContext
from muster.train.distributed import network


class Agent:
    def __init__(self):
        self.said = []

    def emit(self, kind, **detail):
        self.said.append((kind, detail))

    def progress(self):
        pass


def context(rank, *, a_host=1, world=2):
    return RankContext(
        run_id="r", run_dir="/unused", attempt=1, host=f"h{rank // a_host}", rank=rank, local_rank=rank % a_host,
        world_size=world, local_world_size=a_host, layout=Layout(), master_addr="127.0.0.1", master_port=1,
    )  # fmt: skip


def measured(*, a_host=1, world=2):
    """What each rank's agent heard."""
    store, agents = HashStore(), [Agent() for _ in range(world)]
    with ThreadPoolExecutor(world) as pool:
        list(pool.map(
            lambda rank: network.measure(
                context(rank, a_host=a_host, world=world), agents[rank], device=torch.device("cpu"), store=store
            ),
            range(world),
        ))  # fmt: skip
    return [agent.said for agent in agents]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(network, "SIZES_GLOO", (4096, 16384))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def test_rank_0_says_what_all_of_them_measured(small):
    ((kind, detail),), nothing = measured()
    found = NetworkMeasured.of(detail)
    assert (kind, nothing) == ("network.measured", [])
    assert (found.hosts, found.ranks, found.library) == (("h0", "h1"), 2, "gloo")
    assert [(one.collective, one.size_bytes) for one in found.figures] == [
        ("all_gather", 4096), ("all_gather", 16384), ("all_reduce", 4096), ("all_reduce", 16384),
    ]  # fmt: skip
    assert all(one.seconds > 0 and one.wrong == 0 for one in found.figures)
    assert factor("all_gather", 2) == 0.5


def test_ranks_of_one_host_have_no_network(small):
    assert measured(a_host=2) == [[], []]


def test_wrong_results_of_one_rank_are_counted(small, monkeypatch):
    prepared = network.Ring.prepared

    def corrupting(ring, collective, share):
        call, wrong_elements = prepared(ring, collective, share)
        return call, lambda: wrong_elements() + (3 if ring.rank == 1 else 0)

    monkeypatch.setattr(network.Ring, "prepared", corrupting)
    ((_, detail),), _ = measured()
    assert [one.wrong for one in NetworkMeasured.of(detail).figures] == [3, 3, 3, 3]


def test_a_result_that_is_not_what_it_should_be_is_seen(small, monkeypatch):
    wait = network.Ring.wait

    def flipped(ring, work):
        wait(ring, work)
        for one in work.result():
            if one.numel() == 4096 // 4 and one.dtype == torch.float32 and ring.rank == 0:
                one[5] += 1

    monkeypatch.setattr(network.Ring, "wait", flipped)
    ((_, detail),), _ = measured()
    assert sum(one.wrong for one in NetworkMeasured.of(detail).figures) > 0


def test_the_slowest_rank_counts_and_a_slow_network_is_measured_at_the_smaller_size(small, monkeypatch):
    """Only one rank's clock is slow: all decide alike, else one would wait for ever."""
    counted, lock = {}, threading.Lock()

    class Clock:
        @staticmethod
        def perf_counter():
            with lock:
                mine = threading.get_ident()
                counted[mine] = counted.get(mine, 0) + (10.0 if mine == min(counted, default=mine) else 0.001)
                return counted[mine]

    monkeypatch.setattr(network, "time", Clock)
    ((_, detail),), _ = measured()
    figures = NetworkMeasured.of(detail).figures
    assert [(one.collective, one.size_bytes) for one in figures] == [("all_gather", 4096), ("all_reduce", 4096)]
    assert all(one.seconds == pytest.approx(10.0) for one in figures)


def test_a_size_that_does_not_fit_into_every_ranks_memory_is_left_out(small, monkeypatch):
    monkeypatch.setattr(network.Ring, "free_bytes", lambda ring: 8192.0 if ring.rank else 1e12)
    ((_, detail),), _ = measured()
    assert [one.size_bytes for one in NetworkMeasured.of(detail).figures] == [4096, 4096]
