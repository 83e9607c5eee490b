"""The copy of a run's home, what hosts need of each other, and hosts that do not answer."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from muster.backends import run_folder
from muster.backends.ssh.home_copy import CHANGING_BYTES, COPIED, HomeCopy
from muster.backends.ssh.launcher import SshLauncher
from muster.backends.ssh.openssh import OpenSsh, Unreachable
from muster.backends.ssh.provision import agree
from muster.config.load import loads
from muster.config.spec import RunSpec
from muster.core.errors import AccessError, BackendError, MusterError
from muster.core.types import JobState
from muster.protocol.pipes import STORE_BYTES, FarEnd, FarFacts, FarStart, ToFar
from muster.storage import run_registry
from muster.storage.home import HOME_FILE
from muster.storage.job_record import SUBMISSION
from muster.storage.store import MemoryStore, open_store

RUN = "r-1"
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


@pytest.mark.parametrize("copied", [None, "ssh://gpu3/r-1"])
def test_another_home_is_set_aside(copy: HomeCopy, copied: str | None) -> None:
    """Of the same name and size is not the same: the two have diverged."""
    theirs = {"run_id": b"r", "checkpoints/step-10/shard": b"z", "checkpoints/commits/step-00000040.json": b"{}"}
    for name, data in theirs.items():
        open_store().put(str(copy.folder / name), data)
    if copied is not None:
        (copy.folder / COPIED).write_text(copied)
    copy.once()
    assert (copy.folder / "checkpoints/step-10/shard").read_bytes() == b"x"
    (aside,) = copy.folder.parent.glob("copy.before-*")
    assert all((aside / name).read_bytes() == data for name, data in theirs.items())
    copy.once()
    assert len([*copy.folder.parent.glob("copy.before-*")]) == 1, "a copy is no home"


def test_a_part_of_a_copy_is_no_home(copy: HomeCopy, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise FileNotFoundError

    with monkeypatch.context() as during:
        during.setattr("shutil.copyfileobj", lost)
        with pytest.raises(FileNotFoundError):
            copy.once()
    assert "run_id" not in names(copy)


def test_a_large_commit_marker_counts(copy: HomeCopy) -> None:
    large, new = bytes(CHANGING_BYTES + 1), "checkpoints/commits/step-00000020.json"
    open_store().put(f"{copy.home}/{MARKER}", large)
    copy.once()
    open_store().put(f"{copy.home}/{new}", large)
    open_store().delete(f"{copy.home}/{MARKER}")
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


class Hosts(OpenSsh):
    """``gpu1`` and ``gpu2``; the first, which has the home, is lost."""

    def __init__(self) -> None:
        one = FarFacts(hostname="h", home="/root", boot="2", address="10.0.0.2", copied_wall_ns=1, wall_ns=5)
        self.there, self.orders = {"gpu2": one}, list[tuple[str, ToFar]]()

    def order(self, host: str, message: ToFar, timeout_s: float = 0.0) -> FarFacts:
        if host not in self.there:
            raise Unreachable(f"{host} does not answer")
        self.orders.append((host, message))
        return self.there[host]

    def of_kind(self, kind: type) -> list[str]:
        return [host for host, message in self.orders if isinstance(message, kind)]


def ssh_spec(**resources: int) -> RunSpec:
    given = {"name": "n", "backend": "ssh", "command": ["-m", "this"], "ssh": {"hosts": ["gpu1", "gpu2"]}}
    return RunSpec.model_validate(
        {**given, "resources": {"hosts": 2, "device": "cpu", "ranks_per_host": 1} | resources}
    )


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SshLauncher:
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "muster"))
    run = run_registry.create(RUN, tmp_path / "run", run_file="", resolved=ssh_spec().model_dump_json())
    store = MemoryStore()
    for uri in (uri for host in ("gpu1", "gpu2") for uri in store.list(f"ssh://{host}/{RUN}")):
        store.delete(uri)
    (run.path / HOME_FILE).write_text(f"ssh://gpu1/{run.run_id}\n")
    return SshLauncher(ssh=Hosts(), store=store)


def submit(launcher: SshLauncher, path: Path, spec: RunSpec) -> None:
    request = launcher.render(spec, run_id=RUN, run_dir=str(path / "run"))
    launcher.submit(replace(request, labels={SUBMISSION: "2"}))


def test_too_few_hosts_end_nothing(lost: SshLauncher, tmp_path: Path) -> None:
    with pytest.raises(MusterError, match="gpu1 does not answer") as refused:
        lost.move(RUN, "gpu2", ssh_spec())
    assert "resources.min_hosts=1 lets" in (refused.value.hint or "")
    assert not lost.ssh.of_kind(FarEnd) and "gpu1" in (tmp_path / "run" / HOME_FILE).read_text()
    with pytest.raises(MusterError, match="gpu1 does not answer"):
        submit(lost, tmp_path, ssh_spec())


@pytest.mark.parametrize("fewer", [{"min_hosts": 1}, {"hosts": 1}])
def test_fewer_hosts_go_on_where_the_run_file_lets_them(
    lost: SshLauncher, tmp_path: Path, fewer: dict[str, int]
) -> None:
    spec = ssh_spec(**fewer)
    assert "gpu2 is 0 s old" in lost.move(RUN, "gpu2", spec)
    assert lost.ssh.of_kind(FarEnd) == ["gpu2"]
    handle = lost.handle(RUN, tmp_path / "run", "gpu1")
    assert lost.poll(handle).state is JobState.STOPPED, "gpu1 was declared lost: overrides are taken"
    submit(lost, tmp_path, spec)
    assert lost.ssh.of_kind(FarStart) == ["gpu2"]
    order = lost.ssh.orders[-1][1]
    assert isinstance(order, FarStart) and lost.store is not None
    files = run_folder.get(lost.store, order.home, order.files_sha256)
    assert loads(files.run_yaml, environment=False).spec.resources.spare_hosts == 0
    assert lost.poll(handle).state is JobState.RUNNING


def test_a_keeper_that_returns_meanwhile_supervises_no_more(lost: SshLauncher, tmp_path: Path) -> None:
    spec = ssh_spec(min_hosts=1)
    lost.move(RUN, "gpu2", spec)
    here = lost.ssh.there["gpu2"]
    lost.ssh.there["gpu1"] = replace(here, boot="1", address="10.0.0.1", held_by=RUN, supervises=True, processes=3)
    submit(lost, tmp_path, spec)
    numbers = {host: one.submission for host, one in lost.ssh.orders if isinstance(one, FarStart)}
    assert numbers == {"gpu1": "2", "gpu2": "2"}, "its own, the first, would be left as it is"
