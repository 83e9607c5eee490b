"""What ``up`` makes as Terraform's resources: from the same requests, so that neither knows more than the other.

Names of arguments follow Google's own fields; where the provider calls something else, a table or a function of its
kind says so. The provider's schema is that of hashicorp/google 6.50 (docs/gke.md#terraform).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from muster.backends.google.project.hcl import Block, Value, Word, quoted
from muster.backends.google.project.policies import Grant
from muster.backends.google.project.resources import Resource, RestResource, last_word
from muster.core.typed_json import Json, JsonObject, child, children, text

PROVIDER = "~> 6.50"
NUMBER = "PROJECT_NUMBER"
"""In the members of a dry run, where the project's number is not asked for."""
MAPS = ("labels", "resourceLabels")
"""Fields of any names, which are arguments and no blocks."""
NUMBERS = ("acceleratorCount", "retentionDurationSeconds")
"""An int64, which is text in JSON."""
Body = list[tuple[str, Value] | Block]


@dataclass(frozen=True, kw_only=True)
class Made:
    """One of Terraform's resources."""

    kind: str
    label: str
    body: Body
    id: str | None = None
    """What an ``import`` block names; None: making it again is as good as finding it."""

    @property
    def address(self) -> str:
        return f"{self.kind}.{self.label}"


@dataclass(kw_only=True)
class World:
    """What is known of one another: by the path, name or address that a request names it with."""

    project: str
    region: str
    zone: str
    references: dict[str, str] = field(default_factory=dict)
    """Path below the API, or e-mail address -> expression."""
    by_key: dict[str, str] = field(default_factory=dict)
    """Muster's key -> Terraform's address."""

    def value(self, one: Json) -> Value:
        """A plain value, by reference where it is another resource's path."""
        if isinstance(one, str):
            path = f"projects/{one.rpartition('projects/')[2]}" if "projects/" in one else one
            return Word(self.references[path]) if path in self.references else one
        if isinstance(one, int | float):
            return one
        if isinstance(one, Sequence):
            return [self.value(row) for row in one]
        return {} if one is None else {name: self.value(row) for name, row in one.items()}


Translate = Callable[[World, RestResource], list[Made]]
"""The first of what it returns waits for what the resource needs; whoever needs the resource waits for the last one,
unless ``by_key`` says so already."""


def snake(name: str) -> str:
    """``ipCidrRange`` -> ``ip_cidr_range``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def label(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def arguments(world: World, fields: JsonObject, *, names: Mapping[str, str] | None = None) -> Body:
    """Fields of a request: objects become blocks, lists of objects one block each."""
    body: Body = []
    for key, value in fields.items():
        name = (names or {}).get(key, snake(key))
        if isinstance(value, Mapping) and key not in MAPS:
            body.append(Block(kind=name, body=arguments(world, value, names=names)))
        elif isinstance(value, list) and any(isinstance(row, Mapping) for row in value):
            rows = [row for row in value if isinstance(row, Mapping)]
            body += [Block(kind=name, body=arguments(world, row, names=names)) for row in rows]
        elif key in NUMBERS:
            body.append((name, int(str(value))))
        elif value is not None:
            body.append((name, world.value(value)))
    return body


def terraform(
    resources: Sequence[Resource],
    *,
    project: str,
    zone: str,
    kinds: Mapping[str, Translate],
    services: Sequence[str],
) -> list[Made]:
    """Every resource for which ``kinds`` or this module has a word, in an order that Terraform does not need."""
    region = zone.rpartition("-")[0]
    world, made = World(project=project, region=region, zone=zone), list[Made]()
    translate = {**KINDS, **kinds}
    for resource in resources:
        kind = resource.key.partition("/")[0]
        if resource.key == "services":
            found = [_services(project, services)]
        elif isinstance(resource, Grant):
            found = [_grant(world, resource)]
        elif isinstance(resource, RestResource) and kind in translate:
            found = translate[kind](world, resource)
        else:
            continue
        first = found[0]
        world.by_key.setdefault(resource.key, found[-1].address)
        _remember(world, resource, first)
        first.body.extend(_depends(world, resource, first.body))
        made += found
    return made


def blocks(made: Iterable[Made]) -> list[Block]:
    return [Block(kind="resource", labels=(one.kind, one.label), body=one.body) for one in made]


def imports(made: Iterable[Made]) -> list[Block]:
    """For what is there already and has a name of its own."""
    return [
        Block(kind="import", body=[("to", Word(one.address)), ("id", one.id)]) for one in made if one.id is not None
    ]


def head(project: str, region: str, providers: Mapping[str, Value]) -> list[Block]:
    """What a configuration begins with."""
    google: Value = {"source": "hashicorp/google", "version": PROVIDER}
    needed = Block(kind="required_providers", body=[("google", google), *providers.items()])
    return [
        Block(kind="terraform", body=[("required_version", ">= 1.5"), needed]),
        Block(kind="provider", labels=("google",), body=[("project", project), ("region", region)]),
        Block(kind="data", labels=("google_project", "this"), body=[("project_id", project)]),
    ]


def template(one: str, world: World) -> Value:
    """A member of a policy, with what it names by reference."""
    kind, _, email = one.partition(":")
    if email in world.references:
        return Word(f'"{kind}:${{{world.references[email]}}}"')
    return Word(quoted(one).replace(NUMBER, "${data.google_project.this.number}"))


def _remember(world: World, resource: Resource, made: Made) -> None:
    if not isinstance(resource, RestResource):
        return
    path = f"projects/{resource.url.rpartition('/projects/')[2]}"
    if made.kind == "google_service_account":
        world.references[last_word(resource.url)] = f"{made.address}.email"
    elif made.kind in ("google_compute_network", "google_compute_subnetwork"):
        world.references[path] = f"{made.address}.id"


def _depends(world: World, resource: Resource, body: Body) -> Body:
    """What has to be there before and is not named in the body itself."""
    named = set(_words(body))
    addresses = [world.by_key[need] for need in resource.needs if need in world.by_key]
    missing = [one for one in dict.fromkeys(addresses) if not any(one in word for word in named)]
    return [("depends_on", [Word(one) for one in missing])] if missing else []


def _words(value: object) -> Iterable[str]:
    if isinstance(value, Word):
        yield value.text
    elif isinstance(value, Block):
        yield from _words(value.body)
    elif isinstance(value, Mapping):
        yield from _words(list(value.values()))
    elif isinstance(value, Collection) and not isinstance(value, str):
        for one in value:
            yield from _words(one)


def _services(project: str, names: Sequence[str]) -> Made:
    """Left on when the rest goes: others may use them."""
    body: Body = [
        ("for_each", Word("toset([\n" + "".join(f"    {quoted(name)},\n" for name in names) + "  ])")),
        ("project", project),
        ("service", Word("each.value")),
        ("disable_on_destroy", False),
    ]
    return Made(kind="google_project_service", label="services", body=body)


def _network(world: World, resource: RestResource) -> list[Made]:
    fields = dict(resource.create.body or {})
    routing = text(fields.pop("routingConfig"), "routingMode")
    profile = fields.get("networkProfile")
    if isinstance(profile, str):
        fields["networkProfile"] = f"projects/{profile.rpartition('projects/')[2]}"
    body = [*arguments(world, fields), ("routing_mode", routing)]
    return [_compute(world, resource, "google_compute_network", body)]


def _subnetwork(world: World, resource: RestResource) -> list[Made]:
    body: Body = [*arguments(world, resource.create.body or {}), ("region", world.region)]
    return [_compute(world, resource, "google_compute_subnetwork", body)]


def _firewall(world: World, resource: RestResource) -> list[Made]:
    names = {"allowed": "allow", "IPProtocol": "protocol"}
    return [
        _compute(world, resource, "google_compute_firewall", arguments(world, resource.create.body or {}, names=names))
    ]


def _router(world: World, resource: RestResource) -> list[Made]:
    """The provider makes the way out of it a resource of its own."""
    fields = dict(resource.create.body or {})
    (nat,) = children(fields, "nats")
    del fields["nats"]
    router = _compute(world, resource, "google_compute_router", [*arguments(world, fields), ("region", world.region)])
    where: Body = [("router", Word(f"{router.address}.name")), ("region", world.region)]
    names = {"subnetworks": "subnetwork", "sourceSubnetworkIpRangesToNat": "source_subnetwork_ip_ranges_to_nat"}
    body = [*arguments(world, nat, names=names), *where]
    own = Made(
        kind="google_compute_router_nat",
        label=label(text(nat, "name")),
        body=body,
        id=f"{router.id}/{text(nat, 'name')}",
    )
    return [router, own]


def _account(world: World, resource: RestResource) -> list[Made]:
    fields, email = resource.create.body or {}, last_word(resource.url)
    body: Body = [("account_id", text(fields, "accountId")), *arguments(world, child(fields, "serviceAccount"))]
    name = label(text(fields, "accountId"))
    path = f"projects/{world.project}/serviceAccounts/{email}"
    return [Made(kind="google_service_account", label=name, body=body, id=path)]


def _bucket(world: World, resource: RestResource) -> list[Made]:
    fields = resource.create.body or {}
    own = {key: fields[key] for key in ("name", "location", "labels")}
    body: Body = [
        *arguments(world, own),
        ("uniform_bucket_level_access", True),
        ("public_access_prevention", "enforced"),
        Block(kind="hierarchical_namespace", body=[("enabled", True)]),
        *arguments(world, {"softDeletePolicy": child(fields, "softDeletePolicy")}),
    ]
    name = text(fields, "name")
    return [Made(kind="google_storage_bucket", label=label(name), body=body, id=f"{world.project}/{name}")]


def _repository(world: World, resource: RestResource) -> list[Made]:
    name = last_word(resource.url)
    where: Body = [("repository_id", name), ("location", world.region)]
    body = [*where, *arguments(world, resource.create.body or {})]
    path = f"projects/{resource.url.rpartition('/projects/')[2]}"
    return [Made(kind="google_artifact_registry_repository", label=label(name), body=body, id=path)]


def _compute(world: World, resource: RestResource, kind: str, body: Body) -> Made:
    path = f"projects/{resource.url.rpartition('/projects/')[2]}"
    return Made(kind=kind, label=label(last_word(resource.url)), body=body, id=path)


def _grant(world: World, grant: Grant) -> Made:
    """Adding a member that is there changes nothing, so none of these is imported."""
    name, words = grant.policy.name, grant.policy.name.split("/")
    given: Body = [("role", world.value(grant.role)), ("member", template(grant.shown_member(), world))]
    own = label(grant.key)
    if grant.policy.kind == "bucket":
        return Made(kind="google_storage_bucket_iam_member", label=own, body=[("bucket", name), *given])
    if grant.policy.kind == "project":
        return Made(kind="google_project_iam_member", label=own, body=[("project", name), *given])
    if grant.policy.kind == "account":
        account = world.references.get(words[3])
        of: Value = Word(account.removesuffix(".email") + ".name") if account else name
        return Made(kind="google_service_account_iam_member", label=own, body=[("service_account_id", of), *given])
    where: Body = [("project", words[1]), ("location", words[3]), ("repository", words[5])]
    return Made(kind="google_artifact_registry_repository_iam_member", label=own, body=[*where, *given])


KINDS: Mapping[str, Translate] = {
    "networks": _network,
    "subnetworks": _subnetwork,
    "firewalls": _firewall,
    "routers": _router,
    "serviceAccounts": _account,
    "buckets": _bucket,
    "repositories": _repository,
}
