"""Copies of a host's snapshots are in another rack, before and after a host is replaced and a supervisor too."""

import pytest
from fakes.virtual_run import cluster, events_of, kinds, machine, spec, without_copies

from muster.core.types import Topology
from muster.simulate import cluster as agent_model
from muster.supervise.recovery.attempts import start_message
from muster.supervise.replay.rebuild_state import rebuild_state

#: Two racks of two, and a spare in the second one.
RACKS = {f"host-{number}": Topology(block="b", rack=str(number // 2)) for number in range(4)} | {
    "host-4": Topology(block="b", rack="1")
}


def holders(found):
    return {host.name: host.copies_to for host in found.hosts.values() if host.ranks}


def copies_said(found):
    (said,) = (log.detail["text"] for _, log in kinds(found, "run.message") if "leave the rack" in log.detail["text"])
    return said.partition(": ")[2]


def outside(found):
    return all(RACKS[name].rack != RACKS[holder].rack for name, holder in holders(found).items())


def test_a_rack_that_is_lost_takes_no_state_with_it():
    found = cluster(spec(hosts=4, spare_hosts=1, min_hosts=2), places=RACKS)
    found.at(10.0, lambda: (found.kill_host("host-0"), found.kill_host("host-1")))
    assert found.run().exit_code == 0
    assert copies_said(found) == "yes"
    (resolved,) = [log.detail for _, log in kinds(found, "incident.resolved")]
    assert resolved["redone_steps"] == 0


def test_without_labels_the_same_rack_may_hold_both():
    near = {"host-0": "0", "host-2": "0", "host-1": "1", "host-3": "1"}
    found = cluster(spec(hosts=4, spare_hosts=1, min_hosts=2))
    found.at(10.0, lambda: [found.kill_host(name) for name, rack in near.items() if rack == "0"])
    found.run()
    assert copies_said(found).startswith("unknown: 4 of 4 hosts have no label")
    assert kinds(found, "attempt.started")[-1][1].detail["resume_step"] == -1


def test_a_rack_of_more_than_half_the_hosts_is_named():
    found = cluster(spec(hosts=3), places=RACKS)
    assert found.run().exit_code == 0
    assert copies_said(found) == "no: of 1 of 3 hosts they stay in it"


def test_no_copies_no_claim():
    found = cluster(without_copies(spec(hosts=2)), places=RACKS)
    assert found.run().exit_code == 0 and set(holders(found).values()) <= {None}
    assert not [log for _, log in kinds(found, "run.message") if "leave the rack" in log.detail["text"]]


def test_a_replica_in_another_rack_is_a_copy():
    of = spec(hosts=4)
    of = of.model_copy(update={"parallelism": of.parallelism.model_copy(update={"dp_replicate": 2, "dp_shard": 2})})
    apart = cluster(of, places=RACKS)
    assert apart.run().exit_code == 0 and copies_said(apart) == "yes"
    swapped = {"host-0": "0", "host-1": "1", "host-2": "0", "host-3": "1"}
    near = cluster(of, places={name: Topology(block="b", rack=rack) for name, rack in swapped.items()})
    assert near.run().exit_code == 0 and copies_said(near) == "no: of 4 of 4 hosts they stay in it"


@pytest.mark.parametrize("at_s", [10.0, 10.4])
def test_a_replaced_host_moves_few_copies_and_a_new_supervisor_knows_who_holds_what(at_s):
    """A host of rack 0 is replaced by one of rack 1, whose copies must go elsewhere."""
    of = spec(hosts=4, spare_hosts=1)
    found = cluster(of, places=RACKS)
    before: dict[str, str] = {}
    found.at(9.0, lambda: before.update(holders(found)))
    found.at(10.0, lambda: found.kill_host("host-0"))
    found.at(at_s, lambda: found.replace_supervisor(machine(of, state=rebuild_state(events_of(found)))))
    live: list[tuple[int, ...]] = []
    found.at(20.0, lambda: live.append(found.machine.state.current.holders))
    found.at(20.1, lambda: live.append(rebuild_state(events_of(found)).current.holders))
    places = {}
    found.at(
        20.1, lambda: places.update({n: h.machine.place for n, h in rebuild_state(events_of(found)).hosts.items()})
    )
    after: dict[str, str] = {}
    found.at(20.2, lambda: after.update(holders(found)))
    assert found.run().exit_code == 0
    assert set(after) == {"host-1", "host-2", "host-3", "host-4"} and live[0] == live[1] and places == RACKS
    # Three hosts in rack 1, one in rack 0: one copy goes each way, and the two others have no room.
    inside = [name for name in after if RACKS[name].rack == RACKS[after[name]].rack]
    assert len(inside) == 2 and before["host-0"] == "host-2"


def test_a_replicator_that_restarts_is_told_to_those_that_copy_to_it(monkeypatch):
    told = []
    real = agent_model.handle_message
    monkeypatch.setattr(
        agent_model, "handle_message", lambda on, name, message: (told.append((name, message)), real(on, name, message))
    )
    from muster.protocol.to_agent import PeerMoved
    from muster.protocol.to_supervisor import ReplicatorAddress

    found = cluster(spec(hosts=4), places=RACKS)
    found.at(9.0, lambda: found.receive_from(found.hosts["host-2"], ReplicatorAddress(memory=("host-2", 7))))
    assert found.run().exit_code == 0
    assert [(name, message.peer) for name, message in told if isinstance(message, PeerMoved)] == [
        ("host-0", ("host-2", 7))
    ]


@pytest.mark.parametrize("of", [spec(hosts=4), without_copies(spec(hosts=2))], ids=["copies", "none"])
def test_a_host_is_told_whose_copies_come_to_it(of):
    found = cluster(of, places=RACKS)
    found.run(10.0)
    state = found.machine.state
    orders = {name: start_message(found.machine._ctx, name, None, {}) for name in state.active}
    expected = {name: set() for name in state.active}
    for name, order in orders.items():
        for holder in state.active:
            if order.peer is not None and order.peer == state.hosts[holder].machine.memory:
                expected[holder] |= set(state.ranks_on(name))
    assert {name: set(order.copies_of) for name, order in orders.items()} == expected
    assert all(expected.values()) == (of.checkpoint.replicate_snapshots is not False)
