"""The same objects as a Helm chart, for teams that deploy by GitOps.

The templates are the plain manifests with values in the places that a team turns: each place is an expression put
into the object before it is written, so that the chart cannot drift from what ``submit`` sends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from muster import __version__
from muster.backends.gke.manifests import helm_values, pods
from muster.backends.gke.manifests.cluster_options import Options
from muster.backends.gke.manifests.jobset import run_objects
from muster.backends.gke.manifests.kueue_objects import CPU_FLAVOR, account_objects, priority_class, queue_objects
from muster.backends.gke.manifests.network_objects import network_objects
from muster.backends.gke.manifests.placement import (
    CLAIM_FOLDER,
    END_S,
    LEAD_S,
    MAX_RUN_DURATION,
    SEVEN_DAYS_S,
    Placement,
    allocation_ends,
    leave_after_s,
    object_name,
    place,
    resolved,
)
from muster.backends.gke.manifests.spec_rules import refuse
from muster.backends.gke.manifests.yaml_text import Expression, Line, dump
from muster.config.spec import Lora, RunSpec
from muster.core.typed_json import changed

# Placeholders for values while the object is still Python; every string that contains one becomes an expression.
_VALUES = {
    "@run@": ".Values.runId",
    "gs://@home@": ".Values.home",
    "@image@": ".Values.image",
    "@queue@": "(default $mode.queue .Values.queue)",
    "@account@": ".Values.serviceAccount",
    "@pool@": ".Values.supervisorPool",
    "@hf@": ".Values.huggingFaceSecret",
    "@namespace@": ".Release.Namespace",
    "@prefix@": ".Values.networkPrefix",
}
_PRELUDE = """\
{{- $mode := index (.Files.Get "files/modes.json" | fromJson) .Values.mode -}}
{{- $nodes := add (int .Values.hosts) (int .Values.spareHosts) -}}
{{- $selector := $mode.nodeSelector -}}
{{- if and .Values.reservation $mode.reserved }}{{ $_ := set $selector "cloud.google.com/reservation-name" (base (first (splitList "/reservationBlocks/" .Values.reservation))) }}{{ end -}}
"""  # noqa: E501
_RUN_PRELUDE = """\
{{- $run := .Files.Get (printf "files/%s.run.json" .Values.tuning) | fromJson -}}
{{- $resolved := .Files.Get (printf "files/%s.resolved.json" .Values.tuning) | fromJson -}}
{{- range $document := list $run $resolved }}
{{- $_ := set $document.resources "hosts" (int $.Values.hosts) }}
{{- $_ := set $document.resources "provisioning_model" $.Values.mode }}
{{- $_ := set $document.resources "image" $.Values.image }}
{{- if or $.Values.spareHosts (hasKey $document.resources "spare_hosts") }}{{ $_ := set $document.resources "spare_hosts" (int $.Values.spareHosts) }}{{ end }}
{{- if $.Values.queue }}{{ $_ := set $document.resources "queue" $.Values.queue }}{{ end }}
{{- if $.Values.reservation }}{{ $_ := set $document.resources "reservation" $.Values.reservation }}{{ end }}
{{- end -}}
"""  # noqa: E501

# ``placement.allocation_ends`` of the chart's own values.
_LEAVE_AFTER = (
    '{{ if eq .Values.mode "flex_start_queued" }}{{ $asked := int .Values.maxRunDurationSeconds }}'
    f"{{{{ $before := ternary {LEAD_S} {END_S} (ge $asked {SEVEN_DAYS_S}) }}}}"
    "{{ max (div $asked 2) (sub $asked $before) | toString | quote }}"
    f'{{{{ else if eq .Values.mode "flex_start" }}}}"{leave_after_s(SEVEN_DAYS_S)}"'
    '{{ else }}"0"{{ end }}'
)


def chart(spec: RunSpec, *, run_id: str, run_dir: str, options: Options | None = None) -> dict[str, str]:
    """Relative name -> text of every file of the chart. Installing it with its own values gives the plain objects, but
    for the supervisors' priority: ``submit`` sees whether the cluster has the class, a chart has to be told.

    Raises:
        RunFileError, UsageError: as ``render.render``.
    """
    placement = place(spec, run_id=object_name(run_id), run_dir=run_dir, options=options or Options())
    refuse(placement)
    tunings = _tunings(spec)
    modes = helm_values.modes(placement)
    files = {
        "Chart.yaml": _chart_yaml(placement),
        "values.yaml": helm_values.values_yaml(placement, list(modes), list(tunings)),
        "values.schema.json": helm_values.schema(placement, list(modes), list(tunings)),
        "files/name": spec.name,
        "files/modes.json": _json(modes),
        "templates/run.yaml": _PRELUDE + _RUN_PRELUDE + _checkpoints(placement) + _run_template(placement),
        "templates/queue.yaml": _PRELUDE + _queue_templates(placement, list(modes)),
        "templates/networks.yaml": _network_templates(placement),
        ".helmignore": "*.tgz\n",
    }
    for tuning, variant in tunings.items():
        files[f"files/{tuning}.run.json"] = _json(variant.model_dump(mode="json", exclude_defaults=True))
        files[f"files/{tuning}.resolved.json"] = _json(
            resolved(replace(placement, spec=variant)).model_dump(mode="json")
        )
    return files


def _checkpoints(placement: Placement) -> str:
    """Checkpoints that the run file gives no place follow the home."""
    if placement.spec.checkpoint.dir is not None or not placement.in_bucket:
        return ""
    return '{{- $_ := set $resolved.checkpoint "dir" (printf "%s/checkpoints" .Values.home) -}}\n'


def _tunings(spec: RunSpec) -> dict[str, RunSpec]:
    if spec.model is None:
        return {"full": spec}
    full = spec.model_copy(update={"model": spec.model.model_copy(update={"lora": None})})
    lora = spec.model.lora or Lora()
    return {"lora": spec.model_copy(update={"model": spec.model.model_copy(update={"lora": lora})}), "full": full}


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


def _run_template(placement: Placement) -> str:
    marked = _stand_in(placement)
    text = json.dumps(run_objects(marked, "", "")).replace(object_name("@run@"), "@run@")
    objects = _with_expressions(json.loads(text))
    config, jobset = objects[0], objects[-1]
    config["data"] = {
        "resolved.json": Expression("|{{ $resolved | toPrettyJson | nindent @INDENT@ }}"),
        "run.yaml": Expression("|{{ $run | toYaml | nindent @INDENT@ }}"),
    }
    until = f"{MAX_RUN_DURATION}: {{{{ int64 .Values.maxRunDurationSeconds | toString | quote }}}}"
    jobset["metadata"]["annotations"] = {
        "muster/run-name": Expression('{{ .Files.Get "files/name" | quote }}'),
        Line("{{- if $mode.queued }}"): None,
        Line(until): None,
        Line("{{- end }}"): None,
    }
    supervisor, host = jobset["spec"]["replicatedJobs"]
    supervisors = supervisor["template"]["spec"]["template"]["spec"]
    supervisors.pop("priorityClassName", None)
    rank = '{{- with .Values.supervisorPriority }}{{ dict "priorityClassName" . | toYaml | nindent @INDENT@ }}{{ end }}'
    supervisors[Line(rank)] = None
    command = supervisors["containers"][0]["command"]
    command[command.index(pods.LEAVE_AFTER) + 1] = Expression(_LEAVE_AFTER)
    most = allocation_ends(placement.spec, "flex_start_queued")[1]
    command[command.index(pods.AT_MOST) + 1] = Expression(
        f'{{{{ ternary "0" "{most}" (eq .Values.mode "flex_start") | quote }}}}'
    )
    host["replicas"] = Expression("{{ $nodes }}")
    pod = host["template"]["spec"]["template"]
    annotations = pod["metadata"].get("annotations", {})
    pod["metadata"]["annotations"] = {
        **{key: value for key, value in annotations.items() if not key.startswith("kueue.")},
        Line("{{- with $mode.podAnnotations }}{{ toYaml . | nindent @INDENT@ }}{{ end }}"): None,
    }
    pod["spec"]["nodeSelector"] = _block("$selector")
    pod["spec"]["tolerations"] = _block("$mode.tolerations")
    pod["spec"]["terminationGracePeriodSeconds"] = Expression(
        "{{ default $mode.graceSeconds .Values.terminationGracePeriodSeconds | int }}"
    )
    container = pod["spec"]["containers"][0]
    container["env"].append(Line("{{- with .Values.env }}{{ toYaml . | nindent @INDENT@ }}{{ end }}"))
    container["resources"] = _block(".Values.hostResources")
    return _indented(dump(objects))


#: Of these Helm lets one release be the owner: the chart makes the first if asked to, and never the others.
CLUSTERS_OWN = ("PriorityClass", "ClusterRole", "ClusterRoleBinding")


def _queue_templates(placement: Placement, modes: list[str]) -> str:
    """One set of queue objects for each mode; the value ``mode`` picks one."""
    parts = []
    for mode in modes:
        objects = _with_expressions(queue_objects(replace(_stand_in(placement), mode=mode)))
        for manifest in objects:
            if manifest["kind"] == "ClusterQueue":
                _scale(manifest["spec"]["resourceGroups"][0]["flavors"][0]["resources"], placement)
            elif (
                manifest["kind"] == "ResourceFlavor" and manifest["metadata"]["name"] != CPU_FLAVOR and manifest["spec"]
            ):
                manifest["spec"]["nodeLabels"] = _block("$selector")
        condition = f'and .Values.createQueue (eq .Values.mode "{mode}")'
        parts.append(f"{{{{- if {condition} }}}}\n---\n{dump(objects)}{{{{- end }}}}\n")
    account = [row for row in account_objects(_stand_in(placement)) if row["kind"] not in CLUSTERS_OWN]
    parts.append(f"{{{{- if .Values.createServiceAccount }}}}\n---\n{dump(_with_expressions(account))}{{{{- end }}}}\n")
    # Apart from the account, which every namespace has: of a cluster's own object Helm lets one release be the owner.
    rank = dump([changed(priority_class(), Expression("{{ .Values.supervisorPriority | quote }}"), "metadata", "name")])
    condition = "and .Values.createSupervisorPriority .Values.supervisorPriority"
    parts.append(f"{{{{- if {condition} }}}}\n---\n{rank}{{{{- end }}}}\n")
    return _indented("".join(parts))


def _scale(resources: list[dict[str, str]], placement: Placement) -> None:
    machine = placement.machine
    sizes = {
        "cpu": f"{{{{ mul {machine.vcpus} $nodes }}}}",
        "memory": f'"{{{{ mul {machine.memory_gb} $nodes }}}}G"',
        "ephemeral-storage": '"{{ $nodes }}Ti"',
        "nvidia.com/gpu": f"{{{{ mul {machine.gpus} $nodes }}}}",
    }
    for row in resources:
        row["nominalQuota"] = Expression(sizes[row["name"]])


def _network_templates(placement: Placement) -> str:
    objects = _with_expressions(network_objects(_stand_in(placement)))
    body = f"---\n{dump(objects)}" if objects else ""
    return f"{{{{- if .Values.createNetworks }}}}\n{body}{{{{- end }}}}\n"


def _block(expression: str) -> Expression:
    return Expression(f"{{{{- toYaml ({expression}) | nindent @INDENT@ }}}}")


def _indented(text: str) -> str:
    """Each block of lines is indented two blanks deeper than the key that it belongs to."""
    lines = []
    for line in text.splitlines():
        depth = len(line) - len(line.lstrip(" "))
        if not line.lstrip().startswith("{{"):
            depth += 4 if line.lstrip().startswith("- ") else 2
        lines.append(line.replace("@INDENT@", str(depth)))
    return "\n".join(lines) + "\n"


def _with_expressions(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_expressions(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_expressions(item) for item in value]
    if isinstance(value, str) and any(mark in value for mark in _VALUES):
        if value in _VALUES:
            return Expression(f"{{{{ {_VALUES[value]} | quote }}}}")
        text = json.dumps(value)
        for mark, expression in _VALUES.items():
            text = text.replace(mark, f"{{{{ {expression} }}}}")
        return Expression(text)
    return value


def _json(value: object) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"
