"""The host's folder in memory is emptied under its agent: it is made anew, and the host's processes find it."""

import contextlib
import errno
import os
import shutil
import socket
import tempfile
from pathlib import Path

import pytest

from muster.agent import memory_watch
from muster.agent.host_identity import SOCKET, HostIdentity
from muster.agent.memory_watch import MemoryWatch
from muster.storage.memory_dir import MemoryDir
from muster.transport.connections import ConnectionPool
from muster.transport.stream import REPLICATOR_SOCKET


class Watched:
    """A watch over a real folder with a real socket, and what it reports."""

    def __init__(self, run_dir):
        self.memory = MemoryDir.create(run_dir, run_id="run", host="host-0")
        self.accepted, self.renewed, self.unreachable, self.notes = [], [], [], []
        identity = HostIdentity(run_dir=run_dir, run_id="run", host="host-0", bind="127.0.0.1", memory=self.memory)
        self.hub = ConnectionPool(token=b"t" * 64, on_gone=lambda *_: None, on_accept=self.accepted.append)
        self.watch = MemoryWatch(
            identity=identity, hub=self.hub, on_renewed=self.renewed.append,
            on_unreachable=lambda: self.unreachable.append(True), on_note=self.notes.append,
        )  # fmt: skip
        self.watch.listen()
        self.memory.create_file(REPLICATOR_SOCKET)

    def answers(self, folder=None):
        """Whether one who connects by path is accepted."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str((folder or self.memory.folder) / SOCKET))
            before = len(self.accepted)
            self.hub.run_once(1.0)
            return len(self.accepted) == before + 1


@pytest.fixture
def found(tmp_path, monkeypatch):
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o1777)
        monkeypatch.setenv("MUSTER_MEMORY_DIR", root)
        (tmp_path / "run").mkdir()
        made = Watched(tmp_path / "run")
        yield made
        made.hub.shutdown()


def test_nothing_is_said_while_all_is_there(found):
    found.watch.check()
    assert found.answers()
    assert (found.renewed, found.unreachable, found.notes) == ([], [], [])


def test_a_deleted_folder_is_made_anew_and_its_socket_answers(found):
    before = found.memory.folder
    shutil.rmtree(before)
    found.watch.check()
    (reason,) = found.renewed
    assert str(before) in reason and "made anew" in reason and "taken" not in reason
    assert found.memory.folder == before and found.answers(before)
    assert found.unreachable, "the replicator's socket went with the folder"


def test_a_squatter_gets_nothing(found):
    before = found.memory.folder
    shutil.rmtree(before)
    before.mkdir(mode=0o777)
    found.watch.check()
    (reason,) = found.renewed
    assert "the name is taken" in reason and str(found.memory.folder) in reason
    assert found.answers() and not list(before.iterdir())


def test_a_deleted_socket_alone_is_bound_again(found):
    found.memory.unlink(SOCKET)
    found.watch.check()
    assert found.renewed == [] and not found.unreachable
    assert found.answers() and "bound again" in found.notes[0]


def test_a_deleted_socket_of_the_replicators_is_its_matter(found):
    found.memory.unlink(REPLICATOR_SOCKET)
    found.watch.check()
    assert found.unreachable and not found.renewed and not found.notes


def test_it_is_looked_at_once_a_second_at_most(found, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(memory_watch.time, "monotonic", lambda: now[0])
    found.watch.watch()
    shutil.rmtree(found.memory.folder)
    now[0] += 0.9
    found.watch.watch()
    assert found.renewed == []
    now[0] += 0.2
    found.watch.watch()
    assert len(found.renewed) == 1


def test_what_cannot_be_mended_is_said_once_and_tried_again(found, monkeypatch):
    root = found.memory.folder.parent
    shutil.rmtree(found.memory.folder)
    root.chmod(0o777)  # others may rename folders in it
    for _ in range(3):
        found.watch.check()
    (note,) = found.notes
    assert "cannot be made anew" in note and found.renewed == []
    root.chmod(0o1777)
    found.watch.check()
    assert len(found.renewed) == 1 and found.answers()


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("late", [False, True], ids=["bind", "listen"])
def test_a_loss_is_reported_once_its_socket_is_bound(found, monkeypatch, taken, late):
    before, real, times = found.memory.folder, found.hub.listen, []

    def full(address):
        times.append(address)
        if len(times) in (1, 2, 4):
            if late:  # bound, and then nothing accepts on it
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.bind(address.removeprefix("unix:"))
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(address)

    monkeypatch.setattr(found.hub, "listen", full)
    shutil.rmtree(before)
    if taken:
        before.mkdir(mode=0o777)
    for _ in range(3):
        found.watch.check()
    (reason,) = found.renewed
    assert str(before) in reason and ("taken" in reason) == taken and found.answers()
    found.memory.unlink(SOCKET)
    for _ in range(3):
        found.watch.check()
    assert found.answers() and len(found.renewed) == 1
    assert [("No space" in note, "bound again" in note) for note in found.notes] == [
        (True, False), (True, False), (False, True)
    ], "the same trouble is said again when it comes again"  # fmt: skip


def test_listeners_of_lost_folders_are_closed(found):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for _ in range(5):
        with contextlib.suppress(FileNotFoundError):
            Path(found.memory.path(SOCKET)).unlink()
        found.watch.check()
    assert descriptors() == before
