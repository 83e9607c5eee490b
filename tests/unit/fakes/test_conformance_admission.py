"""The played admission webhooks refuse what the real ones refuse, and nothing else that a run sends."""

import copy
from pathlib import Path

import pytest
from fakes.admission import defaulted, refusals
from fakes.kueue_config import gates_of, kueue_config_refusals, ready_limits
from ruamel.yaml import YAML

from muster.backends.gke.pod.continuation import continuation

GOLDEN = Path(__file__).parents[2] / "golden" / "gke"
CONFIGURATION = {"apiVersion": "config.kueue.x-k8s.io/v1beta2", "kind": "Configuration"}


def role(name, replicas=1):
    pod = {"restartPolicy": "Never", "containers": [{"name": name, "image": "i"}]}
    failures = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"containerName": name, "operator": "In", "values": [1, 130]}},
    ]
    job = {"parallelism": 1, "completions": 1, "completionMode": "Indexed", "backoffLimit": 100,
           "podReplacementPolicy": "Failed", "podFailurePolicy": {"rules": failures},
           "template": {"metadata": {"labels": {"a": "b"}}, "spec": pod}}  # fmt: skip
    return {"name": name, "replicas": replicas, "template": {"spec": job}}


def jobset(name="llama-20260822-101500-1a2b"):
    rules = [{"name": "supervisorDecided", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"],
              "targetReplicatedJobs": ["supervisor"]}]  # fmt: skip
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet",
        "metadata": {"name": name, "namespace": "default", "labels": {"kueue.x-k8s.io/queue-name": "research"}},
        "spec": {"suspend": True, "successPolicy": {"operator": "All", "targetReplicatedJobs": ["supervisor"]},
                 "failurePolicy": {"maxRestarts": 0, "rules": rules},
                 "replicatedJobs": [role("supervisor"), role("host", 3)]},
    }  # fmt: skip


def changed(of, path, value):
    """A copy with one field set, or taken away where the value is None; a number in the path is a place in a list, and
    ``~`` a slash."""
    found = copy.deepcopy(of)
    *folders, last = (int(one) if one.isdecimal() else one.replace("~", "/") for one in path.split("/"))
    at = found
    for one in folders:
        at = at[one] if isinstance(one, int) else at.setdefault(one, {})
    if value is None:
        del at[last]
    else:
        at[last] = value
    return found


HOST = "spec/replicatedJobs/1/template/spec"
RULE = "spec/failurePolicy/rules/0"
TAS = f"{HOST}/template/metadata/annotations/kueue.x-k8s.io~podset-"


@pytest.mark.parametrize(
    "path, value, why",
    [
        (f"{RULE}/action", "RestartJob", "feature gate RestartJob is off"),
        (f"{RULE}/action", "RestartJobAndIgnoreMaxRestarts", "feature gate RestartJob is off"),
        ("spec/coordinator", {"replicatedJob": "supervisor"}, "at most 63 characters"),
        ("spec/coordinator", {"replicatedJob": "nobody"}, "is no replicated job"),
        ("metadata/name", "llama-" * 9 + "ab", "generated job name"),
        ("metadata/name", "2026", "a letter first"),
        ("spec/network/subdomain", "a.b", "subdomain"),
        ("spec/replicatedJobs/1/groupName", "Upper", "group name"),
        ("spec/replicatedJobs/0/dependsOn", [{"name": "host", "status": "Ready"}], "not for the first"),
        ("spec/replicatedJobs/1/dependsOn", [{"name": "later", "status": "Ready"}], "does not come before"),
        ("spec/successPolicy/targetReplicatedJobs", ["chief"], "is no replicated job"),
        (f"{RULE}/targetReplicatedJobs", ["chief"], "is no replicated job"),
        (f"{RULE}/onJobFailureReasons", ["OutOfLuck"], "no reason for which a Job fails"),
        (f"{RULE}/name", "has-a-hyphen", "no name for a rule"),
        ("spec/failurePolicy/restartStrategy", "InPlaceRestart", "feature gate InPlaceRestart"),
        ("metadata/labels/kueue.x-k8s.io~queue-name", "a_b", "cannot be an object's name"),
        ("metadata/labels/kueue.x-k8s.io~max-exec-time-seconds", "0", "no number above 0"),
        ("metadata/labels/long", "x" * 64, "at most 63 letters"),
        ("metadata/annotations/kueue.x-k8s.io~elastic-job", "true", "not supported for JobSet"),
        (f"{TAS}required-topology", "not a label", "no label of a node"),
        (f"{TAS}unconstrained-topology", "perhaps", "want true or false"),
        (f"{TAS}slice-size", "2", "come together"),
        (f"{TAS}group-name", "both", "a required or preferred topology"),
        (f"{HOST}/podReplacementPolicy", "TerminatingOrFailed", "Failed is the only one"),
        (f"{HOST}/template/spec/restartPolicy", None, "restartPolicy must be Never"),
        (f"{HOST}/podFailurePolicy/rules/1/onExitCodes/values", [0], "exit code 0 is no failure"),
        (f"{HOST}/podFailurePolicy/rules/1/onExitCodes/values", [130, 1], "in order"),
        (f"{HOST}/podFailurePolicy/rules/1/onExitCodes/containerName", "trainer", "no container 'trainer'"),
        (f"{HOST}/template/spec/containers/0/volumeMounts", [{"name": "v", "mountPath": "/v"}], "is no volume"),
    ],
)
def test_row_01_what_the_webhooks_refuse(path, value, why):
    assert refusals(jobset()) == []
    found = refusals(changed(jobset(), path, value))
    assert len(found) >= 1 and why in found[0], found


def test_row_01_two_rules_of_one_name_and_two_topologies():
    twice = jobset()
    twice["spec"]["failurePolicy"]["rules"] *= 2
    assert "two rules have the name" in refusals(twice)[0]
    both = jobset()
    both["spec"]["replicatedJobs"][1]["template"]["spec"]["template"]["metadata"]["annotations"] = {
        "kueue.x-k8s.io/podset-required-topology": "a", "kueue.x-k8s.io/podset-preferred-topology": "a"}  # fmt: skip
    assert "more than one topology" in refusals(both)[0]


@pytest.mark.parametrize("length, fits", [(23, True), (24, False), (42, False)])
def test_row_01_a_coordinator_leaves_names_of_23_characters(length, fits):
    """Its label holds the name twice and 16 characters."""
    asked = changed(jobset("n" * length), "spec/coordinator", {"replicatedJob": "supervisor"})
    assert (refusals(asked) == []) is fits
    assert refusals(jobset("n" * length)) == []


def test_row_01_with_its_gate_on_a_job_may_be_restarted():
    asked = changed(jobset(), f"{RULE}/action", "RestartJob")
    assert refusals(asked, gates={"RestartJob": True}) == []
    many = changed(asked, "spec/replicatedJobs/1/replicas", 1025)
    assert "more than 1024 replicas" in refusals(many, gates={"RestartJob": True})[0]


def test_row_01_what_the_mutating_webhooks_add():
    sent = jobset()
    del sent["spec"]["suspend"], sent["spec"]["successPolicy"], sent["spec"]["failurePolicy"]["rules"][0]["name"]
    found = defaulted(sent)["spec"]
    assert found["suspend"] is True, "Kueue suspends what names a queue"
    assert found["successPolicy"] == {"operator": "All"} and found["startupPolicy"] == {
        "startupPolicyOrder": "AnyOrder"
    }
    assert found["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    assert found["failurePolicy"]["rules"][0]["name"] == "failurePolicyRule0"
    assert {one["groupName"] for one in found["replicatedJobs"]} == {"default"}
    del sent["metadata"]["labels"]
    assert "suspend" not in defaulted(sent)["spec"]


def test_row_01_what_may_change_and_when():
    """Kueue injects selectors and gates while either side is suspended; nothing else ever changes."""
    injected = changed(jobset(), f"{HOST}/template/spec/nodeSelector", {"pool": "a"})
    injected = changed(injected, f"{HOST}/template/spec/schedulingGates", [{"name": "kueue.x-k8s.io/topology"}])
    running, hosts = changed(injected, "spec/suspend", False), changed(jobset(), "spec/replicatedJobs/1/replicas", 4)
    assert refusals(running, old=jobset()) == [] and refusals(jobset(), old=running) == []
    again = changed(running, f"{HOST}/template/spec/nodeSelector", {"pool": "b"})
    assert refusals(again, old=running) == ["spec.replicatedJobs: immutable"]
    assert refusals(hosts, old=jobset()) == ["spec.replicatedJobs: immutable"]
    policy = changed(jobset(), "spec/failurePolicy/maxRestarts", 3)
    assert refusals(policy, old=jobset()) == ["spec.failurePolicy: immutable"]
    assert refusals(changed(jobset(), "spec/ttlSecondsAfterFinished", 5), old=jobset()) == []
    moved = copy.deepcopy(running)
    moved["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "other"
    assert "immutable while it is not suspended" in refusals(moved, old=running)[0]
    assert refusals(changed(moved, "spec/suspend", True), old=jobset()) == []


def test_row_01_a_cluster_queue_names_its_resources_in_order_and_its_own_flavors():
    flavor = {
        "name": "gpu",
        "resources": [{"name": "cpu", "nominalQuota": 1}, {"name": "memory", "nominalQuota": "1Gi"}],
    }
    spec = {"resourceGroups": [{"coveredResources": ["cpu", "memory"], "flavors": [flavor]}],
            "admissionChecksStrategy": {"admissionChecks": [{"name": "dws", "onFlavors": ["gpu"]}]}}  # fmt: skip
    queue = {"kind": "ClusterQueue", "metadata": {"name": "q"}, "spec": spec}
    assert refusals(queue) == []
    assert refusals(changed(queue, "spec/resourceGroups/0/coveredResources", ["memory", "cpu"]))
    assert refusals(changed(queue, "spec/admissionChecksStrategy/admissionChecks/0/onFlavors", ["tpu"]))
    assert refusals(changed(queue, "spec/resourceGroups/0/flavors", [flavor, flavor]))


@pytest.mark.parametrize(
    "change, why",
    [
        ({"featureGates": {"TASFailedNodeReplacement": False}}, "requires TASFailedNodeReplacement"),
        ({"featureGates": {"NoSuchGate": True}}, "there is no such gate"),
        ({"featureGates": {"ObjectRetentionPolicies": False}}, "is locked to true"),
        ({"waitForPodsReady": {"enable": False}}, "enable: unknown field"),
        ({"waitForPodsReady": {"timeout": "-1m"}}, "no duration"),
        ({"waitForPodsReady": {"timeout": "forever"}}, "no duration"),
        ({"kind": "Config"}, "kind"),
        ({"managedJobs": True}, "unknown field"),
    ],
)
def test_row_01_a_configuration_with_which_kueue_does_not_start(change, why):
    assert kueue_config_refusals(CONFIGURATION) == []
    assert any(why in one for one in kueue_config_refusals({**CONFIGURATION, **change}))


def test_row_01_all_that_is_needed_to_switch_node_replacement_off():
    """One gate alone is refused: those that build on it have to be off too."""
    off = dict.fromkeys(("TASFailedNodeReplacement", "TASFailedNodeReplacementFailFast",
                         "TASReplaceNodeOnPodTermination", "TASReplaceNodeOnNodeTaints"), False)  # fmt: skip
    assert kueue_config_refusals({**CONFIGURATION, "featureGates": {**off, "FailureRecoveryPolicy": True}}) == []
    assert gates_of(CONFIGURATION)["TASFailedNodeReplacementFailFast"]
    assert not gates_of(CONFIGURATION)["FailureRecoveryPolicy"]


@pytest.mark.parametrize(
    "block, start_s, recovery_s",
    [
        (None, 1800, 1800),
        ({"timeout": "0s"}, 1800, 1800),
        ({"timeout": "5m"}, 300, 300),
        ({"timeout": "168h", "recoveryTimeout": "0s"}, 604800, 0),
    ],
)
def test_row_14_kueue_waits_for_ready_pods_unless_told_otherwise(block, start_s, recovery_s):
    found = ready_limits({**CONFIGURATION, "waitForPodsReady": block})
    assert (found.start_s, found.recovery_s) == (start_s, recovery_s)
    off = ready_limits({**CONFIGURATION, "featureGates": {"DisableWaitForPodsReady": True}})
    assert (off.start_s, off.recovery_s) == (0, 0)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_row_01_every_golden_is_taken(path):
    """And so is the rest of the run in the next allocation, as it is made from what Kueue had admitted."""
    for document in filter(None, YAML(typ="safe", pure=True).load_all(path.read_text())):
        assert refusals(document) == []
        if document["kind"] == "JobSet":
            later = document
            for _ in range(3):
                later = continuation(defaulted(later))
                assert refusals(later) == []


def test_row_01_the_goldens_are_there():
    assert len(list(GOLDEN.glob("*/run.yaml"))) > 25
