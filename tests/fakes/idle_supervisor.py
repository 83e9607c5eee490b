"""A supervisor's loop that serves nobody: what tests give it is handled, what it would send is kept."""

from collections import deque
from types import SimpleNamespace

from fakes.virtual_run import machine

from muster.core.event_log import EventLog
from muster.core.heartbeat_timing import HeartbeatTiming
from muster.supervise.process.decisions import Decisions
from muster.supervise.process.heartbeats import Heartbeats
from muster.supervise.process.home_sync import SupervisorHome
from muster.supervise.process.limits import LimitsGuard, LimitsTimer, OwnLimits
from muster.supervise.process.liveness import HostLiveness
from muster.supervise.process.loop import SupervisorLoop
from muster.supervise.process.term import Term
from muster.supervise.process.world import Journal, World


class RecordingPool:
    def __init__(self):
        self.sent, self.closed, self.peers = [], [], []

    def send(self, peer, message):
        self.sent.append(message)

    def close(self, peer):
        self.closed.append(peer)

    def leave(self, peer):
        pass

    def poll(self, timeout_s):
        return []

    def dismiss(self, peer, message):
        self.send(peer, message)
        self.close(peer)


def idle_supervisor(folder, of, state=None):
    """For the run file ``of``; its log is in ``folder``. ``state``: of the run, where it has one."""
    clock = SimpleNamespace(monotonic_ns=lambda: 10**12, wall_ns=lambda: 10**18)
    recovery, pool, home = machine(of, state=state), RecordingPool(), SupervisorHome(folder)
    home.lease = SimpleNamespace(hold=lambda: None, renew=lambda: True, repairs=[])
    limits = LimitsTimer(LimitsGuard(limits=of.limits, grace_s=30.0), clock)
    log = EventLog("r", folder / "events", "supervisor", 1)
    journal = Journal(log=log, home=home, limits=limits, machine=recovery, on_event=None)
    world = World(run_dir=folder, run_id="r", machine=recovery, journal=journal, home=home, pool=pool)
    heartbeats = Heartbeats(pool=pool, liveness=HostLiveness(timing=HeartbeatTiming(3.0)), clock=clock)
    decisions = Decisions(recovery, world, clock)
    term = Term(world=world, decisions=decisions, heartbeats=heartbeats, limits=limits, clock=clock)
    return SupervisorLoop(term, deque(), OwnLimits(journal.notes))
