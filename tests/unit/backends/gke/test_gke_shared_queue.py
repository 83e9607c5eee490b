"""A cluster queue is shared by run files of the same machines and mode: no ``up`` takes from it what another needs."""

import copy

import pytest
from fakes.kubernetes import FakeKubernetes
from fakes.project import cloud_with_cluster, session, where

from muster.backends.gke.manifests.kueue_objects import keeping_quota, queue_objects
from muster.backends.gke.provision.cluster_objects import Objects
from muster.core.errors import BackendError

QUEUE = "apis/kueue.x-k8s.io/v1beta2/clusterqueues/muster-b200-flex-start-queued"


def objects(hosts):
    site = where(hosts=hosts)
    return Objects(site=site, key="objects/queue", manifests=tuple(queue_objects(site.placement)))


def on(kubernetes):
    google = cloud_with_cluster()
    google.kubernetes = kubernetes
    return session(google)


def quota(kubernetes, flavor=0):
    (group,) = kubernetes.objects[QUEUE]["spec"]["resourceGroups"]
    return {row["name"]: row["nominalQuota"] for row in group["flavors"][flavor]["resources"]}


def test_a_smaller_run_file_keeps_the_quota_and_a_larger_one_raises_it():
    kubernetes = FakeKubernetes()
    objects(4).make(on(kubernetes))
    before = quota(kubernetes)
    assert before["nvidia.com/gpu"] == 32
    assert objects(1).look(on(kubernetes)).state == "there", "a larger queue is no difference"
    objects(1).make(on(kubernetes))
    assert quota(kubernetes) == before
    assert objects(6).look(on(kubernetes)).state == "absent"
    objects(6).make(on(kubernetes))
    after = quota(kubernetes)
    assert after["nvidia.com/gpu"] == 48 and after["ephemeral-storage"] == "6Ti"
    assert after["memory"] == f"{int(before['memory'][:-1]) // 4 * 6}G"


def test_rows_of_other_hands_stay():
    (queue,) = (row for row in queue_objects(where(hosts=2).placement) if row["kind"] == "ClusterQueue")
    there = copy.deepcopy(queue)
    (group,) = there["spec"]["resourceGroups"]
    group["flavors"][0]["resources"][0]["borrowingLimit"] = "8"
    group["flavors"][0]["resources"][3]["nominalQuota"] = "64"
    group["flavors"].append({"name": "theirs", "resources": copy.deepcopy(group["flavors"][1]["resources"])})
    kept = keeping_quota(queue, there)["spec"]["resourceGroups"][0]["flavors"]
    assert kept[0]["resources"][0]["borrowingLimit"] == "8" and kept[2]["name"] == "theirs"
    assert [row["nominalQuota"] for row in kept[0]["resources"]][3] == "64"
    group["coveredResources"].append("example.com/chip")
    kept = keeping_quota(queue, there)
    assert kept == queue, "flavours of a group of other resources do not fit into ours"
    (local,) = (row for row in queue_objects(where(hosts=2).placement) if row["kind"] == "LocalQueue")
    assert keeping_quota(local, {"spec": {}}) == local


@pytest.mark.parametrize(
    ("held", "wanted", "kept"),
    [
        ("1500m", 1, "1500m"),
        ("2", "1500m", "2"),
        ("1Ti", "900Gi", "1Ti"),
        ("1T", "1Ti", "1Ti"),
        (16, 16, 16),
        ("odd", 3, 3),
    ],
)
def test_quantities_are_compared_by_their_value(held, wanted, kept):
    def queue(value):
        rows = [{"name": "cpu", "nominalQuota": value}]
        group = {"coveredResources": ["cpu", "memory", "ephemeral-storage", "nvidia.com/gpu"],
                 "flavors": [{"name": "a", "resources": rows}]}  # fmt: skip
        return {"kind": "ClusterQueue", "spec": {"resourceGroups": [group]}}

    (group,) = keeping_quota(queue(wanted), queue(held))["spec"]["resourceGroups"]
    assert group["flavors"][0]["resources"][0]["nominalQuota"] == kept


class Contested(FakeKubernetes):
    """Somebody else raises the quota between our look and our change, as often as told."""

    def __init__(self):
        super().__init__()
        self.others = 0

    def handle(self, method, target, body=b""):
        path = target.split("?")[0].strip("/")
        if method == "PATCH" and path == QUEUE and path in self.objects:
            held = self.objects[path]
            if self.others:
                self.others -= 1
                row = held["spec"]["resourceGroups"][0]["flavors"][0]["resources"][3]
                row["nominalQuota"] = int(row["nominalQuota"]) + 8
                held["metadata"]["resourceVersion"] += "0"
            if f'"{held["metadata"]["resourceVersion"]}"' not in body.decode():
                return 409, {"kind": "Status", "reason": "Conflict", "message": "the object has been modified"}
        return super().handle(method, target, body)


def test_two_at_once_both_keep_what_they_need():
    kubernetes = Contested()
    objects(2).make(on(kubernetes))
    kubernetes.others = 2
    objects(3).make(on(kubernetes))
    assert quota(kubernetes)["nvidia.com/gpu"] == 32, "the other's, which is larger by now"
    kubernetes.others = 100
    with pytest.raises(BackendError, match="ClusterQueue muster-b200-flex-start-queued changes all the time"):
        objects(9).make(on(kubernetes))
