"""The back ends of the launcher contract: how each is set up, looked at from outside, and made to fail."""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fakes.bucket import Bucket
from fakes.compute_engine.guest import Guest
from fakes.compute_engine.guest import Programs as MachinePrograms
from fakes.compute_engine.operator import Operator
from fakes.compute_engine.run_of_hosts import Settling
from fakes.discovery import Discovery
from fakes.discovery import folder as discovery_folder
from fakes.google_wire import Wire
from fakes.secrets import API, FakeSecrets
from fakes.slurm import FakeSlurm
from fakes.vertex.containers import Containers, timeline
from fakes.vertex.jobs import Job, Manners
from fakes.vertex.service import APIS, FakeVertex
from fakes.vertex.workers import Programs, Worker

from muster.backends.gce.compute import Compute
from muster.backends.gce.launcher import GceLauncher, submission_of
from muster.backends.gce.provision import Hosts, instances_of
from muster.backends.google.http import Call, Reply, Unreachable
from muster.backends.google.request_log import RequestLogFile
from muster.backends.google.session import Session
from muster.backends.local.launcher import LocalLauncher
from muster.backends.slurm.commands import Slurm
from muster.backends.slurm.launcher import SlurmLauncher
from muster.backends.slurm.script import SCRIPT
from muster.backends.vertex.launcher import VertexLauncher
from muster.config.spec import RunSpec
from muster.core import processes
from muster.core.errors import AccessError, BackendError, CapacityError, MusterError, UsageError
from muster.core.typed_json import encode
from muster.core.types import JobHandle, JobRequest, TaskSpec
from muster.protocol.client import HostStatus, SupervisorStatus
from muster.protocol.lease import EndRecord, HomeStatus
from muster.storage import run_registry
from muster.storage.home.bucket import BucketHome

DOCUMENTS = Discovery(found, (*APIS, API)) if (found := discovery_folder()) else None
REGION = "us-central1"
SLEEP = (sys.executable, "-c", "import time; time.sleep(60)")
#: Of a run file that GKE, Vertex AI and Compute Engine can be asked with, but for what each has of its own.
PLACES = """\
checkpoint: {dir: gs://example-bucket/checkpoints}
resources:
  project: example-project
  machine: g2-standard-48
  provisioning_model: on_demand
  hosts: 1
  locations: [us-central1-a]
  image: us-docker.pkg.dev/example-project/muster/train:1
gce:
  service_account: hosts@example-project.iam.gserviceaccount.com
  supervisor_service_account: supervisor@example-project.iam.gserviceaccount.com
  bundle: gs://example-bucket/bundles/0000000000000000000000000000000000000000000000000000000000000000.tar.gz
vertex: {service_account: trainer@example-project.iam.gserviceaccount.com}
"""
#: What sbatch says before the reason.
FAILED = "sbatch: error: Batch job submission failed: "


class LocalCase:
    """This machine: processes, counted by their label."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launcher = LocalLauncher(grace_s=0.3)

    def living(self, run_id: str) -> list[int]:
        return [process.pid for process in processes.labelled(run_id)]

    def refusals(self) -> Iterator[tuple[type[MusterError], JobRequest]]:
        """What the back end refuses, arranged one after the other, and as which error."""
        yield BackendError, self.request(("/no/such/program",))

    def submit_without_answer(self, request: JobRequest) -> None:
        """The submission is carried out, and whoever asked for it never hears so."""
        self.launcher.submit(request)
        self.lose_record(request)

    def lose_record(self, request: JobRequest) -> None:
        (Path(request.run_dir) / "job.json").unlink()

    def spec(self, name: str = "contract", hosts: int = 1, spares: int = 0) -> RunSpec:
        resources = {"hosts": hosts, "spare_hosts": spares}
        return RunSpec.model_validate({"name": name, "command": ["true"], "resources": resources})

    def request(self, *argvs: tuple[str, ...], name: str = "contract") -> JobRequest:
        run_id = run_registry.new_run_id(name)
        rendered = self.launcher.render(self.spec(name), run_id=run_id, run_dir=str(self.folder / run_id))
        tasks = tuple(TaskSpec(name=f"task{index}", argv=argv) for index, argv in enumerate(argvs or (SLEEP,)))
        return dataclasses.replace(rendered, tasks=tasks)


def local_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCase]:
    """For a fixture: this machine, with nothing left of its jobs afterwards."""
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    found = LocalCase(tmp_path)
    yield found
    for folder in tmp_path.iterdir():
        found.launcher.cancel(JobHandle(run_id=folder.name, backend="local", job_id="", run_dir=str(folder)))


class SlurmCase:
    """Slurm's commands in memory; jobs run here. The real one has a live suite of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.shell = folder, FakeSlurm()
        self.launcher = SlurmLauncher(slurm=Slurm(shell=self.shell))

    def living(self, run_id: str) -> list[int]:
        return [process.pid for process in processes.labelled(run_id)]

    def refusals(self) -> Iterator[tuple[type[MusterError], JobRequest]]:
        for kind, said in (
            (AccessError, FAILED + "Invalid account or account/partition combination"),
            (AccessError, FAILED + "User's group not permitted to use this partition"),
            (CapacityError, FAILED + "Requested node configuration is not available"),
            (CapacityError, f"sbatch: error: QOSMaxNodes\n{FAILED}Job violates accounting/QOS policy (submit limit)"),
            (UsageError, "sbatch: error: invalid partition specified: nope"),
            (UsageError, "sbatch: unrecognized option '--nope'"),
            (BackendError, FAILED + "Unable to contact slurm controller"),
            (BackendError, "sbatch: error: something that nobody has seen before"),
        ):  # fmt: skip
            self.shell.trouble["sbatch"] = (False, said)
            yield kind, self.request()

    def submit_without_answer(self, request: JobRequest) -> None:
        said = FAILED + "Socket timed out on send/recv operation"
        self.shell.trouble["sbatch"] = (True, said)
        self.launcher.submit(request)
        self.lose_record(request)

    def lose_record(self, request: JobRequest) -> None:
        (Path(request.run_dir) / "job.json").unlink()

    def spec(self, name: str = "contract", hosts: int = 1, spares: int = 0) -> RunSpec:
        resources = {"hosts": hosts, "spare_hosts": spares, "device": "cpu"}
        return RunSpec.model_validate({"name": name, "backend": "slurm", "command": ["true"], "resources": resources})

    def request(self, *argvs: tuple[str, ...], name: str = "contract") -> JobRequest:
        run_id = run_registry.new_run_id(name)
        rendered = self.launcher.render(self.spec(name), run_id=run_id, run_dir=str(self.folder / run_id))
        lines = [f"export MUSTER_RUN_ID={run_id}", *(f"{shlex.join(argv)} &" for argv in argvs or (SLEEP,)), "wait"]
        return dataclasses.replace(rendered, files={SCRIPT: "\n".join(["#!/bin/bash", *lines, ""])})


class VertexCase:
    """The played custom-job service, whose containers run here; the bucket is in memory."""

    METRIC = "custom_model_training_nvidia_l4_gpus"

    def __init__(self, folder: Path) -> None:
        if DOCUMENTS is None:
            pytest.skip("google-api-python-client (Google's discovery documents) is not installed")
        self.folder, self.argvs = folder, dict[str, tuple[tuple[str, ...], ...]]()
        clock, line = timeline()
        self.containers = Containers(self.command)
        quick = Manners(queue_s=0, machine_s=0, skew_s=0, shutdown_s=0, sigterm=lambda worker: None)
        self.vertex = self.containers.service = FakeVertex(
            discovery=DOCUMENTS, timeline=line, manners=quick, log_late_s=0.0, elsewhere=FakeSecrets(DOCUMENTS),
            programs=Programs(self.containers.start, self.containers.stop),
            limits={(region, self.METRIC): 1000 for region in ("us-central1", "us-east4", "us-west2")},
        )  # fmt: skip
        self.wire = Wire(self.containers, clock)
        self.launcher = VertexLauncher(http=self.wire, store=Bucket(), clock=clock)

    def command(self, job: Job, worker: Worker, environment: Mapping[str, str]) -> Any:
        run_id = job.body["labels"]["muster-run"]
        return self.argvs[run_id] if worker.primary else (), {**os.environ, **environment, "MUSTER_RUN_ID": run_id}

    def living(self, run_id: str) -> list[int]:
        self.containers.settle()
        return [process.pid for process in processes.labelled(run_id)]

    def refusals(self) -> Iterator[tuple[type[MusterError], JobRequest]]:
        self.vertex.acts_as = set()
        yield AccessError, self.request()
        self.vertex.acts_as = None
        self.vertex.limits[REGION, self.METRIC] = 0
        yield CapacityError, self.request()
        self.vertex.limits[REGION, self.METRIC] = 1000
        yield BackendError, self.request(locations=["us-west2"])  # no such machine there

    def submit_without_answer(self, request: JobRequest) -> None:
        send, self.wire.service = self.wire.service, self

        def lost(call: Call) -> Reply:
            reply = send.send(call)
            if call.method == "POST" and call.url.endswith("/customJobs"):
                self.wire.service = send
                raise Unreachable(f"no answer from {call.url}")
            return reply

        self.send = lost
        self.launcher.submit(request)
        self.lose_record(request)

    def lose_record(self, request: JobRequest) -> None:
        (Path(request.run_dir) / "job.json").unlink()

    def spec(self, name: str = "contract", hosts: int = 1, spares: int = 0, **resources: Any) -> RunSpec:
        image = "us-docker.pkg.dev/example-project/muster/train:1"
        base = {
            "hosts": hosts, "spare_hosts": spares, "machine": "g2-standard-96", "provisioning_model": "on_demand",
            "image": image, "project": "example-project", "locations": [REGION], **resources,
        }  # fmt: skip
        return RunSpec.model_validate(
            {"name": name, "backend": "vertex", "command": ["true"], "resources": base,
             "checkpoint": {"dir": "gs://example-bucket/checkpoints"},
             "vertex": {"service_account": "trainer@example-project.iam.gserviceaccount.com"}}
        )  # fmt: skip

    def request(self, *argvs: tuple[str, ...], name: str = "contract", **resources: Any) -> JobRequest:
        run_id = run_registry.new_run_id(name)
        self.argvs[run_id] = argvs or (SLEEP,)
        spec = self.launcher.resolve(self.spec(name, **resources))
        path = self.folder / run_id
        run_registry.create(run_id, path, run_file="", resolved=spec.model_dump_json(indent=1) + "\n")
        return self.launcher.render(spec, run_id=run_id, run_dir=str(path))


class GceCase:
    """The played Compute Engine: what the supervisor's machine would run runs here; the bucket is in memory."""

    ZONE = "us-central1-a"

    def __init__(self, folder: Path) -> None:
        if DOCUMENTS is None:
            pytest.skip("google-api-python-client (Google's discovery documents) is not installed")
        self.folder, self.argvs = folder, dict[str, tuple[tuple[str, ...], ...]]()
        self.user = Operator(programs=MachinePrograms(boot=self.boot, kill=self.kill))
        self.cloud, self.clock, self.bucket = self.user.cloud, Settling(self.user), Bucket()
        region = "projects/example-project/regions/us-central1"
        self.subnet = f"compute/v1/{region}/subnetworks/muster-sub"
        self.cloud.store[self.subnet] = {"name": "muster-sub"}
        for account in self.accounts.values():
            self.cloud.store[f"iam/x/serviceAccounts/{account}"] = {}
        self.secrets = FakeSecrets(DOCUMENTS)
        self.wire = Wire(self, self.user.clock)
        self.launcher = _Meanwhile(http=self.wire, store=self.bucket, clock=self.clock)
        self.launcher.meanwhile = self.hosts_come
        self.lost = False
        self.started: dict[str, list[subprocess.Popen[bytes]]] = {}

    @property
    def accounts(self) -> dict[str, str]:
        names = {"service_account": "hosts", "supervisor_service_account": "supervisor"}
        return {key: f"{name}@example-project.iam.gserviceaccount.com" for key, name in names.items()}

    def send(self, call: Call) -> Reply:
        reply = (self.secrets if "secretmanager" in call.url else self.cloud).send(call)
        if self.lost and call.method == "POST" and "/instances?" in call.url:
            self.lost = False
            raise Unreachable(f"no answer from {call.url}")
        return reply

    def hosts_come(self, request: JobRequest) -> None:
        """The supervisor's machine asks for hosts, and they join: no agents run here."""
        of = submission_of(request).placement
        session = Session(http=self, clock=self.clock)
        hosts = Hosts(
            placement=of, compute=Compute(session=session, project=of.project), report=lambda line: None,
            file=RequestLogFile(store=self.bucket, home=of.home), wall_s=lambda: self.clock.wall_ns() / 1e9,
        )  # fmt: skip
        for _ in range(30):
            if hosts.step():
                break
            self.clock.sleep(10)
        names = [one.name for one in instances_of(hosts.compute, of.stem) if one.request_number]
        known = {name: HostStatus(connected=True, ready=True, active=True, ranks=(0,)) for name in names}
        status = SupervisorStatus(phase="train", reason="", attempt=1, step=0, hosts=known)
        self.bucket.put(f"{of.home}/status.json", encode(HomeStatus(wall_ns=1, term=1, status=status)))

    def boot(self, guest: Guest) -> None:
        """Starts the run's programs; what the supervisor leaves in the home at their end comes from a thread."""
        if guest.metadata["attributes/muster-role"] != "supervisor":
            return
        run_id, home = guest.metadata["attributes/muster-run"], guest.metadata["attributes/muster-home"]
        local = self.folder / "machines" / run_id
        (local / "logs").mkdir(parents=True)
        (local / "run_id").write_text(run_id)
        sync = BucketHome(local, home, store=self.bucket, bulk=self.bucket).start("h0")
        started = self.started[guest.name] = []
        for number, argv in enumerate(self.argvs[run_id]):
            with open(local / "logs" / f"task{number}.log", "wb") as out:
                environment = {**os.environ, "MUSTER_RUN_ID": run_id}
                started.append(subprocess.Popen(argv, stdout=out, stderr=out, env=environment))

        def wait() -> None:
            codes = [one.wait() for one in started]
            sync.stop(5.0)
            if guest.up:
                self._end(guest, home, max(codes))

        threading.Thread(target=wait, daemon=True).start()

    def _end(self, guest: Guest, home: str, code: int) -> None:
        record = EndRecord(
            job=guest.name, submission="1", term=1, outcome="finished", exit_code=code, reason="its programs ended",
            wall_ns=1,
        )  # fmt: skip
        self.bucket.put(f"{home}/end.json", encode(record))

    def kill(self, guest: Guest) -> None:
        for one in self.started.get(guest.name, ()):
            one.kill()
            one.wait()

    def living(self, run_id: str) -> list[int]:
        return [process.pid for process in processes.labelled(run_id)]

    def refusals(self) -> Iterator[tuple[type[MusterError], JobRequest]]:
        self.cloud.actors = {self.accounts["supervisor_service_account"]: 1e9}
        yield AccessError, self.request()
        self.cloud.actors = None
        self.cloud.stock[self.ZONE] = 0
        yield CapacityError, self.request()
        del self.cloud.stock[self.ZONE]
        subnet = self.cloud.store.pop(self.subnet)
        yield BackendError, self.request()
        self.cloud.store[self.subnet] = subnet

    def submit_without_answer(self, request: JobRequest) -> None:
        self.lost = True
        self.launcher.submit(request)
        assert not self.lost
        self.lose_record(request)

    def lose_record(self, request: JobRequest) -> None:
        (Path(request.run_dir) / "job.json").unlink()

    def spec(self, name: str = "contract", hosts: int = 1, spares: int = 0) -> RunSpec:
        resources = {
            "hosts": hosts, "spare_hosts": spares, "machine": "g2-standard-48", "provisioning_model": "on_demand",
            "project": "example-project", "locations": [self.ZONE],
        }  # fmt: skip
        gce = {**self.accounts, "bundle": f"gs://example-bucket/bundles/{'0' * 64}.tar.gz"}
        return RunSpec.model_validate(
            {"name": name, "backend": "gce", "command": ["true"], "resources": resources, "gce": gce,
             "checkpoint": {"dir": "gs://example-bucket/checkpoints"}}
        )  # fmt: skip

    def request(self, *argvs: tuple[str, ...], name: str = "contract") -> JobRequest:
        run_id = run_registry.new_run_id(name)
        self.argvs[run_id] = argvs or (SLEEP,)
        spec = self.launcher.resolve(self.spec(name))
        path = self.folder / run_id
        run_registry.create(run_id, path, run_file="", resolved=spec.model_dump_json(indent=1) + "\n")
        return self.launcher.render(spec, run_id=run_id, run_dir=str(path))


@dataclasses.dataclass(kw_only=True)
class _Meanwhile(GceLauncher):
    """A person's, with what happens in the project after a submission."""

    meanwhile: Callable[[JobRequest], None] = lambda request: None

    def submit(self, request: JobRequest) -> JobHandle:
        handle = super().submit(request)
        self.meanwhile(request)
        return handle


Case = LocalCase | SlurmCase | VertexCase | GceCase
CASES: dict[str, Callable[[Path], Case]] = {
    "local": LocalCase,
    "slurm": SlurmCase,
    "vertex": VertexCase,
    "gce": GceCase,
}
