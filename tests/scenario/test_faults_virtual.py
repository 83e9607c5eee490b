"""Faults of the reference's list in virtual time: what the supervisor answers, without a process or a second of sleep.

Link delay, loss, throttling and bit flips (20, 21, 25, 27, 29, 30): here a detector's verdict is injected, and only
the answer is tested.
"""

import pytest
from fakes import incident_kinds
from fakes.virtual_run import actions
from fakes.virtual_run import cluster as cluster_in_virtual_time
from fakes.virtual_run import machine as machine_of
from fakes.virtual_run import spec as spec_of

from muster.core.incidents import HOST_UNHEALTHY, STRAGGLER
from muster.core.types import Action, Decision
from muster.policy.builtin import SHIPPED
from muster.policy.load import complete
from muster.protocol.client import HealthReport
from muster.protocol.hello import AgentHello
from muster.protocol.to_supervisor import StartFailed
from muster.protocol.values import LastWords
from muster.protocol.version import MINE
from muster.simulate.cluster import Cluster
from muster.supervise.recovery.incidents import report_incident
from muster.supervise.recovery.inputs import FromHost, HostUp, StopRequest
from muster.supervise.recovery.phases import Adopting, Running


def cluster_of(of, *, steps=200, **more):
    return cluster_in_virtual_time(of, steps=steps, **more)


def logged(cluster, kind):
    return [log for _, log in cluster.log if log.kind == kind]


def verdict(cluster, kind, host, evidence):
    """A detector speaks: what it found becomes an incident, and the machine's effects are carried out."""
    machine = cluster.machine
    machine._ctx.now_ns = cluster.now_ns
    report_incident(machine._ctx, kind, host=host, evidence=evidence)
    cluster._effects(machine._taken())


def from_host(cluster, host, message):
    cluster.give(FromHost(host=host, message=message))


# ---------------------------------------------------------------- injected verdicts


@pytest.mark.parametrize("fault", ["a link 200 ms late (20)", "a rank at 10 % bandwidth (25)", "half a CPU (27)"])
def test_a_straggler_is_named_and_costs_no_restart(fault):
    cluster = cluster_of(spec_of(hosts=3))
    cluster.at(10.0, lambda: verdict(cluster, STRAGGLER, "host-1", fault))
    assert cluster.run().exit_code == 0
    assert actions(cluster) == ["ignore"]
    assert len(logged(cluster, "attempt.started")) == 1


@pytest.mark.parametrize("spares, expected", [(1, "swap"), (0, "shrink")])
def test_a_link_verdict_takes_the_host_out(spares, expected, tmp_path, monkeypatch):
    """21: 30 % loss. The host still answers, and is not used again."""
    incident_kinds.install(tmp_path, monkeypatch, link_flap="fakes.incident_kinds:LINK_FLAP")
    cluster = cluster_of(spec_of(hosts=3, min_hosts=2, spare_hosts=spares))
    cluster.at(10.0, lambda: verdict(cluster, incident_kinds.LINK_FLAP, "host-1", "30 % of packets are lost"))
    assert cluster.run().exit_code == 0
    assert actions(cluster) == [expected]
    assert [log.host for log in logged(cluster, "host.quarantined")] == ["host-1"]
    assert "host-1" not in logged(cluster, "attempt.started")[-1].detail["hosts"]


@pytest.mark.parametrize("fault", ["a bit flipped in the weights (29)", "in a gradient (30)", "ECC errors"])
def test_an_unhealthy_host_is_replaced_and_no_applied_step_is_lost(fault):
    cluster = cluster_of(spec_of(hosts=2, spare_hosts=1))
    cluster.at(10.0, lambda: verdict(cluster, HOST_UNHEALTHY, "host-1", fault))
    assert cluster.run().exit_code == 0
    assert actions(cluster) == ["swap"]
    assert logged(cluster, "incident.resolved")[0].detail["redone_steps"] == 0


def test_a_false_alarm_costs_one_recovery_and_no_more():
    """43: the same wrong verdict again and again; the host it names is gone after the first."""
    cluster = cluster_of(spec_of(hosts=2, spare_hosts=1), steps=400)
    for second in (10.0, 20.0, 30.0):
        cluster.at(
            second,
            lambda: (
                verdict(cluster, HOST_UNHEALTHY, "host-1", "a detector that is wrong")
                if "host-1" in cluster.machine.state.active
                else None
            ),
        )
    assert cluster.run().exit_code == 0
    assert actions(cluster) == ["swap"]


def unhealthy(cluster, gpus):
    from_host(cluster, "host-1", HealthReport(host="host-1", evidence="Xid 79 on GPU 2", resettable=gpus))


def test_a_gpu_that_a_reset_may_heal_is_reset_before_a_spare_is_taken():
    cluster = cluster_of(spec_of(hosts=2, spare_hosts=1))
    cluster.at(10.0, lambda: unhealthy(cluster, (2,)))
    assert cluster.run().exit_code == 0
    assert actions(cluster) == ["reset"]
    assert list(logged(cluster, "attempt.started")[-1].detail["hosts"]) == ["host-0", "host-1"]
    assert logged(cluster, "incident.resolved")[0].detail["redone_steps"] == 0


def test_a_reset_that_fails_is_followed_by_the_swap():
    cluster = cluster_of(spec_of(hosts=2, spare_hosts=1))
    cluster.reset_works = False
    cluster.at(10.0, lambda: unhealthy(cluster, (2,)))
    assert cluster.run().exit_code == 0
    assert actions(cluster) == ["reset", "swap"]
    assert "could not be reset" in logged(cluster, "incident.detected")[-1].detail["evidence"]
    assert list(logged(cluster, "attempt.started")[-1].detail["hosts"]) == ["host-0", "host-2"]


def test_a_fault_that_comes_back_after_its_reset_is_judged_anew_and_without_one_it_is_swapped():
    cluster = cluster_of(spec_of(hosts=2, spare_hosts=1), steps=400)
    cluster.at(10.0, lambda: unhealthy(cluster, (2,)))
    cluster.at(60.0, lambda: unhealthy(cluster, ()))
    assert cluster.run().exit_code == 0
    assert actions(cluster) == ["reset", "swap"]


# ---------------------------------------------------------------- policies that adjust


class Adjusting:
    """A quarter of the batch and the rate for each host that is missing of four."""

    def __init__(self):
        self.asked = []

    def decide(self, situation, incident):
        return SHIPPED["default"].decide(situation, incident)

    def adjust(self, world):
        self.asked.append(world)
        share = world.num_hosts / world.wanted_hosts
        return {"global_batch_size": int(world.global_batch_size * share), "learning_rate_scale": share}


def test_a_policy_may_change_batch_and_rate_with_the_world():
    policy = Adjusting()
    cluster = cluster_of(spec_of(hosts=4, min_hosts=2), policy=complete(policy), steps=400)
    batch = cluster.machine.settings.spec.training.global_batch_size
    cluster.at(10.0, lambda: cluster.kill_host("host-3"))
    cluster.at(80.0, lambda: cluster.return_host("host-3"))
    assert cluster.run().exit_code == 0
    first, shrunk, grown = (log.detail for log in logged(cluster, "attempt.started"))
    assert "batch_schedule" not in first
    small = {
        "first_step": policy.asked[1].resume_step + 1,
        "global_batch_size": batch * 3 // 4,
        "learning_rate_scale": 0.75,
    }
    assert shrunk["batch_schedule"] == [small]
    back = {"first_step": policy.asked[2].resume_step + 1, "global_batch_size": batch, "learning_rate_scale": 1.0}
    assert grown["batch_schedule"] == [small, back]
    assert [world.num_hosts for world in policy.asked] == [4, 3, 4]


def test_a_policy_that_wants_nonsense_ends_the_run_with_its_word():
    policy = Adjusting()
    policy.adjust = lambda world: {"global_batch_size": 0}
    end = cluster_of(spec_of(hosts=2), policy=complete(policy)).run()
    assert end.exit_code == 2 and "global batch of 0" in end.reason


# ---------------------------------------------------------------- ranks


def test_an_error_at_once_after_the_restart_counts_as_the_same_step():
    """7: the rank dies before it has told its step."""
    cluster = cluster_of(spec_of(hosts=1))
    last = LastWords(exception="ValueError", message="bad row 17")
    cluster.at(10.0, lambda: cluster.kill_rank(0, code=1, last=last))

    def again():
        cluster._step = -1
        cluster.kill_rank(0, code=1, last=last)

    cluster.at(10.1, again)
    cluster.at(10.2, again)
    end = cluster.run()
    assert end.exit_code == 1 and actions(cluster) == ["restart", "restart", "stop"]
    assert "same step" in end.reason


@pytest.mark.parametrize(
    "words",
    [
        LastWords(exception="OutOfMemoryError", message="CUDA out of memory. Tried to allocate 2 GiB"),
        LastWords(exception="RuntimeError", message="DefaultCPUAllocator: can't allocate memory: you tried ..."),
        LastWords(exception="MemoryError", message=""),
    ],
)
def test_out_of_memory_is_not_held_against_the_host(words):
    """28: each time at another step: restarted, however often; the host is no lemon."""
    cluster = cluster_of(spec_of(hosts=2, spare_hosts=1), steps=400)
    for second in (10.0, 20.0, 30.0, 40.0):
        cluster.at(second, lambda: cluster.kill_rank(1, code=1, last=words))
    assert cluster.run().exit_code == 0
    assert {log.detail["incident"] for log in logged(cluster, "incident.detected")} == {"rank_oom"}
    assert actions(cluster) == ["restart"] * 4
    assert not logged(cluster, "host.quarantined")


def test_35_crash_loops_of_one_host_end_with_its_quarantine():
    """39."""
    cluster = cluster_of(spec_of(hosts=2, spare_hosts=1), steps=2000)

    def crash():
        rank = next((rank for rank, host in cluster.machine.state.ranks.items() if host == "host-1"), None)
        if rank is not None and isinstance(cluster.machine.state.phase, Running):
            cluster.kill_rank(rank)

    for number in range(35):
        cluster.at(10.0 + 3 * number, crash)
    assert cluster.run().exit_code == 0
    assert actions(cluster) == ["restart", "restart", "swap"]


# ---------------------------------------------------------------- hosts


def test_a_spare_that_cannot_start_is_set_aside():
    """18: while it trains."""
    cluster = cluster_of(spec_of(hosts=2, spare_hosts=1))

    def fail():
        cluster.machine.state.hosts["host-2"].readiness.ready = False
        from_host(cluster, "host-2", StartFailed(reason="no torch here"))

    cluster.at(10.0, fail)
    cluster.at(20.0, lambda: cluster.kill_host("host-1"))
    cluster.at(40.0, lambda: cluster.return_host("host-1"))
    assert cluster.run().exit_code == 0
    assert actions(cluster) == ["wait"], "the bad spare was not asked"
    assert [log.host for log in logged(cluster, "host.set_aside")] == ["host-2"]


def test_a_bad_spare_at_the_start_does_not_stop_the_run_and_bad_data_does():
    spec = spec_of(hosts=2, spare_hosts=1)
    machine = machine_of(spec)
    cluster = Cluster(machine=machine, names=["host-0", "host-1", "host-2"], total_steps=100)

    def join_unready(name):
        cluster.give(HostUp(host=name, hello=AgentHello(version=MINE, host=name, pid=1)))

    cluster.at(4.9, lambda: join_unready("host-2"))
    cluster.at(4.95, lambda: join_unready("host-0"))
    cluster.at(4.96, lambda: join_unready("host-1"))
    cluster.at(4.97, lambda: from_host(cluster, "host-2", StartFailed(reason="no torch here")))
    assert cluster.run(until_s=100).exit_code == 0
    assert actions(cluster) == []

    cluster = Cluster(machine=machine_of(spec), names=["host-0", "host-1", "host-2"], total_steps=50)
    for name in ("host-0", "host-1", "host-2"):
        cluster.at(4.9, lambda name=name: join_unready(name))
        message = StartFailed(reason="no file rows.jsonl", exit_code=2)
        cluster.at(4.95, lambda name=name, message=message: from_host(cluster, name, message))
    end = cluster.run(until_s=100)
    assert end.exit_code == 2 and "rows.jsonl" in end.reason


def test_more_agents_than_hosts_are_parked():
    """19: one agent more than hosts and spares; it joins nothing and breaks nothing."""
    spec = spec_of(hosts=2)
    cluster = Cluster(machine=machine_of(spec), names=["host-0", "host-1", "host-2"], total_steps=100)
    cluster.at(10.0, lambda: cluster.kill_host("host-0"))
    assert cluster.run().exit_code == 0
    worlds = [log.detail["world_size"] for log in logged(cluster, "attempt.started")]
    assert worlds == [2, 2], "parked until it is needed"


def test_no_spare_left_shrinks_again_and_again_and_grows_back():
    """17."""
    cluster = cluster_of(spec_of(hosts=4, min_hosts=2), steps=600)
    for second, name in ((10.0, "host-1"), (20.0, "host-3")):
        cluster.at(second, lambda name=name: cluster.kill_host(name))
    for second, name in ((60.0, "host-1"), (80.0, "host-3")):
        cluster.at(second, lambda name=name: cluster.return_host(name))
    assert cluster.run().exit_code == 0
    assert actions(cluster) == ["shrink", "shrink", "grow", "grow"]
    assert [log.detail["world_size"] for log in logged(cluster, "attempt.started")] == [4, 3, 2, 3, 4]


def test_a_flapping_host_is_taken_in_twice_and_then_left_out():
    """24: lost and back every 30 s: damped, no storm; the run gets through."""
    cluster = cluster_of(spec_of(hosts=3, min_hosts=2), steps=1000)
    for number in range(8):
        cluster.at(10.0 + 30 * number, lambda: cluster.kill_host("host-2", silent=True))
        cluster.at(20.0 + 30 * number, lambda: cluster.return_host("host-2"))
    assert cluster.run().exit_code == 0
    assert [action for action in actions(cluster) if action != "ignore"] == ["shrink", "grow"] * 2 + ["shrink"]
    assert actions(cluster).count("ignore") >= 1
    assert all(log.detail["redone_steps"] == 0 for log in logged(cluster, "incident.resolved"))


def test_a_split_network_has_one_side_that_goes_on():
    """23: half of the hosts go silent together, and come back 30 s later."""
    cluster = cluster_of(spec_of(hosts=4, min_hosts=2), steps=600)
    for name in ("host-2", "host-3"):
        cluster.at(10.0, lambda name=name: cluster.kill_host(name, silent=True))
        cluster.at(40.0, lambda name=name: cluster.return_host(name))
    assert cluster.run().exit_code == 0
    worlds = [log.detail["world_size"] for log in logged(cluster, "attempt.started")]
    assert worlds[0] == 4 and 2 in worlds and worlds[-1] == 4


# ---------------------------------------------------------------- supervisor and user


def test_a_stop_that_comes_before_the_hosts_have_answered_reaches_them():
    """A new supervisor is told to stop before it has adopted the ranks: they save first."""
    spec = spec_of(hosts=2)
    cluster = cluster_of(spec)

    def replace():
        successor = machine_of(spec)
        old = cluster.machine.state
        successor.state.phase = Adopting()
        for name in ("attempt", "current", "steps"):
            setattr(successor.state, name, getattr(old, name))
        cluster.machine = successor
        cluster._effects(successor.start(cluster.now_ns))
        cluster.give(StopRequest(source="muster stop", exit_code=130))
        assert cluster.result is None, "not over while ranks step"
        for name in ("host-0", "host-1"):
            cluster.join(name)

    cluster.at(10.0, replace)
    end = cluster.run()
    assert end.exit_code == 130 and "saved and left" in end.reason


def test_a_policy_of_ones_own_decides():
    class Patient:
        def decide(self, situation, found):
            action = Action.IGNORE if found.kind == "host_returned" else Action.WAIT
            return Decision(
                incident_id=found.incident_id, action=action, reason="I wait", host=found.host, detail={"hosts": 2}
            )

    cluster = cluster_of(spec_of(hosts=2, min_hosts=1, spare_hosts=1), policy=complete(Patient()))
    cluster.at(10.0, lambda: cluster.kill_host("host-1"))
    cluster.at(30.0, lambda: cluster.return_host("host-1"))
    assert cluster.run().exit_code == 0
    assert actions(cluster)[0] == "wait"


def test_a_spare_that_flaps_is_the_last_resort():
    """24 and 17: of two spares the sound one is taken; with enough hosts left a flapping one is not taken at all."""
    from muster.core.types import Incident
    from muster.policy.cluster_state import ClusterState

    lost = Incident(incident_id="i9", kind="host_lost", attempt=1, host="host-0", evidence="gone")

    def decide(spares, min_hosts):
        situation = ClusterState(
            active=("host-1",), spares=spares, wanted_hosts=2, min_hosts=min_hosts, last_applied_step=5,
            restarts_without_progress=0, max_restarts_without_progress=3, host_failures={"host-2": 3},
        )  # fmt: skip
        decision = SHIPPED["default"].decide(situation, lost)
        return decision.action, decision.replacement

    assert decide(("host-2", "host-3"), 1) == (Action.SWAP, "host-3")
    assert decide(("host-2",), 1) == (Action.SHRINK, None)
    assert decide(("host-2",), 2) == (Action.SWAP, "host-2")
