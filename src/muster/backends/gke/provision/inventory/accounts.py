"""Who nodes and builds are: service accounts of their own, with the least roles, in place of the project's default.

The default account has no roles in organisations that were made after May 2024: nodes could not pull the run's image,
and builds could neither read their files nor write the image.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from muster.backends.gke.provision.inventory.resource_names import Site
from muster.backends.google.http import Call
from muster.backends.google.project.access import account_grant, service_account
from muster.backends.google.project.policies import (
    IMAGES,
    of_bucket,
    of_project,
    of_repository,
)
from muster.backends.google.project.resources import Resource, last_word
from muster.backends.google.session import Session
from muster.core.typed_json import JsonObject, children, text

NODE_ROLE = "roles/container.defaultNodeServiceAccount"
"""Logs, metrics and what else GKE's own parts on a node need."""
PULLS = "roles/artifactregistry.reader"
PUSHES = "roles/artifactregistry.writer"
LOGS = "roles/logging.logWriter"
READS = "roles/storage.objectViewer"
ACTS = "roles/iam.serviceAccountUser"
OLDER_HOSTS = {"gcr.io": "us", "us.gcr.io": "us", "eu.gcr.io": "europe", "asia.gcr.io": "asia"}
"""Container Registry's hosts -> the location of the repository of that name, which serves them since."""
NODE_GRANTS = ("grants/nodes", "grants/nodes-images", "grants/nodes-image")
BUILD_GRANTS = ("grants/build", "grants/build-images")


def accounts(site: Site) -> list[Resource]:
    """The accounts that the run file does not name itself, with their roles on the project."""
    result: list[Resource] = []
    if site.makes_node_account:
        nodes = service_account(site.project, site.node_account, "nodes of Muster's clusters")
        result += [nodes, account_grant(nodes, "nodes", site.node_account, of_project(site.project), NODE_ROLE)]
    if site.makes_build_account:
        builds = service_account(site.project, site.build_account, "image builds of Muster")
        result += [builds, account_grant(builds, "build", site.build_account, of_project(site.project), LOGS)]
    return result


def image_grants(site: Site) -> list[Resource]:
    """Nodes pull from the run's repository and ours; builds push to ours, and read their files from the bucket."""
    result: list[Resource] = []
    own = site.repository
    if site.makes_node_account:
        nodes = service_account(site.project, site.node_account, "")
        for key, path in {"nodes-images": own, "nodes-image": image_repository(site)}.items():
            if path and (key == "nodes-images" or path != own):
                needs = (f"repositories/{site.prefix}",) if path == own else ()
                result.append(account_grant(nodes, key, site.node_account, of_repository(path), PULLS, needs))
    if site.makes_build_account:
        builds, repository = service_account(site.project, site.build_account, ""), (f"repositories/{site.prefix}",)
        result.append(account_grant(builds, "build-images", site.build_account, of_repository(own), PUSHES, repository))
        for name in site.buckets[:1]:
            needs = (f"buckets/{name}",)
            result.append(account_grant(builds, "build-files", site.build_account, of_bucket(name), READS, needs))
    return result


@dataclass(frozen=True)
class Repository:
    """Where Artifact Registry has an image."""

    project: str
    location: str
    name: str

    @property
    def path(self) -> str:
        return f"projects/{self.project}/locations/{self.location}/repositories/{self.name}"


def repository_of(image: str) -> Repository | None:
    """The repository that serves ``image``; None: no registry of Google's. A domain-scoped project (``DOMAIN:NAME``) is
    two words of the address."""
    host, _, rest = image.partition("/")
    project, words = rest.partition("/")[0], rest.split("/")
    if "." in project:
        project, words = ":".join(words[:2]), words[1:]
    if host in OLDER_HOSTS and len(words) > 1:
        return Repository(project, OLDER_HOSTS[host], host)
    if host.endswith("-docker.pkg.dev") and len(words) > 2:
        return Repository(project, host.removesuffix("-docker.pkg.dev"), words[1])
    return None


def image_repository(site: Site) -> str | None:
    """The repository of the run's image where it is the project's own; None: elsewhere, and not ours to open."""
    place = repository_of(site.placement.spec.resources.image or "")
    return place.path if place is not None and place.project == site.project else None


def image_elsewhere(site: Site) -> str | None:
    """What the user has to do so that the nodes may pull an image of another project; None: nothing."""
    image = site.placement.spec.resources.image or ""
    place = repository_of(image)
    if place is None or place.project == site.project:
        return None
    return (
        f"{image} is another project's: unless everybody may pull it, gcloud artifacts repositories "
        f"add-iam-policy-binding {place.name} --project={place.project} --location={place.location} "
        f"--member=serviceAccount:{site.node_account} --role={PULLS}"
    )


def grants_elsewhere(site: Site, session: Session) -> list[Resource]:
    """Reader roles that our node account has on other Docker repositories of the project, whichever run file's image
    they were for. A list that is refused is not looked at."""
    nodes = service_account(site.project, site.node_account, "")
    if not site.makes_node_account or not (found := nodes.look(session)).ours or found.state == "absent":
        return []
    result: list[Resource] = []
    known = {site.repository, image_repository(site)}
    url = f"{IMAGES}/projects/{site.project}/locations"
    for place in _rows(session, url, "locations"):
        for row in _rows(session, f"{url}/{text(place, 'locationId')}/repositories", "repositories"):
            path = text(row, "name")
            if text(row, "format") == "DOCKER" and path not in known:
                key = f"nodes-image/{text(place, 'locationId')}/{last_word(path)}"
                grant = account_grant(nodes, key, site.node_account, of_repository(path), PULLS)
                result += [grant] if grant.look(session).state == "there" else []
    return result


def _rows(session: Session, url: str, field: str) -> Iterator[JsonObject]:
    token = ""
    while True:
        reply = session.send(Call(method="GET", url=f"{url}?pageToken={token}" if token else url))
        if reply.status >= 300:
            return
        yield from children(reply.body, field)
        token = text(reply.body, "nextPageToken")
        if not token:
            return


def commands(site: Site) -> list[str]:
    """What an administrator runs once for users who may not grant: ``up`` then uses the accounts as they are."""
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
    return [*lines, *acting_commands(site)]


def acting_commands(site: Site) -> list[str]:
    """What lets one person make nodes and builds that run as the accounts."""
    return [
        f"gcloud iam service-accounts add-iam-policy-binding {email} --member=user:YOU@EXAMPLE.COM --role={ACTS}"
        for email in dict.fromkeys((site.node_account, site.build_account))
    ]
