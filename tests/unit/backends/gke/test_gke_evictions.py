"""Evictions, nodes that are there and useless, and pods that cannot be made: what to do, and whether money is running.

Texts are Kueue 0.19.2's, JobSet 0.12's and the API server's own.
"""

import pytest
from test_gke_status_reason import GPUS, JOBSET, RESERVED, STARTED, SUPERVISOR, seen

from muster.backends.gke.operate.status_reason import ClusterSnapshot, explain
from muster.core.types import JobState

GONE = "no pod of it runs, and its nodes stop billing about 10 minutes after the last one"
ENDING = "its pods are being ended, and its nodes bill"
AGAIN = "it continues from its checkpoint when it is admitted again"


def evicted(reason, message="", reserved=False, quota=None, **status):
    row = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": quota or message}
    conditions = [
        RESERVED if reserved else row,
        {"type": "Evicted", "status": "True", "reason": reason, "message": message},
        {"type": "Admitted", "status": "False", "reason": "NoReservation"},
    ]
    return {"metadata": {"name": "w"}, "status": {"conditions": conditions, **status}}


TIMER = "Exceeded the PodsReady timeout default/jobset-run-1a2b3"
FAILED = 'Evicted due to AdmissionCheck in Retry state: "muster-dws" (Retrying after failure: stockout)'
LOST = "Workload was evicted as there was no replacement for unhealthy node(s): gpu-3"
OTHER = "Preempted to accommodate a workload (UID: u1, JobUID: u2) due to prioritization in the ClusterQueue"


@pytest.mark.parametrize(
    ("workload", "sentence", "hint"),
    [
        (evicted("PodsReadyTimeout", TIMER, requeueState={"count": 1, "requeueAt": "2026-01-02T03:04:05Z"}),
         f"evicted because not all pods were ready in time; queued again: {TIMER}; Kueue tries again at "
         f"2026-01-02T03:04:05Z (try 2); {GONE}; {AGAIN}", "waitForPodsReady"),
        (evicted("PodsReadyTimeout", TIMER, reserved=True),
         f"evicted because not all pods were ready in time; queued again: {TIMER}; {ENDING}; {AGAIN}",
         "kueue-manager-config"),
        (evicted("ClusterQueueStopped", "The ClusterQueue is stopped"),
         f"its cluster queue was stopped; waiting: The ClusterQueue is stopped; {GONE}; {AGAIN}", "stopPolicy"),
        (evicted("LocalQueueStopped", "The LocalQueue is stopped"),
         f"its queue was stopped; waiting: The LocalQueue is stopped; {GONE}; {AGAIN}", "stopPolicy"),
        (evicted("AdmissionCheck", FAILED),
         f"evicted by an admission check; queued again: {FAILED}; {GONE}; {AGAIN}", "another zone"),
        (evicted("NodeFailures", LOST),
         f"evicted because Kueue found no other node for one that was lost; queued again: {LOST}; {GONE}; {AGAIN}",
         "TASFailedNodeReplacement"),
        (evicted("Preempted", OTHER, quota="insufficient unused quota for nvidia.com/gpu in flavor a, 8 more needed"),
         f"preempted by another workload of the cluster; queued again: {OTHER}; it waits for Kueue quota: insufficient "
         f"unused quota for nvidia.com/gpu in flavor a, 8 more needed; {GONE}; {AGAIN}", None),
        (evicted("OfAnotherRelease", "who knows"),
         f"evicted by Kueue (OfAnotherRelease); queued again: who knows; {GONE}; {AGAIN}", None),
    ],
)  # fmt: skip
def test_taken_back_by_kueue(workload, sentence, hint):
    found = explain(ClusterSnapshot(jobset=JOBSET, workload=workload))
    assert (found.state, found.sentence) == (JobState.WAITING, sentence)
    assert found.hint is hint or hint in found.hint


REJECTED = 'The workload is deactivated due to AdmissionCheck in Rejected state: "muster-dws" (Nodes were revoked)'


@pytest.mark.parametrize(
    ("reason", "message", "part", "hint"),
    [
        ("DeactivatedDueToAdmissionCheck", REJECTED, "DWS has no capacity, or the nodes' time is over", "submit again"),
        ("DeactivatedDueToRequeuingLimitExceeded", "exceeding the maximum number of re-queuing retries",
         "its pods were not ready in time too often", "waitForPodsReady"),
        ("DeactivatedDueToMaximumExecutionTimeExceeded", "exceeding the maximum execution time",
         "max-exec-time-seconds", "submit again"),
        ("Deactivated", "The workload is deactivated", "never starts it again; The workload is deactivated",
         "spec.active"),
    ],
)  # fmt: skip
def test_deactivated_for_good(reason, message, part, hint):
    """Not ``Deactivated`` alone: a rejected check has a reason of its own, and nothing ever queues the run again."""
    for spec in ({"active": False}, {}):
        found = explain(ClusterSnapshot(jobset=JOBSET, workload={**evicted(reason, message), "spec": spec}))
        assert found.state is JobState.STOPPED and found.sentence.startswith("Kueue has deactivated the run")
        assert part in found.sentence and message in found.sentence and GONE in found.sentence and hint in found.hint


def test_an_eviction_that_is_over_is_not_told_again():
    row = {"type": "Evicted", "status": "False", "reason": "PodsReadyTimeout", "message": "Previously: " + TIMER}
    admitted = {"metadata": {"name": "w"}, "status": {"conditions": [RESERVED, row, {"type": "Admitted",
                                                                                      "status": "True"}]}}  # fmt: skip
    found = explain(ClusterSnapshot(jobset=STARTED, workload=admitted, pods=[SUPERVISOR, *GPUS[:2]]))
    assert found.sentence == "running: 2 hosts and the supervisor"


# ---------------------------------------------------------------- nodes that bill and are not used


LEVELS = [f"cloud.google.com/gce-topology-{level}" for level in ("block", "subblock", "host")]
GPU = {"cloud.google.com/gke-accelerator": "nvidia-b200"}
UNPLACED = {
    "metadata": {"name": "w"},
    "spec": {"podSets": [{"name": "supervisor", "template": {}}, {"name": "host", "template": {"spec": {
        "nodeSelector": GPU}}}]},
    "status": {"conditions": [RESERVED, {"type": "Admitted", "status": "False",
                                         "reason": "PendingDelayedTopologyRequests",
                                         "message": "There are pending delayed topology requests"}],
               "admissionChecks": [{"name": "muster-dws", "state": "Ready"}]},
}  # fmt: skip


def gpu_node(name, *levels, ready="True", **labels):
    conditions = [{"type": "Ready", "status": ready}]
    marks = {**GPU, **dict.fromkeys(levels, "x"), **labels}
    return {"metadata": {"name": name, "labels": marks}, "status": {"conditions": conditions}}


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ([gpu_node("gpu-0", *LEVELS), gpu_node("gpu-1", LEVELS[0])],
         "node gpu-1 has no label cloud.google.com/gce-topology-subblock"),
        ([gpu_node("gpu-0", *LEVELS, ready="False")], "node gpu-0 is not ready"),
        ([gpu_node("gpu-0", *LEVELS)], "There are pending delayed topology requests"),
        ([{"metadata": {"name": "cpu-0", "labels": {}}}], "There are pending delayed topology requests"),
    ],
)  # fmt: skip
def test_delivered_nodes_without_topology_labels_bill_and_never_start(nodes, why):
    requested = {"metadata": {"name": "w-muster-dws-1"}, "status": {"conditions": [
        {"type": "Accepted", "status": "True"}, {"type": "Provisioned", "status": "True"}]}}  # fmt: skip
    found = explain(ClusterSnapshot(jobset=JOBSET, workload=UNPLACED, nodes=nodes, topology_labels=LEVELS,
                                    provisioning_requests=[requested]))  # fmt: skip
    assert found.state is JobState.WAITING and "muster down ends the cost" in found.hint
    assert found.sentence == (
        f"DWS has delivered the nodes, which bill, and Kueue does not place the pods on them: {why}"
    )


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ("", "quota is reserved; waiting for admission check muster-dws (no request to DWS yet)"),
        ('Error creating ProvisioningRequest "w-muster-dws-1": exceeded quota',
         'Kueue cannot ask DWS for nodes: Error creating ProvisioningRequest "w-muster-dws-1": exceeded quota'),
        ("Reset to Pending after eviction", "quota is reserved; waiting for admission check muster-dws: Reset to "
         "Pending after eviction"),
    ],
)  # fmt: skip
def test_between_two_requests_to_dws_the_check_says_it(message, sentence):
    """Kueue deletes the old requests on eviction: nothing but the check is left to read."""
    check = {"name": "muster-dws", "state": "Pending", "message": message}
    workload = {"metadata": {"name": "w"}, "status": {"conditions": [RESERVED], "admissionChecks": [check]}}
    assert explain(ClusterSnapshot(jobset=JOBSET, workload=workload)).sentence == sentence


# ---------------------------------------------------------------- what cannot be made


WANTS = {
    **STARTED,
    "spec": {"suspend": False, "replicatedJobs": [{"name": "supervisor"}, {"name": "host", "replicas": 3}]},
}


def complaint(job, message):
    return {"involvedObject": {"kind": "Job", "name": job}, "reason": "FailedCreate", "message": message}


QUOTA = 'pods "run-host-2-" is forbidden: exceeded quota: team, requested: cpu=8, used: cpu=16, limited: cpu=20'
CLOSED = (
    'Internal error occurred: failed calling webhook "mpod.kb.io": failed to call webhook: Post '
    '"https://jobset-webhook-service.jobset-system.svc:443/mutate--v1-pod?timeout=10s": no endpoints available for '
    'service "jobset-webhook-service"'
)


def test_pods_that_cannot_be_made():
    events = [complaint("run-host-2", QUOTA)]
    found = seen([SUPERVISOR, *GPUS[:2]], events, jobset=WANTS)
    assert found == (JobState.RUNNING, f"running: 2 hosts and the supervisor; host-2 cannot be created ({QUOTA})")
    assert seen([SUPERVISOR, *GPUS[:3]], events, jobset=WANTS)[1] == "running: 3 hosts and the supervisor", "it was"
    none = seen([], [complaint("run-supervisor-0", "denied by policy"), complaint("another-0", "x")], jobset=WANTS)
    assert none == (JobState.WAITING, "admitted; 4 pods cannot be created (denied by policy)")


def test_a_webhook_that_does_not_answer_is_named():
    found = explain(
        ClusterSnapshot(jobset=WANTS, pods=[SUPERVISOR, *GPUS[:2]], events=[complaint("run-host-2", CLOSED)])
    )
    assert found.state is JobState.RUNNING and found.sentence.startswith(
        "running: 2 hosts and the supervisor; host-2 cannot be created: the webhook jobset-webhook-service "
        "(jobset-system) does not answer (Internal error occurred: failed calling webhook"
    )
    assert "what runs is untouched, and nothing lost is replaced" in found.hint


def test_jobs_that_the_api_server_refuses_after_it_took_the_jobset():
    refused = {"involvedObject": {"name": "run"}, "reason": "JobCreationFailed", "message": "must be no more than 63"}
    assert seen([], [refused], jobset=WANTS)[1] == "admitted; its jobs cannot be created (must be no more than 63)"
    assert seen([SUPERVISOR, *GPUS[:3]], [refused], jobset=WANTS)[1] == "running: 3 hosts and the supervisor"
