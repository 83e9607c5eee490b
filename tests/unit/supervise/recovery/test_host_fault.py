"""What a host's own look at its hardware leads to: reset, swap, or nothing while there is no spare. In virtual time."""

import pytest
from fakes.virtual_run import actions, cluster, events_of, kinds, spec

from muster.protocol.to_agent import EndAttempt
from muster.protocol.to_supervisor import HostFault, HostNotice
from muster.supervise.recovery.inputs import Send
from muster.supervise.recovery.phases import Draining
from muster.supervise.replay.rebuild_state import rebuild_state

XID = "Xid 119 on GPU 4 (0000:9b:00.0): the GPU's system processor does not answer"


def struck(of, verdict, *, resettable=(), steps=100):
    found = cluster(of, steps=steps)
    fault = HostFault(verdict=verdict, evidence=XID, resettable=resettable)
    found.at(10.0, lambda: found.receive_from(found.hosts["host-1"], fault))
    assert found.run().exit_code == 0
    return found


def test_a_reset_comes_before_a_swap():
    found = struck(spec(hosts=2, spare_hosts=1), "reset", resettable=(4,))
    assert actions(found) == ["reset"]
    ((_, told),) = kinds(found, "host.health")
    assert told.detail["verdict"] == "reset" and tuple(told.detail["resettable"]) == (4,)
    ((_, incident),) = kinds(found, "incident.detected")
    assert incident.detail["class"] == "reset" and "host-1: Xid 119 on GPU 4" in incident.detail["evidence"]


@pytest.mark.parametrize("verdict", ["drain", "replace"])
def test_a_faulty_host_is_swapped_for_a_spare(verdict):
    assert actions(struck(spec(hosts=2, spare_hosts=1), verdict)) == ["swap"]


def test_a_host_that_still_works_stays_while_there_is_no_spare():
    assert actions(struck(spec(hosts=3, min_hosts=2), "drain")) == ["ignore"]
    assert actions(struck(spec(hosts=3, min_hosts=2), "replace")) == ["shrink"]


def test_a_faulty_spare_is_not_taken_and_a_new_supervisor_knows_it():
    found = cluster(spec(hosts=2, spare_hosts=2), steps=400)
    fault = HostFault(verdict="reset", evidence=XID, resettable=(4, 5))
    found.at(10.0, lambda: found.receive_from(found.hosts["host-2"], fault))
    found.run(20.0)
    assert actions(found) == [], "nothing is decided: the run goes on"
    for state in (found.machine.state, rebuild_state(events_of(found))):
        assert state.hosts["host-2"].quarantined and state.hosts["host-2"].health.resettable == (4, 5)
    found.at(21.0, lambda: found.kill_host("host-1"))
    assert found.run().exit_code == 0
    ((_, decided),) = kinds(found, "incident.decided")
    assert decided.detail["replacement"] == "host-3"


def reported_while_ranks_are_ended(of, *faults, steps=200):
    """host-1 has a fault that a reset may heal; while its ranks are ended, these follow."""
    found = cluster(of, steps=steps)
    handle, left, phases = found.machine.handle, list(faults), []

    def handled(given, now_ns):
        effects = handle(given, now_ns)
        if left and any(isinstance(one, Send) and isinstance(one.message, EndAttempt) for one in effects):
            fault = left.pop(0)
            phases.append(found.machine.state.phase)
            found.after(0.0, lambda: found.receive_from(found.hosts["host-1"], fault))
        return effects

    found.machine.handle = handled
    first = HostFault(verdict="reset", evidence=XID, resettable=(4,), at_ns=1)
    found.at(10.0, lambda: found.receive_from(found.hosts["host-1"], first))
    assert found.run().exit_code == 0
    assert not left and all(isinstance(phase, Draining) for phase in phases)
    return found


def test_what_is_reported_while_ranks_are_ended_is_judged_before_the_next_attempt_starts():
    graver = HostFault(verdict="replace", evidence="Xid 79 on GPU 4: fell off the bus", at_ns=2)
    found = reported_while_ranks_are_ended(spec(hosts=2, spare_hosts=1), graver)
    assert actions(found) == ["reset", "swap"]
    assert [list(told.detail["hosts"]) for _, told in kinds(found, "attempt.started")] == [
        ["host-0", "host-1"],
        ["host-0", "host-2"],
    ]


def test_a_second_reset_comes_before_the_next_attempt_too():
    again = HostFault(verdict="reset", evidence="Xid 119 on GPU 5", resettable=(5,), at_ns=2)
    found = reported_while_ranks_are_ended(spec(hosts=2, spare_hosts=1), again)
    assert actions(found) == ["reset", "reset"]
    assert len(kinds(found, "attempt.started")) == 2
    assert found.machine.state.hosts["host-1"].health.resettable == ()


def test_what_an_agent_repeats_when_it_connects_is_judged_once():
    found = cluster(spec(hosts=3, min_hosts=2), steps=400)
    fault = HostFault(verdict="drain", evidence=XID, at_ns=7)
    for second in (10.0, 20.0):
        found.at(second, lambda: found.receive_from(found.hosts["host-1"], fault))
    later = HostFault(verdict="drain", evidence=XID, at_ns=8)
    found.at(30.0, lambda: found.receive_from(found.hosts["host-1"], later))
    assert found.run().exit_code == 0
    assert actions(found) == ["ignore", "ignore"]
    assert len(kinds(found, "host.health")) == 2


def test_a_new_supervisor_knows_what_is_not_judged_yet():
    found = cluster(spec(hosts=2, spare_hosts=1), steps=400)
    first = HostFault(verdict="reset", evidence=XID, resettable=(4,), at_ns=1)
    later = HostFault(verdict="replace", evidence="Xid 79 on GPU 4", at_ns=2)
    lighter = HostFault(verdict="reset", evidence="Xid 119 on GPU 5", resettable=(5,), at_ns=3)
    for fault in (first, later, lighter):
        found.at(10.0, lambda fault=fault: found.receive_from(found.hosts["host-1"], fault))
    found.run(10.0)
    assert isinstance(found.machine.state.phase, Draining)
    live, rebuilt = (one.hosts["host-1"] for one in (found.machine.state, rebuild_state(events_of(found))))
    assert live.health.fault is not None and "Xid 79" in live.health.fault.evidence
    assert rebuilt.health.fault == live.health.fault and rebuilt.health.resettable == live.health.resettable


def test_a_host_that_is_taken_away_is_not_reset_for_it():
    """Its GPUs were reported before, and the policy left it at that."""
    found = cluster(spec(hosts=2, spare_hosts=1), steps=400)
    found.run(10.0)
    found.machine.state.hosts["host-1"].health.resettable = (4,)
    notice = HostNotice(notice="preempted", source="test", grace_s=60.0)
    found.at(11.0, lambda: found.receive_from(found.hosts["host-1"], notice))
    assert found.run().exit_code == 0
    assert actions(found) == ["swap"]
