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


BARE = """\
name: llama
model: {source: meta-llama/Llama-3.1-8B, lora: {rank: 16}}
data: {sources: [{type: text2sql, rows: 1000}]}
training: {steps: 200, sequence_length: 4096, global_batch_size: 8}
"""


def test_names_that_cost_nothing_are_for_submit_and_the_machine_is_the_plans(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    (tmp_path / "run.yaml").write_text(BARE)
    found = {one.name: one for one in places(tmp_path / "run.yaml", names=["vertex", "gke", "gce"])}
    assert all(one.planned is not None for one in found.values())
    for name, also in (("gce", ("gce.bundle", "resources.locations")), ("vertex", ("resources.image",))):
        (said,) = [line for line in found[name].planned.plan.assumptions if "a submit needs them" in line]
        assert all(key in said for key in ("resources.project", "run_dir", f"{name}.service_account", *also))
    assert "resources.locations" not in found["gce"].planned.plan.settings, "a region's price is no zone"
    assert found["gke"].planned.plan.settings["resources.locations"]


@pytest.mark.parametrize("name", ["gce", "vertex"])
@pytest.mark.parametrize(
    ("given", "key"), [("resources.project=3bad", "resources.project"), ("run_dir=/home/x", "run_dir")]
)
def test_a_wrong_name_is_refused_by_a_plan_too(tmp_path, name, given, key, capsys):
    (tmp_path / "run.yaml").write_text(BARE)
    assert run(["plan", str(tmp_path / "run.yaml"), f"backend={name}", given]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and f" {key}: " in err and "image" not in err and "bundle" not in err


def test_a_file_that_cannot_be_submitted_yet_is_refused_whole(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(BARE)
    assert run(["show", str(tmp_path / "run.yaml"), "backend=gce", "resources.machine=a3-highgpu-1g"]) == 2
    err = capsys.readouterr().err
    assert all(key in err for key in ("resources.project", "gce.bundle", "gce.service_account", "run_dir"))


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
