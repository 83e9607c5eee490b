"""A fault is older than its detection: how old it can be is logged with the incident."""

from muster.config.spec import RunSpec
from muster.policy.builtin import SHIPPED
from muster.simulate.cluster import Cluster
from muster.supervise.process.liveness import SECOND_NS, HostLiveness
from muster.supervise.recovery.state import HostDown, Settings
from muster.supervise.recovery.state_machine import RecoveryStateMachine


def test_silence_counts_from_the_last_beat_and_a_closed_connection_says_nothing():
    presence = HostLiveness(timeout_s=1.0)
    presence.agent_connected("a", 0)
    presence.watchdog_connected("a", 1 * SECOND_NS)
    presence.heartbeat("a", 2 * SECOND_NS)
    assert presence.silent_s("a", 5 * SECOND_NS) == 3.0
    presence.watchdog_disconnected("a", 5 * SECOND_NS)
    presence.agent_disconnected("a", 5 * SECOND_NS)
    assert presence.silent_s("a", 6 * SECOND_NS) == 0.0


def test_a_host_that_comes_back_after_silence_is_given_time_for_its_first_beat():
    """After a cut its agent is back before its keeper's connection: that is no silence yet."""
    presence = HostLiveness(timeout_s=1.0)
    presence.watchdog_connected("a", 1)
    presence.agent_connected("a", 1)
    assert presence.down(2 * SECOND_NS) == [("a", "silent for 2.00 s (limit 1 s)")]
    presence.forget("a")
    presence.agent_connected("a", 30 * SECOND_NS)
    assert presence.down(33 * SECOND_NS) == []
    presence.watchdog_connected("a", 34 * SECOND_NS)
    assert presence.down(int(34.5 * SECOND_NS)) == []
    assert presence.down(36 * SECOND_NS) == [("a", "silent for 2.00 s (limit 1 s)")]


def test_the_incident_says_since_when():
    spec = RunSpec.model_validate(
        {
            "name": "s",
            "model": {"config": {}},
            "data": {"sources": [{"type": "random"}]},
            "training": {"steps": 100},
            "resources": {"hosts": 2, "min_hosts": 1, "ranks_per_host": 1},
        }
    )
    settings = Settings(spec=spec, run_id="r", run_dir="/r", ranks_per_host=1)
    machine = RecoveryStateMachine(settings=settings, policy=SHIPPED["default"])
    cluster = Cluster(machine=machine, names=["host-0", "host-1"], total_steps=100)
    cluster.at(10.0, lambda: cluster.give(HostDown(host="host-1", reason="silent for 1.50 s", silent_s=1.5)))
    cluster.run(until_s=11.0)
    ((at, log),) = [(at, log) for at, log in cluster.log if log.kind == "incident.detected"]
    assert log.detail["since_ns"] == 8_500_000_000 and at == 10.0
