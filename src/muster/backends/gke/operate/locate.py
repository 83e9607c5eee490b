"""Which cluster a run lives on, and which of its pods can be spoken to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from muster.backends.gke.kubernetes.api import Cluster
from muster.backends.gke.manifests.placement import HOST, SUPERVISOR, Options, place
from muster.backends.gke.manifests.pods import HOSTS_OF_JOB
from muster.backends.gke.operate.exec_stream import Target
from muster.backends.gke.provision.cluster_objects import connect
from muster.backends.gke.provision.inventory.resource_names import Site, site
from muster.backends.google.session import Session
from muster.config.spec import RunSpec
from muster.core.errors import AccessError, BackendError, UsageError, install_command
from muster.core.typed_json import JsonObject, child, text

ROLE = "jobset.sigs.k8s.io/replicatedjob-name"
INDEX = "jobset.sigs.k8s.io/job-index"
COMPLETION = "batch.kubernetes.io/job-completion-index"
JOBSET = "jobset.sigs.k8s.io/jobset-name"


def sites_of(spec: RunSpec, run_id: str, options: Options) -> list[Site]:
    """Every place where the run file's cluster may be, in the order in which ``up`` tries them; one for each region."""
    placement = place(spec, run_id=run_id, run_dir="/unused", options=options)
    zones = spec.resources.locations
    result = [site(placement, zone=zone) for zone in zones] or [site(placement)]
    return list({place.region: place for place in reversed(result)}.values())[::-1]


def host_number(labels: JsonObject, default: str = "0") -> str:
    """Of a pod, by its labels: its Job's number, or of hosts of a slice its number over all slices."""
    job, of_job = text(labels, INDEX, default=default), text(labels, HOSTS_OF_JOB)
    if not (job.isdigit() and of_job.isdigit()):
        return job
    return str(int(job) * int(of_job) + int(text(labels, COMPLETION, default="0")))


def task(pod: JsonObject) -> tuple[str, str]:
    """(task, container) of a pod: ``supervisor``, ``supervisor-1`` (stands by, or took over) or ``host-3``, and the
    container that does its work."""
    labels = child(pod, "metadata", "labels")
    role, index = text(labels, ROLE, default=HOST), host_number(labels)
    return (SUPERVISOR if role == SUPERVISOR and index == "0" else f"{role}-{index}"), role


def running(pods: Sequence[JsonObject]) -> dict[str, Target]:
    """Task -> its newest pod that runs."""
    return {task(pod)[0]: _target(pod) for pod in sorted(pods, key=_made) if _runs(pod)}


def supervisor(pods: Sequence[JsonObject], holder: str | None = None) -> Target | None:
    """The pod whose address is ``holder``'s (the lease's), else the newest supervisor's that runs; None: none runs.

    Without the lease a pod that stands by may be taken for the one that holds the run: it says so when it is asked.
    """
    found = sorted((pod for pod in pods if task(pod)[1] == SUPERVISOR and _runs(pod)), key=_made)
    held = [pod for pod in found if holder is not None and text(pod, "status", "podIP") == holder]
    return _target((held or found)[-1]) if found else None


def several_supervisors(pods: Sequence[JsonObject]) -> bool:
    """Whether there is one that stands by."""
    return len({task(pod)[0] for pod in pods if task(pod)[1] == SUPERVISOR}) > 1


def _runs(pod: JsonObject) -> bool:
    return text(pod, "status", "phase") == "Running" and not text(pod, "metadata", "deletionTimestamp")


def _made(pod: JsonObject) -> str:
    return text(pod, "metadata", "creationTimestamp")


def _target(pod: JsonObject) -> Target:
    metadata = child(pod, "metadata")
    return Target(namespace=text(metadata, "namespace"), pod=text(metadata, "name"), container=task(pod)[1])


def choose(result: Mapping[str, Target], host: int | None, run_id: str) -> Target:
    """The pod of that host; without a number the first host's, or the supervisor's where no host runs.

    Raises:
        UsageError: no such host.
        BackendError: no pod of the run runs.
    """
    if not result:
        raise BackendError(f"no pod of {run_id} runs", hint=f"muster status {run_id} says what it waits for")
    if host is not None:
        if f"{HOST}-{host}" not in result:
            raise UsageError(f"no host {host} of {run_id} runs", hint="there are: " + ", ".join(sorted(result)))
        return result[f"{HOST}-{host}"]
    order = sorted(result, key=lambda name: (name.startswith(SUPERVISOR), len(name), name))
    return result[order[0]]


def by_kubeconfig(spec: RunSpec) -> bool:
    """Whether the run file names its cluster by ``kubeconfig:PATH[#CONTEXT]``."""
    return (spec.resources.cluster or "").startswith("kubeconfig:")


def cluster_of(spec: RunSpec, run_id: str, options: Options, session: Session) -> Cluster | None:
    """The run file's cluster: by kubeconfig, or Google's of that name; None where there is none."""
    if by_kubeconfig(spec):
        try:
            from muster.backends.gke.kubernetes import config
        except ImportError as error:
            raise AccessError(f"{error.name} is not installed", hint=install_command("gke")) from error
        return config.connect(str(spec.resources.cluster), session.clock)
    for where in sites_of(spec, run_id, options):
        if result := connect(where, session):
            return result
    return None


def needed(spec: RunSpec, run_id: str, options: Options, session: Session) -> Cluster:
    """The same. Raises BackendError where there is none."""
    result = cluster_of(spec, run_id, options, session)
    if result is None:
        places = sites_of(spec, run_id, options)
        regions = ", ".join(where.region for where in places)
        raise BackendError(
            f"no cluster {places[0].cluster} in {regions} of project {places[0].project}",
            hint="muster up RUN.yaml makes it",
        )
    return result
