"""The fake cloud's smaller services: builds, quotas, machine types, policies, and the rules of node pools."""

from __future__ import annotations

import json
import math
import re
import urllib.parse
from collections.abc import Callable
from typing import Any

from fakes.discovery import Match

from muster.backends.google.http import Call, Reply


def quota(google: Any, match: Match, query: dict[str, str]) -> Reply:
    """What the project may have of it."""
    name = match.path["consumerQuotaMetricsId"].removeprefix("compute.googleapis.com%2F")
    if name not in google.quotas:
        return error(404, "NOT_FOUND")
    rows = [{"dimensions": dict(where), "effectiveLimit": str(limit)} for where, limit in google.quotas[name].items()]
    return Reply(status=200, body={"metric": name, "consumerQuotaLimits": [{"quotaBuckets": rows}]})


OF_THE_PROJECT = ("GPUS_ALL_REGIONS", "NETWORKS", "SUBNETWORKS", "FIREWALLS")


def limits(google: Any, match: Match, query: dict[str, str]) -> Reply:
    """A region's or the project's table of quotas; each metric is in one of them."""
    if "compute.googleapis.com" not in google.enabled:
        return error(403, "SERVICE_DISABLED")
    of_project = match.id == "compute.projects.get"
    rows = [
        {"metric": name, "limit": float(limit), "usage": float(used)}
        for name, (limit, used) in google.limits.items()
        if (name in OF_THE_PROJECT) == of_project
    ]
    return Reply(status=200, body={"name": "here", "quotas": rows})


def machine_type(google: Any, match: Match, query: dict[str, str]) -> Reply:
    """Every zone has every machine but those of ``google.lacking``; the list is one of a single name."""
    if match.verb == "get":
        name, zone = match.path["machineType"], match.path["zone"]
        lacking = name in google.lacking.get(zone, ()) or zone not in google.zones
        return error(404, "notFound") if lacking else Reply(status=200, body={"name": name})
    name = query["filter"].removeprefix("name=")
    items = {
        f"zones/{zone}": {"machineTypes": [{"name": name}]}
        if name not in google.lacking.get(zone, ())
        else {"warning": {"code": "NO_RESULTS_ON_PAGE"}}
        for zone in google.zones
    }
    return Reply(status=200, body={"items": items})


def places(google: Any, match: Match, query: dict[str, str]) -> Reply:
    """Where Artifact Registry may have repositories; in truth some fifty."""
    names = ("asia", "europe", "europe-west1", "us", "us-central1")
    return Reply(status=200, body={"locations": [{"locationId": one} for one in names]})


BY_ID: dict[str, Callable[[Any, Match, dict[str, str]], Reply]] = {
    "serviceusage.services.consumerQuotaMetrics.get": quota,
    "compute.regions.get": limits,
    "compute.projects.get": limits,
    "compute.machineTypes.get": machine_type,
    "artifactregistry.projects.locations.list": places,
    "compute.machineTypes.aggregatedList": machine_type,
}


def policy(google: Any, match: Match, call: Call) -> Reply:
    """Who may do what with a bucket, a repository or the project, written back under its etag."""
    if match.verb == "testIamPermissions":
        return may_act(google, match, call)
    path = urllib.parse.urlsplit(call.url).path.lstrip("/").partition(":")[0].removesuffix("/iam")
    of_project = path.count("/") == 2 and path.startswith("v1/projects/")
    if not of_project and path not in google.store:
        return error(404, "notFound")
    if of_project and f"resourcemanager.projects.{match.verb}" in google.denied:
        return error(403, "PERMISSION_DENIED")
    found = google.policies.setdefault(path, {"bindings": [], "etag": "1"})
    if match.verb == "setIamPolicy":
        assert call.body is not None
        asked = call.body if call.method == "PUT" else call.body["policy"]
        if asked.get("etag") != found["etag"]:
            return error(412, "conditionNotMet") if call.method == "PUT" else error(409, "ABORTED")
        if trouble := identity(google, asked["bindings"]):
            return error(400, "INVALID_ARGUMENT", trouble)
        google.policies[path] = found = {**asked, "etag": str(int(found["etag"]) + 1)}
    return Reply(status=200, body=found)


def identity(google: Any, body: Any) -> str | None:
    """The refusal of a request that names a service account which is not there, or not known yet."""
    for email in re.findall(r"[a-z0-9-]+@[a-z0-9.-]+\.iam\.gserviceaccount\.com", json.dumps(body)):
        there = any(path.endswith(f"/serviceAccounts/{email}") for path in google.store)
        if google.new.get(email, 0) > 0 or not there:
            google.new[email] = google.new.get(email, 0) - 1
            return f"Service account {email} does not exist."
    return None


def may_act(google: Any, match: Match, call: Call) -> Reply:
    """Which of the permissions the caller has on one service account: by a role on it, or on the project."""
    assert call.body is not None
    email = urllib.parse.urlsplit(call.url).path.rpartition("/")[2].partition(":")[0]
    if not any(path.endswith(f"/serviceAccounts/{email}") for path in google.store):
        return error(404, "NOT_FOUND")
    asked = call.body["permissions"]
    return Reply(
        status=200,
        body={"permissions": [one for one in asked if one not in google.denied or email in google.acts_as]},
    )


def create_account(google: Any, folder: str, body: dict[str, Any]) -> Reply:
    """An account with its address; other services learn of it a little later."""
    assert re.fullmatch(r"[a-z]([-a-z0-9]{4,28}[a-z0-9])", body["accountId"]), body["accountId"]
    email = f"{body['accountId']}@{folder.split('/')[2]}.iam.gserviceaccount.com"
    if f"{folder}/{email}" in google.store:
        return error(409, "alreadyExists")
    made = {**body["serviceAccount"], "email": email, "name": f"{folder.removeprefix('v1/')}/{email}"}
    google.store[f"{folder}/{email}"] = made
    google.creations.append(f"serviceAccounts/{email}")
    google.new[email] = google.new_for
    return Reply(status=200, body=made)


def role(google: Any, match: Match, path: str, call: Call) -> Reply:
    """A role of the project's own. A removed one is seen for a while, and its name stays taken: it can be undeleted."""
    body = call.body or {}
    if match.verb == "create":
        path = f"{path}/{body['roleId']}"
        if path in google.store:
            return error(409, "ALREADY_EXISTS", "a role with this id is there, or is marked as deleted")
        google.creations.append(f"roles/{body['roleId']}")
        google.store[path] = {**body["role"], "name": path.removeprefix("v1/")}
        return Reply(status=200, body=google.store[path])
    path = path.partition(":")[0]
    found = google.store.get(path) or google.removed_roles.get(path)
    if found is None:
        return error(404, "NOT_FOUND")
    if match.verb == "delete":
        google.removed_roles[path] = {**google.store.pop(path, found), "deleted": True}
        return Reply(status=200, body=google.removed_roles[path])
    if match.verb == "undelete" and path in google.removed_roles:
        google.store[path] = {key: value for key, value in google.removed_roles.pop(path).items() if key != "deleted"}
        google.creations.append(f"roles/{path.rpartition('/')[2]}")
        return Reply(status=200, body=google.store[path])
    assert match.verb == "get", match.id
    return Reply(status=200, body=found)


def forget(google: Any, path: str) -> None:
    """What is gone has no policy; an account that is gone stays in others' as what it was."""
    google.policies.pop(path, None)
    if "/serviceAccounts/" in path:
        member = f"serviceAccount:{path.rpartition('/')[2]}"
        for found in google.policies.values():
            for row in found["bindings"]:
                row["members"] = [f"deleted:{one}?uid=1" if one == member else one for one in row["members"]]


def build(google: Any, match: Match, query: dict[str, str], call: Call) -> Reply:
    """Uploads, builds (three looks and they are done) and the images they made."""
    if match.id.endswith(".upload"):
        assert call.data is not None and call.body is None
        google.uploads[query["name"]] = call.data
        return Reply(status=200, body={"name": query["name"]})
    if ".tags." in match.id:
        there = match.path["tagsId"] in {image.rpartition(":")[2] for image in google.images}
        return Reply(status=200, body={}) if there else error(404, "NOT_FOUND")
    if match.id.endswith("builds.list"):
        return Reply(status=200, body={"builds": list(google.builds.values())})
    if match.id.endswith("builds.create"):
        assert call.body is not None and call.body["source"]["storageSource"]["object"] in google.uploads
        if trouble := identity(google, call.body):
            return error(404, "NOT_FOUND", trouble)
        made = {
            **call.body,
            "id": f"build-{len(google.builds) + 1}",
            "status": "QUEUED",
            "looks": 3,
            "logUrl": "https://log",
        }
        google.builds[made["id"]] = made
        return Reply(status=200, body={"name": "operations/build", "metadata": {"build": made}})
    found: dict[str, Any] = google.builds[match.path["buildsId" if "buildsId" in match.path else "id"]]
    found["looks"] -= 1
    if found["looks"] <= 0:
        found["status"] = google.build_ends
        if google.build_ends == "SUCCESS":
            google.images |= set(found["images"])
    return Reply(status=200, body=found)


def begin_nodes(google: Any, match: Match, path: str, body: dict[str, Any]) -> None:
    """A pool's nodes are an instance group of Compute Engine's, which alone says how many they are; a cluster's
    networks have other names in the answer."""
    if match.id.endswith("clusters.create"):
        name_networks(path, body)
    if not match.id.endswith("nodePools.create"):
        return
    name, zone = path.rpartition("/")[2], body["locations"][0]
    folder = f"https://www.googleapis.com/compute/v1/projects/{path.split('/')[2]}/zones/{zone}"
    body["instanceGroupUrls"] = [f"{folder}/instanceGroupManagers/gke-{name}-grp"]
    google.sizes[name] = body.get("initialNodeCount", 0)


def name_networks(path: str, body: dict[str, Any]) -> None:
    """Of a cluster's network and subnet GKE answers the plain names; their paths are in ``networkConfig``."""
    folders = {"network": "global/networks", "subnetwork": f"regions/{path.split('/')[4]}/subnetworks"}
    names = {at: body.get(at, "default").rpartition("/")[2] for at in folders}
    paths = {at: f"projects/{path.split('/')[2]}/{folders[at]}/{name}" for at, name in names.items()}
    body |= names
    body["networkConfig"] = {**body.get("networkConfig", {}), **paths}


SIZES = ("nodePools.setSize", "nodePools.setAutoscaling", "clusters.update", "instanceGroupManagers.get")


def node_pool(google: Any, match: Match, path: str, call: Call) -> Reply:
    """Its size, asked for and changed, or the ranges of its cluster. A size that cannot be had leaves the pool in
    error, with the size asked for."""
    if match.verb == "get":
        name = match.path["instanceGroupManager"].removeprefix("gke-").removesuffix("-grp")
        pool = next((one for key, one in google.store.items() if key.endswith(f"/nodePools/{name}")), {})
        there = pool.get("status") != "ERROR" or name in google.partly
        actions = {"none" if there else "creating": google.sizes[name]}
        return Reply(status=200, body={"targetSize": google.sizes[name], "currentActions": actions})
    path = path.partition(":")[0]
    cluster, _, name = path.partition("/nodePools/")
    if path not in google.store or google.store.get(cluster, {}).get("status") != "RUNNING":
        return error(404, "notFound")
    if any(one.busy == cluster for one in google.operations.values()):
        google.advance(lambda one: one.busy == cluster)
        return error(400, "CLUSTER_ALREADY_HAS_OPERATION")
    pool, asked = google.store[path], call.body or {}
    trouble = google.fail.pop("resize", None)
    if match.verb == "setSize":
        google.sizes[name] = asked["nodeCount"]

    def finish(cancelled: bool = False) -> None:
        pool["status"] = "RUNNING_WITH_ERROR" if trouble else "RUNNING"
        if match.verb == "setAutoscaling":
            pool["autoscaling"] = asked["autoscaling"]
        elif match.verb == "update":
            pool["controlPlaneEndpointsConfig"] = asked["update"]["desiredControlPlaneEndpointsConfig"]

    pool["status"] = "RECONCILING"
    answer: Reply = google.begin(path.rpartition("/")[0], pool, finish, error=trouble, busy=cluster, api=match.api)
    answer.body["operationType"] = "SET_NODE_POOL_SIZE"
    return answer


def second_way_out(store: dict[str, dict[str, Any]], path: str, body: dict[str, Any]) -> str | None:
    """A subnet has one NAT: beside one for all subnets of the network and region, any other is refused."""
    folder, network = path.rpartition("/")[0], body["network"].rpartition("/")[2]
    for key, one in store.items():
        ways = [nat["sourceSubnetworkIpRangesToNat"] for nat in one.get("nats", [])]
        same = key.startswith(f"{folder}/") and one.get("network", "").rpartition("/")[2] == network
        if same and any(way.startswith("ALL_") for way in ways):
            return f"a NAT of {key} covers every subnetwork of {network}"
    return None


def management(store: dict[str, dict[str, Any]], match: Match, path: str, body: dict[str, Any]) -> str | None:
    """GKE's refusal of pools that do not upgrade or repair themselves on a cluster with a release channel.

    The words are those of a refusal that people met; flex-start's own instructions switch repair off: let by.
    """
    if match.id.endswith("clusters.create"):
        cluster, pools = body, body.get("nodePools", [])
    elif match.id.endswith("nodePools.create"):
        cluster, pools = store.get(path.rpartition("/nodePools/")[0], {}), [body]
    else:
        return None
    channel = cluster.get("releaseChannel", {}).get("channel", "UNSPECIFIED")
    for pool in pools if channel != "UNSPECIFIED" else []:
        rules = pool.get("management", {})
        wrong = [] if rules.get("autoUpgrade", True) else ["Auto_upgrade"]
        if not rules.get("autoRepair", True) and not pool["config"].get("flexStart"):
            wrong.append("auto_repair")
        if wrong:
            return f"{' and '.join(wrong)} cannot be false when release_channel {channel} is set."
    return None


def slice_pool(match: Match, body: dict[str, Any]) -> str | None:
    """GKE's refusal of a pool of TPUs that is no slice: a topology and as many nodes as it has hosts, or one machine
    and no topology (xpk core/nodepool.py of 2026-06-25; GKE, "About TPUs in GKE": a pool of several hosts is made,
    scaled and repaired as a whole). The words are ours."""
    machine = body.get("config", {}).get("machineType", "") if match.id.endswith("nodePools.create") else ""
    if not (found := re.fullmatch(r"ct[0-9a-z]+-[a-z]+-([0-9]+)t", machine)):
        return None
    if "accelerators" in body["config"]:
        return f"{machine} takes no accelerators: its chips are the machine's"
    placement = body.get("placementPolicy", {})
    nodes = {body.get("initialNodeCount", 0), body.get("autoscaling", {}).get("totalMaxNodeCount", 0)} - {0}
    chips = math.prod(int(side) for side in placement.get("tpuTopology", found[1]).split("x"))
    hosts = chips // int(found[1])
    if nodes != {hosts} or (hosts == 1) == ("tpuTopology" in placement):
        return f"{sorted(nodes)} nodes of {machine} are not one slice of topology {placement.get('tpuTopology')}"
    return None


def error(status: int, reason: str, message: str | None = None) -> Reply:
    """A refusal as Google says it."""
    words = message or f"refused: {reason}"
    body = {"code": status, "message": words, "status": reason, "errors": [{"reason": reason}]}
    return Reply(status=status, body={"error": body})
