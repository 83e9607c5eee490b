"""Several places, quotas, and what is refused before anything is made."""

import json
from contextlib import nullcontext

import pytest
from cases import placement, spec
from fakes.project import (
    INSTALLED,
    PINS,
    SITES,
    TEXTS,
    asks_for_pool,
    cloud,
    everything,
    killed,
    places,
    session,
    where,
)

from muster.backends.gke.provision.inventory.resource_names import site
from muster.backends.gke.provision.quota import capacity_advice, check_quotas, quotas
from muster.backends.gke.provision.up import down, up, up_first
from muster.core.errors import AccessError, BackendError, CapacityError, ConflictError, UsageError

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


def in_region(google, region):
    """What exists in a region, buckets aside (they stay where they were made)."""
    return {key for key in google.store if f"/{region}/" in key}


def test_machines_that_do_not_come_move_on_to_the_next_place():
    google = cloud(slow={"b200": 10**9})
    speaking = session(google)
    where_, _ = up_first(places()[1:], speaking, TEXTS, pins=PINS, workers=1)
    assert where_.zone == "europe-west1-b" and not in_region(google, "us-central1")
    assert 1800 < speaking.clock.now_s < 3600, "half an hour, and what it takes to clear the place"
    cancelled = [url for _, url in google.log if url.endswith(":cancel")]
    assert len(cancelled) == 1 and "/locations/us-central1/operations/" in cancelled[0]


def cut_off_while_machines_do_not_come():
    """A cloud without B200s; somebody asked for a pool of them, and died."""
    google, counted = cloud(slow={"b200": 10**9}), cloud()
    up(places()[1], session(counted), INSTALLED, workers=1)
    with killed(google, asks_for_pool(counted)):
        up(places()[1], session(google), INSTALLED, workers=1)
    return google


def test_a_pool_that_somebody_waits_for_since_an_interruption_is_taken_back_too():
    google = cut_off_while_machines_do_not_come()
    with pytest.raises(CapacityError, match="no machines within 30 minutes"):
        up(places()[1], session(google), INSTALLED, workers=1)
    assert not any("b200" in name for name in google.names())


def test_down_does_not_wait_for_machines_that_do_not_come():
    google = cut_off_while_machines_do_not_come()
    leaving = session(google)
    assert down([places()[1]], leaving, workers=1).clean and google.store == {} and leaving.clock.now_s < 120


def test_an_operation_that_cannot_be_cancelled_is_not_doubled_elsewhere():
    google = cloud(slow={"b200": 10**9})
    counted = cloud(slow={"b200": 10**9})
    up_first(places()[1:], session(counted), TEXTS, pins=PINS, workers=1)
    cancel = next(number for number, (_, url) in enumerate(counted.log, 1) if url.endswith(":cancel"))
    google.refuse[cancel] = (400, "badRequest")
    with pytest.raises(BackendError, match="cannot be cancelled: refused: badRequest"):
        up_first(places()[1:], session(google), TEXTS, pins=PINS, workers=1)
    assert not in_region(google, "europe-west1")


def test_a_pool_without_room_leaves_the_cluster_that_another_run_file_uses():
    google = cloud()
    other = [site(placement(spec("g2-standard-48", "on_demand", project="example-project")), zone="us-central1-b")]
    up(other[0], session(google), INSTALLED, workers=1)
    before = set(google.store)
    google.fail["b200"] = ("ZONE_RESOURCE_POOL_EXHAUSTED", "The zone does not have enough resources available.")
    where_, _ = up_first(places()[1:], session(google), TEXTS, pins=PINS, workers=1)
    assert where_.zone == "europe-west1-b" and "clusters/muster" in google.names()
    assert before <= set(google.store), "what the other run file made is all there"
    assert not any("b200" in key or "rdma" in key for key in in_region(google, "us-central1"))
    gone = {path.rpartition("v1beta2/")[2] for method, path in google.kubernetes.log if method == "DELETE"}
    name = where_.placement.queue_objects
    queues = {f"resourceflavors/{name}", f"clusterqueues/{name}", f"namespaces/default/localqueues/{name}"}
    assert gone <= queues, "the other run file's queue is not touched"


def test_nodes_that_are_there_are_not_lost_to_a_smaller_quota():
    google = cloud()
    up_first(places("flex_start_queued")[1:], session(google), TEXTS, pins=PINS, workers=1)
    before = set(google.store)
    google.quotas[B200] = {(): 0}
    where_, _ = up_first(places("flex_start_queued")[1:], session(google), TEXTS, pins=PINS, workers=1)
    assert where_.zone == "us-central1-b" and set(google.store) == before


def moved(killed_after=None):
    """A cloud in which the first place has no machines and the next one has; moving on may be cut short."""
    google = cloud(fail={"b200": ("GCE_STOCKOUT", "none here")})
    with killed(google, killed_after) if killed_after else nullcontext():
        up_first(places()[1:], session(google), TEXTS, pins=PINS, workers=1)
    return google


def test_killed_while_it_moves_on_and_run_again_is_at_one_place_alone():
    wanted = {}
    for where_ in places()[1:]:
        google = cloud()
        up_first([where_], session(google), TEXTS, pins=PINS, workers=1)
        wanted[where_.zone] = set(google.store)
    for number in range(1, len(moved().log) + 1, 5):
        google = moved(killed_after=number)
        where_, _ = up_first(places()[1:], session(google), TEXTS, pins=PINS, workers=1)
        assert set(google.store) == wanted[where_.zone], f"killed after request {number}"


def test_down_of_every_place_after_any_partial_move_leaves_nothing():
    for number in range(3, len(moved().log) + 1, 9):
        google = moved(killed_after=number)
        found = down(places(), session(google), workers=1)
        assert (google.store, found.troubles, found.leftovers) == ({}, (), ()), f"killed after request {number}"


B200 = "preemptible_nvidia_b200_gpus"


def in_(region, **more):
    return (("region", region), *more.items())


def test_a_quota_that_is_too_small_moves_on_before_anything_is_made():
    google = cloud(quotas={B200: {in_("us-central1"): 8, in_("europe-west1"): 24}})
    where_, _ = up_first(places("flex_start_queued")[1:], session(google), TEXTS, pins=PINS, workers=1)
    assert where_.zone == "europe-west1-b" and not any("us-central1" in key for key in google.store)


def test_a_quota_that_is_too_small_everywhere_is_said_with_its_name():
    google = cloud(quotas={B200: {(): 0}})
    error = refused(CapacityError, f"quota {B200} in us-central1: limit 0; 16 GPUs are needed", google=google)
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
    found = quotas(where(machine, mode), session(cloud()))
    assert [one.name for one in found] == ([name] if name else [])
    assert all(one.limit is None and "not known (refused: NOT_FOUND)" in one.sentence() for one in found)


def test_the_closest_bucket_counts():
    rows = {(): 1, in_("us-central1"): 2, in_("us-central1", gpu_family="NVIDIA_H100_MEGA"): 99,
            in_("us-central1", gpu_family="NVIDIA_H200"): 3, in_("europe-west1"): 4}  # fmt: skip
    google = cloud(quotas={"gpus_per_gpu_family": rows})
    assert quotas(where("a3-megagpu-8g", "on_demand"), session(google))[0].limit == 99
    endless = cloud(quotas={"gpus_per_gpu_family": {(): -1}})
    check_quotas(where("a3-megagpu-8g", "on_demand"), session(endless))
    assert "no limit" in quotas(where("a3-megagpu-8g", "on_demand"), session(endless))[0].sentence()


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


def test_a_zone_without_the_machine_says_where_it_is():
    google = cloud(lacking={"us-central1-b": {"g2-standard-48"}})
    error = refused(CapacityError, "zone us-central1-b has no g2-standard-48", google=google, of=SITES["g2"])
    assert error.hint == "it is in europe-west1-b, us-central1-a"
    nowhere = cloud(lacking={zone: {"g2-standard-48"} for zone in google.zones})
    assert "no zone" in refused(CapacityError, "has no g2-standard-48", google=nowhere, of=SITES["g2"]).hint


def test_a_zone_that_does_not_exist():
    refused(CapacityError, "zone us-central1-x has no a4-highgpu-8g", of=where(locations=["us-central1-x"]))


def test_credentials_that_google_does_not_know():
    error = refused(AccessError, "rejected these credentials", refuse={1: (401, "UNAUTHENTICATED")})
    assert "gcloud auth application-default login" in error.hint


def test_services_that_answer_a_while_after_they_were_switched_on():
    counted = cloud()
    up(SITES["g2"], session(counted), INSTALLED, workers=1)
    first = next(n for n, (method, url) in enumerate(counted.log, 1) if method == "GET" and url.endswith("/clusters"))
    late = {number: (403, "SERVICE_DISABLED") for number in range(first, first + 9)}
    google = cloud(refuse=late)
    up(SITES["g2"], session(google), INSTALLED, workers=1)
    assert everything(google) == everything(counted)
    never = cloud(refuse={number: (403, "SERVICE_DISABLED") for number in range(first, 1000)})
    refused(BackendError, "refused: SERVICE_DISABLED", google=never, of=SITES["g2"])


def test_a_bucket_of_somebody_elses():
    refused(ConflictError, "example-bucket belongs to another project or user", foreign_buckets={"example-bucket"})


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
    down([where()], session(google), workers=1)
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
