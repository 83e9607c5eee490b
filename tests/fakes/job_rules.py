"""What a Kubernetes 1.34 API server refuses in Jobs, labels and names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

Object = dict[str, Any]


def job_refusals(job: Object, at: str) -> Iterator[str]:
    """What Kubernetes 1.34 refuses in the spec of a batch/v1 Job."""
    template = job["template"]
    pod = template["spec"]
    yield from metadata_refusals(template.get("metadata", {}), f"{at}.template.metadata")
    if pod.get("restartPolicy") not in ("Never", "OnFailure"):
        yield f"{at}.template.spec.restartPolicy: Never or OnFailure"
    if job.get("completionMode") == "Indexed" and "parallelism" in job and "completions" not in job:
        yield f"{at}.completions: needed by an Indexed Job"
    if job.get("backoffLimit", 6) < 0:
        yield f"{at}.backoffLimit: not below 0"
    containers = [*pod.get("initContainers", []), *pod.get("containers", [])]
    names = [one["name"] for one in containers]
    yield from (f"{at}: two containers {name}" for name in sorted({one for one in names if names.count(one) > 1}))
    volumes = [one["name"] for one in pod.get("volumes", [])]
    yield from (f"{at}: two volumes {name}" for name in sorted({one for one in volumes if volumes.count(one) > 1}))
    for container in containers:
        paths = [one["mountPath"] for one in container.get("volumeMounts", [])]
        yield from (f"{at}: {container['name']}: two mounts at {one}" for one in {*paths} if paths.count(one) > 1)
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                yield f"{at}: {container['name']} mounts {mount['name']!r}, which is no volume"
    yield from _pod_failure_policy(job, at, names)


def _pod_failure_policy(job: Object, at: str, containers: list[str]) -> Iterator[str]:
    policy = job.get("podFailurePolicy")
    if policy is None:
        return
    if job["template"]["spec"].get("restartPolicy") != "Never":
        yield f"{at}.podFailurePolicy: restartPolicy must be Never"
    if job.get("podReplacementPolicy", "Failed") != "Failed":
        yield f"{at}.podReplacementPolicy: Failed is the only one with a pod failure policy"
    if len(policy["rules"]) > 20:
        yield f"{at}.podFailurePolicy.rules: at most 20"
    for rule in policy["rules"]:
        codes = rule.get("onExitCodes")
        if (codes is None) == (not rule.get("onPodConditions")):
            yield f"{at}.podFailurePolicy: a rule has either exit codes or pod conditions"
        if codes is None:
            continue
        values = codes["values"]
        if not 1 <= len(values) <= 255 or values != sorted(set(values)):
            yield f"{at}.podFailurePolicy: exit codes are 1 to 255 different ones in order"
        if codes["operator"] == "In" and 0 in values:
            yield f"{at}.podFailurePolicy: exit code 0 is no failure"
        if codes.get("containerName", containers[0]) not in containers:
            yield f"{at}.podFailurePolicy: there is no container {codes['containerName']!r}"


def metadata_refusals(metadata: Object, at: str) -> Iterator[str]:
    yield from label_refusals(metadata.get("labels") or {}, f"{at}.labels")
    annotations = metadata.get("annotations") or {}
    yield from (f"{at}.annotations: {key!r} is no key" for key in annotations if not is_key(key))
    yield from (f"{at}.annotations[{key}]: want text" for key, one in annotations.items() if not isinstance(one, str))
    if len(json.dumps(annotations)) > 256 * 1024:
        yield f"{at}.annotations: more than 256 KiB"


def label_refusals(labels: Object, at: str) -> Iterator[str]:
    for key, value in labels.items():
        if not is_key(key):
            yield f"{at}: {key!r} is no key"
        if not isinstance(value, str) or not is_label(value):
            yield f"{at}[{key}]: {value!r}: at most 63 letters, digits, '-', '_', '.', at both ends no mark"


def is_label(value: str) -> bool:
    return len(value) <= 63 and re.fullmatch("([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?", value) is not None


def is_key(key: str) -> bool:
    prefix, slash, name = key.rpartition("/")
    return bool(name) and is_label(name) and (not slash or is_subdomain(prefix))


def is_subdomain(name: str) -> bool:
    part = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
    return len(name) <= 253 and re.fullmatch(rf"{part}(\.{part})*", name) is not None


def name_refusals(name: str, at: str, what: str) -> Iterator[str]:
    """A name in the sense of RFC 1035: of a service, and of what becomes a host's name."""
    if len(name) > 63:
        yield f"{at}: the {what} {name!r} has {len(name)} characters, at most 63 are allowed"
    if not re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name):
        yield f"{at}: the {what} {name!r}: small letters, digits and '-', a letter first"
