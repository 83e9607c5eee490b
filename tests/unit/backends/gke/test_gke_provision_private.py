"""Private clusters, a network that is there already, and what is refused because it is not done."""

import pytest
from fakes.project import INSTALLED, cloud, everything, killed, session, where
from thorough import usually

from muster.backends.gke.provision.up import audit, down, up
from muster.core.errors import AccessError, BackendError, ConflictError, UsageError

OFFICE, HOME = "203.0.113.0/24", "198.51.100.7/32"
FOLDER = "compute/v1/projects/example-project"
CLUSTER = "v1/projects/example-project/locations/us-central1/clusters/muster"


def private(**changes):
    return where("g2-standard-48", "spot", **{"private": True, "authorized_networks": [OFFICE], **changes})


def made(site):
    google = cloud()
    up(site, session(google), INSTALLED, workers=1)
    return google


def ranges(google):
    endpoints = google.store[CLUSTER]["controlPlaneEndpointsConfig"]["ipEndpointsConfig"]
    assert endpoints["enablePublicEndpoint"] and endpoints["authorizedNetworksConfig"]["enabled"]
    return [row["cidrBlock"] for row in endpoints["authorizedNetworksConfig"]["cidrBlocks"]]


# ---------------------------------------------------------------- private clusters


def test_no_node_has_a_public_address_and_a_nat_leads_out():
    google = made(private())
    assert google.store[CLUSTER]["networkConfig"]["defaultEnablePrivateNodes"] is True
    pools = [one for key, one in google.store.items() if "/nodePools/" in key]
    assert len(pools) == 2 and all(pool["networkConfig"]["enablePrivateNodes"] for pool in pools)
    router = google.store[f"{FOLDER}/regions/us-central1/routers/muster-router"]
    (nat,) = router["nats"]
    assert router["network"].endswith("/global/networks/muster-net") and nat["natIpAllocateOption"] == "AUTO_ONLY"
    assert nat["sourceSubnetworkIpRangesToNat"] == "ALL_SUBNETWORKS_ALL_IP_RANGES"
    assert google.store[f"{FOLDER}/regions/us-central1/subnetworks/muster-sub"]["privateIpGoogleAccess"] is True
    order = [name for name in google.creations if name.startswith(("routers/", "clusters/"))]
    assert order == ["routers/muster-router", "clusters/muster"], "the first node pulls images"
    assert ranges(google) == [OFFICE]


def test_gpu_nodes_keep_their_data_networks():
    site = where("a4-highgpu-8g", "spot", private=True, authorized_networks=[OFFICE])
    pool = next(one for key, one in made(site).store.items() if key.endswith(site.pool))
    assert pool["networkConfig"]["enablePrivateNodes"] is True
    assert len(pool["networkConfig"]["additionalNodeNetworkConfigs"]) == 9


def test_a_public_cluster_has_none_of_it():
    google = made(where("g2-standard-48", "spot"))
    assert not any("/routers/" in key for key in google.store)
    assert "controlPlaneEndpointsConfig" not in google.store[CLUSTER]
    assert "defaultEnablePrivateNodes" not in google.store[CLUSTER]["networkConfig"]


def test_ranges_of_a_second_run_file_are_let_in_and_the_firsts_stay():
    google = made(private())
    up(private(authorized_networks=[HOME]), session(google), INSTALLED, workers=1)
    assert ranges(google) == [OFFICE, HOME]
    log = len(google.log)
    up(private(), session(google), INSTALLED, workers=1)
    assert ranges(google) == [OFFICE, HOME] and not [method for method, _ in google.log[log:] if method == "PUT"]


def test_a_public_cluster_is_not_used_for_a_private_run_file():
    google = made(where("g2-standard-48", "spot"))
    with pytest.raises(ConflictError, match="defaultEnablePrivateNodes should be True"):
        up(private(), session(google), INSTALLED, workers=1)
    with pytest.raises(ConflictError, match=r"reached from 203.0.113.0/24 alone, is open to every range"):
        up(private(private=False), session(google), INSTALLED, workers=1)


def test_a_cluster_that_google_describes_in_older_words_is_the_same_one():
    google = made(private())
    cluster = google.store[CLUSTER]
    del cluster["networkConfig"]["defaultEnablePrivateNodes"]
    ranges = cluster.pop("controlPlaneEndpointsConfig")["ipEndpointsConfig"]["authorizedNetworksConfig"]
    cluster |= {"privateClusterConfig": {"enablePrivateNodes": True}, "masterAuthorizedNetworksConfig": ranges}
    log = len(google.log)
    up(private(), session(google), INSTALLED, workers=1)
    assert not [method for method, _ in google.log[log:] if method == "PUT"]


def test_killed_at_any_request_and_run_again_and_taken_down():
    reference = made(private())
    for number in range(1, len(reference.log) + 1, usually(2, nightly=1)):
        google = cloud()
        with killed(google, number):
            up(private(), session(google), INSTALLED, workers=1)
        up(private(), session(google), INSTALLED, workers=1)
        assert everything(google) == everything(reference), f"killed after request {number}"
        assert sorted(google.creations) == sorted(reference.creations), f"made twice after {number}"
        assert down([private()], session(google), workers=1).clean and google.store == {}


def test_down_killed_at_any_request_and_run_again():
    counted = made(private())
    start = len(counted.log)
    down([private()], session(counted), workers=1)
    for number in range(start + 1, len(counted.log) + 1, usually(2, nightly=1)):
        google = made(private())
        with killed(google, number):
            down([private()], session(google), workers=1)
        assert down([private()], session(google), workers=1).clean and google.store == {}, f"killed after {number}"


def test_the_audit_sees_a_router_that_stayed_and_that_it_costs():
    google = cloud(enabled={"compute.googleapis.com", "container.googleapis.com"})
    row = {"name": "muster-router", "description": "made by muster"}
    google.store[f"{FOLDER}/regions/us-central1/routers/muster-router"] = row
    (found,) = audit(private(), session(google), kept=set())
    assert found.kind == "routers" and "Cloud NAT" in found.bills


def test_the_permission_for_routers_is_asked_for_where_one_is_made():
    google = cloud(denied={"compute.routers.create"})
    with pytest.raises(AccessError, match=r"compute\.routers\.create"):
        up(private(), session(google), INSTALLED, workers=1)
    assert google.creations == []
    up(where("g2-standard-48", "spot"), session(google), INSTALLED, workers=1)


# ---------------------------------------------------------------- a network that is there


def with_network():
    google = cloud()
    google.store[f"{FOLDER}/global/networks/company"] = {"name": "company", "autoCreateSubnetworks": False}
    return google


@pytest.mark.parametrize("named", ["company", "projects/example-project/global/networks/company"])
def test_an_existing_network_gets_a_subnet_of_ours_and_stays(named):
    google, site = with_network(), private(network=named)
    up(site, session(google), INSTALLED, workers=1)
    assert google.store[CLUSTER]["networkConfig"]["network"] == "projects/example-project/global/networks/company"
    assert not any(name.startswith("networks/muster") for name in google.names())
    router = google.store[f"{FOLDER}/regions/us-central1/routers/muster-router"]
    (nat,) = router["nats"]
    assert router["network"].endswith("/networks/company")
    assert nat["sourceSubnetworkIpRangesToNat"] == "LIST_OF_SUBNETWORKS", "the others' way out is theirs"
    assert [row["name"].rpartition("/")[2] for row in nat["subnetworks"]] == ["muster-sub"]
    assert down([site], session(google), workers=1).clean and google.names() == {"networks/company"}


@pytest.mark.parametrize("covers", ["ALL_SUBNETWORKS_ALL_IP_RANGES", "ALL_SUBNETWORKS_ALL_PRIMARY_IP_RANGES"])
def test_a_way_out_that_the_network_has_for_all_its_subnets_is_used_and_stays(covers):
    google, site = with_network(), private(network="company")
    theirs = {
        "name": "out",
        "network": f"https://www.googleapis.com/{FOLDER}/global/networks/company",
        "nats": [{"name": "nat", "sourceSubnetworkIpRangesToNat": covers}],
    }
    google.store[f"{FOLDER}/regions/us-central1/routers/out"] = theirs
    up(site, session(google), INSTALLED, workers=1)
    assert "clusters/muster" in google.creations and "routers/muster-router" not in google.creations
    assert down([site], session(google), workers=1).clean and google.names() == {"networks/company", "routers/out"}


def test_ways_out_of_other_networks_or_of_single_subnets_are_no_way_out_of_ours():
    google, site = with_network(), private(network="company")
    for name, network, covers in (
        ("a", "other", "ALL_SUBNETWORKS_ALL_IP_RANGES"),
        ("b", "company", "LIST_OF_SUBNETWORKS"),
    ):
        row = {"name": name, "network": f"{FOLDER}/global/networks/{network}"}
        row["nats"] = [{"name": "nat", "sourceSubnetworkIpRangesToNat": covers}]
        google.store[f"{FOLDER}/regions/us-central1/routers/{name}"] = row
    up(site, session(google), INSTALLED, workers=1)
    assert "routers/muster-router" in google.creations


def test_google_answers_a_clusters_network_by_name_and_another_network_is_refused():
    google, site = with_network(), private(network="company")
    up(site, session(google), INSTALLED, workers=1)
    cluster = google.store[CLUSTER]
    assert (cluster["network"], cluster["subnetwork"]) == ("company", "muster-sub")
    up(site, session(google), INSTALLED, workers=1)
    for path, name in (("projects/example-project/global/networks/other", "other"), (None, "other")):
        cluster["networkConfig"]["network"], cluster["network"] = path, name
        with pytest.raises(ConflictError, match=f"networks/company', is '{path or name}'"):
            up(site, session(google), INSTALLED, workers=1)
    cluster["network"] = "company"
    up(site, session(google), INSTALLED, workers=1)


def test_a_network_that_is_not_there_is_said_before_anything_is_made():
    google = cloud()
    with pytest.raises(UsageError, match="project example-project has no VPC network company"):
        up(private(network="company"), session(google), INSTALLED, workers=1)
    assert google.creations == []


# ---------------------------------------------------------------- refused with the reason


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"network": "projects/host/global/networks/company"}, "a shared VPC is not supported"),
        ({"network": "https://www.googleapis.com/compute/v1/projects/host/global/networks/company"}, "a shared VPC"),
        ({"network": "Company Net"}, "cannot be a VPC network's name"),
        ({"authorized_networks": []}, "else the control plane cannot be reached"),
        ({"storage": "anywhere_cache"}, "cannot be removed for more than an hour"),
        ({"storage": "rapid"}, "written by gRPC alone"),
        ({"authorized_networks": ["203.0.113.7/24"]}, "has host bits set"),
        ({"authorized_networks": ["203.0.113.300/32"]}, "203.0.113.300/32"),
    ],
)
def test_refused_before_anything_is_asked(changes, words):
    with pytest.raises(UsageError, match=words) as caught:
        private(**changes)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("constraint", "hint"),
    [
        ("constraints/compute.vmExternalIpAccess", "resources.private: true"),
        ("constraints/gcp.restrictNonCmekServices", "keys of one's own (CMEK)"),
    ],
)
def test_a_rule_of_the_organisation_is_answered_with_the_key_for_it(constraint, hint):
    google = cloud(fail={"muster-net": ("CONDITION_NOT_MET", f"Constraint {constraint} violated for project 1")})
    with pytest.raises(BackendError) as caught:
        up(where("g2-standard-48", "spot"), session(google), INSTALLED, workers=1)
    assert constraint in str(caught.value) and hint in caught.value.hint
