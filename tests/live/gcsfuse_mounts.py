"""Mounts of a bucket for tests of the double of gcsfuse: fixtures (``pytest_plugins = ["gcsfuse_mounts"]``), helpers.

A test process must not touch the pages of a mapped file on a mount: the fault holds Python's lock, which the played
bucket in the same process needs to answer it.
"""

import contextlib
import errno
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "kube"))
from gcsfuse import Mount, why_not

NEEDED = [
    pytest.mark.live,
    pytest.mark.timeout(120),
    pytest.mark.skipif(why_not() is not None, reason=f"no file system can be mounted: {why_not()}"),
]
FRESH = ["metadata-cache-ttl-secs=0"]


@pytest.fixture
def fake():
    """A kind bucket: these tests are about system calls."""
    pytest.importorskip("google_crc32c", reason="comes with the gcs extra")
    from fakes.gcs import GcsFake

    with GcsFake() as found:
        yield found


@pytest.fixture
def mounted(fake, tmp_path):
    """``mounted("a", option, ..., machine=...)``: a pod's mount, by name. Afterwards nothing of it is left."""
    held, log = contextlib.ExitStack(), tmp_path / "log"
    with held:

        def one(name, *options, url=fake.url, **more):
            mount = Mount(url, "bucket", tmp_path / name, options=options, log=log, **more)
            place = held.enter_context(mount)
            one.servers[name] = mount
            return place

        one.servers = {}
        yield one
    said = log.read_text() if log.exists() else ""
    assert "Traceback" not in said, said
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    assert all(mount.process.poll() is not None for mount in one.servers.values())


@pytest.fixture
def two(mounted):
    """Two pods that ask the bucket each time."""
    return mounted("a", *FRESH), mounted("b", *FRESH)


@contextlib.contextmanager
def fails(code):
    with pytest.raises(OSError) as caught:
        yield
    assert errno.errorcode[caught.value.errno] == errno.errorcode[code]


@contextlib.contextmanager
def opened(path, flags, mode=0o644):
    """The descriptor is the test's to close; a failure of that is no news."""
    fd = os.open(path, flags, mode)
    try:
        yield fd
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)


def objects(fake):
    return {name: one.data for name, one in fake.buckets["bucket"].items()}
