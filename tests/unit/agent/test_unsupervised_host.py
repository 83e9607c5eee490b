"""A host without a supervisor: it waits, then saves its snapshots where they are complete, then exits."""

from types import SimpleNamespace

import pytest
from fakes.host import RecordingHost

from muster.agent import unsupervised_host
from muster.agent.unsupervised_host import GRACE_PERIOD_S, REASON, RELEASED_S
from muster.checkpoint_format.snapshot_ring import Ring, file_name, list_snapshots
from muster.core.snapshots import SnapshotCopy
from muster.core.types import Checksum
from muster.protocol.lease import LeaseRecord, write_lease
from muster.protocol.to_agent import CommitFlushed, FlushedFile, FlushSnapshots
from muster.protocol.to_supervisor import FlushCommitted, SnapshotsFlushed
from muster.protocol.version import MINE

KEY = "r1s2t1p1c1e1"


@pytest.fixture
def now(monkeypatch):
    found = [1000.0]
    monkeypatch.setattr(unsupervised_host.time, "monotonic", lambda: found[0])
    return found


class Host(RecordingHost):
    """A host whose replicator remembers its orders."""

    def __init__(self, memory, *, keep_hosts_after_failure_s=0.0):
        recovery = SimpleNamespace(keep_hosts_after_failure_s=keep_hosts_after_failure_s, grace_s=30.0)
        spec = SimpleNamespace(checkpoint_uri=lambda run_dir: f"{run_dir}/checkpoints", recovery=recovery)
        super().__init__(memory, run_dir=memory / "run", spec=spec)
        self.ranks, self.orders = [], []
        self.alone = self.unsupervised(
            is_working=lambda: bool(self.ranks),
            held=lambda: [SnapshotCopy(host="host-0", **vars(found)) for found in list_snapshots(memory)],
            flush=self.orders.append,
        )

    def answer(self, **extra):
        order = self.orders[-1]
        kind = SnapshotsFlushed if isinstance(order, FlushSnapshots) else FlushCommitted
        self.alone.on_flush(kind(step=order.step, attempt=order.attempt, **extra))


FILE = FlushedFile(rank=0, name="flushed-0", bytes=9, checksum=Checksum(value="0" * 16), data_offset=8)


def hold(memory, tier, rank, *steps):
    ring = Ring.create(memory / file_name(tier, KEY, rank), header=b"{}", slot_bytes=64)
    for step in steps:
        ring.commit(ring.begin(), step=step, attempt=2, rank=rank)
    ring.close()


def left_alone(memory, now):
    """Its wait is over."""
    host = Host(memory)
    now[0] += GRACE_PERIOD_S + 1
    return host


def test_the_wait_begins_when_supervisor_and_ranks_are_both_gone(tmp_path, now):
    host = Host(tmp_path)
    host.ranks = ["one"]
    now[0] += 10 * GRACE_PERIOD_S  # training goes on without a supervisor
    host.alone.watch()
    host.ranks = []
    now[0] += GRACE_PERIOD_S - 1
    host.alone.watch()
    assert host.exit_reason is None
    host.alone.begin()  # one came, and was lost again
    now[0] += GRACE_PERIOD_S - 1
    host.alone.watch()
    assert host.exit_reason is None
    now[0] += 2
    host.alone.watch()
    assert host.exit_reason == REASON and host.notes == [] and host.orders == []


def leaves_after(wait_s, host, now):
    """Not before, and then it does."""
    now[0] += wait_s - 1
    host.alone.watch()
    assert host.exit_reason is None
    now[0] += 2
    host.alone.watch()
    assert host.exit_reason == REASON


def lease(run_dir, *, address):
    run_dir.mkdir(exist_ok=True)
    record = LeaseRecord(
        version=MINE, term=1, address=address, pid=0, machine="", boot_id="", expires_wall_ns=0, expires_mono_ns=0
    )
    (run_dir / "lease.json").write_bytes(write_lease(record))


def test_a_host_that_could_not_be_told_of_the_runs_end_does_not_wait_for_a_supervisor(tmp_path, now):
    lease(tmp_path / "run", address=("127.0.0.1", 1))
    host = Host(tmp_path)
    lease(tmp_path / "run", address=None)
    leaves_after(RELEASED_S, host, now)


def test_before_a_runs_next_supervisor_starts_the_last_ones_lease_says_nothing(tmp_path, now):
    lease(tmp_path / "run", address=None)
    host = Host(tmp_path)
    leaves_after(GRACE_PERIOD_S, host, now)


def test_hold_s_is_kept_where_it_is_longer(tmp_path, now):
    host = Host(tmp_path, keep_hosts_after_failure_s=5 * GRACE_PERIOD_S)
    leaves_after(5 * GRACE_PERIOD_S, host, now)


def test_a_complete_version_is_saved_before_it_exits(tmp_path, now):
    hold(tmp_path, "own", 0, 8, 9)
    hold(tmp_path, "peer", 1, 8)
    host = left_alone(tmp_path, now)
    host.alone.watch()
    host.alone.watch()
    (order,) = host.orders
    assert (type(order), order.step, order.attempt, order.layout) == (FlushSnapshots, 8, 2, KEY)
    assert order.uri == f"{tmp_path}/run/checkpoints"
    assert [(each.rank, each.copy.tier) for each in order.ranks] == [(0, "memory"), (1, "peer")]
    host.answer(files=(FILE,))
    assert type(host.orders[-1]) is CommitFlushed and host.orders[-1].files == (FILE,)
    assert host.exit_reason is None
    host.answer(uri="there", bytes=1)
    assert host.exit_reason == REASON and host.notes == []


def test_what_is_on_the_disk_is_not_saved_again(tmp_path, now):
    hold(tmp_path, "own", 0, 8)
    hold(tmp_path, "own", 1, 8)
    host = left_alone(tmp_path, now)
    host.alone.watch()
    host.answer(files=())
    assert [type(order) for order in host.orders] == [FlushSnapshots] and host.exit_reason == REASON


def test_after_a_version_that_cannot_be_saved_an_older_one_is(tmp_path, now):
    hold(tmp_path, "own", 0, 8, 9)
    hold(tmp_path, "own", 1, 8, 9)
    host = left_alone(tmp_path, now)
    for step in (9, 8):
        host.alone.watch()
        assert host.orders[-1].step == step
        host.answer(failure="its checksum does not match")
    host.alone.watch()
    assert host.exit_reason == REASON and len(host.notes) == 3 and "step 9 was not saved" in host.notes[0]


def test_a_replicator_that_does_not_answer_is_not_waited_for(tmp_path, now):
    hold(tmp_path, "own", 0, 8)
    hold(tmp_path, "own", 1, 8)
    host = left_alone(tmp_path, now)
    host.alone.watch()
    now[0] += GRACE_PERIOD_S + 1
    host.alone.watch()
    assert host.exit_reason == REASON and "step 8 was not saved" in host.notes[0]


def test_a_partial_state_is_reported_lost(tmp_path, now):
    hold(tmp_path, "own", 1, 8, 9)
    host = left_alone(tmp_path, now)
    host.alone.watch()
    assert host.exit_reason == REASON and host.orders == []
    assert "step 9 of rank 1 (of 2), not the whole state" in host.notes[0]


def test_the_host_of_rank_0_saves_first(tmp_path, now):
    hold(tmp_path, "own", 1, 9)
    hold(tmp_path, "peer", 0, 9)
    host = left_alone(tmp_path, now)
    host.alone.watch()
    assert host.orders == [] and host.exit_reason is None
    now[0] += 30
    host.alone.watch()
    assert [order.step for order in host.orders] == [9]


def test_a_supervisor_that_comes_back_meanwhile_finds_the_host(tmp_path, now):
    hold(tmp_path, "own", 0, 8)
    hold(tmp_path, "own", 1, 8)
    host = left_alone(tmp_path, now)
    host.alone.watch()
    host.alone.begin()
    host.answer(files=(FILE,))
    assert host.exit_reason is None and [type(order) for order in host.orders] == [FlushSnapshots]
