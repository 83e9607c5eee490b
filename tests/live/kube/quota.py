"""Quota as Kueue 0.19.2 gives it: flavors in order, what every container asks for, one reason when it does not fit."""

import re
from fractions import Fraction

from objects import KUEUE

UNITS = {"": 1, "m": Fraction(1, 1000), "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15,
         "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}  # fmt: skip


class NoFit(Exception):
    def __init__(self, reason, message):
        super().__init__(message)
        self.reason = reason


def assign(api, workload, reserved, *, hold):
    """(ClusterQueue, admission) for a Workload beside those that hold quota.

    Raises:
        NoFit: with the reason and the message of the condition QuotaReserved.
    """
    metadata, name = workload["metadata"], workload["spec"]["queueName"]
    local = api.get(f"{KUEUE}/namespaces/{metadata['namespace']}/localqueues/{name}")
    if local is None:
        raise NoFit("Inadmissible", f"LocalQueue {name} doesn't exist")
    cluster = local["spec"]["clusterQueue"]
    queue = api.get(f"{KUEUE}/clusterqueues/{cluster}")
    if queue is None:
        raise NoFit("Inadmissible", f"ClusterQueue {cluster} doesn't exist")
    if hold or (queue["spec"].get("stopPolicy") or "None") != "None":
        raise NoFit("Inadmissible", f"ClusterQueue {cluster} is inactive")
    flavors = {
        flavor["name"]: api.get(f"{KUEUE}/resourceflavors/{flavor['name']}")
        for group in queue["spec"].get("resourceGroups", [])
        for flavor in group["flavors"]
    }
    if missing := [one for one, found in flavors.items() if found is None]:
        raise NoFit("Inadmissible", f"ClusterQueue {cluster} is inactive: flavor {missing[0]} not found")
    used = usage(reserved)
    taken: dict[tuple[str, str], Fraction] = {}
    given = [_pod_set(pod_set, queue, flavors, used, taken) for pod_set in workload["spec"]["podSets"]]
    return queue, {"clusterQueue": cluster, "podSetAssignments": given}


def _pod_set(pod_set, queue, flavors, used, taken):
    wanted = {name: amount * pod_set["count"] for name, amount in requests(pod_set["template"]["spec"]).items()}
    chosen: dict[str, str] = {}
    covered = {name for group in queue["spec"].get("resourceGroups", []) for name in group["coveredResources"]}
    for name in wanted:
        if name not in covered:
            raise NoFit("Pending", f"couldn't assign flavors to pod set {pod_set['name']}: "
                        f"resource {name} unavailable in ClusterQueue")  # fmt: skip
    for group in queue["spec"]["resourceGroups"]:
        names = [name for name in group["coveredResources"] if name in wanted]
        if not names:
            continue
        why = []
        keys = {key for one in group["flavors"] for key in flavors[one["name"]]["spec"].get("nodeLabels") or {}}
        for flavor in group["flavors"]:
            quota = {one["name"]: quantity(one["nominalQuota"]) for one in flavor["resources"]}
            trouble = _unfit(pod_set["template"]["spec"], flavors[flavor["name"]], keys)
            trouble = trouble or _short(names, wanted, quota, flavor["name"], used, taken)
            if trouble is None:
                for name in names:
                    key = flavor["name"], name
                    taken[key] = taken.get(key, Fraction(0)) + wanted[name]
                    chosen[name] = flavor["name"]
                break
            why.append(trouble)
        else:
            words = f"couldn't assign flavors to pod set {pod_set['name']}: {', '.join(why)}"
            raise NoFit("Pending", words)
    use = {name: text(amount) for name, amount in wanted.items()}
    return {"name": pod_set["name"], "count": pod_set["count"], "flavors": chosen, "resourceUsage": use}


def _unfit(pod, flavor, keys):
    """A pod's selector counts for labels that any flavor of the group has: one that lacks the label does not fit."""
    name = flavor["metadata"]["name"]
    for taint in flavor["spec"].get("nodeTaints") or []:
        if not any(tolerates(one, taint) for one in pod.get("tolerations") or []):
            return f"untolerated taint {taint['key']} in flavor {name}"
    labels = flavor["spec"].get("nodeLabels") or {}
    for key, value in (pod.get("nodeSelector") or {}).items():
        if key in keys and labels.get(key) != value:
            return f"flavor {name} doesn't match node affinity"
    return None


def _short(names, wanted, quota, flavor, used, taken):
    for name in names:
        before = taken.get((flavor, name), Fraction(0))
        now = before + wanted[name]
        if now > quota[name]:
            return (f"insufficient quota for {name} in flavor {flavor}, previously considered podsets requests "
                    f"({text(before)}) + current podset request ({text(wanted[name])}) > maximum capacity "
                    f"({text(quota[name])})")  # fmt: skip
        lacks = now + used.get((flavor, name), Fraction(0)) - quota[name]
        if lacks > 0:
            return f"insufficient unused quota for {name} in flavor {flavor}, {text(lacks)} more needed"
    return None


def usage(workloads):
    """(flavor, resource) -> what those that hold quota use."""
    found: dict[tuple[str, str], Fraction] = {}
    for workload in workloads:
        for one in ((workload.get("status") or {}).get("admission") or {}).get("podSetAssignments") or []:
            for name, amount in one["resourceUsage"].items():
                key = one["flavors"][name], name
                found[key] = found.get(key, Fraction(0)) + quantity(amount)
    return found


def requests(pod):
    """What a pod asks for: its containers together, or one init container where that is more. Limits stand in."""

    def of(container):
        resources = container.get("resources") or {}
        return {**(resources.get("limits") or {}), **(resources.get("requests") or {})}

    found: dict[str, Fraction] = {}
    for container in pod["containers"]:
        for name, amount in of(container).items():
            found[name] = found.get(name, Fraction(0)) + quantity(amount)
    for container in pod.get("initContainers") or []:
        for name, amount in of(container).items():
            found[name] = max(found.get(name, Fraction(0)), quantity(amount))
    return found


def tolerates(toleration, taint):
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    return toleration.get("key") == taint["key"] and toleration.get("value", "") == taint.get("value", "")


def quantity(amount):
    number, unit = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(amount)).groups()
    return Fraction(number) * UNITS[unit]


def text(amount):
    """Whole numbers where it is one, thousandths otherwise."""
    return str(int(amount)) if amount.denominator == 1 else f"{int(amount * 1000)}m"
