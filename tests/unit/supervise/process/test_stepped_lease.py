"""A wall clock that is stepped takes the lease from nobody on its own machine, and no limit comes an hour early."""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime

import pytest

from muster.config.spec import Limits
from muster.core.errors import ConflictError
from muster.core.events import Event
from muster.protocol.version import OtherVersion
from muster.storage.store import open_store
from muster.supervise.process.lease import LEASE_S, LeaseKeeper
from muster.supervise.process.limits import LimitsGuard

HOUR = 3600 * 10**9


class Clock:
    """Two clocks that are set by hand."""

    def __init__(self, mono_ns=10**15, wall_ns=10**18):
        self.mono_ns, self.now_ns = mono_ns, wall_ns

    def monotonic_ns(self):
        return self.mono_ns

    def wall_ns(self):
        return self.now_ns

    def sleep(self, seconds):
        self.mono_ns += int(seconds * 1e9)
        self.now_ns += int(seconds * 1e9)


@pytest.fixture
def held(tmp_path):
    """(where, the holder's clock, what another supervisor gets)."""
    at, clock = str(tmp_path / "lease.json"), Clock()
    holder = LeaseKeeper(open_store(), at, clock=clock)
    holder.take(("127.0.0.1", 1))
    return at, clock, holder


def taker(at, clock):
    return LeaseKeeper(open_store(), at, clock=clock).take(("127.0.0.1", 2))


def unsealed(at):
    """The record, as a supervisor that states no checksum would have written it."""
    return json.loads(open_store().get(at).data) | {"checksum": 0}


@pytest.mark.parametrize("by", [HOUR, -HOUR])
def test_on_one_machine_the_monotonic_clock_decides(held, by):
    at, clock, holder = held
    clock.now_ns += by
    with pytest.raises(ConflictError, match="holds this run"):
        taker(at, clock)
    holder.hold()
    assert holder.renew() is True and holder.term == 1
    clock.now_ns -= 2 * by
    with pytest.raises(ConflictError, match="holds this run"):
        taker(at, clock)
    clock.sleep(LEASE_S + 1)
    assert taker(at, clock) == 2, "it has not renewed"


def test_a_dead_holder_on_this_machine_is_followed_at_once(held):
    at, clock, _ = held
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    record = unsealed(at) | {"pid": ended.pid}
    open_store().put(at, json.dumps(record).encode())
    clock.now_ns -= HOUR
    assert taker(at, clock) == 2


@pytest.mark.parametrize("gone", ["machine", "given back"])
def test_elsewhere_a_leases_length_decides_and_what_was_given_back_is_free(held, gone):
    at, clock, holder = held
    if gone == "given back":
        holder.give_back()
    else:
        record = unsealed(at) | {"machine": "elsewhere", "pid": os.getpid()}
        open_store().put(at, json.dumps(record).encode())
    before = clock.now_ns
    assert taker(at, clock) == 2
    assert clock.now_ns - before == (0 if gone == "given back" else int(LEASE_S * 1e9))


def test_a_deadline_is_the_wall_clocks_and_hours_are_not():
    deadline = datetime.fromtimestamp(4 * 3600, tz=UTC).isoformat()
    guard = LimitsGuard(limits=Limits(deadline=deadline, max_hours=10), grace_s=0.0)
    guard.add(Event(run_id="r", attempt=0, seq=0, mono_ns=0, wall_ns=0, host="a", kind="host.allocated",
                    detail={"gpus": 1, "role": "active"}))  # fmt: skip
    assert guard.next(2 * HOUR).at_wall_ns == 4 * HOUR
    assert guard.next(2 * HOUR, clock_ns=3 * HOUR).at_wall_ns == 3 * HOUR, "an hour is left to it"
    guard.limits = Limits(max_hours=10)
    assert guard.next(2 * HOUR, clock_ns=3 * HOUR).at_wall_ns == 10 * HOUR


def of_another_boot(at, **changed):
    record = unsealed(at) | {"boot_id": "another", "expires_mono_ns": 10**18} | changed
    open_store().put(at, json.dumps(record).encode())


def test_a_reboot_with_the_clock_behind_costs_a_leases_length(held):
    at, clock, _ = held
    of_another_boot(at)
    clock.now_ns -= HOUR
    before = clock.mono_ns
    assert taker(at, clock) == 2
    assert LEASE_S <= (clock.mono_ns - before) / 1e9 <= LEASE_S + 1


def test_a_holder_on_another_machine_is_seen_by_its_renewal_alone(held):
    at, clock, _ = held
    for ahead_ns in (0, HOUR, -HOUR):  # its clock is right, an hour ahead, or an hour behind
        of_another_boot(at, machine="elsewhere", expires_wall_ns=clock.now_ns + ahead_ns + int(LEASE_S * 1e9))

        class Renewing(Clock):
            def sleep(self, seconds, ahead_ns=ahead_ns):
                super().sleep(seconds)
                of_another_boot(at, machine="elsewhere", expires_wall_ns=self.now_ns + ahead_ns + int(LEASE_S * 1e9))

        with pytest.raises(ConflictError, match="on elsewhere"):
            taker(at, Renewing(mono_ns=clock.mono_ns, wall_ns=clock.now_ns))


def test_a_holder_of_another_protocol_is_named_while_it_holds_and_replaced_once_it_is_gone(held):
    at, clock, _ = held
    version = {"protocol": 2, "muster": "0.1.9"}
    open_store().put(at, json.dumps(unsealed(at) | {"version": version}).encode())
    with pytest.raises(OtherVersion, match=r"protocol 2 \(muster 0.1.9\)") as refused:
        taker(at, clock)
    assert "muster down" in str(refused.value.hint)
    clock.sleep(LEASE_S + 1)
    assert taker(at, clock) == 2


def test_a_successor_of_another_protocol_ends_the_holder(held):
    at, _, holder = held
    record = unsealed(at) | {"term": 2, "pid": 1, "version": {"protocol": 99, "muster": "9"}}
    open_store().put(at, json.dumps(record).encode())
    with pytest.raises(ConflictError, match="term 2 is held by pid 1"):
        holder.renew()
