"""A host without a supervisor: it waits, then saves its snapshots where they are complete, then exits."""

import pytest
from fakes.host import VirtualHost, spec_of

from muster.agent.programs import replicator_child
from muster.agent.unsupervised import GRACE_PERIOD_S, REASON, RELEASED_S
from muster.agent.values.events import (
    LeaseRead,
    PeerLost,
    ProgramLine,
    Started,
    SupervisorConnected,
    SupervisorUnreachable,
)
from muster.agent.watchdog import GRACEFUL
from muster.core.snapshots import SnapshotCopy
from muster.core.types import Checksum
from muster.protocol.codec import encode
from muster.protocol.exit_codes import UNSUPERVISED
from muster.protocol.replicator_orders import ListenAddress
from muster.protocol.to_agent import CommitFlushed, FlushedFile, FlushSnapshots
from muster.protocol.to_supervisor import FlushCommitted, SnapshotsFlushed

KEY = "r1s2t1p1c1e1"
FILE = FlushedFile(rank=0, name="flushed-0", bytes=9, checksum=Checksum(value="0" * 16), data_offset=8)
HELD = LeaseRead(("127.0.0.1", 1), False, False)
RELEASED = LeaseRead(None, True, True)


def host_of(*, lease=HELD, keep_s=0.0):
    """Its replicator listens; the lease's holder does not answer."""
    recovery = {"keep_hosts_after_failure_s": keep_s, "grace_s": 30.0, "warm_standby": False}
    host = VirtualHost(spec=spec_of(recovery=recovery))
    host.lease = lease
    host.give(Started(), ProgramLine(replicator_child.NAME, encode(ListenAddress(address=("127.0.0.1", 2)))))
    return host


def watch(host, after_s=0.0):
    """A supervisor is looked for, in vain."""
    host.tick(after_s)
    if host.state.link.connecting:
        host.give(SupervisorUnreachable())
    return host


def hold(host, tier, rank, *steps):
    host.held += tuple(
        SnapshotCopy(step=step, attempt=2, rank=rank, layout=KEY, host="host-0", tier=tier) for step in steps
    )


def orders(host):
    return [order.flush for order in host.orders(replicator_child.NAME) if hasattr(order, "flush")]


def answer(host, **extra):
    order = orders(host)[-1]
    kind = SnapshotsFlushed if isinstance(order, FlushSnapshots) else FlushCommitted
    message = kind(step=order.step, attempt=order.attempt, **extra)
    host.give(ProgramLine(replicator_child.NAME, encode(message)))


def test_the_wait_begins_when_supervisor_and_ranks_are_both_gone():
    host = host_of()
    host.rank()
    watch(host, 10 * GRACE_PERIOD_S)  # training goes on without a supervisor
    host.state.ranks.table.clear()
    watch(host, GRACE_PERIOD_S - 1)
    assert host.exit_reason is None
    host.give(SupervisorConnected(2000), PeerLost(2000))  # one came, and was lost again
    watch(host, GRACE_PERIOD_S - 1)
    assert host.exit_reason is None
    watch(host, 2)
    assert host.exit_reason == REASON and host.notes == [] and orders(host) == []
    assert host.state.leaving.code == UNSUPERVISED and UNSUPERVISED in GRACEFUL


def test_a_lease_that_changes_hands_is_a_lost_supervisor():
    """A spare that was not told so counted its wait from hours ago, and exited where the new holder was slow."""
    host = host_of().give(SupervisorConnected(2000))
    host.state.link.address = ("127.0.0.1", 1)
    host.tick(3600.0)
    host.lease = LeaseRead(("127.0.0.1", 9), True, False)
    watch(host, 2.0)
    assert host.state.link.peer is None
    watch(host, 1.0)
    assert host.exit_reason is None


def leaves_after(wait_s, host):
    """Not before, and then it does."""
    watch(host, wait_s - 1)
    assert host.exit_reason is None
    watch(host, 2)
    assert host.exit_reason == REASON


def test_a_host_that_could_not_be_told_of_the_runs_end_does_not_wait_for_a_supervisor():
    host = watch(host_of(), 0.1)
    host.lease = RELEASED
    leaves_after(RELEASED_S, host)


def test_before_a_runs_next_supervisor_starts_the_last_ones_lease_says_nothing():
    leaves_after(GRACE_PERIOD_S, host_of(lease=RELEASED))


def test_hold_s_is_kept_where_it_is_longer():
    leaves_after(5 * GRACE_PERIOD_S, host_of(keep_s=5 * GRACE_PERIOD_S))


@pytest.fixture
def left_alone():
    """Its wait is over as soon as it looks again."""
    host = watch(host_of(), 0.1)
    host.now_s += GRACE_PERIOD_S + 1
    return host


def test_a_complete_version_is_saved_before_it_exits(left_alone):
    hold(left_alone, "memory", 0, 8, 9)
    hold(left_alone, "peer", 1, 8)
    watch(watch(left_alone, 0.2), 0.2)
    (order,) = orders(left_alone)
    assert (type(order), order.step, order.attempt, order.layout) == (FlushSnapshots, 8, 2, KEY)
    assert order.uri == "run/checkpoints"
    assert [(each.rank, each.copy.tier) for each in order.ranks] == [(0, "memory"), (1, "peer")]
    answer(left_alone, files=(FILE,))
    assert type(orders(left_alone)[-1]) is CommitFlushed and orders(left_alone)[-1].files == (FILE,)
    assert left_alone.exit_reason is None
    answer(left_alone, uri="there", bytes=1)
    assert left_alone.exit_reason == REASON and left_alone.notes == []
    assert [kind for kind, *_ in left_alone.logged] == ["checkpoint.committed"]


def test_what_is_on_the_disk_is_not_saved_again(left_alone):
    hold(left_alone, "memory", 0, 8)
    hold(left_alone, "memory", 1, 8)
    watch(left_alone, 0.2)
    answer(left_alone, files=())
    assert [type(order) for order in orders(left_alone)] == [FlushSnapshots] and left_alone.exit_reason == REASON


def test_after_a_version_that_cannot_be_saved_an_older_one_is(left_alone):
    hold(left_alone, "memory", 0, 8, 9)
    hold(left_alone, "memory", 1, 8, 9)
    for step in (9, 8):
        watch(left_alone, 0.2)
        assert orders(left_alone)[-1].step == step
        answer(left_alone, failure="its checksum does not match")
    watch(left_alone, 0.2)
    assert left_alone.exit_reason == REASON and len(left_alone.notes) == 3
    assert "step 9 was not saved" in left_alone.notes[0]


def test_a_replicator_that_does_not_answer_is_not_waited_for(left_alone):
    hold(left_alone, "memory", 0, 8)
    hold(left_alone, "memory", 1, 8)
    watch(left_alone, 0.2)
    watch(left_alone, GRACE_PERIOD_S + 1)
    assert left_alone.exit_reason == REASON and "step 8 was not saved" in left_alone.notes[0]


def test_a_partial_state_is_reported_lost(left_alone):
    hold(left_alone, "memory", 1, 8, 9)
    watch(left_alone, 0.2)
    assert left_alone.exit_reason == REASON and orders(left_alone) == []
    assert "step 9 of rank 1 (of 2), not the whole state" in left_alone.notes[0]


def test_the_host_of_rank_0_saves_first(left_alone):
    hold(left_alone, "memory", 1, 9)
    hold(left_alone, "peer", 0, 9)
    watch(left_alone, 0.2)
    assert orders(left_alone) == [] and left_alone.exit_reason is None
    watch(left_alone, 30)
    assert [order.step for order in orders(left_alone)] == [9]


def test_a_supervisor_that_comes_back_meanwhile_finds_the_host(left_alone):
    hold(left_alone, "memory", 0, 8)
    hold(left_alone, "memory", 1, 8)
    watch(left_alone, 0.2)
    left_alone.give(SupervisorConnected(2000))
    left_alone.give(PeerLost(2000))
    answer(left_alone, files=(FILE,))
    assert left_alone.exit_reason is None
    assert [type(order) for order in orders(left_alone)] == [FlushSnapshots]
