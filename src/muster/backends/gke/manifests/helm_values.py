"""The chart's knobs: values.yaml with a comment each, their schema, and what each way of buying nodes changes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from muster.backends.gke.manifests import pods
from muster.backends.gke.manifests.cluster_options import SUPERVISOR_PRIORITY
from muster.backends.gke.manifests.placement import LONGEST_RUN_NAME, Placement, longest_run_s, mode_of
from muster.backends.gke.manifests.spec_rules import RESERVATION
from muster.backends.gke.manifests.yaml_text import dump
from muster.core.typed_json import Json, JsonObject, at, child

LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
MAYBE: JsonObject = {"type": "string", "pattern": "^$|" + LABEL, "maxLength": 63}


@dataclass(frozen=True, kw_only=True)
class Knob:
    """One value: what it is now, what it may be, and what it does."""

    value: Json
    about: str
    schema: JsonObject


def modes(placement: Placement) -> dict[str, JsonObject]:
    """Everything that differs between the ways of buying this machine, for the chart to look up."""
    result: dict[str, JsonObject] = {}
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
        }
    return result


def values_yaml(placement: Placement, modes: list[str], tunings: list[str]) -> str:
    """``values.yaml`` with every knob explained."""
    knobs = _knobs(placement, modes, tunings)
    return "\n".join(f"# {knob.about}\n" + dump([{name: knob.value}]) for name, knob in knobs.items())


def schema(placement: Placement, modes: list[str], tunings: list[str]) -> str:
    """``values.schema.json``: unknown keys are errors."""
    knobs = _knobs(placement, modes, tunings)
    document = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "additionalProperties": False,
        "required": sorted(name for name in knobs if name not in ("queue", "reservation")),
        "properties": {name: {**knob.schema, "description": knob.about} for name, knob in sorted(knobs.items())}
        | {"global": {"type": "object"}},
    }
    return json.dumps(document, indent=1) + "\n"


def _knobs(placement: Placement, modes: list[str], tunings: list[str]) -> dict[str, Knob]:
    return {**_of_the_run(placement, modes, tunings), **_of_the_cluster(placement)}


def _of_the_run(placement: Placement, modes: list[str], tunings: list[str]) -> dict[str, Knob]:
    spec = placement.spec
    lora = spec.model is not None and spec.model.lora is not None
    run_id: JsonObject = {
        "type": "string",
        "pattern": r"^[a-z]([-a-z0-9]*[a-z0-9])?$",
        "maxLength": LONGEST_RUN_NAME,
    }
    home = Knob(
        value=placement.home,
        about="Where the run lives, and by default its checkpoints: gs://BUCKET/FOLDER.",
        schema={"type": "string", "pattern": "^(gs|s3)://[^/]"},
    )
    return {
        "runId": Knob(value=placement.run_id, about="Name of the run and of its objects.", schema=run_id),
        **({"home": home} if placement.in_bucket else {}),
        "hosts": Knob(value=spec.resources.hosts, about="Hosts that train.", schema={"type": "integer", "minimum": 1}),
        "spareHosts": Knob(
            value=spec.resources.spare_hosts,
            about="Additional warm hosts that replace a lost one.",
            schema={"type": "integer", "minimum": 0},
        ),
        "mode": Knob(
            value=placement.mode, about="How nodes are bought: " + ", ".join(modes) + ".", schema={"enum": modes}
        ),
        "tuning": Knob(
            value="lora" if lora else "full",
            about="What is trained: " + " or ".join(tunings) + ".",
            schema={"enum": tunings},
        ),
        "image": Knob(value=spec.resources.image, about="Container image.", schema={"type": "string", "minLength": 1}),
        "queue": Knob(
            value=spec.resources.queue or "",
            about="Kueue local queue; empty: the one named after the machine and the mode.",
            schema=MAYBE,
        ),
        "reservation": Knob(
            value=spec.resources.reservation or "",
            about="The reservation (modes reservation and calendar): its name, or projects/P/reservations/R.",
            schema={"type": "string", "pattern": f"^$|^{RESERVATION}$"},
        ),
        "maxRunDurationSeconds": Knob(
            value=longest_run_s(spec),
            about="Longest life of a queued flex-start allocation; 7 days at most.",
            schema={"type": "integer", "minimum": 600, "maximum": 604800},
        ),
    }


def _of_the_cluster(placement: Placement) -> dict[str, Knob]:
    options = placement.options
    name: JsonObject = {"type": "string", "pattern": LABEL, "maxLength": 63}
    switch, rank = {"type": "boolean"}, options.supervisor_priority or SUPERVISOR_PRIORITY
    host = pods.host_template(placement, mode_of(placement))
    grace = "Seconds between notice and end; 0: what the mode gives (15 on Spot, more is not honoured there)."
    pool = "Node pool (CPU) that the supervisor runs on."
    secret = "Secret with key token, if there is one."
    prefix = "First part of the names of VPCs and subnets."
    env = "More environment for the hosts: a list of name and value."
    priority = f"PriorityClass of the supervisors, which the cluster has to have ({rank} after muster up); empty: none."
    account = "Make the service account too (once a namespace)."
    create = "Make that PriorityClass too (once a cluster)."
    return {
        "terminationGracePeriodSeconds": Knob(value=0, about=grace, schema={"type": "integer", "minimum": 0}),
        "serviceAccount": Knob(value=options.service_account, about="Kubernetes service account.", schema=name),
        "supervisorPool": Knob(value=options.supervisor_pool, about=pool, schema=name),
        "huggingFaceSecret": Knob(value=options.hugging_face_secret, about=secret, schema=name),
        "networkPrefix": Knob(value=options.network_prefix, about=prefix, schema=name),
        "hostResources": Knob(
            value=at(host, "spec", "containers", 0, "resources"),
            about="Requests and limits of a host's pod.",
            schema={"type": "object"},
        ),
        "env": Knob(value=[], about=env, schema={"type": "array"}),
        "createQueue": Knob(value=False, about="Make Kueue's objects too (once a cluster).", schema=switch),
        "createNetworks": Knob(value=False, about="Make the Network objects too (once a cluster).", schema=switch),
        "createServiceAccount": Knob(value=False, about=account, schema=switch),
        "supervisorPriority": Knob(value="", about=priority, schema=MAYBE),
        "createSupervisorPriority": Knob(value=False, about=create, schema=switch),
    }
