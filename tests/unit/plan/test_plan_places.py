"""One run file planned over several places: prices, reasons, the order; a place that cannot is told why."""

import json

import pytest

from muster.app.planning.places import places
from muster.cli.main import run
from muster.core.errors import UsageError

TEXT = """\
name: llama
model: {source: meta-llama/Llama-3.1-8B}
data: {sources: [{type: text2sql, rows: 1000}]}
training: {steps: 2000, sequence_length: 4096, global_batch_size: 64}
run_dir: gs://example-bucket/runs/llama
resources:
  project: example-project
  machine: a3-highgpu-8g
  locations: [LOCATION]
  image: us-central1-docker.pkg.dev/example-project/muster/trainer:1
gce:
  service_account: muster-hosts@example-project.iam.gserviceaccount.com
  supervisor_service_account: muster-supervisor@example-project.iam.gserviceaccount.com
  bundle: gs://example-bucket/bundles/0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef.tar.gz
vertex: {service_account: muster-hosts@example-project.iam.gserviceaccount.com}
"""


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))

    def write(location):
        path = tmp_path / "run.yaml"
        path.write_text(TEXT.replace("LOCATION", location))
        return str(path)

    return write


def test_one_file_three_places(run_file):
    found = {one.name: one for one in places(run_file("us-central1"), names=["vertex", "gke", "gce"])}
    gke, gce, vertex = found["gke"], found["gce"], found["vertex"]
    assert gke.planned.chosen.option.offer.machine == "a3-highgpu-8g"
    # Vertex AI's fee is the difference for the same machines, mode and time.
    assert vertex.usd > gke.usd and f"dearer than {next(iter(found))}" in vertex.reason
    assert next(iter(found.values())).reason == "the cheapest"
    assert gce.planned is not None or gce.reason, "zones are a matter of its own"


def test_a_place_that_cannot_is_told_why_and_comes_last(run_file):
    found = places(run_file("us-central1"), names=["vertex", "gce", "gke"])
    last = found[-1]
    assert last.name == "gce" and last.planned is None and "resources.locations" in last.reason
    assert found[0].planned is not None


def test_a_zone_is_its_region_where_machines_are_a_regions(run_file):
    found = places(run_file("us-central1-a"), names=["vertex", "gce", "gke"])
    assert all(one.planned is not None for one in found) and found[-1].name == "vertex"
    assert found[-1].planned.plan.spec["resources"]["locations"] == ["us-central1"]


def test_as_a_person_types_it(run_file, capsys):
    assert run(["plan", run_file("us-central1-a"), "--backends", "gke, vertex"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["place", "machines", "time", "cost"] and lines[1].endswith("the cheapest")
    assert lines[2].startswith("vertex")
    assert run(["plan", run_file("us-central1-a"), "--backends", "gke", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["backend"] == "gke" and row["chosen"]["machine"] == "a3-highgpu-8g"


def test_no_such_place(run_file):
    with pytest.raises(UsageError, match="no back end 'gcp'"):
        places(run_file("us-central1-a"), names=["gcp"])
