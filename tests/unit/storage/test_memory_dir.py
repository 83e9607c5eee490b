"""A memory folder is made fresh, found by its record, else by its name, and refused when anything is another's."""

import errno
import gc
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from muster.core.errors import AccessError, UsageError
from muster.storage.memory_dir import MemoryDir, left_over, prefix


@pytest.fixture
def root(monkeypatch):
    with tempfile.TemporaryDirectory() as folder:  # sockets' paths are short
        os.chmod(folder, 0o1777)
        monkeypatch.setenv("MUSTER_MEMORY_DIR", folder)
        yield Path(folder)


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def memory(root, run_dir):
    return MemoryDir.create(run_dir, run_id="a-run", host="host-0")


def as_other_user(monkeypatch):
    """What is on the disk belongs to somebody else from now on."""
    ours = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: ours + 1)


def test_a_new_folder_is_its_owners_alone_and_its_name_cannot_be_guessed(root, run_dir, memory):
    assert memory.folder.stat().st_mode & 0o777 == 0o700
    assert memory.folder.parent == root
    assert memory.folder.name.startswith(prefix(run_dir, "a-run") + "-host-0-")
    another = MemoryDir.create(run_dir, run_id="a-run", host="host-0")
    assert another.folder != memory.folder
    assert len(memory.folder.name.rpartition("-")[2]) == 16


def test_a_name_that_is_taken_is_left_alone(root, run_dir, monkeypatch):
    names = iter(["taken", "free"])
    monkeypatch.setattr("secrets.token_hex", lambda count: next(names, "x" * count))
    planted = root / f"{prefix(run_dir, 'a-run')}-host-0-taken"
    planted.mkdir(mode=0o777)
    assert MemoryDir.create(run_dir, run_id="a-run", host="host-0").folder.name.endswith("-free")
    assert not list(planted.iterdir())


def test_a_restarted_agent_finds_its_folder_and_other_programs_all_of_the_run(run_dir, memory):
    other = MemoryDir.create(run_dir, run_id="a-run", host="host-1")
    assert MemoryDir.of_host(run_dir, run_id="a-run", host="host-0").folder == memory.folder
    assert {host: found.folder for host, found in MemoryDir.of_run(run_dir).items()} == {
        "host-0": memory.folder,
        "host-1": other.folder,
    }
    assert (run_dir / "memory").stat().st_mode & 0o777 == 0o700
    assert (run_dir / "memory" / "host-0.json").stat().st_mode & 0o777 == 0o600


def test_a_folder_under_the_recorded_name_that_the_run_did_not_make_is_not_taken(run_dir, memory):
    os.rename(memory.folder, f"{memory.folder}.moved")  # its inode stays in use
    memory.folder.mkdir(mode=0o700)
    assert MemoryDir.of_run(run_dir) == {}
    assert MemoryDir.of_host(run_dir, run_id="a-run", host="host-0").folder != memory.folder


def test_a_full_disk_does_not_prevent_a_start(root, run_dir, monkeypatch):
    def full(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("muster.storage.run_registry.replace_text", full)
    made = MemoryDir.of_host(run_dir, run_id="a-run", host="host-0")
    assert MemoryDir.of_run(run_dir) == {}
    assert left_over(run_dir, "a-run") == ([made.folder], []), "by its name"


def test_only_folders_are_left_over(root, run_dir, memory):
    name = prefix(run_dir, "a-run")
    (root / f"{name}-file").touch()
    (root / f"{name}-link").symlink_to(memory.folder)
    assert left_over(run_dir, "a-run") == ([memory.folder], [])


def test_a_record_of_another_boot_or_one_that_is_damaged_counts_for_nothing(run_dir, memory, monkeypatch):
    record = run_dir / "memory" / "host-0.json"
    monkeypatch.setattr("muster.core.processes.boot_id", lambda: "another")
    assert MemoryDir.of_run(run_dir) == {}
    monkeypatch.undo()
    record.write_text('{"path": 3}')
    assert MemoryDir.of_run(run_dir) == {}


@pytest.mark.parametrize("damage", ["{", None])
def test_a_restarted_agent_whose_record_is_damaged_finds_its_folder_by_name(root, run_dir, memory, damage):
    record = run_dir / "memory" / "host-0.json"
    before = record.read_text()
    record.unlink()
    if damage is not None:
        record.write_text(damage)
    MemoryDir.create(run_dir, run_id="a-run", host="host-0-1")  # another host's name begins alike
    (root / f"{prefix(run_dir, 'a-run')}-host-0-{'0' * 16}").symlink_to(memory.folder)
    memory.replace("name", b"kept")
    found = MemoryDir.of_host(run_dir, run_id="a-run", host="host-0")
    assert found.folder == memory.folder and found.read("name") == b"kept"
    assert record.read_text() == before


def test_what_another_user_put_under_such_a_name_is_not_taken(root, run_dir, memory):
    (run_dir / "memory" / "host-0.json").write_text("{")
    memory.folder.chmod(0o755)
    assert MemoryDir.of_host(run_dir, run_id="a-run", host="host-0").folder != memory.folder


def test_a_link_instead_of_the_folder_is_refused(root, memory):
    link = root / "link"
    link.symlink_to(memory.folder)
    with pytest.raises(AccessError, match=f"{link}: is a link"):
        MemoryDir.open(link)


def test_a_folder_that_is_gone_is_refused(root):
    with pytest.raises(AccessError, match="No such file"):
        MemoryDir.open(root / "absent")


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o777])
def test_a_folder_open_to_others_is_refused(memory, mode):
    memory.folder.chmod(mode)
    with pytest.raises(AccessError, match=f"{memory.folder} is open to other users .mode {mode:04o}"):
        MemoryDir.open(memory.folder)


def test_another_users_folder_is_refused(memory, monkeypatch):
    if os.geteuid() == 0:
        os.chown(memory.folder, 12345, 12345)
    else:  # the root is checked first, and is this user's
        as_other_user(monkeypatch)
    with pytest.raises((AccessError, UsageError), match="belongs to"):
        MemoryDir.open(memory.folder)


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o722])
def test_a_root_in_which_others_may_rename_is_refused(root, run_dir, memory, mode):
    root.chmod(mode)
    for act in (lambda: MemoryDir.create(run_dir, run_id="a-run", host="h"), lambda: MemoryDir.open(memory.folder)):
        with pytest.raises(UsageError, match=f"{root} is not safe") as refused:
            act()
        assert "MUSTER_MEMORY_DIR" in refused.value.hint


def test_a_root_of_another_user_is_refused(root, run_dir, monkeypatch):
    as_other_user(monkeypatch)
    if os.stat(root).st_uid == 0:
        os.chown(root, 12345, 12345)
    with pytest.raises(UsageError, match="it belongs to uid"):
        MemoryDir.create(run_dir, run_id="a-run", host="host-0")


def test_files_are_made_once_and_read_back(memory):
    os.close(memory.create_file("a.ring"))
    with pytest.raises(FileExistsError):
        memory.create_file("a.ring")
    assert memory.path("a.ring").stat().st_mode & 0o777 == 0o600
    memory.replace("state.json", b"one")
    memory.replace("state.json", b"two")
    memory.rename("a.ring", "b.ring")
    assert memory.read("state.json") == b"two"
    assert sorted(os.listdir(memory.folder)) == ["b.ring", "state.json"]
    memory.unlink("b.ring")
    memory.unlink("b.ring")
    assert not memory.exists("b.ring")
    with pytest.raises(FileNotFoundError):
        memory.open_file("b.ring")


def test_a_link_among_the_files_is_neither_read_nor_written_through(memory, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    memory.path("forkserver.pid").symlink_to(victim)
    with pytest.raises(AccessError, match="is a link"):
        memory.open_file("forkserver.pid")
    with pytest.raises(FileExistsError):
        memory.create_file("forkserver.pid")
    memory.replace("forkserver.pid", b"17")
    assert victim.read_text() == "precious"
    assert memory.read("forkserver.pid") == b"17"


def test_a_pipe_a_folder_and_a_second_name_are_refused(memory, tmp_path):
    os.mkfifo(memory.path("pipe"))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(memory.bind_address("socket"))
    memory.path("folder").mkdir()
    (tmp_path / "elsewhere").write_text("precious")
    os.link(tmp_path / "elsewhere", memory.path("hard"))
    for name in ("pipe", "socket", "folder", "hard"):
        with pytest.raises(AccessError, match=name):
            memory.open_file(name)


@pytest.mark.parametrize("name", ["../victim", "/etc/passwd", "a/b", "", ".", ".."])
def test_a_name_is_never_a_path(memory, name):
    for act in (memory.open_file, memory.create_file, memory.unlink, memory.path, memory.exists, memory.bind_address):
        with pytest.raises(AccessError, match="is no file name"):
            act(name)


def test_a_socket_is_bound_in_the_folder_and_reached_by_its_path(memory):
    for _ in range(2):  # the second takes a dead predecessor's place
        with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
            server.bind(memory.bind_address("agent.sock"))
            server.listen()
            client.connect(str(memory.path("agent.sock")))


def test_remove_deletes_the_folder_and_nothing_that_links_in_it_name(memory, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").touch()
    memory.path("link").symlink_to(victim)
    os.close(memory.create_file("own.ring"))
    memory.remove()
    memory.remove()
    assert not memory.folder.exists()
    assert (victim / "file").exists()


def test_remove_leaves_what_took_the_folders_name(memory, root):
    os.rename(memory.folder, root / "moved")
    memory.folder.mkdir()
    (memory.folder / "file").touch()
    memory.remove()
    assert (memory.folder / "file").exists()


def test_the_descriptor_goes_with_the_object(memory):
    again = MemoryDir.open(memory.folder)
    fd = again.fd
    del again
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_path_too_long_for_sockets_is_refused_before_anything_is_made(root, run_dir, monkeypatch):
    long = root / ("x" * 80)
    monkeypatch.setenv("MUSTER_MEMORY_DIR", str(long))
    with pytest.raises(UsageError, match="bytes too many for the sockets"):
        MemoryDir.create(run_dir, run_id="a-run", host="host-0")
    assert not long.exists()


#: An ordinary user in a user namespace that knows no other (Apptainer, enroot): the real root has no number in it.
CONTAINED = """
import ctypes, os, sys
from pathlib import Path
from muster.core import processes, typed_json
from muster.storage import memory_dir

run, uid = Path(sys.argv[1]), os.geteuid() or 1000
typed_json.encode(memory_dir._Place(path="", inode=0, boot_id=""))  # loads what the other user may not read
libc = ctypes.CDLL(None)
if os.geteuid() == 0:
    os.chown(run, uid, uid)
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    libc.prctl(4, 1)  # PR_SET_DUMPABLE: its own /proc/self/uid_map may be written
if libc.unshare(0x10000000) != 0:  # CLONE_NEWUSER
    sys.exit(77)
Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
assert os.stat("/dev/shm").st_uid not in (0, uid)
made = memory_dir.MemoryDir.create(run, run_id="r", host="h")
assert made.folder.parent == Path("/dev/shm")
made.remove()
"""


def test_in_a_container_of_an_ordinary_user_the_machines_folder_is_taken():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        Path(folder, "run").mkdir(mode=0o700)
        argv = [sys.executable, "-c", CONTAINED, Path(folder, "run")]
        environ = {**os.environ, "MUSTER_MEMORY_DIR": "/dev/shm"}
        done = subprocess.run(argv, cwd="/", env=environ, capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("no user namespaces here")
    assert done.returncode == 0, done.stderr


def emptied(memory):
    shutil.rmtree(memory.folder)
    assert memory.is_lost()


def test_a_folder_that_was_deleted_is_made_anew_under_its_own_name(run_dir, memory):
    assert not memory.is_lost()
    before = memory.folder
    emptied(memory)
    memory.renew(run_dir, run_id="a-run", host="host-0")
    assert memory.folder == before and not memory.is_lost()
    assert before.stat().st_mode & 0o777 == 0o700
    memory.replace("name", b"new")
    assert (before / "name").read_bytes() == b"new"
    found = MemoryDir.recorded(run_dir, "host-0")
    assert found is not None and found.folder == before, "the new inode is recorded"
    assert MemoryDir.of_host(run_dir, run_id="a-run", host="host-0").folder == before


def test_a_name_that_somebody_took_meanwhile_is_left_to_them(run_dir, memory):
    before = memory.folder
    emptied(memory)
    before.mkdir(mode=0o777)
    assert memory.is_lost(), "another folder has the name"
    memory.renew(run_dir, run_id="a-run", host="host-0")
    assert memory.folder != before and not memory.is_lost()
    found = MemoryDir.recorded(run_dir, "host-0")
    assert found is not None and found.folder == memory.folder
    memory.replace("name", b"new")
    assert not list(before.iterdir())


def test_a_restarted_agent_makes_a_deleted_folder_where_the_ranks_look_for_it(run_dir, memory):
    emptied(memory)
    assert MemoryDir.of_host(run_dir, run_id="a-run", host="host-0").folder == memory.folder


def test_a_root_that_was_deleted_too_is_made_again(run_dir, root, monkeypatch):
    monkeypatch.setenv("MUSTER_MEMORY_DIR", str(root / "ours"))
    memory = MemoryDir.create(run_dir, run_id="a-run", host="host-0")
    before = memory.folder
    shutil.rmtree(root / "ours")
    memory.renew(run_dir, run_id="a-run", host="host-0")
    assert memory.folder == before and before.is_dir()


def test_descriptors_of_lost_folders_are_closed(run_dir, memory):
    gc.collect()  # what earlier tests left open is closed now, not in between
    open_before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        emptied(memory)
        memory.renew(run_dir, run_id="a-run", host="host-0")
        memory.replace("name", b"new")
    assert len(os.listdir("/proc/self/fd")) == open_before
