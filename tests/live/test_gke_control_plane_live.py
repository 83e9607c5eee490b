"""Runs on a real Kubernetes control plane (API server, controllers, scheduler, etcd), pods as processes in namespaces.

The whole way of a user: `muster submit`, `status`, `logs`, `restart`, `stop`, `exec`, `down`, with the manifests that
GKE gets. What stands in for GKE: nodes are namespaces of this machine, a bucket is a folder, JobSet and Kueue are
played. The programs are built by ``tests/live/kube/build.sh`` (minutes, once); without them everything here skips.
"""

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "kube"), str(HERE.parent)]
from cluster import SMALL, Network, namespaces_work  # noqa: E402
from controllers import JOBSETS, WORKLOADS, Controllers  # noqa: E402
from plane import Plane, programs  # noqa: E402

from muster.backends.gke.google.http import Unreachable  # noqa: E402
from muster.backends.gke.kubernetes.config import connect  # noqa: E402
from muster.backends.gke.launcher import GkeLauncher  # noqa: E402
from muster.backends.gke.manifests.cluster_options import Options  # noqa: E402
from muster.backends.gke.manifests.kueue_objects import account_objects, queue_objects  # noqa: E402
from muster.backends.gke.manifests.placement import place  # noqa: E402
from muster.config.spec import RunSpec  # noqa: E402
from muster.core.clock import SystemClock  # noqa: E402
from muster.core.errors import BackendError  # noqa: E402
from muster.core.events import Event  # noqa: E402
from muster.core.types import JobState  # noqa: E402
from muster.storage import run_registry  # noqa: E402

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

PODS = "/api/v1/namespaces/default/pods"
QUEUE = {
    "apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue",
    "metadata": {"name": "research", "namespace": "default"}, "spec": {"clusterQueue": "research"},
}  # fmt: skip


@pytest.fixture(scope="module")
def plane(tmp_path_factory):
    binaries, why_not = programs()
    if binaries is None:
        pytest.skip(why_not)
    if not namespaces_work():
        pytest.skip("network namespaces need root and iproute2")
    folder = tmp_path_factory.mktemp("kube") / "plane"
    network = Network(["node1", "node2", "node3", "node4"])
    labels = ["cloud.google.com/gke-nodepool=muster-cpu"]
    with Plane(binaries, folder, network, labels) as found:
        found.install(definitions())
        cluster = connect(f"kubeconfig:{found.dir / 'kubeconfig'}", SystemClock())
        for one in [*account_objects(placed()), QUEUE]:
            cluster.apply(one)
        account = "/api/v1/namespaces/default/serviceaccounts/muster"
        found.wait(lambda: found.get(account).get("secrets"), "the account's token")
        yield found


def placed():
    spec = RunSpec.model_validate(
        {"name": "a", "backend": "gke", "command": ["x"], "resources": {
            "machine": "a4-highgpu-8g", "provisioning_model": "flex_start_queued", "image": "i",
            "project": "example-project",
            "locations": ["us-central1-b"]}}
    )  # fmt: skip
    return place(spec, run_id="a", run_dir="/gcs/b/r", options=Options())


def definitions():
    """JobSet's and Kueue's CustomResourceDefinitions: the released ones where they are at hand."""
    from fakes.crds import CRDS

    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    if CRDS.is_dir():
        return [one for path in sorted(CRDS.glob("*.yaml")) for one in yaml.safe_load_all(path.read_text()) if one]
    pytest.skip(f"no CustomResourceDefinitions at {CRDS}")


@pytest.fixture
def played(plane):
    with Controllers(plane) as found:
        yield found


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    return tmp_path


def document(plane, name, **changes):
    """The CPU example on three hosts of one rank."""
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
    """One submitted run, driven by the command line as its user drives it."""

    def __init__(self, plane, home, name, **changes):
        self.plane, self.home = plane, home
        (home / f"{name}.yaml").write_text(json.dumps(document(plane, name, **changes)))
        self.id = self.muster("submit", str(home / f"{name}.yaml")).stdout.strip()
        self.dir = plane.dir / "buckets" / "bucket" / "runs" / name

    def muster(self, *words, check=True, **more):
        argv = [sys.executable, "-m", "muster.cli.main", *words]
        found = subprocess.run(argv, capture_output=True, text=True, timeout=150, check=False, **more)
        assert not check or found.returncode == 0, f"{words}: {found.stderr}\n{self.plane.story()}"
        return found

    def events(self, kind):
        """The run's events of one kind so far, oldest first. Reads lines: it is asked many times a second."""
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

    def wait_for_step(self, step, timeout_s=180):
        self.plane.wait(lambda: self.step() >= step, f"step {step}", timeout_s)

    def status(self):
        return json.loads(self.muster("status", self.id, "--json").stdout)

    def pods(self):
        """Role and index -> pod, of those that are not going."""
        rows = self.plane.items(f"{PODS}?labelSelector=app.kubernetes.io/instance={self.id}")
        return {
            (pod["metadata"]["labels"]["jobset.sigs.k8s.io/replicatedjob-name"],
             pod["metadata"]["labels"]["jobset.sigs.k8s.io/job-index"]): pod
            for pod in rows if not pod["metadata"].get("deletionTimestamp")
        }  # fmt: skip

    def pod_name(self, role, index):
        pod = self.pods().get((role, str(index)))
        return pod and pod["metadata"]["name"]

    @contextlib.contextmanager
    def followed(self):
        """`muster logs -f` into the file ``followed``, meanwhile."""
        argv = [sys.executable, "-m", "muster.cli.main", "logs", "-f", self.id]
        with open(self.home / "followed", "wb") as file, open(self.home / "said", "wb") as said:
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


class Losing:
    """Carries out every write, and loses the first one's answer."""

    def __init__(self, real):
        self.real, self.sent = real, 0

    def __getattr__(self, name):
        return getattr(self.real, name)

    def apply(self, *arguments, **more):
        reply = self.real.apply(*arguments, **more)
        self.sent += 1
        if self.sent == 1:
            raise Unreachable("the answer was lost")
        return reply


def test_what_up_puts_on_a_cluster_is_taken_by_a_real_server(plane):
    """Server-side apply of accounts and queues: made, the same again changes nothing, a foreign field stays."""
    where = placed()
    cluster = connect(f"kubeconfig:{plane.dir / 'kubeconfig'}", SystemClock())
    objects = [*account_objects(where), *queue_objects(where)]
    made = [cluster.apply(one) for one in objects]
    again = [cluster.apply(one) for one in objects]
    assert [one["metadata"]["resourceVersion"] for one in made] == [one["metadata"]["resourceVersion"] for one in again]
    queue = next(one for one in objects if one["kind"] == "ClusterQueue")
    path = f"{WORKLOADS}/clusterqueues/{queue['metadata']['name']}"
    plane.call("PATCH", path, {"spec": {"stopPolicy": "Hold"}}, "application/merge-patch+json")
    cluster.apply(queue)
    assert plane.get(path)["spec"]["stopPolicy"] == "Hold", "what we do not set is left alone"
    assert {one["manager"] for one in plane.get(path)["metadata"]["managedFields"]} >= {"muster"}
    # An answer that never came: the request is sent again, and the object is what it was.
    cluster.connection = Losing(cluster.connection)
    once = cluster.apply({**queue, "metadata": {**queue["metadata"], "name": "lost"}})
    assert cluster.connection.sent == 2 and once["metadata"]["generation"] == 1
    cluster.delete({**queue, "metadata": {**queue["metadata"], "name": "lost"}})
    for one in queue_objects(where)[::-1]:
        cluster.delete(one)
        cluster.delete(one)
    assert cluster.get(queue) is None


def test_submit_is_one_jobset_however_often_and_whatever_is_lost(plane, home):
    launcher = GkeLauncher()
    spec = RunSpec.model_validate(document(plane, "twice"))
    run_id = run_registry.new_run_id("twice")
    run = run_registry.create(run_id, run_registry.place(run_id, None), run_file="x", resolved=spec.model_dump_json())
    request = launcher.render(spec, run_id=run_id, run_dir=str(run.path))
    assert launcher.find(run_id) is None and launcher.poll(handle_of(run_id)).state is JobState.ABSENT
    first = launcher.submit(request)
    assert launcher.submit(request) == first == launcher.find(run_id)
    assert len(plane.items(f"{JOBSETS}/jobsets?labelSelector=app.kubernetes.io/instance={run_id}")) == 1
    found = launcher.poll(first)
    assert found.state is JobState.WAITING and "waiting for Kueue to create a Workload" in found.reason
    launcher.cancel(first)
    plane.wait(lambda: not launcher.remaining(first), "end")
    assert launcher.find(run_id) is None and launcher.cancel(first) is None
    with pytest.raises(BackendError, match="Unsupported value"):
        launcher.submit(bad(request))
    assert launcher.remaining(first) == [], "the server's dry run refused it before anything was made"


def handle_of(run_id):
    from muster.core.types import JobHandle

    return JobHandle(run_id=run_id, backend="gke", job_id="", run_dir="/nowhere")


def bad(request):
    """A JobSet that the server refuses by its schema."""
    text = request.files["run.yaml"].replace("operator: All", "operator: Some")
    assert text != request.files["run.yaml"]
    return type(request)(**{**vars(request), "files": {**request.files, "run.yaml": text}})


def test_a_run_from_submit_to_its_end_with_everything_that_a_user_does(plane, played, home):
    """Queued, failed by its user, held, corrected; followed; a host, the supervisor and a machine lost; stopped."""
    played.hold = True
    changes = {"model.config.head_dim": 17, "recovery.keep_hosts_after_failure_s": 600.0, "checkpoint.every_steps": 50}
    run = Run(plane, home, "whole", **changes)
    plane.wait(lambda: plane.items(f"{WORKLOADS}/workloads"), "Workload")
    assert run.status()["state"] == "waiting" and not run.pods()
    played.admit()
    plane.wait(lambda: any(event.phase == "hold" for event in run.events("phase.changed")), "hold", 180)
    with run.followed() as follower:
        started = time.monotonic()
        run.muster("restart", run.id, "model.config.head_dim=16")
        run.wait_for_step(2)
        print(f"restart to step 2: {time.monotonic() - started:.1f} s")
        is_as_it_is_said(run)
        a_terminal_reaches_in(run)
        the_supervisor_goes(run)
        a_hosts_pod_goes(run)
        a_machine_dies(run)
        stopped = run.muster("stop", run.id)
        assert run.status()["exit_code"] == 130, stopped.stderr
        assert follower.wait(120) == 0, "following ends with the run"
    told_once(run, (home / "followed").read_text())
    run.muster("down", run.id)
    assert not run.pods() and not plane.items(f"{JOBSETS}/jobsets")


def is_as_it_is_said(run):
    status = run.status()
    assert (status["state"], status["phase"]) == ("running", "run") and status["step"] >= 1, status
    assert sorted(status["tasks"]) == ["host-0", "host-1", "host-2", "supervisor"], status
    nodes = [pod["spec"]["nodeName"] for (role, _), pod in run.pods().items() if role == "host"]
    assert len(set(nodes)) == 3, "one host a node"


def a_terminal_reaches_in(run):
    """One rank's log so far; one that is followed until somebody has enough; commands on hosts."""
    (log,) = (run.dir / "logs").glob(f"rank-2.a{run.attempt()}.log")
    said = run.muster("logs", run.id, "--rank", "2").stdout
    assert log.read_text() and log.read_text() in said
    argv = [sys.executable, "-m", "muster.cli.main", "logs", "-f", run.id, "--rank", "2"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as following:
        assert following.stdout.readline().rstrip("\n") in said
        following.send_signal(signal.SIGINT)
        assert following.wait(30) == 130, following.stderr.read()
    where = "import os; print(os.environ['MUSTER_NODE'])"
    asked = run.muster("exec", run.id, "--host", "1", "--", "python", "-c", f"{where}; exit(7)", check=False)
    assert (asked.returncode, asked.stdout.strip()) == (7, run.pods()["host", "1"]["spec"]["nodeName"])


def the_supervisor_goes(run):
    """Training goes on under the next one, in the same attempt."""
    attempt, before = run.attempt(), run.step()
    old = run.delete_pod("supervisor", 0)
    run.plane.wait(lambda: len(run.events("supervisor.started")) == 2, "second supervisor", 120)
    # Before its agents have answered, a host that is taken away ends the run: nobody could say who is left.
    run.plane.wait(lambda: run.events("attempt.adopted"), "takeover", 60)
    run.wait_for_step(before + 2)
    assert run.attempt() == attempt, "nothing was restarted"
    assert run.pods()["supervisor", "0"]["metadata"]["name"] != old


def a_hosts_pod_goes(run):
    """A drain: its Job makes another one, and the run recovers onto it."""
    attempt, old = run.attempt(), run.delete_pod("host", 2)
    run.plane.wait(lambda: run.pod_name("host", 2) not in (None, old), "new host")
    run.plane.wait(lambda: run.attempt() > attempt, "new attempt", 180)


def a_machine_dies(run):
    """First its kubelet: the run trains on, and its status says so. Then the rest: the pod comes back elsewhere."""
    plane, pods = run.plane, run.pods()
    beside = pods["supervisor", "0"]["spec"]["nodeName"]
    victim = next(pod for (role, _), pod in pods.items() if role == "host" and pod["spec"]["nodeName"] != beside)
    node, name = victim["spec"]["nodeName"], victim["metadata"]["name"]
    plane.kill_kubelet(node)
    plane.wait(lambda: node not in plane.ready_nodes(), "dead node", 60)
    attempt, before = run.attempt(), run.step()
    assert f"node {node} is not responding" in run.status()["reason"]
    run.wait_for_step(before + 2)
    assert run.attempt() == attempt, "a kubelet's death is not its pods'"
    plane.kill_pod(victim)
    plane.call("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": 0})  # what GKE's repair does in the end
    plane.wait(lambda: run.attempt() > attempt, "new attempt", 180)
    assert {pod["spec"]["nodeName"] for (role, _), pod in run.pods().items() if role == "host"}.isdisjoint({node})


def told_once(run, text):
    """What was followed: every line of every rank that lived to the end, in order, once; and who else spoke."""
    told = {}
    for line in text.splitlines():
        task, _, words = line.partition(" | ")
        told.setdefault(task, []).append(words)
    last = sorted((run.dir / "logs").glob(f"rank-*.a{run.attempt()}.log"))
    assert len(last) == 3 and all(told[path.stem] == path.read_text().splitlines() for path in last), told.keys()
    assert {"host-0", "host-1", "host-2", "supervisor"} & set(told) and "rank-0.a1" in told, "from before as well"


@pytest.mark.soak
def test_the_rest_of_a_run_goes_on_in_another_allocation(plane, played, home):
    """The rest is queued once, by the supervisor's own account, and goes on from the checkpoint."""
    run = Run(plane, home, "rest", **{"resources.hosts": 2, "checkpoint.every_steps": 50})
    run.wait_for_step(3, 240)
    played.hold = True
    (first,) = plane.items(f"{JOBSETS}/jobsets")
    name = first["metadata"]["name"]
    queue = f"from muster.backends.gke.pod.main import _requeue as queue; print(queue('default/{name}', 0))"
    made = {run.muster("exec", run.id, "--host", "0", "--", "python", "-c", queue).stdout for _ in range(2)}
    assert made == {f"default/{name}-c2\n"} or len(made) == 1, made
    run.muster("stop", run.id, "--no-wait")
    plane.wait(lambda: not run.pods() or run.finished(), "stop", 120)
    saved = run.step()
    plane.wait(lambda: run.status()["state"] == "waiting", "rest in the queue", 120)
    played.admit()
    run.wait_for_step(saved + 3, 240)
    assert min(event.step for event in run.events("step") if event.wall_ns > run.finished()) > saved - 50
    run.muster("down", run.id)
    assert not run.pods() and not plane.items(f"{JOBSETS}/jobsets")
