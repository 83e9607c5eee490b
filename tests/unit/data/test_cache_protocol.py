"""The cache's protocol under every interleaving that chance finds: hosts that prepare at once, die and are halted at
any system call. Each host is a thread that a scheduler lets go from one call to the next; time is virtual."""

import contextlib
import itertools
import os
import random
import threading
from types import SimpleNamespace

import pytest

from muster.data import cache
from muster.storage.store import link_lease

FINGERPRINT = "0123456789abcdef" * 2
FILES = ("a.json", "train/b.npy", "train/c.npy")
CALLS = ("symlink", "unlink", "rmdir", "mkdir", "rename", "readlink", "listdir", "scandir", "stat", "lstat", "open")
REAL = {name: getattr(os, name) for name in CALLS}


class Killed(BaseException):
    """The process is gone: none of its calls is carried out any more."""


class Host(threading.Thread):
    """A process of a machine; several may share a machine."""

    def __init__(self, world, number, machine, target):
        super().__init__(daemon=True)
        self.world, self.number, self.machine, self.target = world, number, machine, target
        self.go, self.stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.killed = self.over = False
        self.wake_s, self.calls, self.lease, self.result = 0.0, 0, None, None

    def run(self):
        self.world.local.host = self
        try:
            self.go.acquire()
            self.result = self.target(self)
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 (the test looks at it)
            self.result = error
        self.over = True
        self.stopped.release()

    def step(self):
        """Before each call: wait until it is this host's turn."""
        if not self.killed:
            self.stopped.release()
            self.go.acquire()
        if self.killed:
            raise Killed
        self.calls += 1


class World:
    def __init__(self, monkeypatch, folder, seed, has_scratch):
        self.has_scratch = has_scratch
        self.local, self.hosts, self.now_s, self.beat_s = threading.local(), [], 0.0, 0.0
        self.chance, self.folder, self.builds = random.Random(seed), folder, []
        for name in CALLS:
            monkeypatch.setattr(os, name, self.stepping(REAL[name]))
        monkeypatch.setattr(link_lease, "here", lambda: self.local.host.machine)
        monkeypatch.setattr(
            link_lease, "processes",
            SimpleNamespace(look=lambda pid: SimpleNamespace(start_ticks=self.local.host.number), lives=self.lives),
        )  # fmt: skip
        monkeypatch.setattr(
            link_lease, "time",
            SimpleNamespace(
                monotonic=lambda: self.now_s, monotonic_ns=lambda: int(self.now_s * 1e9), sleep=self.sleep,
                time=lambda: 0,
            ),
        )  # fmt: skip
        monkeypatch.setattr(cache, "beating", self.beating)

    def stepping(self, real):
        def call(*args, **kwargs):
            host = getattr(self.local, "host", None)
            if host is not None:
                host.step()
            return real(*args, **kwargs)

        return call

    def lives(self, pid, number):
        return not (self.hosts[number].killed or self.hosts[number].over)

    def sleep(self, seconds):
        self.local.host.wake_s = self.now_s + seconds
        self.local.host.step()

    @contextlib.contextmanager
    def beating(self, lease):
        host = self.local.host
        host.lease = lease
        try:
            yield
        finally:
            host.lease = None
            lease.release()

    def start(self, machine):
        host = Host(self, len(self.hosts), machine, self.prepare)
        self.hosts.append(host)
        host.start()
        return host

    def prepare(self, host):
        def build(data, kept):
            self.builds.append(host.number)
            for name in FILES:
                (data / name).parent.mkdir(exist_ok=True)
                with open(data / name, "w") as file:
                    host.step()
                    file.write(name)
            (kept / "tokens").write_text("tokens")

        scratch = self.folder.parent.with_suffix(f".{host.machine}") if self.has_scratch else None
        built = cache.build_once(self.folder, build, lambda *_: None, scratch=scratch)
        place = cache.published(self.folder)
        assert place is not None and cache.damage(place) is None
        return built

    def turn(self, host):
        """Let ``host`` do one call."""
        self.now_s = max(self.now_s + 0.001, host.wake_s)
        host.go.release()
        host.stopped.acquire()

    def beat(self):
        """Holders that live and run show it each five seconds."""
        if self.now_s - self.beat_s < link_lease.BEAT_S:
            return
        self.beat_s = self.now_s
        for host in self.hosts:
            if host.lease is not None and not host.killed and host.wake_s < self.now_s + 60:
                host.lease.renew()

    def run(self, each=lambda: None):
        """Until all are over. ``each`` is called after every call of every host."""
        while running := [host for host in self.hosts if not host.over]:
            awake = [host for host in running if host.wake_s <= self.now_s]
            self.turn(self.chance.choice(awake) if awake else min(running, key=lambda host: host.wake_s))
            self.beat()
            each()

    def kill(self, host):
        host.killed, host.wake_s = True, 0.0

    def is_whole(self):
        """What is published is whole, at any moment."""
        place = self.folder.parent / os.readlink(self.folder) if self.folder.is_symlink() else None
        if place is not None and (place / "sums.json").exists():
            assert cache.damage(place) is None and all((place / name).exists() for name in FILES)
        return place

    def left(self):
        return sorted(os.listdir(self.folder.parent))


@pytest.fixture
def world(monkeypatch, tmp_path):
    """``world(seed)``: a cache of its own. With scratch folders each machine has one, as on a mounted bucket."""
    with contextlib.ExitStack() as held:

        def make(seed, has_scratch=None):
            patch = held.enter_context(monkeypatch.context())
            folder = tmp_path / f"cache-{seed}" / FINGERPRINT
            return World(patch, folder, seed, seed % 2 if has_scratch is None else has_scratch)

        yield make


MACHINES = ("one", "two", "three", "three")
SEEDS = range(40)


def nothing_else_is_left(world):
    place = world.is_whole()
    assert place is not None and world.left() == sorted([FINGERPRINT, place.name]), world.left()


@pytest.mark.parametrize("seed", SEEDS)
def test_hosts_that_start_at_once_build_once_and_the_others_wait(world, seed):
    here = world(seed)
    hosts = [here.start(machine) for machine in MACHINES[: 2 + seed % 3]]

    def whole():
        place = here.is_whole()
        assert place is None or (place / "sums.json").exists(), "a name without data"

    here.run(whole)
    assert sorted(host.result for host in hosts) == [False] * (len(hosts) - 1) + [True], [host.result for host in hosts]
    assert len(here.builds) == 1
    nothing_else_is_left(here)


def test_a_host_killed_at_each_call_leaves_the_next_start_right_and_nothing_over(world):
    for machine, has_scratch in (("one", False), ("two", True)):
        calls = world(f"count-{machine}", has_scratch)
        whole = calls.start("one")
        calls.run()
        assert whole.calls > 60
        for number in range(1, whole.calls + 1):
            here = world(f"{machine}-{number}", has_scratch)
            victim = here.start("one")
            while victim.calls < number and not victim.over:
                here.turn(victim)
                here.is_whole()
            here.kill(victim)
            here.run()
            after = here.start(machine)
            here.run(here.is_whole)
            assert after.result in (True, False), (number, after.result)
            if here.left() != sorted([FINGERPRINT, here.is_whole().name]):
                raise AssertionError((number, machine, here.left()))


@pytest.mark.parametrize("seed", SEEDS)
def test_hosts_killed_and_halted_at_any_call_harm_nobody(world, seed):
    """Some for longer than a lease lasts: another host has taken it when they go on."""
    here = world(seed)
    hosts = [here.start(machine) for machine in MACHINES]
    doomed = {here.chance.choice(hosts): here.chance.randrange(1, 90) for _ in range(2)}
    halted = {here.chance.choice(hosts): here.chance.randrange(1, 90) for _ in range(2)}

    def strike():
        here.is_whole()
        for host, call in list(doomed.items()):
            if host.calls >= call and not host.over:
                here.kill(host)
        for host, call in list(halted.items()):
            if host.calls >= call:
                host.wake_s = here.now_s + here.chance.choice((1, 100, 300))
                del halted[host]

    here.run(strike)
    for host in hosts:
        assert host.killed or host.result in (True, False), (host.number, host.result)
    here.start("three")
    here.run(here.is_whole)
    assert here.hosts[-1].result in (True, False), here.hosts[-1].result
    assert here.is_whole() is not None
    again = here.start("four")
    here.run()
    assert again.result is False


def test_a_host_killed_at_each_call_of_a_withdrawal_leaves_whole_data_or_none(world):
    for number in itertools.count(1):
        here = world(f"withdrawn-{number}", False)
        here.start("one")
        here.run()
        place = cache.published(here.folder)
        victim = Host(here, 1, "two", lambda host: cache.discard(here.folder, place, 0))  # noqa: B023 (of this round)
        here.hosts.append(victim)
        victim.start()
        while victim.calls < number and not victim.over:
            here.turn(victim)
            here.is_whole()
        was_over = victim.over
        here.kill(victim)
        here.run()
        here.is_whole()
        after = here.start("one")
        here.run(here.is_whole)
        assert after.result in (True, False), (number, after.result)
        if was_over:
            assert number > 15 and after.result is True
            break


def test_who_has_lost_the_lease_does_not_publish(tmp_path):
    """A successor may be removing what this one made."""
    folder, builds = tmp_path / FINGERPRINT, []

    def build(data, kept):
        builds.append(data)
        if len(builds) == 1:
            (tmp_path / f".{FINGERPRINT}.lease-1").unlink()
            os.symlink(f"{link_lease.here()}-4194999-1-ab:1:host", tmp_path / f".{FINGERPRINT}.lease-2")

    assert cache.build_once(folder, build, lambda *_: None)
    assert len(builds) == 2 and cache.published(folder) == builds[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.name, builds[1].name]


def test_what_a_halted_host_may_still_write_to_is_copied_and_a_dead_ones_is_renamed(tmp_path):
    lease = link_lease.LinkLease(tmp_path, FINGERPRINT)
    for token, is_copied in (("elsewhere-7-1-ab", True), (f"{link_lease.here()}-4194999-1-ab", False)):
        old = tmp_path / f".work-{FINGERPRINT}.{token}"
        (old / "kept").mkdir(parents=True)
        (old / "kept" / "spool.ids").write_bytes(b"tokens")
        before = (old / "kept" / "spool.ids").stat().st_ino
        work = tmp_path / f".work-{FINGERPRINT}.{lease.token}"
        work.mkdir()
        kept = cache._resumed(tmp_path / FINGERPRINT, work, lease)
        assert (kept / "spool.ids").read_bytes() == b"tokens" and not old.exists()
        assert ((kept / "spool.ids").stat().st_ino != before) == is_copied
        cache._remove(work)


@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_data_are_withdrawn_once_whoever_finds_it(world, seed):
    here = world(seed)
    here.start("one")
    here.run()
    place = cache.published(here.folder)
    (place / "a.json").write_text("damaged")
    inode = place.stat().st_ino

    def find(host):
        cache.discard(here.folder, place, inode)
        return here.prepare(host)

    for machine in MACHINES:
        host = Host(here, len(here.hosts), machine, find)
        here.hosts.append(host)
        host.start()
    here.run()
    assert sum(host.result is True for host in here.hosts[1:]) == 1, [host.result for host in here.hosts]
    nothing_else_is_left(here)
