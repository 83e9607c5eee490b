"""Why a run's folder cannot lie on a mounted bucket: what Muster did there, call by call, fails on the double of
gcsfuse.
"""

import contextlib
import os
import time

import pytest
from fakes.gcs import GcsFake
from gcsfuse_mounts import NEEDED, opened

from muster.core.errors import AccessError, BackendError, ConflictError, UsageError
from muster.core.event_log import EventLog, verify
from muster.core.protocols import Stored
from muster.storage.store import open_store
from muster.storage.store.patient import Patient
from muster.supervise.process.lease import LeaseKeeper
from muster.transport.secure_session import read_token

pytest_plugins = ["gcsfuse_mounts"]
pytestmark = NEEDED


# ---------------------------------------------------------------- what Muster did on it


class OldStore:
    """The system calls with which Muster's store of files made, replaced and named a version, when a run's folder
    could still lie on a mount (now such a folder has its home in the bucket, and is refused here)."""

    def get(self, uri):
        with open(uri, "rb") as file:
            return Stored(generation=self._generation(os.fstat(file.fileno())), data=file.read())

    def put_if_absent(self, uri, data):
        temporary = self._written(uri, data, 0)
        try:
            os.link(temporary, uri)
            return self._generation(os.stat(uri))
        except OSError as error:
            raise BackendError(f"{uri}: {error.strerror}") from error
        finally:
            os.unlink(temporary)

    def put_if(self, uri, data, generation):
        found = os.stat(uri)
        if self._generation(found) != generation:
            raise ConflictError(f"{uri} is at generation {self._generation(found)}, not {generation}")
        return self._replace(uri, data, found.st_mtime_ns)

    def put(self, uri, data):
        return self._replace(uri, data, 0)

    def _replace(self, uri, data, after_ns):
        temporary = self._written(uri, data, after_ns)
        generation = self._generation(os.stat(temporary))
        os.replace(temporary, uri)
        return generation

    def _written(self, uri, data, after_ns):
        temporary = f"{uri}.{os.getpid()}.{time.monotonic_ns()}"
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            at = max(time.time_ns(), after_ns) + 1
            os.utime(file.fileno(), ns=(at, at))
            os.fsync(file.fileno())
        return temporary

    def _generation(self, found):
        return f"{found.st_mtime_ns}.{found.st_ino}"


def test_a_token_in_a_run_folder_on_a_mount_is_refused(two):
    one, _ = two
    with opened(one / "token", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600) as fd:
        os.write(fd, b"x" * 64)
    os.chmod(one / "token", 0o600)
    with pytest.raises(AccessError, match="can be read by others"):
        read_token(str(one / "token"))


def test_a_lease_in_a_run_folder_on_a_mount_cannot_be_taken(two):
    with pytest.raises(BackendError, match=r"not permitted|not implemented"):
        OldStore().put_if_absent(str(two[0] / "lease.json"), b"{}")


def test_a_lease_in_a_run_folder_on_a_mount_is_lost_at_its_first_renewal(two):
    """The number that names a version is that of the file under its old name: the move gives it another."""
    store, uri = OldStore(), str(two[0] / "lease.json")
    store.put(uri, b"{}")
    taken = store.put(uri, b"{}")
    with pytest.raises(ConflictError):
        store.put_if(uri, b"{}", taken)


def test_the_events_of_a_killed_pod_are_lost(two, mounted, fake):
    """Every one of them had been forced to the disk."""
    one, other = two
    log = EventLog("run", one / "events", "host-0", 1)
    for number in range(5):
        log.append("run.message", detail={"text": str(number)})
        log.sync()
    assert log.trouble is None
    mounted.servers["a"].die()
    with contextlib.suppress(OSError):
        log.close()
    left = other / "events" / "host-0.1.jsonl"
    data = left.read_bytes() if left.exists() else b""
    assert verify(data, run_id="run", name=left.name).events == 0


# ---------------------------------------------------------------- what it does now


def test_a_conditional_write_on_a_mount_is_refused_with_the_buckets_uri(two):
    for call in (
        lambda: open_store().put_if_absent(str(two[0] / "lease.json"), b"{}"),
        lambda: open_store().put_if(str(two[0] / "lease.json"), b"{}", "1"),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        assert "gs://bucket/lease.json" in (caught.value.hint or "")


def test_a_lease_in_the_bucket_itself_has_one_holder_and_is_renewed(monkeypatch):
    """On a bucket with all its moods, and faster than it likes: once a second at most."""
    pytest.importorskip("google.cloud.storage")
    with GcsFake.unkind(seed=5) as fake:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake.url)
        uri = "gs://bucket/runs/a/lease.json"
        one, other = (LeaseKeeper(Patient(open_store(), deadline_s=8), uri) for _ in range(2))
        assert one.take(("127.0.0.1", 1)) == 1
        with pytest.raises(ConflictError):
            other.take(("127.0.0.1", 2))
        for _ in range(3):
            assert one.renew()
        assert fake.bill.classes["refused"] >= 2  # 429, asked again
