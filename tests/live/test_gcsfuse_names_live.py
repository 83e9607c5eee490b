"""The double of gcsfuse: which file a name is, in which pod, and for how long."""

import errno
import hashlib
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from gcsfuse_mounts import FRESH, NEEDED, fails, objects, opened

pytest_plugins = ["gcsfuse_mounts"]
pytestmark = NEEDED


# ---------------------------------------------------------------- identity


def test_numbers_change_with_every_change_from_elsewhere(two):
    one, other = two
    (one / "f").write_bytes(b"1")
    number = os.stat(one / "f").st_ino
    assert os.stat(other / "f").st_ino != number  # equal objects, two pods
    (one / "f").write_bytes(b"22")
    assert os.stat(one / "f").st_ino == number  # its own change
    (other / "f").write_bytes(b"333")
    assert os.stat(one / "f").st_ino != number
    number = os.stat(one / "f").st_ino
    os.utime(other / "f")  # not a byte of it, the metageneration
    assert os.stat(one / "f").st_ino != number


def test_a_descriptor_of_a_replaced_object_is_stale(two):
    one, other = two
    (one / "f").write_bytes(b"old")
    with opened(one / "f", os.O_RDONLY) as fd, opened(one / "f", os.O_RDWR) as dirty:
        os.pwrite(dirty, b"X", 0)
        (other / "f").write_bytes(b"new")
        assert os.fstat(fd).st_nlink == 0
        with fails(errno.ESTALE):
            os.fsync(dirty)
        assert (one / "f").read_bytes() == b"new"  # a new look-up is a new inode
    with opened(one / "f", os.O_RDONLY) as fd:
        os.unlink(other / "f")
        assert os.read(fd, 10) == b"new"  # pages that were read stay
    (other / "g").write_bytes(b"x")
    with opened(one / "g", os.O_RDONLY) as fd:
        os.unlink(other / "g")
        with fails(errno.ESTALE):
            os.read(fd, 10)


def test_a_rename_is_one_move_and_a_new_inode(two, fake):
    one, other = two
    (other / "to").write_bytes(b"old")
    (one / "from").write_bytes(b"new")
    before = os.stat(one / "from")
    fake.bill.anew()
    with opened(one / "from", os.O_RDONLY) as fd:
        os.rename(one / "from", one / "to")
        assert fake.bill.operations["objects.move"] == 1 and "objects.insert" not in fake.bill.operations
        after = os.stat(one / "to")
        assert after.st_ino != before.st_ino and after.st_mtime_ns == before.st_mtime_ns
        with fails(errno.ESTALE):
            os.read(fd, 10)
    assert (other / "to").read_bytes() == b"new" and not (other / "from").exists()
    with opened(one / "dirty", os.O_CREAT | os.O_WRONLY) as fd:
        os.write(fd, b"flushed by the rename")
        os.rename(one / "dirty", one / "clean")
        assert (other / "clean").read_bytes() == b"flushed by the rename"
        with fails(errno.ESTALE):
            os.write(fd, b"!")
    with opened(one / "clean", os.O_WRONLY) as fd:
        os.write(fd, b"F")
        os.rename(other / "clean", other / "away")
        with fails(errno.ESTALE):
            os.close(fd)


def test_a_rename_in_two_steps_where_it_is_asked_for(mounted, fake):
    one = mounted("a", "enable-atomic-rename-object=false")
    (one / "from").write_bytes(b"x")
    fake.bill.anew()
    os.rename(one / "from", one / "to")
    assert fake.bill.operations["objects.copy"] == fake.bill.operations["objects.delete"] == 1


def test_an_open_file_that_is_unlinked(two, fake):
    one, other = two
    with opened(one / "f", os.O_CREAT | os.O_WRONLY) as fd:
        os.write(fd, b"x")
        os.unlink(one / "f")
        os.close(fd)  # success
    assert objects(fake) == {} and os.listdir(one) == []
    (one / "f").write_bytes(b"x")
    with opened(other / "f", os.O_RDWR) as fd:
        os.unlink(one / "f")
        with fails(errno.ESTALE):
            os.read(fd, 1)
    with fails(errno.ENOENT):
        os.unlink(one / "f")


# ---------------------------------------------------------------- folders


def test_folders_are_objects_of_their_own(two, fake):
    one, other = two
    os.mkdir(one / "d")
    with fails(errno.EEXIST):
        os.mkdir(other / "d")
    assert objects(fake) == {"d/": b""}
    with opened(one / "d" / "f", os.O_CREAT | os.O_WRONLY):
        with fails(errno.ENOTEMPTY):
            os.rmdir(one / "d")
    with fails(errno.ENOTEMPTY):
        os.rmdir(other / "d")
    os.unlink(other / "d" / "f")
    os.rmdir(other / "d")
    assert objects(fake) == {} and os.listdir(one) == []
    os.symlink("there", one / "s")
    with fails(errno.EEXIST):
        os.symlink("elsewhere", one / "s")
    assert os.readlink(other / "s") == "there"


def test_folders_without_an_object_are_seen_where_that_is_asked_for(two, mounted, fake):
    (two[0] / "d").mkdir()
    (two[0] / "d" / "f").write_bytes(b"x")
    (two[0] / "d" / "g").write_bytes(b"x")
    del fake.buckets["bucket"]["d/"]
    assert os.listdir(two[1]) == [] and not (two[1] / "d" / "f").exists()
    implicit = mounted("implicit", "implicit-dirs", *FRESH)
    assert os.listdir(implicit) == ["d"] and (implicit / "d" / "f").read_bytes() == b"x"
    os.unlink(implicit / "d" / "f")
    os.unlink(implicit / "d" / "g")
    assert not (implicit / "d").exists()  # gone with its last file


def test_a_file_beside_a_folder_of_its_name(two, fake):
    (two[0] / "d").mkdir()
    fake.write("bucket", "d", b"file", {})
    assert sorted(os.listdir(two[1])) == ["d", "d\n"]
    assert (two[1] / "d\n").read_bytes() == b"file" and (two[1] / "d").is_dir()


def test_a_folder_is_renamed_object_by_object_up_to_a_limit(mounted, fake):
    one = mounted("a")
    (one / "d").mkdir()
    os.rename(one / "d", one / "empty")
    (one / "empty" / "f").write_bytes(b"x")
    with fails(errno.EMFILE):
        os.rename(one / "empty", one / "e")
    able = mounted("able", "rename-dir-limit=2", *FRESH)
    (able / "full").mkdir()
    (able / "full" / "f").write_bytes(b"x")
    with fails(errno.ENOTEMPTY):
        os.rename(able / "empty", able / "full")
    with opened(able / "empty" / "new", os.O_CREAT | os.O_WRONLY):
        with fails(errno.ENOTSUP):
            os.rename(able / "empty", able / "e")
    os.rename(able / "empty", able / "e")
    assert set(objects(fake)) == {"full/", "full/f", "e/", "e/f", "e/new"}
    (able / "e" / "third").write_bytes(b"x")
    with fails(errno.EMFILE):
        os.rename(able / "e", able / "d")
    big = mounted("big", machine="a3-highgpu-8g")
    os.rename(big / "e", big / "d")


# ---------------------------------------------------------------- what is remembered


def test_what_was_missing_stays_missing_for_a_while(mounted):
    one, other = mounted("a", "metadata-cache-negative-ttl-secs=1"), mounted("b")
    assert not (one / "f").exists()
    (other / "f").write_bytes(b"x")
    assert not (one / "f").exists()
    time.sleep(1.1)
    assert (one / "f").read_bytes() == b"x"


def test_what_was_there_stays_there_on_a_fast_machine(mounted, two):
    fast = mounted("fast", machine="a3-ultragpu-8g")
    (two[0] / "f").write_bytes(b"old")
    (two[0] / "gone").write_bytes(b"x")
    assert os.stat(fast / "f").st_size == 3 and (fast / "gone").exists()
    (two[0] / "f").write_bytes(b"newer")
    os.unlink(two[0] / "gone")
    time.sleep(0.2)
    assert os.stat(fast / "f").st_size == 3 and (fast / "gone").exists()
    with fails(errno.ESTALE):
        (fast / "f").read_bytes()  # a fresh open, of an inode whose generation has gone
    assert not (fast / "none").exists()
    (two[0] / "none").write_bytes(b"x")
    assert (fast / "none").exists()  # nothing that is missing is remembered there


def test_old_versions_ignore_a_config_file_on_fast_machines(mounted, two):
    (two[0] / "f").write_bytes(b"1")
    places = {
        "config": mounted("config", "metadata-cache:ttl-secs:0", machine="a3-megagpu-8g", version="3.5.3"),
        "flag": mounted("flag", "metadata-cache-ttl-secs=0", machine="a3-megagpu-8g", version="3.5.3"),
        "later": mounted("later", "metadata-cache:ttl-secs:0", machine="a3-megagpu-8g", version="3.6.0"),
        "slow": mounted("slow", "metadata-cache:ttl-secs:0", machine="e2-standard-8", version="3.5.3"),
    }
    for place in places.values():
        assert os.stat(place / "f").st_size == 1
    (two[0] / "f").write_bytes(b"22")
    seen = {name: os.stat(place / "f").st_size for name, place in places.items()}
    assert seen == {"config": 1, "flag": 2, "later": 2, "slow": 2}


def test_a_kept_listing_is_old(mounted, two):
    kept = mounted("kept", "kernel-list-cache-ttl-secs=-1", *FRESH)
    (two[0] / "f").write_bytes(b"x")
    assert os.listdir(kept) == ["f"]
    (two[0] / "g").write_bytes(b"x")
    assert os.listdir(kept) == ["f"] and os.listdir(two[1]) == ["f", "g"]
    assert (kept / "g").exists()


def test_an_open_may_ask_the_bucket(mounted, two):
    careful = mounted("careful", "strong-consistency-on-open")
    (two[0] / "f").write_bytes(b"old")
    assert (careful / "f").exists()
    (two[0] / "f").write_bytes(b"newer")
    # The mount answers ESTALE; the kernel then looks the name up once more, and finds the new file.
    assert (careful / "f").read_bytes() == b"newer"


def test_pages_and_maps_are_read(two):
    one, other = two
    data = os.urandom(5 << 20)
    (one / "f").write_bytes(data)
    # In a process of its own: a page fault holds Python's lock, which the played bucket needs to answer it.
    program = "import hashlib, mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, access=1)\n"
    program += "print(hashlib.sha256(m[:]).hexdigest())"
    argv = [sys.executable, "-c", program, str(other / "f")]
    said = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout.strip() == hashlib.sha256(data).hexdigest()
    with opened(one / "f", os.O_RDONLY) as fd:
        assert os.pread(fd, 1000, 3_000_000) == data[3_000_000:3_001_000]


# ---------------------------------------------------------------- all together


def change(chance, folder, names):
    """One random change of a random file, the same for the same ``chance``."""
    name, data = chance.choice(names), chance.randbytes(chance.choice([0, 1, 100, 5000, 300_000]))
    path, what, at = folder / name, chance.randrange(6), chance.randrange(6000)
    if what == 0:
        path.write_bytes(data)
    elif what == 1:
        with open(path, "ab") as file:
            file.write(data)
            file.write(b"more")
    elif what == 2 and path.exists():
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(data)
            file.truncate(chance.choice([at, at + 10]))
            file.seek(0)
            assert len(file.read(5)) <= 5
            file.write(b"x")
    elif what == 3 and path.exists():
        os.rename(path, folder / chance.choice(names))
    elif what == 4 and path.exists():
        path.unlink()
    elif what == 5 and path.exists():
        os.truncate(path, at)
        with open(path, "r+b") as file:  # a truncated file is uploaded by the next close of a descriptor
            os.fsync(file.fileno())


def test_in_one_pod_it_is_a_file_system_like_any_other(mounted, two, tmp_path):
    one, plain = mounted("one"), tmp_path / "plain"
    names = ["a", "b", "d/a", "d/c", "d/e/a"]
    for folder in (one, plain):
        (folder / "d" / "e").mkdir(parents=True)
    chances = [random.Random(20260823) for _ in range(2)]
    for _ in range(150):
        for chance, folder in zip(chances, (one, plain), strict=True):
            change(chance, folder, names)
        contents = [{name: (folder / name).read_bytes() for name in names if (folder / name).exists()}
                    for folder in (one, plain)]  # fmt: skip
        assert contents[0] == contents[1]
    assert {name: (two[0] / name).read_bytes() for name in names if (two[0] / name).exists()} == contents[1]


def test_many_threads_at_once(mounted, two):
    one = mounted("one")

    def work(number):
        for turn in range(10):
            path = one / f"{number}-{turn}"
            path.write_bytes(bytes([number]) * 10_000)
            os.replace(path, one / f"{number}")
            assert (one / f"{number}").read_bytes() == bytes([number]) * 10_000
            assert os.listdir(one)

    with ThreadPoolExecutor(12) as threads:
        for each in [threads.submit(work, number) for number in range(12)]:
            each.result(60)
    assert sorted(os.listdir(two[0]), key=int) == [str(number) for number in range(12)]
