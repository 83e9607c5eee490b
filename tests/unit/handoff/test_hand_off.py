"""``export --for``: what would serve a model on GKE and Vertex AI, held against Kubernetes' and Google's schemas."""

import copy
import json
import urllib.parse

import pytest

from muster.config.load import loads
from muster.core.errors import NoPlanError, UsageError
from muster.handoff import serve

RUN_FILE = """\
name: My SQL model
model: {config: {model_type: llama}}
data: {sources: [{type: random}]}
training: {steps: 10}
resources: {device: cpu}
"""
IMAGE = "us-docker.pkg.dev/my-project/serve/vllm:1"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def model(tmp_path, gigabytes, heads=32):
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"num_attention_heads": heads}))
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(int(min(gigabytes, 900) * 1e9))  # a hole: it takes no disk
    return folder


def spec():
    return loads(RUN_FILE).spec


@pytest.mark.parametrize(
    "gigabytes, machine, gpus", [(1, "g2-standard-4", 1), (17, "a2-highgpu-1g", 1), (141, "g2-standard-96", 8)]
)
def test_the_cheapest_machine_that_holds_the_weights_is_taken_and_its_cost_said(tmp_path, gigabytes, machine, gpus):
    server = serve.choose(model(tmp_path, gigabytes))
    held = serve.rows.accelerators()[server.chip].memory_bytes * server.gpus * serve.FOR_WEIGHTS
    assert held >= gigabytes * 1e9 and server.usd_per_hour
    for other, why in serve._servers(int(gigabytes * 1e9), 32):
        assert why is not None or other.usd_per_hour is None or other.usd_per_hour >= server.usd_per_hour
    if gigabytes < 100:
        assert (server.machine, server.gpus) == (machine, gpus)


def test_what_does_not_fit_is_refused_with_the_reason(tmp_path):
    with pytest.raises(NoPlanError, match=r"g2-standard-4 does not serve 30.0 GB of weights: 1 x"):
        serve.choose(model(tmp_path, 30), "g2-standard-4")
    with pytest.raises(NoPlanError, match="12 attention heads are not divided by 8 GPUs"):
        serve.choose(model(tmp_path, 1, heads=12), "g2-standard-96")
    with pytest.raises(NoPlanError, match="no machine"):
        serve.choose(model(tmp_path, 900, heads=1))
    (tmp_path / "model" / "adapter_config.json").touch()
    with pytest.raises(UsageError, match="no whole model"):
        serve.choose(tmp_path / "model")


def test_manifests_for_gke_are_kubernetes(tmp_path):
    kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    folder = model(tmp_path, 17)
    served = serve.serve(serve.target("gke", spec(), bucket="gs://models/sql/"), "My SQL model", folder)
    items = json.loads((folder / "serve.yaml").read_text())["items"]
    for item in items:
        kubernetes.validate(item, "1.34", strict=True)
    wrong = copy.deepcopy(items[1])
    wrong["spec"]["template"]["spec"]["containers"][0]["imagee"] = "typo"
    with pytest.raises(kubernetes.ValidationError):
        kubernetes.validate(wrong, "1.34", strict=True)
    pod = items[1]["spec"]["template"]["spec"]
    assert pod["nodeSelector"]["cloud.google.com/gke-accelerator"] == "nvidia-tesla-a100"
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert pod["volumes"][0]["csi"]["volumeAttributes"]["mountOptions"].endswith("only-dir=sql/my-sql-model")
    assert items[2]["spec"]["type"] == "ClusterIP" and items[2]["spec"]["selector"] == pod_labels(items[1])
    assert any("an hour on demand" in note for note in served.notes)
    assert served.steps[0] == f"gcloud storage cp -r {folder}/* gs://models/sql/my-sql-model/"


def pod_labels(deployment):
    return deployment["spec"]["template"]["metadata"]["labels"]


def test_requests_for_vertex_are_googles(tmp_path, home):
    discovery = pytest.importorskip("fakes.discovery")
    if discovery.folder() is None:
        pytest.skip("google-api-python-client is not installed")
    (home / "config.yaml").write_text("project: my-project\nregion: us-central1\nbucket: gs://mine\n")
    folder = model(tmp_path, 17)
    served = serve.serve(serve.target("vertex", spec(), image=IMAGE), "sql", folder)
    api = discovery.Discovery(discovery.folder(), ("aiplatform.v1",))

    def complaints(file, step, body=None):
        url = urllib.parse.urlsplit(served.steps[step].split()[-1].strip("'"))
        match = api.match("POST", url.netloc, url.path)
        return api.complaints(match, url.query, body or json.loads((folder / file).read_text()))

    for step, file in ((1, "vertex-upload.json"), (2, "vertex-endpoint.json"), (3, "vertex-deploy.json")):
        assert complaints(file, step) == [], file
    body = json.loads((folder / "vertex-upload.json").read_text())
    body["model"]["containerSpec"]["sharedMemorySizeMb"] = 16384  # int64 is text
    body["model"]["containerSpec"]["predictRoutes"] = "/"
    assert len(complaints("", 1, body)) == 2
    deployed = json.loads((folder / "vertex-deploy.json").read_text())["deployedModel"]
    assert deployed["model"] == f"projects/my-project/locations/us-central1/models/{'sql'}"
    assert deployed["dedicatedResources"]["machineSpec"]["acceleratorType"] == "NVIDIA_TESLA_A100"


@pytest.mark.parametrize(
    "place, more, said",
    [
        ("aws", {}, "none of vertex, gke"),
        ("gke", {}, "is no bucket"),
        ("gke", {"bucket": "s3://x"}, "is no bucket"),
        ("gke", {"bucket": "gs://bucket", "machine": "g2-standard-5"}, "g2-standard-5"),
        ("vertex", {"bucket": "gs://bucket"}, "an image in Artifact Registry"),
        ("vertex", {"bucket": "gs://bucket", "image": IMAGE}, "needs a project and a region"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_exported(place, more, said):
    with pytest.raises(UsageError, match=said):
        serve.target(place, spec(), **more)
