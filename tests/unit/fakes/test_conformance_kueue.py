"""The played Kueue does what Kueue 0.19.2 does, and Muster's objects get along with it."""

import copy
import re

import pytest
from cases import placement, run_objects, spec
from fakes.crds import CRDS, Definitions
from fakes.kueue_config import CONFIG_MAP
from fakes.plane import Play

from muster.backends.gke.manifests.kueue_objects import queue_objects
from muster.backends.gke.pod.continuation import continuation

DWS = "flex_start_queued"
TAS_OFF = ("TASFailedNodeReplacement", "TASFailedNodeReplacementFailFast", "TASReplaceNodeOnPodTermination",
           "TASReplaceNodeOnNodeTaints")  # fmt: skip
MINUTE = 60.0


def configuration(**changes):
    """Kueue's Configuration in a cluster; without one the released defaults hold."""
    from ruamel.yaml import YAML
    from ruamel.yaml.compat import StringIO

    text = StringIO()
    YAML(typ="safe").dump({"apiVersion": "config.kueue.x-k8s.io/v1beta2", "kind": "Configuration", **changes}, text)
    namespace, name, key = CONFIG_MAP
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": namespace},
            "data": {key: text.getvalue()}}  # fmt: skip


def labels_of(where):
    """What a node of the run's pool carries."""
    flavor = next(one for one in queue_objects(where) if one["kind"] == "ResourceFlavor")
    levels = ("gce-topology-block", "gce-topology-subblock", "gce-topology-host")
    return {**flavor["spec"]["nodeLabels"], **{f"cloud.google.com/{one}": "x" for one in levels},
            "kubernetes.io/hostname": "x"}  # fmt: skip


def play(mode="spot", machine="g2-standard-48", hosts=2, nodes=0, config=None, **more):
    where = placement(spec(machine, mode, hosts=hosts, **more))
    extra = [] if config is None else [configuration(**config)]
    jobset = run_objects(where, "", "")[-1]
    return Play(*extra, *queue_objects(where), jobset, nodes=nodes, labels=labels_of(where))


def says(run):
    """(type, status, reason) of the Workload's conditions."""
    return {kind: (row["status"], row["reason"]) for kind, row in run.conditions("Workload").items()}


def request(run):
    return run.kueue.provisioning.newest(run.one("JobSet")["metadata"]["name"])


def running(run):
    return [pod for pod in run.pods() if (pod.get("status") or {}).get("phase") == "Running"]


# ---------------------------------------------------------------- the Workload


def test_row_11_a_workload_per_jobset_with_a_pod_set_per_role():
    run = play(spare_hosts=1)
    run.run()
    workload, jobset = run.one("Workload"), run.one("JobSet")
    name = jobset["metadata"]["name"]
    assert re.fullmatch(rf"jobset-{name}-[0-9a-f]{{5}}", workload["metadata"]["name"])
    counts = {one["name"]: one["count"] for one in workload["spec"]["podSets"]}
    assert counts == {role["name"]: role["replicas"] for role in jobset["spec"]["replicatedJobs"]}
    assert counts["host"] == 3, "spares count"
    assert workload["metadata"]["labels"] == {"kueue.x-k8s.io/job-uid": jobset["metadata"]["uid"]}
    if CRDS.is_dir():
        assert Definitions().errors(workload) == []


def test_row_11_it_stays_after_the_jobset_until_kueue_takes_its_finalizer():
    run = play()
    run.run()
    run.kueue.down = True
    path = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets/{run.one('JobSet')['metadata']['name']}"
    run.plane.call("DELETE", path, {})
    run.run()
    assert not run.server.of_kind("JobSet") and run.one("Workload")["metadata"]["deletionTimestamp"]
    run.kueue.down = False
    run.run()
    assert not run.server.of_kind("Workload")


def test_row_11_resources_that_no_queue_covers_are_never_admitted():
    run = play()
    queue = run.one("ClusterQueue")
    group = queue["spec"]["resourceGroups"][0]
    group["coveredResources"].remove("memory")
    for flavor in group["flavors"]:
        flavor["resources"] = [one for one in flavor["resources"] if one["name"] != "memory"]
    run.run(3600)
    assert not run.pods() and "resource memory unavailable" in run.conditions("Workload")["QuotaReserved"]["message"]


def test_row_11_what_can_never_fit_and_what_has_to_wait_are_told_apart():
    run = play()
    flavors = run.one("ClusterQueue")["spec"]["resourceGroups"][0]["flavors"]
    gpus = next(one for one in flavors[0]["resources"] if one["name"] == "nvidia.com/gpu")
    gpus["nominalQuota"] = 4
    run.run()
    said = run.conditions("Workload")["QuotaReserved"]["message"]
    assert "+ current podset request (8) > maximum capacity (4)" in said
    assert not run.pods() and run.one("JobSet")["spec"]["suspend"] is True


def test_row_12_an_admission_injects_and_an_eviction_takes_it_out_again():
    run = play("reservation", "a4-highgpu-8g", nodes=2)
    before = copy.deepcopy(run.one("JobSet")["spec"]["replicatedJobs"])
    run.run()
    pod, workload = run.pod("host"), run.one("Workload")["metadata"]["name"]
    labels = pod["metadata"]["labels"]
    assert pod["metadata"]["annotations"]["kueue.x-k8s.io/workload"] == workload
    assert labels["kueue.x-k8s.io/podset"] == "host" and labels["kueue.x-k8s.io/cluster-queue-name"]
    admitted = copy.deepcopy(run.one("JobSet"))
    assert admitted["spec"]["replicatedJobs"] != before
    run.controllers.evict(admitted["metadata"]["name"], "Preempted")
    run.kueue.hold = True
    run.run()
    assert run.one("JobSet")["spec"]["replicatedJobs"] == before and not run.pods()
    # What goes on in the next allocation is made from an admitted JobSet, and starts without what was injected.
    later = continuation(admitted)
    rows = [role["template"]["spec"]["template"] for role in later["spec"]["replicatedJobs"]]
    for template, old in zip(rows, before, strict=True):
        assert template["spec"].get("schedulingGates") in (None, [])
        assert not [key for key in template["metadata"].get("labels", {}) if key.startswith("kueue.x-k8s.io/")]
        asked = old["template"]["spec"]["template"]["metadata"].get("annotations", {})
        assert template["metadata"].get("annotations", {}) == asked
    run.kueue.hold = False
    run.add(later)
    run.run()
    names = {one["metadata"]["name"] for one in run.server.of_kind("Workload")}
    assert len(names) == 2


def test_row_12_a_value_that_contradicts_the_flavor_is_for_good():
    run = play()
    template = run.one("JobSet")["spec"]["replicatedJobs"][-1]["template"]["spec"]["template"]
    template["metadata"].setdefault("labels", {})["kueue.x-k8s.io/podset"] = "mine"
    run.run()
    assert says(run)["Finished"] == ("True", "FailedToStart") and not run.pods()


@pytest.mark.parametrize("reason", ["Preempted", "ClusterQueueStopped", "NodeFailures"])
def test_row_13_an_eviction_takes_every_pod_and_the_same_jobset_starts_again(reason):
    run = play()
    run.run()
    first = {pod["metadata"]["name"] for pod in running(run)}
    jobset = run.one("JobSet")
    run.controllers.evict(jobset["metadata"]["name"], reason, "because")
    run.kueue.hold = True
    run.step()
    going = [pod for pod in run.pods() if pod["metadata"].get("deletionTimestamp")]
    assert len(going) == len(first), "the supervisor's too"
    assert says(run)["Evicted"] == ("True", reason)
    assert says(run)["QuotaReserved"][0] == says(run)["Admitted"][0] == "False", "a pod that is going is not active"
    run.kueue.hold = False
    run.step()
    assert not running(run) or all(pod["metadata"].get("deletionTimestamp") for pod in running(run))
    run.run()
    second = {pod["metadata"]["name"] for pod in running(run)}
    assert len(second) == len(first) and not first & second
    assert {one.rpartition("-")[0] for one in first} == {one.rpartition("-")[0] for one in second}, "same host names"
    assert run.one("JobSet")["metadata"]["uid"] == jobset["metadata"]["uid"]
    assert not run.one("JobSet")["status"]["restarts"], "no limit is charged"
    assert run.conditions("Workload")["Evicted"]["message"] == "Previously: because"
    assert run.events("Stopped") == ["because"] and len(run.events("Started")) == 2


def test_row_13_who_suspends_an_admitted_run_by_hand_is_undone():
    run = play()
    run.run()
    path = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets/{run.one('JobSet')['metadata']['name']}"
    run.plane.call("PATCH", path, {"spec": {"suspend": True}})
    run.run()
    assert run.one("JobSet")["spec"]["suspend"] is False and running(run)


def test_row_13_a_held_queue_admits_nothing():
    run = play()
    run.one("ClusterQueue")["spec"]["stopPolicy"] = "Hold"
    run.run(3600)
    assert not run.pods() and says(run)["QuotaReserved"] == ("False", "Inadmissible")


# ---------------------------------------------------------------- waitForPodsReady


def lost_host(run):
    """A node is gone and none comes: its pod's successor stays Pending."""
    run.add_node("gone", {})
    run.pod("host", 1)["spec"]["nodeName"] = "gone"
    run.lose("gone")
    run.step(60)
    run.step()


def test_row_14_by_default_half_an_hour_without_a_host_ends_a_healthy_run():
    run = play(spare_hosts=1)
    run.run()
    assert says(run)["PodsReady"] == ("True", "Started")
    lost_host(run)
    assert says(run)["PodsReady"] == ("False", "WaitForRecovery")
    run.step(29 * MINUTE)
    assert "Evicted" not in says(run)
    run.step(2 * MINUTE, times=2)
    run.step()
    assert says(run)["Evicted"] == ("True", "PodsReadyTimeout"), "with a spare, and training"
    assert all(pod["metadata"].get("deletionTimestamp") for pod in running(run))


def test_row_14_nodes_later_than_half_an_hour_are_sent_back_with_growing_pauses():
    run = play()
    for attempt, pause_s in enumerate((60, 120, 240), start=1):
        run.step()
        run.step(31 * MINUTE)
        for pod in run.pods():
            run.forget(pod)
        run.step()
        assert says(run)["Requeued"] == ("False", "PodsReadyTimeout")
        assert run.one("Workload")["status"]["requeueState"]["count"] == attempt
        run.step(pause_s - 5)
        assert run.one("JobSet")["spec"]["suspend"] is True
        run.step(10)
        assert run.one("JobSet")["spec"]["suspend"] is False and says(run)["Requeued"] == ("True", "BackoffFinished")


def test_row_14_with_the_configuration_of_up_it_never_does():
    run = play(spare_hosts=1, config={"waitForPodsReady": {"timeout": "168h", "recoveryTimeout": "0s"}})
    run.run()
    lost_host(run)
    run.step(6 * 24 * 3600)
    assert "Evicted" not in says(run) and len(running(run)) >= 3


def test_row_14_a_configuration_that_kueue_refuses_admits_nothing_and_lets_no_pod_be_made():
    run = play(config={"featureGates": {"TASFailedNodeReplacement": False}})
    run.run(3600)
    assert run.kueue.refused and not run.server.of_kind("Workload") and not run.pods()


def test_row_14_a_changed_configuration_acts_only_once_the_deployment_is_rolled():
    run = play(config={})
    run.run()
    config = configuration(waitForPodsReady={"timeout": "168h", "recoveryTimeout": "0s"})
    path = "/api/v1/namespaces/kueue-system/configmaps/kueue-manager-config"
    run.plane.call("PATCH", path, {"data": config["data"]})
    run.step()
    assert "waitForPodsReady" not in run.kueue.configuration
    names = {"name": "kueue-controller-manager", "namespace": "kueue-system"}
    template = {"metadata": {"annotations": {"hash": "2"}}}
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": names, "spec": {"template": template}}
    run.plane.call("POST", "/apis/apps/v1/namespaces/kueue-system/deployments", deployment)
    run.step()
    assert run.kueue.configuration["waitForPodsReady"]["timeout"] == "168h"


# ---------------------------------------------------------------- ProvisioningRequests


def test_row_15_accepted_provisioned_admitted():
    run = play(DWS)
    run.run()
    found = request(run)
    workload = run.one("Workload")["metadata"]["name"]
    assert found["metadata"]["name"] == f"{workload}-muster-dws-1" and not run.pods()
    assert [one["count"] for one in found["spec"]["podSets"]] == [2], "hosts alone: no supervisor waits for GPUs"
    assert found["spec"]["parameters"]["maxRunDurationSeconds"] == "604800"
    names = {one["metadata"]["name"] for one in run.server.of_kind("PodTemplate")}
    assert names == {f"ppt-{found['metadata']['name']}-host"}
    run.kueue.provisioning.accept(found)
    run.run()
    (check,) = run.one("Workload")["status"]["admissionChecks"]
    assert (check["state"], check["message"]) == ("Pending", "Capacity is expected in about 2 hours")
    assert says(run)["Admitted"] == ("False", "UnsatisfiedChecks")
    run.kueue.provisioning.provision(request(run))
    run.run()
    pod = run.pod("host")
    key = "autoscaling.x-k8s.io/consume-provisioning-request"
    assert pod["metadata"]["annotations"][key] == found["metadata"]["name"]
    assert key not in run.pod("supervisor")["metadata"].get("annotations", {})


def test_row_15_failed_it_is_asked_again_twice_and_then_never():
    run = play(DWS)
    for attempt in (1, 2, 3):
        run.run()
        assert request(run)["metadata"]["name"].endswith(f"-{attempt}")
        run.kueue.provisioning.fail(request(run), "stockout")
        run.step(times=2)
        run.run()
        assert not run.server.of_kind("ProvisioningRequest"), "between two tries there is none to look at"
        said = run.conditions("Workload")["Evicted"]
        if attempt < 3:
            assert said["reason"] == "AdmissionCheck" and "Retrying after failure: stockout" in said["message"]
            run.run(60.0 * 2 ** (attempt - 1) + 1)
    assert said["reason"] == "DeactivatedDueToAdmissionCheck" and run.one("Workload")["spec"]["active"] is False
    run.run(24 * 3600)
    assert not run.pods() and not run.server.of_kind("ProvisioningRequest")


def test_row_15_a_booking_that_expires_is_of_no_account_once_it_is_admitted():
    run = play(DWS)
    run.run()
    run.kueue.provisioning.provision(request(run))
    run.run()
    run.kueue.provisioning.expire(request(run))
    run.run(3600)
    assert "Evicted" not in says(run) and running(run)


def test_row_15_nodes_taken_back_after_seven_days_end_the_run_for_good():
    run = play(DWS)
    run.run()
    run.kueue.provisioning.provision(request(run))
    run.run()
    run.kueue.provisioning.revoke(request(run))
    run.step()
    assert says(run)["Evicted"] == ("True", "DeactivatedDueToAdmissionCheck")
    run.run(3600)
    assert not run.pods() and run.one("JobSet")["spec"]["suspend"] is True


# ---------------------------------------------------------------- topology and lost nodes


def tas(nodes, **gates):
    """A run with topology-aware scheduling on as many nodes; waitForPodsReady as `up` sets it."""
    config = {"waitForPodsReady": {"timeout": "168h", "recoveryTimeout": "0s"}, "featureGates": gates}
    where = placement(spec("a4-highgpu-8g", "reservation", spare_hosts=1))
    objects = copy.deepcopy(queue_objects(where))
    jobset = copy.deepcopy(run_objects(where, "", "")[-1])
    for one in objects:  # also where ours ask for none
        if one["kind"] == "ResourceFlavor" and "gke-accelerator" in str(one["spec"]):
            one["spec"]["topologyName"] = "muster-gce"
    if not [one for one in objects if one["kind"] == "Topology"]:
        levels = [{"nodeLabel": "cloud.google.com/gce-topology-block"}, {"nodeLabel": "kubernetes.io/hostname"}]
        objects.insert(0, {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Topology",
                           "metadata": {"name": "muster-gce"}, "spec": {"levels": levels}})  # fmt: skip
    run = Play(configuration(**config), *objects, jobset, nodes=nodes, labels=labels_of(where))
    run.run()
    assert len(running(run)) == len(run.pods()) and len(run.pods("host")) == 3
    return run


def node_of(run, index):
    return run.pod("host", index)["spec"]["nodeName"]


def lose(run, index):
    node = node_of(run, index)
    run.lose(node)
    run.step()
    run.step(60)
    run.run()
    return node


def test_row_16_with_the_released_gates_one_lost_node_evicts_a_run_that_has_a_spare():
    run = tas(3)
    node = lose(run, 1)
    said = [one for one in run.events("Stopped") if "no replacement for unhealthy node" in one]
    assert said and node in said[0]


def test_row_16_with_the_gates_off_the_run_goes_on_with_its_spare():
    run = tas(3, **dict.fromkeys(TAS_OFF, False))
    lose(run, 1)
    run.step(7 * 24 * 3600)
    assert "Evicted" not in says(run) and len([pod for pod in running(run) if "-host-" in pod["metadata"]["name"]]) == 2
    (waiting,) = [pod for pod in run.pods("host") if (pod.get("status") or {}).get("phase") != "Running"]
    assert not waiting["spec"].get("nodeName"), "its successor is bound to a node that is gone"


def test_row_16_a_second_lost_node_evicts_whatever_the_gates_are():
    """Pods that end bring their node in with the gate off as well."""
    run = tas(3, **dict.fromkeys(TAS_OFF, False))
    nodes = {lose(run, 1)}
    assert not run.events("Stopped")
    nodes.add(lose(run, 2))
    (said,) = run.events("Stopped")
    assert "multiple TAS assigned node failures" in said and all(node in said for node in nodes)


def test_row_16_with_a_node_to_spare_the_lost_one_is_replaced():
    run = tas(4)
    node = node_of(run, 1)
    lose(run, 1)
    assert not run.events("Stopped") and node_of(run, 1) not in (node, "any")


@pytest.mark.parametrize("gate", [True, False])
def test_row_16_a_pod_on_a_node_that_hangs_is_ended_by_force_with_the_gate_and_an_annotation(gate):
    """Without both its successor never comes. It is charged: this is no disruption to the Job controller."""
    run = play(config={"featureGates": {"FailureRecoveryPolicy": gate}})
    run.run()
    run.add_node("hangs", {})
    pod = run.pod("host", 1)
    pod["spec"]["nodeName"] = "hangs"
    pod["metadata"]["annotations"]["kueue.x-k8s.io/safe-to-forcefully-delete"] = "true"
    run.lose("hangs", deleted=False)
    taint = {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}
    run.plane.call("PATCH", "/api/v1/nodes/hangs", {"spec": {"taints": [taint]}})
    run.step()
    run.step(50)
    assert len(run.pods("host")) == 2
    run.step(20)
    run.step(20)
    names = {one["metadata"]["name"] for one in run.pods("host")}
    assert (pod["metadata"]["name"] not in names) is gate and len(names) == 2
    job = next(one for one in run.server.of_kind("Job") if one["metadata"]["name"].endswith("-host-1"))
    assert job["status"]["failed"] == int(gate)


def test_row_16_without_topology_a_lost_node_evicts_nobody():
    run = play(spare_hosts=1, config={"waitForPodsReady": {"timeout": "168h", "recoveryTimeout": "0s"}})
    run.run()
    lost_host(run)
    run.step(24 * 3600)
    assert "Evicted" not in says(run)


def test_row_25_without_every_label_of_the_topology_nodes_bill_and_nothing_starts():
    where = placement(spec("a4-highgpu-8g", DWS))
    objects = copy.deepcopy(queue_objects(where))
    gpu = next(one for one in objects if one["kind"] == "ResourceFlavor" and "gke-accelerator" in str(one["spec"]))
    gpu["spec"]["topologyName"] = "muster-gce"
    levels = [{"nodeLabel": "cloud.google.com/gce-topology-block"}, {"nodeLabel": "kubernetes.io/hostname"}]
    topology = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Topology", "metadata": {"name": "muster-gce"},
                "spec": {"levels": levels}}  # fmt: skip
    objects = [topology, *(one for one in objects if one["kind"] != "Topology")]
    labels = {key: value for key, value in labels_of(where).items() if key != "cloud.google.com/gce-topology-block"}
    run = Play(*objects, run_objects(where, "", "")[-1], nodes=2, labels=labels)
    run.run()
    run.kueue.provisioning.provision(request(run))
    run.run(60)
    assert says(run)["Admitted"] == ("False", "PendingDelayedTopologyRequests") and not run.pods()
    run.kueue.provisioning.expire(request(run))
    run.step(times=3)
    assert "booking expired" in run.conditions("Workload")["Evicted"]["message"], "and it is asked for again"


def test_row_15_kueue_away_nothing_is_admitted_and_no_pod_is_made():
    run = play()
    run.kueue.down = True
    run.run(3600)
    assert not run.server.of_kind("Workload") and not run.pods()
    run.kueue.down = False
    run.run()
    run.kueue.down = True
    run.end(run.pod("host"), 75)
    run.step()
    run.run(60)
    assert "kueue-webhook-service" in run.events("FailedCreate")[0]
