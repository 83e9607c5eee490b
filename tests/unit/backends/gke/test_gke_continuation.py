"""The rest of a run in a new allocation: what is queued, and that it is queued once."""

import json

import pytest
from cases import placement, spec
from fakes.admission import defaulted, refusals
from fakes.kubernetes import FakeKubernetes, in_memory

from muster.backends.gke.manifests.jobset import jobset
from muster.backends.gke.manifests.placement import LONGEST_JOBSET_NAME, longest_run_s, mode_of
from muster.backends.gke.manifests.pods import host_template, supervisor_template
from muster.backends.gke.pod.continuation import continuation, newest, number_of, queue_continuation
from muster.core.errors import BackendError, CapacityError

WHERE = placement(spec("a4-highgpu-8g", "flex_start_queued"))

OWNER = {"apiVersion": "v1", "kind": "Secret", "name": "llama-token", "uid": "s"}


def admitted(where=WHERE):
    """The JobSet as the server holds it after Kueue has let it run: what 0.19.2 injects, flavour by flavour."""
    found = defaulted(jobset(where, mode_of(where)))
    found["metadata"] |= {"uid": "u", "resourceVersion": "7", "managedFields": [{}], "creationTimestamp": "x"}
    found["metadata"] |= {"finalizers": ["foregroundDeletion"], "deletionTimestamp": "x"}
    found["spec"]["suspend"] = False
    found["status"] = {"conditions": [{"type": "Completed", "status": "True"}]}
    for role in found["spec"]["replicatedJobs"]:
        pod = role["template"]["spec"]["template"]
        notes = pod["metadata"].setdefault("annotations", {})
        notes |= {
            "kueue.x-k8s.io/workload": "jobset-llama-1a2b3",
            "autoscaling.x-k8s.io/consume-provisioning-request": "old",
            "autoscaling.x-k8s.io/provisioning-class-name": "queued-provisioning.gke.io",
        }
        notes["kueue.x-k8s.io/podset-unconstrained-topology"] = "true"
        queues = {f"kueue.x-k8s.io/{kind}-queue-name": "old" for kind in ("local", "cluster")}
        pod["metadata"]["labels"] |= {"kueue.x-k8s.io/podset": role["name"], **queues}
        flavour = mode_of(where).node_selector if role["name"] == "host" else {}
        pod["spec"]["nodeSelector"] = {**pod["spec"]["nodeSelector"], **flavour}
        pod["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/topology"}, {"name": "mine"}]
    return found


@pytest.fixture
def cluster():
    kubernetes = FakeKubernetes()
    path = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets/{WHERE.name}"
    kubernetes.handle("PUT", path, json.dumps(admitted()).encode())
    found = in_memory(kubernetes)
    return found, kubernetes


@pytest.mark.parametrize("mode", ["flex_start_queued", "reservation", "spot"])
def test_it_is_what_was_submitted_under_the_next_name(definitions, mode):
    where = placement(spec("a4-highgpu-8g", mode))
    first, there = jobset(where, mode_of(where)), admitted(where)
    there["metadata"]["ownerReferences"] = [OWNER]
    found = continuation(there)
    assert found["spec"]["suspend"] is True and "status" not in found
    assert found["metadata"].pop("ownerReferences") == [OWNER], "one that comes after `down` goes with the run's Secret"
    assert set(found["metadata"]) == set(first["metadata"]) and refusals(found) == []
    assert found["metadata"]["labels"] == first["metadata"]["labels"]
    assert found["metadata"]["name"] != where.name and len(found["metadata"]["name"]) <= LONGEST_JOBSET_NAME
    for role, before in zip(found["spec"]["replicatedJobs"], first["spec"]["replicatedJobs"], strict=True):
        template, old = role["template"]["spec"]["template"], before["template"]["spec"]["template"]
        assert template["spec"].pop("schedulingGates") == [{"name": "mine"}]
        asked = old["metadata"].get("annotations", {})
        assert template == {**old, "metadata": {**old["metadata"], "annotations": asked}}
    assert definitions.errors(found) == []


def test_it_counts(cluster):
    third = continuation(continuation(admitted()))
    assert number_of(third) == 3 and newest([admitted(), third, continuation(admitted())]) is third
    assert newest([]) is None


def test_queued_once_however_often(cluster):
    there, kubernetes = cluster
    names = {queue_continuation(there, "default", WHERE.name) for _ in range(3)}
    assert len(names) == 1 and len(kubernetes.of_kind("JobSet")) == 2


def test_as_often_as_the_limit_allows(cluster):
    there, _ = cluster
    name = queue_continuation(there, "default", WHERE.name, at_most=2).split("/")[1]
    with pytest.raises(CapacityError, match="2 allocations"):
        queue_continuation(there, "default", name, at_most=2)


def test_a_run_that_somebody_ended_is_not_continued(cluster):
    there, kubernetes = cluster
    kubernetes.objects.clear()
    with pytest.raises(BackendError, match="is gone"):
        queue_continuation(there, "default", WHERE.name)


@pytest.mark.parametrize(
    ("mode", "hours", "leave", "most"),
    [
        ("flex_start_queued", None, 604_800 - 1800, 0),
        ("flex_start_queued", 500, 604_800 - 1800, 3),
        ("flex_start_queued", 0.5, 1800 + 1200, 1),
        ("flex_start_queued", 10, 36_000 + 1200, 1),
        ("flex_start_queued", 167.5, 604_800 - 1800, 2),
        ("flex_start_queued", 168, 604_800 - 1800, 2),
        ("flex_start", 0.5, 604_800 - 1800, 0),
        ("flex_start", 500, 604_800 - 1800, 0),
        ("spot", 10, 0, 1),
        ("reservation", None, 0, 0),
    ],
)
def test_the_supervisor_leaves_before_its_allocation_does(mode, hours, leave, most):
    """A run trains for its own hours, also where its image takes 20 minutes: what it takes to start and to save is
    asked beyond them, up to seven days. Nodes of plain flex-start live so long in any case, and are waited for."""
    where = placement(spec("a4-highgpu-8g", mode, limits={"max_hours": hours}))
    (container,) = supervisor_template(where)["spec"]["containers"]
    words = container["command"]
    asked = longest_run_s(where.spec) if mode == "flex_start_queued" else 604_800
    assert not leave or leave < asked <= 604_800
    assert words[words.index("--leave-after-s") + 1] == str(leave) and words[words.index("--at-most") + 1] == str(most)


def test_the_supervisor_that_stands_by_never_waits_for_a_node_of_its_own():
    """It would wait for ever on a pool of one node, and Kueue ends a run that has a pod waiting; hosts without GPUs,
    which nothing else keeps apart, do have a node each."""
    where = placement(spec(None, None, device="cpu", hosts=3))
    roles = supervisor_template(where), host_template(where, mode_of(where))
    ours, hosts = (role["spec"]["affinity"]["podAntiAffinity"] for role in roles)
    (apart,) = ours["preferredDuringSchedulingIgnoredDuringExecution"]
    assert len(ours) == 1 and apart["weight"] == 100
    labels = apart["podAffinityTerm"]["labelSelector"]["matchLabels"]
    assert labels["jobset.sigs.k8s.io/replicatedjob-name"] == "supervisor"
    assert list(hosts) == ["requiredDuringSchedulingIgnoredDuringExecution"]
