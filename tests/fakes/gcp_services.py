"""The fake cloud's smaller services: builds, quotas, machine types, policies, and the rules of node pools."""

from __future__ import annotations

from typing import Any

from fakes.discovery import Match

from muster.backends.gke.google.http import Call, Reply


def quota(google: Any, metric: str) -> Reply:
    """What the project may have of it."""
    name = metric.removeprefix("compute.googleapis.com%2F")
    if name not in google.quotas:
        return error(404, "NOT_FOUND")
    rows = [{"dimensions": dict(where), "effectiveLimit": str(limit)} for where, limit in google.quotas[name].items()]
    return Reply(status=200, body={"metric": name, "consumerQuotaLimits": [{"quotaBuckets": rows}]})


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


def policy(google: Any, match: Match, call: Call) -> Reply:
    """Who may do what with a bucket, written back under its etag."""
    bucket = match.path["bucket"]
    if f"storage/v1/b/{bucket}" not in google.store:
        return error(404, "notFound")
    found = google.policies.setdefault(bucket, {"bindings": [], "etag": "1"})
    if call.method == "PUT":
        assert call.body is not None
        if call.body.get("etag") != found["etag"]:
            return error(412, "conditionNotMet")
        google.policies[bucket] = found = {**call.body, "etag": str(int(found["etag"]) + 1)}
    return Reply(status=200, body=found)


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


def begin_nodes(google: Any, path: str, body: dict[str, Any]) -> None:
    """A pool's nodes are an instance group of Compute Engine's, which alone says how many they are."""
    name, zone = path.rpartition("/")[2], body["locations"][0]
    folder = f"https://www.googleapis.com/compute/v1/projects/{path.split('/')[2]}/zones/{zone}"
    body["instanceGroupUrls"] = [f"{folder}/instanceGroupManagers/gke-{name}-grp"]
    google.sizes[name] = body.get("initialNodeCount", 0)


def node_pool(google: Any, match: Match, path: str, call: Call) -> Reply:
    """Its size, asked for and changed. A size that cannot be had leaves the pool in error, with the size asked for."""
    if match.verb == "get":
        name = match.path["instanceGroupManager"].removeprefix("gke-").removesuffix("-grp")
        return Reply(status=200, body={"targetSize": google.sizes[name]})
    path = path.partition(":")[0]
    cluster, _, name = path.rpartition("/nodePools/")
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

    pool["status"] = "RECONCILING"
    answer: Reply = google.begin(path.rpartition("/")[0], pool, finish, error=trouble, busy=cluster, api=match.api)
    answer.body["operationType"] = "SET_NODE_POOL_SIZE"
    return answer


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


def error(status: int, reason: str, message: str | None = None) -> Reply:
    """A refusal as Google says it."""
    words = message or f"refused: {reason}"
    body = {"code": status, "message": words, "status": reason, "errors": [{"reason": reason}]}
    return Reply(status=status, body={"error": body})
