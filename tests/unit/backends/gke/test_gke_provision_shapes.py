"""What is made, looks as Google's references have it; what is left, and what it costs; dry run and software."""

import hashlib
import ipaddress
import json

import pytest
from fakes.project import INSTALLED, PINS, SITES, TEXTS, cloud, session, where

from muster.backends.gke.provision.software import software, wanted_software
from muster.backends.gke.provision.up import audit, down, requests, up
from muster.backends.google.http import Call
from muster.catalog import gke as catalogue
from muster.core.errors import BackendError, ConflictError, UsageError

TOKEN = "aGZfc2VjcmV0"


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
    result = down([SITES["a4"]], session(google), keep_data=True)
    assert google.names() == {"b/example-bucket"} and result.clean
    assert [(one.kind, one.name, one.kept) for one in result.leftovers] == [("buckets", "example-bucket", True)]


def test_the_audit_finds_what_gke_left_behind():
    google = cloud()
    up(SITES["a4"], session(google), INSTALLED, workers=1)
    disk = {"name": "pvc-1", "labels": {"goog-k8s-cluster-name": "muster"}}
    google.store["compute/v1/projects/example-project/zones/us-central1-b/disks/pvc-1"] = disk
    other = {"name": "theirs", "labels": {"goog-k8s-cluster-name": "other"}}
    google.store["compute/v1/projects/example-project/zones/us-central1-b/disks/theirs"] = other
    result = down([SITES["a4"]], session(google))
    assert not result.clean and [(one.kind, one.name) for one in result.leftovers] == [("disks", "pvc-1")]


def test_what_cannot_be_removed_is_named_and_the_rest_goes():
    google = cloud()
    up(SITES["a4"], session(google), INSTALLED, workers=1)
    user = {"name": "vm", "network": "projects/example-project/global/networks/muster-net"}
    google.store["compute/v1/projects/example-project/zones/us-central1-b/instances/vm"] = user
    result = down([SITES["a4"]], session(google), workers=1)
    assert not result.clean and "networks/muster-net" in result.troubles[0]
    assert google.names() == {"instances/vm", "networks/muster-net"}


def test_down_of_a_project_that_never_was_up():
    google = cloud()
    assert down([SITES["a4"]], session(google)).clean and google.creations == []


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
        software(SITES["a4"], {"jobset.yaml": ""}, pins=PINS)
    assert software(SITES["a4"], TEXTS, pins=PINS).documents["kueue.yaml"][0]["kind"] == "ConfigMap"


def test_bytes_that_nobody_vouched_for_are_refused_with_their_hash():
    digest = hashlib.sha256(TEXTS["kueue.yaml"].encode()).hexdigest()
    expected = f"(?s)3 of the manifests .*not pinned by hash.*kueue.yaml has sha256 {digest}"
    with pytest.raises(UsageError, match=expected) as caught:
        software(SITES["a4"], TEXTS, pins={})
    assert "--pin" in caught.value.hint
    (url,) = [url for url in PINS if "kueue" in url]
    with pytest.raises(UsageError, match="1 of the manifests"):
        software(SITES["a4"], TEXTS, pins={one: PINS[one] for one in PINS if one != url})
    with pytest.raises(UsageError, match=f"kueue.yaml has sha256 .* was pinned: what {url} gives has changed"):
        software(SITES["a4"], {**TEXTS, "kueue.yaml": TEXTS["kueue.yaml"] + "# one more line\n"}, pins=PINS)


def test_a_hash_in_the_table_goes_before_a_pin(monkeypatch):
    table = catalogue.versions()
    releases = {**table["releases"], "kueue": {**table["releases"]["kueue"], "sha256": "0" * 64}}
    monkeypatch.setattr(catalogue, "versions", lambda: {**table, "releases": releases})
    with pytest.raises(UsageError, match=r"kueue\.yaml has sha256 .* the release has 0000"):
        software(SITES["a4"], TEXTS, pins=PINS)


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
    assert pool["management"] == {"autoRepair": not mode.startswith("flex"), "autoUpgrade": True}
    assert ("spot" in pool["config"]) == (mode == "spot")
    affinity = pool["config"]["reservationAffinity"]["consumeReservationType"]
    assert affinity == ("SPECIFIC_RESERVATION" if mode == "reservation" else "NO_RESERVATION")
    assert ("autoscaling" in pool) == (mode != "reservation")
    if mode != "reservation":
        assert pool["initialNodeCount"] == 0 and pool["autoscaling"]["locationPolicy"] == "ANY"
    rows = pool["networkConfig"]["additionalNodeNetworkConfigs"]
    assert [row["network"] for row in rows] == ["muster-gvnic-net"] + ["muster-rdma-net"] * 8


def test_a_cluster_with_a_release_channel_upgrades_no_nodes_and_refuses_pools_that_never_do():
    google = cloud()
    up(SITES["g2"], session(google), INSTALLED, workers=1)
    cluster = google.store["v1/projects/example-project/locations/us-central1/clusters/muster"]
    assert cluster["releaseChannel"] == {"channel": "REGULAR"}
    assert cluster["maintenancePolicy"]["window"]["maintenanceExclusions"]["muster-nodes-stay"] == {
        "startTime": "2026-08-22T00:00:00Z",
        "endTime": "2026-11-20T00:00:00Z",
        "maintenanceExclusionOptions": {"scope": "NO_MINOR_OR_NODE_UPGRADES"},
    }
    url = "https://container.googleapis.com/v1/projects/example-project/locations/us-central1/clusters/muster/nodePools"
    management = {"autoRepair": False, "autoUpgrade": False}
    pool = {"name": "p", "management": management, "config": {"machineType": "g2-standard-4"}}
    reply = google.send(Call(method="POST", url=url, body={"nodePool": pool}))
    assert reply.message == "Auto_upgrade and auto_repair cannot be false when release_channel REGULAR is set."


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
    rows = google.policies["storage/v1/b/example-bucket"]["bindings"]
    (row,) = [row for row in rows if row["role"] == "roles/storage.objectUser"]
    assert row == {
        "role": "roles/storage.objectUser",
        "members": [
            "principal://iam.googleapis.com/projects/123456789/locations/global/workloadIdentityPools/"
            "example-project.svc.id.goog/subject/ns/default/sa/muster"
        ],
    }


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


def test_data_subnets_hold_thousands_of_nodes_each_in_a_range_of_its_own():
    ranges = {}
    for name in ("a4", "a3-mega"):
        google = cloud()
        up(SITES[name], session(google), INSTALLED, workers=1)
        ranges[name] = [
            ipaddress.ip_network(one["ipCidrRange"])
            for key, one in google.store.items()
            if "/subnetworks/" in key and not key.endswith("/muster-sub")
        ]
    assert {name: len(found) for name, found in ranges.items()} == {"a4": 9, "a3-mega": 8}
    for found in ranges.values():
        assert all(one.num_addresses == 4096 for one in found) and len(set(found)) == len(found)
        assert all(one.subnet_of(ipaddress.ip_network("192.168.0.0/16")) for one in found)


def test_data_subnets_of_an_earlier_version_stay_as_they_are():
    google = cloud()
    up(SITES["a4"], session(google), INSTALLED, workers=1)
    subnets = [key for key in google.store if "/subnetworks/" in key and not key.endswith("/muster-sub")]
    for number, key in enumerate(subnets):
        google.store[key]["ipCidrRange"] = f"192.168.{number + 1}.0/24"
    before, made = json.dumps(google.store, sort_keys=True), list(google.creations)
    up(SITES["a4"], session(google), INSTALLED, workers=1)
    assert json.dumps(google.store, sort_keys=True) == before and google.creations == made
    google.store[subnets[0]]["ipCidrRange"] = "10.1.0.0/24"
    with pytest.raises(ConflictError, match=r"ipCidrRange should be inside 192.168.0.0/16, is '10.1.0.0/24'"):
        up(SITES["a4"], session(google), INSTALLED, workers=1)
