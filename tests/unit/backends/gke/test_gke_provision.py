"""``up`` and ``down`` against a Google Cloud in memory that checks every request against Google's own documents:
killed, lost, refused and failing at every single request."""

import json

import pytest
from fakes.project import INSTALLED, SITES, asks_for_pool, cloud, everything, killed, session
from thorough import usually

from muster.backends.gke.provision.up import down, up
from muster.core.errors import BackendError, CapacityError


@pytest.fixture(scope="module", params=SITES)
def finished(request):
    """(site, the cloud after an undisturbed ``up``, how many requests that took)."""
    google = cloud()
    up(SITES[request.param], session(google), INSTALLED)
    reference = cloud()
    up(SITES[request.param], session(reference), INSTALLED, workers=1)
    assert everything(google) == everything(reference), "side by side and one by one end the same"
    return SITES[request.param], reference, len(reference.log)


FAULTS = ["lose", "drop", "429", "503"]


def every(where_, count, step=1, first=1):
    """Every request of A4 and G2; of A3 Mega, whose sixteen subnets and rules are alike, every fifth; in the nightly
    suite every one of each."""
    step = 5 if where_.placement.family.name == "a3-mega" else step
    return range(usually(first, nightly=1), count + 1, usually(step, nightly=1))


def roles(google):
    """Every (resource, role, member) that the cloud knows."""
    return [
        (path, row["role"], member)
        for path, policy in google.policies.items()
        for row in policy["bindings"]
        for member in row["members"]
    ]


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
    project = "https://cloudresourcemanager.googleapis.com/v1/projects/example-project"
    questions = {f"{project}:testIamPermissions", f"{project}:getIamPolicy"}
    assert {url for method, url in google.log[log:] if method == "POST"} == questions


@pytest.mark.parametrize("time_passes", [True, False])
def test_killed_after_every_request_and_run_again(finished, time_passes):
    where_, reference, count = finished
    wanted = everything(reference)
    for number in every(where_, count, 3 if time_passes else 1):
        google = cloud()
        with killed(google, number):
            up(where_, session(google), INSTALLED, workers=1)
        if time_passes:
            google.pass_time()
        up(where_, session(google), INSTALLED, workers=1)
        assert everything(google) == wanted, f"killed after request {number}"
        assert sorted(google.creations) == sorted(reference.creations), f"something was made twice after {number}"


@pytest.mark.parametrize("time_passes", [True, False])
def test_down_after_any_partial_up_leaves_nothing(finished, time_passes):
    where_, _, count = finished
    for number in every(where_, count, 3 if time_passes else 1):
        google = cloud()
        with killed(google, number):
            up(where_, session(google), INSTALLED, workers=1)
        if time_passes:
            google.pass_time()
        result = down([where_], session(google), workers=1)
        assert (google.store, result.troubles, result.leftovers) == ({}, (), ()), f"killed after request {number}"
        assert not roles(google), f"killed after request {number}"


def test_down_killed_after_every_request_and_run_again(finished):
    where_, _, _ = finished
    counted = cloud()
    up(where_, session(counted), INSTALLED, workers=1)
    start = len(counted.log)
    down([where_], session(counted), workers=1)
    for number in range(start + 1, len(counted.log) + 1, usually(2, nightly=1)):
        google = cloud()
        up(where_, session(google), INSTALLED, workers=1)
        with killed(google, number):
            down([where_], session(google), workers=1)
        assert down([where_], session(google), workers=1).clean and google.store == {}, f"killed after request {number}"
        assert not roles(google), f"killed after request {number}"


@pytest.mark.parametrize("fault", FAULTS)
def test_every_request_may_go_wrong_once(finished, fault):
    """In one way here, in every way in the nightly suite."""
    where_, reference, count = finished
    wanted = everything(reference)
    for number in every(where_, count, len(FAULTS), 1 + FAULTS.index(fault)):
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
    with pytest.raises(BackendError, match="not finished"):
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
    assert down([SITES["a4"]], session(google)).clean and google.store == {}


def test_a_pool_that_broke_while_nobody_looked_is_made_anew():
    google = cloud(fail={"b200": ("GCE_STOCKOUT", "none")}, looks=2)
    counted = cloud(looks=2)
    up(SITES["a4"], session(counted), INSTALLED, workers=1)
    with killed(google, asks_for_pool(counted)):
        up(SITES["a4"], session(google), INSTALLED, workers=1)
    google.pass_time()
    assert "ERROR" in json.dumps(google.store)
    up(SITES["a4"], session(google), INSTALLED, workers=1)
    assert everything(google)[0].keys() == everything(counted)[0].keys() and "ERROR" not in json.dumps(google.store)
