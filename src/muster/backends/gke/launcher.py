"""The ``Launcher`` for GKE: a run is a JobSet, found by its label; the cluster's own API does the rest.

The run's folder on the user's machine holds its intent and ``job.json``; the run itself lives in its bucket.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from muster.backends import run_home
from muster.backends.bucket_launcher import STOPPED_BY_USER, ended_with, local_dir
from muster.backends.gke.kubernetes.api import Cluster
from muster.backends.gke.manifests.jobset import MONITORING_KINDS
from muster.backends.gke.manifests.placement import Options, Placement, object_name, place, resolved
from muster.backends.gke.manifests.render import BACKEND, render
from muster.backends.gke.operate import locate, pod_exec
from muster.backends.gke.operate.cluster_snapshot import KUEUE_API, exit_code, label, take_snapshot, tasks
from muster.backends.gke.operate.exec_stream import attach
from muster.backends.gke.operate.log_follow import Follower
from muster.backends.gke.operate.status_reason import condition, explain
from muster.backends.gke.operate.submission import (
    ANNOTATION,
    kept_workloads,
    submission_of,
    taken_back,
    token_of,
)
from muster.backends.gke.pod.continuation import API as JOBSET_API
from muster.backends.gke.pod.continuation import newest
from muster.backends.google.launcher import GoogleLauncher
from muster.backends.machine_prices import machine_usd_per_hour
from muster.backends.protocols import Terminal
from muster.config.spec import RunSpec
from muster.core import resolved_file
from muster.core.errors import AccessError, BackendError, ConflictError, MusterError
from muster.core.typed_json import JsonObject, text
from muster.core.types import JobHandle, JobRequest, JobState, JobStatus, LogChunk
from muster.protocol.client import FromClient, SupervisorStatus
from muster.protocol.codec import encode
from muster.protocol.pipes import AskInPod
from muster.storage import run_registry, run_secrets
from muster.storage.home import Home

GONE_WITHIN_S = 120.0


@dataclass(kw_only=True)
class GkeLauncher(GoogleLauncher[Placement]):
    """Runs jobs as JobSets on the cluster that the run file names."""

    name: str = BACKEND
    options: Options = field(default_factory=Options)

    # ------------------------------------------------------------ before

    def resolve(self, spec: RunSpec) -> RunSpec:
        """The run file with what the machine decides: ranks a host, device, how long hosts are waited for."""
        return resolved(place(spec, run_id="run", run_dir="/unused", options=self.options))

    def render(self, spec: RunSpec, *, run_id: str, run_dir: str) -> JobRequest:
        """The manifests; pure."""
        return render(spec, run_id=run_id, run_dir=run_dir, options=self.options)

    # ------------------------------------------------------------ start

    def submit(self, request: JobRequest) -> JobHandle:
        """Check with the server's own dry run, then create; the same request twice makes one JobSet.

        Raises:
            BackendError: no such cluster, or the server refuses the objects.
            UsageError: no such queue.
            AccessError: not allowed.
            ConflictError: an older submission of the run is still being removed.
        """
        submission, local = submission_of(request), local_dir(request.run_id)
        try:
            cluster = locate.needed(submission.spec, request.run_id, self.options, self.session())
            jobsets = list(self._jobsets(cluster, request.run_id))
            going = [row for row in jobsets if taken_back(cluster, row)]
        except MusterError as error:
            error.asked = False
            raise
        there = newest([row for row in jobsets if row not in going])
        if (
            there is not None
            and _ended(there)
            and text(there, "metadata", "annotations", ANNOTATION) != submission.number
        ):
            going, there = jobsets, None
        if going:
            self._clear(cluster, request.run_id, going)
        if there is None:
            submission.check(cluster)
            if local is not None and (uri := submission.home):
                run_home.begin(local, request.run_id, uri, self.store)
            values = run_secrets.read(local) if local is not None else {}
            submission.create(cluster, token_of(local) or secrets.token_hex(32), values)
        if local is not None:
            self.record(local, request.run_id, int(submission.number))
        handle = self._handle(request.run_id, request.run_dir, there or submission.jobset)
        return replace(handle, warnings=tuple(submission.warnings))

    def look(self, request: JobRequest) -> list[str]:
        """What the cluster, its Kueue and the run's queue say of a request, in sentences; nothing is made.

        Raises as ``submit``.
        """
        submission = submission_of(request)
        submission.check(locate.needed(submission.spec, request.run_id, self.options, self.session()))
        return submission.warnings

    # ------------------------------------------------------------ watch

    def find(self, run_id: str) -> JobHandle | None:
        """By the run's folder on this machine, which says the cluster, and the label there."""
        cluster = self._known(run_id)
        jobset = self._jobset(cluster, run_id) if cluster else None
        spec = self._remembered(run_id)
        if jobset is None or spec is None:
            return None
        return self._handle(run_id, self._in_pods(spec, run_id), jobset)

    def poll(self, handle: JobHandle) -> JobStatus:
        """Look once at everything, and say it in one sentence."""
        cluster, home = self._known(handle.run_id), self.home(handle.run_id)
        if cluster is None:
            return self._gone(home) or JobStatus(state=JobState.ABSENT, reason="no such run, or its cluster is gone")
        snapshot = take_snapshot(cluster, self.options.namespace, handle.run_id)
        snapshot = replace(snapshot, usd_per_host_hour=self._usd_per_host_hour(handle.run_id))
        result = explain(snapshot)
        if result.state is JobState.ABSENT and (gone := self._gone(home)):
            return gone
        end = run_home.end_of(home) if home is not None and result.state.ended else None
        if end is not None and end.job == text(snapshot.jobset, "metadata", "name"):
            return replace(ended_with(end), tasks=tasks(snapshot.pods))
        reason = result.sentence + (f" (hint: {result.hint})" if result.hint else "")
        code = exit_code(snapshot, result.state)
        # To Kubernetes every end but success is a failure; the supervisor's own code says which one it was.
        state = JobState.STOPPED if result.state is JobState.FAILED and code == STOPPED_BY_USER else result.state
        holder = run_home.holder_of(home) if home is not None and locate.several_supervisors(snapshot.pods) else None
        return JobStatus(state=state, reason=reason, exit_code=code, tasks=tasks(snapshot.pods, holder))

    def logs(self, handle: JobHandle, *, after: Mapping[str, int] | None = None) -> Iterator[LogChunk]:
        """Output of each pod's own container, and of each rank, beyond ``after`` (bytes); sidecars are left out."""
        cluster, home = self._known(handle.run_id), self.home(handle.run_id)
        pods = self._pods(cluster, handle.run_id) if cluster is not None else []
        if home is None:
            yield from pod_exec.logs(cluster, pods, after or {}) if cluster is not None else ()
            return
        try:
            ranks, copies = list(run_home.logs(home, after or {})), False
        except MusterError:  # the pods' own output has the ranks' too
            ranks, copies = [], True
        if cluster is not None:
            yield from pod_exec.pod_logs(cluster, pods, after or {}, copies=copies)
        yield from ranks

    def follow(self, handle: JobHandle) -> Iterator[LogChunk]:
        """The same from the beginning, and as it comes until the run has ended: one open stream per pod."""
        cluster = self._known(handle.run_id)
        if cluster is None:
            return

        def over() -> bool:
            jobset = self._jobset(cluster, handle.run_id)
            return jobset is None or _ended(jobset)

        namespace = self.options.namespace
        yield from Follower(cluster=cluster, namespace=namespace, labels=label(handle.run_id), over=over).chunks()

    # ------------------------------------------------------------ inside

    def ask(
        self, run_id: str, message: FromClient, *, timeout_s: float = 5.0, resolved: str | None = None
    ) -> SupervisorStatus:
        """Carry a question to the run's supervisor, in its pod; ``resolved`` replaces the run file before it."""
        cluster = self._known(run_id)
        if cluster is None:
            raise BackendError(f"{run_id} has no cluster", hint=f"muster status {run_id}")
        question = AskInPod(message=encode(message).decode(), timeout_s=timeout_s)
        pods, home = self._pods(cluster, run_id), self.home(run_id)
        if home is None:
            return pod_exec.ask(cluster, pods, question, run_id, resolved)
        put = partial(run_home.publish, home)
        holder = run_home.holder_of(home)
        return pod_exec.ask(cluster, pods, question, run_id, resolved, holder=holder, publish=put)

    def mirror(self, run_id: str, folder: Path) -> int:
        """Bring the run's events to ``folder``, the local run folder's ``events``; returns how many bytes were new.

        Raises:
            MusterError: the bucket cannot be read. Where only pods see the run, and none answers, nothing is new.
        """
        if home := self.home(run_id):
            return home.mirror(folder.parent)
        cluster = self._known(run_id)
        return pod_exec.mirror(cluster, self._pods(cluster, run_id), folder) if cluster is not None else 0

    def exec(self, run_id: str, argv: Sequence[str], terminal: Terminal, *, host: int | None = None) -> int:
        """Run a command in a host's pod; returns its exit code.

        Raises:
            UsageError: no such host.
            BackendError: no pod of the run runs.
        """
        cluster = self._known(run_id)
        if cluster is None:
            raise BackendError(f"{run_id} has no cluster", hint=f"muster status {run_id}")
        target = locate.choose(locate.running(self._pods(cluster, run_id)), host, run_id)
        return attach(
            cluster, target, argv, out=terminal.out, err=terminal.err, typed=terminal.typed, tty=terminal.tty,
            size=terminal.size,
        )  # fmt: skip

    # ------------------------------------------------------------ end

    def cancel(self, handle: JobHandle) -> None:
        """Delete the JobSets and everything with the run's label; absent is success."""
        cluster = self._known(handle.run_id)
        for row in self._labelled(cluster, handle.run_id) if cluster else []:
            cluster.delete(row)  # type: ignore[union-attr]

    def remaining(self, handle: JobHandle) -> list[str]:
        """What still exists of the run on the cluster, after a moment for what is just going."""
        cluster = self._known(handle.run_id)
        if cluster is None:
            return []
        waited_s = 0.0
        while (left := self._left(cluster, handle.run_id)) and waited_s < GONE_WITHIN_S:
            self.clock.sleep(2.0)
            waited_s += 2.0
        return left

    # ------------------------------------------------------------ below

    def _labelled(self, cluster: Cluster, run_id: str) -> list[JsonObject]:
        kinds = [
            (JOBSET_API, "JobSet", "jobsets"),
            ("v1", "ConfigMap", "configmaps"),
            ("v1", "Secret", "secrets"),
            ("resource.k8s.io/v1", "ResourceClaimTemplate", "resourceclaimtemplates"),
            ("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
        ]
        rows: list[JsonObject] = [
            {**row, "apiVersion": api, "kind": kind}
            for api, kind, plural in kinds
            for row in cluster.list(api, plural, namespace=self.options.namespace, labels=label(run_id))
        ]
        for api, kind, plural in MONITORING_KINDS:
            with contextlib.suppress(AccessError):  # who may not list them has made none
                found = cluster.list(api, plural, namespace=self.options.namespace, labels=label(run_id))
                rows += [{**row, "apiVersion": api, "kind": kind} for row in found]
        return rows

    def _left(self, cluster: Cluster, run_id: str) -> list[str]:
        pods = [{**pod, "kind": "Pod"} for pod in self._pods(cluster, run_id)]
        queued = cluster.list(KUEUE_API, "workloads", namespace=self.options.namespace)
        workloads = [{**row, "kind": "Workload"} for row in kept_workloads(queued, object_name(run_id))]
        rows = [*self._labelled(cluster, run_id), *pods, *workloads]
        return [f"{row['kind']}/{text(row, 'metadata', 'name')}" for row in rows]

    def _pods(self, cluster: Cluster, run_id: str) -> Sequence[JsonObject]:
        return cluster.list("v1", "pods", namespace=self.options.namespace, labels=label(run_id))

    def _jobset(self, cluster: Cluster, run_id: str) -> JsonObject | None:
        return newest(self._jobsets(cluster, run_id))

    def _jobsets(self, cluster: Cluster, run_id: str) -> Sequence[JsonObject]:
        return cluster.list(JOBSET_API, "jobsets", namespace=self.options.namespace, labels=label(run_id))

    def _clear(self, cluster: Cluster, run_id: str, going: Sequence[JsonObject]) -> None:
        """Remove what an ended submission left: a JobSet of the same name can come only after it."""
        waited_s = 0.0
        uids = {text(row, "metadata", "uid") for row in going}
        for row in going:
            cluster.delete({**row, "apiVersion": JOBSET_API, "kind": "JobSet"})
        while left := [row for row in self._jobsets(cluster, run_id) if text(row, "metadata", "uid") in uids]:
            if waited_s >= GONE_WITHIN_S:
                name = text(left[0], "metadata", "name")
                raise ConflictError(f"the ended JobSet {name} is still being removed", hint="submit again in a minute")
            self.clock.sleep(2.0)
            waited_s += 2.0

    def _handle(self, run_id: str, run_dir: str, jobset: JsonObject) -> JobHandle:
        job_id = f"{text(jobset, 'metadata', 'namespace')}/{text(jobset, 'metadata', 'name')}"
        return JobHandle(run_id=run_id, backend=self.name, job_id=job_id, run_dir=run_dir)

    def _remembered(self, run_id: str) -> RunSpec | None:
        local = local_dir(run_id)
        if local is None or not (local / resolved_file.NAME).exists():
            return None
        return run_home.spec_to_end(local)

    def _usd_per_host_hour(self, run_id: str) -> float | None:
        """What a node of the run costs, by the catalogue; where the run file names several places, in the first."""
        if (spec := self._remembered(run_id)) is None:
            return None
        try:
            where = place(spec, run_id=run_id, run_dir="/unused", options=self.options)
        except MusterError:  # a run file that this version's catalogue would refuse still has a status
            return None
        region = next(iter(spec.resources.locations or ()), "").rpartition("-")[0]
        return machine_usd_per_hour(where.machine.name, where.mode.removesuffix("_queued"), region)

    def _known(self, run_id: str) -> Cluster | None:
        """The cluster that the run's folder on this machine names; None where there is none."""
        spec = self._remembered(run_id)
        return locate.cluster_of(spec, run_id, self.options, self.session()) if spec else None

    def _gone(self, home: Home | None) -> JobStatus | None:
        """How the run ended, where its home says so; its objects on the cluster go three days after the end."""
        end = run_home.end_of(home) if home is not None else None
        return ended_with(end) if end is not None else None

    def _in_pods(self, spec: RunSpec, run_id: str) -> str:
        """The folder of the run, for its pods."""
        local = run_registry.find(run_id, any_format=True).path
        return place(spec, run_id=run_id, run_dir=str(local), options=self.options).local_dir


def _ended(jobset: JsonObject) -> bool:
    return any((condition(jobset, kind) or {}).get("status") == "True" for kind in ("Completed", "Failed"))
