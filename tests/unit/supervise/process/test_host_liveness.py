"""Which signs mean that a host is gone, and when."""

from muster.core.heartbeat_timing import HeartbeatTiming
from muster.supervise.process.liveness import AGENT_RETURN_S, HostLiveness

S = 1_000_000_000


def host(timeout_s=3.0):
    found = HostLiveness(timing=HeartbeatTiming(timeout_s))
    found.agent_connected("a", 1 * S)
    found.watchdog_connected("a", 1 * S)
    return found


def test_beats_keep_a_host_up_and_silence_takes_it_down_once():
    found = host()
    found.heartbeat("a", 2 * S)
    assert found.deadline_ns() == 5 * S
    assert found.down(int(4.9 * S)) == []
    ((name, why),) = found.down(5 * S)
    assert name == "a" and "silent for 3.00 s" in why
    assert found.down(6 * S) == []


def test_both_connections_closed_is_seen_at_once():
    found = host()
    found.agent_disconnected("a", 2 * S)
    assert found.down(2 * S) == []
    found.watchdog_disconnected("a", 2 * S)
    assert found.down(2 * S) == [("a", "all its connections closed")]


def test_an_agent_alone_may_come_back():
    found = host()
    found.agent_disconnected("a", 2 * S)
    for second in range(3, 3 + int(AGENT_RETURN_S) - 2):
        found.heartbeat("a", second * S)
        assert found.down(second * S) == []
    found.agent_connected("a", 9 * S)
    found.heartbeat("a", 11 * S)
    assert found.down(12 * S) == []


def test_an_agent_that_stays_away_is_a_lost_host():
    found = host()
    found.agent_disconnected("a", 2 * S)
    late = 2 * S + int(AGENT_RETURN_S * S)
    found.heartbeat("a", late)
    assert "did not come back" in found.down(late)[0][1]


def test_a_host_that_comes_back_can_be_lost_again():
    found = host()
    found.down(9 * S)
    found.agent_connected("a", 20 * S)
    found.watchdog_connected("a", 20 * S)
    assert found.down(21 * S) == []
    assert len(found.down(30 * S)) == 1


def test_a_supervisor_that_was_not_run_does_not_blame_the_hosts():
    """A paused machine: the supervisor wakes 3 s late, before the keeper had a chance to beat."""
    found = host()
    found.heartbeat("a", 2 * S)
    limit = int(found.timing.timeout_s * S)
    found.discount_pause(3 * S, 2 * S + limit + 3 * S)
    assert found.down(2 * S + limit + 3 * S - 1) == []
    assert len(found.down(2 * S + limit + 3 * S)) == 1, "and real silence is still seen, as much later"


def test_being_late_never_makes_a_host_seen_in_the_future():
    found = host()
    found.heartbeat("a", 5 * S)
    found.discount_pause(3 * S, 5 * S)
    assert len(found.down(5 * S + int(found.timing.timeout_s * S))) == 1


def test_a_limit_that_was_lowered_is_never_below_three_beats_of_the_keeper():
    """It beats as it was started: with a quarter of another limit."""
    found = HostLiveness(timing=HeartbeatTiming(0.3))
    found.agent_connected("a", 1 * S)
    found.watchdog_connected("a", 1 * S, every_s=0.5)
    for tenths in range(15, 60, 5):
        found.heartbeat("a", tenths * S // 10)
        assert found.down(tenths * S // 10 + int(0.9 * S)) == []
    assert found.least_s == 1.5 and found.deadline_ns() == int(7.0 * S)
    assert found.down(7 * S) == [("a", "silent for 1.50 s (limit 1.5 s)")]


def test_a_host_whose_watchdog_has_not_come_yet_is_waited_for_without_waking():
    """A deadline that is past and names nobody would keep the supervisor awake."""
    found = HostLiveness(timing=HeartbeatTiming(3.0))
    found.agent_connected("a", 1 * S)
    assert found.down(5 * S) == [] and found.deadline_ns() == 31 * S
    assert "no heartbeat" in found.down(31 * S)[0][1]


def test_what_was_heard_later_is_not_undone_by_what_came_before():
    found = host()
    found.heartbeat("a", 4 * S)
    found.heartbeat("a", 2 * S)
    assert found.deadline_ns() == 7 * S and found.silent(int(6.9 * S)) == [] and found.silent(7 * S) == ["a"]
