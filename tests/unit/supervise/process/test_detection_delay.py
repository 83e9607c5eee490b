"""A fault is older than its detection: how old it can be is logged with the incident."""

from fakes.virtual_run import cluster, kinds, spec

from muster.core.heartbeat_timing import HeartbeatTiming
from muster.supervise.process.liveness import SECOND_NS, HostLiveness
from muster.supervise.recovery.inputs import HostDown


def test_silence_counts_from_the_last_beat_and_a_closed_connection_says_nothing():
    presence = HostLiveness(timing=HeartbeatTiming(1.0))
    presence.agent_connected("a", 0)
    presence.watchdog_connected("a", 1 * SECOND_NS)
    presence.heartbeat("a", 2 * SECOND_NS)
    assert presence.silent_s("a", 5 * SECOND_NS) == 3.0
    presence.watchdog_disconnected("a", 5 * SECOND_NS)
    presence.agent_disconnected("a", 5 * SECOND_NS)
    assert presence.silent_s("a", 6 * SECOND_NS) == 0.0


def test_a_host_that_comes_back_after_silence_is_given_time_for_its_first_beat():
    """After a cut its agent is back before its watchdog's connection: that is no silence yet."""
    presence = HostLiveness(timing=HeartbeatTiming(1.0))
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
    found = cluster(spec(hosts=2, min_hosts=1))
    found.at(10.0, lambda: found.give(HostDown(host="host-1", reason="silent for 1.50 s", silent_s=1.5)))
    found.run(until_s=11.0)
    ((at, log),) = kinds(found, "incident.detected")
    assert log.detail["since_ns"] == 8_500_000_000 and at == 10.0
