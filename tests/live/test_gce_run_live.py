"""A run on Compute Engine from submit to its end: the service is played, its machines are real.

Each machine is namespaces of its own with an overlay root, in which the start-up script runs as root; machines reach
each other over a network, and Google by its own names alone. The person who submits is this process.
"""

import contextlib
import secrets
import subprocess
import threading
import time
import uuid
from pathlib import Path

import pytest
from cluster import SMALL
from fakes.compute_engine import instances
from fakes.compute_engine.guest import Programs
from fakes.compute_engine.service import ROOT, FakeComputeEngine, Manners
from fakes.discovery import Discovery, folder
from fakes.google_wire import refuse
from fakes.timeline import EPOCH, Timeline
from gce_machines import POSSIBLE, SECRET_TOKEN, journal, kill_program, place_at

from muster.app.run import stop as stop_app
from muster.app.run import submit as submit_app
from muster.backends.gce.launcher import GceLauncher
from muster.backends.protocols import Terminal
from muster.config.load import Loaded
from muster.config.spec import RunSpec
from muster.core.errors import MusterError
from muster.core.types import JobState
from muster.protocol.client import AskStatus

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not POSSIBLE, reason="namespaces need root, unshare, ip, curl and openssl"),
]
ZONE = "us-central1-a"
HOSTS = "muster-hosts@example-project.iam.gserviceaccount.com"
SUPERVISOR = "muster-supervisor@example-project.iam.gserviceaccount.com"


class RealTime:
    """The cloud's clock, which passes."""

    def __init__(self):
        self.began = time.monotonic()

    @property
    def now_s(self):
        return time.monotonic() - self.began + time.time() - EPOCH.timestamp()

    def sleep(self, seconds):
        time.sleep(seconds)


class Switch:
    """The network of the machines, in a namespace of its own."""

    def __init__(self):
        self.tag, self.count = f"gce{secrets.token_hex(3)}", 0
        self.ip("netns", "add", self.tag)
        self.inside("link", "add", "br0", "type", "bridge")
        self.inside("link", "set", "br0", "up")

    def ip(self, *words):
        subprocess.run(["ip", *words], check=True)

    def inside(self, *words):
        self.ip("-n", self.tag, *words)

    def plug(self, machine, address):
        """Called in the machine's network."""
        first = machine.first.pid
        (pid,) = Path(f"/proc/{first}/task/{first}/children").read_text().split()[:1]
        self.count += 1
        port = f"v{self.count}"
        self.inside("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", pid)
        self.inside("link", "set", port, "master", "br0", "up")
        self.ip("addr", "add", f"{address}/16", "dev", "eth0")
        self.ip("link", "set", "eth0", "up")

    def close(self):
        self.ip("netns", "del", self.tag)


class Project:
    """The played Compute Engine, whose machines boot here."""

    def __init__(self, place):
        self.place, self.switch, self.lock = place, Switch(), threading.RLock()
        manners = Manners(visible_s=0.5, boot_s=1.0, delete_s=2.0, stop_s=2.0, noticed_s=3.0, doomed_s=3.0)
        self.cloud = FakeComputeEngine(
            discovery=Discovery(folder() or Path(), ("compute.v1",)), timeline=Timeline(RealTime()), manners=manners,
            enabled={"compute.googleapis.com"}, looks=0, programs=Programs(boot=self.boot, kill=self.kill),
        )  # fmt: skip
        subnet = "projects/example-project/regions/us-central1/subnetworks/muster-sub"
        self.cloud.store[f"compute/v1/{subnet}"] = {"name": "muster-sub"}
        for account in (HOSTS, SUPERVISOR):
            self.cloud.store[f"iam/x/serviceAccounts/{account}"] = {}
        self.machines, self.over, self.status = {}, threading.Event(), None
        threading.Thread(target=self.time_passes, daemon=True).start()

    def time_passes(self):
        while not self.over.wait(0.2):
            with self.lock:
                self.cloud.timeline.settle()

    def boot(self, guest):
        threading.Thread(target=self._boot, args=(guest,), daemon=True).start()

    def _boot(self, guest):
        items = [
            {"key": key.removeprefix("attributes/"), "value": value}
            for key, value in guest.metadata.items()
            if key.startswith("attributes/")
        ]
        account = SUPERVISOR if guest.name.endswith("-supervisor") else HOSTS
        made = self.place.machine(
            {"metadata": {"items": items}}, guest.name, address=guest.address, account=account, plug=self.switch.plug,
            compute=self.compute,
        )  # fmt: skip
        self.machines[guest.name] = made
        made.boot()

    def kill(self, guest):
        if (made := self.machines.pop(guest.name, None)) is not None:
            threading.Thread(target=made.power_off, daemon=True).start()

    def compute(self, account, call):
        if account != SUPERVISOR:
            return refuse(403, "forbidden", f"{account} has no right on machines.")
        return self.answer(call)

    def answer(self, call):
        with self.lock:
            return self.cloud.send(call)

    def send(self, call):
        """The person's way."""
        return self.place.secrets.send(call) if "secretmanager" in call.url else self.answer(call)

    def names(self):
        with self.lock:
            return sorted(key.rpartition("/")[2] for key in self.cloud.store if "/instances/" in key)

    def forget(self, name):
        with self.lock:
            instances.forget(self.cloud, f"{ROOT}/zones/{ZONE}/instances/{name}")

    def story(self):
        return "\n".join(
            f"---- {name}\n{made.serial()[-1500:]}\n{journal(made)[-3000:]}" for name, made in self.machines.items()
        )

    def close(self):
        self.over.set()
        for made in list(self.machines.values()):
            made.power_off()
        self.switch.close()


@pytest.fixture
def project(tmp_path, monkeypatch):
    with place_at(tmp_path / "place") as place:
        monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", place.bucket.url)
        found = Project(place)
        found.launcher = GceLauncher(http=found)
        monkeypatch.setattr("muster.backends.load", lambda _: found.launcher)
        try:
            yield found
        finally:
            found.close()


def document(project, **changes):
    gce = {"service_account": HOSTS, "supervisor_service_account": SUPERVISOR, "bundle": project.place.uri}
    resources = {
        "hosts": 2, "machine": "e2-standard-4", "project": "example-project", "locations": [ZONE],
        "provisioning_model": "on_demand", "ranks_per_host": 1, "threads_per_rank": 1,
    }  # fmt: skip
    found = {**SMALL, "backend": "gce", "gce": gce, "resources": resources, **changes}
    found["run_dir"] = f"gs://example-bucket/runs/{uuid.uuid4()}"
    found["recovery"] = {"grace_s": 10.0, "heartbeat_timeout_s": 20.0, "warm_standby": False}
    return RunSpec.model_validate(found)


def until(project, found, patience_s=240):
    ends = time.monotonic() + patience_s
    while not (said := found()):
        over = project.status is not None and project.status.state.ended
        assert time.monotonic() < ends and not over, f"{project.status}\n{project.story()}"
        time.sleep(0.5)
    return said


def test_a_run_loses_a_host_and_its_supervisor_and_leaves_nothing(project):
    spec = document(project, training={**SMALL["training"], "steps": 100_000})
    found = submit_app.submit(Loaded(spec=spec, text="name: live\n", source="run.yaml"))
    run_id, launcher, handle = found.run.run_id, project.launcher, found.handle
    reasons = []

    def state():
        status = project.status = launcher.poll(handle)
        if not reasons or reasons[-1] != status.reason:
            reasons.append(status.reason)
        return status

    def step():
        state()
        with contextlib.suppress(MusterError):
            return launcher.ask(run_id, AskStatus()).step
        return -1

    until(project, lambda: state().reason == "running: 2 hosts and the supervisor")
    assert any(f"{run_id}-supervisor: " in one for one in reasons), reasons  # how far its start was
    assert project.names() == [f"{run_id}-1-0", f"{run_id}-1-1", f"{run_id}-supervisor"]
    before = until(project, lambda: max(step(), 0))
    heard = []
    terminal = Terminal(out=heard.append, err=heard.append)
    assert launcher.exec(run_id, ["cat", "/proc/sys/kernel/hostname"], terminal, host=1) == 0
    assert heard[0] == f"{run_id}-1-1\n".encode()

    project.forget(f"{run_id}-1-1")  # the machine is gone, without a word
    until(project, lambda: f"{run_id}-2-0" in project.names())
    until(project, lambda: state().reason == "running: 2 hosts and the supervisor" and "2-0" in state().tasks)
    after = until(project, lambda: step() > before and step())

    project.machines[f"{run_id}-supervisor"].reboot()
    until(project, lambda: step() > after)
    assert f"{run_id}-2-0" in project.names() and len(project.names()) == 3, "nothing is asked for a second time"

    for machine, module in (
        (f"{run_id}-supervisor", "muster.app.supervisor"),
        (f"{run_id}-supervisor", "muster.backends.gce.host"),  # systemd kills what it started, and starts it again
        (f"{run_id}-1-0", "muster.backends.gce.host"),
    ):
        after = until(project, lambda: max(step(), 0))
        began_s = time.monotonic()
        kill_program(project.machines[machine], module)
        until(project, lambda before=after: step() > before + 20)
        print(f"{module} of {machine} killed: {step()} steps after {time.monotonic() - began_s:.1f} s")
    assert len(project.names()) == 3, "nothing is asked for a second time"

    assert stop_app.stop(run_id, wait=True).status.state is JobState.STOPPED
    until(project, lambda: project.names() == [])  # the supervisor's machine removes all, and itself last
    assert stop_app.down(run_id).left == ()
    assert not project.place.secrets.versions
    assert SECRET_TOKEN not in str(project.cloud.store)
