"""``muster render --format terraform`` for plain machines: what ``up`` makes. Hosts are made by ``submit``. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from muster.backends.gce.inventory import resources, sites
from muster.backends.gce.placement import Placement
from muster.backends.google.project import terraform as google
from muster.backends.google.project.hcl import document
from muster.backends.google.project.resources import RestResource
from muster.backends.google.project.terraform import Made, World, arguments, label
from muster.core.typed_json import child, text

IMPORTS = """\
For what `muster up` made: copy this file beside project.tf. `terraform plan` then shows what would change."""


def rendered(placement: Placement) -> Mapping[str, str]:
    """File name -> text, for the run file's first region.

    Raises:
        UsageError: data networks that cannot be in all of its zones.
    """
    where = sites(placement)[0]
    made = google.terraform(
        resources(where),
        project=where.project,
        zone=where.zone,
        kinds={"roles": _role},
        services=where.services.names,
    )
    about = (
        f"Written by `muster render --format terraform` for runs on {where.machine.name} in {where.region}.\n"
        "`muster submit` makes the machines. It was never applied: read `terraform plan`."
    )
    return {
        "project.tf": document([*google.head(where.project, where.region, {}), *google.blocks(made)], comment=about),
        "made-by-up/imports.tf": document(google.imports(made), comment=IMPORTS),
    }


def _role(world: World, resource: RestResource) -> list[Made]:
    fields = resource.create.body or {}
    name = text(fields, "roleId")
    body = arguments(world, child(fields, "role"), names={"includedPermissions": "permissions"})
    path = f"projects/{world.project}/roles/{name}"
    world.references[path] = f"google_project_iam_custom_role.{label(name)}.name"
    return [Made(kind="google_project_iam_custom_role", label=label(name), body=[("role_id", name), *body], id=path)]
