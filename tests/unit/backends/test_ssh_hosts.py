"""The copy of a run's home, what hosts need of each other, and hosts that do not answer."""

import os
import subprocess
from pathlib import Path

import pytest

from muster.backends.ssh.home_copy import HomeCopy
from muster.backends.ssh.openssh import OpenSsh, Unreachable
from muster.backends.ssh.provision import agree
from muster.core.errors import AccessError, BackendError
from muster.protocol.pipes import STORE_BYTES, FarFacts
from muster.storage.store import open_store

MARKER = "checkpoints/commits/step-00000010.json"


@pytest.fixture
def copy(tmp_path: Path) -> HomeCopy:
    found = HomeCopy(home=str(tmp_path / "home"), folder=tmp_path / "copy")
    for name, data in {"run_id": b"r", "lease.json": b"1", "checkpoints/step-10/shard": b"x", MARKER: b"{}"}.items():
        open_store().put(f"{found.home}/{name}", data)
    return found


def names(copy: HomeCopy) -> set[str]:
    return {os.path.relpath(path, copy.folder) for path in open_store().list(str(copy.folder))}


def test_the_copy_follows(copy: HomeCopy) -> None:
    open_store().put(f"{copy.home}/checkpoints/step-10/shard", bytes(STORE_BYTES + 1))
    copy.once()
    assert names(copy) == {"run_id", "lease.json", "checkpoints/step-10/shard", MARKER}
    assert (copy.folder / "checkpoints/step-10/shard").read_bytes() == bytes(STORE_BYTES + 1)
    open_store().put(f"{copy.home}/lease.json", b"2")
    open_store().put(f"{copy.home}/checkpoints/step-10/shard", b"y")
    open_store().put(f"{copy.home}/checkpoints/commits/step-00000020.json", b"{}")
    open_store().delete(f"{copy.home}/{MARKER}")
    copy.once()
    assert (copy.folder / "lease.json").read_bytes() == b"2", "its size is the same"
    assert (copy.folder / "checkpoints/step-10/shard").read_bytes() == b"y"
    assert MARKER not in names(copy)


def test_a_commit_that_comes_during_a_round_waits(copy: HomeCopy, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is about may not have been whole when it was listed; until it is here, the checkpoint before it stays."""
    copy.once()
    store, new, listed, looks = open_store(), "checkpoints/commits/step-00000020.json", HomeCopy._listed, []

    def meanwhile(copy: HomeCopy, root: str) -> dict[str, int]:
        looks.append(root)
        if looks.count(copy.home) == 2:  # the other marker has been read by now
            store.delete(f"{copy.home}/{MARKER}")
            store.put(f"{copy.home}/checkpoints/step-20/shard", b"all of it")
            store.put(f"{copy.home}/{new}", b"{}")
        return listed(copy, root)

    monkeypatch.setattr(HomeCopy, "_listed", meanwhile)
    copy.once()
    assert MARKER in names(copy) and new not in names(copy)
    copy.once()
    assert MARKER not in names(copy) and new in names(copy)


def test_an_empty_home_empties_no_copy(copy: HomeCopy) -> None:
    copy.once()
    open_store().delete(f"{copy.home}/run_id")
    with pytest.raises(BackendError, match="no run is in"):
        copy.once()
    assert "checkpoints/step-10/shard" in names(copy)


def facts(ahead_s: float = 0.0, **more: str) -> tuple[FarFacts, int]:
    return FarFacts(hostname="h", home="/root", **{"boot": "1", "address": "10.0.0.1", **more}), int(ahead_s * 1e9)


def test_clocks_and_addresses_have_to_agree() -> None:
    agree({"a": facts(5), "b": facts(0, address="10.0.0.2")})
    with pytest.raises(BackendError, match="a's clock is 75 s ahead of b's"):
        agree({"a": facts(5), "b": facts(-70, address="10.0.0.2")})
    with pytest.raises(BackendError, match=r"a and b are both .*: NAT"):
        agree({"a": facts(), "b": facts(boot="2")})
    with pytest.raises(BackendError, match=r"a and b are both .*: one machine"):
        agree({"a": facts(), "b": facts()})


class Shell:
    """Where ssh fails each time."""

    calls = 0

    def __init__(self, stderr: str) -> None:
        self.stderr = stderr

    def run(self, argv, *, stdin="", timeout_s):
        self.calls += 1
        return subprocess.CompletedProcess(argv, 255, "", self.stderr)


def test_a_silent_host_is_not_waited_for_again_at_once() -> None:
    shell = Shell("ssh: connect to host gpu1 port 22: Connection timed out\n")
    ssh = OpenSsh(shell=shell, silent={})
    for _ in range(3):
        with pytest.raises(Unreachable, match="timed out"):
            ssh.run("gpu1", ["true"])
    assert shell.calls == 1
    ssh.silent["gpu1"] = (0.0, ssh.silent["gpu1"][1])  # that was a while ago
    with pytest.raises(Unreachable):
        ssh.run("gpu1", ["true"])
    assert shell.calls == 2


def test_a_refusal_may_be_repaired_at_once() -> None:
    shell = Shell("me@gpu1: Permission denied (publickey).\n")
    ssh = OpenSsh(shell=shell, silent={})
    for _ in range(2):
        with pytest.raises(AccessError):
            ssh.run("gpu1", ["true"])
    assert shell.calls == 2
