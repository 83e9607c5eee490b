"""What ``up`` makes as Terraform's: the files in ``terraform_files``, with values from the same requests.

Fields of variables are named as Google's API names them, in snake case; the files say which argument each one is. The
provider's schema is that of hashicorp/google 6.50 (docs/how-to/gke.md#terraform).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from muster.backends.google.project.policies import Grant
from muster.backends.google.project.resources import Resource, RestResource, last_word
from muster.core.typed_json import Json, child, children, text

KINDS = {
    "networks": "google_compute_network",
    "subnetworks": "google_compute_subnetwork",
    "firewalls": "google_compute_firewall",
    "routers": "google_compute_router",
    "serviceAccounts": "google_service_account",
    "buckets": "google_storage_bucket",
    "repositories": "google_artifact_registry_repository",
    "roles": "google_project_iam_custom_role",
    "clusters": "google_container_cluster",
    "nodePools": "google_container_node_pool",
}
"""First word of a resource's key -> Terraform's type. In snake case it is the name of variable and resource."""
WRAPPED = {"serviceAccounts": "serviceAccount", "roles": "role", "clusters": "cluster", "nodePools": "nodePool"}
"""Kinds whose request has the resource in a field."""
GRANTS = {
    "project": "google_project_iam_member",
    "bucket": "google_storage_bucket_iam_member",
    "account": "google_service_account_iam_member",
    "repository": "google_artifact_registry_repository_iam_member",
}
MOVED = """\
# For a state of what Muster rendered until November 2026: each resource gets its address of now and stays as it is.
"""
IMPORTS = """\
# For what `muster up` made: copy this file to the others and leave queue.tf out, as Helm takes over no objects that it
# did not install. `terraform plan` then shows what would change, before anything does.
"""


@dataclass(frozen=True)
class Made:
    type: str
    collection: str
    name: str
    old_label: str
    """Until November 2026 it was rendered as ``type.old_label``."""
    id: str | None = None
    """What an ``import`` block names; None: making it again is as good as finding it."""

    @property
    def address(self) -> str:
        return f"{self.type}.{self.collection}[{json.dumps(self.name)}]"


def rendered(
    resources: Sequence[Resource], *, where: str, project: str, zone: str, values: Mapping[str, Json], about: str
) -> dict[str, str]:
    """File name -> text: the shared files and those of ``where`` (``gce``, ``gke``), the values, earlier addresses, and
    what finds again what ``muster up`` made. ``about``: the comment at the head of project.tf."""
    variables: dict[str, dict[str, Json]] = {}
    made = [one for resource in resources for one in _made(resource, project, variables)]
    shipped = _shipped(where)
    head = "".join(f"# {line}\n" for line in about.splitlines())
    everything = {"project": project, "region": zone.rpartition("-")[0], **values, **variables}
    return {
        **shipped,
        "project.tf": f"{head}\n{shipped['project.tf']}",
        "terraform.tfvars.json": json.dumps(everything, indent=1) + "\n",
        "moved.tf": MOVED + "".join(_block("moved", "from", f"{one.type}.{one.old_label}", one) for one in made),
        "made-by-up/imports.tf": IMPORTS
        + "".join(_block("import", "id", json.dumps(one.id), one) for one in made if one.id is not None),
    }


def _shipped(where: str) -> dict[str, str]:
    folder = files("muster.backends.google.project") / "terraform_files"
    parts = [*folder.iterdir(), *(folder / where).iterdir()]
    return {part.name: part.read_text() for part in sorted(parts, key=lambda part: part.name) if part.is_file()}


def _block(kind: str, key: str, value: str, made: Made) -> str:
    return f"\n{kind} {{\n  {key} = {value}\n  {'to':{len(key)}} = {made.address}\n}}\n"


def _made(resource: Resource, project: str, variables: dict[str, dict[str, Json]]) -> Iterator[Made]:
    """What Terraform makes of it; its values are added to ``variables``."""
    kind, _, name = resource.key.partition("/")
    if isinstance(resource, Grant):
        collection = f"{resource.policy.kind}_grants"
        fields = {"of": resource.policy.name, "role": resource.role, "member": resource.shown_member()}
        variables.setdefault(collection, {})[resource.key] = fields
        yield Made(GRANTS[resource.policy.kind], collection, resource.key, _label(resource.key))
        return
    if kind not in KINDS or not isinstance(resource, RestResource):
        return
    body: dict[str, Json] = {**(resource.create.body or {})}
    if kind in WRAPPED:
        body = {**child(body, WRAPPED[kind])}
    path = _path(resource.url)
    if kind == "serviceAccounts":
        body["email"] = last_word(path)
    elif kind == "buckets":
        path = f"{project}/{name}"
    elif kind == "nodePools":
        yield _node_pool(body, path, variables)
        return
    pools = children(body, "nodePools")
    values = {key: value for key, value in body.items() if key != "nodePools"}
    variables.setdefault(_snake(kind), {})[name] = _values(values)
    yield Made(KINDS[kind], _snake(kind), name, _label(name), path)
    for nat in children(body, "nats"):
        yield Made("google_compute_router_nat", "nats", name, _label(text(nat, "name")), f"{path}/{text(nat, 'name')}")
    for pool in pools:  # the supervisors', which the cluster is made with
        yield _node_pool(pool, f"{path}/nodePools/{text(pool, 'name')}", variables)


def _node_pool(body: Mapping[str, Json], path: str, variables: dict[str, dict[str, Json]]) -> Made:
    """``path``: ``projects/P/locations/L/clusters/C/nodePools/N``."""
    _, project, _, region, _, cluster, _, name = path.split("/")
    variables.setdefault("node_pools", {})[name] = _values({**body, "cluster": cluster})
    kind, own = KINDS["nodePools"], f"{project}/{region}/{cluster}/{name}"
    return Made(kind, "node_pools", name, _label(name), own)


def _values(body: Mapping[str, Json]) -> dict[str, Json]:
    """Fields of a request for a variable; names and descriptions are in the files."""
    return {_snake(key): _value(key, value) for key, value in body.items() if key not in ("name", "description")}


def _value(key: str, value: Json) -> Json:
    if key in ("labels", "resourceLabels"):  # of any names
        return value
    if isinstance(value, Mapping):
        return {_snake(inner): _value(inner, one) for inner, one in value.items()}
    if isinstance(value, list):
        return [_value("", one) for one in value]
    return _path(value) if isinstance(value, str) and value.startswith("https://compute.") else value


def _path(url: str) -> str:
    return f"projects/{url.rpartition('/projects/')[2]}"


def _snake(name: str) -> str:
    """``ipCidrRange`` -> ``ip_cidr_range``, ``IPProtocol`` -> ``ip_protocol``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _label(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
