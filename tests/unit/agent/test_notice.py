"""A host that is being taken away: who decides, and how long it waits for a supervisor."""

import pytest
from fakes.host import VirtualHost, spec_of

from muster.agent.unsupervised import WAIT_SHARE
from muster.agent.values.events import Noticed, PeerLost, SupervisorConnected
from muster.protocol.to_supervisor import HostNotice
from muster.protocol.values import CommandRanks


class Host(VirtualHost):
    def __init__(self, *, hosts=2, ranks=True, supervised=True):
        super().__init__(spec=spec_of(resources={"hosts": hosts, "ranks_per_host": 1}, recovery={"grace_s": 20.0}))
        if supervised:
            self.supervised()
        if ranks:
            self.rank()
        self.give(Noticed("SIGTERM")).tick()

    def after(self, seconds):
        """What was done by then."""
        self.tick(seconds)
        commands = [message for _, message in self.to if isinstance(message, CommandRanks)]
        return [*self.of(HostNotice), *commands, *([self.exit_reason] if self.exit_reason else [])]


def save(deadline_s):
    return CommandRanks(kind="stop", exit_code=75, deadline_s=deadline_s)


NOTICE = HostNotice(notice="preemption", source="SIGTERM", grace_s=20.0)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ({"ranks": False}, "got SIGTERM"),
        ({"hosts": 1}, save(20.0)),
        ({"hosts": 1, "supervised": False}, save(20.0)),
        ({}, NOTICE),
    ],
)
def test_what_is_done_at_once(host, expected):
    assert Host(**host).after(60.0) == [expected]


def test_without_a_supervisor_a_host_of_several_waits_for_one_then_saves():
    host = Host(supervised=False)
    assert host.after(20 * WAIT_SHARE - 1) == []
    assert host.after(2.0) == [save(20 * (1 - WAIT_SHARE) - 1)]
    assert len(host.after(60.0)) == 1


def test_a_supervisor_that_comes_in_time_is_told_what_is_left():
    host = Host(supervised=False)
    host.give(SupervisorConnected(2000))
    assert host.after(4.0) == [HostNotice(notice="preemption", source="SIGTERM", grace_s=16.0)]
    assert len(host.after(60.0)) == 1


def test_a_host_that_nobody_takes_away_leaves_by_itself():
    host = Host()
    host.state.ranks.table.clear()  # the supervisor has ended them and waits for the host to return
    assert len(host.after(19.0)) == 1
    assert host.due_s() <= host.now_s + 1
    assert host.after(1.0)[1:] == ["got SIGTERM"]


def test_one_that_goes_on_working_after_its_time_stays():
    host = Host()
    host.after(21.0)
    host.state.ranks.table.clear()
    assert len(host.after(60.0)) == 1


def test_a_notice_outlives_its_supervisor():
    host = Host()
    host.give(PeerLost(2000))
    host.state.ranks.table.clear()
    assert host.after(21.0)[-1] == "got SIGTERM"
