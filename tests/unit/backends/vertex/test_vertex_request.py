"""What is sent to Vertex AI: byte by byte (``python tests/golden/vertex/vertex_cases.py`` rewrites), and held against
Google's own description of the API."""

import json
import subprocess
import urllib.parse
from pathlib import Path

import pytest
from fakes.discovery import Discovery, folder
from vertex_cases import HERE, RUN_ID, cases, placement, spec, text

from muster.backends.google.request_log import mark_of
from muster.backends.run_folder import digest
from muster.backends.vertex.custom_job import NCCL_SCRIPT, SOURCE_AND_RUN, requests, run_files
from muster.backends.vertex.placement import resolved
from muster.config.load import loads

CASES = cases()
API = "aiplatform.v1"


@pytest.mark.parametrize("name", CASES)
def test_as_recorded(name):
    for file, content in text(CASES[name]).items():
        assert content == (HERE / name / file).read_text(), f"{name}/{file}: python {HERE / 'vertex_cases.py'} if meant"


def test_no_record_without_a_case():
    found = {(path.parent.name, path.name) for path in HERE.glob("*/*.json")}
    assert found == {(name, file) for name, case in CASES.items() for file in text(case)}


def test_the_documents_example_is_the_golden_of_two_machines():
    page = (Path(__file__).parents[4] / "docs" / "how-to" / "vertex.md").read_text()
    of = placement(loads(page.partition("```yaml\n")[2].partition("```")[0], environment=False).spec)
    assert text(of) == text(CASES["full-8b-two-machines"])


@pytest.fixture(scope="module")
def api():
    documents = folder()
    if documents is None:
        pytest.skip("google-api-python-client is not installed")
    return Discovery(documents, (API,)), json.loads((documents / f"{API}.json").read_text())


def complaints(api, request):
    """Everything in a request that Google's description does not know; its hosts are one for each region."""
    discovery, document = api
    url = urllib.parse.urlsplit(request.url)
    regional = {urllib.parse.urlsplit(row["endpointUrl"]).netloc for row in document["endpoints"]}
    assert url.netloc in regional, f"no host {url.netloc}"
    match = discovery.match("POST", urllib.parse.urlsplit(document["rootUrl"]).netloc, url.path)
    assert match is not None and match.id == "aiplatform.projects.locations.customJobs.create"
    assert match.path["locationsId"] == request.region
    return discovery.complaints(match, url.query, request.body)


@pytest.mark.parametrize("name", CASES)
def test_google_knows_every_field(name, api):
    for request in requests(CASES[name]):
        assert complaints(api, request) == []


def test_the_check_refuses_what_google_would(api):
    """Fields of other services, numbers for int64 and durations, an invented retry limit: a check that accepts them
    proves nothing."""
    (request,) = requests(CASES["private-watched"])
    good = json.dumps(request.body)
    for old, new in (
        ('"replicaCount": "1"', '"replicaCount": 1'),
        ('"timeout": "604800s"', '"timeout": 604800'),
        ('"strategy": "STANDARD"', '"strategy": "FLEX"'),
        ('"disableRetries": false', '"maxRestarts": 3'),
        ('"displayName"', '"name": "mine", "displayName"'),
        ('"imageUri"', '"image"'),
    ):
        assert old in good
        body = json.loads(good.replace(old, new))
        assert complaints(api, type(request)(region=request.region, url=request.url, body=body)), new


def jobs(of):
    return [request.body["jobSpec"] for request in requests(of)]


def test_one_chief_then_the_rest_and_nothing_restarted_by_vertex():
    for name, case in CASES.items():
        for job in jobs(case):
            pools = job["workerPoolSpecs"]
            hosts = [pool for pool in pools if "vertex-ai-restricted" not in pool["containerSpec"]["imageUri"]]
            assert hosts[0]["replicaCount"] == "1", name
            # Of TPUs a replica is a slice.
            assert sum(int(pool["replicaCount"]) for pool in hosts) == (1 if case.machine.chips else case.hosts), name
            assert all(pool["machineSpec"] == hosts[0]["machineSpec"] for pool in hosts), name
            assert job["scheduling"]["restartJobOnWorkerRestart"] is False
            assert job["scheduling"]["disableRetries"] is False


def test_a_slice_of_tpus_is_one_replica_with_its_topology():
    (job,) = jobs(CASES["tpu-v5e-4x4"])
    (pool,) = job["workerPoolSpecs"]
    assert pool["machineSpec"] == {"machineType": "ct5lp-hightpu-4t", "tpuTopology": "4x4"}
    assert pool["replicaCount"] == "1"
    (job,) = jobs(CASES["tpu-v6e-one-host"])
    assert job["workerPoolSpecs"][0]["machineSpec"]["tpuTopology"] == "2x4"
    whole = resolved(CASES["tpu-v5e-4x4"])
    assert (whole.resources.ranks_per_host, whole.resources.device) == (1, "tpu")


def test_only_flex_start_waits_by_itself_and_never_for_ever():
    for name, case in CASES.items():
        for job in jobs(case):
            assert ("maxWaitDuration" in job["scheduling"]) == (case.mode == "flex_start"), name
    short = placement(spec("g2-standard-96", "flex_start", vertex={"max_wait_hours": 1e-6}))
    assert jobs(short)[0]["scheduling"]["maxWaitDuration"] == "1s", "0 s would be without end"


def test_no_environment_and_no_secret_in_a_request(monkeypatch):
    """Everybody who may read a job reads all of it; and its hosts find it in their own environment."""
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 30)
    for name, case in CASES.items():
        assert '"env"' not in "".join(text(case).values()), name
        assert "hf_x" not in "".join(request.text() for request in requests(case))


def test_arguments_are_lists_and_name_the_run_files_digest():
    for name, case in CASES.items():
        for job in jobs(case):
            words = job["workerPoolSpecs"][0]["containerSpec"]["args"]
            named = words[words.index("--run-file-sha256") + 1]
            assert named == digest(run_files(case).encoded()), name


def test_the_same_submission_has_the_same_nonce_and_another_has_another():
    marks = {request.body["labels"]["muster-nonce"] for request in requests(CASES["a2-reducers"])}
    assert marks == {mark_of(RUN_ID, 1, 1)}
    again = {request.body["labels"]["muster-nonce"] for request in requests(CASES["a2-reducers"], submission=2)}
    later = {request.body["labels"]["muster-nonce"] for request in requests(CASES["a2-reducers"], turn=2)}
    assert len(marks | again | later) == 3


def test_a_script_of_googles_is_sourced_where_it_is_and_said_where_not(tmp_path):
    """Run by bash, as on a host; a script that eats its arguments, or fails, does not end the host."""
    words = jobs(CASES["a4-spot-script"])[0]["workerPoolSpecs"][0]["containerSpec"]["command"]
    assert words == ["/bin/bash", "-c", SOURCE_AND_RUN, NCCL_SCRIPT]
    script = tmp_path / "set_nccl_env.sh"
    script.write_text("export NCCL_NET=gIB; shift 2; false\n")
    show = ["/bin/sh", "-c", 'echo "$NCCL_NET|$1|$2"', "show", "a b", "$(date)"]

    def run(path):
        return subprocess.run([*words[:3], str(path), *show], capture_output=True, text=True, check=True)

    assert run(script).stdout == "gIB|a b|$(date)\n"
    without = run(tmp_path / "absent.sh")
    assert without.stdout == "|a b|$(date)\n" and "plain TCP" in without.stderr


def test_hosts_read_the_bucket_where_it_is_mounted_and_write_to_it_by_its_name():
    case = placement(
        spec(
            "g2-standard-48", "spot", data={"sources": [{"type": "file", "path": "gs://example-data/train.jsonl"}]},
            checkpoint={"dir": "/gcs/example-bucket/checkpoints"},
        )
    )  # fmt: skip
    whole = resolved(case)
    assert whole.data.sources[0].path == "/gcs/example-data/train.jsonl"
    assert whole.checkpoint.dir == "gs://example-bucket/checkpoints"
    assert (whole.resources.ranks_per_host, whole.resources.device) == (4, "cuda")
    assert whole.recovery.start_timeout_s == 3600
    assert (
        resolved(placement(spec("n1-standard-4", None))).checkpoint.dir == "gs://example-bucket/runs/llama/checkpoints"
    )


def test_a_disk_holds_the_weights_twice():
    assert placement(spec()).boot_disk_gb == 300
    large = placement(spec(model={"source": "meta-llama/Llama-3.1-70B"}))
    assert large.boot_disk_gb == 500
    assert placement(spec(command=["/opt/train.py"])).boot_disk_gb == 200
    assert placement(spec(vertex={"boot_disk_gb": 150})).boot_disk_gb == 150
