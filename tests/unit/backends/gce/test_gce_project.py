"""``muster up`` and ``muster down RUN.yaml`` for plain machines, on a Google Cloud in memory that checks each request:
killed after every one, and run again."""

import pytest
from fakes.clock import VirtualClock
from fakes.compute_engine.service import FakeComputeEngine
from fakes.discovery import Discovery, folder
from fakes.gcp import FakeGoogleCloud
from fakes.google_wire import Killed
from fakes.timeline import Timeline
from gce_cases import spec

from muster.backends.gce.inventory import NEEDED
from muster.backends.gce.project import GceProject, open_project
from muster.core.errors import AccessError, ConflictError, RunFileError, UsageError

if folder() is None:
    pytest.skip("google-api-python-client (Google's discovery documents) is not installed", allow_module_level=True)
DOCUMENTS = Discovery(folder())
CASES = {
    "a3-mega": spec("a3-megagpu-8g", "spot"),
    "a4": spec("a4-highgpu-8g", "flex_start", private=True, locations=["us-central1-b"]),
    "two regions": spec("g2-standard-48", "on_demand", locations=["us-central1-a", "us-central1-b", "us-east4-a"]),
}


def cloud(**faults):
    return FakeGoogleCloud(DOCUMENTS, **faults)


def project(google, of):
    return GceProject(sites=open_project(of).sites, http=google, clock=VirtualClock())


def roles(google):
    return sorted(
        (path, row["role"], member)
        for path, policy in google.policies.items()
        for row in policy["bindings"]
        for member in row["members"]
    )


@pytest.fixture(scope="module", params=CASES)
def finished(request):
    """(run file, the cloud after an undisturbed ``up``)."""
    google = cloud()
    project(google, CASES[request.param]).up(None)
    return CASES[request.param], google


def test_two_accounts_with_the_least_roles():
    google = cloud()
    project(google, CASES["a3-mega"]).up(None)
    at = "@example-project.iam.gserviceaccount.com"
    hosts, supervisor = f"serviceAccount:muster-hosts{at}", f"serviceAccount:muster-supervisor{at}"
    found = {(role, member) for _, role, member in roles(google)}
    assert found == {
        ("roles/storage.objectUser", hosts), ("roles/storage.objectUser", supervisor),
        ("projects/example-project/roles/musterSupervisor", supervisor), ("roles/iam.serviceAccountUser", supervisor),
    }  # fmt: skip
    (acts,) = [path for path, role, _ in roles(google) if role == "roles/iam.serviceAccountUser"]
    assert acts.endswith(f"/serviceAccounts/muster-hosts{at}"), "on that account alone"


def test_networks_are_those_of_the_family(finished):
    of, google = finished
    subnets = sorted(name for name in google.names() if name.startswith("subnetworks/"))
    wanted = {"a3-megagpu-8g": 9, "a4-highgpu-8g": 10, "g2-standard-48": 1}
    assert len(subnets) == wanted[of.resources.machine], subnets
    in_regions = [key for key in google.store if key.endswith("/subnetworks/muster-sub")]
    ranges = {google.store[key]["ipCidrRange"] for key in in_regions}
    assert len(in_regions) == len(ranges) == (2 if of.resources.machine == "g2-standard-48" else 1)
    (rule,) = [one for key, one in google.store.items() if key.endswith("/firewalls/muster-net-internal")]
    assert rule["sourceRanges"] == ["10.64.0.0/12"]


def test_what_hosts_are_asked_for_names_what_is_made(finished):
    from muster.backends.gce import requests
    from muster.backends.gce.placement import place

    of, google = finished
    placement = place(of, run_id="llama", run_dir=None)
    for zone in placement.zones:
        for request in requests.hosts(placement, zone, request_number=1):
            inner = request.body.get("instanceProperties") or request.body.get("properties") or {}
            for nic in inner.get("networkInterfaces", []):
                assert f"compute/v1/{nic['subnetwork']}" in google.store


def test_again_changes_nothing(finished):
    of, google = finished
    store, made, log = dict(google.store), list(google.creations), len(google.log)
    project(google, of).up(None)
    assert (google.store, google.creations) == (store, made)
    assert all(url.endswith((":testIamPermissions", ":getIamPolicy")) or ":getIamPolicy?" in url
               for method, url in google.log[log:] if method != "GET")  # fmt: skip


def killed(google, of, number, verb):
    google.kill_at = number
    with pytest.raises(Killed):
        getattr(project(google, of), verb)(*([None] if verb == "up" else []))
    google.kill_at = None


def every(of, first, last):
    """Every request; of A3 Mega, whose many subnets and rules are alike, every fifth."""
    return range(first, last + 1, 5 if of.resources.machine == "a3-megagpu-8g" else 1)


def test_killed_after_every_request_and_run_again(finished):
    of, _ = finished
    wanted = cloud()
    project(wanted, of).up(None)
    count = len(wanted.log)
    for number in every(of, 1, count):
        google = cloud()
        killed(google, of, number, "up")
        project(google, of).up(None)
        assert google.store == wanted.store, f"killed after request {number}"
        assert sorted(google.creations) == sorted(wanted.creations), f"made twice after {number}"
        assert roles(google) == roles(wanted), f"killed after request {number}"


def test_down_after_any_partial_up_leaves_nothing(finished):
    of, _ = finished
    whole = cloud()
    project(whole, of).up(None)
    for number in every(of, 1, len(whole.log)):
        google = cloud()
        killed(google, of, number, "up")
        result = project(google, of).down()
        assert (google.store, result.troubles, result.leftovers) == ({}, (), ()), f"killed after request {number}"
        assert not roles(google), f"killed after request {number}"


def test_down_killed_after_every_request_and_run_again(finished):
    of, _ = finished
    counted = cloud()
    project(counted, of).up(None)
    first = len(counted.log) + 1
    project(counted, of).down()
    for number in every(of, first, len(counted.log)):
        google = cloud()
        project(google, of).up(None)
        killed(google, of, number, "down")
        assert project(google, of).down().clean and google.store == {}, f"killed after request {number}"
        assert not roles(google), f"killed after request {number}"


@pytest.mark.parametrize("fault", ["lose", "drop", "429", "503"])
def test_every_request_may_go_wrong_once(fault):
    of = CASES["two regions"]
    wanted = cloud()
    project(wanted, of).up(None)
    for number in range(1, len(wanted.log) + 1):
        google = cloud(**{fault: {number}}) if fault in ("lose", "drop") else cloud(refuse={number: (int(fault), "x")})
        project(google, of).up(None)
        assert google.store == wanted.store, f"{fault} at request {number}"
        assert sorted(google.creations) == sorted(wanted.creations), f"made twice after {fault} at {number}"


def test_up_after_down_takes_the_role_back():
    google = cloud()
    for _ in range(2):
        project(google, CASES["a3-mega"]).up(None)
        assert project(google, CASES["a3-mega"]).down().clean
    assert google.removed_roles and google.creations.count("roles/musterSupervisor") == 2


def test_what_is_missing_is_said_with_its_role_before_anything_is_made():
    google = cloud(denied={"iam.roles.create", "storage.buckets.create"})
    with pytest.raises(
        AccessError, match=r"2 permissions are missing(.|\n)*iam.roles.create \(in roles/iam.roleAdmin\)"
    ):
        project(google, CASES["a3-mega"]).up(None)
    assert google.store == {}
    assert {url for method, url in google.log if method != "GET"} == {
        "https://cloudresourcemanager.googleapis.com/v1/projects/example-project:testIamPermissions"
    }
    assert set(NEEDED) >= google.denied


def test_machines_of_runs_keep_what_they_need_and_are_told_with_their_price():
    google, of = FakeComputeEngine(DOCUMENTS, timeline=Timeline(VirtualClock())), CASES["two regions"]
    project(google, of).up(None)
    path = "compute/v1/projects/example-project/zones/us-central1-a/instances/llama-1-0"
    google.store[path] = {
        "name": "llama-1-0", "labels": {"muster-run": "llama"}, "status": "RUNNING", "zone": "zones/us-central1-a",
        "machineType": "zones/us-central1-a/machineTypes/g2-standard-48",
        "scheduling": {"provisioningModel": "STANDARD"},
    }  # fmt: skip
    before = dict(google.store)
    with pytest.raises(ConflictError, match="machines of runs are there: llama-1-0"):
        project(google, of).down()
    assert google.store == before
    (left,) = project(google, of)._of_runs(project(google, of)._session())
    assert left.bills == "a g2-standard-48 (RUNNING)" and 90 < left.usd_per_day < 100, "4 L4 at about a dollar an hour"
    del google.store[path]
    google.store[path.replace("instances/llama-1-0", "disks/llama-1-0")] = {
        "name": "llama-1-0", "labels": {"muster-run": "llama"}, "sizeGb": "200",
        "type": "zones/z/diskTypes/pd-balanced",
    }  # fmt: skip
    result = project(google, of).down()
    assert not result.clean and [one.kind for one in result.leftovers] == ["disks"]
    assert result.leftovers[0].usd_per_day > 0.5


def test_what_somebody_else_made_is_left_alone():
    google = cloud()
    account = "v1/projects/example-project/serviceAccounts/muster-hosts@example-project.iam.gserviceaccount.com"
    google.store[account] = {"email": account.rpartition("/")[2], "description": "the team's"}
    project(google, CASES["a3-mega"]).up(None)
    assert not any("muster-hosts@" in member for _, _, member in roles(google)), "its roles are theirs"
    assert project(google, CASES["a3-mega"]).down().clean
    assert list(google.store) == [account]


def test_rdma_in_two_zones_and_data_networks_in_two_regions_are_refused():
    with pytest.raises(UsageError, match="tied to one zone"):
        open_project(spec("a4-highgpu-8g", "flex_start", locations=["us-central1-a", "us-central1-b"]))
    with pytest.raises(UsageError, match="2 regions"):
        open_project(spec("a3-megagpu-8g", "spot", locations=["us-central1-a", "us-east4-a"]))
    assert open_project(spec("a3-megagpu-8g", "spot", locations=["us-central1-a", "us-east4-a"]), zone="us-east4-a")


def test_a_run_file_without_a_bundle_may_be_made_ready():
    of = spec("a3-megagpu-8g", "spot", gce={"bundle": None})
    assert open_project(of).sites
    with pytest.raises(RunFileError, match="service_account"):
        open_project(spec("a3-megagpu-8g", "spot", gce={"service_account": None}))
