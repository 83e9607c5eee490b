"""What would be sent to GKE, exactly: one pure function from a run file to manifests.

``cluster.yaml`` is what a cluster needs once for this kind of machine (queue, networks); ``run.yaml`` is the run.
"""

from __future__ import annotations

import json

from muster.backends.gke.manifests import pods
from muster.backends.gke.manifests.jobset import Manifest, jobset, run_objects
from muster.backends.gke.manifests.kueue_objects import account_objects, queue_objects
from muster.backends.gke.manifests.placement import HOST, SUPERVISOR, Options, Placement, mode_of, place, resolved
from muster.backends.gke.manifests.spec_rules import refuse
from muster.backends.gke.manifests.yaml_text import dump
from muster.catalog.gke import DataNetwork
from muster.config.spec import RunSpec
from muster.core.typed_json import JsonObject, children, text, texts, whole
from muster.core.types import JobRequest, TaskSpec

BACKEND = "gke"
NETWORK_API = "networking.gke.io/v1"


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


def network_objects(placement: Placement) -> list[Manifest]:
    """Empty where the family has no data network, or gets it by resource claims."""
    if placement.claims or not placement.machine.gpus:
        return []
    prefix = placement.options.network_prefix
    return [
        manifest
        for network in placement.machine.fabric.networks
        for manifest in (_parameters(network, prefix), _network(network))
    ]


def _parameters(network: DataNetwork, prefix: str) -> Manifest:
    spec = {"vpc": f"{prefix}-{network.vpc}", "vpcSubnet": f"{prefix}-{network.subnet}", "deviceMode": network.mode}
    return {"apiVersion": NETWORK_API, "kind": "GKENetworkParamSet", "metadata": {"name": network.name}, "spec": spec}


def _network(network: DataNetwork) -> Manifest:
    reference = {"group": "networking.gke.io", "kind": "GKENetworkParamSet", "name": network.name}
    spec: JsonObject = {"type": "Device", "parametersRef": reference}
    return {"apiVersion": NETWORK_API, "kind": "Network", "metadata": {"name": network.name}, "spec": spec}
