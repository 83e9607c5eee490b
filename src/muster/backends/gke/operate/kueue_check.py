"""Would the cluster's Kueue admit this run to the right nodes, and would it end it for a host that is lost or slow?

By its live Configuration and the run's queue, as far as the user may read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from muster.backends.gke.kubernetes.api import Cluster
from muster.backends.gke.manifests import kueue_configuration as kueue
from muster.backends.gke.manifests.kueue_objects import API
from muster.backends.gke.manifests.placement import HOST, LEAD_S, SUPERVISOR
from muster.core.errors import AccessError, UsageError
from muster.core.typed_json import JsonObject, child, children, text, texts

HINT = (
    f"in ConfigMap {kueue.NAMESPACE}/{kueue.CONFIG_MAP}: waitForPodsReady: {{timeout: 8760h, recoveryTimeout: 0s}}, "
    "then restart its Deployment; muster up does so on clusters that it made"
)
LABEL = "kueue.x-k8s.io/queue-name"


@dataclass(frozen=True, kw_only=True)
class _Queue:
    """The run's cluster queue as far as it may be read; None: not known."""

    covered: frozenset[str] | None = None
    flavors: tuple[JsonObject, ...] | None = None
    """All of the queue; all of the cluster where the queue names none."""
    processors: tuple[JsonObject, ...] = ()
    """Those that cover ``cpu``, in the order in which Kueue tries them for a supervisor."""


def kueue_warnings(
    cluster: Cluster, jobset: JsonObject, *, max_hours: float | None = None, claims: Sequence[JsonObject] = ()
) -> list[str]:
    """One sentence for each way in which Kueue would evict the run, which holds hosts for ``max_hours`` (None: for any
    time), or may send its supervisor to the hosts' nodes; none for a run without a queue. ``claims``: its
    ResourceClaimTemplates.

    A user who may not read Kueue's namespace gets a warning instead: nothing is known then.

    Raises:
        UsageError: Kueue would never admit the run, or would admit it and no node could take its supervisor.
    """
    if not text(jobset, "metadata", "labels", LABEL):
        return []
    queue = _queue_of(cluster, jobset)
    unread = "Kueue's Configuration cannot be read, so it may evict a run that is a host short"
    unread += ", or refuse this one's resource claims (muster status says so)" if claims else ""
    try:
        config = cluster.get(_object("v1", "ConfigMap", kueue.CONFIG_MAP))
        deployment = cluster.get(_object("apps/v1", "Deployment", kueue.DEPLOYMENT)) or {}
    except AccessError as error:
        return [f"{unread}: {error}", *_misplaced(cluster, jobset, queue, None)]
    release = kueue.release_of(deployment)
    placed = _misplaced(cluster, jobset, queue, release)
    if config is None and not deployment:
        where = f"{kueue.NAMESPACE}/{kueue.CONFIG_MAP}"
        return [f"Kueue's Configuration is not in {where}, so it may evict a run that is a host short", *placed]
    configuration = kueue.parsed(text(config, "data", kueue.KEY)) or {}
    arguments = kueue.arguments_of(deployment)
    reason = kueue.claims_refusal(
        configuration, arguments=arguments, release=release, classes=_classes(claims), covered=queue.covered
    )
    if reason is not None and claims:
        sentence = f"Kueue of this cluster never admits the run: {reason}"
        if config is not None and release is not None:
            raise UsageError(sentence, hint=kueue.CLAIMS_HINT)
        placed.append(f"it may be that {sentence} ({kueue.CLAIMS_HINT})")
    found = kueue.evictions(
        configuration,
        arguments=arguments,
        release=release,
        topology=queue.flavors is None or any(text(flavor, "spec", "topologyName") for flavor in queue.flavors),
        # Its hours count from its first host, Kueue's from before it.
        lasts_s=kueue.LONGEST_RUN_S if max_hours is None else max_hours * 3600 + LEAD_S,
    )
    return [*(f"Kueue of this cluster ends runs: {risk} ({HINT})" for risk in found), *placed]


def _queue_of(cluster: Cluster, jobset: JsonObject) -> _Queue:
    name, namespace = text(jobset, "metadata", "labels", LABEL), text(jobset, "metadata", "namespace")
    covered = None
    try:
        local = cluster.get(_queue("LocalQueue", name, namespace))
        queue = cluster.get(_queue("ClusterQueue", text(local, "spec", "clusterQueue"), "")) if local else None
        groups = children(queue, "spec", "resourceGroups")
        if groups:
            covered = frozenset(resource for group in groups for resource in texts(group, "coveredResources"))
        there = {text(flavor, "metadata", "name"): flavor for flavor in cluster.list(API, "resourceflavors")}
    except AccessError:
        return _Queue(covered=covered)

    def flavors(rows: Sequence[JsonObject]) -> tuple[JsonObject, ...]:
        names = [text(flavor, "name") for group in rows for flavor in children(group, "flavors")]
        return tuple(there[name] for name in names if name in there)

    processors = flavors([group for group in groups if "cpu" in texts(group, "coveredResources")])
    return _Queue(covered=covered, flavors=flavors(groups) if groups else tuple(there.values()), processors=processors)


def _misplaced(cluster: Cluster, jobset: JsonObject, queue: _Queue, release: kueue.Release | None) -> list[str]:
    """A warning where Kueue may give the supervisor the hosts' flavour, and a node of both kinds is not known of.

    Raises:
        UsageError: it does, and there is no such node.
    """
    if release is not None and not kueue.matches_by_own_keys(release):
        return []
    pods = {
        text(role, "name"): child(role, "template", "spec", "template", "spec")
        for role in children(jobset, "spec", "replicatedJobs")
    }
    asked, wanted = child(pods, SUPERVISOR, "nodeSelector"), child(pods, HOST, "nodeSelector")
    flavor = next((flavor for flavor in queue.processors if _fits(child(pods, SUPERVISOR), flavor)), {})
    labels = {key: str(value) for key, value in child(flavor, "spec", "nodeLabels").items()}
    if not asked or not any(key not in asked and wanted.get(key) == value for key, value in labels.items()):
        return []
    name = text(flavor, "metadata", "name")
    sentence = f"Kueue gives the supervisor the hosts' flavour {name}, and no node is of that and its own pool"
    hint = (
        f"muster up RUN.yaml repairs its queue; of your own: nodeTaints of flavour {name} with the taint of its nodes "
        "(docs/how-to/gke.md, A Kueue of your own)"
    )
    try:
        if cluster.list("v1", "nodes", labels={**labels, **{key: str(value) for key, value in asked.items()}}):
            return []
        if release is not None:
            raise UsageError(f"{sentence}: hosts would come and bill, and the run never start", hint=hint)
    except AccessError:
        pass
    return [f"it may be that {sentence}: hosts would come and bill, and the run never start ({hint})"]


def _fits(pod: JsonObject, flavor: JsonObject) -> bool:
    """Whether Kueue takes a pod for one of this flavour, quota apart: by taints, and by the flavour's own labels."""
    tolerations = [*children(pod, "tolerations"), *children(flavor, "spec", "tolerations")]
    taints = [row for row in children(flavor, "spec", "nodeTaints") if text(row, "effect") != "PreferNoSchedule"]
    labels, selector = child(flavor, "spec", "nodeLabels"), child(pod, "nodeSelector")
    tolerated = all(any(_tolerates(row, taint) for row in tolerations) for taint in taints)
    return tolerated and all(labels[key] == value for key, value in selector.items() if key in labels)


def _tolerates(toleration: JsonObject, taint: JsonObject) -> bool:
    def same(key: str) -> bool:
        return text(toleration, key) == text(taint, key)

    exists = text(toleration, "operator") == "Exists"
    of_key = same("key") or (exists and not text(toleration, "key"))
    return of_key and (exists or same("value")) and (same("effect") or not text(toleration, "effect"))


def _classes(claims: Sequence[JsonObject]) -> set[str]:
    requests = [row for claim in claims for row in children(claim, "spec", "spec", "devices", "requests")]
    return {text(request, "exactly", "deviceClassName") for request in requests}


def _queue(kind: str, name: str, namespace: str) -> JsonObject:
    return {"apiVersion": API, "kind": kind, "metadata": {"name": name or "none", "namespace": namespace or "default"}}


def _object(api: str, kind: str, name: str) -> JsonObject:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name, "namespace": kueue.NAMESPACE}}


def refuse_unknown_queue(cluster: Cluster, jobset: JsonObject) -> None:
    """Before anything is created; nothing for a run without a queue, or a cluster that does not know Kueue's kinds.

    Raises:
        UsageError: no such queue; the hint names those that are there.
    """
    name, namespace = text(jobset, "metadata", "labels", LABEL), text(jobset, "metadata", "namespace")
    queue: JsonObject = {"apiVersion": API, "kind": "LocalQueue", "metadata": {"name": name, "namespace": namespace}}
    if not name or cluster.get(queue) is not None:
        return
    if not cluster.knows(queue):
        return
    there = sorted(text(queue, "metadata", "name") for queue in cluster.list(API, "localqueues", namespace=namespace))
    hint = "muster up RUN.yaml makes it" + (f"; or resources.queue: {', '.join(there)}" if there else "")
    raise UsageError(f"there is no queue {name!r} in namespace {namespace!r} of the cluster", hint=hint)
