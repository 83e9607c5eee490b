"""Who nodes and builds are: service accounts of their own, with the least roles, in place of the project's default.

The default account has no roles in organisations that were made after May 2024: nodes could not pull the run's image,
and builds could neither read their files nor write the image.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from muster.backends.gke.google.http import Call
from muster.backends.gke.google.session import Session
from muster.backends.gke.provision.inventory.policies import (
    Grant,
    Policy,
    of_bucket,
    of_project,
    of_repository,
)
from muster.backends.gke.provision.inventory.resource_names import Site
from muster.backends.gke.provision.inventory.resources import MARK, Found, Resource, RestResource
from muster.core.typed_json import JsonObject

NODE_ROLE = "roles/container.defaultNodeServiceAccount"
"""Logs, metrics and what else GKE's own parts on a node need."""
PULLS = "roles/artifactregistry.reader"
PUSHES = "roles/artifactregistry.writer"
LOGS = "roles/logging.logWriter"
READS = "roles/storage.objectViewer"
NODE_GRANTS = ("grants/nodes", "grants/nodes-images", "grants/nodes-image")


@dataclass(frozen=True, kw_only=True)
class AccountGrant(Grant):
    """A role of one of our accounts. Those of an account that somebody else made are theirs: neither given nor taken,
    nor looked at, since who may not give them may not see them either."""

    account: RestResource
    email: str

    def member(self, session: Session) -> str:
        return self.shown_member()

    def shown_member(self) -> str:
        return f"serviceAccount:{self.email}"

    def look(self, session: Session) -> Found:
        account = self.account.look(session)
        if account.state == "absent":
            return account
        return super().look(session) if account.ours else Found(state="there", ours=False)


def accounts(site: Site) -> list[Resource]:
    """The accounts that the run file does not name itself, with their roles on the project."""
    result: list[Resource] = []
    if site.makes_node_account:
        nodes = _account(site, site.node_account, "nodes of Muster's clusters")
        result += [nodes, _grant(site, nodes, "nodes", site.node_account, of_project(site.project), NODE_ROLE)]
    if site.makes_build_account:
        builds = _account(site, site.build_account, "image builds of Muster")
        result += [builds, _grant(site, builds, "build", site.build_account, of_project(site.project), LOGS)]
    return result


def image_grants(site: Site) -> list[Resource]:
    """Nodes pull from the run's repository and ours; builds push to ours, and read their files from the bucket."""
    result: list[Resource] = []
    own = site.repository
    if site.makes_node_account:
        nodes = _account(site, site.node_account, "")
        for key, path in {"nodes-images": own, "nodes-image": image_repository(site)}.items():
            if path and (key == "nodes-images" or path != own):
                needs = (f"repositories/{site.prefix}",) if path == own else ()
                result.append(_grant(site, nodes, key, site.node_account, of_repository(path), PULLS, needs))
    if site.makes_build_account:
        builds, repository = _account(site, site.build_account, ""), (f"repositories/{site.prefix}",)
        result.append(_grant(site, builds, "build-images", site.build_account, of_repository(own), PUSHES, repository))
        for name in site.buckets[:1]:
            needs = (f"buckets/{name}",)
            result.append(_grant(site, builds, "build-files", site.build_account, of_bucket(name), READS, needs))
    return result


def image_repository(site: Site) -> str | None:
    """The repository of the run's image where it is the project's own; None: elsewhere, and not ours to open."""
    image = site.placement.spec.resources.image or ""
    named = re.match(r"([a-z0-9-]+)-docker\.pkg\.dev/([^/]+)/([^/]+)/", image)
    if named is None or named[2] != site.project:
        return None
    return f"projects/{named[2]}/locations/{named[1]}/repositories/{named[3]}"


def image_elsewhere(site: Site) -> str | None:
    """What somebody has to do so that the nodes may pull an image of another project; None: nothing."""
    image = site.placement.spec.resources.image or ""
    named = re.match(r"([a-z0-9-]+)-docker\.pkg\.dev/([^/]+)/([^/]+)/", image)
    if named is None or named[2] == site.project:
        return None
    return (
        f"{image} is another project's: unless everybody may pull it, gcloud artifacts repositories "
        f"add-iam-policy-binding {named[3]} --project={named[2]} --location={named[1]} "
        f"--member=serviceAccount:{site.node_account} --role={PULLS}"
    )


def commands(site: Site) -> list[str]:
    """What somebody who may grant runs once, for those who may not: ``up`` then uses the accounts as they are."""
    made = [
        (site.makes_node_account, site.node_account, (NODE_ROLE, PULLS)),
        (site.makes_build_account, site.build_account, (LOGS, PUSHES, READS)),
    ]
    lines = []
    for needed, email, roles in made:
        if needed:
            lines.append(f"gcloud iam service-accounts create {email.partition('@')[0]} --project={site.project}")
            lines += [
                f"gcloud projects add-iam-policy-binding {site.project} --member=serviceAccount:{email} --role={role}"
                for role in roles
            ]
    return lines


def _account(site: Site, email: str, shown: str) -> RestResource:
    folder = f"https://iam.googleapis.com/v1/projects/{site.project}/serviceAccounts"
    name = email.partition("@")[0]
    body: JsonObject = {"accountId": name, "serviceAccount": {"displayName": shown, "description": MARK}}
    return RestResource(
        key=f"serviceAccounts/{name}",
        url=f"{folder}/{email}",
        create=Call(method="POST", url=folder, body=body),
        owner=("description",),
        needs=("services",),
        foreign="use",
    )


def _grant(
    site: Site, account: RestResource, key: str, email: str, policy: Policy, role: str, needs: tuple[str, ...] = ()
) -> AccountGrant:
    return AccountGrant(
        key=f"grants/{key}", needs=(account.key, *needs), account=account, email=email, policy=policy, role=role
    )
