"""A host that nobody supervises: what it holds waits, then is written where it is whole, then it leaves."""

from types import SimpleNamespace

import pytest

from muster.agent import unsupervised_host
from muster.agent.unsupervised_host import LONELY_S, REASON, Alone, newest_whole
from muster.backends.gke.pod import main
from muster.checkpoint_format.snapshot_ring import SnapshotInfo, Ring, file_name

KEY = "r1s2t1p1c1e1"


@pytest.fixture
def now(monkeypatch):
    found = [1000.0]
    monkeypatch.setattr(unsupervised_host.time, "monotonic", lambda: found[0])
    return found


class Host:
    """As much of an agent as ``Alone`` asks for; its mover remembers what it was told."""

    def __init__(self, memory, *, keep_hosts_after_failure_s=0.0):
        self.memory, self.run_dir, self.host = memory, memory / "run", "host-0"
        self.newest_attempt, self.ranks, self.orders, self.notes, self.left = 3, [], [], [], None
        self.crew = SimpleNamespace(attempt=3, living=lambda: self.ranks)
        self.spec = SimpleNamespace(
            checkpoint=SimpleNamespace(dir=None), recovery=SimpleNamespace(keep_hosts_after_failure_s=keep_hosts_after_failure_s, grace_s=30.0)
        )
        self.programs = SimpleNamespace(mover=SimpleNamespace(flush=self.flush))
        self.alone = Alone(agent=self)

    def flush(self, order, *, fence):
        assert order["alone"] and fence == 3
        self.orders.append(order)

    def log_event(self, kind, detail):
        self.notes.append(detail["text"])

    def depart(self, reason):
        self.left = reason

    def answer(self, **found):
        order = self.orders[-1]
        told = {"t": "flushed" if order["t"] == "flush" else "flush_committed", "ok": True, **found}
        self.alone.answered({"step": order["step"], "attempt": order["attempt"], **told}, order)


def hold(memory, tier, rank, *steps):
    ring = Ring.create(memory / file_name(tier, KEY, rank), header=b"{}", slot_bytes=64)
    for step in steps:
        ring.commit(ring.begin(), step=step, attempt=2)
    ring.close()


def left_alone(memory, now):
    """Its wait is over."""
    host = Host(memory)
    now[0] += LONELY_S + 1
    return host


def test_the_wait_begins_when_supervisor_and_ranks_are_both_gone(tmp_path, now):
    host = Host(tmp_path)
    host.ranks = ["one"]
    now[0] += 10 * LONELY_S  # training goes on without a supervisor
    host.alone.watch()
    host.ranks = []
    now[0] += LONELY_S - 1
    host.alone.watch()
    assert host.left is None
    host.alone.begin()  # one came, and was lost again
    now[0] += LONELY_S - 1
    host.alone.watch()
    assert host.left is None
    now[0] += 2
    host.alone.watch()
    assert host.left == REASON == main.LONELY and host.notes == [] and host.orders == []


def test_hold_s_is_kept_where_it_is_longer(tmp_path, now):
    host = Host(tmp_path, keep_hosts_after_failure_s=5 * LONELY_S)
    now[0] += 5 * LONELY_S - 1
    host.alone.watch()
    assert host.left is None
    now[0] += 2
    host.alone.watch()
    assert host.left == REASON


def test_a_whole_version_is_written_before_it_leaves(tmp_path, now):
    hold(tmp_path, "own", 0, 8, 9)
    hold(tmp_path, "peer", 1, 8)
    host = left_alone(tmp_path, now)
    host.alone.watch()
    host.alone.watch()
    (order,) = host.orders
    assert (order["t"], order["step"], order["attempt"], order["layout"]) == ("flush", 8, 2, KEY)
    assert order["uri"] == f"{tmp_path}/run/checkpoints"
    assert [(each["rank"], each["tier"]) for each in order["ranks"]] == [(0, "memory"), (1, "peer")]
    host.answer(files=[{"rank": 0}])
    assert host.orders[-1]["t"] == "flush_commit" and host.orders[-1]["files"] == [{"rank": 0}] and host.left is None
    host.answer(uri="there", bytes=1)
    assert host.left == REASON and host.notes == []


def test_what_stands_on_the_disk_is_not_written_again(tmp_path, now):
    hold(tmp_path, "own", 0, 8)
    hold(tmp_path, "own", 1, 8)
    host = left_alone(tmp_path, now)
    host.alone.watch()
    host.answer(files=[])
    assert [order["t"] for order in host.orders] == ["flush"] and host.left == REASON


def test_a_version_that_cannot_be_written_gives_way_to_an_older_one(tmp_path, now):
    hold(tmp_path, "own", 0, 8, 9)
    hold(tmp_path, "own", 1, 8, 9)
    host = left_alone(tmp_path, now)
    for step in (9, 8):
        host.alone.watch()
        assert host.orders[-1]["step"] == step
        host.answer(ok=False, reason="it is not what was sealed")
    host.alone.watch()
    assert host.left == REASON and len(host.notes) == 3 and "step 9 was not written" in host.notes[0]


def test_a_mover_that_does_not_answer_holds_nobody_for_ever(tmp_path, now):
    hold(tmp_path, "own", 0, 8)
    hold(tmp_path, "own", 1, 8)
    host = left_alone(tmp_path, now)
    host.alone.watch()
    now[0] += LONELY_S + 1
    host.alone.watch()
    assert host.left == REASON and "step 8 was not written" in host.notes[0]


def test_a_part_of_the_state_is_said_to_be_lost(tmp_path, now):
    hold(tmp_path, "own", 1, 8, 9)
    host = left_alone(tmp_path, now)
    host.alone.watch()
    assert host.left == REASON and host.orders == []
    assert "step 9 of rank 1 (of 2), not the whole state" in host.notes[0]


def test_the_host_of_rank_0_writes_first(tmp_path, now):
    hold(tmp_path, "own", 1, 9)
    hold(tmp_path, "peer", 0, 9)
    host = left_alone(tmp_path, now)
    host.alone.watch()
    assert host.orders == [] and host.left is None
    now[0] += 30
    host.alone.watch()
    assert [order["step"] for order in host.orders] == [9]


def test_a_supervisor_that_comes_back_meanwhile_finds_the_host(tmp_path, now):
    hold(tmp_path, "own", 0, 8)
    hold(tmp_path, "own", 1, 8)
    host = left_alone(tmp_path, now)
    host.alone.watch()
    host.alone.begin()
    host.answer(files=[{"rank": 0}])
    assert host.left is None and [order["t"] for order in host.orders] == ["flush"]


def held(step, *ranks, attempt=1, layout=KEY, tier="memory"):
    return [SnapshotInfo(tier=tier, layout=layout, rank=rank, step=step, attempt=attempt) for rank in ranks]


def test_versions_never_mix_and_a_twin_stands_in():
    assert newest_whole([*held(9, 0), *held(9, 1, attempt=2), *held(8, 0, 1)]).step == 8
    assert newest_whole([*held(9, 0), *held(8, 1)]) is None
    twins = newest_whole(held(7, 0, 3, layout="r2s2t1p1c1e1"))
    assert [(each["rank"], each["held_as"]) for each in twins.ranks] == [(0, 0), (1, 3), (2, 0), (3, 3)]
    assert newest_whole([*held(9, 0, 1), *held(8, 0, 1)], without=[(9, 1)]).step == 8
    own_first = newest_whole([*held(9, 0, tier="peer"), *held(9, 0, 1)])
    assert [each["tier"] for each in own_first.ranks] == ["memory", "memory"]
