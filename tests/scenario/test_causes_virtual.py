"""A rank's end that is told while another one's is being answered, in virtual time: the cause of a broken connection
that was heard first, or a second death in the same moment. One trouble is one decision."""

import signal

import pytest
from fakes.virtual_run import actions, kinds
from fakes.virtual_run import cluster as cluster_of
from fakes.virtual_run import spec as spec_of

from muster.protocol.to_supervisor import RankExit
from muster.protocol.values import LastWords
from muster.supervise.recovery.inputs import FromHost

GLOO = LastWords(exception="RuntimeError", message="Connection reset by peer")


def rank_ends(cluster, rank, *, code=1, last=None, step=-1):
    """It ends a moment after rank 0, and is told while that is being answered."""
    host, attempt = cluster.machine.state.ranks[rank], cluster.machine.state.attempt
    message = RankExit(attempt=attempt, rank=rank, pid=2, code=code, step=step, last=last)
    cluster.after(cluster.stages.detect_exit_s + 0.001, lambda: cluster.give(FromHost(host=host, message=message)))


def logged(cluster, kind):
    return [log for _, log in kinds(cluster, kind)]


def told(cluster):
    """(Incident, which one it is part of, kind) of each."""
    details = [event.detail for event in logged(cluster, "incident.detected")]
    return [(detail["incident_id"], detail.get("part_of"), detail["incident"]) for detail in details]


@pytest.mark.parametrize(
    ("last", "kind"),
    [
        (LastWords(exception="ValueError", message="bad row 17"), "rank_exception"),
        (LastWords(exception="RuntimeError", message="can't allocate memory"), "rank_oom"),
    ],
)
def test_a_cause_that_arrives_after_its_consequence_is_the_one_that_is_judged(last, kind):
    """7: rank 0 reports the broken connection first; the exception of rank 1 comes a moment later. One decision, until
    the policy wants something else for the cause."""
    cluster = cluster_of(spec_of(hosts=2), steps=200)

    def fail():
        cluster.kill_rank(0, code=1, last=GLOO)
        rank_ends(cluster, 1, last=last)

    cluster.at(10.0, fail)
    cluster.at(10.3, fail)
    end = cluster.run()
    lost = "rank_exit"
    assert told(cluster) == [("i1", None, lost), ("i2", "i1", kind), ("i3", None, lost), ("i4", "i3", kind)]
    decided = [(event.detail["incident_id"], event.detail["action"]) for event in logged(cluster, "incident.decided")]
    assert decided == [("i1", "restart"), ("i3", "restart"), ("i4", "stop")]
    assert end.exit_code == 1 and last.message in end.reason
    assert len(logged(cluster, "attempt.started")) == 2, "each failure was carried out once"


def test_a_cause_that_leaves_a_step_out_is_decided_on():
    cluster = cluster_of(spec_of(hosts=2, recovery={"on_nonfinite_step": "skip"}), steps=200)
    last = LastWords(exception="NotFinite", message="step 12: loss is nan", not_finite=True)

    def fail():
        cluster.kill_rank(0, code=1, last=GLOO)
        rank_ends(cluster, 1, last=last)

    cluster.at(10.0, fail)
    cluster.at(10.3, fail)
    assert cluster.run().exit_code == 0
    assert [event.detail.get("skip_steps") for event in logged(cluster, "incident.decided")] == [None, None, [12]]


@pytest.mark.parametrize("code", [-9, -11])
def test_a_killed_rank_is_named_where_its_peers_broken_connection_is_told_first(code):
    """One restart, which is decided on and counts once, against the host of the killed rank; whoever reads the log
    learns of the signal."""
    cluster = cluster_of(spec_of(hosts=2), steps=200)

    def fail():
        cluster.kill_rank(0, code=1, last=GLOO)
        rank_ends(cluster, 1, code=code)

    cluster.at(10.0, fail)
    assert cluster.run().exit_code == 0
    evidence = [(event.rank, event.detail["evidence"]) for event in logged(cluster, "incident.detected")]
    assert [rank for rank, _ in evidence] == [0, 1]
    assert f"was killed by {signal.Signals(-code).name}" in evidence[1][1]
    assert actions(cluster) == ["restart"] and len(logged(cluster, "attempt.started")) == 2
    assert [len(cluster.machine.state.hosts[name].failures_ns) for name in ("host-0", "host-1")] == [0, 1]


def test_ranks_that_die_in_the_same_moment_are_one_decision_with_each_in_the_evidence():
    """The same report again, and one of the attempt that is over, change nothing."""
    cluster = cluster_of(spec_of(hosts=2, ranks_per_host=6), steps=200)

    def fail():
        assert cluster.machine.state.ranks[1] == "host-0"
        cluster.kill_rank(0)
        for rank in (1, 1, *range(2, 12)):
            rank_ends(cluster, rank, code=-9)
        rank_ends(cluster, 11, last=GLOO)

    cluster.at(10.0, fail)
    late = RankExit(attempt=1, rank=9, pid=2, code=-9, step=-1)
    cluster.at(12.0, lambda: cluster.give(FromHost(host="host-1", message=late)))
    assert cluster.run().exit_code == 0
    assert told(cluster) == [("i1", None, "rank_exit"), *((f"i{n}", "i1", "rank_exit") for n in range(2, 9))]
    ranks = [event.rank for event in logged(cluster, "incident.detected")]
    assert ranks == list(range(8)), "each once, and not all of a run's"
    assert actions(cluster) == ["restart"] and len(logged(cluster, "attempt.started")) == 2
    failures = [len(cluster.machine.state.hosts[name].failures_ns) for name in ("host-0", "host-1")]
    assert failures == [1, 0], "one trouble counts once"


def test_the_error_that_all_ranks_raise_is_told_and_counted_once():
    cluster, own = cluster_of(spec_of(hosts=2), steps=200), LastWords(exception="ValueError", message="bad row 17")

    def fail():
        cluster.kill_rank(0, code=1, last=own)
        rank_ends(cluster, 1, last=own)

    cluster.at(10.0, fail)
    assert cluster.run().exit_code == 0 and actions(cluster) == ["restart"]
    assert told(cluster) == [("i1", None, "rank_exception")]
