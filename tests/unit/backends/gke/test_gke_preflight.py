"""The rehearsal of a run file: small, and in everything else the same."""

import pytest
from cases import spec

from muster.app.cluster.preflight import preflight
from muster.backends.gke.manifests.cluster_options import Options
from muster.backends.gke.manifests.placement import place
from muster.backends.gke.manifests.render import run_manifests
from muster.backends.gke.manifests.spec_rules import findings
from muster.backends.rehearsal import TINY, rehearsal
from muster.config import validation
from muster.config.load import Loaded
from muster.core.errors import UsageError

FULL = spec(
    "a4-highgpu-8g",
    "flex_start_queued",
    spare_hosts=1,
    run_dir="gs://example-bucket/runs/llama",
    model={"source": "gs://example-models/llama"},
)


def placed(of):
    return place(of, run_id="llama-preflight", run_dir=of.run_dir or "/muster-runs", options=Options())


def host_of(where):
    (jobset,) = [one for one in run_manifests(where) if one["kind"] == "JobSet"]
    (host,) = [one for one in jobset["spec"]["replicatedJobs"] if one["name"] == "host"]
    return jobset, host


def test_one_small_pod_with_the_same_image_mounts_and_secrets():
    small, full = placed(rehearsal(FULL)), placed(FULL)
    jobset, host = host_of(small)
    _, big = host_of(full)
    pod, real = (one["template"]["spec"]["template"]["spec"] for one in (host, big))
    assert host["replicas"] == 1 and jobset["spec"]["suspend"] is False, "no queue, no DWS"
    assert "kueue.x-k8s.io/queue-name" not in jobset["metadata"]["labels"]
    assert "nvidia.com/gpu" not in str(pod["containers"][0]["resources"])
    assert pod["containers"][0]["image"] == real["containers"][0]["image"]
    buckets = {volume["name"]: volume for volume in real["volumes"] if "csi" in volume}
    assert {volume["name"]: volume for volume in pod["volumes"] if "csi" in volume}.keys() == buckets.keys() != set()
    secrets = [one for one in pod["containers"][0]["env"] if "secretKeyRef" in str(one)]
    assert secrets and secrets == [one for one in real["containers"][0]["env"] if "secretKeyRef" in str(one)]
    assert not [one for one in findings(small) if one.error]


def test_the_same_data_and_tokenizer_and_two_steps():
    small = rehearsal(FULL)
    assert small.data == FULL.data and small.model.tokenizer == FULL.model.source and small.training.steps == 2
    assert small.model.config == TINY and small.resources.hosts == 1
    assert small.checkpoint.dir == "gs://example-bucket/checkpoints/preflight/llama-preflight"
    assert small.run_dir == "gs://example-bucket/runs/llama-preflight"
    assert validation.problems(small) == []


def test_on_a_cheap_gpu():
    small = rehearsal(FULL, machine="g2-standard-4")
    where = placed(small)
    _, host = host_of(where)
    container = host["template"]["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1} and where.mode == "spot"


def test_a_script_of_ones_own_is_run_as_it_is():
    own = spec("a4-highgpu-8g", "spot", model=None, data=None, command=["train.py", "--x"])
    small = rehearsal(own)
    assert small.command == ["train.py", "--x"] and small.model is None


def test_another_back_end():
    loaded = Loaded(spec=FULL.model_copy(update={"backend": "local"}), text="", source="run.yaml")
    with pytest.raises(UsageError, match="no preflight for the back end 'local'"):
        preflight(loaded)
