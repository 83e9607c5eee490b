"""A Cluster Toolkit blueprint for a run file: the Slurm cluster on Google Cloud that the run needs. Pure.

``blueprint-roce.yaml`` and ``blueprint-tcpxo.yaml`` are the blueprints, by the machine's network, with ``@x@`` in place
of what the run file and the catalogue say.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from importlib.resources import files

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import LiteralScalarString

from muster.catalog.toolkit import Family, Toolkit, toolkit
from muster.config.spec import RunSpec
from muster.core.errors import Problem, RunFileError
from muster.core.typed_json import Json, JsonObject
from muster.storage import run_registry


def blueprint(spec: RunSpec) -> dict[str, str]:
    """``blueprint.yaml`` and ``deployment.yaml``, with the commands that deploy and destroy them.

    Raises:
        RunFileError: a machine without blueprint, no project or zone, or a provisioning model that is not offered.
    """
    _refuse(spec)
    table = toolkit()
    family = table.families[spec.resources.machine or ""]
    name = run_registry.slug(spec.name, 20)
    zone = spec.resources.locations[0]
    deployment: JsonObject = {
        "terraform_backend_defaults": {
            "type": "gcs",
            "configuration": {"bucket": f"{spec.resources.project}-tf-state"},
        },
        "vars": {
            "deployment_name": name,
            "project_id": spec.resources.project,
            "region": zone.rpartition("-")[0],
            "zone": zone,
            "cluster_size": spec.resources.hosts + spec.resources.spare_hosts,
            "reservation_name": spec.resources.reservation or "",
            "enable_spot_vm": spec.resources.provisioning_model == "spot",
            "dws_flex_enabled": spec.resources.provisioning_model == "flex_start",
        },
    }
    folder = files("muster.backends.slurm.toolkit")
    shipped = YAML(typ="safe", pure=True).load((folder / f"blueprint-{family.fabric}.yaml").read_text())
    heading = (
        f"# Slurm on Google Cloud for the run {spec.name!r}: {spec.resources.hosts} hosts and"
        f" {spec.resources.spare_hosts} spares of {spec.resources.machine}.\n"
        f"# Written by muster render --format toolkit; settings as of Cluster Toolkit {table.toolkit}.\n"
        f"# deploy:   gcluster deploy -d deployment.yaml blueprint.yaml --auto-approve\n"
        f"# destroy:  gcluster destroy {name} --auto-approve\n"
        "# It bills from its deployment until it is destroyed. The home (Filestore) is protected against deletion:\n"
        "# set its deletion_protection.enabled to false and deploy again before you destroy it.\n"
    )
    return {
        "blueprint.yaml": heading + _dump(_filled(shipped, _values(table, family, spec))),
        "deployment.yaml": _dump(deployment),
    }


def _refuse(spec: RunSpec) -> None:
    resources, problems = spec.resources, []
    family = toolkit().families.get(resources.machine or "")
    if family is None:
        problems.append(
            Problem(
                key="resources.machine",
                message="has no Cluster Toolkit blueprint here",
                value=resources.machine,
                hint="one of " + ", ".join(toolkit().families),
            )
        )
    if resources.project is None:
        problems.append(Problem(key="resources.project", message="is missing: the Google Cloud project to deploy to"))
    if not resources.locations or not re.fullmatch(r"[a-z]+-[a-z]+[0-9]+-[a-z]", resources.locations[0]):
        problems.append(
            Problem(
                key="resources.locations", message="must name a zone", value=resources.locations, hint="us-central1-b"
            )
        )
    if resources.queue is not None and not re.fullmatch(r"[a-z][a-z0-9-]*", resources.queue):
        problems.append(
            Problem(
                key="resources.queue",
                message="as a partition's name takes lower-case letters, digits and dashes",
                value=resources.queue,
            )
        )
    mode = resources.provisioning_model or ""
    if family is not None and mode not in family.modes:
        problems.append(
            Problem(
                key="resources.provisioning_model",
                message=f"{resources.machine} is offered as {', '.join(family.modes)}",
                value=mode,
            )
        )
    if mode in ("reservation", "calendar") and resources.reservation is None:
        problems.append(Problem(key="resources.reservation", message="is missing: its name"))
    if problems:
        raise RunFileError(problems)


def _values(table: Toolkit, family: Family, spec: RunSpec) -> dict[str, Json]:
    return {
        "family": family.partition,
        "partition": spec.resources.queue or family.partition,
        "machine": family.name,
        "mtu": family.mtu,
        "build_machine": family.build_machine,
        "disk_type": family.disk_type,
        "node_conf": dict(family.node_conf),
        "prolog": family.prolog,
        "private": spec.resources.private,
        "public": not spec.resources.private,
        "slurm_gcp": table.slurm_gcp,
        "image": table.base_image["image"],
        "image_project": table.base_image["project"],
        "python": table.python,
        "repository": table.cuda_repository,
        "dcgm_needs": "nvidia-container-toolkit" if family.fabric == "tcpxo" else "ibverbs-utils",
        **table.nccl,
    }


def _filled(node: Json, values: Mapping[str, Json]) -> Json:
    """A copy with each mark's value; texts of several lines stay readable."""
    if isinstance(node, Mapping):
        return {key: _filled(one, values) for key, one in node.items()}
    if isinstance(node, list):
        return [_filled(one, values) for one in node]
    if not isinstance(node, str):
        return node
    if whole := re.fullmatch(r"@(\w+)@", node):
        return values[whole[1]]
    if file := re.fullmatch(r"@file (.+)@", node):
        node = (files("muster.backends.slurm.toolkit") / "scripts" / file[1]).read_text()
    text = re.sub(r"@([a-z_]+)@", lambda mark: str(values[mark[1]]), node)
    return LiteralScalarString(text) if "\n" in text else text


def _dump(value: Json) -> str:
    yaml, out = YAML(), io.StringIO()
    yaml.width, yaml.explicit_start = 1000, True
    yaml.indent(mapping=2, sequence=2, offset=0)
    yaml.dump(value, out)
    return out.getvalue()
