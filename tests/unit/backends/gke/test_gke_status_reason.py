"""What the cluster says becomes one right sentence: recorded kubectl outputs, then each obstacle on the way."""

import re
from pathlib import Path

import pytest

from muster.backends.gke.operate.status_reason import ClusterSnapshot, explain
from muster.core.types import JobState

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
RECORDED = Path(__file__).resolve().parents[5] / "shared" / "data" / "oracles" / "kueue"
JOBSET = {"metadata": {"name": "run"}, "spec": {"suspend": True}, "status": {}}
STARTED = {"metadata": {"name": "run"}, "spec": {"suspend": False}, "status": {}}


def status_of(text):
    """The status in a recording: YAML with parts cut out, or ``kubectl describe``, which is no YAML."""
    if "Status:" in text or re.search(r"^ *Conditions:", text, re.M):
        kind = "admissionChecks" if "Admission Checks:" in text else "conditions"
        found, item = [], None
        for line in text.splitlines():
            key, colon, value = line.strip().partition(":")
            if key == "Last Transition Time":
                item = {}
                found.append(item)
            elif colon and item is not None and key in ("Message", "Reason", "Status", "Type", "Name", "State"):
                item.setdefault(key.lower(), value.strip())
        if kind == "admissionChecks":
            found[0].pop("name", None)
            found[0]["name"] = re.search(r"^ {4}Name: +(\S+)$", text, re.M).group(1)
            found[0]["state"] = re.search(r"^ {4}State: +(\S+)$", text, re.M).group(1)
        return {kind: found}
    kept = [line for line in text.splitlines() if line.strip() not in ("...", "")]
    return (yaml.safe_load("\n".join(kept)) or {})["status"]


def recording(number):
    paths = list(RECORDED.glob(f"{number:03}_*.txt"))
    if not paths:
        pytest.skip(f"no recorded kubectl outputs at {RECORDED}")
    return paths[0].read_text()


@pytest.mark.parametrize("number", [51, 52])
def test_recorded_list_of_workloads(number):
    """``kubectl get workloads``: the columns are the two conditions."""
    row = next(line for line in recording(number).splitlines() if line.strip().startswith("job-my-job")).split()
    name, _, queue, admitted, _ = row
    conditions = [
        {"type": "QuotaReserved", "status": "True", "message": f"Quota reserved in ClusterQueue {queue}"},
        {"type": "Admitted", "status": admitted},
    ]
    status = {"admission": {"clusterQueue": queue}, "conditions": conditions}
    found = explain(ClusterSnapshot(workload={"metadata": {"name": name}, "status": status}))
    assert found.sentence == "admitted by cluster-queue; waiting for its pods"


WORKLOADS = {
    53: "quota is reserved in cluster-queue; waiting to be admitted",
    54: "admitted by the queue; waiting for its pods",
    55: "waiting for Kueue quota: couldn't assign flavors to pod set main: insufficient quota for cpu in flavor "
    "default-flavor in ClusterQueue",
    56: "quota is reserved; waiting for admission check dws-prov (no request to DWS yet)",
    63: "admitted by the queue; waiting for its pods",
    65: "quota is reserved in the queue; waiting to be admitted",
    66: "waiting for Kueue quota: couldn't assign flavors to pod set main: insufficient unused quota for memory in "
    "flavor default-flavor, 4396Mi more needed",
    67: "Kueue cannot admit the run: ClusterQueue cluster-queue doesn't exist",
}


@pytest.mark.parametrize("number", WORKLOADS)
def test_recorded_workloads(number):
    workload = {"metadata": {"name": "w"}, "status": status_of(recording(number))}
    assert explain(ClusterSnapshot(workload=workload)).sentence == WORKLOADS[number]


def test_recorded_provisioning_request_that_failed():
    request = {"metadata": {"name": "w-dws-1"}, "status": status_of(recording(64))}
    waiting = {"metadata": {"name": "w"}, "status": status_of(recording(56))}
    found = explain(ClusterSnapshot(jobset=JOBSET, workload=waiting, provisioning_requests=[request]))
    assert found.sentence == (
        "DWS cannot provide the nodes: max cluster limit reached, nodepools out of resources: "
        "default-nodepool (cpu, memory)"
    )
    assert found.hint


def test_recorded_admission_check():
    check = {"metadata": {"name": "dws-prov"}, "status": status_of(recording(68))}
    waiting = {"metadata": {"name": "w"}, "status": status_of(recording(56))}
    assert explain(ClusterSnapshot(workload=waiting, admission_checks=[check])).sentence == WORKLOADS[56]
    check["status"]["conditions"][0] |= {"status": "False", "message": "there is no such parameters object"}
    found = explain(ClusterSnapshot(workload=waiting, admission_checks=[check]))
    assert found.sentence == "admission check dws-prov is not active: there is no such parameters object"


RESERVED = {"type": "QuotaReserved", "status": "True"}
ADMITTED = {"metadata": {"name": "w"}, "status": {"conditions": [RESERVED, {"type": "Admitted", "status": "True"}]}}
CHECKING = {
    "metadata": {"name": "w"},
    "status": {"conditions": [RESERVED], "admissionChecks": [{"name": "muster-dws", "state": "Pending"}]},
}


def request(number=1, **conditions):
    rows = [{"type": kind, "status": "True", "message": message} for kind, message in conditions.items()]
    return {"metadata": {"name": f"w-muster-dws-{number}"}, "status": {"conditions": rows}}


@pytest.mark.parametrize(
    ("requests", "state", "sentence"),
    [
        ([request()], "waiting", "requested nodes from DWS (w-muster-dws-1); not accepted yet"),
        ([request(Accepted="")], "waiting", "DWS has accepted the request w-muster-dws-1; waiting for capacity"),
        ([request(Provisioned="yes")], "waiting",
         "DWS has delivered the nodes, which bill; waiting for Kueue to admit the run"),
        ([request(1, Failed="stockout"), request(2, Accepted="")], "waiting",
         "DWS has accepted the request w-muster-dws-2; waiting for capacity"),
        ([request(9, Failed="stockout."), request(10, Failed="no quota.")], "waiting",
         "DWS cannot provide the nodes: no quota"),
        ([request(Provisioned="yes", BookingExpired="")], "waiting",
         "DWS reserved the nodes, but the run did not use them in time: expired"),
        ([request(Provisioned="yes", CapacityRevoked="")], "preempted",
         "DWS revoked the nodes: the allocation has ended"),
    ],
)  # fmt: skip
def test_waiting_for_dws(requests, state, sentence):
    found = explain(ClusterSnapshot(jobset=JOBSET, workload=CHECKING, provisioning_requests=requests))
    assert (found.state, found.sentence) == (state, sentence)


def pod(role="host", index=0, phase="Running", node="gpu-1", **status):
    labels = {"jobset.sigs.k8s.io/replicatedjob-name": role, "jobset.sigs.k8s.io/job-index": str(index)}
    spec = {"nodeName": node} if node else {}
    return {
        "metadata": {"name": f"run-{role}-{index}-0-abcde", "labels": labels, **status.pop("metadata", {})},
        "spec": spec,
        "status": {"phase": phase, **status},
    }


def event(of, reason, message=""):
    return {"involvedObject": {"name": of["metadata"]["name"]}, "reason": reason, "message": message}


def container(reason, message=""):
    return [{"image": "registry/image:1", "state": {"waiting": {"reason": reason, "message": message}}}]


SUPERVISOR = pod("supervisor", node="cpu-1")
GPUS = [pod(index=index, node=f"gpu-{index}") for index in range(16)]
UNPLACED = pod(index=3, phase="Pending", node=None)


def seen(pods, events=(), nodes=(), jobset=STARTED):
    found = explain(ClusterSnapshot(jobset=jobset, workload=ADMITTED, pods=pods, events=events, nodes=nodes))
    return found.state, found.sentence


def test_running():
    assert seen([SUPERVISOR, *GPUS]) == (JobState.RUNNING, "running: 16 hosts and the supervisor")
    restarted = {**STARTED, "status": {"restarts": 2}}
    assert seen([SUPERVISOR, GPUS[0]], jobset=restarted)[1] == (
        "running: 1 host and the supervisor, after 2 restarts of the whole JobSet"
    )


@pytest.mark.parametrize(
    ("events", "what"),
    [
        # A stock-out of Spot machines names quota too: raising it would not help.
        ([("FailedScaleUp", "GCE_STOCKOUT: spot quota")], "no capacity in the zone (GCE_STOCKOUT: spot quota)"),
        ([("FailedScaleUp", "GCE_STOCKOUT in zone")], "no capacity in the zone (GCE_STOCKOUT in zone)"),
        ([("FailedScaleUp", "Quota 'PREEMPTIBLE_NVIDIA_B200_GPUS' exceeded")],
         "Google Cloud quota (Quota 'PREEMPTIBLE_NVIDIA_B200_GPUS' exceeded)"),
        ([("TriggeredScaleUp", "")], "a node is being created"),
        ([("NotTriggerScaleUp", "1 node(s) had untolerated taint")],
         "no node pool matches (1 node(s) had untolerated taint)"),
        ([], "the scheduler"),
    ],
)  # fmt: skip
def test_one_pod_without_a_node(events, what):
    pods = [SUPERVISOR, *GPUS[:3], UNPLACED]
    rows = [event(UNPLACED, *one) for one in events]
    assert seen(pods, rows)[1] == f"waiting for host-3: {what} (4 of 5 running)"


def test_unschedulable():
    condition = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available: 3 Insufficient cpu."}
    unplaced = pod(index=3, phase="Pending", node=None, conditions=[condition])
    found = seen([unplaced])[1]
    assert found == "waiting for host-3: no node fits (0/3 nodes are available: 3 Insufficient cpu)"


@pytest.mark.parametrize(
    ("reason", "what"),
    [
        ("ImagePullBackOff", "image registry/image:1 cannot be pulled (ImagePullBackOff: denied)"),
        ("CreateContainerConfigError", "its container cannot be created (CreateContainerConfigError: denied)"),
    ],
)
def test_one_pod_of_sixteen_on_a_node(reason, what):
    stuck = pod(index=7, phase="Pending", node="gpu-7", containerStatuses=container(reason, "denied"))
    pods = [SUPERVISOR, *GPUS[:7], stuck, *GPUS[8:]]
    assert seen(pods) == (JobState.RUNNING, f"waiting for host-7: {what} (16 of 17 running)")


def test_all_pods_pull_the_image():
    pods = [pod(index=index, phase="Pending", node="gpu-1") for index in range(4)]
    events = [event(one, "Pulling") for one in pods]
    assert seen(pods, events) == (
        JobState.WAITING,
        "waiting for 4 of 4 pods: the image is being pulled on node gpu-1; 1 host node bills meanwhile",
    )


def test_a_volume_that_does_not_mount():
    stuck = pod(phase="Pending", node="gpu-1")
    found = seen([stuck], [event(stuck, "FailedMount", "bucket not found")])
    assert found[1] == "waiting for host-0: a volume on node gpu-1 (bucket not found); 1 host node bills meanwhile"


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ('MountVolume.SetUp failed for volume "data" : rpc error: code = Unauthenticated desc = failed to prepare '
         "storage service: google: could not find default credentials", "normal for some minutes"),
        ("MountVolume.SetUp failed: rpc error: code = PermissionDenied desc = 403", "may not read the bucket"),
        ("MountVolume.SetUp failed: rpc error: code = NotFound desc = failed to get GCS bucket", "no such bucket"),
        ("MountVolume.SetUp failed: rpc error: code = InvalidArgument desc = flag provided but not defined",
         "does not know an option"),
        ("kubernetes.io/csi: mounter.SetUpAt failed: driver name gcsfuse.csi.storage.gke.io not found in the list of "
         "registered CSI drivers", "still starting"),
    ],
)  # fmt: skip
def test_a_mount_that_is_tried_again_says_whether_to_wait(message, hint):
    stuck = pod(phase="Pending", node="gpu-1")
    found = explain(ClusterSnapshot(jobset=STARTED, workload=ADMITTED, pods=[stuck],
                                    events=[event(stuck, "FailedMount", message)]))  # fmt: skip
    assert hint in found.hint and "a volume on node gpu-1 (" in found.sentence


def node(name, ready="True", reason="KubeletReady"):
    conditions = [{"type": "Ready", "status": ready, "reason": reason}]
    return {"metadata": {"name": name}, "status": {"conditions": conditions}}


def test_a_node_that_does_not_answer():
    nodes = [node("cpu-1"), node("gpu-0"), node("gpu-1", "Unknown", "NodeStatusUnknown")]
    assert seen([SUPERVISOR, *GPUS[:2]], nodes=nodes)[1] == (
        "1 of 3 pods lost: host-1 (node gpu-1 is not responding (NodeStatusUnknown)); waiting for replacements"
    )
    assert "node gpu-1 no longer exists" in seen([SUPERVISOR, *GPUS[:2]], nodes=nodes[:2])[1]


def test_preempted_pod_and_its_replacement():
    disrupted = [{"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}]
    old = pod(index=1, phase="Failed", node="gpu-1", conditions=disrupted, metadata={"creationTimestamp": "1"})
    new = pod(index=1, phase="Running", node="gpu-9", metadata={"creationTimestamp": "2"})
    assert "host-1 (TerminationByKubelet on gpu-1)" in seen([SUPERVISOR, GPUS[0], old])[1]
    assert seen([SUPERVISOR, GPUS[0], old, new])[1] == "running: 2 hosts and the supervisor"


def test_a_pod_that_ended_by_itself():
    ended = [{"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}]
    gone = pod(index=1, phase="Failed", containerStatuses=ended)
    assert "host-1 with exit code 137 (OOMKilled)" in seen([SUPERVISOR, GPUS[0], gone])[1]


def test_the_end():
    for kind, state in (("Completed", JobState.SUCCEEDED), ("Failed", JobState.FAILED)):
        status = {
            "conditions": [{"type": kind, "status": "True", "message": "jobset failed due to one or more job failures"}]
        }
        assert explain(ClusterSnapshot(jobset={**JOBSET, "status": status})).state == state
    assert explain(ClusterSnapshot()).state == JobState.ABSENT


def test_deactivated_preempted_and_unseen():
    off = {"metadata": {"name": "w"}, "spec": {"active": False}, "status": {"conditions": [RESERVED]}}
    assert explain(ClusterSnapshot(jobset=JOBSET, workload=off)).state == JobState.STOPPED
    evicted = {
        "type": "Evicted",
        "status": "True",
        "reason": "Preempted",
        "message": "Preempted to accommodate another",
    }
    away = {"metadata": {"name": "w"}, "status": {"conditions": [{**RESERVED, "status": "False"}, evicted]}}
    assert explain(ClusterSnapshot(jobset=JOBSET, workload=away)).sentence.startswith("preempted by another workload")
    assert "create a Workload" in explain(ClusterSnapshot(jobset=JOBSET)).sentence
    events = [{"type": "Warning", "involvedObject": {"name": "run"}, "reason": "ErrWorkloadCompose",
               "message": 'priorityclasses.scheduling.k8s.io "muster-supervisor" not found'}]  # fmt: skip
    said = explain(ClusterSnapshot(jobset=JOBSET, events=events)).sentence
    assert said.endswith(': priorityclasses.scheduling.k8s.io "muster-supervisor" not found')


LARGE = (
    "couldn't assign flavors to pod set host: insufficient quota for nvidia.com/gpu in flavor b200, previously "
    "considered podsets requests (0) + current podset request (24) > maximum capacity (16)"
)
"""As Kueue 0.19.2 writes it (flavorassigner.go)."""


@pytest.mark.parametrize(
    ("reason", "message", "sentence"),
    [
        ("Pending", LARGE, f"Kueue can never admit the run, which is larger than its queue: {LARGE}"),
        ("ExceedsMaxQuota", LARGE, f"Kueue can never admit the run, which is larger than its queue: {LARGE}"),
        ("Pending", "couldn't assign flavors to pod set host: resource example.com/nic unavailable in ClusterQueue",
         "Kueue can never admit the run: its queue has no quota of a kind: couldn't assign flavors to pod set host: "
         "resource example.com/nic unavailable in ClusterQueue"),
        ("NoMatchingFlavor", "couldn't assign flavors to pod set host: flavor b200 doesn't match node affinity",
         "Kueue cannot admit the run to the nodes of its queue: couldn't assign flavors to pod set host: flavor b200 "
         "doesn't match node affinity"),
        ("Pending", "couldn't assign flavors to pod set host: insufficient unused quota for nvidia.com/gpu in flavor "
         "b200, 8 more needed", "waiting for Kueue quota: couldn't assign flavors to pod set host: insufficient unused "
         "quota for nvidia.com/gpu in flavor b200, 8 more needed"),
        ("Inadmissible", "ClusterQueue muster is inactive",
         "waiting for the queue to become active: ClusterQueue muster is inactive"),
        ("Inadmissible", "LocalQueue research doesn't exist",
         "Kueue cannot admit the run: LocalQueue research doesn't exist"),
    ],
)  # fmt: skip
def test_quota_that_will_not_come_by_waiting(reason, message, sentence):
    row = {"type": "QuotaReserved", "status": "False", "reason": reason, "message": message}
    workload = {"metadata": {"name": "w"}, "status": {"conditions": [row]}}
    found = explain(ClusterSnapshot(jobset=JOBSET, workload=workload))
    assert found.sentence == sentence and found.hint


SHORT = "insufficient unused quota for nvidia.com/gpu in flavor muster-l4-spot, 8 more needed"
LARGER = (
    "insufficient quota for nvidia.com/gpu in flavor muster-l4-spot, previously considered podsets requests (0) + "
    "current podset request (8) > maximum capacity (4)"
)
NOT_ON_CPU = (
    "insufficient quota for cpu in flavor muster-cpu, previously considered podsets requests (1) + current podset "
    "request (48) > maximum capacity (32), insufficient quota for memory in flavor muster-cpu, previously considered "
    "podsets requests (2Gi) + current podset request (192G) > maximum capacity (128Gi), insufficient quota for "
    "nvidia.com/gpu in flavor muster-cpu, previously considered podsets requests (0) + current podset request (8) > "
    "maximum capacity (0)"
)
HOST = "couldn't assign flavors to pod set host: "
SUPERVISORS = "couldn't assign flavors to pod set supervisor: "
BEHIND = f"{HOST}{NOT_ON_CPU}, {SHORT}"
"""As a real Kueue 0.19.2 wrote it of a run that started once the one before it was gone (here with other amounts)."""
TAINTED = "untolerated taint {nvidia.com/gpu present NoSchedule <nil>} in flavor muster-l4-spot"
BUSY = "insufficient unused quota for cpu in flavor muster-cpu, 500m more needed"
UNMAPPED = (
    'spec.podSets[1].template.spec.resourceClaims[0].resourceClaimTemplateName: Not found: "DeviceClass '
    'mrdma.google.com is not mapped in DRA configuration for podset host"'
)


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (BEHIND, f"waiting for Kueue quota: {HOST}{SHORT}"),
        # 0.16.9 of the same run
        (f"{HOST}flavor muster-cpu doesn't match node affinity, {SHORT}", f"waiting for Kueue quota: {HOST}{SHORT}"),
        # 32 supervisors run
        (f"{SUPERVISORS}{BUSY}, {TAINTED}; {BEHIND}",
         f"waiting for Kueue quota: {SUPERVISORS}{BUSY}; {HOST}{SHORT}"),
        # larger than any flavour
        (f"{HOST}{NOT_ON_CPU}, {LARGER}",
         f"Kueue can never admit the run, which is larger than its queue: {HOST}{LARGER}"),
        # a queue without a flavour for the supervisor
        (SUPERVISORS + TAINTED, f"Kueue cannot admit the run to the nodes of its queue: {SUPERVISORS}{TAINTED}"),
        (UNMAPPED, f"Kueue never admits the run, which asks for devices by claims: {UNMAPPED}"),
        ("Workload uses DRA resources but the KueueDRAIntegration feature gate is not enabled",
         "Kueue never admits the run, which asks for devices by claims: Workload uses DRA resources but the "
         "KueueDRAIntegration feature gate is not enabled"),
    ],
)  # fmt: skip
def test_flavours_are_judged_one_by_one(message, sentence):
    reason = "Inadmissible" if "DRA" in message else "Pending"
    row = {"type": "QuotaReserved", "status": "False", "reason": reason, "message": message}
    workload = {"metadata": {"name": "w"}, "status": {"conditions": [row]}}
    found = explain(ClusterSnapshot(jobset=JOBSET, workload=workload))
    assert found.sentence == sentence and found.hint
    assert ("featureGates: {KueueDRAIntegration: false, " in found.hint) == ("DRA" in message)
    evicted = {"type": "Evicted", "status": "True", "reason": "Preempted", "message": "for another"}
    workload["status"]["conditions"].append(evicted)
    if "waiting" in sentence:
        said = explain(ClusterSnapshot(jobset=JOBSET, workload=workload)).sentence
        assert sentence.replace("waiting", "it waits", 1) in said


def test_dws_is_asked_again_at_a_time():
    again = {"count": 1, "requeueAt": "2026-01-02T03:04:05Z"}
    waiting = {**CHECKING, "status": {**CHECKING["status"], "requeueState": again}}
    asked = [request(Failed="stockout")]
    found = explain(ClusterSnapshot(jobset=JOBSET, workload=waiting, provisioning_requests=asked))
    assert found.sentence == (
        "DWS cannot provide the nodes: stockout; Kueue tries again at 2026-01-02T03:04:05Z (try 2)"
    )


def test_a_pod_whose_first_container_failed_and_one_that_was_evicted():
    first = [{"name": "place", "state": {"terminated": {"exitCode": 1, "reason": "Error"}}}]
    gone = pod(index=1, phase="Failed", initContainerStatuses=first)
    assert "host-1 with exit code 1 of place (Error)" in seen([SUPERVISOR, GPUS[0], gone])[1]
    evicted_pod = pod(index=1, phase="Failed", reason="Evicted", message="The node was low on resource: memory.")
    assert "host-1 (Evicted: The node was low on resource: memory)" in seen([SUPERVISOR, GPUS[0], evicted_pod])[1]


def test_a_node_that_is_about_to_be_taken():
    taken = node("gpu-1") | {"spec": {"taints": [{"key": "cloud.google.com/impending-node-termination"}]}}
    assert seen([SUPERVISOR, *GPUS[:2]], nodes=[node("cpu-1"), node("gpu-0"), taken])[1] == (
        "running: 2 hosts and the supervisor; node termination announced: host-1 (node gpu-1)"
    )


def _reserved(reason, message, *more):
    rows = [{"type": "QuotaReserved", "status": "False", "reason": reason, "message": message}, *more]
    return {"metadata": {"name": "w"}, "status": {"conditions": rows}}


def test_an_admission_that_was_refused_after_quota_is_no_admission():
    second = {
        "type": "Admitted",
        "status": "False",
        "reason": "SecondPassFailed",
        "message": "insufficient unused quota",
    }
    workload = _reserved("", "", {"type": "QuotaReserved", "status": "True"}, second)
    assert explain(ClusterSnapshot(jobset=JOBSET, workload=workload)).sentence == (
        "waiting for Kueue quota: insufficient unused quota"
    )


@pytest.mark.parametrize(("reason", "message", "start"), [
    ("Pending", 'pod set host: topology "t" allows to fit only 1 out of 2 pod(s)', "waiting for nodes that are close"),
    ("ExceedsMaxQuota", "Workload requests 24, the ClusterQueue can provide at most 16", "Kueue can never admit"),
])  # fmt: skip
def test_no_quota_is_not_always_the_obstacle(reason, message, start):
    found = explain(ClusterSnapshot(jobset=JOBSET, workload=_reserved(reason, message)))
    assert found.sentence.startswith(start) and message in found.sentence


def test_a_container_that_crashes_again_and_again_is_named():
    crashed = {
        "name": "fetch", "restartCount": 6, "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": {"exitCode": 127, "reason": "StartError"}},
    }  # fmt: skip
    found = explain(ClusterSnapshot(jobset=STARTED, pods=[pod(phase="Pending", initContainerStatuses=[crashed])]))
    assert "container fetch crashes again and again (exit code 127, StartError; 6 times)" in found.sentence
