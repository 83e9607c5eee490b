"""What `muster up` and `submit` put on a cluster, on a real API server with JobSet's and Kueue's webhooks played.

Runs are in ``test_gke_run_live.py`` and ``test_gke_losses_live.py``; what stands in for GKE is in ``gke_runs``.
"""

import base64
import contextlib
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from gke_runs import JOBSETS, KUEUE, document, placed

from muster.agent.hardware.kernel_lines import WATCHER
from muster.backends.gke.kubernetes.config import connect, own_cluster
from muster.backends.gke.launcher import GkeLauncher
from muster.backends.gke.manifests.kueue_objects import account_objects, queue_objects
from muster.backends.gke.operate.cordon import WHY, cordon
from muster.backends.google.http import Unreachable
from muster.config.spec import RunSpec
from muster.core.clock import SystemClock
from muster.core.errors import AccessError, BackendError
from muster.core.types import JobHandle, JobState
from muster.health.hardware.node_condition import CONDITION
from muster.protocol.codec import reader_of
from muster.protocol.pipes import NODE_CONDITIONS, NodeCondition
from muster.storage import run_registry

pytest_plugins = ["gke_runs"]
pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


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
    versions = [
        [one["metadata"]["resourceVersion"] for one in rows if one["kind"] != "PriorityClass"] for rows in (made, again)
    ]
    assert versions[0] == versions[1]  # this old server writes a PriorityClass anew at every apply
    queue = next(one for one in objects if one["kind"] == "ClusterQueue")
    path = f"{KUEUE}/clusterqueues/{queue['metadata']['name']}"
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
        launcher.submit(changed(request, "operator: Any", "operator: Some"))
    assert launcher.remaining(first) == [], "the server's dry run refused it before anything was made"


def handle_of(run_id):
    return JobHandle(run_id=run_id, backend="gke", job_id="", run_dir="/nowhere")


def changed(request, old, new):
    text = request.files["run.yaml"].replace(old, new)
    assert text != request.files["run.yaml"]
    return type(request)(**{**vars(request), "files": {**request.files, "run.yaml": text}})


def test_row_01_the_dry_run_meets_the_webhooks(plane, home):
    """What only a webhook refuses is refused before anything is made, and webhooks that are away are waited for."""
    launcher = GkeLauncher()
    spec = RunSpec.model_validate(document(plane, "refused"))
    run_id = run_registry.new_run_id("refused")
    run = run_registry.create(run_id, run_registry.place(run_id, None), run_file="x", resolved=spec.model_dump_json())
    request = launcher.render(spec, run_id=run_id, run_dir=str(run.path))
    with pytest.raises(BackendError, match="feature gate RestartJob"):
        launcher.submit(changed(request, "action: FailJobSet", "action: RestartJob"))
    assert launcher.remaining(handle_of(run_id)) == []
    plane.beside.ready = False
    try:
        with pytest.raises(BackendError, match="failed calling webhook"):
            launcher.submit(request)
    finally:
        plane.beside.ready = True
    assert launcher.remaining(handle_of(run_id)) == []


def own_account(plane, folder):
    """The run's service account as a pod has it in ``folder``; what it finds in its environment."""
    secret = plane.get("/api/v1/namespaces/default/serviceaccounts/muster")["secrets"][0]["name"]
    token = plane.get(f"/api/v1/namespaces/default/secrets/{secret}")["data"]["token"]
    (folder / "token").write_bytes(base64.b64decode(token))
    shutil.copy(plane.dir / "server.pem", folder / "ca.crt")
    return {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(plane.ports["api"])}


def test_a_pods_account_reads_its_nodes_xids_once_it_may(plane, tmp_path):
    """By RBAC of a real server: refused, then granted by what ``up`` makes, then each condition that GKE would set."""
    where = own_account(plane, tmp_path)
    bound = next(one for one in account_objects(placed()) if one["kind"] == "ClusterRoleBinding")
    path = f"/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/{bound['metadata']['name']}"
    plane.call("DELETE", path)
    child = subprocess.Popen(
        [sys.executable, "-m", WATCHER, "node1", "--every-s", "0.2", "--account", str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **where},
        bufsize=0,  # so that select knows of each line
    )  # fmt: skip
    decode = reader_of(NODE_CONDITIONS)
    passing = []

    def line():
        assert select.select([child.stdout], [], [], 120)[0], f"nothing more is told; before: {passing}"
        return child.stdout.readline()

    def told(wanted):
        """What it says of the node next: a server of a loaded machine may fail one look in between."""
        while (found := decode(line())).problem:
            passing.append(found.problem)
        assert found == wanted, (found, passing)

    try:
        refused = decode(line())
        assert "cannot get resource" in refused.problem and "default:muster" in refused.problem
        plane.apply(path, bound)
        told(NodeCondition())  # the node has none
        for reason in ('{"48":true}', '{"48":true,"79":true}'):
            row = {"type": CONDITION, "status": "True", "reason": reason, "lastTransitionTime": "2026-11-24T04:00:00Z"}
            status, said = plane.call(
                "PATCH", "/api/v1/nodes/node1/status", {"status": {"conditions": [row]}},
                "application/strategic-merge-patch+json",
            )  # fmt: skip
            assert status == 200, said
            told(NodeCondition(status="True", reason=reason, since="2026-11-24T04:00:00Z"))
        child.communicate(timeout=60)
        assert child.returncode == 0, "it ends with its standard input"
    finally:
        child.kill()
        plane.apply(path, bound)


def test_a_faulty_node_is_cordoned_once_the_accounts_role_allows_it(plane, tmp_path):
    """By RBAC of a real server: what ``up`` grants does not suffice, the role of docs/how-to/check.md does."""
    where = own_account(plane, tmp_path)

    def connect():
        return own_cluster(SystemClock(), where, tmp_path)

    with pytest.raises(AccessError, match="cannot patch resource"):
        cordon("node1", "a reason", connect)
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "check.md").read_text()
    role, binding = yaml.safe_load_all(page.partition("```yaml\n")[2].partition("```")[0])
    root = "/apis/rbac.authorization.k8s.io/v1"
    paths = [f"{root}/{held['kind'].lower()}s/{held['metadata']['name']}" for held in (role, binding)]
    try:
        for path, held in zip(paths, (role, binding), strict=True):
            plane.apply(path, held)

        def cordoned():
            with contextlib.suppress(AccessError):  # a grant takes a moment to hold
                return cordon("node1", "GPU 3: Xid 79", connect)

        assert "it gets no new pods" in plane.wait(cordoned, "the grant")
        node = plane.get("/api/v1/nodes/node1")
        assert node["spec"]["unschedulable"] is True
        assert node["metadata"]["annotations"][WHY] == "GPU 3: Xid 79"
        assert cordon("node1", "again", connect) == "node node1 is cordoned already"
        with pytest.raises(BackendError, match="no node node-9"):
            cordon("node-9", "nobody", connect)
    finally:
        for path in paths:
            plane.call("DELETE", path)
        strategic = "application/strategic-merge-patch+json"
        plane.call("PATCH", "/api/v1/nodes/node1", {"spec": {"unschedulable": None}}, strategic)
