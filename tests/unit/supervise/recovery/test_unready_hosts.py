"""A host that is connected and cannot start ranks: those that run go on; an attempt that needs it waits no longer than
a start may take, then the policy decides. In virtual time."""

import pytest
from fakes.virtual_run import actions, cluster, kinds, machine, spec
from test_final_flush import committed, ended

from muster.protocol.hello import AgentHello
from muster.protocol.to_supervisor import HostPreparing, HostReady, StartFailed, StoreLost
from muster.protocol.version import MINE
from muster.supervise.recovery.attempts import _choose_hosts, has_rendezvous_store
from muster.supervise.recovery.inputs import SECOND_NS, FromHost, HostUp, Tick
from muster.supervise.recovery.state import Host

WHY = "the fork server on host-0 died with code 1: ImportError: failed to map segment"


def lose_fork_server(found):
    found.receive_from(found.hosts["host-0"], StoreLost())


def say_that_none_starts(found):
    found.receive_from(found.hosts["host-0"], StartFailed(reason=WHY))


@pytest.fixture
def found():
    """One host, whose fork server dies at 20 s."""
    made = cluster(spec(hosts=1), steps=2000)
    made.at(20.0, lambda: lose_fork_server(made))
    return made


def test_ranks_that_take_steps_need_no_fork_server(found):
    for at_s in (30.0, 45.0):  # its agent tries again
        found.at(at_s, lambda: say_that_none_starts(found))
    end = ended(found)
    assert end.exit_code == 0 and not kinds(found, "incident.detected")
    ((_, aside),) = kinds(found, "host.set_aside")
    assert aside.detail == {"reason": WHY, "needed": True}, "said once"


def test_the_next_attempt_is_not_started_there_and_memory_is_written(found):
    found.at(30.0, lambda: say_that_none_starts(found))
    found.at(40.0, lambda: found.kill_rank(0))
    for at_s in (55.0, 75.0):
        found.at(at_s, lambda: say_that_none_starts(found))
    end = ended(found, 200)
    assert actions(found) == ["restart", "restart", "stop"] and end.outcome == "failed"
    assert WHY in end.reason and "was written from memory at the end" in end.reason
    assert committed(found) == found.machine.state.last_applied_step > 0


def test_one_that_can_start_again_goes_on(found):
    found.at(30.0, lambda: say_that_none_starts(found))
    found.at(40.0, lambda: found.kill_rank(0))
    ready = HostReady(store=("127.0.0.1", 1), memory=("127.0.0.1", 2))
    found.at(55.0, lambda: found.receive_from(found.hosts["host-0"], ready))
    assert ended(found).exit_code == 0 and actions(found) == ["restart"]


@pytest.mark.parametrize(("said", "limit_s"), [(False, 90), (True, 60)])
def test_one_that_says_nothing_more_is_not_waited_for_without_end(said, limit_s):
    found = cluster(spec(hosts=1, recovery={"start_timeout_s": 90.0}), steps=2000)
    found.at(20.0, lambda: lose_fork_server(found))
    if said:
        found.at(30.0, lambda: say_that_none_starts(found))
    found.at(40.0, lambda: found.kill_rank(0))
    end = ended(found, 400)
    late = [log for _, log in kinds(found, "incident.detected") if log.detail["incident"] == "start_up"]
    assert [log.host for log in late] == ["host-0", "host-0"]
    assert all(f"has not got ready within {limit_s} s" in log.detail["evidence"] for log in late)
    assert end.outcome == "failed" and "was written from memory at the end" in end.reason


def test_hosts_that_are_to_come_are_waited_for_as_long_as_the_policy_says():
    found = cluster(spec(hosts=2, min_hosts=2), steps=2000)
    found.at(20.0, lambda: found.kill_host("host-1"))
    assert found.run(600) is None and found.machine.state.phase.name == "wait", "start_timeout_s is 60 s"
    assert actions(found) == ["wait"]


PREPARES = HostPreparing(activity="fetch org/name (141.1 GB)", done=1, total=2)


def test_one_whose_preparation_moves_is_waited_for():
    """A download of weights takes longer than a start: its deadline begins again with each word."""
    found = cluster(spec(hosts=1), steps=2000)
    found.at(20.0, lambda: lose_fork_server(found))
    found.at(40.0, lambda: found.kill_rank(0))
    for second in range(70, 400, 30):
        found.at(float(second), lambda: found.receive_from(found.hosts["host-0"], PREPARES))
    ready = HostReady(store=("127.0.0.1", 1), memory=("127.0.0.1", 2))
    found.at(420.0, lambda: found.receive_from(found.hosts["host-0"], ready))
    assert ended(found, 1000).exit_code == 0 and actions(found) == ["restart"]


def test_one_whose_preparation_has_stopped_moving_is_not():
    found = cluster(spec(hosts=1), steps=2000)
    found.at(20.0, lambda: lose_fork_server(found))
    found.at(40.0, lambda: found.kill_rank(0))
    found.at(70.0, lambda: found.receive_from(found.hosts["host-0"], PREPARES))
    end = ended(found, 400)
    late = [at for at, log in kinds(found, "incident.detected") if log.detail["incident"] == "start_up"]
    assert end.outcome == "failed" and late and late[0] >= 130.0


@pytest.mark.parametrize(("min_hosts", "waits"), [(2, True), (1, False)])
def test_at_the_runs_start_too_where_it_needs_that_host(min_hosts, waits):
    """60 s for the start. Where enough hosts are ready it begins without the one that still fetches."""
    made = machine(spec(hosts=2, min_hosts=min_hosts))
    made.start(0)
    store = ("127.0.0.1", 1)
    for name, ready in (("host-0", True), ("host-1", False)):
        hello = AgentHello(version=MINE, host=name, pid=1, ready=ready, store=store)
        made.handle(HostUp(host=name, hello=hello), 5 * SECOND_NS)
    made.handle(FromHost(host="host-1", message=PREPARES), 50 * SECOND_NS)
    assert made.deadline_ns == (110 if waits else 60) * SECOND_NS
    made.handle(Tick(), 60 * SECOND_NS)
    assert made.state.attempt == (0 if waits else 1)


def test_a_store_counts_on_a_host_that_the_attempt_takes():
    """Of three hosts a layout of two takes two: the third one's store would serve a second attempt, too."""
    of = spec(hosts=3, min_hosts=2)
    made = cluster(of.model_copy(update={"parallelism": of.parallelism.model_copy(update={"dp_shard": 2})}))

    ctx, names = made.machine._ctx, ["host-0", "host-1", "host-2"]
    for name in names:
        ctx.state.hosts[name] = Host(name=name)
    for name, is_enough in (("host-2", False), ("host-1", True)):
        ctx.state.hosts[name].machine.store = ("127.0.0.1", 1)
        assert has_rendezvous_store(ctx, names) is is_enough
    chosen, layout = _choose_hosts(ctx, names, [])
    assert chosen == ("host-0", "host-1") and layout.world_size == 2
