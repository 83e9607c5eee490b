"""The double of gcsfuse does what the real one does, system call by system call, on two mounts of one bucket: calls
that are not there, writing, waiting.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fakes.gcs import Faults, GcsFake, Latency
from gcsfuse_mounts import FRESH, NEEDED, fails, objects, opened

pytest_plugins = ["gcsfuse_mounts"]
pytestmark = NEEDED


# ---------------------------------------------------------------- calls that are not there, or do nothing


def test_what_is_not_implemented(two, mounted):
    one, _ = two
    (one / "f").write_text("x")
    with pytest.raises(OSError) as caught:  # ENOSYS on the wire; kernels say EPERM, some the first time already
        os.link(one / "f", one / "g")
    assert caught.value.errno in (errno.ENOSYS, errno.EPERM)
    for call in (
        lambda: os.getxattr(one / "f", "user.a"),
        lambda: os.setxattr(one / "f", "user.a", b"b"),
        lambda: os.listxattr(one / "f"),
        lambda: os.mkfifo(one / "fifo"),
        lambda: socket.socket(socket.AF_UNIX).bind(str(one / "s")),
    ):
        with fails(errno.ENOTSUP):
            call()
    libc = ctypes.CDLL(None, use_errno=True)
    (one / "h").write_text("x")
    for flag, to in ((1, "g"), (2, "h")):  # NOREPLACE, EXCHANGE
        names = (-100, str(one / "f").encode(), -100, str(one / to).encode())
        assert libc.renameat2(*names, flag) == -1 and ctypes.get_errno() == errno.EINVAL
    with opened(one / "f", os.O_RDWR) as fd:
        assert libc.fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(100)) == -1
        assert ctypes.get_errno() == errno.EOPNOTSUPP
        os.posix_fallocate(fd, 0, 100)  # the C library writes zeros instead
    assert (one / "f").stat().st_size == 100
    other = mounted("eperm", link_errno=errno.EPERM)
    with fails(errno.EPERM):
        os.link(other / "f", other / "g")


def test_modes_and_owners_are_the_mounts(two, mounted):
    one, _ = two
    with opened(one / "f", os.O_CREAT | os.O_WRONLY, 0o600):
        pass
    os.mkdir(one / "d", 0o700)
    for change in (lambda: os.chmod(one / "f", 0o600), lambda: os.chown(one / "f", 1000, 1000)):
        change()  # said to be done
    assert stat.S_IMODE(os.stat(one / "f").st_mode) == 0o644
    assert stat.S_IMODE(os.stat(one / "d").st_mode) == 0o755
    assert os.stat(one / "f").st_uid == 0
    private = mounted("private", "file-mode=600", "dir-mode=700", "uid=1000", "gid=1001")
    found = os.stat(private / "f")
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o600, 1000, 1001)
    assert stat.S_IMODE(os.stat(private / "d").st_mode) == 0o700
    # The kernel enforces them: who is not root writes nothing.
    program = f"import os; os.setuid(65534); open({str(one / 'g')!r}, 'w')"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "PermissionError" in said.stderr


def test_it_is_never_full(two):
    found = os.statvfs(two[0])
    assert found.f_bavail * found.f_frsize > 1 << 49 and found.f_favail > 1 << 40


def test_locks_hold_in_one_mount_only(two):
    one, other = two
    (one / "lock").write_bytes(b"")
    with opened(one / "lock", os.O_RDWR) as first, opened(one / "lock", os.O_RDWR) as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(BlockingIOError):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with opened(other / "lock", os.O_RDWR) as third:
            fcntl.flock(third, fcntl.LOCK_EX | fcntl.LOCK_NB)  # another pod: nobody objects


def test_inotify_tells_nothing_of_other_pods(two):
    one, other = two
    (one / "d").mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_NONBLOCK)
    try:
        assert libc.inotify_add_watch(watch, str(one / "d").encode(), 0xFFF) >= 0
        (other / "d" / "f").write_text("x")
        with pytest.raises(BlockingIOError):
            os.read(watch, 4096)
    finally:
        os.close(watch)


# ---------------------------------------------------------------- writing


def test_a_new_file_is_nowhere_until_it_is_closed(two, fake):
    one, other = two
    with opened(one / "f", os.O_CREAT | os.O_WRONLY) as fd:
        os.write(fd, b"one")
        os.fsync(fd)  # success, and nothing for anybody
        assert objects(fake) == {} and os.listdir(other) == []
        assert os.listdir(one) == ["f"] and os.stat(one / "f").st_size == 3  # its own mount sees it
        copy = os.dup(fd)
        os.close(copy)  # the close of any descriptor, a forked child's too
        assert (other / "f").read_bytes() == b"one"
        os.write(fd, b"two")
        os.fsync(fd)  # staged from now on: each fsync is a whole new object
        assert (other / "f").read_bytes() == b"onetwo"


def test_reading_a_file_that_is_written_finishes_its_object(two):
    one, other = two
    with opened(one / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND) as fd:
        os.write(fd, b"first\n")
        assert not (other / "log").exists()
        assert (one / "log").read_bytes() == b"first\n"
        assert (other / "log").read_bytes() == b"first\n"
        os.write(fd, b"second\n")
        assert (other / "log").read_bytes() == b"first\n"
        os.fsync(fd)
        assert (other / "log").read_bytes() == b"first\nsecond\n"


def test_out_of_order_writes_finish_the_object_too(two):
    one, other = two
    with opened(one / "f", os.O_CREAT | os.O_WRONLY) as fd:
        os.write(fd, b"abcdef")
        os.pwrite(fd, b"X", 0)
        assert (other / "f").read_bytes() == b"abcdef"
    assert (other / "f").read_bytes() == b"Xbcdef"
    with opened(one / "g", os.O_CREAT | os.O_WRONLY) as fd:
        os.write(fd, b"abcdef")
        os.ftruncate(fd, 8)
        assert not (other / "g").exists()
        os.ftruncate(fd, 3)
        assert (other / "g").read_bytes() == b"abcdef\0\0"
    assert (other / "g").read_bytes() == b"abc"


def test_only_so_many_files_are_streamed_at_once(mounted, fake):
    one = mounted("a")
    with contextlib.ExitStack() as held:
        fds = [held.enter_context(opened(one / str(n), os.O_CREAT | os.O_WRONLY)) for n in range(5)]
        for fd in fds:
            os.write(fd, b"x")
            os.fsync(fd)
        assert objects(fake) == {"4": b"x"}  # the fifth is staged, and an fsync is one
    assert len(objects(fake)) == 5


def test_a_dead_mount_loses_what_was_open_and_never_comes_back(two, mounted, fake):
    one, other = two
    with opened(one / "f", os.O_CREAT | os.O_WRONLY) as fd:
        os.write(fd, b"x" * 100_000)
        os.fsync(fd)
        mounted.servers["a"].die()
        with fails(errno.ENOTCONN):
            os.write(fd, b"y")
        with fails(errno.ENOTCONN):
            os.listdir(one)
    with fails(errno.ENOTCONN):
        os.stat(one / "f")
    assert objects(fake) == {} and not (other / "f").exists()


def test_exclusive_creation_is_exclusive_in_one_mount_only(two):
    one, other = two
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    first, second = os.open(one / "f", flags), os.open(other / "f", flags)
    with fails(errno.EEXIST):
        os.open(one / "f", flags)
    os.write(first, b"first")
    os.write(second, b"second")
    os.close(second)
    with fails(errno.ESTALE):
        os.close(first)  # and what it wrote is gone, here too
    assert (one / "f").read_bytes() == b"second"


def test_a_symbolic_link_has_one_maker_among_mounts(two, fake, monkeypatch):
    """One insert, if nothing has the name; what is asked again after a lost answer finds its own link."""
    for number in range(5):
        with ThreadPoolExecutor(4) as pool:
            names = [f"{number}-{maker}" for maker in range(4)]
            tries = [pool.submit(os.symlink, name, two[n % 2] / f"link-{number}") for n, name in enumerate(names)]
            errors = [each.exception() for each in tries]
        made = [name for name, error in zip(names, errors, strict=True) if error is None]
        assert len(made) == 1 and all(isinstance(error, FileExistsError) for error in errors if error is not None)
        assert {os.readlink(place / f"link-{number}") for place in two} == set(made)
    draw, inserts = fake.weather.draw, []

    def lose_the_first_insert():
        inserts.extend([1] if fake.requests[-1][0] == "POST" else [])
        return *draw()[:2], fake.requests[-1][0] == "POST" and len(inserts) == 1

    monkeypatch.setattr(fake.weather, "draw", lose_the_first_insert)
    with fails(errno.EEXIST):
        os.symlink("mine", two[0] / "lost")
    assert os.readlink(two[0] / "lost") == os.readlink(two[1] / "lost") == "mine"


def test_others_see_half_of_a_folder_that_is_being_renamed(mounted, fake):
    """One move for each file, the new name first: it says nothing of whether all is there."""
    one, other = (mounted(name, "rename-dir-limit=100", *FRESH) for name in "ab")
    (one / "old").mkdir()
    for number in range(20):
        (one / "old" / str(number)).write_bytes(b"x")
    fake.weather.latency = Latency(0.02, 0.03)
    with ThreadPoolExecutor(1) as pool:
        renamed = pool.submit(os.rename, one / "old", one / "new")
        seen = set()
        while not renamed.done():
            with contextlib.suppress(FileNotFoundError):
                seen.add(len(os.listdir(other / "new")))
        renamed.result()
    assert seen & set(range(20)) and len(os.listdir(other / "new")) == 20


def test_who_appends_second_is_stale(two, fake):
    one, _ = two
    (one / "f").write_bytes(b"0")
    first, second = (os.open(place / "f", os.O_WRONLY | os.O_APPEND) for place in two)
    os.write(first, b"1")
    os.write(second, b"2")
    os.fsync(first)
    with fails(errno.ESTALE):
        os.fsync(second)
    with fails(errno.ESTALE):
        os.close(second)
    os.close(first)
    assert objects(fake)["f"] == b"01"


def test_a_long_file_grows_by_composition(two, fake):
    one, other = two
    start = os.urandom(3 << 20)
    (one / "f").write_bytes(start)
    fake.bill.anew()
    with open(one / "f", "ab") as file:
        file.write(b"tail")
    assert fake.bill.operations["objects.compose"] == 1 and list(objects(fake)) == ["f"]
    assert (other / "f").read_bytes() == start + b"tail"


def test_a_time_is_one_more_change_of_the_object(two, fake):
    one, other = two
    (one / "f").write_bytes(b"x")
    held = os.open(other / "f", os.O_RDONLY)
    before = fake.buckets["bucket"]["f"]
    generation, metageneration = before.generation, before.metageneration
    os.utime(one / "f", ns=(1, 1_700_000_000_123_456_789))
    assert (before.generation, before.metageneration) == (generation, metageneration + 1)
    found = os.stat(other / "f")
    assert found.st_mtime_ns == found.st_atime_ns == found.st_ctime_ns == 1_700_000_000_123_456_789
    os.close(held)
    with opened(one / "new", os.O_CREAT | os.O_WRONLY) as fd:  # of an unfinished file it costs nothing
        os.utime(fd, ns=(1, 1_600_000_000_000_000_007))
    assert os.stat(other / "new").st_mtime_ns == 1_600_000_000_000_000_007
    assert fake.buckets["bucket"]["new"].metageneration == 1


# ---------------------------------------------------------------- weather


def test_calls_wait_until_it_serves(mounted):
    began = time.monotonic()
    late = mounted("late", hang_s=1.5)
    assert os.listdir(late) == [] and time.monotonic() - began > 1.4


def test_refusals_block_and_never_fail(tmp_path, mounted):
    weather = GcsFake.unkind(latency=Latency(0.005, 0.02), faults=Faults(unavailable=0.2, lost=0), seed=3)
    with weather as fake:
        one = mounted("a", *FRESH, url=fake.url)
        began = time.monotonic()
        for number in range(3):
            (one / "f").write_text(str(number))  # one change a second of one name
        assert time.monotonic() - began > 1.9
        assert fake.bill.classes["refused"] >= 2
        assert objects(fake) == {"f": b"2"}


def test_a_refused_bucket_is_eacces(mounted, fake):
    one = mounted("a")
    fake.denied.add("bucket")
    with fails(errno.EACCES):
        os.listdir(one)
    with fails(errno.EACCES):
        os.stat(one / "f")
    fake.denied.clear()
