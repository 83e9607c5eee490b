"""Runs on the test control plane for GKE's live tests: fixtures (``pytest_plugins = ["gke_runs"]``), one run, faults.

What stands in for GKE: nodes are namespaces of this machine, the run's bucket is the played one (slow, limited, with
errors), Jobs, JobSet and Kueue are played with their webhooks. A run's home is in the bucket; every pod has a folder of
its own. The control plane's programs are built by ``tests/live/kube/build.sh`` (minutes, once); without them all of
this skips.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "kube"), str(HERE.parent)]
from beside import Beside  # noqa: E402
from cluster import SMALL, Network, namespaces_work  # noqa: E402
from controllers import JOBSETS, KUEUE, WORKLOADS, Controllers  # noqa: E402
from plane import Plane, programs  # noqa: E402

from muster.backends.gke.kubernetes.config import connect  # noqa: E402
from muster.backends.gke.manifests.kueue_objects import account_objects, queue_objects  # noqa: E402
from muster.backends.gke.manifests.placement import Options, place  # noqa: E402
from muster.config.spec import RunSpec  # noqa: E402
from muster.core.clock import SystemClock  # noqa: E402
from muster.core.errors import BackendError  # noqa: E402
from muster.core.events import Event  # noqa: E402
from muster.storage.home import HOME_FILE, open_home  # noqa: E402

__all__ = ["JOBSETS", "KUEUE", "PODS", "WORKLOADS", "Controllers", "Run", "document", "placed"]

PODS = "/api/v1/namespaces/default/pods"
NODES = ["node1", "node2", "node3", "node4"]
LEVELS = ("gce-topology-block", "gce-topology-subblock", "gce-topology-host")
LABELS = ["cloud.google.com/gke-nodepool=muster-cpu", *(f"cloud.google.com/{one}=x" for one in LEVELS)]


def queue_of_the_plane():
    """The queue that `up` makes for GPU hosts. These runs' hosts are CPU pods, so that all of a run has to come to the
    second flavour, and what goes to the first by mistake finds no node."""
    return queue_objects(placed(provisioning_model="spot", queue="research"))


def kueue_as_up_installs_it():
    """Its Configuration; the Deployment is nowhere, as nothing of Kueue's runs here."""
    from muster.backends.gke.manifests import kueue_configuration as kueue

    metadata = {"name": kueue.CONFIG_MAP, "namespace": kueue.NAMESPACE}
    text = "apiVersion: config.kueue.x-k8s.io/v1beta2\nkind: Configuration\n"
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {kueue.KEY: text}}
    labels = {"app": "kueue"}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [
        {"name": "manager", "image": "registry.k8s.io/kueue/kueue:v0.19.2"}]}}  # fmt: skip
    deployment = {
        "apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {"name": kueue.DEPLOYMENT, "namespace": kueue.NAMESPACE},
        "spec": {"replicas": 0, "selector": {"matchLabels": labels}, "template": pod},
    }  # fmt: skip
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": kueue.NAMESPACE}}
    return [namespace, *kueue.configured([config, deployment])]


def placed(**resources):
    spec = RunSpec.model_validate(
        {"name": "a", "backend": "gke", "command": ["x"], "resources": {
            "machine": "a4-highgpu-8g", "provisioning_model": "flex_start_queued", "image": "i",
            "project": "example-project",
            "locations": ["us-central1-b"], **resources}}
    )  # fmt: skip
    return place(spec, run_id="a", run_dir="gs://bucket/runs/a", options=Options())


def definitions():
    """JobSet's and Kueue's CustomResourceDefinitions: the released ones where they are at hand."""
    from fakes.crds import CRDS

    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    if CRDS.is_dir():
        return [one for path in sorted(CRDS.glob("*.yaml")) for one in yaml.safe_load_all(path.read_text()) if one]
    pytest.skip(f"no CustomResourceDefinitions at {CRDS}")


@pytest.fixture(scope="module")
def bucket():
    """The played bucket as it is, unkind, at an address that pods reach too; every process finds it by that."""
    pytest.importorskip("google_crc32c", reason="comes with the gcs extra")
    from fakes.gcs import GcsFake

    with GcsFake.unkind(host="0.0.0.0") as found:
        yield found
        assert not found.complaints, found.complaints


@pytest.fixture(scope="module")
def plane(tmp_path_factory, bucket):
    binaries, why_not = programs()
    if binaries is None:
        pytest.skip(why_not)
    if not namespaces_work():
        pytest.skip("network namespaces need root and iproute2")
    folder = tmp_path_factory.mktemp("kube") / "plane"
    network = Network(NODES)
    before = os.environ.get("STORAGE_EMULATOR_HOST")
    os.environ["STORAGE_EMULATOR_HOST"] = bucket.url_at(network.bridge)
    try:
        with Plane(binaries, folder, network, LABELS) as found:
            (found.dir / "bucket-server").write_text(bucket.url_at(network.bridge))
            found.install(definitions())
            with Beside(found) as found.beside:
                cluster = connect(f"kubeconfig:{found.dir / 'kubeconfig'}", SystemClock())
                for one in [*kueue_as_up_installs_it(), *account_objects(placed()), *queue_of_the_plane()]:
                    cluster.apply(one)
                account = "/api/v1/namespaces/default/serviceaccounts/muster"
                found.wait(lambda: found.get(account).get("secrets"), "the account's token")
                yield found
    finally:
        os.environ.pop("STORAGE_EMULATOR_HOST")
        if before is not None:
            os.environ["STORAGE_EMULATOR_HOST"] = before


@pytest.fixture
def played(plane):
    # The Job controller's delays (10 s and more) pass ten times as fast: what is tested is that a run lives with them.
    with Controllers(plane, job_speed=10.0) as found:
        yield found
    # What a failed test left behind is not the next one's.
    for jobset in plane.items(f"{JOBSETS}/jobsets"):
        where = f"{JOBSETS}/namespaces/default/jobsets/{jobset['metadata']['name']}"
        plane.call("DELETE", where, {"propagationPolicy": "Background"})


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    return tmp_path


def document(plane, name, **changes):
    """The CPU example on three hosts of one rank, its home in the bucket."""
    found = json.loads(json.dumps(SMALL))
    found["training"]["steps"] = 100_000
    found |= {"name": name, "backend": "gke", "run_dir": f"gs://bucket/runs/{name}"}
    found["resources"] = {
        "hosts": 3, "device": "cpu", "threads_per_rank": 1, "provisioning_model": "owned", "image": "trainer:1",
        "queue": "research",
        "cluster": f"kubeconfig:{plane.dir / 'kubeconfig'}",
    }  # fmt: skip
    # No silence is a failure here (pods end by signals and closed sockets), and a busy machine is often silent.
    found["recovery"] |= {"warm_standby": False, "grace_s": 10.0, "heartbeat_timeout_s": 20.0}
    for key, value in changes.items():
        *path, last = key.split(".")
        place_ = found
        for part in path:
            place_ = place_.setdefault(part, {})
        place_[last] = value
    return found


class Run:
    """One submitted run, driven by the command line as its user drives it; its events are read from the bucket."""

    def __init__(self, plane, folder, name, **changes):
        self.plane, self.folder = plane, folder
        (folder / f"{name}.yaml").write_text(json.dumps(document(plane, name, **changes)))
        self.dir = folder / "seen" / name
        self.dir.mkdir(parents=True)
        (self.dir / HOME_FILE).write_text(f"gs://bucket/runs/{name}\n")
        self.home = open_home(self.dir)
        self.looked = 0.0
        self.id = self.muster("submit", str(folder / f"{name}.yaml")).stdout.strip()
        (self.dir / "run_id").write_text(self.id)

    def muster(self, *words, check=True, **more):
        argv = [sys.executable, "-m", "muster.cli.main", *words]
        found = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False, **more)
        assert not check or found.returncode == 0, f"{words}: {found.stderr}\n{self.plane.story()}"
        return found

    def mirror(self, what="events"):
        """What the bucket holds of the run, as files; at most twice a second."""
        if what == "events" and time.monotonic() < self.looked + 0.5:
            return
        with contextlib.suppress(BackendError):  # a segment that was merged away meanwhile: the next look has it
            self.home.mirror(self.dir, what=what)
        self.looked = time.monotonic()

    def events(self, kind):
        """The run's events of one kind so far, oldest first. Reads lines: it is asked many times a second."""
        self.mirror()
        paths = sorted((self.dir / "events").glob("*.jsonl"))
        lines = [line for path in paths for line in path.read_bytes().splitlines(keepends=True)]
        mark = f'"kind":"{kind}"'.encode()
        found = [Event.from_json(json.loads(line)) for line in lines if mark in line and line.endswith(b"\n")]
        return sorted(found, key=lambda event: event.wall_ns)

    def attempt(self):
        """The newest that has made a step."""
        return max((event.attempt for event in self.events("step")), default=0)

    def step(self):
        return max((event.step for event in self.events("step")), default=0)

    def wait_for_step(self, step, timeout_s=300):
        self.plane.wait(lambda: self.step() >= step, f"step {step}", timeout_s)

    def wait_for_attempt(self, after, timeout_s=300):
        self.plane.wait(lambda: self.attempt() > after, "new attempt", timeout_s)

    def status(self):
        return json.loads(self.muster("status", self.id, "--json").stdout)

    def pods(self):
        """Role and index -> pod, of those that are not going and have not ended."""
        rows = self.plane.items(f"{PODS}?labelSelector=app.kubernetes.io/instance={self.id}")
        return {
            (pod["metadata"]["labels"]["jobset.sigs.k8s.io/replicatedjob-name"],
             pod["metadata"]["labels"]["jobset.sigs.k8s.io/job-index"]): pod
            for pod in rows
            if not pod["metadata"].get("deletionTimestamp") and pod["status"]["phase"] in ("Pending", "Running")
        }  # fmt: skip

    def pod_name(self, role, index):
        pod = self.pods().get((role, str(index)))
        return pod and pod["metadata"]["name"]

    def jobset(self):
        """The newest of the run."""
        rows = self.plane.items(f"{JOBSETS}/jobsets?labelSelector=app.kubernetes.io/instance={self.id}")
        return max(rows, key=lambda one: one["metadata"]["creationTimestamp"], default=None)

    @contextlib.contextmanager
    def followed(self):
        """`muster logs -f` into the file ``followed``, meanwhile."""
        argv = [sys.executable, "-m", "muster.cli.main", "logs", "-f", self.id]
        with open(self.folder / "followed", "wb") as file, open(self.folder / "said", "wb") as said:
            process = subprocess.Popen(argv, stdout=file, stderr=said)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def finished(self):
        """When the run last ended; 0 where it has not."""
        return max((event.wall_ns for event in self.events("run.finished")), default=0)

    def delete_pod(self, role, index, grace_s=5):
        name = self.pods()[role, str(index)]["metadata"]["name"]
        self.plane.call("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": grace_s})
        return name

    def leader(self):
        """Index of the supervisor's pod that holds the run, by the address in its lease; None where nothing says so."""
        try:
            lease = json.loads(self.home.store.get(self.home.uri_of("lease.json")).data)
        except BackendError:  # a loop's store gives up after 2 s
            return None
        for (role, index), pod in self.pods().items():
            if role == "supervisor" and pod["status"].get("podIP") == (lease["address"] or [None])[0]:
                return index
        return None

    def losses(self):
        """Step -> loss as hex, the last word on each step."""
        return {event.step: float(event.detail["loss"]).hex() for event in self.events("step") if event.step}
