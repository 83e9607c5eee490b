"""A supervisor's process that serves nobody: what tests give it is handled, what it would send is kept."""

from types import SimpleNamespace

from fakes.virtual_run import machine

from muster.core.event_log import EventLog
from muster.core.heartbeat_timing import HeartbeatTiming
from muster.supervise.checks.asked import AskedLooks
from muster.supervise.process.clock_offsets import ClockOffsets
from muster.supervise.process.heartbeats import Heartbeats
from muster.supervise.process.home_sync import SupervisorHome
from muster.supervise.process.journal import Journal
from muster.supervise.process.limits import LimitsGuard, LimitsTimer
from muster.supervise.process.live_requests import LiveRequests
from muster.supervise.process.liveness import HostLiveness
from muster.supervise.process.server import Supervisor


class RecordingPool:
    def __init__(self):
        self.sent, self.closed = [], []

    def send(self, peer, message):
        self.sent.append(message)

    def close(self, peer):
        self.closed.append(peer)

    def leave(self, peer):
        pass

    def dismiss(self, peer, message):
        self.send(peer, message)
        self.close(peer)


def idle_supervisor(folder, of):
    """For the run file ``of``; its log is in ``folder``."""
    found = Supervisor(run_dir=folder)
    found.run_id, found.pool, found.agents = "r", RecordingPool(), {}
    found.clocks, found.machine = ClockOffsets(), machine(of)
    found.liveness = HostLiveness(timing=HeartbeatTiming(3.0))
    found.clock = SimpleNamespace(monotonic_ns=lambda: 10**12, wall_ns=lambda: 10**18)
    found.looks = AskedLooks(lambda host, message: found.pool.send(found.agents[host], message))
    found.live = LiveRequests(found.pool.send, found.agents, lambda: found.machine.state, found._status, found.clock)
    found.heartbeats = Heartbeats(pool=found.pool, liveness=found.liveness, clock_ns=found.clock.monotonic_ns)
    found.limits = LimitsTimer(LimitsGuard(limits=of.limits, grace_s=30.0), found.clock)
    found.home = SupervisorHome(folder)
    found.lease = SimpleNamespace(hold=lambda: None, repairs=[])
    found.journal = Journal(
        log=EventLog("r", folder / "events", "supervisor", 1),
        home=found.home,
        limits=found.limits,
        attempt=lambda: found.machine.state.attempt,
        on_event=None,
        notes=found._notes,
    )
    return found
