"""Several places, quotas, and what is refused before anything is made."""

import json

import pytest
from cases import placement, spec
from fakes.project import INSTALLED, PINS, SITES, TEXTS, cloud, everything, places, session, where

from muster.backends.gke.provision.advice import capacity_advice
from muster.backends.gke.provision.quota import check_quota, quota
from muster.backends.gke.provision.site import site
from muster.backends.gke.provision.up import down, up, up_first
from muster.core.errors import AccessError, CapacityError, ConflictError, UsageError

# ---------------------------------------------------------------- several places


def test_the_first_place_with_room_is_taken_and_nothing_else_stays():
    google = cloud(fail={"b200": ("GCE_STOCKOUT", "none here")})
    where_, _ = up_first(places(), session(google), TEXTS, pins=PINS, workers=1)
    assert where_.zone == "europe-west1-b", "a has no RoCE network, b no machines"
    direct = cloud()
    up_first(places()[2:], session(direct), TEXTS, pins=PINS, workers=1)
    wanted = everything(direct)[0]
    bucket = "storage/v1/b/example-bucket"
    assert google.store.pop(bucket)["location"] == "US-CENTRAL1" and wanted.pop(bucket)
    assert google.store == wanted


def test_no_place_has_room():
    google = cloud(fail={"b200": ("GCE_STOCKOUT", "none here")})
    with pytest.raises(CapacityError, match="none here"):
        up_first(places()[:2], session(google), TEXTS, pins=PINS, workers=1)
    assert not any("b200" in name for name in google.names())


B200 = "preemptible_nvidia_b200_gpus"


def in_(region, **more):
    return (("region", region), *more.items())


def test_a_quota_that_is_too_small_moves_on_before_anything_is_made():
    google = cloud(quotas={B200: {in_("us-central1"): 8, in_("europe-west1"): 24}})
    where_, _ = up_first(places("flex_start_queued")[1:], session(google), TEXTS, pins=PINS, workers=1)
    assert where_.zone == "europe-west1-b" and not any("us-central1" in key for key in google.store)


def test_a_quota_that_is_too_small_everywhere_is_said_with_its_name():
    google = cloud(quotas={B200: {(): 0}})
    error = refused(CapacityError, f"quota {B200} in us-central1: 0; 16 GPUs are needed", google=google)
    assert "console.cloud.google.com/iam-admin/quotas?project=example-project" in error.hint


@pytest.mark.parametrize(
    ("machine", "mode", "name"),
    [
        ("a4-highgpu-8g", "spot", B200),
        ("a4-highgpu-8g", "flex_start", B200),
        ("a4-highgpu-8g", "reservation", None),
        ("g2-standard-48", "on_demand", "nvidia_l4_gpus"),
        ("g2-standard-48", "spot", "preemptible_nvidia_l4_gpus"),
        ("a3-megagpu-8g", "on_demand", "gpus_per_gpu_family"),
        ("a3-megagpu-8g", "spot", "preemptible_nvidia_h100_mega_gpus"),
    ],
)
def test_each_way_of_buying_has_its_own_quota(machine, mode, name):
    found = quota(where(machine, mode), session(cloud()))
    assert (found and found.name) == name
    assert found is None or (found.limit is None and "not known (refused: NOT_FOUND)" in found.sentence())


def test_the_closest_bucket_counts():
    rows = {(): 1, in_("us-central1"): 2, in_("us-central1", gpu_family="NVIDIA_H100_MEGA"): 99,
            in_("us-central1", gpu_family="NVIDIA_H200"): 3, in_("europe-west1"): 4}  # fmt: skip
    google = cloud(quotas={"gpus_per_gpu_family": rows})
    assert quota(where("a3-megagpu-8g", "on_demand"), session(google)).limit == 99
    endless = cloud(quotas={"gpus_per_gpu_family": {(): -1}})
    assert not check_quota(where("a3-megagpu-8g", "on_demand"), session(endless)).short


def test_capacity_advice():
    google = cloud(enabled={"compute.googleapis.com"})
    (found,) = capacity_advice(places("spot")[:1], session(google))
    assert found.sentence() == "us-central1-a spot: obtainability 0.9 (most machines live 3600s)"
    (unasked,) = capacity_advice(places()[:1], session(google))
    assert unasked.obtainability is None and len(google.log) == 1
    google.refuse[2] = (403, "accessNotConfigured")
    (refused_,) = capacity_advice(places("spot")[:1], session(google))
    assert "no score (refused: accessNotConfigured)" in refused_.sentence()


# ---------------------------------------------------------------- refused before anything is made


def refused(error, match, google=None, of=None, **faults):
    google = google or cloud(**faults)
    before = list(google.creations)
    with pytest.raises(error, match=match) as caught:
        up(of or SITES["a4"], session(google), INSTALLED, workers=1)
    assert google.creations == before and caught.value.hint
    return caught.value


def test_no_billing():
    refused(AccessError, "has no billing account", billing=False)


def test_missing_permissions_are_named_with_their_roles():
    error = refused(
        AccessError, "2 permissions are missing", denied={"compute.firewalls.create", "container.clusters.create"}
    )
    assert "container.clusters.create (in roles/container.admin)" in str(error)
    assert "roles/compute.securityAdmin" in error.hint


def test_a_zone_without_the_network_says_where_it_is():
    error = refused(CapacityError, "us-central1-a has no vpc-roce network", of=where(locations=["us-central1-a"]))
    assert "europe-west1-b, us-central1-b" in error.hint


def test_a_bucket_of_somebody_elses():
    refused(ConflictError, "example-bucket is somebody else's", foreign_buckets={"example-bucket"})


def foreign_cluster():
    google = cloud()
    up(where("g2-standard-48", "on_demand"), session(google), INSTALLED, workers=1)
    cluster = google.store["v1/projects/example-project/locations/us-central1/clusters/muster"]
    cluster.pop("resourceLabels")
    return google


def test_a_cluster_that_somebody_else_made_is_never_touched():
    google = foreign_cluster()
    before = json.dumps(google.store, sort_keys=True)
    refused(ConflictError, "clusters/muster exists and was not made by muster", google=google)
    assert json.dumps(google.store, sort_keys=True) == before


def test_an_adopted_cluster_is_used_and_stays():
    google = foreign_cluster()
    up(where(adopt=True), session(google), INSTALLED, workers=1)
    assert f"nodePools/{where().pool}" in google.names()
    down(where(), session(google), workers=1)
    assert "clusters/muster" in google.names() and f"nodePools/{where().pool}" not in google.names()
    left = {one["kind"] for one in google.kubernetes.objects.values()}
    assert left == {"ConfigMap", "ResourceFlavor", "ClusterQueue", "LocalQueue"}, "the other machine's queue, and Kueue"


def test_a_pool_of_ours_that_differs():
    google = cloud()
    up(SITES["a4"], session(google), INSTALLED, workers=1)
    pool = next(one for key, one in google.store.items() if key.endswith(SITES["a4"].pool))
    pool["config"]["machineType"] = "a3-ultragpu-8g"
    refused(ConflictError, "machineType should be 'a4-highgpu-8g', is 'a3-ultragpu-8g'", google=google)


@pytest.mark.parametrize("project", [None, "Not A Project", "x", "-" * 8])
def test_hostile_projects(project):
    with pytest.raises(UsageError):
        site(placement(spec("a4-highgpu-8g", "spot", project=project)))


def test_a_region_is_no_zone():
    with pytest.raises(UsageError, match="needs a zone"):
        site(placement(spec("a4-highgpu-8g", "spot", project="example-project", locations=["us-central1"])))
