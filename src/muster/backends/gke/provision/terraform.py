"""``muster render --format terraform`` for GKE: what ``up`` makes, for teams that keep their own state. Pure.

``cluster.tf`` has Google's resources, ``queue.tf`` what runs on the cluster (Kueue, JobSet, and a chart of plain
manifests), ``made-by-up/imports.tf`` what finds a cluster again that ``muster up`` made.
"""

from __future__ import annotations

from collections.abc import Mapping

from muster.backends.gke.manifests import yaml_text
from muster.backends.gke.manifests.kueue_configuration import GATES, WAIT
from muster.backends.gke.manifests.placement import Placement
from muster.backends.gke.manifests.render import cluster_objects
from muster.backends.gke.provision.access import services
from muster.backends.gke.provision.inventory.resource_names import Site, site
from muster.backends.gke.provision.software import wanted_software
from muster.backends.gke.provision.up import resources
from muster.backends.google.project import terraform as google
from muster.backends.google.project.hcl import Block, Value, Word, document
from muster.backends.google.project.resources import RestResource
from muster.backends.google.project.terraform import Body, Made, World, arguments, label
from muster.catalog import gke as catalogue
from muster.core.errors import UsageError
from muster.core.typed_json import Json, JsonObject, child, children, text

HELM: Value = {"source": "hashicorp/helm", "version": "~> 3.0"}
CHART = "muster-queue"
NODE_NAMES = {"accelerators": "guest_accelerator", "acceleratorType": "type", "acceleratorCount": "count"}
KEPT = ("initial_node_count", "maintenance_policy", "node_config", "node_pool", "remove_default_node_pool")
"""Of a cluster that is there: what it began with, and what ``up`` asked for besides."""


def rendered(placement: Placement) -> Mapping[str, str]:
    """File name -> text, for the run file's first place.

    Raises:
        UsageError: no project or zone; data networks by resource claims, which this provider cannot ask for.
    """
    where = site(placement)
    if placement.claims and placement.machine.gpus:
        raise UsageError(
            f"{placement.machine.name} has its data networks by resource claims here, and hashicorp/google 6.50 has no "
            "argument for a pool's acceleratorNetworkProfile",
            hint="--network annotations, or muster up",
        )
    made = google.terraform(
        resources(where, None),
        project=where.project,
        zone=where.zone,
        kinds={"clusters": _cluster, "nodePools": _pool},
        services=services(where).names,
    )
    files = {
        "cluster.tf": document(
            [*google.head(where.project, where.region, {"helm": HELM}), *google.blocks(made)], comment=_about(where)
        ),
        "queue.tf": document(_queue(where)),
        "made-by-up/imports.tf": document(google.imports(made), comment=IMPORTS),
    }
    if placement.kueue:
        files["kueue-values.yaml"] = yaml_text.dump([_kueue_values()])
    return files | {f"{CHART}/{name}": content for name, content in _chart(where).items()}


IMPORTS = """\
For what `muster up` made: copy this file beside cluster.tf and leave queue.tf out, as Helm takes over no objects that
it did not install. `terraform plan` then shows what would change, before anything does."""


def _about(where: Site) -> str:
    lines = [
        f"Written by `muster render --format terraform` for {where.placement.machine.name} in {where.zone}.",
        "`muster submit` uses what this makes. It was never applied: read `terraform plan`.",
    ]
    installers = [url for name, url in wanted_software(where).items() if name not in ("kueue.yaml", "jobset.yaml")]
    if installers:
        lines += ["Not here, and needed on the cluster once:", *(f"  kubectl apply -f {url}" for url in installers)]
    return "\n".join(lines)


def _cluster(world: World, resource: RestResource) -> list[Made]:
    """The cluster and, as the provider wants it, its pool of supervisors as one of its own."""
    fields = dict(child(resource.create.body or {}, "cluster"))
    (small,) = children(fields, "nodePools")
    network, endpoints = child(fields, "networkConfig"), fields.get("controlPlaneEndpointsConfig")
    plain = {key: fields[key] for key in ("name", "description", "resourceLabels", "network", "subnetwork")}
    body: Body = [
        *arguments(world, plain),
        ("location", world.region),
        ("datapath_provider", text(network, "datapathProvider")),
        ("enable_multi_networking", True),
        ("networking_mode", "VPC_NATIVE"),
        ("initial_node_count", 1),
        ("remove_default_node_pool", True),
        ("deletion_protection", False),
        Block(kind="ip_allocation_policy"),
        *arguments(world, {key: fields[key] for key in ("addonsConfig", "workloadIdentityConfig", "releaseChannel")}),
    ]
    if network.get("defaultEnablePrivateNodes"):
        nodes: Body = [("enable_private_nodes", True), ("enable_private_endpoint", False)]
        body.append(Block(kind="private_cluster_config", body=nodes))
    if isinstance(endpoints, Mapping):
        authorized = child(endpoints, "ipEndpointsConfig", "authorizedNetworksConfig")
        shown: JsonObject = {key: value for key, value in authorized.items() if key != "enabled"}
        body.append(Block(kind="master_authorized_networks_config", body=arguments(world, shown)))
    body.append(Block(kind="lifecycle", body=[("ignore_changes", [Word(name) for name in KEPT])]))
    name = text(fields, "name")
    path = f"projects/{world.project}/locations/{world.region}/clusters/{name}"
    cluster = Made(kind="google_container_cluster", label=label(name), body=body, id=path)
    world.by_key[resource.key] = cluster.address
    return [cluster, _pool_of(world, small, cluster.address, name)]


def _pool(world: World, resource: RestResource) -> list[Made]:
    name = resource.url.split("/clusters/")[1].partition("/")[0]
    return [
        _pool_of(world, child(resource.create.body or {}, "nodePool"), world.by_key[f"clusters/{name}"], name),
    ]


def _pool_of(world: World, fields: JsonObject, address: str, cluster: str) -> Made:
    name = text(fields, "name")
    where: Body = [("name", name), ("cluster", Word(f"{address}.name")), ("location", world.region)]
    names = {**NODE_NAMES, "config": "node_config", "locations": "node_locations"}
    rest: dict[str, Json] = {key: value for key, value in fields.items() if key not in ("name", "networkConfig")}
    if scaling := child(fields, "autoscaling"):  # the provider's block says that it is on
        rest["autoscaling"] = {key: value for key, value in scaling.items() if key != "enabled"}
    body = [*where, *arguments(world, rest, names=names)]
    if network := child(fields, "networkConfig"):
        body.append(_attached(world, network))
    # What is there is made larger by another run file, never smaller; the autoscaler changes the number itself.
    body.append(Block(kind="lifecycle", body=[("ignore_changes", [Word("initial_node_count")])]))
    path = f"{world.project}/{world.region}/{cluster}/{name}"
    return Made(kind="google_container_node_pool", label=label(name), body=body, id=path)


def _attached(world: World, network: JsonObject) -> Block:
    """Data networks, by reference: a pool cannot come before them."""
    body: Body = []
    for row in children(network, "additionalNodeNetworkConfigs"):
        vpc, subnet = label(text(row, "network")), label(text(row, "subnetwork"))
        names: Body = [
            ("network", Word(f"google_compute_network.{vpc}.name")),
            ("subnetwork", Word(f"google_compute_subnetwork.{subnet}.name")),
        ]
        body.append(Block(kind="additional_node_network_configs", body=names))
    if network.get("enablePrivateNodes"):
        body.insert(0, ("enable_private_nodes", True))
    return Block(kind="network_config", body=body)


def _queue(where: Site) -> list[Block]:
    """Helm's provider reaches the cluster with the credentials of whoever applies."""
    cluster = f"google_container_cluster.{label(where.cluster)}"
    small = f"google_container_node_pool.{label(where.placement.options.supervisor_pool)}"
    kubernetes: Value = {
        "host": Word(f'"https://${{{cluster}.endpoint}}"'),
        "token": Word("data.google_client_config.this.access_token"),
        "cluster_ca_certificate": Word(f"base64decode({cluster}.master_auth[0].cluster_ca_certificate)"),
    }
    releases = child(catalogue.versions(), "releases")
    blocks = [
        Block(kind="data", labels=("google_client_config", "this")),
        Block(kind="provider", labels=("helm",), body=[("kubernetes", kubernetes)]),
        _release("jobset", "jobset-system", text(releases, "jobset", "version"), needs=[small]),
    ]
    before = ["helm_release.jobset"]
    if where.placement.kueue:
        settings = [Word('file("${path.module}/kueue-values.yaml")')]
        version = text(releases, "kueue", "version")
        kueue = _release("kueue", "kueue-system", version, needs=before, values=settings)
        blocks.append(kueue)
        before = ["helm_release.kueue"]
    own: Body = [
        ("name", CHART),
        ("chart", Word(f'"${{path.module}}/{CHART}"')),
        ("namespace", where.placement.options.namespace),
        ("create_namespace", where.placement.options.namespace != "default"),
        ("depends_on", [Word(one) for one in before]),
    ]
    return [*blocks, Block(kind="resource", labels=("helm_release", "muster"), body=own)]


def _release(name: str, namespace: str, version: str, *, needs: list[str], values: list[Word] | None = None) -> Block:
    body: Body = [
        ("name", name),
        ("repository", f"oci://registry.k8s.io/{name}/charts"),
        ("chart", name),
        ("version", version.removeprefix("v")),
        ("namespace", namespace),
        ("create_namespace", True),
        *([("values", values)] if values else []),
        ("depends_on", [Word(one) for one in needs]),
    ]
    return Block(kind="resource", labels=("helm_release", name), body=body)


def _kueue_values() -> JsonObject:
    """The chart takes the whole Configuration: what its manager cannot do without, and our settings."""
    configuration: JsonObject = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": ":8081"},
        "metrics": {"bindAddress": ":8443"},
        "webhook": {"port": 9443},
        "leaderElection": {"leaderElect": True, "resourceName": "c1f6bfd2.kueue.x-k8s.io"},
        "integrations": {"frameworks": ["batch/job", "jobset.x-k8s.io/jobset"]},
        "waitForPodsReady": WAIT,
        "featureGates": GATES,
    }
    return {"managerConfig": {"controllerManagerConfigYaml": yaml_text.dump([configuration])}}


def _chart(where: Site) -> dict[str, str]:
    """A chart that only carries manifests: Helm asks for no definition of their kinds before Kueue is there."""
    objects = yaml_text.dump(cluster_objects(where.placement))
    if "{{" in objects:
        raise UsageError("a name in the run file has {{ in it, which Helm would take for an expression")
    meta: JsonObject = {"apiVersion": "v2", "name": CHART, "version": "0.1.0", "description": "Queue and accounts"}
    files = {"Chart.yaml": yaml_text.dump([meta]), "templates/objects.yaml": objects}
    return files
