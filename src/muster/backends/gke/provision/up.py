"""``up`` and ``down`` for one run file: the list of resources, and what is done with it."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from muster.backends.cluster import Began, Down, Leftover, Planned, Progress, Said, silent
from muster.backends.gke.manifests.kueue_objects import account_objects, queue_objects
from muster.backends.gke.manifests.render import network_objects
from muster.backends.gke.provision.access import check_zone, preflight, preflight_calls, services
from muster.backends.gke.provision.cluster_objects import Objects
from muster.backends.gke.provision.inventory.accounts import (
    BUILD_GRANTS,
    NODE_GRANTS,
    accounts,
    grants_elsewhere,
    image_elsewhere,
    image_grants,
)
from muster.backends.gke.provision.inventory.clusters import clusters
from muster.backends.gke.provision.inventory.resource_names import Site
from muster.backends.gke.provision.quota import check_quotas, quota_calls
from muster.backends.gke.provision.software import Manifest, Software, software
from muster.backends.google.http import Call
from muster.backends.google.project.buckets import Bucket, bucket
from muster.backends.google.project.networks import networks
from muster.backends.google.project.policies import PROJECTS, Grant, of_bucket, of_project
from muster.backends.google.project.reconcile import ensure, remove, survey
from muster.backends.google.project.resources import LABEL, MARK, NeedGone, Resource, RestResource, last_word
from muster.backends.google.session import Session, twice
from muster.backends.machine_prices import machine_usd_per_hour
from muster.backends.protocols import Lease
from muster.catalog import gke as catalogue
from muster.core.errors import BackendError, CapacityError, UsageError
from muster.core.typed_json import JsonObject, child, children, text, texts, whole

SHARED_BY_REGIONS = ("networks/", "firewalls/", "buckets/", "serviceAccounts/", "grants/")
"""Of several places they go last."""
BILLING = ("clusters", "disks", "instances", "addresses", "routers", "buckets", "repositories")
"""Kinds that cost money while they exist; networks, subnets, firewall rules and empty groups do not."""
DAYS_A_MONTH = 730 / 24
ROLE = "roles/storage.objectUser"


def resources(site: Site, installed: Software | None) -> list[Resource]:
    """Everything for the run file, in an order that satisfies each one's needs. ``installed`` None: without objects."""
    result: list[Resource] = [services(site), *accounts(site), *networks(site), *storage(site)]
    result += [*image_grants(site), *clusters(site)]
    return result if installed is None else [*result, *_objects(site, installed)]


def planned(result: Sequence[Resource]) -> tuple[Planned, ...]:
    """The same as those who watch know it."""
    return tuple(
        Planned(
            key=resource.key,
            needs=resource.needs,
            bills=resource.bills if resource.runs_up else None,
            usd_per_hour=resource.usd_per_hour,
        )
        for resource in result
    )


def requests(site: Site, installed: Software) -> list[Call]:
    """Every request that makes something, and the questions before: a dry run. Pure."""
    calls = preflight_calls(site)
    calls += quota_calls(site)
    for resource in resources(site, installed):
        calls += resource.requests()
    return calls


def up(site: Site, session: Session, installed: Software, *, workers: int = 8, progress: Progress = silent) -> Lease:
    """Make what is missing and return it; run again after any interruption, it goes on where it was.

    Raises:
        AccessError: billing, credentials or permissions, before anything is made.
        ConflictError: a cluster or network that Muster did not create has the name.
        CapacityError: no quota or no machines.
    """
    progress(Said(text=f"{site.project}: billing and permissions"))
    preflight(site, session)
    if elsewhere := image_elsewhere(site):
        progress(Said(text=elsewhere))
    on = services(site)
    requested = [resource for resource in resources(site, installed) if resource.key != on.key]
    progress(Began(title=f"making what is missing in {site.zone}", making=True, nodes=planned([on, *requested])))
    lacking = survey(resources(site, None), session, adopt=site.adopt, progress=progress)
    ensure([on], session, progress=progress)
    if lacking & {resource.key for resource in clusters(site)}:
        # Nodes that are there are not lost to a quota that has become smaller since.
        check_zone(site, session)
        check_quotas(site, session, lacking)
    for again in (True, True, False):
        try:
            ensure(requested, session, adopt=site.adopt, workers=workers, progress=progress)
            break
        except NeedGone as error:
            if not again:
                raise
            progress(Said(text=f"{error}; looking again at everything"))
            session.clock.sleep(5.0)
    return Lease(
        run_id=site.cluster, resources=tuple(resource.key for resource in requested), labels={"managed-by": "muster"}
    )


def up_first(
    sites: Sequence[Site],
    session: Session,
    texts: Mapping[str, str],
    *,
    pins: Mapping[str, str],
    token: str | None = None,
    workers: int = 8,
    progress: Progress = silent,
) -> tuple[Site, Lease]:
    """``up`` at the first place that has room; one place at a time, and nothing of a place without room stays.

    Where an earlier ``up`` was interrupted, its place comes first: another one would leave a half-made cluster behind.

    Raises:
        CapacityError: no place had room; the last one's words.
    """
    sites = _from_where_it_was(sites, session)
    for number, where in enumerate(sites):
        installed = software(where, texts, pins=pins, hugging_face_token=token)
        try:
            return where, up(where, session, installed, workers=workers, progress=progress)
        except CapacityError as error:
            if number == len(sites) - 1:
                raise
            progress(Said(text=f"no room in {where.zone}: {error}"))
            withdraw(where, sites[number + 1], session, workers=workers, progress=progress)
    raise UsageError("no place to try", hint="resources.locations: [us-central1-b]")


def withdraw(where: Site, following: Site, session: Session, *, workers: int = 8, progress: Progress = silent) -> None:
    """Remove what was made at ``where`` and is of no use to the place that is tried next.

    Raises:
        BackendError: something could not be removed.
    """
    useful = {resource.key: resource.requests() for resource in resources(following, None)}
    shared = _used_by_others(where, session)
    result = [*resources(where, None), *(_queue_of_its_own(where) if shared else [])]
    progress(Began(title=f"clearing {where.zone}", making=False, nodes=planned(result)))

    def keep(resource: Resource) -> bool:
        useful_there = useful.get(resource.key) == resource.requests()
        return useful_there or resource.key in shared or isinstance(resource, (Bucket, Binding))

    if troubles := remove(result, session, keep=keep, workers=workers, progress=progress):
        raise BackendError(f"{where.zone} cannot be cleared: " + "; ".join(troubles), hint="muster down RUN.yaml")


def _from_where_it_was(sites: Sequence[Site], session: Session) -> list[Site]:
    """The places from the one on where this run file was begun; then those before it."""
    several = enumerate(sites) if len(sites) > 1 else ()
    begun = next((number for number, where in several if _begun(where, session)), 0)
    return [*sites[begun:], *sites[:begun]]


def _begun(where: Site, session: Session) -> bool:
    """Whether an earlier ``up`` made something here: the pool, the cluster, or before it the region's subnet.

    Networks span regions, and one of another place is no sign; but a data network that is tied to another zone is one
    against this place.
    """
    result = networks(where)
    if any(resource.look(session).differences for resource in result if resource.key.startswith("networks/")):
        return False
    cluster, *pools = [resource.look(session) for resource in clusters(where)]
    if any(pool.state != "absent" and pool.body.get("locations") == [where.zone] for pool in pools):
        return True
    if cluster.state == "absent":
        subnet = next(resource for resource in result if resource.key == f"subnetworks/{where.prefix}-sub").look(
            session
        )
        return subnet.state != "absent" and subnet.ours
    return cluster.ours and not _pools_of_others(where, session)


def _pools_of_others(where: Site, session: Session) -> list[JsonObject]:
    """Node pools of the cluster that this run file did not make."""
    reply = session.find(Call(method="GET", url=f"{where.container}/clusters/{where.cluster}/nodePools"))
    rows = children(reply.body, "nodePools") if reply else []
    return [row for row in rows if text(row, "name") not in (*where.pools, where.placement.options.supervisor_pool)]


def _used_by_others(where: Site, session: Session) -> set[str]:
    """What other run files' node pools depend on: the cluster, its networks and theirs. Empty without such pools."""
    others = _pools_of_others(where, session)
    if not others:
        return set()
    cluster, main = f"clusters/{where.cluster}", f"{where.prefix}-net"
    prefix = where.prefix
    result = {cluster, f"networks/{main}", f"subnetworks/{prefix}-sub", f"routers/{prefix}-router"}
    result |= {f"repositories/{prefix}", *(one.key for one in [*accounts(where), *image_grants(where)])}
    for row in others:
        for data in children(row, "networkConfig", "additionalNodeNetworkConfigs"):
            network, subnet = last_word(text(data, "network")), last_word(text(data, "subnetwork"))
            result |= {f"networks/{network}", f"subnetworks/{subnet}", f"firewalls/{network}-internal"}
    return result


def down(
    sites: Sequence[Site], session: Session, *, keep_data: bool = False, workers: int = 8, progress: Progress = silent
) -> Down:
    """Remove everything of ours in order at every place, then look at the project for what still exists.

    Networks span regions, so they go last.
    """
    kept = {f"buckets/{name}" for site in sites for name in site.buckets} if keep_data else set()
    kept |= (shared := _accounts_of_others(sites, session))
    elsewhere = [] if shared else grants_elsewhere(sites[0], session)
    for site in sites[:-1]:

        def keep(resource: Resource) -> bool:
            return resource.key in kept or resource.key.startswith(SHARED_BY_REGIONS)

        progress(
            Began(title=f"removing in {site.zone}", making=False, nodes=planned(result := _everything(site, session)))
        )
        remove(result, session, keep=keep, workers=workers, progress=progress)
    troubles: dict[str, None] = {}
    leftovers: dict[Leftover, None] = {}
    for site in reversed(sites):
        result = [*_everything(site, session), *elsewhere]
        progress(Began(title=f"removing in {site.zone}", making=False, nodes=planned(result)))
        gone = remove(result, session, keep=lambda resource: resource.key in kept, workers=workers, progress=progress)
        troubles |= dict.fromkeys(gone)
    progress(Said(text=f"looking at project {sites[0].project} for what is left"))
    for site in sites:
        leftovers |= dict.fromkeys(audit(site, session, kept=kept))
    return Down(troubles=tuple(troubles), leftovers=tuple(leftovers))


def _accounts_of_others(sites: Sequence[Site], session: Session) -> set[str]:
    """Keys of our accounts and their roles where another cluster of the project has nodes that run as it."""
    first, own = sites[0], {(site.region, site.cluster) for site in sites}
    reply = session.find(Call(method="GET", url=f"{first.container.rpartition('/')[0]}/-/clusters"))
    for cluster in children(reply.body, "clusters") if reply else []:
        if (text(cluster, "location"), text(cluster, "name")) in own:
            continue
        if any(text(pool, "config", "serviceAccount") == first.node_account for pool in children(cluster, "nodePools")):
            # Whose nodes run as ours builds its images as ours, too.
            emails = (first.node_account, first.build_account)
            return {*(f"serviceAccounts/{email.partition('@')[0]}" for email in emails), *NODE_GRANTS, *BUILD_GRANTS}
    return set()


def _everything(site: Site, session: Session) -> list[Resource]:
    return [*resources(site, None), *_objects_on_an_adopted_cluster(site, session)]


def _objects_on_an_adopted_cluster(site: Site, session: Session) -> list[Resource]:
    """Ours go one by one where the cluster stays; what was installed on it (Kueue, JobSet) may be in others' use."""
    cluster = clusters(site)[0].look(session)
    if cluster.state == "absent" or cluster.ours:
        return []
    ours = _objects(site, Software(documents={}, hugging_face_token="any"))
    return [replace(resource, removed_with_cluster=False) for resource in ours]


def _queue_of_its_own(site: Site) -> list[Resource]:
    """The objects of a cluster that stays which are named after this pool, and no other's."""
    names = (site.placement.queue_objects, site.placement.queue)
    requested = [resource for resource in _objects(site, Software(documents={})) if resource.key == "objects/queue"]
    return [
        replace(
            resource,
            manifests=tuple(row for row in resource.manifests if text(row, "metadata", "name") in names),
            removed_with_cluster=False,
        )
        for resource in requested
    ]


def _objects(site: Site, installed: Software) -> list[Objects]:
    placement, cluster = site.placement, f"clusters/{site.cluster}"
    result = []
    names = []
    for name, documents in installed.documents.items():
        key = f"software/{name.removesuffix('.yaml')}"
        names.append(key)
        result.append(Objects(site=site, key=key, needs=(cluster,), manifests=documents))
    account = Objects(
        site=site, key="objects/account", needs=(cluster,), manifests=(*_namespace(site), *account_objects(placement))
    )
    result.append(account)
    if data := network_objects(placement):
        result.append(Objects(site=site, key="objects/networks", needs=(cluster,), manifests=tuple(data)))
    if placement.kueue:
        queue = tuple(queue_objects(placement))
        result.append(Objects(site=site, key="objects/queue", needs=(*names, account.key), manifests=queue))
    if installed.hugging_face_token:
        result.append(
            Objects(
                site=site,
                key="objects/hugging-face",
                needs=(account.key,),
                manifests=(_secret(site, installed.hugging_face_token),),
                secret=True,
            )
        )
    return result


def _namespace(site: Site) -> list[Manifest]:
    name = site.placement.options.namespace
    return [] if name == "default" else [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}]


def _secret(site: Site, token: str) -> Manifest:
    options = site.placement.options
    metadata = {"name": options.hugging_face_secret, "namespace": options.namespace}
    data = {"token": base64.b64encode(token.encode()).decode()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "data": data}


# ----------------
# What of ours still exists in the project after ``down``: by label, by our mark, and by the cluster's own label


def audit(site: Site, session: Session, *, kept: set[str]) -> list[Leftover]:
    """Everything of ours that a list of the project shows; asks the services, changes nothing. ``kept``: keys of what
    stays on purpose."""
    listed = itertools.chain(_of_compute(site, session), _of_others(site, session), _of_identities(site, session))
    rows = {(kind, last_word(row["name"])): row for kind, row in listed}
    return [
        Leftover(
            kind=kind,
            name=name,
            bills=_billed_for(kind, rows[kind, name]),
            kept=f"{kind}/{name}" in kept,
            usd_per_day=_usd_per_day(kind, rows[kind, name]),
        )
        for kind, name in sorted(rows)
    ]


def _billed_for(kind: str, row: JsonObject) -> str | None:
    if kind not in BILLING:
        return None
    if kind == "disks":
        return f"{row.get('sizeGb', '?')} GB of {last_word(row.get('type', 'disk'))}"
    if kind == "instances":
        return f"a {last_word(row.get('machineType', 'machine'))} ({row.get('status', 'in an unknown state')})"
    return catalogue.leftovers()[kind].how


def _usd_per_day(kind: str, row: JsonObject) -> float | None:
    if kind not in BILLING:
        return None
    prices = catalogue.leftovers()[kind]
    if kind == "disks":
        price = prices.usd_per_gb_month.get(last_word(row.get("type", "")))
        return price * whole(row, "sizeGb") / DAYS_A_MONTH if price and "sizeGb" in row else None
    if kind == "instances":
        return _machine_usd_per_day(row)
    return prices.usd_per_day


def _machine_usd_per_day(row: JsonObject) -> float | None:
    model = text(row, "scheduling", "provisioningModel")
    mode = {"SPOT": "spot", "FLEX_START": "flex_start", "RESERVATION_BOUND": "reservation"}.get(model, "on_demand")
    region = last_word(row.get("zone", "")).rpartition("-")[0]
    usd = machine_usd_per_hour(last_word(row.get("machineType", "")), mode, region)
    return None if usd is None else 24 * usd


def _of_compute(site: Site, session: Session) -> Iterator[tuple[str, JsonObject]]:
    for kind in ("networks", "firewalls"):
        for row in _pages(session, f"{site.compute}/global/{kind}", "items"):
            if row.get("description") == MARK and str(row.get("name", "")).startswith(f"{site.prefix}-"):
                yield kind, row
    for kind in ("subnetworks", "routers", "disks", "instances", "addresses", "instanceGroupManagers"):
        for place in _pages(session, f"{site.compute}/aggregated/{kind}", "items"):
            yield from ((kind, row) for row in children(place, kind) if _ours(row, site))


def _of_others(site: Site, session: Session) -> Iterator[tuple[str, JsonObject]]:
    everywhere = site.container.rpartition("/")[0] + "/-"
    for row in _pages(session, f"{everywhere}/clusters", "clusters"):
        if text(row, "resourceLabels", "managed-by") == LABEL["managed-by"] and text(row, "name") == site.cluster:
            yield "clusters", row
    for row in _pages(session, f"https://storage.googleapis.com/storage/v1/b?project={site.project}", "items"):
        if text(row, "labels", "managed-by") == LABEL["managed-by"] and text(row, "name") in site.buckets:
            yield "buckets", row
    folder = f"https://artifactregistry.googleapis.com/v1/projects/{site.project}/locations/{site.region}"
    for row in _pages(session, f"{folder}/repositories", "repositories"):
        if text(row, "labels", "managed-by") == LABEL["managed-by"] and last_word(text(row, "name")) == site.prefix:
            yield "repositories", row


def _of_identities(site: Site, session: Session) -> Iterator[tuple[str, JsonObject]]:
    """Our accounts, and roles on the project that one of ours has or had. Roles of an account that ``up`` did not make
    are left alone; a policy that may not be read is not looked at."""
    made = {"nodes": site.node_account, "build": site.build_account}
    url = f"https://iam.googleapis.com/v1/projects/{site.project}/serviceAccounts"
    there = {text(row, "email"): row.get("description") for row in _pages(session, url, "accounts")}
    reply = twice(lambda: session.send(of_project(site.project).read))
    rows = children(reply.body, "bindings") if reply.status < 300 else []
    for use, email in made.items():
        if there.get(email) == MARK:
            yield "serviceAccounts", {"name": email.partition("@")[0]}
        if there.get(email, MARK) == MARK and any(email in one for row in rows for one in texts(row, "members")):
            yield "grants", {"name": use}


def _ours(row: JsonObject, site: Site) -> bool:
    """Our mark, our cluster's label (disks and addresses that GKE made), or GKE's naming of nodes."""
    labels = row.get("labels", {})
    name = str(row.get("name", ""))
    return (
        (row.get("description") == MARK and name.startswith(f"{site.prefix}-"))
        or text(labels, "goog-k8s-cluster-name") == site.cluster
        or name.startswith(f"gke-{site.cluster}-")
    )


def _pages(session: Session, url: str, field: str) -> Iterator[JsonObject]:
    """Rows of a list; of an aggregated one, which is a mapping, its places."""
    token, joint = "", "&" if "?" in url else "?"
    while reply := session.find(Call(method="GET", url=f"{url}{joint}pageToken={token}" if token else url)):
        yield from children(reply.body, field)
        yield from (child(place) for place in child(reply.body, field).values())
        token = str(reply.body.get("nextPageToken", ""))
        if not token:
            return


def storage(site: Site) -> list[Resource]:
    """Every bucket of the run file with its binding, and a repository for images."""
    result: list[Resource] = [_repository(site)]
    for name in site.buckets:
        # The workload pool comes into being with the first cluster of the project that has one.
        needs = (f"buckets/{name}", f"clusters/{site.cluster}")
        binding = Binding(key=f"bindings/{name}", needs=needs, policy=of_bucket(name), role=ROLE, site=site)
        result += [bucket(site.project, site.region, name), binding]
    return result


def _repository(site: Site) -> RestResource:
    folder = f"https://artifactregistry.googleapis.com/v1/projects/{site.project}/locations/{site.region}"
    body: JsonObject = {"format": "DOCKER", "description": "made by muster", "labels": LABEL}
    return RestResource(
        key=f"repositories/{site.prefix}",
        url=f"{folder}/repositories/{site.prefix}",
        create=Call(method="POST", url=f"{folder}/repositories?repositoryId={site.prefix}", body=body),
        owner=("labels", "managed-by"),
        compared={"format": "DOCKER"},
        needs=("services",),
        operations=f"{folder}/operations",
        bills="the bytes of its images",
    )


@dataclass(frozen=True, kw_only=True)
class Binding(Grant):
    """The pods' identity may read and write the bucket's objects: by principal, no Google service account."""

    site: Site

    def member(self, session: Session) -> str:
        url = f"{PROJECTS}/{self.site.project}"
        return principal(self.site, str(session.ok(Call(method="GET", url=url)).body["projectNumber"]))

    def shown_member(self) -> str:
        return principal(self.site, "PROJECT_NUMBER")


def principal(site: Site, project_number: str) -> str:
    """The Kubernetes service account as IAM names it (Workload Identity Federation)."""
    pool = f"projects/{project_number}/locations/global/workloadIdentityPools/{site.project}.svc.id.goog"
    options = site.placement.options
    return f"principal://iam.googleapis.com/{pool}/subject/ns/{options.namespace}/sa/{options.service_account}"
