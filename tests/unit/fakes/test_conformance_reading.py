"""``status`` reads what a cluster really says: exit codes after the pods, Kueue's own words, missing labels."""

import pytest
from fakes.kubernetes import FakeKubernetes, in_memory

from muster.backends.gke.operate.cluster_snapshot import exit_code, take_snapshot
from muster.backends.gke.operate.status_reason import explain
from muster.core.types import JobState

RUN = {"app.kubernetes.io/instance": "run"}
CHECK = "muster-dws"


@pytest.fixture
def server():
    found = FakeKubernetes()
    jobset = {"kind": "JobSet", "metadata": {"name": "run", "labels": RUN}, "spec": {"suspend": True}}
    keep(found, "apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets", jobset)
    return found


def keep(server, path, one):
    """As a controller left it: no webhook looks at a status."""
    server.objects[f"{path}/{one['metadata']['name']}"] = one


def workload(server, *conditions, **status):
    owners = [{"kind": "JobSet", "name": "run"}]
    spec = status.pop("spec", {})
    one = {"kind": "Workload", "metadata": {"name": "jobset-run-1a2b3", "ownerReferences": owners}, "spec": spec,
           "status": {"conditions": list(conditions), **status}}  # fmt: skip
    keep(server, "apis/kueue.x-k8s.io/v1beta2/namespaces/default/workloads", one)


def condition(kind, status, reason="", message=""):
    return {"type": kind, "status": str(status), "reason": reason, "message": message}


def seen(server):
    return take_snapshot(in_memory(server), "default", "run")


@pytest.mark.parametrize("kind", ["Failed", "FailureTarget"])
@pytest.mark.parametrize("code", [3, 130])
def test_row_07_the_pods_are_collected_and_the_jobs_message_has_the_exit_code(server, kind, code):
    """JobSet's own reason names the Job alone; the finished pod goes with its node."""
    (jobset,) = server.of_kind("JobSet")
    why = "applying FailJobSet failure policy action (first failed job: run-supervisor-0)"
    jobset["status"] = {"conditions": [condition("Failed", True, "FailJobSetFailurePolicyAction", why)]}
    assert exit_code(seen(server), JobState.FAILED) == 1, "all that is left without it"
    text = (
        f"Container supervisor for pod default/run-supervisor-0-0-abcde failed with exit code {code} matching FailJob "
        "rule at index 2"
    )
    labels = {"jobset.sigs.k8s.io/jobset-name": "run", "jobset.sigs.k8s.io/replicatedjob-name": "supervisor"}
    job = {"kind": "Job", "metadata": {"name": "run-supervisor-0", "labels": labels},
           "status": {"conditions": [condition(kind, True, "PodFailurePolicy", text)]}}  # fmt: skip
    keep(server, "apis/batch/v1/namespaces/default/jobs", job)
    assert server.of_kind("Pod") == [] and exit_code(seen(server), JobState.FAILED) == code


REQUESTED = (
    "couldn't assign flavors to pod set host: insufficient quota for nvidia.com/gpu in flavor a, previously considered "
    "podsets requests (0) + current podset request (24) > maximum capacity (16)"
)
RESERVED = condition("QuotaReserved", True, "QuotaReserved", "Quota reserved in ClusterQueue muster")


@pytest.mark.parametrize(
    ("conditions", "check", "spec", "state", "said"),
    [
        ([condition("QuotaReserved", False, "Pending", REQUESTED)],
         None, {}, "waiting", "Kueue can never admit the run, which is larger than its queue"),
        ([RESERVED], ("Pending", "Retrying after failure: stockout"), {}, "waiting",
         "admission check muster-dws: Retrying after failure: stockout"),
        ([condition("QuotaReserved", False, "Pending"), condition("Evicted", True, "AdmissionCheck",
          'Evicted due to AdmissionCheck in Retry state: "muster-dws" (Retrying after booking expired: 10m)')],
         ("Pending", "Reset to Pending after eviction. Previously: Retry"), {}, "waiting",
         "evicted by an admission check; queued again: Evicted due to AdmissionCheck in Retry state"),
        ([condition("QuotaReserved", False, "Pending"), condition("Evicted", True, "DeactivatedDueToAdmissionCheck",
          'The workload is deactivated due to AdmissionCheck in Rejected state: "muster-dws" (no)')],
         ("Rejected", "no"), {"active": False}, "stopped", "Kueue has deactivated the run and never starts it again"),
        ([condition("QuotaReserved", False, "Pending"),
          condition("Evicted", True, "PodsReadyTimeout", "Exceeded the PodsReady timeout default/jobset-run-1a2b3")],
         None, {}, "waiting", "evicted because not all pods were ready in time; queued again"),
        ([condition("QuotaReserved", False, "Pending"), condition("Evicted", True, "NodeFailures",
          "Workload was evicted as there was no replacement for unhealthy node(s): gpu-3")],
         None, {}, "waiting", "evicted because Kueue found no other node for one that was lost"),
    ],
)  # fmt: skip
def test_row_24_sentences_of_kueue(server, conditions, check, spec, state, said):
    checks = [{"name": CHECK, "state": check[0], "message": check[1]}] if check else []
    workload(server, *conditions, admissionChecks=checks, spec=spec)
    found = explain(seen(server))
    assert found.state == state and said in found.sentence


GPU = {"cloud.google.com/gke-accelerator": "nvidia-b200"}
LEVELS = [f"cloud.google.com/gce-topology-{level}" for level in ("block", "subblock", "host")]


def test_row_25_nodes_that_lack_a_label_bill_and_are_never_used(server):
    """DWS has delivered, the second pass never succeeds: nothing on the cluster says that this costs money."""
    unplaced = condition(
        "Admitted", False, "PendingDelayedTopologyRequests", "There are pending delayed topology requests"
    )
    hosts = {"name": "host", "count": 2, "template": {"spec": {"nodeSelector": GPU}}}
    workload(server, RESERVED, unplaced, admissionChecks=[{"name": CHECK, "state": "Ready"}], spec={"podSets": [hosts]})
    levels = {"levels": [{"nodeLabel": label} for label in [*LEVELS, "kubernetes.io/hostname"]]}
    keep(
        server,
        "apis/kueue.x-k8s.io/v1beta2/topologies",
        {"kind": "Topology", "metadata": {"name": "t"}, "spec": levels},
    )
    for index in range(2):
        name = f"gpu-{index}"
        labels = {**GPU, "kubernetes.io/hostname": name, **dict.fromkeys(LEVELS if index else LEVELS[1:], "x")}
        ready = {"conditions": [condition("Ready", True)]}
        keep(server, "api/v1/nodes", {"kind": "Node", "metadata": {"name": name, "labels": labels}, "status": ready})
    found = explain(seen(server))
    assert found.sentence == (
        "DWS has delivered the nodes, which bill, and Kueue does not place the pods on them: node gpu-0 has no label "
        "cloud.google.com/gce-topology-block"
    )
    assert found.state is JobState.WAITING and "muster down ends the cost" in found.hint
