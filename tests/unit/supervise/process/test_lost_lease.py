"""A lease that is emptied, damaged or removed: terms never fall back, its holder keeps it, and a stand-by looks first.

In a folder and in a bucket. Clocks are set by hand; what happens while one waits, happens in its sleep.
"""

import dataclasses
import json
import os

import pytest
from fakes.objects import Objects

from muster.core.errors import ConflictError
from muster.core.typed_json import Unreadable
from muster.protocol.lease import read_lease, write_lease
from muster.protocol.version import OtherVersion
from muster.storage.store import open_store
from muster.supervise.process.lease import LEASE_S, LeaseKeeper

DAMAGES = ("removed", "emptied", "torn", "flipped")


class Clock:
    def __init__(self):
        self.now_ns, self.meanwhile, self.slept_s = 10**18, [], 0.0

    def monotonic_ns(self):
        return self.now_ns

    def wall_ns(self):
        return self.now_ns

    def sleep(self, seconds):
        self.now_ns += int(seconds * 1e9)
        self.slept_s += seconds
        for work in self.meanwhile:
            work()


class Home:
    """Where a run's lease and the logs of its supervisors are."""

    def __init__(self, store, uri, *, bucket):
        self.store, self.uri, self.bucket, self.clock = store, uri, bucket, Clock()
        self.at = f"{uri}/lease.json"

    def keeper(self):
        return LeaseKeeper(self.store, self.at, clock=self.clock)

    def take(self, *, logs=True):
        keeper = self.keeper()
        keeper.take(("127.0.0.1", 1))
        if logs:
            self.log(keeper.term)
        return keeper

    def log(self, term):
        name = f"supervisor.{term}/00000000.segment" if self.bucket else f"supervisor.{term}.jsonl"
        self.store.put(f"{self.uri}/events/{name}", b"{}\n")

    def data(self):
        return self.store.get(self.at).data

    def damage(self, how):
        data = self.data()
        if how == "removed":
            self.store.delete(self.at)
        else:
            flipped = data.replace(b"127.0.0.1", b"127.0.0.3")
            self.store.put(self.at, {"emptied": b"", "torn": data[:40], "flipped": flipped}[how])

    def crash(self):
        """Its holder is gone, and its lease out."""
        self.clock.now_ns += int((LEASE_S + 1) * 1e9)


@pytest.fixture(params=["folder", "bucket"])
def home(request, tmp_path):
    if request.param == "bucket":
        return Home(Objects(), "gs://bucket/runs/run-1", bucket=True)
    return Home(open_store(), str(tmp_path), bucket=False)


@pytest.mark.parametrize("how", DAMAGES)
def test_the_term_never_falls_back(home, how):
    for term in (1, 2, 3):
        assert home.take().term == term
        home.crash()
    home.damage(how)
    found = home.take()
    assert found.term == 4
    assert "lease.json was" in found.repairs[0] and "term 4" in found.repairs[0]
    assert read_lease(home.data(), me="the test").term == 4


@pytest.mark.parametrize("how", DAMAGES)
def test_its_holder_writes_it_again_and_says_so(home, how):
    keeper = home.take()
    home.clock.sleep(1.0)
    home.damage(how)
    assert keeper.renew() is True and keeper.hold() is None
    assert read_lease(home.data(), me="the test").term == 1
    assert len(keeper.repairs) == 1 and "lease.json was" in keeper.repairs[0]
    home.clock.sleep(1.0)
    assert keeper.renew() is True and len(keeper.repairs) == 1


@pytest.mark.parametrize("how", DAMAGES)
def test_one_that_stands_by_does_not_take_it_from_a_holder_that_lives(home, how):
    keeper = home.take()
    home.damage(how)
    due_ns = home.clock.now_ns + int(LEASE_S / 3 * 1e9)
    home.clock.meanwhile = [lambda: keeper.renew() if home.clock.now_ns >= due_ns else None]
    with pytest.raises(ConflictError, match=f"pid {os.getpid()}"):
        home.take()
    assert keeper.term == 1 and keeper.renew() is True


@pytest.mark.parametrize("how", DAMAGES)
def test_one_that_stands_by_looks_for_as_long_as_a_lease_lasts(home, how):
    home.take()
    home.damage(how)
    assert home.take().term == 2
    assert LEASE_S <= home.clock.slept_s < LEASE_S + 2


def test_a_first_start_waits_for_nobody(home):
    assert home.take().term == 1
    assert home.clock.slept_s == 0.0


@pytest.mark.parametrize("how", DAMAGES)
def test_of_two_that_stand_by_one_takes_it(home, how):
    home.take()
    home.crash()
    home.damage(how)
    winners = []

    def other():
        home.clock.meanwhile = []
        winners.append(home.take())

    home.clock.meanwhile = [other]
    with pytest.raises(ConflictError):
        home.take()
    assert [found.term for found in winners] == [2]


def test_a_holder_that_slept_while_another_came_and_went_does_not_write_it_again(home):
    keeper = home.take()
    home.crash()
    home.take().give_back()
    home.damage("removed")
    with pytest.raises(ConflictError, match="a later term"):
        keeper.renew()
    with pytest.raises(FileNotFoundError):
        home.data()


def test_an_older_lease_that_is_put_back_is_no_successor_s(home):
    home.take()
    older = home.data()
    home.crash()
    keeper = home.take()
    home.store.put(home.at, older)
    assert keeper.renew() is True and "older term" in keeper.repairs[0]
    assert read_lease(home.data(), me="the test").term == 2
    home.store.put(home.at, older)
    home.crash()
    assert home.take().term == 3


def test_a_lease_that_was_touched_is_still_its_holder_s(home):
    keeper = home.take()
    home.store.put(home.at, home.data())
    assert keeper.renew() is True and keeper.repairs == []


def test_a_holder_whose_lease_another_process_let_expire_does_not_take_it_back(home):
    """Slurm's nodes depose a supervisor that nobody reaches so."""
    keeper = home.take()
    record = read_lease(home.data(), me="the test")
    home.store.put(home.at, write_lease(dataclasses.replace(record, expires_wall_ns=0)))
    with pytest.raises(ConflictError, match="let it expire"):
        keeper.renew()
    assert home.take().term == 2 and home.clock.slept_s == 0.0


def test_one_that_left_no_log_is_followed_by_its_record(home):
    """It was killed before its first event."""
    home.take()
    home.crash()
    home.take(logs=False)
    home.crash()
    assert home.take().term == 3


@pytest.mark.parametrize("place", range(0, 260, 7))
def test_a_flipped_bit_is_nobody_s_lease(home, place):
    """Agents would follow another address, and its holder yield to another term."""
    keeper = home.take()
    broken = bytearray(home.data())
    place %= len(broken)
    broken[place] ^= 1
    with pytest.raises((Unreadable, OtherVersion)):
        read_lease(bytes(broken), me="host-0")
    home.store.put(home.at, bytes(broken))
    assert keeper.renew() is True
    assert json.loads(home.data())["term"] == 1
