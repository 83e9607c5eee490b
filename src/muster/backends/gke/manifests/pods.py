"""Pod templates of the two roles: hosts (agents with GPUs) and the supervisor (small, CPU)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from muster.backends.gke.manifests.placement import HOST, SUPERVISOR, Mode, Placement, allocation_ends
from muster.backends.gke.manifests.volumes import (
    SCRATCH,
    TOKEN_FILE,
    bucket_annotations,
    bucket_volumes,
    ephemeral_storage,
    run_mount,
    run_volumes,
    scratch_environment,
    token_mount,
)
from muster.catalog.gke import Mount
from muster.core.typed_json import Json, JsonObject

Manifest = dict[str, Json]

LEAVE_AFTER, AT_MOST = "--leave-after-s", "--at-most"
NOT_MOVED = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
"""An autoscaler that empties a node would stop a run to save a part of it."""
GIVEN_UP = {"kueue.x-k8s.io/safe-to-forcefully-delete": "true"}
"""A pod on a node that hangs never ends, and its Job makes no other one: Kueue (gate FailureRecoveryPolicy) removes it
a minute after its deletion. What may still run there is fenced."""
HOSTS_OF_JOB = "muster/hosts-of-job"
"""Label of pods of which a Job has several: hosts of a slice of TPUs (``operate.locate.host_number``)."""
ROLE = "jobset.sigs.k8s.io/replicatedjob-name"
REQUIRED, PREFERRED = (f"{how}DuringSchedulingIgnoredDuringExecution" for how in ("required", "preferred"))
LOST_NODE_S = 30
"""Seconds after which pods of an unreachable node are given up; the cluster's default is 300."""


def secret_name(jobset: str) -> str:
    """Of the Secret with the values of the run file's ``secrets``; made at submission: it is in no file."""
    return f"{jobset}-secrets"


def host_template(placement: Placement, mode: Mode) -> Manifest:
    """The pod of one host: our agent, all GPUs or TPU chips of the node, its data NICs."""
    fabric = placement.machine.fabric
    mounts = (*fabric.mounts, *(fabric.sidecar.mounts if fabric.sidecar else ())) if placement.machine.gpus else ()
    spec: Manifest = {
        "restartPolicy": "Never",
        "serviceAccountName": placement.options.service_account,
        "terminationGracePeriodSeconds": mode.grace_s,
        "nodeSelector": dict(mode.node_selector),
        "tolerations": [*(dict(row) for row in mode.tolerations), *_give_up_lost_nodes()],
    }
    if not placement.chips[1]:
        spec["affinity"] = {"podAntiAffinity": {REQUIRED: [_same_node(placement, HOST)]}}
    elif placement.family.topology:
        spec["affinity"] = _close_together(placement)
    if placement.claims:
        spec["resourceClaims"] = [{"name": "rdma", "resourceClaimTemplateName": f"{placement.name}-rdma"}]
    sidecar = _sidecar(placement)
    copied = _weights(placement)
    spec["initContainers"] = [*([sidecar] if sidecar else []), _place(placement), *([copied] if copied else [])]
    spec["containers"] = [_agent(placement)]
    buckets = [volume for volume, _ in bucket_volumes(placement)]
    scratch: JsonObject = {"name": "scratch", "emptyDir": {}}
    spec["volumes"] = [*_node_volumes(mounts), _shared_memory(placement), *run_volumes(placement), scratch, *buckets]
    of_job = {HOSTS_OF_JOB: str(placement.hosts_of_job)} if placement.hosts_of_job > 1 else {}
    metadata: Manifest = {"labels": {**placement.labels, **of_job}, "annotations": _host_annotations(placement, mode)}
    return {"metadata": metadata, "spec": spec}


def supervisor_template(placement: Placement) -> Manifest:
    """A supervisor's pod: on a small CPU node of its own pool, so that no DWS request ever asks for it."""
    supervise = [
        "python", "-m", "muster.backends.gke.pod.main", SUPERVISOR, "--run-dir", placement.local_dir,
        "--requeue", "$(MUSTER_NAMESPACE)/$(MUSTER_JOBSET)", *_allocation(placement),
        "--grace-s", str(placement.supervisor_grace_s), "--",
        "python", "-m", "muster.app.supervisor", "--run-dir", placement.local_dir, "--run-id", placement.run_id,
    ]  # fmt: skip
    main = _container(placement, SUPERVISOR, supervise)
    main["env"] = [
        _pod_address(),
        {"name": "MUSTER_TOKEN_FILE", "value": TOKEN_FILE},
        _field("MUSTER_NAMESPACE", "metadata.namespace"),
        _field("MUSTER_JOBSET", "metadata.labels['jobset.sigs.k8s.io/jobset-name']"),
        *_hub_token(placement),
    ]
    main["volumeMounts"] = [run_mount(placement), token_mount()]
    main["resources"] = {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "2Gi"}}
    spec: Manifest = {
        "restartPolicy": "Never",
        "serviceAccountName": placement.options.service_account,
        "terminationGracePeriodSeconds": placement.supervisor_grace_s,
        "nodeSelector": {"cloud.google.com/gke-nodepool": placement.options.supervisor_pool},
        "tolerations": _give_up_lost_nodes(),
        "initContainers": [_place(placement)],
        "containers": [main],
        "volumes": run_volumes(placement),
    }
    if placement.supervisors > 1:
        # Preferred: on a cluster whose pool has room for one node the second one would wait forever, and Kueue's timer
        # for pods that are not ready with it, which takes all hosts. On the same node it still answers a crash.
        apart: JsonObject = {"weight": 100, "podAffinityTerm": _same_node(placement, SUPERVISOR)}
        spec["affinity"] = {"podAntiAffinity": {PREFERRED: [apart]}}
    if placement.options.supervisor_priority:
        spec["priorityClassName"] = placement.options.supervisor_priority
    return {"metadata": {"labels": dict(placement.labels), "annotations": {**NOT_MOVED, **GIVEN_UP}}, "spec": spec}


def network_annotations(placement: Placement) -> dict[str, str]:
    """Which NIC of the pod sits on which Network object; empty where the family has no data network."""
    networks = placement.machine.fabric.networks
    if not networks or placement.claims:
        return {}
    interfaces = [{"interfaceName": "eth0", "network": "default"}]
    interfaces += [{"interfaceName": network.interface, "network": network.name} for network in networks]
    rows = ",\n".join("  " + json.dumps(row, separators=(",", ":")) for row in interfaces)
    return {"networking.gke.io/default-interface": "eth0", "networking.gke.io/interfaces": f"[\n{rows}\n]\n"}


def nccl_environment(placement: Placement) -> dict[str, str]:
    """NCCL's variables: the few that Google's script leaves to us, or the whole list of the catalogue."""
    fabric = placement.machine.fabric
    if not placement.machine.gpus:
        return {}
    env = dict(fabric.env)
    if placement.options.nccl == "catalogue" and fabric.source:
        env |= {**fabric.env_when_not_sourced, **_tuner(placement)}
    return env


def _tuner(placement: Placement) -> dict[str, str]:
    folder, name = placement.machine.fabric.tuner_folder, placement.family.tuner_config
    return {"NCCL_TUNER_CONFIG_PATH": folder + name} if folder and name else {}


def _agent(placement: Placement) -> Manifest:
    fabric = placement.machine.fabric
    host = HOST_OF_SLICE if placement.hosts_of_job > 1 else "host-$(MUSTER_HOST_INDEX)"
    command = [
        "python", "-m", "muster.backends.gke.pod.main", HOST, "--run-dir", placement.local_dir, "--host", host,
        *(["--node-labels"] if placement.family.topology else []), "--",
        "python", "-m", "muster.agent.watchdog", "--run-dir", placement.local_dir,
        "--run-id", placement.run_id, "--host", host,
    ]  # fmt: skip
    if placement.machine.gpus and fabric.source and placement.options.nccl == "node":
        # As Google's recipes have it: NCCL's own variables again after the script, whose search path stays.
        ours = {**nccl_environment(placement), **_tuner(placement)}
        overrides = {name: value for name, value in ours.items() if name.startswith("NCCL_")}
        command = sourcing(fabric.source, overrides, command)
    elif placement.machine.gpus and fabric.wait_for:
        command = waiting(fabric.wait_for, command)
    elif placement.hosts_of_job > 1:
        command = numbering(placement.hosts_of_job, command)
    container = _container(placement, HOST, command)
    container["env"] = [
        _field("MUSTER_HOST_INDEX", "metadata.labels['jobset.sigs.k8s.io/job-index']"),
        _field("MUSTER_POD", "metadata.name"),
        _field("MUSTER_NODE", "spec.nodeName"),
        _pod_address(),
        {"name": "MUSTER_TOKEN_FILE", "value": TOKEN_FILE},
        *({"name": name, "value": value} for name, value in nccl_environment(placement).items()),
        *({"name": name, "value": value} for name, value in scratch_environment(placement).items()),
        *_secrets(placement),
    ]
    container["resources"] = _host_resources(placement)
    if fabric.capabilities and placement.machine.gpus:
        container["securityContext"] = {"capabilities": {"add": list(fabric.capabilities)}}
    node_mounts = fabric.mounts if placement.machine.gpus else ()
    container["volumeMounts"] = [
        *({"name": mount.name, "mountPath": mount.path} for mount in node_mounts),
        {"name": "shared-memory", "mountPath": "/dev/shm"},
        run_mount(placement),
        token_mount(),
        {"name": "scratch", "mountPath": SCRATCH},
        *(mount for _, mount in bucket_volumes(placement)),
    ]
    return container


def _host_resources(placement: Placement) -> Manifest:
    machine = placement.machine
    resource, count = placement.chips
    # Below the node's capacity, because GKE keeps part of it: GPUs or TPUs alone decide that a node holds one host.
    requests: Manifest = {
        "cpu": str(max(1, machine.vcpus // 2)),
        "memory": f"{max(1, machine.memory_gb // 2)}G",
        **ephemeral_storage(placement),
    }
    if not count:
        return {"requests": requests}
    resources: Manifest = {"requests": {**requests, resource: count}, "limits": {resource: count}}
    if placement.claims:
        resources["claims"] = [{"name": "rdma"}]
    return resources


def _sidecar(placement: Placement) -> Manifest | None:
    """The fabric's daemon as a native sidecar: an init container that stays, and ends with the pod."""
    daemon = placement.machine.fabric.sidecar
    if daemon is None or not placement.machine.gpus:
        return None
    return {
        "name": daemon.name,
        "image": daemon.image,
        "restartPolicy": "Always",
        "command": list(daemon.command),
        "args": list(daemon.args),
        "securityContext": {"capabilities": {"add": list(daemon.capabilities)}},
        "env": [{"name": name, "value": value} for name, value in daemon.env.items()],
        "volumeMounts": [{"name": mount.name, "mountPath": mount.path} for mount in daemon.mounts],
    }


def _host_annotations(placement: Placement, mode: Mode) -> dict[str, str]:
    annotations = {**NOT_MOVED, **GIVEN_UP, **network_annotations(placement), **bucket_annotations(placement)}
    if (daemon := placement.machine.fabric.sidecar) and placement.machine.gpus:
        devices = "".join(f"- path: {device}\n" for device in daemon.devices)
        annotations[f"devices.gke.io/container.{daemon.name}"] = devices
    return annotations


def _place(placement: Placement) -> Manifest:
    """Puts the run file into the run's folder, and where the run lives."""
    home = ["--home", placement.home] if placement.in_bucket else []
    to_run_dir = [
        "python", "-m", "muster.backends.gke.pod.init_container", "--run-dir", placement.local_dir,
        "--run-id", placement.run_id, *home,
    ]  # fmt: skip
    container = _container(placement, "place", to_run_dir)
    container["resources"] = {"requests": {"cpu": "100m", "memory": "256Mi"}}
    container["volumeMounts"] = [
        {"name": "run-file", "mountPath": "/etc/muster/run", "readOnly": True},
        run_mount(placement),
    ]
    return container


def _weights(placement: Placement) -> Manifest | None:
    """Copies the model into the bucket, on the first host that comes; the others wait for it."""
    model, copies = placement.spec.model, placement.model_copies
    if model is None or copies is None:
        return None
    revision = ["--revision", model.revision] if model.revision else []
    command = [
        "python", "-m", "muster.backends.gke.pod.weights", "--source", model.source or "", *revision,
        "--copies", copies,
    ]  # fmt: skip
    container = _container(placement, "weights", command)
    container["env"] = [{"name": "HF_HOME", "value": SCRATCH}, *_hub_token(placement)]
    container["resources"] = {"requests": {"cpu": "100m", "memory": "256Mi"}}
    container["volumeMounts"] = [{"name": "scratch", "mountPath": SCRATCH}]
    return container


def _pod_address() -> Manifest:
    """Agents and supervisor listen on the pod's address, which the lease then names."""
    return _field("MUSTER_BIND", "status.podIP")


def _field(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _allocation(placement: Placement) -> list[str]:
    """When to save before a flex-start allocation ends by itself, and how many the run may have."""
    seconds, most = allocation_ends(placement.spec, placement.mode)
    return [LEAVE_AFTER, str(seconds), AT_MOST, str(most)]


def _container(placement: Placement, name: str, command: list[str]) -> Manifest:
    return {"name": name, "image": placement.spec.resources.image or "", "command": command}


def _secrets(placement: Placement) -> list[Manifest]:
    """What the run file names, by reference, and the token of the hub."""
    others = [name for name in placement.spec.secrets if name != "HF_TOKEN"]
    return [*_hub_token(placement), *(_secret(name, secret_name(placement.name), name) for name in others)]


def _hub_token(placement: Placement) -> list[Manifest]:
    """The run file's, else the cluster's where there is one."""
    if "HF_TOKEN" in placement.spec.secrets:
        return [_secret("HF_TOKEN", secret_name(placement.name), "HF_TOKEN")]
    return [_secret("HF_TOKEN", placement.options.hugging_face_secret, "token", optional=True)]


def _secret(variable: str, name: str, key: str, **more: Json) -> Manifest:
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key, **more}}}


def _give_up_lost_nodes() -> list[Manifest]:
    lost: JsonObject = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_NODE_S}
    return [{"key": f"node.kubernetes.io/{state}", **lost} for state in ("not-ready", "unreachable")]


def _same_node(placement: Placement, role: str) -> JsonObject:
    """As one of the run's pods of ``role``."""
    selector: JsonObject = {"matchLabels": {**placement.labels, ROLE: role}}
    return {"topologyKey": "kubernetes.io/hostname", "labelSelector": selector}


def _close_together(placement: Placement) -> Manifest:
    """Hosts prefer the sub-block, then the block, of those that are there; nodes without these labels count as far."""
    selector: JsonObject = {"matchLabels": {**placement.labels, ROLE: HOST}}
    terms: list[JsonObject] = [
        {
            "weight": weight,
            "podAffinityTerm": {
                "topologyKey": f"cloud.google.com/gce-topology-{level}",
                "labelSelector": selector,
            },
        }
        for level, weight in (("block", 50), ("subblock", 50))
    ]
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": terms}}


def _node_volumes(mounts: tuple[Mount, ...]) -> list[Manifest]:
    volumes: dict[str, Manifest] = {}
    for mount in mounts:
        source: Manifest = {"hostPath": {"path": mount.host}} if mount.host else {"emptyDir": {}}
        volumes[mount.name] = {"name": mount.name, **source}
    return list(volumes.values())


def _shared_memory(placement: Placement) -> Manifest:
    limit = f"{placement.machine.shared_memory_gib}Gi"
    return {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": limit}}


# ----------------
# What runs in a container before Muster's own program: the shell line that waits for the data network. Pure


# A constant program: everything that varies arrives as "$0" and "$@", so nothing is ever quoted into it. The arguments
# are put aside because a sourced script sees them. Where it fails, or its last command is false, the agent starts all
# the same, and what is set after it wins over what it says. 75: the pod ends, and its replacement waits again.
WAIT = """\
script=$0 words=("$@")
trap 'exit 75' TERM
for ((waited = 0; waited < 600; waited++)); do
  [[ -r $script ]] && break
  ((waited % 30)) || echo "waiting for $script: the installer of the data network's libraries has not put it here" >&2
  sleep 1
done
[[ -r $script ]] || { echo "error: $script did not come in 600 s: look at the installers in kube-system" >&2; exit 75; }
"""
SOURCE_AND_RUN = f"""\
{WAIT}source "$script";
set -- "${{words[@]}}"
while [[ $1 != -- ]]; do export "$1"; shift; done
shift
trap - TERM
exec "$@"
"""
WAIT_AND_RUN = f"""\
{WAIT}trap - TERM
exec "${{words[@]}}"
"""
# Kubernetes puts no sum into an environment: a host of a slice is numbered here. $0: hosts of a slice.
NUMBER_AND_RUN = """\
host=host-$((MUSTER_HOST_INDEX * $0 + JOB_COMPLETION_INDEX))
for word in "$@"; do
  [[ $word == host-of-slice ]] && word=$host
  words+=("$word")
done
exec "${words[@]}"
"""
HOST_OF_SLICE = "host-of-slice"


def numbering(hosts: int, command: Sequence[str]) -> list[str]:
    """``command`` with the host's name for ``HOST_OF_SLICE``: slices are Jobs of ``hosts`` pods each."""
    return ["/bin/bash", "-c", NUMBER_AND_RUN, str(hosts), *command]


def sourcing(script: str, overrides: Mapping[str, str], command: Sequence[str]) -> list[str]:
    """``command`` after ``script`` of the node, with ``overrides`` set again after it."""
    words = [f"{name}={value}" for name, value in overrides.items()]
    return ["/bin/bash", "-c", SOURCE_AND_RUN, script, *words, "--", *command]


def waiting(path: str, command: Sequence[str]) -> list[str]:
    """``command`` once ``path`` of the node is there, with an environment that needs no script."""
    return ["/bin/bash", "-c", WAIT_AND_RUN, path, *command]
