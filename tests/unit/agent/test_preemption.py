"""A host that is being taken away: who decides, and how long it waits for a supervisor."""

from types import SimpleNamespace

import pytest

from muster.agent import preemption
from muster.agent.preemption import WAIT_SHARE, Preemption
from muster.protocol.to_supervisor import HostNotice
from muster.protocol.values import CommandRanks


class Host:
    def __init__(self, monkeypatch, *, hosts=2, ranks=True, supervised=True):
        self.now = 1000.0
        monkeypatch.setattr(preemption.time, "monotonic", lambda: self.now)
        spec = SimpleNamespace(recovery=SimpleNamespace(grace_s=20.0), resources=SimpleNamespace(hosts=hosts))
        self.done, self.supervised, self.ranks = [], supervised, ranks
        self.preemption = Preemption(
            spec=lambda: spec,
            has_ranks=lambda: self.ranks,
            is_supervised=lambda: self.supervised,
            send=self.done.append,
            command=self.done.append,
            on_exit=self.done.append,
        )

    def notice(self):
        self.preemption.on_notice("SIGTERM")
        self.preemption.watch()

    def after(self, seconds):
        self.now += seconds
        self.preemption.watch()
        return self.done


def save(deadline_s):
    return CommandRanks(kind="stop", exit_code=75, deadline_s=deadline_s)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ({"ranks": False}, "got SIGTERM"),
        ({"hosts": 1}, save(20.0)),
        ({"hosts": 1, "supervised": False}, save(20.0)),
        ({}, HostNotice(notice="preemption", source="SIGTERM", grace_s=20.0)),
    ],
)
def test_what_is_done_at_once(monkeypatch, host, expected):
    host = Host(monkeypatch, **host)
    host.notice()
    assert host.after(60.0) == [expected]


def test_without_a_supervisor_a_host_of_several_waits_for_one_then_saves(monkeypatch):
    host = Host(monkeypatch, supervised=False)
    host.notice()
    assert host.after(20 * WAIT_SHARE - 1) == []
    assert host.after(2.0) == [save(20 * (1 - WAIT_SHARE) - 1)]
    assert len(host.after(60.0)) == 1


def test_a_supervisor_that_comes_in_time_is_told_what_is_left(monkeypatch):
    host = Host(monkeypatch, supervised=False)
    host.notice()
    host.supervised = True
    assert host.after(4.0) == [HostNotice(notice="preemption", source="SIGTERM", grace_s=16.0)]
    assert len(host.after(60.0)) == 1


def test_a_host_that_nobody_takes_away_leaves_by_itself(monkeypatch):
    host = Host(monkeypatch)
    host.notice()
    host.ranks = False  # the supervisor has ended them and waits for the host to return
    assert len(host.after(19.0)) == 1
    assert host.preemption.due_s() == host.now + 1
    assert host.after(1.0)[1:] == ["got SIGTERM"]
    assert len(host.after(60.0)) == 2


def test_one_that_goes_on_working_after_its_time_stays(monkeypatch):
    host = Host(monkeypatch)
    host.notice()
    host.after(21.0)
    host.ranks = False
    assert len(host.after(60.0)) == 1
