"""The played custom-job service is as unkind as the real one: what a worker's container meets."""

import json
import re
import shutil
import socket
import subprocess
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

discovery = pytest.importorskip("fakes.discovery")
if discovery.folder() is None:
    pytest.skip("google-api-python-client (Google's discovery documents) is not installed", allow_module_level=True)

from fakes.google_wire import Wire  # noqa: E402
from fakes.secrets import ACCESSOR, API, FakeSecrets, crc32c  # noqa: E402
from fakes.vertex.inside import TENANT, FromWorker, Names, forwarder, spec_of  # noqa: E402
from fakes.vertex.jobs import Manners  # noqa: E402
from fakes.vertex.machines import memory_left  # noqa: E402
from fakes.vertex.plugin import build, log  # noqa: E402
from fakes.vertex.service import NUMBER, PROJECT  # noqa: E402
from fakes.vertex.submitter import ACCOUNT, Submitter, at, job, pool  # noqa: E402
from fakes.vertex.workers import SHM, VARIANTS, Programs, Variant  # noqa: E402

from muster.backends.google.http import Call  # noqa: E402

SECRET = f"https://secretmanager.googleapis.com/v1/projects/{NUMBER}/secrets"
TOKEN = re.compile(r"hf_[A-Za-z0-9]{20,}|ya29\.|-----BEGIN|X-Goog-Signature")


def secrets():
    """With one secret that the run's own account may read."""
    found = FakeSecrets(discovery.Discovery(discovery.folder(), (API,)))

    def call(url, body):
        assert found.send(Call(method="POST", url=url, body=body)).status == 200

    call(f"{SECRET}?secretId=token", {"replication": {"automatic": {}}})
    call(f"{SECRET}/token:addVersion", {"payload": {"data": "aGZfeA=="}})
    binding = {"role": ACCESSOR, "members": [f"serviceAccount:{ACCOUNT}"]}
    call(f"{SECRET}/token:setIamPolicy", {"policy": {"bindings": [binding]}})
    return found


READ = Call(method="GET", url=f"{SECRET}/token/versions/1:access")


def test_row_07_names_resolve_late_and_pass_on_a_few_ports_alone():
    user = Submitter()
    made = user.made(job(2))
    user.time.sleep(90)  # one of three is up
    names, (chief, up, late) = Names(made), made.workers
    for worker in (chief, late):
        with pytest.raises(socket.gaierror):
            names.resolve(worker.host)
    service = names.resolve(up.host)
    assert service != up.address
    assert names.connect(late, service, 2222) is up and names.connect(late, service, 3333) is up
    with pytest.raises(ConnectionRefusedError):
        names.connect(late, service, 29500)
    with pytest.raises(ConnectionRefusedError):
        names.connect(up, service, 2222)  # not by its own name
    assert names.connect(late, up.address, 29500) is up  # by address everything
    user.time.sleep(2000)
    made.lose_machine(up.name)
    with pytest.raises(ConnectionRefusedError):
        names.connect(chief, service, 2222)
    user.time.sleep(300)
    assert names.connect(chief, names.resolve(up.host), 2222) is up


def test_row_07_a_real_forwarder():
    service, target = "127.91.0.1", "127.92.0.1"
    with socket.create_server((target, 0)) as server:
        port = server.getsockname()[1]
        with forwarder(service, target, (port,)):
            threading.Thread(target=lambda: server.accept()[0].sendall(b"hello"), daemon=True).start()
            with socket.create_connection((service, port), timeout=10) as line:
                line.settimeout(10)
                assert line.recv(5) == b"hello"
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((service, port - 1 if port > 2000 else port + 1), timeout=10)
            with socket.create_connection((service, port), timeout=10, source_address=(target, 0)) as line:
                line.settimeout(10)
                assert line.recv(5) == b""  # itself by its own name


@settings(max_examples=60, deadline=None)
@given(
    workers=st.integers(0, 5),
    reducers=st.integers(0, 2),
    variant=st.builds(
        Variant,
        prefix=st.sampled_from(("", "training-", "cmle-training-")),
        job=st.sampled_from(("text", "object", "missing")),
        trial=st.booleans(),
        open_ports=st.sampled_from(((), (3333,))),
        on_one_replica=st.booleans(),
    ),
)
def test_row_08_the_description_of_the_cluster_has_many_forms(workers, reducers, variant):
    user = Submitter(Manners(variant=variant))
    body = job(workers)
    if reducers:
        if not workers:
            body["jobSpec"]["workerPoolSpecs"].append({})
        body["jobSpec"]["workerPoolSpecs"].append(pool({"machineType": "n1-highcpu-16"}, reducers))
    made = user.running(body)
    for worker in made.workers:
        told = made.environment(worker)
        assert told["CLOUD_ML_PROJECT_ID"] == NUMBER and told["MUSTER_RUN"] == "r1"
        if len(made.workers) == 1 and not variant.on_one_replica:
            assert "CLUSTER_SPEC" not in told
            continue
        found = json.loads(told["CLUSTER_SPEC"])
        pools = {f"workerpool{n}" for n, size in enumerate((1, workers, reducers)) if size}
        assert found["cluster"].keys() == pools  # one that is empty is not there
        hosts = found["cluster"][found["task"]["type"]]
        assert hosts[found["task"]["index"]] == f"{worker.host}:2222"  # counted within the pool
        kind = {"text": str, "object": dict, "missing": type(None)}[variant.job]
        assert isinstance(found.get("job"), kind) and ("trial" in found["task"]) == variant.trial
        assert ("open_ports" in found) == bool(variant.open_ports)


def test_what_was_seen_for_real_is_among_the_forms():
    user = Submitter(Manners(variant=VARIANTS[0]))
    made = user.running(job(1))
    found = json.loads(made.environment(made.worker("workerpool1-0"))["CLUSTER_SPEC"])
    assert isinstance(found["job"], str) and "trial" not in found["task"] and found["open_ports"] == [3333]
    assert all(host.startswith("cmle-training-workerpool") for one in found["cluster"].values() for host in one)


def test_row_17_the_default_account_reads_no_secret():
    user, held = Submitter(), secrets()
    ours, default = user.running(job(serviceAccount=ACCOUNT)), user.running(job())
    refused = FromWorker(user.vertex, default, held).send(READ)
    assert refused.status == 403 and refused.reasons >= {"ACCESS_TOKEN_SCOPE_INSUFFICIENT"}
    payload = FromWorker(user.vertex, ours, held).send(READ).body["payload"]
    assert payload == {"data": "aGZfeA==", "dataCrc32c": str(crc32c(b"hf_x"))}
    assert crc32c(b"123456789") == 0xE3069283
    other = user.running(job(serviceAccount=f"other@{PROJECT}.iam.gserviceaccount.com"))
    assert FromWorker(user.vertex, other, held).send(READ).status == 403
    held.holds_after = 2
    assert [FromWorker(user.vertex, ours, held).send(READ).status for _ in range(3)] == [403, 403, 200]


def test_row_18_the_project_around_the_code_is_googles():
    user = Submitter()
    made = user.running(job(1, serviceAccount=ACCOUNT))
    worker = FromWorker(user.vertex, made, secrets())
    project = worker.metadata()["project/project-id"]
    assert project == TENANT and project.endswith("-tp")
    refused = worker.send(Call(method="GET", url=READ.url.replace(NUMBER, project)))
    assert refused.status == 403
    assert made.environment(made.workers[0])["CLOUD_ML_PROJECT_ID"] == NUMBER
    assert not [key for key in worker.metadata() if "preempted" in key or "maintenance" in key]
    alone = FromWorker(user.vertex, user.running(job(0, serviceAccount=ACCOUNT)), secrets())
    assert not [key for key in alone.metadata() if key.endswith("identity")]


def test_row_19_what_stands_in_env_or_args_everybody_reads():
    user = Submitter()
    leaky = job(1)
    token = {"name": "HF_TOKEN", "value": "hf_abcdefghijklmnopqrstuv"}
    leaky["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]["env"].append(token)
    made = user.running(leaky)
    assert TOKEN.search(json.dumps(user.get(made)))
    other = made.environment(made.worker("workerpool1-0"))
    assert "HF_TOKEN" not in other and TOKEN.search(other["CLUSTER_SPEC"])  # of another pool's container, too
    assert not TOKEN.search(json.dumps(spec_of(user.running(job(1)))))


def test_row_20_web_access_is_a_page_for_a_person():
    user = Submitter()
    made = user.made(job(1, enableWebAccess=True))
    assert "webAccessUris" not in user.get(made)
    user.time.sleep(2000)
    uris = user.get(made)["webAccessUris"]
    assert uris.keys() == {"workerpool0-0", "workerpool1-0"}
    reply = user.wire.send(Call(method="GET", url=uris["workerpool1-0"]))
    assert reply.status == 302 and "Sign in" in reply.text
    with pytest.raises(AssertionError, match="no documented method"):
        user.wire.send(Call(method="POST", url=at("us-central1", f"/{made.number}:exec"), body={}))
    user.cancel(made)
    user.time.sleep(60)
    assert "webAccessUris" not in user.get(made)


def test_row_21_images_are_pulled_by_googles_agent():
    agent = f"service-{NUMBER}@gcp-sa-aiplatform.iam.gserviceaccount.com"
    for readers, ends in ((set(), "FAILED"), ({ACCOUNT}, "FAILED"), ({agent}, "RUNNING")):
        user = Submitter(foreign_images={"images-project": readers})
        body = job(1, serviceAccount=ACCOUNT)
        image = "us-docker.pkg.dev/images-project/muster/train:1"
        body["jobSpec"]["workerPoolSpecs"][1]["containerSpec"]["imageUri"] = image
        made = user.made(body)
        user.time.sleep(2000)
        assert user.get(made)["state"] == f"JOB_STATE_{ends}"
        assert ends == "RUNNING" or (image in user.get(made)["error"]["message"] and not made.workers[0].starts)


def test_row_22_shared_memory_of_any_size():
    assert sorted(SHM) == [0, 64 << 20, 32 << 30]
    for size in SHM:
        met = []
        user = Submitter(
            Manners(shm_bytes=size), programs=Programs(start=lambda one, _, met=met: met.append(one.shm_bytes))
        )
        user.running(job(1))
        assert met == [size, size]


def test_row_23_a_warning_of_none_or_thirty_seconds():
    told = []
    user = Submitter(programs=Programs(stop=lambda worker, grace_s: told.append((worker.name, grace_s))))
    made = user.running(job(2))
    user.cancel(made)
    user.time.sleep(60)
    assert dict(told) == {"workerpool0-0": None, "workerpool1-0": None, "workerpool1-1": 30.0}


def test_row_24_from_outside_there_is_no_way_to_a_worker():
    user = Submitter()
    made = user.running(job(1))
    names, chief = Names(made), made.workers[0]
    for address in (chief.address, names.resolve(chief.host)):
        with pytest.raises(OSError, match="Network is unreachable"):
            names.connect(None, address, 2222)


def test_row_25_a_bucket_of_several_regions_is_refused():
    user = Submitter(several_regions={"home-us"})
    assert user.create(job(baseOutputDirectory={"outputUriPrefix": "gs://home-us/r1"})).status == 400
    made = user.made(job(baseOutputDirectory={"outputUriPrefix": "gs://home-us-central1/r1"}))
    user.time.sleep(2000)
    assert made.environment(made.workers[0])["AIP_CHECKPOINT_DIR"] == "gs://home-us-central1/r1/checkpoints/"


@pytest.mark.skipif(not (shutil.which("cc") and shutil.which("nm")), reason="needs a C compiler")
def test_row_29_a_plugin_that_is_too_old_is_no_error(tmp_path):
    old = build(tmp_path, (4, 5))
    symbols = subprocess.run(["nm", "-D", old], capture_output=True, text=True, check=True).stdout
    versions = {int(found) for found in re.findall(r"NetPlugin_v(\d+)", symbols)}
    assert versions == {4, 5}
    assert log(tuple(versions))[-1].endswith("Using network Socket")
    assert not [line for line in log(tuple(versions)) if "WARN" in line or "ERROR" in line]
    assert log((5, 6))[-1].endswith("Using network Reduction Server")


def test_row_30_a_small_machine_has_much_less_memory_than_its_name_says():
    assert memory_left("n1-standard-4") == int(15 * 0.6 * (1 << 30))
    user = Submitter()
    made = user.running(job(1))
    worker = made.worker("workerpool1-0")
    user.vertex.uses(made, worker, 8 << 30)
    assert worker.running
    user.vertex.uses(made, worker, 10 << 30)
    user.time.sleep(200)
    assert user.get(made)["state"] == "JOB_STATE_FAILED" and made.job_restarts == 0
    assert "ran out of memory" in user.get(made)["error"]["message"]


def test_row_33_an_account_that_may_not_write_logs_writes_none():
    user = Submitter(log_writers=set())
    made, default = user.running(job(1, serviceAccount=ACCOUNT)), user.running(job(1))
    for of in (made, default):
        user.vertex.prints(of, of.workers[1], "step 1")

    def lines(of, more=""):
        text = f'resource.type="ml_job" AND resource.labels.job_id="{of.number}"{more}'
        body = {"resourceNames": [f"projects/{PROJECT}"], "filter": text, "orderBy": "timestamp asc"}
        reply = user.wire.send(Call(method="POST", url="https://logging.googleapis.com/v2/entries:list", body=body))
        return [row["textPayload"] for row in reply.body.get("entries", [])]

    assert lines(default) == []  # later
    user.time.sleep(30)
    assert lines(default, ' AND resource.labels.task_name="workerpool1-0"') == ["step 1"]
    assert lines(default, ' AND resource.labels.task_name="workerpool0-0"') == []
    assert lines(made) == []  # never
    user.vertex.log_writers = {ACCOUNT}
    user.vertex.prints(made, made.workers[1], "step 2")
    user.time.sleep(30)
    assert lines(made) == ["step 2"]


def test_what_is_not_vertex_ais_goes_elsewhere():
    user, held = Submitter(), secrets()
    user.vertex.elsewhere = held
    assert Wire(user.vertex, user.clock).send(READ).status == 200
