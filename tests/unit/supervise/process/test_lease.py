"""Who holds the lease may act: a supervisor that slept past it looks first. With a clock that is set by hand."""

import json
import time

import pytest

from muster.core.errors import BackendError, BusyError, ConflictError
from muster.core.typed_json import convert
from muster.protocol.lease import LeaseRecord, write_lease
from muster.storage.store import open_store
from muster.supervise.process import lease
from muster.supervise.process.lease import LEASE_S, LeaseKeeper, keeping


class SetClock:
    def __init__(self):
        self.now_ns = 10**18

    def monotonic_ns(self):
        return self.now_ns

    def wall_ns(self):
        return self.now_ns

    def sleep(self, seconds):
        self.now_ns += int(seconds * 1e9)


class Disk:
    """The store, when it does not fail. ``away``: it answers nothing."""

    def __init__(self):
        self.inner, self.full, self.half_done, self.writes, self.away = open_store(), False, False, 0, False

    def get(self, uri, *, start=0):
        if self.away:
            raise BusyError("503")
        return self.inner.get(uri, start=start)

    def list(self, prefix):
        if self.away:
            raise BusyError("503")
        return self.inner.list(prefix)

    def put_if_absent(self, uri, data):
        return self._put(lambda: self.inner.put_if_absent(uri, data))

    def put_if(self, uri, data, generation):
        return self._put(lambda: self.inner.put_if(uri, data, generation))

    def _put(self, put):
        self.writes += 1
        if self.away:
            raise BusyError("503")
        if self.full:
            raise BackendError("No space left on device")
        found = put()
        if self.half_done:
            self.half_done = False
            raise BackendError("the folder could not be synced")
        return found


@pytest.fixture
def at(tmp_path):
    return str(tmp_path / "lease.json")


def taken(at, clock, store=None):
    keeper = LeaseKeeper(store or Disk(), at, clock=clock)
    keeper.take(("127.0.0.1", 1))
    return keeper


def rival(at, clock):
    """Another machine's supervisor."""
    record = json.loads(open_store().get(at).data)
    assert clock.wall_ns() >= record["expires_wall_ns"], "nobody takes a lease that runs"
    put(at, record | {"term": record["term"] + 1, "pid": 1, "machine": "elsewhere"})


def put(at, record):
    open_store().put(at, write_lease(convert(LeaseRecord, record)))


def test_holding_costs_nothing_while_it_runs(at):
    clock = SetClock()
    keeper = taken(at, clock)
    clock.sleep(LEASE_S - 0.1)
    keeper.hold()
    assert keeper.store.writes == 1


def test_one_that_slept_past_it_renews_before_it_acts(at):
    clock = SetClock()
    keeper = taken(at, clock)
    clock.sleep(LEASE_S + 5)
    keeper.hold()
    assert json.loads(open_store().get(at).data)["expires_wall_ns"] == clock.wall_ns() + int(LEASE_S * 1e9)


def test_one_that_slept_while_another_took_it_is_told_so_before_it_acts(at):
    clock = SetClock()
    keeper = taken(at, clock)
    clock.sleep(LEASE_S + 5)
    rival(at, clock)
    with pytest.raises(ConflictError):
        keeper.hold()


def test_a_full_disk_is_borne_with_and_the_lease_goes_on_after(at):
    clock = SetClock()
    keeper = taken(at, clock)
    keeper.store.full = True
    for _ in range(30):
        clock.sleep(1.0)
        assert keeper.renew() is False
        keeper.hold()
    keeper.store.full = False
    assert keeper.renew() is True


def test_a_full_disk_does_not_hide_a_successor(at):
    clock = SetClock()
    keeper = taken(at, clock)
    keeper.store.full = True
    clock.sleep(LEASE_S + 1)
    rival(at, clock)
    with pytest.raises(ConflictError):
        keeper.renew()


def test_a_renewal_that_failed_after_it_was_written_is_no_rivals(at):
    clock = SetClock()
    keeper = taken(at, clock)
    keeper.store.half_done = True
    clock.sleep(1.0)
    assert keeper.renew() is False
    assert keeper.renew() is True


def test_a_store_that_answers_nothing_neither_ends_it_nor_lets_it_act(at):
    clock = SetClock()
    keeper = taken(at, clock)
    keeper.store.away = True
    for second in range(60):
        clock.sleep(1.0)
        assert keeper.renew() is False
        assert (keeper.hold() is None) == (second + 1 < LEASE_S), "without a lease nothing is done"
    assert "503" in keeper.hold()
    writes = keeper.store.writes
    keeper.hold()
    assert keeper.store.writes == writes, "who waits is not slowed down by more questions"
    keeper.store.away = False
    assert keeper.renew() is True and keeper.hold() is None


def test_a_successor_that_came_while_the_store_answered_nothing_ends_it(at):
    clock = SetClock()
    keeper = taken(at, clock)
    keeper.store.away = True
    clock.sleep(LEASE_S + 1)
    assert keeper.renew() is False and keeper.hold()
    rival(at, clock)
    assert keeper.hold(), "nothing says so yet"
    keeper.store.away = False
    with pytest.raises(ConflictError):
        keeper.renew()


def test_who_takes_it_from_one_that_is_busy_is_seen_at_the_end_of_it(at, monkeypatch):
    monkeypatch.setattr(lease, "LEASE_S", 0.15)
    clock = SetClock()
    keeper = taken(at, clock)
    clock.sleep(1)
    with pytest.raises(ConflictError), keeping(keeper):
        rival(at, clock)
        time.sleep(0.2)
