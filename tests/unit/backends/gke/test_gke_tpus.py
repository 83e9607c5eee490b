"""Slices of TPUs: one node pool and one child Job each, hosts numbered over all of them, and what is refused."""

import json
import subprocess

import pytest
from cases import placement, spec
from fakes.bucket import Bucket
from fakes.project import INSTALLED, cloud, cloud_with_cluster, session, where

from muster.backends.gke.formats import rendered
from muster.backends.gke.launcher import GkeLauncher
from muster.backends.gke.manifests.jobset import jobset
from muster.backends.gke.manifests.placement import mode_of
from muster.backends.gke.manifests.pods import HOST_OF_SLICE, numbering
from muster.backends.gke.manifests.spec_rules import findings
from muster.backends.gke.operate.locate import COMPLETION, INDEX, ROLE, task
from muster.backends.gke.provision.up import up
from muster.core.errors import UsageError
from muster.storage import run_registry

V5E, V6E = "ct5lp-hightpu-4t", "ct6e-standard-4t"
TWO_SLICES = {"hosts": 8, "parallelism": {"dp_replicate": 2}}


def on_tpus(machine=V5E, mode="spot", **changes):
    return placement(spec(machine, mode, **{"device": "tpu", "hosts": 4, **changes}))


def hosts_of(of):
    return next(role for role in jobset(of, mode_of(of))["spec"]["replicatedJobs"] if role["name"] == "host")


# ---------------------------------------------------------------- manifests


@pytest.mark.parametrize(("changes", "slices", "pods"), [({}, 1, 4), (TWO_SLICES, 2, 4), ({"hosts": 1}, 1, 1)])
def test_a_slice_is_one_job_with_a_pool_to_itself(changes, slices, pods):
    role = hosts_of(on_tpus(**changes))
    job = role["template"]["spec"]
    assert (role["replicas"], job["parallelism"], job["completions"]) == (slices, pods, pods)
    exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    assert role["template"]["metadata"]["annotations"] == exclusive


@pytest.mark.parametrize(
    ("machine", "hosts", "label", "topology", "chips"),
    [
        (V5E, 4, "tpu-v5-lite-podslice", "4x4", 4),
        ("ct5lp-hightpu-8t", 1, "tpu-v5-lite-podslice", "2x4", 8),
        ("ct5p-hightpu-4t", 16, "tpu-v5p-slice", "4x4x4", 4),
        (V6E, 64, "tpu-v6e-slice", "16x16", 4),
    ],
)
def test_pods_ask_for_their_chips_on_a_slice_of_the_topology(machine, hosts, label, topology, chips):
    pod = hosts_of(on_tpus(machine, hosts=hosts))["template"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": label, "cloud.google.com/gke-tpu-topology": topology,
        "cloud.google.com/gke-spot": "true",
    }  # fmt: skip
    resources = pod["containers"][0]["resources"]
    assert resources["limits"] == {"google.com/tpu": chips} and resources["requests"]["google.com/tpu"] == chips
    assert {"key": "google.com/tpu", "operator": "Equal", "value": "present", "effect": "NoSchedule"} in pod[
        "tolerations"
    ]
    assert "affinity" not in pod and "nvidia.com/gpu" not in str(pod)


# ---------------------------------------------------------------- names of hosts


@pytest.mark.parametrize(("index", "completion", "name"), [("0", "3", "host-3"), ("2", "1", "host-9")])
def test_a_host_of_a_slice_finds_its_number(index, completion, name):
    command = numbering(4, ["echo", "--host", HOST_OF_SLICE, "$(x) a b", "--to", HOST_OF_SLICE])
    environment = {"MUSTER_HOST_INDEX": index, "JOB_COMPLETION_INDEX": completion, "PATH": "/usr/bin:/bin"}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert said == f"--host {name} $(x) a b --to {name}\n"
    labels = hosts_of(on_tpus(**TWO_SLICES))["template"]["spec"]["template"]["metadata"]["labels"]
    pod = {**labels, ROLE: "host", INDEX: index, COMPLETION: completion}
    assert task({"metadata": {"labels": pod}}) == (name, "host")


def test_a_run_on_two_slices_is_submitted_and_its_hosts_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    google, of = cloud_with_cluster(), spec(V5E, "spot", project="example-project", device="tpu", **TWO_SLICES)
    google.kubernetes.queues.add("muster-tpu-v5e-4x4-spot")
    launcher = GkeLauncher(http=google, store=Bucket())
    run_id = run_registry.new_run_id("llama")
    folder = run_registry.place(run_id, None)
    run_registry.create(run_id, folder, run_file="name: llama\n", resolved=of.model_dump_json())
    handle = launcher.submit(launcher.render(of, run_id=run_id, run_dir=str(folder)))
    assert len(google.kubernetes.of_kind("JobSet")) == 1
    labels = hosts_of(placement(of))["template"]["spec"]["template"]["metadata"]["labels"]
    for host in range(8):
        of_host = {"app.kubernetes.io/instance": run_id, ROLE: "host", INDEX: str(host // 4), COMPLETION: str(host % 4)}
        metadata = {"name": f"h{host}", "namespace": "default", "labels": {**labels, **of_host}}
        pod = {"kind": "Pod", "metadata": metadata, "spec": {"nodeName": f"n{host}"}, "status": {"phase": "Running"}}
        google.kubernetes.handle("PUT", f"/api/v1/namespaces/default/pods/h{host}", json.dumps(pod).encode())
    assert launcher.poll(handle).tasks == {f"host-{host}": f"running on n{host}" for host in range(8)}


# ---------------------------------------------------------------- node pools


@pytest.mark.parametrize(
    ("machine", "mode", "changes", "policy", "nodes"),
    [
        (V5E, "spot", {"hosts": 4}, {"type": "COMPACT", "tpuTopology": "4x4"}, [4]),
        (V5E, "flex_start", {"hosts": 4}, {"type": "COMPACT", "tpuTopology": "4x4"}, [4]),
        (V6E, "on_demand", TWO_SLICES, {"type": "COMPACT", "tpuTopology": "4x4"}, [4, 4]),
        ("ct6e-standard-8t", "spot", {"hosts": 1}, None, [1]),
    ],
)
def test_up_makes_a_pool_for_each_slice(machine, mode, changes, policy, nodes):
    google = cloud()
    site = where(machine, mode, device="tpu", **changes)
    up(site, session(google), INSTALLED, workers=1)
    pools = [one for key, one in google.store.items() if "/nodePools/" in key and "tpu" in key]
    assert [pool["autoscaling"]["totalMaxNodeCount"] for pool in pools] == nodes
    assert len({pool["name"] for pool in pools}) == len(nodes)
    for pool in pools:
        assert pool.get("placementPolicy") == policy and "accelerators" not in pool["config"]
        assert pool["config"].get("flexStart") is (True if mode == "flex_start" else None)
    up(site, session(google), INSTALLED, workers=1)  # and finds them there
    assert len([key for key in google.store if "/nodePools/" in key and "tpu" in key]) == len(nodes)


def test_a_reservation_has_its_slice_from_the_start():
    google = cloud()
    up(where(V5E, "reservation", device="tpu", hosts=4), session(google), INSTALLED, workers=1)
    (pool,) = [one for key, one in google.store.items() if "/nodePools/" in key and "tpu" in key]
    assert pool["initialNodeCount"] == 4 and "autoscaling" not in pool
    assert pool["config"]["reservationAffinity"]["values"] == ["gpus-in-august"]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("machine", "changes", "key", "words"),
    [
        (V5E, {"device": "auto"}, "resources.device", "a run is of GPUs or of TPUs"),
        ("a4-highgpu-8g", {}, "resources.device", "has no TPU"),
        (V5E, {"hosts": 3}, "resources.hosts", "one has 1 (2x2), 2 (2x4), 4 (4x4)"),
        (V5E, {"hosts": 5, "parallelism": {"dp_replicate": 2}}, "resources.hosts", "in 2 slices are no slices"),
        (V5E, {"hosts": 2, "parallelism": {"dp_replicate": 2}}, "parallelism.dp_replicate", "several hosts alone"),
        (V5E, {"parallelism": {"tp": 8}}, "parallelism.tp", "does not divide the 4 chips of a host"),
        (V5E, {"spare_hosts": 1}, "resources.spare_hosts", "lost and replaced together"),
        (V5E, {"min_hosts": 2}, "resources.min_hosts", "lost and replaced together"),
        (V5E, {"mode": "flex_start_queued"}, "resources.provisioning_model", "cannot be had as flex_start_queued"),
    ],
)
def test_what_is_not_a_slice_is_refused_in_one_line(machine, changes, key, words):
    errors = [one.problem for one in findings(on_tpus(machine, **changes)) if one.error]
    assert [(problem.key, words in problem.message) for problem in errors] == [(key, True)]


def test_a_whole_slice_is_taken():
    assert not [one for one in findings(on_tpus()) if one.error]


@pytest.mark.parametrize("form", ["helm", "terraform"])
def test_forms_that_cannot_say_it_are_refused(form):
    with pytest.raises(UsageError, match=f"not rendered as {form}"):
        rendered(form, on_tpus().spec, run_id="run-1", run_dir="gs://example-bucket/runs/a", options={})
