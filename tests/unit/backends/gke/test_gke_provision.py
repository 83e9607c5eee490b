"""``up`` and ``down`` against a Google Cloud in memory that checks every request against Google's own documents."""

import json

import pytest
from cases import placement, spec

from muster.backends.gke.provision.advice import capacity_advice
from muster.backends.gke.provision.audit import audit
from muster.backends.gke.provision.http import Call
from muster.backends.gke.provision.provisioner import GkeProvisioner
from muster.backends.gke.provision.quota import check_quota, quota
from muster.backends.gke.provision.session import Session
from muster.backends.gke.provision.site import site
from muster.backends.gke.provision.up import Software, down, requests, software, up, up_first, wanted_software
from muster.core.errors import AccessError, BackendError, CapacityError, ConflictError, UsageError
from muster.core.seams import Provisioner

discovery = pytest.importorskip("fakes.discovery")
if discovery.folder() is None:
    pytest.skip("google-api-python-client (Google's discovery documents) is not installed", allow_module_level=True)

from fakes.clock import VirtualClock  # noqa: E402
from fakes.gcp import FakeGoogleCloud, Killed  # noqa: E402

DOCUMENTS = discovery.Discovery(discovery.folder())
NAMED = {"name": "kueue", "namespace": "default"}
CONFIG = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": NAMED, "data": {"a": "b"}}
INSTALLED = Software(documents={"kueue.yaml": (CONFIG,)}, hugging_face_token="hf_secret")
TOKEN = "aGZfc2VjcmV0"


def cloud(**faults):
    return FakeGoogleCloud(DOCUMENTS, **faults)


def session(google):
    return Session(http=google, clock=VirtualClock())


def where(machine="a4-highgpu-8g", mode="flex_start_queued", **changes):
    adopt = changes.pop("adopt", False)
    return site(placement(spec(machine, mode, project="example-project", **changes)), adopt=adopt)


def everything(google):
    """What exists, in a form that can be compared: nothing of how it came about."""
    objects = {
        key: {name: value for name, value in one.items() if name != "metadata"}
        for key, one in google.kubernetes.objects.items()
    }
    bindings = {name: policy["bindings"] for name, policy in google.policies.items()}
    return google.store, objects, bindings


SITES = {"a4": where(), "a3-mega": where("a3-megagpu-8g", "spot"), "g2": where("g2-standard-48", "on_demand")}


@pytest.fixture(scope="module", params=SITES)
def finished(request):
    """(site, the cloud after an undisturbed ``up``, how many requests that took)."""
    google = cloud()
    up(SITES[request.param], session(google), INSTALLED)
    reference = cloud()
    up(SITES[request.param], session(reference), INSTALLED, workers=1)
    assert everything(google) == everything(reference), "side by side and one by one end the same"
    return SITES[request.param], reference, len(reference.log)


def every(where_, count):
    """Every request of A4 and G2; of A3 Mega, whose sixteen subnets and rules are alike, every fifth."""
    return range(1, count + 1, 5 if where_.placement.family.name == "a3-mega" else 1)


def test_up_makes_what_the_family_needs(finished):
    where_, google, _ = finished
    names = google.names()
    assert {"clusters/muster", "nodePools/muster-cpu", f"nodePools/{where_.pool}", "b/example-bucket"} <= names
    wanted = {"a4": 10, "a3-mega": 9, "g2": 1}
    family = {"a4": "a4", "a3-mega": "a3-mega", "g2": "g2"}[where_.placement.family.name]
    assert sum(name.startswith("subnetworks/") for name in names) == wanted[family]


def test_again_changes_nothing(finished):
    where_, google, _ = finished
    before, made, log = json.dumps(everything(google), sort_keys=True), list(google.creations), len(google.log)
    up(where_, session(google), INSTALLED, workers=1)
    assert json.dumps(everything(google), sort_keys=True) == before and google.creations == made
    assert {method for method, _ in google.log[log:]} == {"GET", "POST"}
    assert [url for method, url in google.log[log:] if method == "POST"] == [
        "https://cloudresourcemanager.googleapis.com/v1/projects/example-project:testIamPermissions"
    ]


@pytest.mark.parametrize("time_passes", [True, False])
def test_killed_after_every_request_and_run_again(finished, time_passes):
    where_, reference, count = finished
    wanted = everything(reference)
    for number in every(where_, count):
        google = cloud(kill_at=number)
        with pytest.raises(Killed):
            up(where_, session(google), INSTALLED, workers=1)
        google.kill_at = None
        if time_passes:
            google.pass_time()
        up(where_, session(google), INSTALLED, workers=1)
        assert everything(google) == wanted, f"killed after request {number}"
        assert sorted(google.creations) == sorted(reference.creations), f"something was made twice after {number}"


@pytest.mark.parametrize("time_passes", [True, False])
def test_down_after_any_partial_up_leaves_nothing(finished, time_passes):
    where_, _, count = finished
    for number in every(where_, count):
        google = cloud(kill_at=number)
        with pytest.raises(Killed):
            up(where_, session(google), INSTALLED, workers=1)
        google.kill_at = None
        if time_passes:
            google.pass_time()
        result = down(where_, session(google), workers=1)
        assert (google.store, result.troubles, result.leftovers) == ({}, (), ()), f"killed after request {number}"


def test_down_killed_after_every_request_and_run_again(finished):
    where_, _, _ = finished
    counted = cloud()
    up(where_, session(counted), INSTALLED, workers=1)
    start = len(counted.log)
    down(where_, session(counted), workers=1)
    for number in range(start + 1, len(counted.log) + 1, 2):
        google = cloud()
        up(where_, session(google), INSTALLED, workers=1)
        google.kill_at = number
        with pytest.raises(Killed):
            down(where_, session(google), workers=1)
        google.kill_at = None
        assert down(where_, session(google), workers=1).clean and google.store == {}, f"killed after request {number}"


@pytest.mark.parametrize("fault", ["lose", "drop", "429", "503"])
def test_every_request_may_go_wrong_once(finished, fault):
    where_, reference, count = finished
    wanted = everything(reference)
    for number in every(where_, count):
        google = cloud(**{fault: {number}}) if fault in ("lose", "drop") else cloud(refuse={number: (int(fault), "x")})
        up(where_, session(google), INSTALLED, workers=1)
        assert everything(google) == wanted, f"{fault} at request {number}"
        assert sorted(google.creations) == sorted(reference.creations), f"made twice after {fault} at {number}"


@pytest.mark.parametrize("looks", [0, 1, 40])
def test_slow_operations_are_waited_for(looks):
    google = cloud(looks=looks)
    up(SITES["a4"], session(google), INSTALLED, workers=1)
    assert google.store["v1/projects/example-project/locations/us-central1/clusters/muster"]["status"] == "RUNNING"


def test_an_operation_that_never_ends_is_said():
    patient = session(cloud(looks=10**9))
    with pytest.raises(BackendError, match="still not over"):
        up(SITES["a4"], patient, INSTALLED, workers=1)


@pytest.mark.parametrize(
    ("name", "code", "error"),
    [
        ("b200", "GCE_QUOTA_EXCEEDED", CapacityError),
        ("b200", "GCE_STOCKOUT", CapacityError),
        ("muster-rdma-net", "QUOTA_EXCEEDED", CapacityError),
        ("muster-b200", "INTERNAL", BackendError),
    ],
)
def test_a_failed_operation_leaves_nothing_half_made(name, code, error):
    google = cloud(fail={name: (code, "no room for it")})
    with pytest.raises(error, match="no room for it"):
        up(SITES["a4"], session(google), INSTALLED, workers=1)
    assert not any(name in one for one in google.names())
    up(SITES["a4"], session(google), INSTALLED, workers=1)
    assert down(SITES["a4"], session(google)).clean and google.store == {}


def test_a_pool_that_broke_while_nobody_looked_is_made_anew():
    google = cloud(fail={"b200": ("GCE_STOCKOUT", "none")}, looks=2)
    counted = cloud(looks=2)
    up(SITES["a4"], session(counted), INSTALLED, workers=1)
    pool = next(n for n, (method, url) in enumerate(counted.log, 1) if method == "POST" and url.endswith("/nodePools"))
    google.kill_at = pool
    with pytest.raises(Killed):
        up(SITES["a4"], session(google), INSTALLED, workers=1)
    google.kill_at = None
    google.pass_time()
    assert "ERROR" in json.dumps(google.store)
    up(SITES["a4"], session(google), INSTALLED, workers=1)
    assert everything(google)[0].keys() == everything(counted)[0].keys() and "ERROR" not in json.dumps(google.store)


# ---------------------------------------------------------------- several places


TEXTS = {
    name: f"apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}}}\n"
    for name in ("kueue.yaml", "jobset.yaml", "nccl-rdma-installer.yaml")
}


def places(mode="reservation"):
    of = spec("a4-highgpu-8g", mode, project="example-project")
    return [site(placement(of), zone=zone) for zone in ("us-central1-a", "us-central1-b", "europe-west1-b")]


def test_the_first_place_with_room_is_taken_and_nothing_else_stays():
    google = cloud(fail={"b200": ("GCE_STOCKOUT", "none here")})
    where_, _ = up_first(places(), session(google), TEXTS, workers=1)
    assert where_.zone == "europe-west1-b", "a has no RoCE network, b no machines"
    direct = cloud()
    up_first(places()[2:], session(direct), TEXTS, workers=1)
    wanted = everything(direct)[0]
    bucket = "storage/v1/b/example-bucket"
    assert google.store.pop(bucket)["location"] == "US-CENTRAL1" and wanted.pop(bucket)
    assert google.store == wanted


def test_no_place_has_room():
    google = cloud(fail={"b200": ("GCE_STOCKOUT", "none here")})
    with pytest.raises(CapacityError, match="none here"):
        up_first(places()[:2], session(google), TEXTS, workers=1)
    assert not any("b200" in name for name in google.names())


B200 = "preemptible_nvidia_b200_gpus"


def in_(region, **more):
    return (("region", region), *more.items())


def test_a_quota_that_is_too_small_moves_on_before_anything_is_made():
    google = cloud(quotas={B200: {in_("us-central1"): 8, in_("europe-west1"): 24}})
    where_, _ = up_first(places("flex_start_queued")[1:], session(google), TEXTS, workers=1)
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


# ---------------------------------------------------------------- what is left, and what it costs


def left(kind, place, name, **row):
    google = cloud(enabled={"compute.googleapis.com", "container.googleapis.com"})
    row = {"name": name, "labels": {"goog-k8s-cluster-name": "muster"}, **row}
    google.store[f"compute/v1/projects/example-project/{place}/{kind}/{name}"] = row
    return audit(SITES["a4"], session(google), kept=set())


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"kind": "disks", "sizeGb": "730", "type": "x/pd-balanced"}, "bills 730 GB of pd-balanced, about $2.40 a day"),
        ({"kind": "disks", "sizeGb": "10", "type": "x/unheard-of"}, "bills 10 GB of unheard-of"),
        ({"kind": "addresses"}, "about $0.24 a day"),
        ({"kind": "instances", "machineType": "x/e2-standard-4", "status": "RUNNING"}, "about $3.22 a day"),
        ({"kind": "instances", "machineType": "x/unheard-of"}, "bills a unheard-of (in an unknown state)"),
        ({"kind": "instanceGroupManagers"}, "instanceGroupManagers/it"),
    ],
)
def test_what_is_left_is_named_with_its_cost(row, words):
    (found,) = left(row.pop("kind"), "zones/us-central1-b", "it", **row)
    assert found.sentence().endswith(words) and "None" not in found.sentence()


def test_a_forgotten_gpu_node_is_priced_by_how_it_was_bought():
    def usd(model):
        scheduling = {"provisioningModel": model}
        machine = "zones/us-central1-b/machineTypes/a3-highgpu-8g"
        row = {"machineType": machine, "scheduling": scheduling, "zone": "x/zones/us-central1-b"}
        (found,) = left("instances", "zones/us-central1-b", "gke-muster-x", **row)
        return found.usd_per_day

    assert usd("STANDARD") == pytest.approx(24 * 8 * 11.0613) and usd("SPOT") == pytest.approx(24 * 8 * 6.6203)


# ---------------------------------------------------------------- down, dry run, software


def test_keep_data_keeps_the_bucket_and_says_so():
    google = cloud()
    up(SITES["a4"], session(google), INSTALLED, workers=1)
    result = down(SITES["a4"], session(google), keep_data=True)
    assert google.names() == {"b/example-bucket"} and result.clean
    assert [(one.kind, one.name, one.kept) for one in result.leftovers] == [("buckets", "example-bucket", True)]


def test_the_audit_finds_what_gke_left_behind():
    google = cloud()
    up(SITES["a4"], session(google), INSTALLED, workers=1)
    disk = {"name": "pvc-1", "labels": {"goog-k8s-cluster-name": "muster"}}
    google.store["compute/v1/projects/example-project/zones/us-central1-b/disks/pvc-1"] = disk
    other = {"name": "theirs", "labels": {"goog-k8s-cluster-name": "other"}}
    google.store["compute/v1/projects/example-project/zones/us-central1-b/disks/theirs"] = other
    result = down(SITES["a4"], session(google))
    assert not result.clean and [(one.kind, one.name) for one in result.leftovers] == [("disks", "pvc-1")]


def test_what_cannot_be_removed_is_named_and_the_rest_goes():
    google = cloud()
    up(SITES["a4"], session(google), INSTALLED, workers=1)
    user = {"name": "vm", "network": "projects/example-project/global/networks/muster-net"}
    google.store["compute/v1/projects/example-project/zones/us-central1-b/instances/vm"] = user
    result = down(SITES["a4"], session(google), workers=1)
    assert not result.clean and "networks/muster-net" in result.troubles[0]
    assert google.names() == {"instances/vm", "networks/muster-net"}


def test_down_of_a_project_that_never_was_up():
    google = cloud()
    assert down(SITES["a4"], session(google)).clean and google.creations == []


def test_a_dry_run_is_every_creating_request_and_touches_nothing():
    google = cloud()
    up(SITES["a4"], session(google), INSTALLED, workers=1)
    dry = requests(SITES["a4"], INSTALLED)
    shown = {(call.method, call.url) for call in dry}
    made = {(method, url) for method, url in google.log if method == "POST" and "10.0.0.2" not in url}
    assert made <= shown
    text = "\n".join(call.shown() for call in dry)
    assert TOKEN not in text and "hf_secret" not in text and "(secret)" in text
    assert '"enableMultiNetworking": true' in text


def test_missing_software_is_asked_for_by_address():
    assert set(wanted_software(SITES["a4"])) == {"jobset.yaml", "kueue.yaml", "nccl-rdma-installer.yaml"}
    with pytest.raises(UsageError, match=r"curl -L -o kueue\.yaml https://github\.com/kubernetes-sigs/kueue/releases"):
        software(SITES["a4"], {"jobset.yaml": ""})
    texts = {name: f"kind: A\napiVersion: v1\nmetadata: {{name: {name}}}\n" for name in wanted_software(SITES["a4"])}
    assert software(SITES["a4"], texts).documents["kueue.yaml"][0]["kind"] == "A"


def test_the_fake_refuses_what_google_would():
    google = cloud()
    url = "https://container.googleapis.com/v1/projects/p/locations/l/clusters/c/nodePools"
    with pytest.raises(AssertionError, match="flexStarted: unknown field"):
        google.send(Call(method="POST", url=url, body={"nodePool": {"config": {"flexStarted": True}}}))
    with pytest.raises(AssertionError, match="is not google-duration"):
        google.send(Call(method="POST", url=url, body={"nodePool": {"config": {"maxRunDuration": "604800"}}}))
    with pytest.raises(AssertionError, match="no documented method"):
        google.send(Call(method="POST", url=url + "s", body={}))


POOLS = {
    "flex_start_queued": ({"queuedProvisioning": {"enabled": True}}, {"flexStart": True, "maxRunDuration": "604800s"}),
    "flex_start": ({}, {"flexStart": True, "maxRunDuration": "604800s"}),
    "spot": ({}, {"spot": True}),
    "reservation": ({"initialNodeCount": 2}, {}),
}


@pytest.mark.parametrize("mode", POOLS)
def test_pools_as_the_reference_has_them(mode):
    google = cloud()
    up(where(mode=mode), session(google), INSTALLED, workers=1)
    pool = next(one for key, one in google.store.items() if key.endswith(where(mode=mode).pool))
    outside, inside = POOLS[mode]
    assert outside.items() <= pool.items() and inside.items() <= pool["config"].items()
    assert pool["management"]["autoRepair"] is False and ("spot" in pool["config"]) == (mode == "spot")
    affinity = pool["config"]["reservationAffinity"]["consumeReservationType"]
    assert affinity == ("SPECIFIC_RESERVATION" if mode == "reservation" else "NO_RESERVATION")
    assert ("autoscaling" in pool) == (mode != "reservation")
    if mode != "reservation":
        assert pool["initialNodeCount"] == 0 and pool["autoscaling"]["locationPolicy"] == "ANY"
    rows = pool["networkConfig"]["additionalNodeNetworkConfigs"]
    assert [row["network"] for row in rows] == ["muster-gvnic-net"] + ["muster-rdma-net"] * 8


def test_the_roce_network_has_a_profile_and_no_firewall_rule():
    google = cloud()
    up(SITES["a4"], session(google), INSTALLED, workers=1)
    network = next(one for key, one in google.store.items() if key.endswith("networks/muster-rdma-net"))
    assert network["networkProfile"].endswith("networkProfiles/us-central1-b-vpc-roce") and "mtu" not in network
    assert not any("rdma" in name for name in google.names() if name.startswith("firewalls/"))
    mega = cloud()
    up(SITES["a3-mega"], session(mega), INSTALLED, workers=1)
    assert {one["mtu"] for key, one in mega.store.items() if "/networks/muster-net-" in key} == {8244}


def test_the_binding_is_by_principal_and_keeps_others():
    google = cloud()
    up(SITES["a4"], session(google), INSTALLED, workers=1)
    (row,) = google.policies["example-bucket"]["bindings"]
    assert row == {
        "role": "roles/storage.objectUser",
        "members": [
            "principal://iam.googleapis.com/projects/123456789/locations/global/workloadIdentityPools/"
            "example-project.svc.id.goog/subject/ns/default/sa/muster"
        ],
    }


def test_the_provisioner_seam():
    of = spec("a4-highgpu-8g", "spot", project="example-project", locations=["us-central1-a", "us-central1-b"])
    google = cloud()
    provisioner: Provisioner = GkeProvisioner(http=google, spec=of, manifests=TEXTS, clock=VirtualClock(), workers=1)
    assert provisioner.find("run-1") is None
    lease = provisioner.ensure(of, run_id="run-1")
    assert lease.labels["zone"] == "us-central1-b" and "clusters/muster" in lease.resources
    found = provisioner.find("run-1")
    assert found is not None and "clusters/muster" in found.resources
    assert provisioner.release("run-1") == [] and google.store == {} and provisioner.find("run-1") is None


def test_a_kind_that_is_served_late_is_waited_for():
    google = cloud()
    google.kubernetes.late["apis/kueue.x-k8s.io/v1beta2"] = 4
    up(SITES["g2"], session(google), INSTALLED, workers=1)
    assert google.kubernetes.of_kind("ClusterQueue")


def test_a_kind_that_is_never_served_is_named():
    google = cloud()
    google.kubernetes.late["apis/kueue.x-k8s.io/v1beta2"] = 10**6
    with pytest.raises(BackendError, match=r"does not know ResourceFlavor of kueue\.x-k8s\.io/v1beta2"):
        up(SITES["g2"], session(google), INSTALLED, workers=1)
