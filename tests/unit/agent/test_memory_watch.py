"""The host's folder in memory is emptied under its agent: it is made anew, and the host's processes find it."""

import contextlib
import errno
import os
import shutil
import socket
import tempfile
from pathlib import Path

import pytest
from fakes.host import VirtualHost

from muster.agent.edge.snapshots import MemoryWatch
from muster.agent.values.actions import CheckMemory, RecordForkServer, StopProgram
from muster.agent.values.events import MemoryChecked
from muster.agent.values.host_identity import SOCKET, HostIdentity
from muster.storage.memory_dir import MemoryDir
from muster.transport.connections import ConnectionPool
from muster.transport.stream import REPLICATOR_SOCKET


class Watched:
    """A watch over a real folder with a real socket; ``host`` is what is decided of it."""

    def __init__(self, run_dir):
        self.memory, self.host = MemoryDir.create(run_dir, run_id="run", host="host-0"), VirtualHost()
        identity = HostIdentity(run_dir=run_dir, run_id="run", host="host-0", bind="127.0.0.1", memory=self.memory)
        self.hub = ConnectionPool(token=b"t" * 64)
        self.watch = MemoryWatch(identity=identity, pool=self.hub)
        self.watch.listen()
        self.memory.create_file(REPLICATOR_SOCKET)
        replicator = self.host.state.replicator
        replicator.pid, replicator.listening = 5, True

    def check(self):
        self.host.give(self.watch.check())

    @property
    def renewed(self):
        return [detail["reason"] for kind, detail, _ in self.host.logged if kind == "memory.lost"]

    @property
    def unreachable(self):
        """The replicator is replaced, to listen there again."""
        return self.host.state.replicator.is_replaced

    @property
    def notes(self):
        return self.host.notes

    def answers(self, folder=None):
        """Whether one who connects by path is accepted."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str((folder or self.memory.folder) / SOCKET))
            before = set(self.hub.peers)
            list(self.hub.poll(1.0))
            return bool(self.hub.peers - before)


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
    found.check()
    assert found.answers()
    assert (found.renewed, found.unreachable, found.notes) == ([], False, [])


def test_a_deleted_folder_is_made_anew_and_its_socket_answers(found):
    before = found.memory.folder
    shutil.rmtree(before)
    found.check()
    (reason,) = found.renewed
    assert str(before) in reason and "recreated" in reason and "taken" not in reason
    assert found.memory.folder == before and found.answers(before)
    assert found.unreachable, "the replicator's socket went with the folder"


def test_a_squatter_gets_nothing(found):
    before = found.memory.folder
    shutil.rmtree(before)
    before.mkdir(mode=0o777)
    found.check()
    (reason,) = found.renewed
    assert "the name is taken" in reason and str(found.memory.folder) in reason
    assert found.answers() and not list(before.iterdir())


def test_a_deleted_socket_alone_is_bound_again(found):
    found.memory.unlink(SOCKET)
    found.check()
    assert found.renewed == [] and not found.unreachable
    assert found.answers() and "bound again" in found.notes[0]


def test_a_deleted_socket_of_the_replicators_is_its_matter(found):
    found.memory.unlink(REPLICATOR_SOCKET)
    found.check()
    assert found.unreachable and not found.renewed and not found.notes


def test_it_is_looked_at_once_a_second_at_most_and_when_the_agent_is_awake_anyway():
    host = VirtualHost().tick()
    for _ in range(3):
        host.tick(0.3)
    assert len(host.did(CheckMemory)) == 1
    host.tick(0.2)
    assert len(host.did(CheckMemory)) == 2 and host.due_s() <= host.now_s + 1.5


def test_a_fork_server_that_knows_the_old_name_is_replaced():
    host = VirtualHost().with_fork_server()
    host.state.fork_server.socket = "old"
    host.give(MemoryChecked("old", renewed="it was deleted"))
    assert not host.did(StopProgram) and host.did(RecordForkServer)
    host.give(MemoryChecked("new", renewed="it was deleted"))
    assert host.did(StopProgram)[-1].program == "forkserver" and host.state.fork_server.socket == "new"


def test_what_cannot_be_mended_is_said_once_and_tried_again(found, monkeypatch):
    root = found.memory.folder.parent
    shutil.rmtree(found.memory.folder)
    root.chmod(0o777)  # others may rename folders in it
    for _ in range(3):
        found.check()
    (note,) = found.notes
    assert "cannot be recreated" in note and found.renewed == []
    root.chmod(0o1777)
    found.check()
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
        found.check()
    (reason,) = found.renewed
    assert str(before) in reason and ("taken" in reason) == taken and found.answers()
    found.memory.unlink(SOCKET)
    for _ in range(3):
        found.check()
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
        found.check()
    assert descriptors() == before
