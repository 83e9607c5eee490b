"""A run that lives in a bucket, from the machine that submits: begun there, read there, asked in the right pod."""

import base64
import json

import pytest
from cases import spec
from fakes import supervisor_words
from fakes.bucket import Bucket
from fakes.clock import VirtualClock
from fakes.project import cloud_with_cluster

from muster.app.run import stop as stop_app
from muster.app.run import submit as submit_app
from muster.backends.gke.launcher import GkeLauncher
from muster.backends.gke.manifests import kueue_objects
from muster.config.load import Loaded
from muster.core import event_log
from muster.core.errors import AccessError, BackendError, ConflictError
from muster.core.typed_json import encode
from muster.core.types import JobState
from muster.protocol.client import AskStatus
from muster.protocol.codec import encode as encode_message
from muster.protocol.lease import EndRecord, LeaseRecord
from muster.protocol.version import MINE
from muster.storage import run_registry
from muster.storage.home import HOME_FILE
from muster.storage.home.bucket import BucketHome

SPEC = spec("a4-highgpu-8g", "flex_start_queued", project="example-project", spare_hosts=1,
            recovery={"keep_hosts_after_failure_s": 600.0})  # fmt: skip
PODS = "/api/v1/namespaces/default/pods"


@pytest.fixture
def google(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    return cloud_with_cluster()


@pytest.fixture
def bucket():
    return Bucket()


@pytest.fixture
def launcher(google, bucket, monkeypatch):
    found = GkeLauncher(http=google, clock=VirtualClock(), store=bucket)
    monkeypatch.setattr("muster.backends.load", lambda _: found)
    return found


@pytest.fixture
def run(launcher):
    return submit_app.submit(Loaded(spec=SPEC, text="name: llama\n", source="run.yaml")).run


@pytest.fixture
def home(run, bucket, tmp_path):
    """The home as a pod of the run has it."""
    local = tmp_path / "in-pod"
    (local / "events").mkdir(parents=True)
    (local / "run_id").write_text(run.run_id)
    return BucketHome(local, (run.path / HOME_FILE).read_text().strip(), store=bucket, bulk=bucket)


def put(google, kind, one):
    google.kubernetes.objects[f"{kind.strip('/')}/{one['metadata']['name']}"] = one


def pod(google, run, role, index, phase="Running", ip=None, made="1"):
    (jobset,) = google.kubernetes.of_kind("JobSet")
    roles = {one["name"]: one for one in jobset["spec"]["replicatedJobs"]}
    labels = {
        "app.kubernetes.io/instance": run.run_id,
        "jobset.sigs.k8s.io/replicatedjob-name": role,
        "jobset.sigs.k8s.io/job-index": str(index),
    }
    metadata = {"name": f"run-{role}-{index}", "namespace": "default", "labels": labels, "creationTimestamp": made}
    status = {"phase": phase, **({"podIP": ip} if ip else {})}
    spec_of_pod = {**roles[role]["template"]["spec"]["template"]["spec"], "nodeName": f"n-{role}-{index}"}
    put(google, PODS, {"kind": "Pod", "metadata": metadata, "spec": spec_of_pod, "status": status})


def lease(home, address):
    record = LeaseRecord(version=MINE, term=1, address=(address, 4000), pid=1, machine="m", boot_id="b",
                         expires_wall_ns=2**60, expires_mono_ns=2**60)  # fmt: skip
    home.store.put(home.uri_of("lease.json"), encode(record))


def end(home, jobset, *, code=130, submission="1", reason="stopped by the user"):
    record = EndRecord(job=jobset["metadata"]["name"], submission=submission, term=1, outcome="stopped",
                       exit_code=code, reason=reason, wall_ns=1)  # fmt: skip
    home.store.put(home.uri_of("end.json"), encode(record))


def over(google, kind="Failed"):
    (jobset,) = google.kubernetes.of_kind("JobSet")
    message = "applying FailJobSet failure policy action (first failed job: run-supervisor-0)"
    jobset["status"] = {"conditions": [{"type": kind, "status": "True", "message": message}]}
    return jobset


# ---------------------------------------------------------------- the beginning


def test_the_beginning_is_in_the_bucket_before_anything_can_act_on_it(launcher, google, bucket, monkeypatch):
    order = []
    plain, sealed = google.kubernetes.handle, bucket.put_if_absent

    def handle(method, target, body=b""):
        if method == "POST" and "/jobsets" in target:
            order.append("jobset")
        return plain(method, target, body)

    def put_if_absent(uri, data):
        order.append(uri.split("/muster-runs/")[1].partition("/")[2])
        return sealed(uri, data)

    monkeypatch.setattr(google.kubernetes, "handle", handle)
    monkeypatch.setattr(bucket, "put_if_absent", put_if_absent)
    found = submit_app.submit(Loaded(spec=SPEC, text="name: llama\n", source="run.yaml"))
    assert order == ["run_id", "events/client/client.0.jsonl/000000000000", "jobset"]
    assert (found.run.path / HOME_FILE).read_text() == f"gs://example-bucket/muster-runs/{found.run.run_id}\n"
    (segment,) = bucket.list(f"gs://example-bucket/muster-runs/{found.run.run_id}/events")
    assert b"run.submitted" in bucket.get(segment).data


def test_the_token_is_in_no_object_of_the_bucket_and_in_no_argument(launcher, google, run, bucket):
    (secret,) = google.kubernetes.of_kind("Secret")
    (jobset,) = google.kubernetes.of_kind("JobSet")
    token = (run.path / "token").read_text().strip()
    assert len(token) >= 32 and token in json.dumps({**secret.get("stringData", {}), **_decoded(secret)})
    held = bucket.list(home_uri := (run.path / HOME_FILE).read_text().strip())
    assert held and home_uri.startswith("gs://")
    assert not [uri for uri in held if token.encode() in bucket.get(uri).data]
    assert token not in json.dumps(jobset)


def _decoded(secret):
    return {key: base64.b64decode(value).decode() for key, value in secret.get("data", {}).items()}


def test_where_the_bucket_cannot_be_written_nothing_starts(launcher, google, bucket):
    bucket.closed = True
    with pytest.raises(AccessError, match=r"storage\.objects"):
        submit_app.submit(Loaded(spec=SPEC, text="name: llama\n", source="run.yaml"))
    assert not google.kubernetes.of_kind("JobSet") and not google.kubernetes.of_kind("Secret")
    assert list(run_registry.registry()) == []


def test_a_bucket_that_does_not_take_the_first_events_starts_nothing(launcher, google, bucket, monkeypatch):
    sealed = bucket.put_if_absent

    def put_if_absent(uri, data):
        if "/events/" in uri:
            raise BackendError("503")
        return sealed(uri, data)

    monkeypatch.setattr(bucket, "put_if_absent", put_if_absent)
    with pytest.raises(BackendError, match=r"the run's beginning cannot be written to gs://.*503"):
        submit_app.submit(Loaded(spec=SPEC, text="name: llama\n", source="run.yaml"))
    assert not google.kubernetes.of_kind("JobSet")


def test_two_runs_do_not_share_a_home(launcher, google, bucket):
    named = SPEC.model_copy(update={"run_dir": "gs://example-bucket/shared"})
    bucket.put("gs://example-bucket/shared/run_id", b"another-20260101-000000-0000\n")
    with pytest.raises(ConflictError, match="the run another-20260101-000000-0000 lives in gs://example-bucket/shared"):
        submit_app.submit(Loaded(spec=named, text="name: llama\n", source="run.yaml"))
    assert not google.kubernetes.of_kind("JobSet")


def test_the_next_submission_adds_to_the_same_home(launcher, google, run, bucket):
    over(google)
    request = launcher.render(SPEC, run_id=run.run_id, run_dir=str(run.path))
    submit_app.log_event(run, "run.message", {"text": "again"})
    launcher.submit(type(request)(**{**vars(request), "labels": {**request.labels, "submission": "2"}}))
    home = (run.path / HOME_FILE).read_text().strip()
    stored = b"".join(bucket.get(uri).data for uri in bucket.list(f"{home}/events"))
    assert stored.count(b"run.submitted") == 1 and stored.count(b'"again"') == 1


# ---------------------------------------------------------------- how it is, and how it ended


def test_the_exit_code_outlives_the_pods(launcher, google, run, home, bucket):
    """Kubernetes says only "Failed"; the supervisor's pod goes with its node, minutes after the end."""
    handle = launcher.find(run.run_id)
    jobset = over(google)
    assert launcher.poll(handle).exit_code == 1, "nothing says more"
    message = "Container supervisor for pod default/run-supervisor-0-0-x failed with exit code 130 matching FailJob "
    job = {"kind": "Job", "metadata": {"name": "run-supervisor-0", "namespace": "default", "labels": {
        "jobset.sigs.k8s.io/jobset-name": jobset["metadata"]["name"],
        "jobset.sigs.k8s.io/replicatedjob-name": "supervisor"}},
        "status": {"conditions": [{"type": "Failed", "status": "True", "reason": "PodFailurePolicy",
                                   "message": message + "rule at index 2"}]}}  # fmt: skip
    put(google, "/apis/batch/v1/namespaces/default/jobs", job)
    found = launcher.poll(handle)
    assert (found.state, found.exit_code) == (JobState.STOPPED, 130)
    bucket.asked.clear()
    end(home, jobset, code=4, reason="the loss is not a number at step 12")
    bucket.asked.clear()
    found = launcher.poll(handle)
    assert (found.state, found.exit_code) == (JobState.FAILED, 4)
    assert found.reason == "failed: the loss is not a number at step 12"
    assert sum(bucket.asked.values()) <= 3 and not bucket.asked["list"]


@pytest.mark.parametrize("change", [{"submission": "2"}, {"jobset": {"metadata": {"name": "another-c2"}}},
                                    {"code": 75}])  # fmt: skip
def test_the_end_of_another_submission_or_allocation_is_not_this_ones(launcher, google, run, home, change):
    jobset = over(google, "Completed")
    end(home, **{"jobset": jobset, "code": 4, **change})
    found = launcher.poll(launcher.find(run.run_id))
    assert (found.state, found.exit_code) == (JobState.SUCCEEDED, 0)


def test_an_end_that_cannot_be_read_leaves_the_clusters_word(launcher, google, run, home, bucket):
    home.store.put(home.uri_of("end.json"), b"{")
    over(google, "Completed")
    assert launcher.poll(launcher.find(run.run_id)).state is JobState.SUCCEEDED
    bucket.closed = True
    assert launcher.poll(launcher.find(run.run_id)).state is JobState.SUCCEEDED


def test_after_the_jobset_is_gone_the_home_says_how_it_ended(launcher, google, run, home):
    """Three days after the end nothing is left on the cluster but what has no owner."""
    handle = launcher.find(run.run_id)
    (jobset,) = google.kubernetes.of_kind("JobSet")
    for key in [key for key in google.kubernetes.objects if "/jobsets/" in key]:
        del google.kubernetes.objects[key]
    assert launcher.poll(handle).state is JobState.ABSENT
    end(home, jobset, code=75, reason="the rest is queued")
    assert launcher.poll(handle).state is JobState.ABSENT, "its continuation is gone too: nobody knows"
    end(home, jobset, code=0, reason="all steps done")
    found = launcher.poll(handle)
    assert (found.state, found.exit_code, found.reason) == (JobState.SUCCEEDED, 0, "finished: all steps done")
    assert any(line.startswith("ConfigMap/") for line in launcher.remaining(handle)), "down still removes it"
    google.store.clear()
    assert launcher.poll(handle).state is JobState.SUCCEEDED, "nor is the cluster needed"


# ---------------------------------------------------------------- two supervisors


def test_the_supervisor_that_holds_the_lease_is_asked(launcher, google, run, home):
    for index, ip in ((0, "10.0.0.8"), (1, "10.0.0.9")):
        pod(google, run, "supervisor", index, ip=ip, made=str(9 - index))
    asked = []

    def command(name, argv, line):
        asked.append(name)
        return 0, encode_message(supervisor_words.status("run")) + b"\n", b""

    google.commands = command
    lease(home, "10.0.0.9")
    launcher.ask(run.run_id, AskStatus())
    assert launcher.poll(launcher.find(run.run_id)).tasks == {
        "supervisor": "running on n-supervisor-1", "stand-by": "running on n-supervisor-0"}  # fmt: skip
    lease(home, "10.0.0.8")
    launcher.ask(run.run_id, AskStatus())
    assert launcher.poll(launcher.find(run.run_id)).tasks["supervisor"] == "running on n-supervisor-0"
    lease(home, "10.0.0.77")
    launcher.ask(run.run_id, AskStatus())
    assert asked == ["run-supervisor-1", "run-supervisor-0", "run-supervisor-0"], "else the newest that runs"


def test_one_of_two_supervisors_is_enough(launcher, google, run):
    (jobset,) = google.kubernetes.of_kind("JobSet")
    jobset["spec"]["suspend"] = False
    admitted = [{"type": kind, "status": "True"} for kind in ("QuotaReserved", "Admitted")]
    workload = {"metadata": {"name": "w", "ownerReferences": [{"name": jobset["metadata"]["name"]}]},
                "status": {"conditions": admitted}}  # fmt: skip
    put(google, "/apis/kueue.x-k8s.io/v1beta2/namespaces/default/workloads", {"kind": "Workload", **workload})
    pod(google, run, "supervisor", 0, phase="Pending")
    pod(google, run, "supervisor", 1)
    for index in range(3):
        pod(google, run, "host", index)
    for role, index in [("supervisor", 0), ("supervisor", 1), *(("host", index) for index in range(3))]:
        ready = {"conditions": [{"type": "Ready", "status": "True"}]}
        put(google, "/api/v1/nodes", {"kind": "Node", "metadata": {"name": f"n-{role}-{index}"}, "status": ready})
    found = launcher.poll(launcher.find(run.run_id))
    assert (found.state, found.reason) == (JobState.RUNNING, "running: 3 hosts and the supervisor")
    assert found.tasks["supervisor"] == "running on n-supervisor-1"
    assert found.tasks["stand-by"] == "pending on n-supervisor-0"


# ---------------------------------------------------------------- events, output, a corrected run file


def test_events_come_from_the_home_and_no_pod_is_asked(launcher, google, run, home):
    pod(google, run, "supervisor", 0)
    google.commands = lambda *_: pytest.fail("a pod was asked")
    log = home.open_log(run.run_id, "supervisor", 1)
    log.append("run.message", detail={"text": "one"})
    log.sync()
    assert launcher.mirror(run.run_id, run.events) > 0 and launcher.mirror(run.run_id, run.events) == 0
    log.append("run.message", detail={"text": "two"})
    log.sync()
    log.close()
    google.store.clear()  # the cluster is given back; the bucket was kept
    assert launcher.mirror(run.run_id, run.events) > 0
    events = list(event_log.merged(run.events))
    assert [event.kind for event in events].count("run.message") == 2 and "run.submitted" in str(events)


def test_output_comes_from_the_home_and_what_pods_write_themselves_from_them(launcher, google, run, home, bucket):
    (home.local / "logs").mkdir()
    (home.local / "logs" / "rank-3.a1.log").write_text("eins ä\n")
    home.output("host-1-abcde").ship()
    pod(google, run, "host", 1)
    google.logs[f"{PODS}/run-host-1/log"] = "agent up\nrank-3.a1 | eins ä\n"
    handle = launcher.find(run.run_id)
    told = {one.task: one for one in launcher.logs(handle)}
    assert {name: one.text for name, one in told.items()} == {"host-1": "agent up\n", "rank-3.a1": "eins ä\n"}
    after = {name: one.next_offset for name, one in told.items()}
    assert list(launcher.logs(handle, after=after)) == []
    (home.local / "logs" / "rank-3.a1.log").write_text("eins ä\nzwei\n")
    home.output("host-1-abcde").ship()
    assert [one.text for one in launcher.logs(handle, after=after)] == ["zwei\n"]
    google.store.clear()
    assert [one.text for one in launcher.logs(handle)] == ["eins ä\nzwei\n"], "the pods and the cluster are gone"


def test_where_the_bucket_cannot_be_read_the_pods_own_output_has_the_ranks(launcher, google, run, bucket):
    pod(google, run, "host", 1)
    google.logs[f"{PODS}/run-host-1/log"] = "agent up\nrank-3.a1 | eins\n"
    bucket.closed = True
    told = {one.task: one.text for one in launcher.logs(launcher.find(run.run_id))}
    assert told == {"host-1": "agent up\n", "rank-3.a1": "eins\n"}


def test_a_corrected_run_file_is_in_the_home_before_the_supervisor_is_told(google, run, home, tmp_path):
    script = tmp_path / "project" / "train.py"
    (script.parent / "inner").mkdir(parents=True)
    script.write_text("corrected")
    (script.parent / "inner" / "part.py").write_text("of it")
    own = SPEC.model_copy(update={"model": None, "data": None, "command": [str(script)]})
    run.resolved.write_text(own.model_dump_json())
    pod(google, run, "supervisor", 0)
    seen = []

    def command(_pod, _argv, line):
        fetched = home.fetch()
        seen.append({path.name: path.read_text() for path in (home.local / "code").rglob("*.py")} if fetched else None)
        return 0, encode_message(supervisor_words.status("hold")) + b"\n", b""

    google.commands = command
    stop_app.restart(run.run_id)
    assert seen == [None, {"train.py": "corrected", "part.py": "of it"}]
    placed = json.loads((home.local / "resolved.json").read_text())
    assert placed["command"] == [f"/run-local/{run.run_id}/code/train.py"], "as the pods see it"


# ---------------------------------------------------------------- what stays behind


def test_what_is_left_names_budgets_and_the_objects_of_a_kueue_that_is_down(launcher, google, run):
    handle = launcher.find(run.run_id)
    name = handle.job_id.split("/")[1]
    labels = {"app.kubernetes.io/instance": run.run_id}
    budget = {"kind": "PodDisruptionBudget", "metadata": {"name": f"{name}-x", "labels": labels, "uid": "u"}}
    put(google, "/apis/policy/v1/namespaces/default/poddisruptionbudgets", budget)
    workloads = "/apis/kueue.x-k8s.io/v1beta2/namespaces/default/workloads"
    for owner in (name, f"{name}-c2", f"{name}-cat", "another"):
        owners = [{"kind": "JobSet", "name": owner}]
        put(google, workloads, {"kind": "Workload", "metadata": {"name": f"jobset-{owner}", "ownerReferences": owners}})
    launcher.cancel(handle)
    assert launcher.remaining(handle) == [f"Workload/jobset-{name}", f"Workload/jobset-{name}-c2"]


def test_a_priority_class_that_is_not_there_is_left_out_and_said(launcher, google):
    """Pods of an unknown class are refused, and Kueue makes no Workload of their JobSet."""
    loaded = Loaded(spec=SPEC, text="name: llama\n", source="run.yaml")
    found = submit_app.submit(loaded)
    (jobset,) = google.kubernetes.of_kind("JobSet")
    assert "priorityClassName" not in json.dumps(jobset)
    assert any("no PriorityClass muster-supervisor" in line for line in found.handle.warnings)
    google.kubernetes.objects.pop(next(key for key in google.kubernetes.objects if "/jobsets/" in key))
    put(google, "/apis/scheduling.k8s.io/v1/priorityclasses", kueue_objects.priority_class())
    found = submit_app.submit(loaded)
    (jobset,) = google.kubernetes.of_kind("JobSet")
    assert '"priorityClassName": "muster-supervisor"' in json.dumps(jobset)
    assert not any("PriorityClass" in line for line in found.handle.warnings)
