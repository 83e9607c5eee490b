"""One submission of a run to a cluster: its objects as rendered, with what only the cluster and this machine know."""

from __future__ import annotations

import base64
import contextlib
import functools
import hmac
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from muster.backends import code_bundle
from muster.backends.gke.kubernetes.api import Cluster
from muster.backends.gke.manifests.jobset import MONITORING_API, MONITORING_KINDS, metrics_secret_name
from muster.backends.gke.manifests.pods import secret_name
from muster.backends.gke.operate.kueue_check import kueue_warnings, refuse_unknown_queue
from muster.backends.gke.pod.continuation import API as JOBSET_API
from muster.backends.gke.pod.continuation import INSTANCE
from muster.backends.gke.pod.init_container import CODE
from muster.config.spec import RunSpec
from muster.core.errors import AccessError, ConflictError, UsageError
from muster.core.typed_json import JsonObject, at, changed, child, children, text, texts
from muster.core.types import JobRequest
from muster.storage.job_record import SUBMISSION
from muster.transport.secure_session import token_for_pages

ANNOTATION = "muster/submission"
ANNOTATIONS = ("metadata", "annotations")
REQUEST = "muster/request"
"""Annotation of the token's Secret: which request made it."""
PRIORITY_API = "scheduling.k8s.io/v1"


@dataclass
class Submission:
    """The objects of a request, in the order of creation."""

    spec: RunSpec
    number: str
    documents: list[JsonObject]
    warnings: list[str] = field(default_factory=list)

    @property
    def jobset(self) -> JsonObject:
        return next(row for row in self.documents if text(row, "kind") == "JobSet")

    @property
    def home(self) -> str | None:
        """The bucket's folder in the pods' environment; None: their run folder is the home."""
        for role in children(self.jobset, "spec", "replicatedJobs"):
            for container in children(role, "template", "spec", "template", "spec", "initContainers"):
                argv = texts(container, "command")
                if "--home" in argv[:-1]:
                    return argv[argv.index("--home") + 1]
        return None

    def check(self, cluster: Cluster) -> None:
        """Before anything is created: the queue, what Kueue would do to the run, and the server's own dry run.

        Raises:
            UsageError: no such queue, or Kueue would never start the run.
            BackendError, AccessError: the server refuses an object.
        """
        refuse_unknown_queue(cluster, self.jobset)
        claims = [row for row in self.documents if text(row, "kind") == "ResourceClaimTemplate"]
        hours = self.spec.limits.max_hours
        self.warnings += kueue_warnings(cluster, self.jobset, max_hours=hours, claims=claims)
        self._without_unknown_priority(cluster)
        self._without_unknown_monitoring(cluster)
        for manifest in self.documents:
            cluster.apply(manifest, dry_run=True)

    def create(self, cluster: Cluster, token: str, values: Mapping[str, str]) -> None:
        """The Secrets of the tokens and of the run file's ``secrets`` (``values``), then the objects.

        The token's Secret is marked with a digest of the request, and owns the rest. So the same request twice is one
        job; what arrives after the run was cancelled has an owner that is gone, and Kubernetes removes it (but for a
        Secret of the token itself, which stays until the next submission or ``down``); and what arrives after the run
        was submitted again changes nothing, since all are created, not applied.

        Raises:
            UsageError: a value is not there.
            ConflictError: another submission of the run is there, or under way.
        """
        name = text(self.jobset, "metadata", "name")
        if missing := self.spec.secrets.keys() - values.keys():
            raise UsageError(f"the value of secrets.{min(missing)} is not here", hint="submit the run file again")
        rest = [self._secret(secret_name(name), **values)] if self.spec.secrets else []
        if self.spec.metrics.port is not None:
            rest.append(self._secret(metrics_secret_name(name), token=token_for_pages(token.encode())))
        rest += self.documents
        # Keyed: a digest of secrets in the open would let them be guessed.
        digest = hmac.digest(token.encode(), json.dumps([self.number, rest], sort_keys=True).encode(), "sha256").hex()
        first = changed(self._secret(f"{name}-token", token=token), {REQUEST: digest[:32]}, *ANNOTATIONS)
        made = _made(
            cluster, first,
            mine=lambda there: at(there, *ANNOTATIONS, REQUEST) == digest[:32],
            lives=lambda there: _owns_a_jobset(cluster, there, self.jobset),
        )  # fmt: skip
        uid = text(made, "metadata", "uid")
        owner: JsonObject = {"apiVersion": "v1", "kind": "Secret", "name": f"{name}-token", "uid": uid}
        for manifest in rest:
            _made(
                cluster, changed(manifest, [owner], "metadata", "ownerReferences"),
                mine=lambda there: uid in [row["uid"] for row in _owners(there)],
                lives=functools.partial(_lives, cluster),
            )  # fmt: skip
        with contextlib.suppress(AccessError):  # an account that may make Secrets and not read them skips this check
            if text(cluster.get(first), "metadata", "uid") != uid:
                raise ConflictError(f"another submission of {name} came between", hint="muster status shows it")

    def _secret(self, name: str, **values: str) -> JsonObject:
        metadata: JsonObject = {
            "name": name,
            "namespace": text(self.jobset, "metadata", "namespace"),
            "labels": dict(child(self.jobset, "metadata", "labels")),
        }
        data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
        return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "data": data}

    def _without_unknown_monitoring(self, cluster: Cluster) -> None:
        """The page is served all the same; another collector may scrape it."""
        if any(text(row, "kind") == "PodMonitoring" for row in self.documents) and not cluster.serves(MONITORING_API):
            kinds = [kind for _, kind, _ in MONITORING_KINDS]
            self.documents = [row for row in self.documents if text(row, "kind") not in kinds]
            self.warnings.append("the cluster has no managed collection (PodMonitoring): nothing scrapes the run")

    def _without_unknown_priority(self, cluster: Cluster) -> None:
        """A pod of a class that is not there is refused, and Kueue makes no Workload: such a cluster runs without."""
        jobset = self.jobset
        roles = []
        for role in children(jobset, "spec", "replicatedJobs"):
            where = ("template", "spec", "template", "spec")
            name = text(role, *where, "priorityClassName")
            if name and not _there(cluster, name):
                self.warnings.append(f"the cluster has no PriorityClass {name} (muster up makes it): the run has none")
                pod = {key: value for key, value in child(role, *where).items() if key != "priorityClassName"}
                role = changed(role, pod, *where)
            roles.append(role)
        if roles != at(jobset, "spec", "replicatedJobs"):
            without = changed(jobset, roles, "spec", "replicatedJobs")
            self.documents = [without if row is jobset else row for row in self.documents]


def taken_back(cluster: Cluster, jobset: JsonObject) -> bool:
    """Whether it is going, or will: its submission was cancelled, and with it the Secret that it belongs to. An
    account that may not read Secrets gets False."""
    try:
        return bool(text(jobset, "metadata", "deletionTimestamp")) or _orphaned(cluster, jobset)
    except AccessError:
        return False


def _lives(cluster: Cluster, there: JsonObject) -> bool:
    """Whether it is another submission's that is there, or under way. A JobSet is not looked into: ``submit`` has."""
    return text(there, "kind") == "JobSet" or (bool(_owners(there)) and not _orphaned(cluster, there))


def _orphaned(cluster: Cluster, there: JsonObject) -> bool:
    """Whether the Secret that it belongs to is gone."""
    for owner in _owners(there):
        metadata = {"name": text(owner, "name"), "namespace": text(there, "metadata", "namespace")}
        secret = cluster.get({"apiVersion": "v1", "kind": "Secret", "metadata": metadata})
        if text(secret, "metadata", "uid") != text(owner, "uid"):
            return True
    return False


def _owners(there: JsonObject) -> list[JsonObject]:
    return [row for row in children(there, "metadata", "ownerReferences") if text(row, "kind") == "Secret"]


def _owns_a_jobset(cluster: Cluster, secret: JsonObject, jobset: JsonObject) -> bool:
    """Whether a run that is there belongs to this Secret of its token."""
    namespace, labels = text(jobset, "metadata", "namespace"), {INSTANCE: text(jobset, "metadata", "labels", INSTANCE)}
    uid = text(secret, "metadata", "uid")
    there = cluster.list(JOBSET_API, "jobsets", namespace=namespace, labels=labels)
    return any(uid in [row["uid"] for row in _owners(one)] for one in there)


def _made(
    cluster: Cluster, manifest: JsonObject, *, mine: Callable[[JsonObject], bool], lives: Callable[[JsonObject], bool]
) -> JsonObject:
    """The object, created; under its name, what is ``mine`` is taken, and what an earlier submission left goes unless
    it ``lives``."""
    for _ in range(3):  # a quota's own races are answered with 409, too, and nothing is there
        if (new := cluster.create(manifest)) is not None:
            return new
        there = cluster.get(manifest)
        if there is None:
            continue
        if mine(there):
            return there
        if lives(there):
            break
        cluster.delete(changed(manifest, text(there, "metadata", "uid"), "metadata", "uid"))
    name = f"{text(manifest, 'kind')}/{text(manifest, 'metadata', 'name')}"
    raise ConflictError(f"{name} of another submission is there, or just going", hint="submit again in a minute")


def submission_of(request: JobRequest) -> Submission:
    """What ``request`` sends, numbered, with the user's own code as it is now."""
    from ruamel.yaml import YAML

    rows = [row for row in YAML(typ="safe", pure=True).load_all(request.files["run.yaml"]) if row]
    number = request.labels.get(SUBMISSION, "1")
    (held,) = (text(row, "data", "resolved.json") for row in rows if text(row, "kind") == "ConfigMap")
    spec = RunSpec.model_validate_json(held)
    shipped, code = code_bundle.pack(spec, request.run_dir)
    documents: list[JsonObject] = []
    for row in rows:
        if text(row, "kind") == "JobSet":
            row = changed(row, number, "metadata", "annotations", ANNOTATION)
        if text(row, "kind") == "ConfigMap":
            row = changed(row, number, "data", SUBMISSION)
            if code is not None:
                row = changed(row, shipped.model_dump_json(indent=1) + "\n", "data", "resolved.json")
                row = changed(row, base64.b64encode(code).decode(), "binaryData", CODE)
        documents.append(row)
    return Submission(spec=spec, number=number, documents=documents)


def token_of(local: Path | None) -> str | None:
    """The secret by which agents and supervisor know each other, from the run's folder."""
    path = local / "token" if local else None
    return path.read_text().strip() if path and path.exists() else None


def kept_workloads(rows: Sequence[JsonObject], jobset: str) -> list[JsonObject]:
    """Kueue's objects of a run's JobSets (the name, or with ``-c2`` after it), which stay while Kueue is down."""
    return [
        row
        for row in rows
        for owner in children(row, "metadata", "ownerReferences")
        if text(owner, "kind") == "JobSet" and _same_run(text(owner, "name"), jobset)
    ]


def _same_run(name: str, jobset: str) -> bool:
    tail = name.removeprefix(f"{jobset}-c")
    return name == jobset or (tail != name and tail.isdigit())


def _there(cluster: Cluster, name: str) -> bool:
    """Who may not look is taken to have it."""
    try:
        found = cluster.get({"apiVersion": PRIORITY_API, "kind": "PriorityClass", "metadata": {"name": name}})
    except AccessError:
        return True
    return found is not None
