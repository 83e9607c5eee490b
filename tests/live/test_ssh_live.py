"""A run on machines with a real sshd, each in namespaces of its own, whose .bashrc prints at every command.

One run for all tests, in their order, since its start costs most: each test leaves it training on at least two hosts.
"""

import contextlib
import json
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fakes.gcs import GcsFake
from slurm_runs import User, run_file
from ssh_hosts import SECRET, SshHosts, ssh_is_missing
from waiting import eventually
from watched import Watched

from muster.core.events import Event

MISSING = ssh_is_missing()
pytestmark = [pytest.mark.live, pytest.mark.timeout(600), pytest.mark.skipif(bool(MISSING), reason=MISSING or "-")]
PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/ssh.md"
SECRETS = ("token", "secrets.json", "start.json")


def spec(name: str, *hosts: str, **changes: object):
    venv = str(Path(sys.executable).parents[1])
    found = run_file(resources__hosts=2, resources__ranks_per_host=1, checkpoint__every_steps=50, **changes)
    return found | {"name": name, "backend": "ssh", "ssh": {"hosts": hosts, "venv": venv}, "secrets": {"MINE": "env"}}


class Run:
    """What its hosts have written, read from their disks: no command of ours is waited for."""

    def __init__(self, user: User, hosts: SshHosts, spec: dict[str, object]) -> None:
        self.user, self.hosts = user, hosts
        self.id = user.submit(spec).id
        self.seen: dict[Path, Watched] = {}

    def events(self, kind: str) -> list[Event]:
        for path in self.hosts.dir.glob(f"gpu*/home/.muster/ssh/runs/{self.id}/*/events"):
            self.seen.setdefault(path, Watched(path.parent))
        return [event for one in self.seen.values() for event in one.events(kind)]

    def step(self) -> int:
        return max((event.step or 0 for event in self.events("step")), default=0)

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        try:
            eventually(condition, 120, every_s=0.1)
        except AssertionError:
            raise AssertionError(f"no {what}\n{self.hosts.story()}") from None

    def wait_for_steps(self, more: int) -> None:
        before = self.step()
        self.wait_for(lambda: self.step() > before + more, f"step {before + more}")

    def trains_on(self) -> set[str]:
        """Names of ssh.hosts."""
        ranks: dict[int | None, Event] = {}
        for event in sorted(self.events("rank.started"), key=lambda one: one.wall_ns):
            ranks[event.rank] = event
        return {f"gpu{int(event.host.split('-')[1]) + 1}" for event in ranks.values()}

    def home_on(self, host: str) -> Path:
        return self.hosts.dir / host / "home" / ".muster" / "ssh" / "homes" / self.id


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    hosts = SshHosts(tmp_path_factory.mktemp("h"), 3)
    with GcsFake(host="0.0.0.0") as bucket:
        hosts.variables["STORAGE_EMULATOR_HOST"] = hosts.env["STORAGE_EMULATOR_HOST"] = bucket.url_at(hosts.bridge)
        with hosts:
            yield hosts


class Recorded(User):
    """Knows which commands it ran."""

    ran: ClassVar[set[str]] = set()

    def muster(self, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
        self.ran.add(" ".join([words[0], *(word for word in words if word in ("-f", "--from"))]))
        return super().muster(*words, **more)


@pytest.fixture(scope="module")
def user(hosts):
    return Recorded(hosts, hosts.home)


@pytest.fixture(scope="module")
def run(user, hosts):
    (user.home / "first.yaml").write_text(json.dumps(spec("first", *hosts.names)))
    assert "gpu3 at" in user.muster("up", "first.yaml").stdout
    found = Run(user, hosts, spec("first", *hosts.names))
    found.wait_for_steps(3)
    return found


def test_an_unknown_key_is_shown_and_refused(user: User) -> None:
    known = user.home / ".ssh" / "known_hosts"
    keys = known.read_text()
    known.write_text("")
    (user.home / "third.yaml").write_text(json.dumps(spec("third", "gpu1", "gpu2")))
    refused = user.muster("up", "third.yaml", code=5).stderr
    assert "gpu1: its key is unknown" in refused and "ssh gpu1 shows its fingerprint" in refused
    known.write_text(keys)


def test_secrets_are_seen_by_nobody_else(hosts: SshHosts, user: User, run: Run) -> None:
    token = (user.home / "runs" / run.id / "token").read_bytes().strip()
    for name in hosts.names:
        for pid in hosts.pids(name):
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended meanwhile
                argv = Path(f"/proc/{pid}/cmdline").read_bytes()
                environ = Path(f"/proc/{pid}/environ").read_bytes()
                assert token not in argv + environ and SECRET.encode() not in argv
        files = [path for path in (hosts.dir / name / "home").rglob("*") if path.name in SECRETS]
        assert files and all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)


def test_two_runs_refuse_each_other(user: User, run: Run) -> None:
    (user.home / "second.yaml").write_text(json.dumps(spec("second", "gpu2", "gpu3")))
    assert f"works for the run {run.id}" in user.muster("submit", "second.yaml", code=1).stderr


def test_a_host_that_was_lost_is_taken_in_again(hosts: SshHosts, user: User, run: Run) -> None:
    """Without its host program and sshd it trains on; cut off, a spare takes its place; ``recover`` takes it in."""
    lost = next(name for name in ("gpu2", "gpu3") if name in run.trains_on())
    assert hosts.kill(lost, "muster.backends.ssh.host") and hosts.kill(lost, "sshd -D")
    run.wait_for_steps(5)
    assert not run.events("host.lost"), "training needs neither"
    hosts.cut(lost)
    run.wait_for(lambda: lost not in run.trains_on(), "spare")
    run.wait_for_steps(5)
    hosts.heal(lost)
    hosts.start_sshd(lost)
    user.muster("recover", run.id)
    run.wait_for(lambda: hosts.processes(lost, "muster.backends.ssh.host"), "host program")


def test_it_goes_on_from_the_copy_of_a_lost_home(hosts: SshHosts, user: User, run: Run) -> None:
    def copied() -> set[int]:
        return {int(path.stem[5:]) for path in run.home_on("gpu2").glob("checkpoints/commits/step-*.json")}

    run.wait_for(copied, "checkpoint in the copy")
    assert "gpu1 answers and has the home" in user.muster("recover", run.id, "--from", "gpu2", code=1).stderr
    hosts.kill_processes("gpu1")
    hosts.cut("gpu1")
    saved = max(copied())
    assert "the copy on gpu2 is" in user.muster("recover", run.id, "--from", "gpu2").stderr
    run.wait_for(lambda: run.trains_on() == {"gpu2", "gpu3"}, "attempt without the lost host")
    attempt = max(event.attempt for event in run.events("rank.started"))
    run.wait_for(lambda: [event for event in run.events("step") if event.attempt == attempt], "step of it")
    first = min(event.step or 0 for event in run.events("step") if event.attempt == attempt)
    assert first > saved, "from the checkpoint in the copy"
    newest = {path.name for path in run.home_on("gpu1").glob("checkpoints/commits/step-*.json")}
    hosts.heal("gpu1")
    hosts.boot("gpu1")
    user.muster("recover", run.id)
    run.wait_for(lambda: (run.home_on("gpu1") / ".muster-copied").exists(), "copy on the host that came back")
    (aside,) = run.home_on("gpu1").parent.glob(f"{run.id}.before-*")
    assert {path.name for path in aside.glob("checkpoints/commits/step-*.json")} == newest, "its own home is kept"
    hosts.kill_processes("gpu1")
    hosts.cut("gpu1")


def test_stop_needs_no_host_program(hosts: SshHosts, user: User, run: Run) -> None:
    assert hosts.kill("gpu2", "muster.backends.ssh.host")
    assert user.muster("exec", run.id, "--host", "2", "--", "hostname").stdout == "gpu3\n"
    assert ": stopped: " in user.muster("stop", run.id).stderr
    assert "stopped" in user.muster("status", run.id).stdout
    assert user.muster("logs", "-f", run.id).stdout, "to its end"


def test_down_leaves_nothing(hosts: SshHosts, user: User, run: Run) -> None:
    assert "gpu1" in user.muster("down", run.id, code=None).stderr, "it may still work: it does not answer"
    hosts.heal("gpu1")
    hosts.boot("gpu1")
    assert "is down: no processes or memory are left" in user.muster("down", run.id).stderr
    for name in hosts.names:
        assert not hosts.processes(name, run.id)
        assert not [path for path in (hosts.dir / name / "home").rglob("*") if path.name in SECRETS]
    user.muster("down", "first.yaml")
    assert not list(hosts.dir.glob("gpu*/home/.muster/ssh/env"))
    page = set(re.findall(r"^\$ muster (\w+(?: -f)?)", PAGE.read_text(), re.MULTILINE))
    assert page <= user.ran | {verb.partition(" ")[0] for verb in user.ran}, "what the page tells was run"


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_a_home_elsewhere_outlives_a_host(hosts: SshHosts, user: User, kind: str) -> None:
    """Another host's supervisor takes over by itself; a folder is read through that host from then on."""
    home = str(hosts.dir / "shared" / "run") if kind == "folder" else "gs://bucket/run"
    (user.home / "up.yaml").write_text(json.dumps(spec("up", *hosts.names)))
    user.muster("up", "up.yaml")
    found = Run(user, hosts, spec(kind, *hosts.names, run_dir=home))
    found.wait_for_steps(3)
    hosts.kill_processes("gpu1")
    hosts.cut("gpu1")
    found.wait_for(lambda: found.trains_on() == {"gpu2", "gpu3"}, "attempt under another supervisor")
    found.wait_for_steps(3)
    if kind == "folder":
        assert "is read through gpu2" in user.muster("recover", found.id, "--from", "gpu2").stderr
    assert ": stopped: " in user.muster("stop", found.id).stderr
    hosts.heal("gpu1")
    hosts.boot("gpu1")
    user.muster("down", found.id)
