"""The parts of an agent say when they are to be woken: nothing ticks, and what is due is done."""

import math
import os
import socket
import time
from types import SimpleNamespace

import pytest

from muster.agent import supervisor_link
from muster.agent.readiness import WARM_S, Readiness
from muster.agent.replicator_process import ReplicatorProcess
from muster.agent.supervisor_link import LEASE_CHECK_S, SupervisorLink
from muster.core.heartbeat_timing import HeartbeatTiming
from muster.core.typed_json import encode
from muster.protocol.hello import AgentHello
from muster.protocol.lease import LeaseRecord
from muster.protocol.replicator_orders import CopyTo
from muster.protocol.version import MINE
from muster.transport.connections import ConnectionPool


@pytest.fixture
def clock(monkeypatch):
    found = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(time, "monotonic", lambda: found.now_s)
    return found


def lease(folder, address, term):
    record = LeaseRecord(
        version=MINE, term=term, address=address, pid=1, machine="m", boot_id="", expires_wall_ns=1, expires_mono_ns=1
    )
    (folder / "new").write_bytes(encode(record))
    os.rename(folder / "new", folder / "lease.json")


def test_a_lease_that_was_not_written_again_is_not_read_again_and_a_new_holder_is_seen(tmp_path, clock, monkeypatch):
    hub = ConnectionPool(token=b"k" * 32, on_gone=lambda *_: None)
    link = SupervisorLink(
        hub=hub,
        identity=SimpleNamespace(run_dir=tmp_path, host="host-0"),
        hello=lambda: AgentHello(version=MINE, host="host-0", pid=1),
        on_message=lambda message: None,
        on_refused=lambda reason: None,
    )
    read = []
    before = supervisor_link.supervisor_address
    monkeypatch.setattr(supervisor_link, "supervisor_address", lambda *a, **k: (read.append(1), before(*a, **k))[1])
    assert link.due_s() == math.inf, "there is no holder to leave"
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        lease(tmp_path, first.getsockname(), 1)
        assert link.connect()
        for _ in range(20):
            clock.now_s = max(link.due_s(), clock.now_s)
            link.watch()
            assert clock.now_s < link.due_s() <= clock.now_s + 1.5 * LEASE_CHECK_S
        assert link.connected and len(read) == 2, "to connect, and once since"
        lease(tmp_path, second.getsockname(), 2)
        clock.now_s = link.due_s()
        link.watch()
        assert not link.connected and link.due_s() == math.inf
    hub.shutdown()


def test_a_host_that_joins_wakes_when_its_standbys_have_had_their_time(clock):
    told = []
    found = Readiness(
        has_all=lambda: True, is_joining=lambda: True, is_warm=lambda: False, on_ready=lambda: told.append(clock.now_s)
    )
    assert found.due_s() == math.inf
    found.check()
    assert found.due_s() == 1000.0 + WARM_S and not told
    clock.now_s = found.due_s()
    found.check()
    assert told == [1000.0 + WARM_S] and found.due_s() == math.inf


def test_a_host_that_joins_and_lost_something_is_not_woken_before_it_is_back(clock):
    told, has = [], SimpleNamespace(all=True)
    found = Readiness(
        has_all=lambda: has.all,
        is_joining=lambda: True,
        is_warm=lambda: False,
        on_ready=lambda: told.append(clock.now_s),
    )
    found.check()
    has.all = False  # its standbys are gone
    clock.now_s += 2 * WARM_S
    assert found.due_s() == math.inf
    has.all = True
    assert found.due_s() < clock.now_s
    found.check()
    has.all = False  # its fork server is gone
    found.lose()
    assert found.due_s() == math.inf and len(told) == 1
    has.all = True
    found.check()
    assert found.due_s() == clock.now_s + WARM_S and len(told) == 1, "the new ones have their time"


def replicator(monkeypatch, clock, stopped, limit_s=0.4):
    from muster.agent import replicator_process

    monkeypatch.setattr(replicator_process, "is_stopped", lambda pid: stopped(clock.now_s))
    found = ReplicatorProcess(
        identity=SimpleNamespace(memory=SimpleNamespace(replace=lambda *_: None)),
        hub=None,
        limit_s=lambda: HeartbeatTiming(limit_s).replicator_stopped_after_s,
        is_ending=lambda: False,
        on_flush=None,
        on_moved=None,
        on_rejected=None,
        on_note=None,
    )
    killed = []
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    found._child = SimpleNamespace(
        pid=1, kill=lambda: killed.append(clock.now_s), stdin=SimpleNamespace(fileno=lambda: writing)
    )
    return found, killed, reading


@pytest.mark.parametrize(("limit_s", "within_s"), [(0.3, 3.0), (3.0, 3.0), (8.0, 8.0)])
@pytest.mark.parametrize("since_s", [1000.0, 1000.1, 1001.29, 1002.31, 1002.55])
def test_a_replicator_that_stays_stopped_is_ended_within_the_limit(monkeypatch, clock, since_s, limit_s, within_s):
    """No step waits for it: a short limit of the hosts' silence does not wake the agent more often for it."""
    found, killed, _ = replicator(monkeypatch, clock, lambda now_s: now_s >= since_s, limit_s)
    while not killed:
        clock.now_s = max(clock.now_s, found.due_s())
        found.watch()
    assert since_s + within_s / 4 <= killed[0] <= since_s + within_s + 1e-9


def test_a_replicator_that_is_held_for_a_moment_is_not(monkeypatch, clock):
    found, killed, _ = replicator(monkeypatch, clock, lambda now_s: now_s % 1.2 < 0.4)
    for _ in range(200):
        clock.now_s = max(clock.now_s + 0.001, found.due_s())
        found.watch()
    assert not killed


def test_a_replicator_without_a_peer_is_not_woken_by_each_snapshot(monkeypatch, clock):
    found, _, reading = replicator(monkeypatch, clock, lambda now_s: False)
    found.copy_to(CopyTo(attempt=1, peer=None, layout="r1s2t1p1c1e1", ranks=(0, 1)))
    os.read(reading, 1 << 16)
    found.copy()
    os.set_blocking(reading, False)
    with pytest.raises(BlockingIOError):
        os.read(reading, 1 << 16)
    found.copy_to(CopyTo(attempt=1, peer=("127.0.0.1", 1), layout="r1s2t1p1c1e1", ranks=(0, 1)))
    found.copy()
    assert b"copy_next" in os.read(reading, 1 << 16)
