"""``env`` and ``secrets`` of one run file, on every back end: ranks find the same variables, from whatever source.

Each back end's own code puts the values where its hosts find them; what ranks get is then asked of the agent's code.
"""

import argparse
import base64
import json
from types import SimpleNamespace

import pytest
from fakes.clock import VirtualClock
from fakes.discovery import Discovery, folder
from fakes.gcs import GcsFake
from fakes.secrets import API, FakeSecrets

from muster.agent.values.host_identity import HostIdentity
from muster.backends import run_folder
from muster.backends.gce import host as gce_host
from muster.backends.gce import requests as gce_requests
from muster.backends.gce.placement import place as gce_place
from muster.backends.gke.manifests.placement import Options
from muster.backends.gke.manifests.placement import place as gke_place
from muster.backends.gke.manifests.render import run_manifests
from muster.backends.gke.operate.submission import Submission
from muster.backends.google.request_log import Request, RequestLog, RequestLogFile
from muster.backends.google.secret_manager import SecretManager
from muster.backends.google.session import Session
from muster.backends.run_folder import RunFiles
from muster.backends.vertex.custom_job import run_files as vertex_files
from muster.backends.vertex.host import Host
from muster.backends.vertex.placement import place as vertex_place
from muster.config.run_environment import read_secrets
from muster.config.spec import RunSpec
from muster.storage import run_secrets
from muster.storage.store import open_store

RUN_ID, PROJECT, HOME = "contract-20260822-101500-1a2b", "example-project", "gs://example-bucket/runs/contract"
ACCOUNT, OTHER = (f"{name}@example-project.iam.gserviceaccount.com" for name in ("hosts", "supervisor"))
#: What shells, Kubernetes' ``$(NAME)``, YAML, JSON and format strings would each make something of.
ENV = {"COLOUR": "blue", "HARD": "a 'b' \"c\" $HOME $(COLOUR) \\n ü %s {x} #", "EMPTY": "", "LINES": "one\ntwo"}
SECRETS = {"KEY": "s3cret", "HF_TOKEN": "hf_x", "HARDER": " 'b' \"c\" $HOME $(COLOUR) \\n ü %s {x} # ", "MANY": "1\n2"}
AS_WRITTEN = {name: f"{value}\n" for name, value in SECRETS.items()}
"""As an editor or ``echo`` leaves a value: with a line's end, which no back end hands on."""


def spec(backend, sources, **sections):
    machine = {"machine": "g2-standard-48", "provisioning_model": "on_demand", "project": PROJECT}
    image = "us-docker.pkg.dev/example-project/muster/train:1"
    given = {
        "local": {},
        "slurm": {"resources": {"device": "cpu"}},
        "gke": {"resources": {**machine, "image": image, "locations": ["us-central1-b"]}},
        "vertex": {"resources": {**machine, "image": image, "locations": ["us-central1"]}, "run_dir": HOME},
        "gce": {"resources": {**machine, "locations": ["us-central1-a"]}, "run_dir": HOME},
    }[backend]
    base = {"name": "contract", "backend": backend, "command": ["true"], "env": ENV, "secrets": sources}
    return RunSpec.model_validate({**base, **given, **sections})


def ranks_find(run_dir, of, environ):
    """The variables of the run file among those that ranks get on a host with ``environ``."""
    identity = HostIdentity(run_dir=run_dir, run_id=RUN_ID, host="h0", bind="", memory=None, environ=environ)
    found = identity.variables(of)
    return {name: found.get(name) for name in (*ENV, *SECRETS)}


def files_of(tmp_path):
    """Sources in files of this machine, as somebody types them."""
    for name, value in AS_WRITTEN.items():
        (tmp_path / name).write_text(value)
        (tmp_path / name).chmod(0o600)
    return {name: f"file:{tmp_path / name}" for name in AS_WRITTEN}


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A bucket's folder, and the store that has it."""
    pytest.importorskip("google_crc32c", reason="comes with the gcs extra")
    with GcsFake() as bucket:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", bucket.url)
        monkeypatch.setattr("muster.backends.run_folder.PATIENCE_S", 0.0)
        yield SimpleNamespace(uri="gs://bucket/runs/contract", store=open_store())


@pytest.fixture
def manager():
    """Secret Manager with the values in it, which the hosts' account may read."""
    if (found := folder()) is None:
        pytest.skip("google-api-python-client (Google's discovery documents) is not installed")
    secrets, clock = FakeSecrets(Discovery(found, (API,))), VirtualClock()
    hosts = SimpleNamespace(send=lambda call: secrets.as_account(ACCOUNT, call))
    owner = SecretManager(session=Session(http=secrets, clock=clock))

    def keep(version, data):
        owner.create(version, data, {})
        owner.allow(version, ACCOUNT)
        return version

    sources = {
        name: keep(f"projects/{PROJECT}/secrets/{name}/versions/1", value.encode())
        for name, value in AS_WRITTEN.items()
    }
    return SimpleNamespace(keep=keep, sources=sources, hosts=hosts, clock=clock)


@pytest.fixture
def on_local(tmp_path):
    return on_a_shared_folder("local", tmp_path)


@pytest.fixture
def on_slurm(tmp_path):
    return on_a_shared_folder("slurm", tmp_path)


def on_a_shared_folder(backend, tmp_path):
    """Read where the run is submitted, kept in the run's folder, which hosts see."""
    of = spec(backend, files_of(tmp_path))
    run_secrets.write(tmp_path, read_secrets(of.secrets, {}))
    return ranks_find(tmp_path, of, {})


@pytest.fixture
def on_gke(tmp_path):
    """Pods name the Secret that the submission makes; the kubelet resolves the names."""
    of = spec("gke", files_of(tmp_path))
    placement = gke_place(of, run_id=RUN_ID, run_dir=HOME, options=Options())
    manifests, applied = run_manifests(placement), []
    cluster = SimpleNamespace(create=lambda row: applied.append(row) or row, get=lambda row: row)
    Submission(spec=of, number="1", documents=manifests).create(cluster, "t" * 64, read_secrets(of.secrets, {}))
    held = {row["metadata"]["name"]: row["data"] for row in applied if row["kind"] == "Secret"}
    (jobset,) = [row for row in manifests if row["kind"] == "JobSet"]
    (role,) = [row for row in jobset["spec"]["replicatedJobs"] if row["name"] == "host"]
    (container,) = role["template"]["spec"]["template"]["spec"]["containers"]
    environ = {}
    for row in container["env"]:
        if (named := row.get("valueFrom", {}).get("secretKeyRef")) is not None:
            environ[row["name"]] = base64.b64decode(held[named["name"]][named["key"]]).decode()
        else:
            environ[row["name"]] = row.get("value", "")
    return ranks_find(tmp_path, of, environ)


@pytest.fixture
def on_vertex(tmp_path, home, manager, monkeypatch):
    """A worker of the custom job reads them by its own account before it serves."""
    of = spec("vertex", manager.sources, vertex={"service_account": ACCOUNT})
    placement = vertex_place(of, run_id=RUN_ID, run_dir=None)
    manager.keep(placement.token_secret, b"t" * 64)
    served = []
    sha256 = run_folder.put(home.store, home.uri, vertex_files(placement).encoded())
    log = RequestLog(run_id=RUN_ID, submission=1, requests=(Request(number=1, where="us-central1", asked_s=0.0),))
    RequestLogFile(store=home.store, home=home.uri).write(log, None)
    given = argparse.Namespace(
        run_id=RUN_ID, home=home.uri, submission="1", nonce=log.mark, run_file_sha256=sha256, run_dir=tmp_path,
        token_secret=placement.token_secret, hugging_face_secret="",
    )  # fmt: skip
    cluster = {"cluster": {"workerpool0": ["a-0:2222"]}, "task": {"type": "workerpool0", "index": 0}}
    environ = {"CLOUD_ML_JOB_ID": "77", "CLOUD_ML_PROJECT_ID": "123456789", "CLUSTER_SPEC": json.dumps(cluster),
               "MUSTER_BIND": "127.0.0.1"}  # fmt: skip
    monkeypatch.setattr("muster.backends.vertex.host.VertexPlace.serve", lambda self: served.append(self) or 0)
    host = Host(given=given, environ=environ, store=home.store, http=manager.hosts, clock=manager.clock, mark="k3f9a")
    assert host.run() == 0
    return ranks_find(served[0].folder / "host", of, {})


@pytest.fixture
def on_gce(tmp_path, home, manager, monkeypatch):
    """A host's machine reads them by its own account before its agent starts."""
    of = spec("gce", manager.sources, gce={"service_account": ACCOUNT, "supervisor_service_account": OTHER})
    placement = gce_place(of, run_id=RUN_ID, run_dir=None)
    manager.keep(placement.token_secret, b"t" * 64)
    monkeypatch.setattr(gce_host, "MEMORY", tmp_path / "memory")
    monkeypatch.setattr("muster.backends.gce.machine.RUNS", str(tmp_path))
    files: RunFiles = gce_requests.run_files(of, placement)
    sha256 = run_folder.put(home.store, home.uri, files.encoded())
    machine = gce_host.Machine(
        name="h", zone="us-central1-a", address="10.0.0.3", boot="b", role="host", run_id=RUN_ID, home=home.uri,
        files=sha256, submission="1", token_secret=placement.token_secret,
    )  # fmt: skip
    environ = gce_host.prepare(machine, home.store, Session(http=manager.hosts, clock=manager.clock))
    assert environ["MUSTER_POD"] == machine.writer
    return ranks_find(machine.run_dir, of, environ)


@pytest.mark.parametrize("backend", ["local", "slurm", "gke", "vertex", "gce"])
def test_ranks_find_the_variables_of_the_run_file_and_the_values_of_its_secrets(backend, request):
    assert request.getfixturevalue(f"on_{backend}") == {**ENV, **SECRETS}
