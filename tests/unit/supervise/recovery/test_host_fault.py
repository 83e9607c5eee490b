"""What a host's own look at its hardware leads to: reset, swap, or nothing while there is no spare. In virtual time."""

import pytest
from fakes.virtual_run import actions, cluster, events_of, kinds, spec

from muster.protocol.to_supervisor import HostFault
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
        assert state.hosts["host-2"].quarantined and state.hosts["host-2"].resettable == (4, 5)
    found.at(21.0, lambda: found.kill_host("host-1"))
    assert found.run().exit_code == 0
    ((_, decided),) = kinds(found, "incident.decided")
    assert decided.detail["replacement"] == "host-3"
