"""Copies of snapshots whose bytes have changed: passed over, said, not chosen again. The next best one is taken: an
intact copy of the same step, else the newest older version that is whole, else the checkpoint."""

import pytest
from fakes.virtual_run import actions, check_invariants, events_of, kinds, machine, without_copies
from fakes.virtual_run import cluster as cluster_in_virtual_time
from fakes.virtual_run import spec as spec_of

from muster.protocol.to_agent import DropCopies, FlushSnapshots, StartAttempt
from muster.protocol.to_supervisor import SnapshotsRejected
from muster.simulate import cluster as agent_model
from muster.simulate import fault_schedule
from muster.simulate.host_time import VirtualHost
from muster.supervise.recovery.inputs import StopRequest
from muster.supervise.replay.rebuild_state import rebuild_state

#: Steps take 0.3 s from 5.15 s on; snapshots are taken of each.
AT_S, STEP = 10.0, 16


@pytest.fixture
def sent(monkeypatch):
    """(host, message) of everything that the supervisor sends."""
    result, real = [], agent_model.handle_message

    def handle(cluster, name, message):
        result.append((name, message))
        real(cluster, name, message)

    monkeypatch.setattr(agent_model, "handle_message", handle)
    return result


def cluster_of(of, **more):
    return cluster_in_virtual_time(of, steps=100, **more)


def rot(cluster, *where):
    """At ``AT_S`` copies rot, ``(rank, tier, versions)``, and rank 1 is killed."""
    struck = []

    def strike():
        for rank, tier, versions in where:
            struck.extend(fault_schedule.rot_snapshot(cluster, rank, tier, versions=versions))
        cluster.kill_rank(1)

    cluster.at(AT_S, strike)
    return struck


def started_from(cluster):
    return [log.detail["resume_step"] for _, log in kinds(cluster, "attempt.started")]


def rejected(cluster):
    return [(log.detail["copy"]["rank"], log.detail["copy"]["tier"], log.detail["copy"]["step"])
            for _, log in kinds(cluster, "snapshot.rejected")]  # fmt: skip


def restored(sent):
    """The copies that each attempt's ranks were to start from."""
    found = {}
    for _, message in sent:
        if isinstance(message, StartAttempt):
            found.setdefault(message.attempt, set()).update(fetch.copy for fetch in message.fetch)
    return found


@pytest.mark.parametrize(
    "where, attempts",
    [
        ([], [-1, STEP]),
        ([(1, "memory", 1)], [-1, STEP, STEP]),
        ([(0, "memory", 1)], [-1, STEP, STEP]),
        ([(1, "peer", 1)], [-1, STEP]),
        ([(0, "memory", 1), (1, "memory", 1)], [-1, STEP, STEP]),
        ([(1, "memory", 1), (1, "peer", 1)], [-1, STEP, STEP, STEP - 1]),
        ([(1, "memory", 2), (1, "peer", 1)], [-1, STEP, STEP, STEP - 1, STEP - 1]),
        ([(1, "memory", 2), (1, "peer", 2)], [-1, STEP, STEP, STEP - 1, STEP - 1, -1]),
        ([(0, "memory", 2), (1, "memory", 2), (1, "peer", 2)], [-1, STEP, STEP, STEP - 1, STEP - 1, -1]),
    ],
)  # fmt: skip
def test_the_next_best_version_is_taken(where, attempts, sent):
    cluster = cluster_of(spec_of(hosts=3))
    struck = rot(cluster, *where)
    assert cluster.run(until_s=1000.0).exit_code == 0
    assert started_from(cluster) == attempts
    assert set(actions(cluster)) == {"restart"}
    check_invariants(cluster)
    tried = [copy for copies in restored(sent).values() for copy in copies]
    for copy in struck:
        assert tried.count(copy) <= 1, "not chosen again"
        if copy in tried:
            assert (copy.rank, copy.tier, copy.step) in rejected(cluster), "said"
            drops = [(name, message.copies) for name, message in sent if isinstance(message, DropCopies)]
            assert any(name == copy.host and copy in copies for name, copies in drops), "its host holds it no longer"
    assert set(rejected(cluster)) <= {(copy.rank, copy.tier, copy.step) for copy in struck}, (
        "intact ones are not blamed"
    )


def test_a_copy_that_its_host_still_lists_is_not_chosen_again(sent, monkeypatch):
    monkeypatch.setattr(VirtualHost, "drop", lambda host, copies: None)
    cluster = cluster_of(spec_of(hosts=3))
    struck = rot(cluster, (1, "memory", 2), (1, "peer", 1))
    assert cluster.run(until_s=1000.0).exit_code == 0
    tried = [copy for copies in restored(sent).values() for copy in copies]
    assert started_from(cluster)[-1] == STEP - 1 and all(tried.count(copy) == 1 for copy in struck)


def test_without_a_second_copy_the_step_before_is_taken_at_once():
    cluster = cluster_of(without_copies(spec_of(hosts=2)))
    rot(cluster, (1, "memory", 1))
    assert cluster.run(until_s=1000.0).exit_code == 0
    assert started_from(cluster) == [-1, STEP, STEP - 1]


def test_rejections_are_no_restarts_without_progress():
    """Each takes a copy away: they end by themselves, however few restarts are allowed."""
    cluster = cluster_of(spec_of(hosts=3, recovery={"max_restarts_without_progress": 1}))
    rot(cluster, (1, "memory", 2), (1, "peer", 2))
    assert cluster.run(until_s=1000.0).exit_code == 0
    assert len(started_from(cluster)) == 6


def test_nor_is_one_that_the_holder_has_reported_before_the_rank_exits(monkeypatch):
    cluster = cluster_of(spec_of(hosts=3, recovery={"max_restarts_without_progress": 1}))
    real = cluster.exit_of

    def exit_of(host, rank, code, last=None):
        for copy in last.rejected if last is not None else ():
            cluster.receive_later(0.0, cluster.hosts[copy.host], SnapshotsRejected(copies=(copy,), reason="rotten"))
        return real(host, rank, code, last)

    monkeypatch.setattr(cluster, "exit_of", exit_of)
    rot(cluster, (1, "memory", 2), (1, "peer", 2))
    assert cluster.run(until_s=1000.0).exit_code == 0
    assert len(started_from(cluster)) == 6


def test_a_replicas_copy_of_the_same_step_is_taken():
    of = spec_of(hosts=2)
    of = of.model_copy(update={"parallelism": of.parallelism.model_copy(update={"dp_replicate": 2})})
    cluster = cluster_of(without_copies(of))
    rot(cluster, (1, "memory", 1))
    assert cluster.run(until_s=1000.0).exit_code == 0
    assert started_from(cluster)[-1] == STEP


def test_a_supervisor_that_takes_over_does_not_choose_it_either(sent):
    of = spec_of(hosts=3)
    cluster = cluster_of(of)
    struck = rot(cluster, (1, "memory", 2), (1, "peer", 2))

    def replaced():
        cluster.replace_supervisor(machine(of, state=rebuild_state(events_of(cluster))))

    cluster.at(AT_S + 0.3, replaced)  # attempt 2 has rejected the own copy by then, attempt 3 runs
    assert cluster.run(until_s=1000.0).exit_code == 0
    tried = [copy for copies in restored(sent).values() for copy in copies]
    assert tried and all(tried.count(copy) <= 1 for copy in struck)


@pytest.mark.parametrize("where, written", [
    ([(1, "memory", 1)], STEP), ([(1, "memory", 1), (1, "peer", 1)], STEP - 1),
])  # fmt: skip
def test_what_is_written_at_the_end_is_intact(where, written, sent):
    """The run ends without a save by its ranks: hosts notice when they read a copy to write it."""
    cluster = cluster_of(spec_of(hosts=3, recovery={"grace_s": 10.0}))
    cluster.ranks_obey = False
    cluster.at(AT_S, lambda: [fault_schedule.rot_snapshot(cluster, rank, tier, versions=k) for rank, tier, k in where])
    cluster.at(AT_S, lambda: cluster.give(StopRequest(source="muster stop", exit_code=130)))
    assert cluster.run(until_s=1000.0).exit_code == 130
    (event,) = [event for _, event in cluster.written if event.kind == "checkpoint.committed"]
    assert event.step == written
    orders = [message for _, message in sent if isinstance(message, FlushSnapshots)]
    assert len(rejected(cluster)) == len(where) and len(orders) > 3
