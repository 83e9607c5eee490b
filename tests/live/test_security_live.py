"""What reaches a run's ports and folders from people without its token: bytes for gloo, pickles, an open umask."""

import os
import pickle
import shutil
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from cluster import LiveRun, spec_of

from muster.storage.memory_dir import left_over

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

#: A stranger's first words: none, a line of text, a length that no message has, random bytes.
WORDS = (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, os.urandom(4096))


def ports_of(run):
    """Where the host's processes listen, beside its agent's: gloo's groups and the rendezvous store."""
    found = set()
    for pid in run.host_pids("host-0"):
        try:
            process = psutil.Process(pid)
            if "fork_server" in " ".join(process.cmdline()):  # ranks are its forks
                found |= {one.laddr for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
        except psutil.Error:
            continue
    return found


class Strangers:
    """Connect to every port of the ranks without end, and say each of ``WORDS``; a tenth stay."""

    def __init__(self, run):
        self.run, self.met, self.kept = run, set(), []
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._talk)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()
        for sock in self.kept:
            sock.close()

    def _talk(self):
        while not self.ended.wait(0.05):
            for address in ports_of(self.run):
                for words in WORDS:
                    self._say(address, words)

    def _say(self, address, words):
        try:
            sock = socket.create_connection(address, timeout=1)
            sock.sendall(words)
        except OSError:
            return
        self.met.add(address)
        if len(self.kept) < 200:
            self.kept.append(sock)
        else:
            sock.close()


def test_words_for_gloo_from_strangers_change_no_bit(tmp_path):
    spec = spec_of(**{"training.steps": 40})
    with LiveRun(tmp_path / "alone", spec) as run:
        run.start()
        assert run.wait() == 0, run.story()
        wanted = run.final_hash()
    with LiveRun(tmp_path / "watched", spec) as run:
        run.start()
        with Strangers(run) as strangers:
            assert run.wait() == 0, run.story()
        assert len(strangers.met) >= 3, "the store and a listener of each rank"
        assert run.final_hash() == wanted
        assert sorted(run.losses()) == list(range(1, 41))


class Bomb:
    """Runs a program in whoever unpickles it."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return (os.mkdir, (str(self.canary),))


def test_a_pickle_is_never_opened_on_a_port_or_in_a_checkpoint(tmp_path):
    canary = tmp_path / "canary"
    bomb = pickle.dumps(Bomb(canary))
    subprocess.run([sys.executable, "-c", "import pickle, sys; pickle.load(sys.stdin.buffer)"], input=bomb, check=True)
    assert canary.is_dir(), "the bomb works"
    canary.rmdir()
    spec = spec_of(**{"training.steps": 100_000, "checkpoint.every_steps": 10})
    with LiveRun(tmp_path / "run", spec) as run:
        run.start()
        run.wait_until(lambda: len(run.events("checkpoint.committed")) >= 2, "two checkpoints")
        address = run.supervisor_address()
        port = run.replicator_port()
        for host, number in (address, ("127.0.0.1", port)):
            for words in (bomb, len(bomb).to_bytes(4, "big") + bomb, len(bomb).to_bytes(8, "little") + bomb):
                with socket.create_connection((host, number)) as sock:
                    sock.sendall(words)
        sent = run.step()
        run.wait_for_step(sent + 5)
        run.signal_host("host-0")
        run.supervisor.kill()
        run.supervisor.wait()
        planted = plant(run.dir / "checkpoints", bomb)
        before = run.step()
        run.start()
        run.wait_for_step(before + 5)
        restored = [event.step for event in run.events("checkpoint.restored")]
        assert restored and max(restored) < planted
    assert not canary.exists()


def plant(checkpoints: Path, bomb: bytes) -> int:
    """Two checkpoints newer than all: one of pickles with a marker that was made for them, and one whose marker is a
    pickle. Returns the older one's step."""
    marker = max((checkpoints / "commits").glob("step-*.json"))
    newest = int(marker.stem.removeprefix("step-"))
    planted, bare = f"step-{newest + 1_000:08d}", f"step-{newest + 2_000:08d}"
    (data,) = checkpoints.glob(f"{marker.stem}.a*")
    for name in (planted, bare):
        folder = data.with_name(data.name.replace(marker.stem, name))
        shutil.copytree(data, folder)
        for file in (path for path in folder.rglob("*") if path.is_file()):
            file.write_bytes(bomb)
    marker.with_name(f"{planted}.json").write_text(
        marker.read_text().replace(marker.stem, planted).replace(f'"step":{newest}', f'"step":{newest + 1_000}')
    )
    marker.with_name(f"{bare}.json").write_bytes(bomb)
    return newest + 1_000


def test_an_open_umask_opens_nothing(shell):
    before = os.umask(0)
    try:
        run_id = shell.run("submit", "run.yaml", "run_dir=there").stdout.strip()
        shell.wait_for_step(3)
    finally:
        os.umask(before)
    there = shell.folder / "there"
    folders = [there, *left_over(there, run_id)[0]]
    assert len(folders) == 2
    for folder in folders:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    inside = [path for folder in folders for path in folder.rglob("*")]
    private = [path for path in inside if path.is_socket() or path.name == "token"]
    assert len(private) >= 3, "the token, the agent's socket and the replicator's"
    assert {path: stat.S_IMODE(path.stat().st_mode) for path in private} == dict.fromkeys(private, 0o600)
    shell.run("down", run_id)
