"""The same objects as a Helm chart, for teams that deploy by GitOps.

The templates in ``helm`` are the same for every run; ``files/objects.json`` has the plain manifests with marks in the
places that a value decides, so that the chart cannot drift from what ``submit`` sends.
"""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from typing import Any

from muster import __version__
from muster.backends.gke.manifests import pods
from muster.backends.gke.manifests.jobset import run_objects
from muster.backends.gke.manifests.kueue_objects import CPU_FLAVOR, account_objects, priority_class, queue_objects
from muster.backends.gke.manifests.placement import (
    CLAIM_FOLDER,
    Options,
    Placement,
    allocation_ends,
    longest_run_s,
    mode_of,
    object_name,
    place,
    resolved,
)
from muster.backends.gke.manifests.render import network_objects
from muster.backends.gke.manifests.spec_rules import refuse
from muster.backends.gke.manifests.yaml_text import dump
from muster.config.spec import Lora, RunSpec
from muster.core.typed_json import Json, JsonObject, at, changed, child, parse_object, text, texts

#: Of these Helm lets one release be the owner: the chart makes the first if asked to, and never the others.
CLUSTERS_OWN = ("PriorityClass", "ClusterRole", "ClusterRoleBinding")
TEMPLATES = ("_objects.tpl", "run.yaml", "queue.yaml", "networks.yaml")


def chart(spec: RunSpec, *, run_id: str, run_dir: str, options: Options | None = None) -> dict[str, str]:
    """Relative name -> text of every file of the chart. Installing it with its own values gives the plain objects, but
    for the supervisors' priority: ``submit`` sees whether the cluster has the class, a chart needs a value for it.

    Raises:
        RunFileError, UsageError: as ``render.render``.
    """
    placement = place(spec, run_id=object_name(run_id), run_dir=run_dir, options=options or Options())
    refuse(placement)
    tunings, modes = _tunings(spec), _modes(placement)
    folder = files("muster.backends.gke.manifests") / "helm"
    schema = _schema(parse_object((folder / "values.schema.json").read_text()), placement, [*modes], [*tunings])
    result = {f"templates/{name}": (folder / "templates" / name).read_text() for name in TEMPLATES}
    result |= {
        "Chart.yaml": _chart_yaml(placement),
        "values.yaml": "\n".join(
            f"# {text(schema, 'properties', name, 'description')}\n" + dump([{name: value}])
            for name, value in _values(placement).items()
        ),
        "values.schema.json": json.dumps(schema, indent=1) + "\n",
        "files/name": spec.name,
        "files/modes.json": _json(modes),
        "files/objects.json": _json(_objects(_stand_in(placement), [*modes])),
        ".helmignore": "*.tgz\n",
    }
    for tuning, variant in tunings.items():
        result[f"files/{tuning}.run.json"] = _json(variant.model_dump(mode="json", exclude_defaults=True))
        complete = resolved(replace(placement, spec=variant)).model_dump(mode="json")
        if placement.spec.checkpoint.dir is None and placement.in_bucket:
            complete["checkpoint"]["dir"] = "@checkpoints@"
        result[f"files/{tuning}.resolved.json"] = _json(complete)
    return result


def _tunings(spec: RunSpec) -> dict[str, RunSpec]:
    if spec.model is None:
        return {"full": spec}
    full = spec.model_copy(update={"model": spec.model.model_copy(update={"lora": None})})
    lora = spec.model.lora or Lora()
    return {"lora": spec.model_copy(update={"model": spec.model.model_copy(update={"lora": lora})}), "full": full}


def _modes(placement: Placement) -> dict[str, JsonObject]:
    """Everything that differs between the ways of buying this machine, for the chart to look up."""
    result: dict[str, JsonObject] = {}
    at_most = str(allocation_ends(placement.spec, "flex_start_queued")[1])
    for name in dict.fromkeys([placement.mode, *placement.machine.modes]):
        mode = mode_of(placement, name)
        template = pods.host_template(placement, mode)
        annotations = child(template, "metadata", "annotations")
        result[name] = {
            "nodeSelector": dict(mode.node_selector),
            "tolerations": at(template, "spec", "tolerations"),
            "podAnnotations": {key: value for key, value in annotations.items() if key.startswith("kueue.")},
            "graceSeconds": mode.grace_s,
            "queued": mode.queued,
            "reserved": name in ("reservation", "calendar"),
            "queue": replace(placement, mode=name).queue_objects,
            "atMost": "0" if name == "flex_start" else at_most,
        }
    return result


def _values(placement: Placement) -> dict[str, Json]:
    spec, options = placement.spec, placement.options
    host = pods.host_template(placement, mode_of(placement))
    return {
        "runId": placement.run_id,
        **({"home": placement.home} if placement.in_bucket else {}),
        "hosts": spec.resources.hosts,
        "spareHosts": spec.resources.spare_hosts,
        "mode": placement.mode,
        "tuning": "lora" if spec.model is not None and spec.model.lora is not None else "full",
        "image": spec.resources.image,
        "queue": spec.resources.queue or "",
        "reservation": spec.resources.reservation or "",
        "maxRunDurationSeconds": longest_run_s(spec),
        "terminationGracePeriodSeconds": 0,
        "serviceAccount": options.service_account,
        "supervisorPool": options.supervisor_pool,
        "huggingFaceSecret": options.hugging_face_secret,
        "networkPrefix": options.network_prefix,
        "hostResources": at(host, "spec", "containers", 0, "resources"),
        "env": [],
        "createQueue": False,
        "createNetworks": False,
        "createServiceAccount": False,
        "supervisorPriority": "",
        "createSupervisorPriority": False,
    }


def _schema(shipped: JsonObject, placement: Placement, modes: list[Json], tunings: list[Json]) -> dict[str, Json]:
    """``values.schema.json`` with what this run's values may be: unknown keys are errors."""
    schema = changed(shipped, modes, "properties", "mode", "enum")
    schema = changed(schema, tunings, "properties", "tuning", "enum")
    if not placement.in_bucket:
        properties = {name: one for name, one in child(schema, "properties").items() if name != "home"}
        schema = {
            **schema,
            "properties": properties,
            "required": [one for one in texts(schema, "required") if one != "home"],
        }
    return schema


def _chart_yaml(placement: Placement) -> str:
    about = {
        "apiVersion": "v2",
        "name": "muster-run",
        "description": f"One training run on {placement.machine.name}: hosts as child Jobs, and their supervisor.",
        "type": "application",
        "version": "0.1.0",
        "appVersion": __version__,
    }
    return dump([about])


def _stand_in(placement: Placement) -> Placement:
    """The placement with marks in place of what a value decides."""
    resources = placement.spec.resources.model_copy(update={"image": "@image@", "queue": "@queue@"})
    return replace(
        placement,
        spec=placement.spec.model_copy(update={"resources": resources}),
        run_id="@run@",
        home="gs://@home@" if placement.in_bucket else f"{CLAIM_FOLDER}/@run@",
        options=replace(
            placement.options,
            namespace="@namespace@",
            service_account="@account@",
            supervisor_pool="@pool@",
            hugging_face_secret="@hf@",
            network_prefix="@prefix@",
        ),
    )


def _objects(marked: Placement, modes: list[str]) -> dict[str, Json]:
    """The plain objects, by what of them a value asks for."""
    run = json.loads(json.dumps(run_objects(marked, "", "")).replace(object_name("@run@"), "@run@"))
    supervisor, host = (row["template"]["spec"]["template"] for row in run[-1]["spec"]["replicatedJobs"])
    supervisor["spec"].pop("priorityClassName", None)
    command = supervisor["spec"]["containers"][0]["command"]
    command[command.index(pods.LEAVE_AFTER) + 1] = "@leave-after@"
    command[command.index(pods.AT_MOST) + 1] = "@at-most@"
    annotations = host["metadata"].get("annotations", {})
    host["metadata"]["annotations"] = {key: one for key, one in annotations.items() if not key.startswith("kueue.")}
    return {
        "run": run,
        "queue": {
            mode: [_of_nodes(one, marked) for one in queue_objects(replace(marked, mode=mode))] for mode in modes
        },
        "account": [row for row in account_objects(marked) if row["kind"] not in CLUSTERS_OWN],
        "priority": changed(priority_class(), "@priority@", "metadata", "name"),
        "networks": network_objects(marked),
    }


def _of_nodes(manifest: JsonObject, marked: Placement) -> JsonObject:
    """What of a queue's object follows from the number of nodes, or from a reservation."""
    if manifest["kind"] == "ResourceFlavor" and manifest["spec"] and at(manifest, "metadata", "name") != CPU_FLAVOR:
        return changed(manifest, "@selector@", "spec", "nodeLabels")
    if manifest["kind"] == "ClusterQueue":
        machine = marked.machine
        sizes: dict[str, list[Json]] = {
            "cpu": [machine.vcpus, ""],
            "memory": [machine.memory_gb, "G"],
            "ephemeral-storage": [1, "Ti"],
            "nvidia.com/gpu": [machine.gpus, ""],
        }
        copy: dict[str, Any] = json.loads(json.dumps(manifest))
        for row in copy["spec"]["resourceGroups"][0]["flavors"][0]["resources"]:
            row["nominalQuota"] = sizes[row["name"]]
        return copy
    return manifest


def _json(value: object) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"
