"""Runs on machines with a real sshd, each in namespaces of its own, whose .bashrc prints at every command."""

import contextlib
import json
import stat
import sys
from pathlib import Path

import pytest
from slurm_runs import Run, User, run_file
from ssh_hosts import SECRET, SshHosts, ssh_is_missing

MISSING = ssh_is_missing()
pytestmark = [pytest.mark.live, pytest.mark.timeout(600), pytest.mark.skipif(bool(MISSING), reason=MISSING or "-")]
SECRETS = ("token", "secrets.json", "start.json")


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    with SshHosts(tmp_path_factory.mktemp("h"), 3) as hosts:
        yield User(hosts, hosts.home)


def spec(name: str, *hosts: str):
    venv, found = str(Path(sys.executable).parents[1]), run_file(resources__hosts=2, resources__ranks_per_host=1)
    return found | {"name": name, "backend": "ssh", "ssh": {"hosts": hosts, "venv": venv}, "secrets": {"MINE": "env"}}


def events(run: Run):
    return [json.loads(line) for line in run.user.muster("events", run.id, "--json").stdout.splitlines()]


def wait_for_steps(run: Run, more: int) -> None:
    before = run.status().get("step") or 0
    run.wait_until(lambda: (run.status().get("step") or 0) > before + more, f"step {before + more}")


def nothing_secret_is_seen(hosts: SshHosts, token: bytes) -> None:
    for name in hosts.names:
        for pid in hosts.pids(name):
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended meanwhile
                argv = Path(f"/proc/{pid}/cmdline").read_bytes()
                environ = Path(f"/proc/{pid}/environ").read_bytes()
                assert token not in argv + environ and SECRET.encode() not in argv
        files = [path for path in (hosts.dir / name / "home").rglob("*") if path.name in SECRETS]
        assert files and all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)


def test_an_unknown_key_is_shown_and_refused(user: User) -> None:
    known = user.home / ".ssh" / "known_hosts"
    keys = known.read_text()
    known.write_text("")
    (user.home / "third.yaml").write_text(json.dumps(spec("third", "gpu1", "gpu2")))
    refused = user.muster("up", "third.yaml", code=5).stderr
    assert "gpu1: its key is unknown" in refused and "ssh gpu1 shows its fingerprint" in refused
    known.write_text(keys)


def test_from_up_to_down(user: User) -> None:
    """Two runs refuse each other; killed host programs and sshd, a cut link where there is a spare; nothing is left."""
    hosts = user.cluster
    (user.home / "first.yaml").write_text(json.dumps(spec("first", *hosts.names)))
    assert "gpu3 at" in user.muster("up", "first.yaml").stdout
    run = user.submit(spec("first", *hosts.names))
    (user.home / "second.yaml").write_text(json.dumps(spec("second", "gpu2", "gpu3")))
    assert f"works for the run {run.id}" in user.muster("submit", "second.yaml", code=1).stderr
    wait_for_steps(run, 3)
    nothing_secret_is_seen(hosts, (run.dir / "token").read_bytes().strip())

    started = [event for event in events(run) if event["kind"] == "rank.started" and event["rank"] == 1]
    lost = f"gpu{int(started[0]['host'].split('-')[1]) + 1}"  # of three hosts the first two that are ready train
    assert hosts.kill(lost, "muster.backends.ssh.host") and hosts.kill(lost, "sshd -D")
    wait_for_steps(run, 10)
    assert "host_lost" not in str(events(run)), "training needs neither"
    hosts.cut(lost)
    wait_for_steps(run, 10)
    assert "host_lost" in str(events(run))
    hosts.heal(lost)
    hosts.start_sshd(lost)

    user.muster("stop", run.id)
    assert run.status()["state"] == "stopped"
    assert "is down: no processes or memory are left" in user.muster("down", run.id).stderr
    for name in hosts.names:
        assert not hosts.processes(name, run.id)
        assert not [path for path in (hosts.dir / name / "home").rglob("*") if path.name in SECRETS]
