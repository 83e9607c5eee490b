"""The sentence about pods and nodes: what the slowest of them waits for, or what was lost. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from muster.core.types import JobState

Manifest = Mapping[str, Any]

ROLE = "jobset.sigs.k8s.io/replicatedjob-name"
INDEX = "jobset.sigs.k8s.io/job-index"
_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
TERMINATION_TAINT = "cloud.google.com/impending-node-termination"
"""Taint by which GKE announces that a node will be terminated: maintenance, or the end of a Spot VM."""
_CONFIG = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")


class Explanation(NamedTuple):
    """The state in words that every back end shares, one sentence, and where there is one, the next step."""

    state: JobState
    sentence: str
    hint: str | None = None


class Trouble(NamedTuple):
    """What keeps one pod from running. Later stages have higher ranks: the furthest pod says most."""

    rank: int
    what: str
    hint: str | None = None


def pods_sentence(
    pods: Sequence[Manifest], events: Sequence[Manifest], nodes: Sequence[Manifest], restarts: int
) -> Explanation:
    """What to say of pods that exist: what was lost, else what is waited for, else what failed, else who runs."""
    newest = _newest_of_each_role(pods)
    reasons = [(pod, _lost(pod, nodes)) for pod in newest]
    kept = [pod for pod, reason in reasons if reason is None]
    result = (
        _lost_sentence([(pod, reason) for pod, reason in reasons if reason is not None], len(newest))
        or _waiting_sentence(kept, events, newest)
        or _failed_sentence(newest)
        or _running_sentence(newest, nodes)
    )
    again = f", after {restarts} restart{'s' if restarts > 1 else ''} of the whole JobSet" if restarts else ""
    return result._replace(sentence=result.sentence + again)


def _lost_sentence(lost: Sequence[tuple[Manifest, str]], count: int) -> Explanation | None:
    if not lost:
        return None
    where = ", ".join(f"{_name(pod)} ({reason})" for pod, reason in lost)
    return Explanation(JobState.RUNNING, f"{len(lost)} of {count} pods lost: {where}; waiting for replacements")


def _waiting_sentence(
    kept: Sequence[Manifest], events: Sequence[Manifest], newest: Sequence[Manifest]
) -> Explanation | None:
    waiting = [(pod, trouble) for pod in kept if (trouble := _trouble(pod, events))]
    if not waiting:
        return None
    pod, worst = max(waiting, key=lambda row: row[1].rank)
    same = [other for other, trouble in waiting if trouble.what == worst.what]
    name = _name(pod) if len(same) == 1 else f"{len(same)} of {len(newest)} pods"
    running = [pod for pod in kept if _running(pod)]
    others = f" ({len(running)} of {len(newest)} running)" if running else ""
    started = any(_role(pod) == "host" for pod in running)
    hosts = [pod for pod in newest if _role(pod) == "host"]
    state = JobState.RUNNING if started and len(waiting) < len(hosts) else JobState.WAITING
    return Explanation(state, f"waiting for {name}: {worst.what}{others}", worst.hint)


def _failed_sentence(newest: Sequence[Manifest]) -> Explanation | None:
    failed = [pod for pod in newest if pod.get("status", {}).get("phase") == "Failed"]
    if not failed:
        return None
    ends = ", ".join(f"{_name(pod)} {_ending(pod)}" for pod in failed[:3])
    return Explanation(JobState.RUNNING, f"{len(failed)} of {len(newest)} pods ended: {ends}; being replaced")


def _running_sentence(newest: Sequence[Manifest], nodes: Sequence[Manifest]) -> Explanation:
    running = [_role(pod) for pod in newest if _running(pod)]
    count = running.count("host")
    supervisor = " and the supervisor" if "supervisor" in running else "; the supervisor is not running yet"
    hosts = f"{count} host{'s' if count != 1 else ''}"
    return Explanation(JobState.RUNNING, f"running: {hosts}{supervisor}{_leaving(newest, nodes)}")


def refused(jobset: Manifest, pods: Sequence[Manifest], events: Sequence[Manifest]) -> str | None:
    """Why a missing pod of the JobSet was not created: its Job's own message (quota, a policy)."""
    there = {(_role(pod), pod["metadata"].get("labels", {}).get(INDEX, "0")) for pod in pods}
    missing = {
        f"{jobset['metadata']['name']}-{role['name']}-{index}": f"{role['name']}-{index}"
        for role in jobset.get("spec", {}).get("replicatedJobs", [])
        for index in range(int(role.get("replicas", 1)))
        if (role["name"], str(index)) not in there
    }
    failures = [
        one
        for one in events
        if one.get("reason") == "FailedCreate" and one.get("involvedObject", {}).get("name") in missing
    ]
    if not failures:
        return None
    last = max(failures, key=_when)
    who = missing[last["involvedObject"]["name"]] if len(missing) == 1 else f"{len(missing)} pods"
    return f"{who} cannot be created ({_short(last.get('message', 'no reason given'))})"


def _leaving(pods: Sequence[Manifest], nodes: Sequence[Manifest]) -> str:
    """Pods on nodes whose termination is announced."""
    tainted = {
        one["metadata"]["name"]
        for one in nodes
        if any(taint.get("key") == TERMINATION_TAINT for taint in one.get("spec", {}).get("taints", []))
    }
    result = [
        f"{_name(pod)} (node {node})"
        for pod in pods
        if (node := pod.get("spec", {}).get("nodeName")) in tainted and _running(pod)
    ]
    return f"; node termination announced: {', '.join(result)}" if result else ""


def _newest_of_each_role(pods: Sequence[Manifest]) -> list[Manifest]:
    """One pod for each job: a replaced pod's predecessor may still exist."""
    result: dict[tuple[str, str], Manifest] = {}
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", ""))):
        labels = pod["metadata"].get("labels", {})
        result[labels.get(ROLE, pod["metadata"]["name"]), labels.get(INDEX, "0")] = pod
    return list(result.values())


def _lost(pod: Manifest, nodes: Sequence[Manifest]) -> str | None:
    """Why a pod that was placed is gone, where it is."""
    status = pod.get("status", {})
    node = pod.get("spec", {}).get("nodeName")
    for one in status.get("conditions", []):
        if one.get("type") == "DisruptionTarget" and one.get("status") == "True":
            return f"{one.get('reason', 'disrupted')} on {node}"
    if node is None or status.get("phase") not in ("Running", "Pending"):
        return None
    known = {one["metadata"]["name"]: one for one in nodes}
    if nodes and node not in known:
        return f"node {node} no longer exists"
    for one in known.get(node, {}).get("status", {}).get("conditions", []):
        if one.get("type") == "Ready" and one.get("status") != "True":
            return f"node {node} is not responding ({one.get('reason', 'NotReady')})"
    return None


def _trouble(pod: Manifest, events: Sequence[Manifest]) -> Trouble | None:
    status = pod.get("status", {})
    if status.get("phase") not in (None, "Pending"):
        return None
    node = pod.get("spec", {}).get("nodeName")
    if node is None:
        return _no_node(pod, events)
    for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        if trouble := _container_trouble(container):
            return trouble
    for event in reversed(_events_of(pod, events)):
        if event.get("reason") in ("FailedMount", "FailedAttachVolume"):
            return Trouble(35, f"a volume on node {node} ({_short(event.get('message', ''))})")
        if event.get("reason") == "FailedCreatePodSandBox":
            return Trouble(34, f"its network on node {node} ({_short(event.get('message', ''))})")
        if event.get("reason") == "Pulling":
            return Trouble(30, f"the image is being pulled on node {node}")
    return Trouble(25, f"starting on node {node}")


def _container_trouble(container: Mapping[str, Any]) -> Trouble | None:
    waiting = container.get("state", {}).get("waiting", {})
    reason, message = waiting.get("reason"), waiting.get("message", "")
    if reason in _IMAGE:
        what = f"image {container.get('image', 'its image')} cannot be pulled ({reason}: {_short(message)})"
        return Trouble(40, what, "does resources.image exist, and may the nodes' service account read it?")
    if reason in _CONFIG:
        what = f"its container cannot be created ({reason}: {_short(message)})"
        return Trouble(45, what, "a Secret or ConfigMap that the pod names is missing")
    return None


def _no_node(pod: Manifest, events: Sequence[Manifest]) -> Trouble:
    for event in reversed(_events_of(pod, events)):
        reason, message = event.get("reason"), str(event.get("message", ""))
        if reason == "FailedScaleUp":
            return _no_scale_up(message)
        if reason == "TriggeredScaleUp":
            return Trouble(15, "a node is being created")
        if reason == "NotTriggerScaleUp":
            hint = "muster up RUN.yaml makes the pool; labels, taints and machine must match"
            return Trouble(18, f"no node pool matches ({_short(message)})", hint)
    for one in pod.get("status", {}).get("conditions", []):
        if one.get("type") == "PodScheduled" and one.get("status") == "False":
            return Trouble(10, f"no node fits ({_short(one.get('message', 'Unschedulable'))})")
        if one.get("type") == "PodScheduled" and one.get("reason") == "SchedulingGated":
            return Trouble(5, "topology assignment pending (scheduling gate)")
    return Trouble(8, "the scheduler")


def _no_scale_up(message: str) -> Trouble:
    text = message.lower()
    if "quota" in text:
        return Trouble(20, f"Google Cloud quota ({_short(message)})", hint="raise it, or another region")
    if "stockout" in text or "resources" in text:
        return Trouble(20, f"no capacity in the zone ({_short(message)})", hint="another zone or mode")
    return Trouble(20, f"the node pool cannot grow ({_short(message)})")


def _events_of(pod: Manifest, events: Sequence[Manifest]) -> list[Manifest]:
    name = pod["metadata"]["name"]
    own = [one for one in events if one.get("involvedObject", {}).get("name") == name]
    return sorted(own, key=_when)


def _when(event: Manifest) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")


def _running(pod: Manifest) -> bool:
    return bool(pod.get("status", {}).get("phase") == "Running")


def _ending(pod: Manifest) -> str:
    status = pod.get("status", {})
    for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        ended = container.get("state", {}).get("terminated")
        if ended and ended.get("exitCode"):
            what = f" of {container['name']}" if container in status.get("initContainerStatuses", []) else ""
            return f"with exit code {ended['exitCode']}{what}" + (
                f" ({ended['reason']})" if ended.get("reason") else ""
            )
    message = f": {_short(status['message'])}" if status.get("message") else ""  # an eviction names what ran out
    return f"({status.get('reason', 'no reason given')}{message})"


def _name(pod: Manifest) -> str:
    labels = pod["metadata"].get("labels", {})
    role = labels.get(ROLE)
    if role is None:
        return str(pod["metadata"]["name"])
    return role if role == "supervisor" else f"{role}-{labels.get(INDEX, '?')}"


def _role(pod: Manifest) -> str | None:
    role: str | None = pod["metadata"].get("labels", {}).get(ROLE)
    return role


def _short(message: str, length: int = 160) -> str:
    text = " ".join(message.split()).rstrip(".")
    return text if len(text) <= length else text[: length - 3] + "..."
