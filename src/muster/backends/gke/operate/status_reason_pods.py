"""The sentence about pods and nodes: what the slowest of them waits for, or what was lost. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from muster.backends.gke.operate.evictions import Explanation
from muster.backends.gke.operate.locate import host_number
from muster.backends.google.refusals import Cause, of_text
from muster.core.typed_json import JsonObject, child, children, text, whole
from muster.core.types import JobState

Manifest = JsonObject

ROLE = "jobset.sigs.k8s.io/replicatedjob-name"
_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
TERMINATION_TAINT = "cloud.google.com/impending-node-termination"
"""Taint by which GKE announces that a node will be terminated: maintenance, or the end of a Spot VM."""
_CONFIG = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")


class Trouble(NamedTuple):
    """What keeps one pod from running. Later stages have higher ranks: the furthest pod says most."""

    rank: int
    reason: str
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
    supervised = any(_role(pod) == "supervisor" and _running(pod) for pod in kept)
    waiting = [
        (pod, trouble)
        for pod in kept
        if not (supervised and _role(pod) == "supervisor")  # of two, one is enough
        and (trouble := _trouble(pod, events))
    ]
    if not waiting:
        return None
    pod, worst = max(waiting, key=lambda row: row[1].rank)
    same = [other for other, trouble in waiting if trouble.reason == worst.reason]
    name = _name(pod) if len(same) == 1 else f"{len(same)} of {len(newest)} pods"
    running = [pod for pod in kept if _running(pod)]
    others = f" ({len(running)} of {len(newest)} running)" if running else ""
    started = any(_role(pod) == "host" for pod in running)
    hosts = [pod for pod in newest if _role(pod) == "host"]
    state = JobState.RUNNING if started and len(waiting) < len(hosts) else JobState.WAITING
    return Explanation(state, f"waiting for {name}: {worst.reason}{others}", worst.hint)


def _failed_sentence(newest: Sequence[Manifest]) -> Explanation | None:
    failed = [pod for pod in newest if text(pod, "status", "phase") == "Failed"]
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


def _leaving(pods: Sequence[Manifest], nodes: Sequence[Manifest]) -> str:
    """Pods on nodes whose termination is announced."""
    tainted = {
        text(node, "metadata", "name")
        for node in nodes
        if any(text(taint, "key") == TERMINATION_TAINT for taint in children(node, "spec", "taints"))
    }
    result = [
        f"{_name(pod)} (node {node})"
        for pod in pods
        if (node := text(pod, "spec", "nodeName")) in tainted and _running(pod)
    ]
    return f"; node termination announced: {', '.join(result)}" if result else ""


def _newest_of_each_role(pods: Sequence[Manifest]) -> list[Manifest]:
    """One pod for each job: a replaced pod's predecessor may still exist."""
    result: dict[tuple[str, str], Manifest] = {}
    for pod in sorted(pods, key=lambda pod: text(pod, "metadata", "creationTimestamp")):
        labels = child(pod, "metadata", "labels")
        result[text(labels, ROLE) or text(pod, "metadata", "name"), host_number(labels)] = pod
    return list(result.values())


def _lost(pod: Manifest, nodes: Sequence[Manifest]) -> str | None:
    """Why a pod that was placed is gone, where it is."""
    status = child(pod, "status")
    node = text(pod, "spec", "nodeName")
    for row in children(status, "conditions"):
        if text(row, "type") == "DisruptionTarget" and text(row, "status") == "True":
            return f"{row.get('reason', 'disrupted')} on {node}"
    if not node or text(status, "phase") not in ("Running", "Pending"):
        return None
    known = {text(row, "metadata", "name"): row for row in nodes}
    if nodes and node not in known:
        return f"node {node} no longer exists"
    for row in children(known.get(node), "status", "conditions"):
        if text(row, "type") == "Ready" and text(row, "status") != "True":
            return f"node {node} is not responding ({row.get('reason', 'NotReady')})"
    return None


def _trouble(pod: Manifest, events: Sequence[Manifest]) -> Trouble | None:
    status = child(pod, "status")
    if text(status, "phase") not in ("", "Pending"):
        return None
    node = text(pod, "spec", "nodeName")
    if not node:
        return _no_node(pod, events)
    for container in [*children(status, "initContainerStatuses"), *children(status, "containerStatuses")]:
        if trouble := _container_trouble(container):
            return trouble
    for event in reversed(_events_of(pod, events)):
        if event.get("reason") in ("FailedMount", "FailedAttachVolume"):
            return _no_volume(node, text(event, "message"))
        if event.get("reason") == "FailedCreatePodSandBox":
            return Trouble(34, f"its network on node {node} ({short(text(event, 'message'))})")
        if event.get("reason") == "Pulling":
            return Trouble(30, f"the image is being pulled on node {node}")
    return Trouble(25, f"starting on node {node}")


def _container_trouble(container: JsonObject) -> Trouble | None:
    waiting = child(container, "state", "waiting")
    reason, message = text(waiting, "reason"), text(waiting, "message")
    if reason in _IMAGE:
        reason_text = f"image {container.get('image', 'its image')} cannot be pulled ({reason}: {short(message)})"
        return Trouble(40, reason_text, "does resources.image exist, and may the nodes' service account read it?")
    if reason in _CONFIG:
        reason_text = f"its container cannot be created ({reason}: {short(message)})"
        return Trouble(45, reason_text, "a Secret or ConfigMap that the pod names is missing")
    if reason == "CrashLoopBackOff":
        ended, name = child(container, "lastState", "terminated"), text(container, "name")
        code = f"exit code {whole(ended, 'exitCode')}, {text(ended, 'reason', default='no reason given')}"
        reason_text = f"its container {name} crashes again and again ({code}; {whole(container, 'restartCount')} times)"
        return Trouble(42, reason_text, f"kubectl logs POD -c {name} --previous shows why")
    return None


_MOUNT = {
    "Unauthenticated": "normal for some minutes after muster up; if it stays: muster up RUN.yaml binds the identity",
    "PermissionDenied": "the pods' identity may not read the bucket; normal for some minutes after muster up",
    "NotFound": "there is no such bucket",
    "FailedPrecondition": "the bucket, or the pods' identity, is not set up as GCSFuse needs it",
    "ResourceExhausted": "the GCSFuse sidecar needs more memory or disk than its limits give",
    "InvalidArgument": "GCSFuse does not know an option of the mount",
}
"""gRPC's code in what the CSI driver of GCSFuse says of a mount that it tries again -> what to do."""


def _no_volume(node: str, message: str) -> Trouble:
    hint = next((hint for code, hint in _MOUNT.items() if f"code = {code}" in message), None)
    if "not registered in CSI drivers" in message or ("driver name gcsfuse" in message and "not found" in message):
        hint = "the node's GCSFuse driver is still starting, or the cluster has none: muster up RUN.yaml"
    return Trouble(35, f"a volume on node {node} ({short(message)})", hint)


def hosts_that_run(pods: Sequence[Manifest]) -> int:
    return sum(_role(pod) == "host" and _running(pod) for pod in pods)


def nodes_of_hosts(pods: Sequence[Manifest]) -> set[str]:
    """Nodes that pods of hosts are bound to and have not left."""
    bound = [pod for pod in pods if _role(pod) == "host" and text(pod, "status", "phase") in ("Pending", "Running")]
    return {node for pod in bound if (node := text(pod, "spec", "nodeName"))}


def no_supervisor(pods: Sequence[Manifest], events: Sequence[Manifest]) -> tuple[Manifest, Trouble] | None:
    """A supervisor's pod and why it has no node, where each of them was refused one; None: one has a node, or a node is
    being made."""
    own = [pod for pod in _newest_of_each_role(pods) if _role(pod) == "supervisor"]
    rows = [(pod, _no_node(pod, events)) for pod in own if not text(pod, "spec", "nodeName")]
    if not own or len(rows) < len(own) or any(trouble.rank not in _REFUSED for _, trouble in rows):
        return None
    return max(rows, key=lambda row: row[1].rank)


_REFUSED = (10, 18, 20)
"""Ranks of pods for which the scheduler finds no node, no pool matches, or the pool cannot grow."""


def _no_node(pod: Manifest, events: Sequence[Manifest]) -> Trouble:
    for event in reversed(_events_of(pod, events)):
        reason, message = text(event, "reason"), text(event, "message")
        if reason == "FailedScaleUp":
            return _no_scale_up(message)
        if reason == "TriggeredScaleUp":
            return Trouble(15, "a node is being created")
        if reason == "NotTriggerScaleUp":
            hint = "muster up RUN.yaml makes the pool; labels, taints and machine must match"
            return Trouble(18, f"no node pool matches ({short(message)})", hint)
    for row in children(pod, "status", "conditions"):
        if text(row, "type") == "PodScheduled" and text(row, "status") == "False":
            return Trouble(10, f"no node fits ({short(text(row, 'message', default='Unschedulable'))})")
        if text(row, "type") == "PodScheduled" and text(row, "reason") == "SchedulingGated":
            return Trouble(5, "topology assignment pending (scheduling gate)")
    return Trouble(8, "the scheduler")


def _no_scale_up(message: str) -> Trouble:
    lower, cause = message.lower(), of_text(message)
    if cause is Cause.NO_MACHINES or ("resources" in lower and "quota" not in lower):
        return Trouble(20, f"no capacity in the zone ({short(message)})", hint="another zone or mode")
    if cause is Cause.QUOTA or "quota" in lower:
        return Trouble(20, f"Google Cloud quota ({short(message)})", hint="raise it, or another region")
    return Trouble(20, f"the node pool cannot grow ({short(message)})")


def _events_of(pod: Manifest, events: Sequence[Manifest]) -> list[Manifest]:
    name = text(pod, "metadata", "name")
    own = [event for event in events if text(event, "involvedObject", "name") == name]
    return sorted(own, key=when)


def when(event: Manifest) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")


def _running(pod: Manifest) -> bool:
    return text(pod, "status", "phase") == "Running"


def _ending(pod: Manifest) -> str:
    status = child(pod, "status")
    for container in [*children(status, "initContainerStatuses"), *children(status, "containerStatuses")]:
        ended = child(container, "state", "terminated")
        if ended.get("exitCode"):
            of_container = f" of {container['name']}" if container in children(status, "initContainerStatuses") else ""
            return f"with exit code {ended['exitCode']}{of_container}" + (
                f" ({ended['reason']})" if ended.get("reason") else ""
            )
    message = f": {short(said)}" if (said := text(status, "message")) else ""  # an eviction names what ran out
    return f"({status.get('reason', 'no reason given')}{message})"


def _name(pod: Manifest) -> str:
    labels = child(pod, "metadata", "labels")
    role = text(labels, ROLE)
    if not role:
        return text(pod, "metadata", "name")
    index = host_number(labels, "0" if role == "supervisor" else "?")
    return role if (role, index) == ("supervisor", "0") else f"{role}-{index}"


def _role(pod: Manifest) -> str:
    return text(pod, "metadata", "labels", ROLE)


def short(message: str, length: int = 160) -> str:
    text = " ".join(message.split()).rstrip(".")
    return text if len(text) <= length else text[: length - 3] + "..."
