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


def assign(api, workload, reserved, *, hold, claims, own_keys):
    """(ClusterQueue, admission) for a Workload next to those that hold quota.

    ``claims``: pod set -> what each of its pods asks for by resource claims. ``own_keys``: a selector counts for a
    flavor by that flavor's own label keys (0.17.6, 0.18.2, 0.19.0 and later), else by those of all of the group.

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
    quotas = _Quotas(queue, flavors, usage(reserved), own_keys)
    given, reasons = [], []
    for pod_set in workload["spec"]["podSets"]:
        asked = requests(pod_set["template"]["spec"])
        for resource, amount in claims.get(pod_set["name"], {}).items():
            asked[resource] = asked.get(resource, Fraction(0)) + amount
        wanted = {resource: amount * pod_set["count"] for resource, amount in asked.items()}
        chosen, why = quotas.take(pod_set["template"]["spec"], wanted)
        if why:
            reasons.append(f"couldn't assign flavors to pod set {pod_set['name']}: {', '.join(sorted(why))}")
        if chosen is None:
            break
        use = {resource: text(amount) for resource, amount in wanted.items()}
        given.append({"name": pod_set["name"], "count": pod_set["count"], "flavors": chosen, "resourceUsage": use})
    if reasons:
        raise NoFit("Pending", "; ".join(reasons))
    return queue, {"clusterQueue": cluster, "podSetAssignments": given}


class _Quotas:
    """A queue's flavors while the pod sets of one Workload are assigned (pkg/scheduler/flavorassigner)."""

    def __init__(self, queue, flavors, used, own_keys):
        self.groups = queue["spec"].get("resourceGroups", [])
        self.flavors, self.used, self.own_keys = flavors, used, own_keys
        self.taken: dict[tuple[str, str], Fraction] = {}

    def take(self, pod, wanted):
        """(resource -> flavor, reasons). Without reasons it fits; None: no flavor would do even in an empty queue.
        A pod set that only lacks unused quota has a flavor and reasons, and the next pod set is looked at."""
        chosen, reasons = {}, []
        covered = {name for group in self.groups for name in group["coveredResources"]}
        for name in wanted:
            if name not in covered:
                return None, [f"resource {name} unavailable in ClusterQueue"]
        for group in self.groups:
            asked = {name: wanted[name] for name in group["coveredResources"] if name in wanted}
            if not asked:
                continue
            flavor, why = self._flavor(pod, asked, group)
            reasons += why
            if flavor is None:
                return None, reasons
            for name, amount in asked.items():
                self.taken[flavor, name] = self.taken.get((flavor, name), Fraction(0)) + amount
                chosen[name] = flavor
        return chosen, reasons

    def _flavor(self, pod, asked, group):
        best, reasons = None, []
        keys = {key for one in group["flavors"] for key in _labels(self.flavors[one["name"]])}
        for row in group["flavors"]:
            name, flavor = row["name"], self.flavors[row["name"]]
            if trouble := _unfit(pod, flavor, _labels(flavor).keys() if self.own_keys else keys):
                reasons.append(trouble)
                continue
            quota = {one["name"]: quantity(one["nominalQuota"]) for one in row["resources"]}
            lacks, never = self._lacks(name, asked, quota)
            if not lacks:
                return name, []
            reasons += lacks
            best = best if best or never else name
        return best, reasons

    def _lacks(self, flavor, asked, quota):
        """(what is said of every resource that is short, whether one is more than the flavor has in all)."""
        reasons, never = [], False
        for name, amount in asked.items():
            before = self.taken.get((flavor, name), Fraction(0))
            lacks = before + amount + self.used.get((flavor, name), Fraction(0)) - quota[name]
            if before + amount > quota[name]:
                never = True
                reasons.append(
                    f"insufficient quota for {name} in flavor {flavor}, previously considered podsets requests "
                    f"({text(before)}) + current podset request ({text(amount)}) > maximum capacity "
                    f"({text(quota[name])})"
                )
            elif lacks > 0:
                reasons.append(f"insufficient unused quota for {name} in flavor {flavor}, {text(lacks)} more needed")
        return reasons, never


def _labels(flavor):
    return flavor["spec"].get("nodeLabels") or {}


def _unfit(pod, flavor, keys):
    """Why a pod is not for a flavor's nodes: a taint, or a label that its selector names with one of ``keys``."""
    name = flavor["metadata"]["name"]
    tolerations = [*(pod.get("tolerations") or []), *(flavor["spec"].get("tolerations") or [])]
    for taint in flavor["spec"].get("nodeTaints") or []:
        hard = taint["effect"] in ("NoSchedule", "NoExecute")
        if hard and not any(tolerates(one, taint) for one in tolerations):
            words = f"{{{taint['key']} {taint.get('value', '')} {taint['effect']} <nil>}}"
            return f"untolerated taint {words} in flavor {name}"
    for key, value in (pod.get("nodeSelector") or {}).items():
        if key in keys and _labels(flavor).get(key) != value:
            return f"flavor {name} doesn't match node affinity"
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
