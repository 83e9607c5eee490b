"""What a machine that loses power keeps: a run's identity is on the disk before ``submit`` returns."""

import errno
import os
import stat

import pytest

from muster.core.errors import UsageError
from muster.storage import run_registry
from muster.storage.store.local import check_conditional_writes


@pytest.fixture
def on_disk(monkeypatch):
    """Inode -> (size, names) at its last fsync: what a power loss at this moment would leave."""
    kept = {}
    real = os.fsync

    def fsync(fd):
        real(fd)
        status = os.fstat(fd)
        kept[status.st_ino] = sorted(os.listdir(fd)) if stat.S_ISDIR(status.st_mode) else status.st_size

    monkeypatch.setattr(os, "fsync", fsync)
    return kept


def test_a_runs_identity_is_on_the_disk(tmp_path, monkeypatch, on_disk):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    run = run_registry.create("a-run", tmp_path / "new" / "run", run_file="name: a\n", resolved='{"name": "a"}\n')
    for name in ("format", "run_id", "token", "run.yaml", "resolved.json", "resolved.copy.json"):
        status = (run.path / name).stat()
        assert on_disk.get(status.st_ino) == status.st_size > 0, name
        assert name in on_disk[run.path.stat().st_ino]
    for folder in (run.path, run.path.parent):
        assert folder.name in on_disk[folder.parent.stat().st_ino]


@pytest.mark.parametrize(
    ("call", "number", "words"),
    [
        ("os.link", errno.EPERM, "no hard links"),  # FAT, exFAT
        ("os.link", errno.EOPNOTSUPP, "no hard links"),  # some FUSE mounts of cloud drives
        ("fcntl.flock", errno.ENOLCK, "no file locks"),  # NFS whose lock service does not run
        ("fcntl.flock", errno.ENOSYS, "no file locks"),
    ],
)
def test_a_file_system_without_a_feature_is_named(tmp_path, monkeypatch, call, number, words):
    def refused(*_given):
        raise OSError(number, os.strerror(number))

    check_conditional_writes(tmp_path)
    monkeypatch.setattr(call, refused)
    with pytest.raises(UsageError, match=f"the file system at /.* has {words}") as error:
        check_conditional_writes(tmp_path)
    monkeypatch.undo()
    assert error.value.hint and list(tmp_path.iterdir()) == []
