"""Submit, find, poll, logs, cancel against a cluster in memory; a run's life as its user sees it."""

import base64

import pytest
from cases import spec
from fakes.bucket import Bucket
from fakes.project import cloud_with_cluster

from muster import backends
from muster.backends.gke.launcher import GkeLauncher
from muster.backends.gke.operate.submission import ANNOTATION
from muster.backends.google.http import Call
from muster.backends.machine_prices import machine_usd_per_hour
from muster.core.errors import BackendError, UsageError
from muster.core.types import JobHandle, JobState
from muster.storage import run_registry
from muster.storage.job_record import SUBMISSION

SPEC = spec("a4-highgpu-8g", "flex_start_queued", project="example-project", spare_hosts=1)
JOBSETS = "apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets"


class VirtualClock:
    def sleep(self, seconds):
        pass


@pytest.fixture
def google():
    return cloud_with_cluster()


@pytest.fixture
def launcher(google, tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    return GkeLauncher(http=google, clock=VirtualClock(), store=Bucket())


@pytest.fixture
def request_(launcher):
    run_id = run_registry.new_run_id("llama")
    path = run_registry.place(run_id, None)
    run_registry.create(run_id, path, run_file="name: llama\n", resolved=SPEC.model_dump_json())
    return launcher.render(SPEC, run_id=run_id, run_dir=str(path))


def put(google, path, one):
    google.kubernetes.handle("PUT", f"/{path}/{one['metadata']['name']}", _bytes(one))


def _bytes(one):
    import json

    return json.dumps(one).encode()


def pod(run_id, role, index, phase="Running", **status):
    labels = {
        "app.kubernetes.io/instance": run_id,
        "jobset.sigs.k8s.io/replicatedjob-name": role,
        "jobset.sigs.k8s.io/job-index": str(index),
    }
    metadata = {"name": f"run-{role}-{index}", "namespace": "default", "labels": labels}
    return {
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"nodeName": f"n{index}"},
        "status": {"phase": phase, **status},
    }


def test_submitting_twice_is_one_jobset(launcher, google, request_):
    first, second = launcher.submit(request_), launcher.submit(request_)
    assert first == second and len(google.kubernetes.of_kind("JobSet")) == 1
    (secret,) = google.kubernetes.of_kind("Secret")
    folder = run_registry.RunDir(path=run_registry.place(request_.run_id, None), run_id=request_.run_id)
    token = folder.token.read_text().strip()
    assert base64.b64decode(secret["data"]["token"]).decode() == token
    assert "token" not in request_.files["run.yaml"].split("resolved.json")[0]


def test_the_server_is_asked_before_anything_is_created(launcher, google, request_):
    launcher.submit(request_)
    writes = [(method, url) for method, url in google.log if method in ("PATCH", "POST") and "fieldManager" in url]
    assert all("fieldValidation=Strict" in url for _, url in writes)
    dry = [index for index, (method, url) in enumerate(writes) if "dryRun=All" in url]
    assert len(dry) == 3 and max(dry) < min(set(range(len(writes))) - set(dry))
    assert {method for method, url in writes if "dryRun=All" not in url} == {"POST"}


def test_run_folder_of_the_pods_is_in_the_bucket(launcher, request_):
    assert request_.run_dir == f"/run-local/{request_.run_id}"


def test_hosts_without_a_supervisor_are_reported_with_their_price(launcher, google, request_):
    """By the catalogue, for the run file's machine, way of buying it and place."""
    handle = launcher.submit(request_)
    name = handle.job_id.split("/")[1]
    (jobset,) = google.kubernetes.of_kind("JobSet")
    jobset["spec"]["suspend"] = False
    rows = [{"type": kind, "status": "True"} for kind in ("QuotaReserved", "Admitted")]
    workload = {"kind": "Workload", "metadata": {"name": "w", "ownerReferences": [{"name": name}]},
                "status": {"conditions": rows}}  # fmt: skip
    put(google, "apis/kueue.x-k8s.io/v1beta2/namespaces/default/workloads", workload)
    refused = [{"type": "PodScheduled", "status": "False", "message": "0/4 nodes are available"}]
    for index in (0, 1):
        put(google, "api/v1/namespaces/default/pods", pod(request_.run_id, "host", index))
        waiting = pod(request_.run_id, "supervisor", index, "Pending", conditions=refused)
        waiting["spec"] = {}
        put(google, "api/v1/namespaces/default/pods", waiting)
    usd = 2 * machine_usd_per_hour("a4-highgpu-8g", "flex_start", "us-central1")
    assert usd > 20
    assert launcher.poll(handle).reason == (
        "the supervisor has no node: no node fits (0/4 nodes are available); 2 host nodes bill meanwhile, about "
        f"${usd:.2f} an hour"
    )


def test_the_life_of_a_run(launcher, google, request_):
    handle = launcher.submit(request_)
    name = handle.job_id.split("/")[1]
    said = []

    def look():
        found = launcher.poll(handle)
        said.append(found.reason.split(" (hint")[0])
        return found

    look()
    reserved = {"type": "QuotaReserved", "status": "True"}
    workload = {
        "kind": "Workload",
        "metadata": {"name": "jobset-w", "ownerReferences": [{"name": name}]},
        "status": {"conditions": [reserved], "admissionChecks": [{"name": "muster-dws", "state": "Pending"}]},
    }
    workloads = "apis/kueue.x-k8s.io/v1beta2/namespaces/default/workloads"
    put(google, workloads, workload)
    look()
    asked = {"kind": "ProvisioningRequest", "metadata": {"name": "jobset-w-muster-dws-1"}}
    asked["metadata"]["ownerReferences"] = [{"name": "jobset-w"}]
    asked["status"] = {"conditions": [{"type": "Accepted", "status": "True"}]}
    requests = "apis/autoscaling.x-k8s.io/v1/namespaces/default/provisioningrequests"
    put(google, requests, asked)
    look()
    workload["status"]["conditions"].append({"type": "Admitted", "status": "True"})
    put(google, workloads, workload)
    (jobset,) = google.kubernetes.of_kind("JobSet")
    jobset["spec"]["suspend"] = False
    look()
    pods = "api/v1/namespaces/default/pods"
    nodes = "api/v1/nodes"
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    for index, role in enumerate(["supervisor", "host", "host", "host"]):
        put(google, pods, pod(request_.run_id, role, max(0, index - 1)))
        put(google, nodes, {"kind": "Node", "metadata": {"name": f"n{index}"}, "status": ready})
    found = look()
    assert found.state is JobState.RUNNING and found.tasks["host-2"] == "running on n2"
    gone = [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByKubeScheduler"}]
    put(google, pods, pod(request_.run_id, "host", 1, "Failed", conditions=gone))
    look()
    put(google, pods, pod(request_.run_id, "host", 1))
    look()
    jobset["status"] = {"conditions": [{"type": "Completed", "status": "True"}]}
    found = look()
    assert (found.state, found.exit_code) == (JobState.SUCCEEDED, 0)
    launcher.cancel(handle)
    assert launcher.poll(handle).state is JobState.RUNNING and "run" in launcher.remaining(handle)[0]
    for path in [path for path in google.kubernetes.objects if "/pods/" in path or "/workloads/" in path]:
        del google.kubernetes.objects[path]
    look()
    assert launcher.remaining(handle) == []
    assert said == [
        "waiting for Kueue to create a Workload for the run",
        "quota is reserved; waiting for admission check muster-dws (no request to DWS yet)",
        "DWS has accepted the request jobset-w-muster-dws-1; waiting for capacity",
        "admitted; its pods are being created",
        "running: 3 hosts and the supervisor",
        "1 of 4 pods lost: host-1 (PreemptionByKubeScheduler on n1); waiting for replacements",
        "running: 3 hosts and the supervisor",
        "finished: the supervisor's job completed",
        "no such run on the cluster",
    ]


def test_what_brings_a_runs_page_to_the_collector_goes_with_the_run(launcher, google):
    run_id = run_registry.new_run_id("llama")
    path = run_registry.place(run_id, None)
    paged = spec("a4-highgpu-8g", "flex_start_queued", project="example-project", metrics={"port": 0})
    run_registry.create(run_id, path, run_file="name: llama\n", resolved=paged.model_dump_json())
    handle = launcher.submit(launcher.render(paged, run_id=run_id, run_dir=str(path)))
    kinds = {"PodMonitoring": 1, "Role": 1, "RoleBinding": 1, "Secret": 2}
    assert {kind: len(google.kubernetes.of_kind(kind)) for kind in kinds} == kinds
    launcher.cancel(handle)
    assert {kind: google.kubernetes.of_kind(kind) for kind in kinds} == {kind: [] for kind in kinds}
    assert launcher.remaining(handle) == []


def test_a_new_submission_after_the_end_is_a_new_jobset(launcher, google, request_):
    launcher.submit(request_)
    (jobset,) = google.kubernetes.of_kind("JobSet")
    jobset["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    again = type(request_)(**{**vars(request_), "labels": {**request_.labels, SUBMISSION: "2"}})
    launcher.submit(again)
    (jobset,) = google.kubernetes.of_kind("JobSet")
    assert "status" not in jobset and jobset["metadata"]["annotations"][ANNOTATION] == "2"


def test_logs_resume_where_they_stopped(launcher, google, request_):
    handle = launcher.submit(request_)
    put(google, "api/v1/namespaces/default/pods", pod(request_.run_id, "host", 1))
    path = "/api/v1/namespaces/default/pods/run-host-1/log"
    google.logs[path] = "eins ä\n"
    (chunk,) = launcher.logs(handle)
    assert (chunk.task, chunk.text) == ("host-1", "eins ä\n")
    google.logs[path] += "zwei\n"
    (chunk,) = launcher.logs(handle, after={"host-1": chunk.next_offset})
    assert chunk.text == "zwei\n" and not list(launcher.logs(handle, after={"host-1": chunk.next_offset}))
    google.logs[path] = "neu\n"
    assert next(launcher.logs(handle, after={"host-1": chunk.next_offset})).text == "neu\n"


def test_a_queue_that_does_not_exist_is_said_and_nothing_is_created(google, launcher, request_):
    google.kubernetes.queues.clear()
    put(google, "apis/kueue.x-k8s.io/v1beta2/namespaces/default/localqueues", {"metadata": {"name": "team-a"}})
    before = dict(google.kubernetes.objects)
    with pytest.raises(UsageError, match="no queue 'muster-b200-flex-start-queued' in namespace 'default'") as caught:
        launcher.submit(request_)
    assert caught.value.hint == "muster up RUN.yaml makes it; or resources.queue: team-a"
    assert google.kubernetes.objects == before


def test_found_by_the_label(launcher, google, request_):
    assert launcher.find(request_.run_id) is None
    handle = launcher.submit(request_)
    found = launcher.find(request_.run_id)
    assert found is not None and found.job_id == handle.job_id


def test_the_absent(launcher):
    nothing = JobHandle(run_id="never-was", backend="gke", job_id="", run_dir="/nowhere")
    assert launcher.poll(nothing).state is JobState.ABSENT
    assert list(launcher.logs(nothing)) == [] and launcher.cancel(nothing) is None and launcher.remaining(nothing) == []


def test_no_cluster_is_said_with_the_next_step(launcher, google, request_):
    google.store.clear()
    with pytest.raises(BackendError, match="no cluster muster in us-central1") as caught:
        launcher.submit(request_)
    assert "muster up" in caught.value.hint and not google.kubernetes.objects


def test_a_refused_object_creates_nothing(launcher, google, request_, monkeypatch):
    def refuse(method, target, body=b""):
        if method == "PATCH":
            return 400, {
                "kind": "Status",
                "message": 'unknown field "spec.replicatedJobs[0].x"',
                "reason": "BadRequest",
            }
        return original(method, target, body)

    original = google.kubernetes.handle
    monkeypatch.setattr(google.kubernetes, "handle", refuse)
    with pytest.raises(BackendError, match="unknown field"):
        launcher.submit(request_)
    assert not google.kubernetes.objects


def test_offers_are_of_this_back_end(launcher):
    found = launcher.offers(SPEC)
    assert found and {(one.backend, one.machine, one.mode) for one in found} == {("gke", "a4-highgpu-8g", "flex_start")}


def test_a_request_shows_what_is_sent_but_no_secret():
    call = Call(method="PATCH", url="https://cluster/x", body={"data": {"token": "c2VjcmV0"}}, secret=True)
    assert "c2VjcmV0" not in call.shown()


def test_the_back_end_is_loaded_by_name_any_number_of_times():
    assert [backends.load("gke").name for _ in range(3)] == ["gke", "gke", "gke"]


def test_submit_says_what_the_clusters_kueue_would_do_to_the_run(launcher, google, request_):
    text = "apiVersion: config.kueue.x-k8s.io/v1beta2\nkind: Configuration\n"
    config = {"metadata": {"name": "kueue-manager-config"}, "data": {"controller_manager_config.yaml": text}}
    put(google, "api/v1/namespaces/kueue-system/configmaps", config)
    warnings = launcher.submit(request_).warnings
    kueue = [line for line in warnings if line.startswith("Kueue of this cluster ends runs")]
    assert len(kueue) == 2 and "a host short for 30 minutes is evicted" in kueue[1]
    assert launcher.submit(request_).warnings == (), "it is there already"
