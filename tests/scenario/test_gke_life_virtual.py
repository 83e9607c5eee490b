"""The whole life of a run on Google's services in memory: from an empty project to an empty project, faults on the way.

Google's side is checked against its discovery documents; what JobSet, Kueue, DWS and the scheduler would do is done by
hand here. Time is virtual.
"""

import json
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "golden" / "gke")]
discovery = pytest.importorskip("fakes.discovery")
if discovery.folder() is None:
    pytest.skip("google-api-python-client (Google's discovery documents) is not installed", allow_module_level=True)

from cases import spec  # noqa: E402
from fakes import supervisor_words  # noqa: E402
from fakes.clock import VirtualClock  # noqa: E402
from fakes.gcp import FakeGoogleCloud  # noqa: E402

from muster.app import remote_entrypoint as pod_side  # noqa: E402
from muster.app.inspect import status as status_app  # noqa: E402
from muster.app.run import stop as stop_app  # noqa: E402
from muster.app.run import submit  # noqa: E402
from muster.backends.gke.launcher import GkeLauncher  # noqa: E402
from muster.backends.gke.pod.continuation import queue_continuation  # noqa: E402
from muster.backends.gke.provision.cluster import GkeCluster, open_cluster  # noqa: E402
from muster.backends.gke.provision.software import wanted_software  # noqa: E402
from muster.backends.google.http import Unreachable  # noqa: E402
from muster.config.load import Loaded  # noqa: E402
from muster.core.types import JobState  # noqa: E402
from muster.protocol.codec import encode  # noqa: E402
from muster.storage import run_registry  # noqa: E402
from muster.storage.store import MemoryStore  # noqa: E402

DOCUMENTS = discovery.Discovery(discovery.folder())
ZONES = ["us-central1-b", "europe-west1-b"]
SPEC = spec("a4-highgpu-8g", "flex_start_queued", project="example-project", locations=ZONES, spare_hosts=1)
WORKLOADS = "apis/kueue.x-k8s.io/v1beta2/namespaces/default/workloads"
REQUESTS = "apis/autoscaling.x-k8s.io/v1/namespaces/default/provisioningrequests"


class World:
    """The project, and the controllers of its cluster."""

    def __init__(self):
        self.google, self.clock = FakeGoogleCloud(DOCUMENTS), VirtualClock()
        self.kubernetes = self.google.kubernetes
        self.phase = "run"

    def put(self, folder, one):
        self.kubernetes.handle("PUT", f"/{folder}/{one['metadata']['name']}", json.dumps(one).encode())

    def jobsets(self):
        return sorted(self.kubernetes.of_kind("JobSet"), key=lambda one: len(one["metadata"]["name"]))

    def workload(self, jobset, *conditions, check="Pending"):
        name = jobset["metadata"]["name"]
        rows = [{"type": kind, "status": "True"} for kind in conditions]
        checks = [{"name": "muster-dws", "state": check}]
        self.put(WORKLOADS, {"kind": "Workload", "metadata": {"name": f"w-{name}", "ownerReferences": [{"name": name}]},
                             "status": {"conditions": rows, "admissionChecks": checks}})  # fmt: skip

    def ask_dws(self, jobset, *conditions):
        owner = f"w-{jobset['metadata']['name']}"
        rows = [{"type": kind, "status": "True"} for kind in conditions]
        metadata = {"name": f"{owner}-muster-dws-1", "ownerReferences": [{"name": owner}]}
        self.put(REQUESTS, {"kind": "ProvisioningRequest", "metadata": metadata, "status": {"conditions": rows}})

    def start(self, jobset, run_id):
        """Admitted: the JobSet's pods run, each on a node of its own."""
        jobset["spec"]["suspend"] = False
        self.workload(jobset, "QuotaReserved", "Admitted", check="Ready")
        for role in jobset["spec"]["replicatedJobs"]:
            for index in range(role["replicas"]):
                self.pod(jobset, run_id, role, index)

    def pod(self, jobset, run_id, role, index, phase="Running", **status):
        name = jobset["metadata"]["name"]
        labels = {
            "app.kubernetes.io/instance": run_id, "jobset.sigs.k8s.io/jobset-name": name,
            "jobset.sigs.k8s.io/replicatedjob-name": role["name"], "jobset.sigs.k8s.io/job-index": str(index),
        }  # fmt: skip
        node = f"{role['name']}-{index}"
        ready = {"conditions": [{"type": "Ready", "status": "True"}]}
        self.put("api/v1/nodes", {"kind": "Node", "metadata": {"name": node}, "status": ready})
        self.put("api/v1/namespaces/default/pods", {
            "kind": "Pod", "metadata": {"name": f"{name}-{node}", "namespace": "default", "labels": labels},
            "spec": {**role["template"]["spec"]["template"]["spec"], "nodeName": node},
            "status": {"phase": phase, **status},
        })  # fmt: skip

    def finish(self, jobset, kind):
        jobset["status"] = {"conditions": [{"type": kind, "status": "True", "message": "the supervisor's job"}]}
        for path in [path for path in self.kubernetes.objects if f"/pods/{jobset['metadata']['name']}" in path]:
            del self.kubernetes.objects[path]


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    world = World()
    launcher = GkeLauncher(http=world.google, clock=world.clock, store=MemoryStore())
    monkeypatch.setattr("muster.backends.load", lambda _: launcher)
    monkeypatch.setattr(pod_side, "request_here", lambda *_, **__: supervisor_words.status(world.phase, step=7))
    run = run_registry.RunDir(path=tmp_path / "in-pod", run_id="r")
    run.events.mkdir(parents=True)

    def command(_pod, _argv, line):
        return 0, encode(pod_side.reply(run, line.strip())) + b"\n", b""

    world.google.commands = command
    return world


@pytest.fixture
def manifests(tmp_path):
    folder = tmp_path / "manifests"
    folder.mkdir()
    for name in wanted_software(open_cluster(SPEC).sites[0]):
        (folder / name).write_text(f"apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}}}\n")
    return folder


def test_from_an_empty_project_to_an_empty_project(world, manifests):
    google, clock = world.google, world.clock
    # Up: the first place has no machines, the second has; killed requests and lost answers have tests of their own.
    google.fail["b200"] = ("GCE_STOCKOUT", "no room")
    google.refuse[25] = (503, "backendError")
    cluster = GkeCluster(sites=open_cluster(SPEC).sites, http=google, clock=clock)
    cluster.pin(manifests)
    assert cluster.up(manifests).labels["zone"] == "europe-west1-b" and clock.now_s > 0

    # Submit: the answer to one of its requests is lost; the same again finds what was made.
    google.lose.add(len(google.log) + 14)
    loaded = Loaded(spec=SPEC, text="name: llama\n", source="run.yaml")
    try:
        run = submit.submit(loaded).run
    except Unreachable:
        run = submit.submit(loaded).run
    assert len(world.jobsets()) == 1
    said = []

    def look():
        found = status_app.status(run.run_id)
        said.append(found.status.reason.split(" (hint")[0])
        return found

    (jobset,) = world.jobsets()
    role = {one["name"]: one for one in jobset["spec"]["replicatedJobs"]}
    look()
    world.workload(jobset, "QuotaReserved")
    look()
    world.ask_dws(jobset, "Accepted")
    look()
    clock.sleep(6 * 3600)
    world.start(jobset, run.run_id)
    found = look()
    assert found.live.step == 7 and found.status.state is JobState.RUNNING
    gone = [{"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}]
    world.pod(jobset, run.run_id, role["host"], 1, "Failed", conditions=gone)
    look()
    world.pod(jobset, run.run_id, role["host"], 1)
    look()

    # Seven days: the run saves, its supervisor queues the rest, the first JobSet is over.
    clock.sleep(7 * 24 * 3600)
    launcher = status_app.job(run)[0]
    queue_continuation(launcher._known(run.run_id), "default", jobset["metadata"]["name"])
    world.finish(jobset, "Completed")
    look()
    first, second = world.jobsets()
    assert second["spec"]["suspend"] is True and first is jobset
    world.start(second, run.run_id)
    look()
    world.finish(second, "Completed")
    found = look()
    assert (found.status.state, found.status.exit_code) == (JobState.SUCCEEDED, 0)
    assert said == [
        "waiting for Kueue to create a Workload for the run",
        "quota is reserved; waiting for admission check muster-dws (no request to DWS yet)",
        f"DWS has accepted the request w-{jobset['metadata']['name']}-muster-dws-1; waiting for capacity",
        "running: 3 hosts and the supervisor",
        "1 of 5 pods lost: host-1 (TerminationByKubelet on host-1); waiting for replacements",
        "running: 3 hosts and the supervisor",
        "waiting for Kueue to create a Workload for the run",
        "running: 3 hosts and the supervisor",
        "finished: the supervisor's job completed",
    ]

    # Down: the run's objects, then everything of ours in both places; an audit that finds nothing.
    stop_app.down(run.run_id)
    assert not world.jobsets()
    found = cluster.down()
    assert found.clean and found.leftovers == () and google.store == {}
