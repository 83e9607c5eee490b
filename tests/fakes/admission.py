"""What the admission webhooks of a cluster refuse: JobSet 0.12.0, Kueue 0.19.2, and the API server's checks of Jobs.

Pure functions over objects as they are sent. Written after the two projects' own webhooks (their meaning, in our own
words); ``DEFAULT`` are the feature gates of the released configurations. What a schema or its CEL rules refuse is in
``crds``: an object has to pass both.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fakes.job_rules import (
    is_key,
    is_label,
    is_subdomain,
    job_refusals,
    label_refusals,
    metadata_refusals,
    name_refusals,
)

Object = dict[str, Any]

DEFAULT: Mapping[str, bool] = {
    # JobSet 0.12.0
    "InPlaceRestart": False, "RestartJob": False, "ElasticJobSet": False,
    # Kueue 0.19.2
    "TopologyAwareScheduling": True, "TASMultiLayerTopology": True,
}  # fmt: skip
FAILURE_REASONS = {
    "BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy",
}  # fmt: skip
MOST = 2**31 - 1
TAS = "kueue.x-k8s.io/podset-"
COORDINATOR = "jobset.sigs.k8s.io/coordinator"


def refusals(obj: Object, *, old: Object | None = None, gates: Mapping[str, bool] = DEFAULT) -> list[str]:
    """Why the cluster would not take ``obj`` (as an update of ``old``, where given); nothing of a kind unknown here.

    A JobSet's child Jobs are looked at too: the API server refuses them one by one after the JobSet was taken
    (event JobCreationFailed), which nobody sees who has only submitted.
    """
    gates = {**DEFAULT, **gates}
    found = [*metadata_refusals(obj.get("metadata", {}), "metadata")]
    kind = obj.get("kind")
    if kind == "JobSet":
        new, before = _filled(obj), _filled(old) if old is not None else None
        found += _jobset_update(before, new, gates) if before is not None else _jobset(new, gates)
        found += _queued(new, before, gates)
        for at, role in _roles(new):
            found += job_refusals(role["template"]["spec"], f"{at}.template.spec")
    elif kind == "Job":
        found += job_refusals(obj["spec"], "spec")
        found += name_refusals(obj["metadata"]["name"], "metadata.name", "job name")
    elif kind == "ClusterQueue":
        found += _cluster_queue(obj.get("spec", {}))
    elif kind == "ResourceFlavor":
        found += label_refusals(obj.get("spec", {}).get("nodeLabels", {}), "spec.nodeLabels")
        taints = obj.get("spec", {}).get("nodeTaints", [])
        found += [f"spec.nodeTaints: {one['key']}: not a label's name" for one in taints if not is_key(one["key"])]
    return found


def defaulted(jobset: Object) -> Object:
    """A new JobSet as the mutating webhooks leave it: JobSet's defaults, and Kueue's suspension of what is queued."""
    new = _filled(jobset)
    if queue_of(new):
        new["spec"]["suspend"] = True
    return new


def _filled(jobset: Object) -> Object:
    new = copy.deepcopy(jobset)
    spec = new["spec"]
    spec.setdefault("successPolicy", {"operator": "All"})
    spec.setdefault("startupPolicy", {"startupPolicyOrder": "AnyOrder"})
    network = spec.setdefault("network", {})
    network.setdefault("enableDNSHostnames", True)
    network.setdefault("publishNotReadyAddresses", True)
    for role in spec["replicatedJobs"]:
        role.setdefault("replicas", 1)
        role.setdefault("groupName", "default")
        job = role["template"]["spec"]
        job.setdefault("completionMode", "Indexed")
        job["template"]["spec"].setdefault("restartPolicy", "OnFailure")
    for number, rule in enumerate(spec.get("failurePolicy", {}).get("rules", [])):
        rule.setdefault("name", f"failurePolicyRule{number}")
    return new


def queue_of(obj: Object) -> str:
    """The local queue that an object names; empty where Kueue leaves it alone."""
    name: str = obj["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name", "")
    return name


# ---------------------------------------------------------------- JobSet


def _roles(jobset: Object) -> Iterator[tuple[str, Object]]:
    for number, role in enumerate(jobset["spec"]["replicatedJobs"]):
        yield f"spec.replicatedJobs[{number}]", role


def _jobset(jobset: Object, gates: Mapping[str, bool]) -> Iterator[str]:
    spec, name = jobset["spec"], jobset["metadata"].get("name", "")
    policy = spec.get("failurePolicy", {})
    if policy.get("restartStrategy") == "InPlaceRestart" and not gates["InPlaceRestart"]:
        yield "failure policy: restart strategy InPlaceRestart needs the feature gate InPlaceRestart"
    if subdomain := spec["network"].get("subdomain"):
        yield from name_refusals(subdomain, "spec.network.subdomain", "subdomain")
    if len(spec.get("managedBy", "")) > 63:
        yield "spec.managedBy: at most 63 characters"
    earlier: set[str] = set()
    for number, (at, role) in enumerate(_roles(jobset)):
        if number == 0 and role.get("dependsOn"):
            yield f"{at}.dependsOn: not for the first replicated job"
        earlier.add(role["name"])
        for one in role.get("dependsOn", []):
            if one["name"] not in earlier:
                yield f"{at}.dependsOn: {one['name']} does not come before {role['name']}"
        yield from _role(at, role, name, in_place=policy.get("restartStrategy") == "InPlaceRestart")
    for target in spec["successPolicy"].get("targetReplicatedJobs", []):
        if target not in earlier:
            yield f"success policy: {target!r} is no replicated job"
    yield from _failure_policy(jobset, earlier, gates)
    if "coordinator" in spec:
        yield from _coordinator(jobset)


def _role(at: str, role: Object, name: str, *, in_place: bool) -> Iterator[str]:
    job = role["template"]["spec"]
    if job.get("parallelism", 1) * role["replicas"] > MOST:
        yield f"{at}: replicas times parallelism is more than {MOST}"
    yield from name_refusals(role["groupName"], f"{at}.groupName", "group name")
    longest = f"{name}-{role['name']}-{role['replicas'] - 1}"
    yield from name_refusals(longest, f"{at}.name", "generated job name")
    if job["completionMode"] == "Indexed" and "completions" in job:
        yield from name_refusals(f"{longest}-{job['completions'] - 1}-abcde", f"{at}.name", "generated pod name")
    if in_place:
        if job.get("backoffLimit") != MOST:
            yield f"{at}.template.spec.backoffLimit: {MOST} is needed for a restart in place"
        if job.get("podReplacementPolicy") != "Failed":
            yield f"{at}.template.spec.podReplacementPolicy: Failed is needed for a restart in place"
        if "completions" not in job or job["completions"] != job.get("parallelism"):
            yield f"{at}.template.spec.completions: must be parallelism for a restart in place"


def _failure_policy(jobset: Object, roles: set[str], gates: Mapping[str, bool]) -> Iterator[str]:
    rules = jobset["spec"].get("failurePolicy", {}).get("rules", [])
    if any(rule["action"] in ("RestartJob", "RestartJobAndIgnoreMaxRestarts") for rule in rules):
        if not gates["RestartJob"]:
            yield "failure policy: action RestartJob is not allowed while the feature gate RestartJob is off"
            return
        if any(role["replicas"] > 1024 for _, role in _roles(jobset)):
            yield "failure policy: action RestartJob with more than 1024 replicas of a replicated job"
    names = [rule["name"] for rule in rules]
    for rule in rules:
        name = rule["name"]
        if not 1 <= len(name) <= 128:
            yield f"failure policy: the name of a rule has 1 to 128 characters, not {len(name)}"
        if not re.fullmatch("[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", name):
            yield f"failure policy: {name!r} is no name for a rule"
        for target in rule.get("targetReplicatedJobs", []):
            if target not in roles:
                yield f"failure policy: {target!r} is no replicated job"
        for reason in rule.get("onJobFailureReasons", []):
            if reason not in FAILURE_REASONS:
                yield f"failure policy: {reason!r} is no reason for which a Job fails"
        if names.count(name) > 1:
            yield f"failure policy: two rules have the name {name!r}"


def _coordinator(jobset: Object) -> Iterator[str]:
    wanted = jobset["spec"]["coordinator"]
    index, pod = wanted.get("jobIndex", 0), wanted.get("podIndex", 0)
    role = next((one for _, one in _roles(jobset) if one["name"] == wanted["replicatedJob"]), None)
    if role is None:
        yield f"coordinator: {wanted['replicatedJob']!r} is no replicated job"
        return
    job = role["template"]["spec"]
    if not 0 <= index < role["replicas"]:
        yield f"coordinator: there is no job {index} of {role['name']}"
    if job["completionMode"] != "Indexed" or "completions" not in job:
        yield "coordinator: its job must be Indexed, with completions"
    elif not 0 <= pod < job["completions"]:
        yield f"coordinator: there is no pod {pod}"
    value = coordinator(jobset)
    if not is_label(value):
        yield f"coordinator: {value!r} would be the value of label {COORDINATOR}: at most 63 characters"


def coordinator(jobset: Object) -> str:
    """The address that every pod of a JobSet with a coordinator carries as label and annotation."""
    one, name = jobset["spec"]["coordinator"], jobset["metadata"]["name"]
    subdomain = jobset["spec"].get("network", {}).get("subdomain") or name
    return f"{name}-{one['replicatedJob']}-{one.get('jobIndex', 0)}-{one.get('podIndex', 0)}.{subdomain}"


def _jobset_update(old: Object, new: Object, gates: Mapping[str, bool]) -> Iterator[str]:
    """The replicated jobs never change, but for what Kueue injects, and that only while either side is suspended."""
    before, after = copy.deepcopy(old["spec"]), copy.deepcopy(new["spec"])
    known = {role["name"]: role for role in before["replicatedJobs"]}
    for role in after["replicatedJobs"]:
        if role["name"] not in known:
            continue
        now, was = role["template"]["spec"], known[role["name"]]["template"]["spec"]
        if gates["ElasticJobSet"] and now["completionMode"] == "Indexed":
            _take_over(now, was, "parallelism", "completions")
        if old["spec"].get("suspend") or new["spec"].get("suspend"):
            _take_over(now["template"].setdefault("metadata", {}), was["template"].setdefault("metadata", {}),
                       "labels", "annotations")  # fmt: skip
            _take_over(now["template"]["spec"], was["template"]["spec"],
                       "nodeSelector", "tolerations", "schedulingGates")  # fmt: skip
    immutable = ("replicatedJobs", "managedBy", "network", "successPolicy", "failurePolicy", "startupPolicy",
                 "volumeClaimPolicies")  # fmt: skip
    for field in immutable:
        if before.get(field) != after.get(field):
            yield f"spec.{field}: immutable"


def _take_over(now: Object, was: Object, *fields: str) -> None:
    for field in fields:
        now.pop(field, None)
        if field in was:
            now[field] = was[field]


# ---------------------------------------------------------------- Kueue


def _queued(jobset: Object, old: Object | None, gates: Mapping[str, bool]) -> Iterator[str]:
    """Kueue's webhook looks at every JobSet, queued or not."""
    labels, annotations = jobset["metadata"].get("labels", {}), jobset["metadata"].get("annotations", {})
    for key in ("queue-name", "prebuilt-workload-name"):
        value = labels.get(f"kueue.x-k8s.io/{key}")
        if value is not None and not is_subdomain(value):
            yield f"metadata.labels[kueue.x-k8s.io/{key}]: {value!r} cannot be an object's name"
    longest = labels.get("kueue.x-k8s.io/max-exec-time-seconds")
    if longest is not None and not re.fullmatch("[1-9][0-9]*", longest):
        yield f"metadata.labels[kueue.x-k8s.io/max-exec-time-seconds]: {longest!r} is no number above 0"
    if annotations.get("kueue.x-k8s.io/elastic-job") == "true":
        yield "metadata.annotations[kueue.x-k8s.io/elastic-job]: not supported for JobSet"
    if gates["TopologyAwareScheduling"]:
        yield from _topology(jobset, gates)
    if old is None:
        return
    was = old["metadata"].get("labels", {})
    running = not jobset["spec"].get("suspend")
    if running and queue_of(old) != queue_of(jobset):
        yield "metadata.labels[kueue.x-k8s.io/queue-name]: immutable while it is not suspended"
    key = "kueue.x-k8s.io/max-exec-time-seconds"
    if (running or not old["spec"].get("suspend")) and was.get(key) != longest:
        yield f"metadata.labels[{key}]: immutable while it is not suspended"
    key = "kueue.x-k8s.io/priority-class"
    if was.get(key) and not labels.get(key):
        yield f"metadata.labels[{key}]: cannot be taken away"
    if running and labels.get(key) and not was.get(key):
        yield f"metadata.labels[{key}]: cannot be added while it is not suspended"


def _topology(jobset: Object, gates: Mapping[str, bool]) -> Iterator[str]:
    groups: dict[str, list[int]] = {}
    for at, role in _roles(jobset):
        job = role["template"]["spec"]
        count = role["replicas"] * min(job.get("parallelism", 1), job.get("completions", MOST))
        found = {
            key.removeprefix(TAS): value
            for key, value in job["template"].get("metadata", {}).get("annotations", {}).items()
            if key.startswith(TAS)
        }
        at = f"{at}.template.spec.template.metadata.annotations"
        kinds = [one for one in ("required-topology", "preferred-topology", "unconstrained-topology") if one in found]
        if len(kinds) > 1:
            yield f"{at}: more than one topology: {', '.join(kinds)}"
        for one in ("required-topology", "preferred-topology", "slice-required-topology"):
            if one in found and not is_key(found[one]):
                yield f"{at}[{TAS}{one}]: {found[one]!r} is no label of a node"
        if found.get("unconstrained-topology", "true") not in ("1", "t", "T", "TRUE", "true", "True", "0", "f", "F",
                                                               "FALSE", "false", "False"):  # fmt: skip
            yield f"{at}[{TAS}unconstrained-topology]: want true or false"
        size = found.get("slice-size")
        if size is not None and not (re.fullmatch("[0-9]+", size) and 1 <= int(size) <= count):
            yield f"{at}[{TAS}slice-size]: {size!r} is not 1 to {count}"
        if ("slice-required-topology" in found) != (size is not None):
            yield f"{at}: slice-size and slice-required-topology come together"
        if "slice-required-topology-constraints" in found and not gates["TASMultiLayerTopology"]:
            yield f"{at}: slice constraints need the feature gate TASMultiLayerTopology"
        if (group := found.get("group-name")) is not None:
            groups.setdefault(group, []).append(count)
            if group.isdecimal() or size is not None or not set(kinds) & {"required-topology", "preferred-topology"}:
                yield f"{at}[{TAS}group-name]: want a word, no slices, and a required or preferred topology"
    for group, counts in groups.items():
        if len(counts) != 2 or 1 not in counts:
            yield f"pod set group {group!r}: two pod sets, one of them of a single pod"


def _cluster_queue(spec: Object) -> Iterator[str]:
    resources: list[str] = []
    flavors: list[str] = []
    for number, group in enumerate(spec.get("resourceGroups", [])):
        at = f"spec.resourceGroups[{number}]"
        resources += group["coveredResources"]
        for flavor in group["flavors"]:
            flavors.append(flavor["name"])
            if [one["name"] for one in flavor["resources"]] != group["coveredResources"]:
                yield f"{at}: the resources of flavor {flavor['name']} are not the covered ones, in their order"
            for one in flavor["resources"]:
                if str(one["nominalQuota"]).startswith("-"):
                    yield f"{at}: a quota is not negative"
                if "cohortName" not in spec and {"borrowingLimit", "lendingLimit"} & one.keys():
                    yield f"{at}: a limit of borrowing or lending needs a cohort"
    for name in {*resources, *flavors}:
        if resources.count(name) > 1 or flavors.count(name) > 1:
            yield f"spec.resourceGroups: {name} twice"
    for check in spec.get("admissionChecksStrategy", {}).get("admissionChecks", []):
        for name in check.get("onFlavors", []):
            if name not in flavors:
                yield f"admission check {check['name']}: there is no flavor {name}"
