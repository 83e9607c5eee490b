"""The lease of symbolic links: who is dead, who gives way, and what a lost answer looks like. Interleavings are in
``tests/unit/data/test_cache_protocol.py``."""

import itertools
import os
import socket
import time
from types import SimpleNamespace

import pytest

from muster.core import processes
from muster.core.errors import ConflictError
from muster.storage.store import link_lease
from muster.storage.store.link_lease import Holder, LinkLease, Token, beating, here, traces


@pytest.fixture
def clock(monkeypatch):
    """Virtual time, which sleeping advances."""
    now = SimpleNamespace(s=0.0)

    def sleep(seconds):
        now.s += seconds

    monkeypatch.setattr(
        link_lease, "time",
        SimpleNamespace(monotonic=lambda: now.s, monotonic_ns=lambda: int(now.s * 1e9), time=time.time, sleep=sleep),
    )  # fmt: skip
    return now


def held_elsewhere(folder, number=1, token="elsewhere-7-1-ab"):
    """The link of a holder on another machine."""
    os.symlink(f"{token}:1700000000:host-9", folder / f".name.lease-{number}")
    return folder / f".name.beat-{token}"


def test_a_holder_is_described_to_those_who_wait(tmp_path, clock):
    first = LinkLease(tmp_path, "name")
    first.try_take()
    waited = []
    assert not LinkLease(tmp_path, "name").take(lambda holder: waited.append(holder) or True)
    assert waited[0].token == first.token and waited[0].host == socket.gethostname()
    assert abs(waited[0].since_s - time.time()) < 60 and Holder.read(str(waited[0])) == waited[0]
    with pytest.raises(ConflictError, match="in use by another process"):
        LinkLease(tmp_path, "name").try_take()
    LinkLease(tmp_path, "other").try_take()
    first.release()
    LinkLease(tmp_path, "name").try_take()


def test_a_live_process_of_this_machine_is_waited_for_however_silent(tmp_path, clock):
    LinkLease(tmp_path, "name").try_take()
    waited = []
    assert not LinkLease(tmp_path, "name").take(lambda holder: waited.append(clock.s) or clock.s > 1000)
    assert max(b - a for a, b in itertools.pairwise(waited)) <= link_lease.LONGEST_PAUSE_S


def test_a_dead_process_of_this_machine_is_replaced_at_once(tmp_path, clock):
    os.symlink(f"{link_lease.here()}-4194999-1-ab:1:host", tmp_path / ".name.lease-3")
    lease = LinkLease(tmp_path, "name")
    lease.try_take()
    assert [path.name for path in tmp_path.iterdir()] == [".name.lease-4"] and lease.is_held()


def test_a_process_number_that_is_another_processes_now_is_dead(tmp_path):
    mine = Token.new()
    assert mine.is_of_here and not mine.is_dead and Token.read(str(mine)) == mine
    assert Token(mine.here, mine.pid, mine.start_ticks + 1, "ab").is_dead
    assert not Token("elsewhere", 4194999, 1, "ab").is_dead  # one cannot know
    assert Token.read("a-b") is None and Token.read("") is None


def test_a_silent_holder_elsewhere_is_replaced_after_its_time_and_not_one_that_beats(tmp_path, clock):
    beat = held_elsewhere(tmp_path)

    def beats(holder):
        if clock.s < 300:
            beat.write_text(str(clock.s))
        return False

    lease = LinkLease(tmp_path, "name")
    assert lease.take(beats)
    assert 300 + link_lease.STALE_S - 3 <= clock.s <= 300 + link_lease.STALE_S + 5
    assert [path.name for path in tmp_path.iterdir()] == [".name.lease-2"]


def test_who_comes_from_an_older_look_gives_way(tmp_path, clock, monkeypatch):
    """It saw number 5 of a dead holder. Since then 6 has come and gone, and another has begun at 1."""
    late, holder = LinkLease(tmp_path, "name"), LinkLease(tmp_path, "name")
    holder.try_take()
    looks = [{5: f"{link_lease.here()}-4194999-1-ab:1:host"}]
    real = late._links
    monkeypatch.setattr(late, "_links", lambda: looks.pop() if looks else real())
    with pytest.raises(ConflictError):
        late.try_take()
    assert [path.name for path in tmp_path.iterdir()] == [".name.lease-1"] and holder.is_held()


def test_an_own_link_whose_answer_was_lost_is_known_again(tmp_path, monkeypatch):
    real = os.symlink

    def lost(target, link):
        real(target, link)
        raise FileExistsError(17, "File exists", str(link))

    monkeypatch.setattr(os, "symlink", lost)
    lease = LinkLease(tmp_path, "name")
    lease.try_take()
    assert lease.is_held()


def test_a_holder_that_was_replaced_knows_it_and_takes_nothing_from_its_successor(tmp_path):
    lease = LinkLease(tmp_path, "name")
    lease.try_take()
    (tmp_path / ".name.lease-1").unlink()
    held_elsewhere(tmp_path)
    assert not lease.is_held()
    lease.release()
    assert [path.name for path in tmp_path.iterdir()] == [".name.lease-1"]


def test_it_beats_while_it_is_held_and_leaves_nothing(tmp_path):
    lease = LinkLease(tmp_path, "name")
    lease.try_take()
    with beating(lease):
        until_s = time.monotonic() + 20
        while len(traces(tmp_path, "name")) < 2 and time.monotonic() < until_s:
            time.sleep(0.001)
        assert {token for _, token in traces(tmp_path, "name")} == {lease.token}
        assert len(traces(tmp_path, "name")) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", link_lease.NO_LINKS)
def test_without_links_it_excludes_nobody_and_says_so(tmp_path, monkeypatch, number):
    def refused(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "symlink", refused)
    first, second = LinkLease(tmp_path, "name"), LinkLease(tmp_path, "name")
    first.try_take()
    second.try_take()
    assert not first.excludes and first.is_held() and second.is_held()


def test_where_the_kernel_names_no_boot_nothing_is_known_to_be_dead(monkeypatch):
    """All machines' first process namespaces have one number: a holder elsewhere would have been taken for dead."""
    here.cache_clear()
    monkeypatch.setattr(processes, "boot_id", lambda: "")
    try:
        assert here() == "" and not Token(here(), 2**22 + 1, 1, "aa").is_dead
    finally:
        here.cache_clear()
