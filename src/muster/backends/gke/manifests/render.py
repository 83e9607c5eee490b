"""What would be sent to GKE, exactly: one pure function from a run file to manifests.

``cluster.yaml`` is what a cluster needs once for this kind of machine (queue, networks); ``run.yaml`` is the run.
"""

from __future__ import annotations

import json

from muster.backends.gke.manifests import pods
from muster.backends.gke.manifests.cluster_options import Options
from muster.backends.gke.manifests.jobset import Manifest, jobset, run_objects
from muster.backends.gke.manifests.kueue_objects import account_objects, queue_objects
from muster.backends.gke.manifests.network_objects import network_objects
from muster.backends.gke.manifests.placement import HOST, SUPERVISOR, Placement, mode_of, place, resolved
from muster.backends.gke.manifests.spec_rules import refuse
from muster.backends.gke.manifests.yaml_text import dump
from muster.config.spec import RunSpec
from muster.core.typed_json import JsonObject, children, text, texts, whole
from muster.core.types import JobRequest, TaskSpec

BACKEND = "gke"


def render(spec: RunSpec, *, run_id: str, run_dir: str, options: Options | None = None) -> JobRequest:
    """The job request with its manifests under ``files``.

    Raises:
        RunFileError: rules across keys are broken; all of them at once, with reasons.
        UsageError: no such machine or accelerator.
    """
    placement = place(spec, run_id=run_id, run_dir=run_dir, options=options or Options())
    refuse(placement)
    replicated = children(jobset(placement, mode_of(placement)), "spec", "replicatedJobs")
    roles = {text(role, "name"): role for role in replicated}
    return JobRequest(
        run_id=run_id,
        backend=BACKEND,
        run_dir=placement.local_dir,
        tasks=(_task(roles[SUPERVISOR]), _task(roles[HOST], pods.nccl_environment(placement))),
        labels=placement.labels,
        files={"cluster.yaml": dump(cluster_objects(placement)), "run.yaml": dump(run_manifests(placement))},
    )


def cluster_objects(placement: Placement) -> list[Manifest]:
    """What the cluster needs before the first run of this kind."""
    queue = queue_objects(placement) if placement.kueue else []
    return [*account_objects(placement), *network_objects(placement), *queue]


def run_manifests(placement: Placement) -> list[Manifest]:
    """What one run is, with the whole spec as JSON; the token's Secret is made at submission: it is in no file."""
    whole = json.dumps(resolved(placement).model_dump(mode="json"), indent=1, sort_keys=True) + "\n"
    return run_objects(placement, run_file_text(placement), whole)


def run_file_text(placement: Placement) -> str:
    """The run file as the pods get it: only what differs from the defaults."""
    return dump([placement.spec.model_dump(mode="json", exclude_defaults=True)])


def _task(role: JsonObject, env: dict[str, str] | None = None) -> TaskSpec:
    argv = texts(role, "template", "spec", "template", "spec", "containers", 0, "command")
    return TaskSpec(name=text(role, "name"), argv=tuple(argv), count=whole(role, "replicas"), env=env or {})
