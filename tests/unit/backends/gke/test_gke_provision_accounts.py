"""Who nodes and builds are: accounts of their own with the least roles, and people who may not make or grant any."""

import json

import pytest
from fakes.project import INSTALLED, cloud, session, where

from muster.backends.cluster import Said
from muster.backends.gke.provision.access import ACT_AS, MAKING_ACCOUNTS
from muster.backends.gke.provision.inventory.accounts import commands, repository_of
from muster.backends.gke.provision.up import audit, down, up
from muster.core.errors import AccessError, BackendError

NODES = "muster-nodes@example-project.iam.gserviceaccount.com"
BUILD = "muster-build@example-project.iam.gserviceaccount.com"
PROJECT = "v1/projects/example-project"
ACCOUNTS = f"{PROJECT}/serviceAccounts"


def roles(google):
    """(last word of the resource, role, who) for every role of a service account."""
    return {
        (path.rpartition("/")[2], row["role"], member.removeprefix("serviceAccount:").partition("@")[0])
        for path, policy in google.policies.items()
        for row in policy["bindings"]
        for member in row["members"]
        if member.startswith("serviceAccount:")
    }


LEAST = {
    ("example-project", "roles/container.defaultNodeServiceAccount", "muster-nodes"),
    ("muster", "roles/artifactregistry.reader", "muster-nodes"),
    ("example-project", "roles/logging.logWriter", "muster-build"),
    ("muster", "roles/artifactregistry.writer", "muster-build"),
    ("example-bucket", "roles/storage.objectViewer", "muster-build"),
}


def test_accounts_have_the_least_roles_and_nodes_run_as_theirs():
    google = cloud()
    up(where(), session(google), INSTALLED, workers=1)
    assert roles(google) == LEAST
    pools = [one for key, one in google.store.items() if "/nodePools/" in key]
    assert len(pools) == 2 and {pool["config"]["serviceAccount"] for pool in pools} == {NODES}


def test_roles_of_others_on_the_same_things_stay():
    theirs = {"role": "roles/logging.logWriter", "members": ["user:a@example.com"]}
    conditional = {
        "role": "roles/logging.logWriter",
        "members": ["group:b@example.com"],
        "condition": {"expression": "false"},
    }
    google = cloud(policies={PROJECT: {"bindings": [theirs, conditional], "etag": "7", "version": 3}})
    up(where(), session(google), INSTALLED, workers=1)
    assert google.policies[PROJECT]["version"] == 3
    down([where()], session(google), workers=1)
    assert google.policies[PROJECT]["bindings"] == [theirs, conditional]


def test_a_new_account_that_others_do_not_know_yet_is_waited_for():
    google = cloud(new_for=8)
    speaking = session(google)
    up(where(), speaking, INSTALLED, workers=1)
    assert roles(google) == LEAST and speaking.clock.now_s > 40


def test_an_account_that_never_becomes_known_is_said():
    with pytest.raises(BackendError, match=f"Service account {NODES} does not exist"):
        up(where(), session(cloud(new_for=10**6)), INSTALLED, workers=1)


# ---------------------------------------------------------------- people who may not


def made_by_hand(google):
    """As gcloud makes them: without our mark; their roles are on the project."""
    google.enabled |= {"iam.googleapis.com"}
    for email in (NODES, BUILD):
        google.store[f"{ACCOUNTS}/{email}"] = {"email": email, "displayName": "made by hand"}


def test_who_may_not_make_accounts_gets_the_lines_for_somebody_who_may():
    google = cloud(denied=set(MAKING_ACCOUNTS))
    with pytest.raises(AccessError, match="5 permissions are missing") as caught:
        up(where(), session(google), INSTALLED, workers=1)
    assert google.creations == []
    assert "iam.serviceAccounts.create (in roles/iam.serviceAccountAdmin)" in str(caught.value)
    lines = [line.strip() for line in caught.value.hint.splitlines()[1:]]
    assert lines == commands(where())
    assert lines[:2] == [
        "gcloud iam service-accounts create muster-nodes --project=example-project",
        f"gcloud projects add-iam-policy-binding example-project --member=serviceAccount:{NODES} "
        "--role=roles/container.defaultNodeServiceAccount",
    ]


def test_accounts_made_by_hand_are_used_and_stay():
    google = cloud(denied=set(MAKING_ACCOUNTS))
    made_by_hand(google)
    up(where(), session(google), INSTALLED, workers=1)
    assert roles(google) == set() and not any("serviceAccounts" in one for one in google.creations)
    result = down([where()], session(google), workers=1)
    assert result.clean and google.names() == {f"serviceAccounts/{NODES}", f"serviceAccounts/{BUILD}"}


def test_who_may_run_as_the_accounts_by_a_role_on_each_needs_none_on_the_project():
    google = cloud(denied={*MAKING_ACCOUNTS, ACT_AS}, acts_as={NODES})
    with pytest.raises(AccessError, match="6 permissions are missing"):
        up(where(), session(google), INSTALLED, workers=1)
    made_by_hand(google)
    with pytest.raises(AccessError, match="1 permissions are missing") as caught:
        up(where(), session(google), INSTALLED, workers=1)
    assert f"service-accounts add-iam-policy-binding {BUILD} " in caught.value.hint and google.creations == []
    google.acts_as.add(BUILD)
    up(where(), session(google), INSTALLED, workers=1)
    assert commands(where())[-1].endswith("--role=roles/iam.serviceAccountUser")


def test_accounts_that_an_earlier_up_made_need_no_permission_but_to_see_their_roles():
    google = cloud()
    up(where(), session(google), INSTALLED, workers=1)
    google.denied = {"iam.serviceAccounts.create", "resourcemanager.projects.setIamPolicy"}
    made = list(google.creations)
    up(where(), session(google), INSTALLED, workers=1)
    google.policies[PROJECT]["bindings"].pop()
    with pytest.raises(AccessError, match="2 permissions are missing"):
        up(where(), session(google), INSTALLED, workers=1)
    assert google.creations == made


def test_named_accounts_are_neither_made_nor_given_roles_nor_asked_about():
    email = "theirs@other-project.iam.gserviceaccount.com"
    google = cloud(denied=set(MAKING_ACCOUNTS))
    google.store[f"v1/projects/other-project/serviceAccounts/{email}"] = {"email": email}
    site = where(node_service_account=email, build_service_account=email)
    up(site, session(google), INSTALLED, workers=1)
    pools = [one for key, one in google.store.items() if "/nodePools/" in key]
    assert {pool["config"]["serviceAccount"] for pool in pools} == {email}
    assert roles(google) == set() and not any("serviceAccounts" in one for one in google.creations)
    assert not any("muster-" in json.dumps(call.body) for call in site_requests(site) if "IamPolicy" in call.url)


def site_requests(site):
    from muster.backends.gke.provision.up import requests

    return requests(site, INSTALLED)


# ---------------------------------------------------------------- who else uses them, and what is left


def test_the_account_of_another_clusters_nodes_stays():
    google, here = cloud(), where("g2-standard-48", "spot")
    for site in (here, where("g2-standard-48", "spot", cluster="team")):
        up(site, session(google), INSTALLED, workers=1)
    result = down([here], session(google), workers=1)
    assert {f"serviceAccounts/{NODES}", f"serviceAccounts/{BUILD}"} <= google.names()
    assert ("example-project", "roles/container.defaultNodeServiceAccount", "muster-nodes") in roles(google)
    assert ("example-project", "roles/logging.logWriter", "muster-build") in roles(google)
    kept = {(one.kind, one.name) for one in result.leftovers if one.kept}
    assert kept >= {
        ("serviceAccounts", "muster-nodes"),
        ("serviceAccounts", "muster-build"),
        ("grants", "nodes"),
        ("grants", "build"),
    }


def test_the_audit_sees_accounts_and_roles_that_stayed():
    google = cloud(enabled={"iam.googleapis.com"})
    google.store[f"{ACCOUNTS}/{NODES}"] = {"email": NODES, "description": "made by muster"}
    gone = f"deleted:serviceAccount:{BUILD}?uid=1"
    google.policies[PROJECT] = {"bindings": [{"role": "roles/logging.logWriter", "members": [gone]}], "etag": "1"}
    found = {f"{one.kind}/{one.name}" for one in audit(where(), session(google), kept=set())}
    assert found == {"serviceAccounts/muster-nodes", "grants/build"}


# ---------------------------------------------------------------- where the image is


def test_nodes_pull_from_another_repository_of_the_project_too():
    google = cloud()
    folder = "projects/example-project/locations/europe-west1/repositories/team"
    google.store[f"v1/{folder}"] = {"name": folder}
    site = where(image="europe-west1-docker.pkg.dev/example-project/team/trainer:1")
    up(site, session(google), INSTALLED, workers=1)
    assert roles(google) == LEAST | {("team", "roles/artifactregistry.reader", "muster-nodes")}
    down([site], session(google), workers=1)
    assert roles(google) == set() and google.store == {f"v1/{folder}": {"name": folder}}


def test_a_role_on_a_repository_goes_although_the_image_is_another_by_now():
    google = cloud()
    folder = "projects/example-project/locations/europe-west1/repositories/team"
    google.store[f"v1/{folder}"] = {"name": folder, "format": "DOCKER"}
    up(where(image="europe-west1-docker.pkg.dev/example-project/team/trainer:1"), session(google), INSTALLED, workers=1)
    theirs = {"role": "roles/artifactregistry.reader", "members": ["user:a@example.com"]}
    google.policies[f"v1/{folder}"]["bindings"].append(theirs)
    assert down([where(image=None)], session(google), workers=1).clean
    assert roles(google) == set() and google.policies[f"v1/{folder}"]["bindings"] == [theirs]


@pytest.mark.parametrize(
    ("image", "project", "path"),
    [
        ("gcr.io/example-project/trainer:1", "example-project", "us/repositories/gcr.io"),
        ("us.gcr.io/example-project/team/trainer", "example-project", "us/repositories/us.gcr.io"),
        ("eu.gcr.io/example-project/trainer:1", "example-project", "europe/repositories/eu.gcr.io"),
        ("asia.gcr.io/example-project/trainer@sha256:0", "example-project", "asia/repositories/asia.gcr.io"),
        ("gcr.io/example.com/proj/trainer:1", "example.com:proj", "us/repositories/gcr.io"),
        ("us-east1-docker.pkg.dev/example.com/proj/repo/trainer:1", "example.com:proj", "us-east1/repositories/repo"),
        ("europe-docker.pkg.dev/example-project/repo/a/b:1", "example-project", "europe/repositories/repo"),
    ],
)
def test_the_repository_of_an_image_by_every_kind_of_address(image, project, path):
    found = repository_of(image)
    assert found is not None and found.path == f"projects/{project}/locations/{path}"


@pytest.mark.parametrize("image", ["docker.io/a/b:1", "ubuntu", "nvcr.io/nvidia/nemo:25.04", "", "gcr.io/x"])
def test_images_elsewhere_have_no_repository_of_googles(image):
    assert repository_of(image) is None


def test_nodes_pull_from_the_projects_container_registry():
    google = cloud()
    folder = "projects/example-project/locations/europe/repositories/eu.gcr.io"
    google.store[f"v1/{folder}"] = {"name": folder, "format": "DOCKER"}
    up(where(image="eu.gcr.io/example-project/trainer:1"), session(google), INSTALLED, workers=1)
    assert ("eu.gcr.io", "roles/artifactregistry.reader", "muster-nodes") in roles(google)


def test_an_image_of_another_project_is_said_with_the_command():
    words = []
    up(where(), session(cloud()), INSTALLED, workers=1, progress=words.append)
    (said,) = [one.text for one in words if isinstance(one, Said) and "another project" in one.text]
    assert "add-iam-policy-binding muster --project=example --location=us-central1" in said and NODES in said
