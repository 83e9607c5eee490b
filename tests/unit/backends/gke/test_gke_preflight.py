"""The rehearsal of a run file: small, and in everything else the same."""

import copy

import pytest
from cases import run_objects, spec
from fakes.bucket import Bucket
from fakes.kubernetes import in_memory
from fakes.plane import Play, phase
from fakes.project import cloud_with_cluster

from muster import backends
from muster.app.cluster.preflight import preflight
from muster.backends.cluster import TINY, rehearsal
from muster.backends.gke.launcher import GkeLauncher
from muster.backends.gke.manifests.kueue_objects import queue_objects
from muster.backends.gke.manifests.placement import Options, place
from muster.backends.gke.manifests.render import run_manifests
from muster.backends.gke.manifests.spec_rules import findings
from muster.backends.gke.operate.cluster_snapshot import take_snapshot
from muster.backends.gke.operate.status_reason import explain
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


GKE = backends.get("gke")


def placed(of):
    return place(of, run_id="llama-preflight", run_dir=of.run_dir or "/muster-runs", options=Options())


def host_of(where):
    (jobset,) = [one for one in run_manifests(where) if one["kind"] == "JobSet"]
    (host,) = [one for one in jobset["spec"]["replicatedJobs"] if one["name"] == "host"]
    return jobset, host


def test_one_small_pod_with_the_same_image_mounts_and_secrets():
    small, full = placed(GKE.acceptance.rehearse(FULL)), placed(FULL)
    jobset, host = host_of(small)
    _, big = host_of(full)
    pod, real = (one["template"]["spec"]["template"]["spec"] for one in (host, big))
    assert host["replicas"] == 1 and jobset["spec"]["suspend"] is True, "through the run's own queue"
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "muster-b200-flex-start-queued"
    assert "provreq.kueue.x-k8s.io/maxRunDurationSeconds" not in jobset["metadata"]["annotations"], "no DWS"
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


def test_nodes_that_are_used_without_a_queue_are_rehearsed_so():
    jobset, _ = host_of(placed(GKE.acceptance.rehearse(spec(None, None, device="cpu"))))
    assert jobset["spec"]["suspend"] is False and "kueue.x-k8s.io/queue-name" not in jobset["metadata"]["labels"]
    jobset, _ = host_of(placed(GKE.acceptance.rehearse(spec("a4-highgpu-8g", "spot", queue="research"))))
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"


def test_it_goes_through_the_queue_onto_cpu_nodes_and_asks_dws_for_nothing():
    small, full = placed(GKE.acceptance.rehearse(FULL)), placed(FULL)
    pool = {"cloud.google.com/gke-nodepool": "muster-cpu"}
    run = Play(*queue_objects(full), *run_objects(small, "", ""), pools=[pool])
    run.run()
    assert len(run.pods("host")) == 1 and {phase(pod) for pod in run.pods()} == {"Running"}
    assert run.pod("host")["spec"]["nodeSelector"] == pool and not run.server.of_kind("ProvisioningRequest")


def test_a_queue_that_sends_supervisors_to_the_hosts_nodes_shows_in_it():
    """As an older ``up`` made it: without --machine the preflight passed there, and no real run ever started."""
    small, full = placed(GKE.acceptance.rehearse(FULL)), placed(FULL)
    objects = copy.deepcopy(queue_objects(full))
    for one in objects:
        if one["kind"] == "ResourceFlavor":
            one["spec"].pop("nodeTaints", None)
    pools = [objects[0]["spec"]["nodeLabels"], {"cloud.google.com/gke-nodepool": "muster-cpu"}]
    run = Play(*objects, *run_objects(small, "", ""), pools=pools)
    run.run()
    request = run.kueue.provisioning.newest(run.one("JobSet")["metadata"]["name"])
    assert request is None, "the check is not for pods without GPUs"
    assert {phase(pod) for pod in run.pods("supervisor")} == {"Pending"}
    found = explain(take_snapshot(in_memory(run.server), "default", "llama-preflight"))
    assert found.sentence.startswith("the run cannot start: Kueue gave the supervisor the hosts' flavour")


def test_the_run_itself_is_asked_about_first(monkeypatch, tmp_path):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path))
    google = cloud_with_cluster()
    of = spec("a4-highgpu-8g", "flex_start_queued", project="example-project")
    name = {"name": "kueue-manager-config", "namespace": "kueue-system"}
    text = "apiVersion: config.kueue.x-k8s.io/v1beta2\nkind: Configuration\n"
    config = {"kind": "ConfigMap", "metadata": name, "data": {"controller_manager_config.yaml": text}}
    google.kubernetes.objects["api/v1/namespaces/kueue-system/configmaps/kueue-manager-config"] = config
    pod = {"spec": {"containers": [{"name": "manager", "image": "registry.k8s.io/kueue/kueue:v0.19.2"}]}}
    deployments = "apis/apps/v1/namespaces/kueue-system/deployments"
    google.kubernetes.objects[f"{deployments}/kueue-controller-manager"] = {"spec": {"template": pod}}
    made, claims = GkeLauncher.__init__, Options(network="claims")
    monkeypatch.setattr(GkeLauncher, "__init__", lambda self: made(self, http=google, store=Bucket(), options=claims))
    with pytest.raises(UsageError, match=r"never admits the run: .* do not name device class mrdma\.google\.com"):
        preflight(Loaded(spec=of, text="", source="run.yaml"))
    assert not google.kubernetes.of_kind("JobSet") and not list(tmp_path.glob("runs/*"))


def test_a_script_of_ones_own_is_run_as_it_is():
    own = spec("a4-highgpu-8g", "spot", model=None, data=None, command=["train.py", "--x"])
    small = rehearsal(own)
    assert small.command == ["train.py", "--x"] and small.model is None


def test_another_back_end():
    loaded = Loaded(spec=FULL.model_copy(update={"backend": "local"}), text="", source="run.yaml")
    with pytest.raises(UsageError, match="no preflight for the back end 'local'"):
        preflight(loaded)
