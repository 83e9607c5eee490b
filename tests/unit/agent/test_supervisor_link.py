"""The supervisor that holds the lease: found, greeted with all that it needs, left when another one holds it."""

import math

import pytest
from fakes.host import SUPERVISOR, VirtualHost

from muster.agent import decide
from muster.agent.link import ADOPTION_S, LEASE_CHECK_S, MISSING_S
from muster.agent.programs import replicator_child
from muster.agent.values.actions import Connect, ReadLease
from muster.agent.values.events import (
    EventLogged,
    ForkServerFound,
    ForkServerMessage,
    Greeted,
    LeaseRead,
    PeerLost,
    ProgramLine,
    RankMessage,
    Started,
    SupervisorConnected,
    SupervisorMessage,
)
from muster.core.snapshots import SnapshotCopy
from muster.protocol.codec import encode
from muster.protocol.fork_server import ChildExited
from muster.protocol.hello import AgentHello, Refused
from muster.protocol.rank_agent import RankHello, StandbyWarm, WarmUp
from muster.protocol.replicator_orders import ListenAddress
from muster.protocol.to_agent import CommitFlushed, FlushSnapshots, Ping, Shutdown, Welcome
from muster.protocol.to_supervisor import (
    FlushCommitted,
    HostFault,
    HostReady,
    Pong,
    RankExit,
    SnapshotsFlushed,
    StartFailed,
)
from muster.protocol.values import RankEvent
from muster.protocol.version import MINE, OtherVersion

HELD = LeaseRead(("127.0.0.1", 1), False, False)
LISTENS = ProgramLine(replicator_child.NAME, encode(ListenAddress(address=("127.0.0.1", 2))))


def event(kind, step):
    detail = {"tier": "disk", "uri": f"there/step-{step}", "bytes": 1}
    return RankEvent(kind=kind, attempt=1, mono_ns=step, wall_ns=step, rank=0, step=step, detail=detail)


@pytest.fixture
def host():
    made = VirtualHost()
    made.lease = HELD
    return made


def tries(host):
    return len(host.did(Connect))


def test_each_supervisor_hears_what_it_may_not_know(host):
    """The exits of the attempt, what cannot be started, the hardware's fault: after the hello, which tells the rest."""
    host.rank(98, 1)
    report = RankExit(attempt=1, rank=0, pid=9, code=1, step=4)
    host.state.ranks.exits[0] = report
    host.state.link.kept["data"] = StartFailed(reason="no data")
    fault = host.state.hardware.faults.standing = HostFault(verdict="replace", evidence="x")
    host.held = (SnapshotCopy(step=9, attempt=1, rank=0, layout="r1s2t1p1c1e1", host="host-0", tier="memory"),)
    for _ in range(2):
        host.sent.clear()
        host.give(SupervisorConnected(SUPERVISOR))
        hello, *rest = host.sent
        assert isinstance(hello, AgentHello) and rest == [StartFailed(reason="no data"), fault, report]
        assert (hello.alive, hello.exited, hello.snapshots) == ({1: 98}, (0,), host.held)
        host.give(PeerLost(SUPERVISOR))


def test_a_checkpoint_that_ranks_reported_meanwhile_is_told_once(host):
    """While a killed agent's successor waits for its ranks. Otherwise a supervisor would start the next attempt from an
    older version that memory holds."""
    for step in (24, 32, 40):
        host.give(EventLogged(event("checkpoint.committed", step)))
    host.give(EventLogged(event("eval", 41)), SupervisorConnected(SUPERVISOR))
    assert host.sent[1:] == [event("checkpoint.committed", 40)]
    host.give(EventLogged(event("checkpoint.committed", 48)), PeerLost(SUPERVISOR), SupervisorConnected(SUPERVISOR))
    assert host.of(RankEvent) == [event("checkpoint.committed", step) for step in (40, 48)]


def test_a_lease_is_read_once_a_second_and_a_new_holder_is_seen(host):
    host.supervised()
    host.state.link.address = HELD.address
    for _ in range(20):
        host.now_s = max(host.due_s(), host.now_s)
        host.tick()
        assert host.now_s < host.due_s() <= host.now_s + 1.5 * LEASE_CHECK_S
    host.done.clear()
    host.tick(LEASE_CHECK_S / 2)
    host.lease = LeaseRead(("127.0.0.1", 9), True, False)
    host.tick(LEASE_CHECK_S)
    assert host.state.link.peer is None and host.did(ReadLease)
    host.tick(0.2)
    assert host.did(Connect)[-1].address == ("127.0.0.1", 9)


def test_no_supervisor_is_greeted_before_the_replicators_address_is_known_or_its_time_is_over(host):
    host.give(Started()).tick(1.0)
    assert not tries(host)
    host.give(LISTENS).tick()
    assert tries(host) == 1
    late = VirtualHost()
    late.lease = HELD
    late.give(Started()).tick(replicator_child.FIRST_WAIT_S)
    assert tries(late) == 1


@pytest.mark.parametrize("ends", ["reconnects", "is gone", "time is over"])
def test_a_restarted_agent_answers_no_supervisor_while_a_living_rank_is_missing(host, ends):
    """On an overloaded host ranks need longer than usual to find the new agent; without them it would be said to have
    come back without ranks, and a sound attempt would end."""
    host.give(Started(), LISTENS).with_fork_server(21)
    host.tick(ADOPTION_S)
    assert not tries(host)
    if ends == "reconnects":
        host.give(Greeted(3, RankHello(pid=21, attempt=1, rank=0, step=1)))
    elif ends == "is gone":
        host.give(ForkServerMessage(ChildExited(pid=21, code=-9)))
    else:
        host.now_s += MISSING_S
    host.tick()
    assert tries(host) == 1


def test_a_living_fork_server_that_has_not_connected_is_waited_for_as_long(host):
    """Its children are not known before: an attempt would be ended without them."""
    host.give(Started(), LISTENS, ForkServerFound(7, True)).tick(ADOPTION_S)
    assert not tries(host)
    host.with_fork_server().tick()
    assert tries(host) == 1


def test_a_rank_that_reconnects_late_is_told_of_by_another_hello(host):
    host.supervised().give(Greeted(3, RankHello(pid=21, attempt=1, rank=0, step=1)))
    assert [hello.alive for hello in host.of(AgentHello)] == [{0: 21}]


def test_a_host_with_snapshots_outlives_a_refusal_and_one_without_does_not(host):
    host.held = (SnapshotCopy(step=8, attempt=2, rank=0, layout="r1s2t1p1c1e1", host="host-0", tier="memory"),)
    host.lease = LeaseRead(None, False, False, refusal="host-0 speaks 1, the supervisor 9.9.9")
    host.state.replicator.address, host.state.leaving.alone_s = ("127.0.0.1", 2), host.now_s
    for _ in range(2):
        host.tick(0.2)
    assert host.exit_reason is None and host.notes == ["host-0 speaks 1, the supervisor 9.9.9"]
    host.held = ()
    host.tick(0.2)
    assert "9.9.9" in host.exit_reason and host.state.leaving.code == OtherVersion.exit_code
    assert "9.9.9" in host.state.leaving.error


def test_a_refusal_in_words_is_the_same(host):
    host.supervised().give(SupervisorMessage(Refused(version=MINE, reason="another version")))
    assert host.exit_reason == "another version"


def test_what_the_supervisor_asks_is_answered(host):
    host.supervised().give(SupervisorMessage(Ping(number=4)))
    assert host.sent == [Pong(number=4, mono_ns=int(host.now_s * 1e9))]
    host.give(SupervisorMessage(Shutdown(reason="succeeded")))
    assert (host.exit_reason, host.state.leaving.code) == ("succeeded", 0)


# ---------------------------------------------------------------- readiness


def joining():
    """A host that joins a run under way: its one standby is cold."""
    host = VirtualHost().supervised().with_fork_server()
    host.state.preparation.prepared = True
    host.give(SupervisorMessage(Welcome(version=MINE, attempt=3)))
    host.standby(11)
    return host


def test_a_host_that_joins_wakes_when_its_standbys_have_had_their_time():
    host = joining()
    assert [message for peer, message in host.to if peer == 11] == [WarmUp()] and not host.of(HostReady)
    until_s = host.now_s + decide.WARM_S
    while host.now_s < until_s:
        assert not host.of(HostReady)
        host.now_s = max(host.due_s(), host.now_s + 0.001)
        host.tick()
    assert len(host.of(HostReady)) == 1 and host.now_s <= until_s + 0.1


def test_one_whose_standbys_are_warm_is_ready_at_once_and_once():
    host = joining().give(RankMessage(11, StandbyWarm()))
    host.standby(12)
    assert len(host.of(HostReady)) == 1


def test_a_host_that_joins_and_lost_something_is_not_woken_before_it_is_back():
    host = joining().give(PeerLost(11)).tick(2 * decide.WARM_S)
    assert host.due_s() > host.now_s
    host.standby(12)
    assert len(host.of(HostReady)) == 1, "it has had its time"
    host.give(PeerLost(1000))
    assert not host.state.is_ready
    host.with_fork_server()
    assert host.state.warm_by_s == host.now_s + decide.WARM_S, "the new ones have their time"
    assert len(host.of(HostReady)) == 1


# ---------------------------------------------------------------- the replicator


def with_replicator(stopped=lambda now_s: False, limit_s=0.4):
    recovery = {"heartbeat_timeout_s": limit_s, "warm_standby": False}
    from fakes.host import spec_of

    host = VirtualHost(spec=spec_of(recovery=recovery)).supervised()
    replicator_of(host)
    host.is_stopped = stopped
    return host


def replicator_of(host):
    host.state.link.lease_check_s = host.state.memory.next_s = math.inf
    host.state.replicator.pid = 5001
    host.give(LISTENS)


def killed_s(host, until_s):
    """When its replicator is ended; None: it is not, until then."""
    from muster.agent.values.actions import StopProgram

    while host.now_s < until_s:
        host.now_s = max(host.now_s + 0.001, host.due_s())
        host.stopped = {host.state.replicator.pid} if host.is_stopped(host.now_s) else set()
        host.tick()
        if host.did(StopProgram):
            return host.now_s
    return None


@pytest.mark.parametrize(("limit_s", "within_s"), [(0.3, 3.0), (3.0, 3.0), (8.0, 8.0)])
@pytest.mark.parametrize("since_s", [1000.0, 1000.1, 1001.29, 1002.31, 1002.55])
def test_a_replicator_that_stays_stopped_is_ended_within_the_limit(since_s, limit_s, within_s):
    """No step waits for it: a short limit of the hosts' silence does not wake the agent more often for it."""
    host = with_replicator(lambda now_s: now_s >= since_s, limit_s)
    assert since_s + within_s / 4 <= killed_s(host, 2000.0) <= since_s + within_s + 0.01


def test_a_replicator_that_is_held_for_a_moment_is_not():
    assert killed_s(with_replicator(lambda now_s: now_s % 1.2 < 0.4), 1100.0) is None


def flush(step):
    return SupervisorMessage(FlushSnapshots(step=step, attempt=1, layout="r1s2t1p1c1e1", uri="there", ranks=()))


def dies(host):
    from muster.agent.values.events import ProgramEnded

    host.give(ProgramEnded(replicator_child.NAME, -9))


def test_each_flush_gets_one_answer_also_when_the_replicator_dies_for_good():
    host = with_replicator().give(flush(8))
    for _ in range(replicator_child.YOUNG_DEATHS - 1):
        dies(host)
        host.give(LISTENS)
        assert host.of(SnapshotsFlushed) == [], "its successor is asked again"
    dies(host)
    assert [answer.step for answer in host.of(SnapshotsFlushed)] == [8]
    assert "5 times" in host.of(SnapshotsFlushed)[0].failure
    host.give(flush(9))
    assert host.of(SnapshotsFlushed)[1].failure == "no replicator runs on this host"


def test_a_successor_gets_its_orders_once_it_listens():
    host = with_replicator().give(flush(8))
    host.done.clear()
    dies(host)
    assert host.orders(replicator_child.NAME) == []
    host.give(LISTENS)
    assert [order.flush.step for order in host.orders(replicator_child.NAME)] == [8]


def test_a_committed_checkpoint_is_logged_before_its_answer_goes_on():
    host = with_replicator()
    host.give(SupervisorMessage(CommitFlushed(step=8, attempt=1, layout="r1s2t1p1c1e1", uri="there", files=())))
    committed = FlushCommitted(step=8, attempt=1, uri="there/step-8", bytes=3)
    host.give(ProgramLine(replicator_child.NAME, encode(committed)))
    logged, answer = host.sent[-2:]
    assert answer == committed and (logged.kind, logged.step) == ("checkpoint.committed", 8)
    assert logged.detail == {"tier": "disk", "uri": "there/step-8", "bytes": 3}
