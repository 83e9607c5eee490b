"""The API server in memory is no kinder than a real one: conflicts, busy answers, finalizers, what never changes."""

import json

import pytest
from fakes.kubernetes import FakeKubernetes, in_memory

from muster.core.errors import BackendError, MusterError

QUEUES = "/apis/kueue.x-k8s.io/v1beta2/clusterqueues"
MAPS = "/api/v1/namespaces/default/configmaps"
PODS = "/api/v1/namespaces/default/pods"


@pytest.fixture
def server():
    return FakeKubernetes()


def ask(server, method, path, body=None):
    return server.handle(method, path, json.dumps(body).encode() if body is not None else b"")


def config_map(**data):
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "namespace": "default"}, "data": data}


def queue():
    return {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ClusterQueue", "metadata": {"name": "q"}, "spec": {}}


def test_row_22_a_write_that_names_an_older_version_is_a_conflict(server):
    _, made = ask(server, "POST", MAPS, config_map(x="1"))
    assert ask(server, "PUT", f"{MAPS}/a", {**made, "data": {"x": "2"}})[0] == 200
    status, said = ask(server, "PUT", f"{MAPS}/a", {**made, "data": {"x": "3"}})
    assert status == 409 and said["reason"] == "Conflict" and server.of_kind("ConfigMap")[0]["data"] == {"x": "2"}


def test_row_22_a_busy_server_is_asked_again(server):
    server.faults = [429, 503, 500]
    in_memory(server).apply(config_map(x="1"))
    assert len(server.of_kind("ConfigMap")) == 1 and not server.faults
    server.faults = [503] * 20
    with pytest.raises(BackendError):
        in_memory(server).apply(config_map(x="2"))


def test_row_22_webhooks_that_do_not_answer_yet_are_waited_for(server):
    server.unready["ClusterQueue"] = 2
    assert ask(server, "POST", QUEUES, queue())[0] == 500
    in_memory(server).apply(queue())
    assert len(server.of_kind("ClusterQueue")) == 1


def test_row_22_what_never_changes(server):
    ask(server, "POST", MAPS, {**config_map(x="1"), "immutable": True})
    with pytest.raises(MusterError, match="immutable"):
        in_memory(server).apply(config_map(x="2"))
    local = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue", "spec": {"clusterQueue": "q"},
             "metadata": {"name": "l", "namespace": "default"}}  # fmt: skip
    in_memory(server).apply(local)
    with pytest.raises(MusterError, match="immutable"):
        in_memory(server).apply({**local, "spec": {"clusterQueue": "other"}})


def test_row_22_a_finalizer_keeps_what_was_deleted(server):
    """Kueue takes its own off a little later; without Kueue nobody does."""
    cluster = in_memory(server)
    cluster.apply(queue())
    cluster.delete(queue())
    assert cluster.get(queue())["metadata"]["deletionTimestamp"]
    for _ in range(server.lingers + 1):
        found = cluster.get(queue())
    assert found is None
    server.stuck = {"ClusterQueue"}
    cluster.apply(queue())
    cluster.delete(queue())
    for _ in range(50):
        assert cluster.get(queue()) is not None


def test_row_22_deleted_in_the_foreground_an_owner_goes_last(server):
    _, made = ask(server, "POST", MAPS, config_map())
    pod = {"apiVersion": "v1", "kind": "Pod", "spec": {"nodeName": "n"}, "metadata": {
        "name": "p", "namespace": "default", "ownerReferences": [{"uid": made["metadata"]["uid"]}]}}  # fmt: skip
    ask(server, "POST", PODS, pod)
    ask(server, "DELETE", f"{MAPS}/a", {"propagationPolicy": "Foreground"})
    for _ in range(5):
        status, found = ask(server, "GET", f"{MAPS}/a")
        assert status == 200 and found["metadata"]["deletionTimestamp"]
    assert ask(server, "GET", f"{PODS}/p")[1]["metadata"]["deletionTimestamp"], "a pod that runs is asked to end"
    ask(server, "DELETE", f"{PODS}/p", {"gracePeriodSeconds": 0})
    ask(server, "GET", f"{PODS}/p")
    assert ask(server, "GET", f"{MAPS}/a")[0] == 404


def test_row_22_a_dry_run_meets_the_webhooks(server):
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet",
        "metadata": {"name": "n" * 60, "namespace": "default"},
        "spec": {"replicatedJobs": [{"name": "host", "replicas": 1, "template": {"spec": {"template": {"spec": {
            "restartPolicy": "Never", "containers": [{"name": "host"}]}}}}}]},
    }  # fmt: skip
    with pytest.raises(MusterError, match="at most 63"):
        in_memory(server).apply(jobset, dry_run=True)
    jobset["metadata"]["name"] = "short"
    in_memory(server).apply(jobset, dry_run=True)
    assert not server.objects
