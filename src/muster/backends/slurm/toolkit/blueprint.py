"""A Cluster Toolkit blueprint for a run file: the Slurm cluster on Google Cloud that the run needs. Pure.

Module names and settings are those of the Toolkit's own examples (see ``catalog/toolkit.yaml`` for commit and date).
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping

from muster.backends.slurm.toolkit.scripts import NO_UPGRADES, build_runners, controller_runners, node_runners
from muster.catalog.toolkit import Family, Toolkit, toolkit
from muster.config.spec import RunSpec
from muster.core.errors import Problem, RunFileError
from muster.core.typed_json import Json, JsonObject
from muster.storage import run_registry

#: Of the image; no disk that is made from it may be smaller (a nodeset's default is 50).
DISK_GB = 100
VPC = "modules/network/vpc"
STARTUP = "modules/scripts/startup-script"
NODESET = "community/modules/compute/schedmd-slurm-gcp-v6-nodeset"
PARTITION = "community/modules/compute/schedmd-slurm-gcp-v6-partition"
LOGIN = "community/modules/scheduler/schedmd-slurm-gcp-v6-login"
CONTROLLER = "community/modules/scheduler/schedmd-slurm-gcp-v6-controller"
#: A file of the Toolkit, from the folder of the deployment group that uses it.
LONG_PROLOG = f"../_modules/embedded/{CONTROLLER}/etc/long-prolog-slurm.conf.tpl"


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
            **_provisioning(spec),
        },
    }
    blueprint_yaml: JsonObject = {
        "blueprint_name": f"muster-{family.partition}",
        "vars": _variables(table, family),
        "deployment_groups": [
            {"group": "network", "modules": _networks(family)},
            {"group": "image-script", "modules": [_build_script(table, family)]},
            {"group": "image", "modules": [_image(family, spec)]},
            {"group": "cluster", "modules": _cluster(table, family, spec)},
        ],
    }
    heading = (
        f"# Slurm on Google Cloud for the run {spec.name!r}: {spec.resources.hosts} hosts and"
        f" {spec.resources.spare_hosts} spares of {spec.resources.machine}.\n"
        f"# Written by muster render --format toolkit; settings as of Cluster Toolkit {table.toolkit}.\n"
        f"# deploy:   gcluster deploy -d deployment.yaml blueprint.yaml --auto-approve\n"
        f"# destroy:  gcluster destroy {name} --auto-approve\n"
        "# It bills from its deployment until it is destroyed. The home (Filestore) is protected against deletion:\n"
        "# set its deletion_protection.enabled to false and deploy again before you destroy it.\n"
    )
    return {"blueprint.yaml": heading + _dump(blueprint_yaml), "deployment.yaml": _dump(deployment)}


def _refuse(spec: RunSpec) -> None:
    resources, problems = spec.resources, []
    family = toolkit().families.get(resources.machine or "")
    if family is None:
        problems.append(
            Problem(
                key="resources.machine", message="has no Cluster Toolkit blueprint here", value=resources.machine,
                hint="one of " + ", ".join(toolkit().families),
            )
        )  # fmt: skip
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
                key="resources.queue", message="as a partition's name takes lower-case letters, digits and dashes",
                value=resources.queue,
            )
        )  # fmt: skip
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


def _provisioning(spec: RunSpec) -> JsonObject:
    mode = spec.resources.provisioning_model
    return {
        "reservation_name": spec.resources.reservation or "",
        "enable_spot_vm": mode == "spot",
        "dws_flex_enabled": mode == "flex_start",
    }


def _variables(table: Toolkit, family: Family) -> JsonObject:
    return {
        "base_image": dict(table.base_image),
        "image_family": "$(vars.deployment_name)-u24",
        "slurm_gcp_version": table.slurm_gcp,
        "system_range": "192.168.0.0/19",
        "filestore_range": "192.168.32.0/24",
        **(
            {"second_range": "192.168.64.0/18", "rdma_range": "192.168.128.0/18"}
            if family.fabric == "roce"
            else {"data_range": "10.0.0.0/9"}
        ),
        "local_ssd": "/mnt/localssd",
        "reservation_name": "",
        "enable_spot_vm": False,
        "dws_flex_enabled": False,
    }


# ---------------------------------------------------------------- networks


def _networks(family: Family) -> list[JsonObject]:
    networks = [_vpc("system-net", "sys", "$(vars.system_range)", family.mtu)]
    if family.fabric == "tcpxo":
        settings: JsonObject = {
            "network_name_prefix": "$(vars.deployment_name)-data",
            "global_ip_address_range": "$(vars.data_range)",
            "network_count": 8,
            "subnetwork_cidr_suffix": 20,
            "mtu": family.mtu,
        }
        return [*networks, {"id": "data-nets", "source": "modules/network/multivpc", "settings": settings}]
    profile = "https://www.googleapis.com/compute/beta/projects/$(vars.project_id)/global/networkProfiles/$(vars.zone)-vpc-roce"
    rdma: JsonObject = {
        "network_name": "$(vars.deployment_name)-rdma",
        "network_profile": profile,
        "network_routing_mode": "REGIONAL",
        "subnetworks_template": {
            "name_prefix": "$(vars.deployment_name)-rdma",
            "count": 8,
            "ip_range": "$(vars.rdma_range)",
            "region": "$(vars.region)",
        },
    }
    return [
        *networks,
        _vpc("second-net", "second", "$(vars.second_range)", family.mtu),
        {"id": "rdma-net", "source": "modules/network/gpu-rdma-vpc", "settings": rdma},
    ]


def _vpc(name: str, short: str, cidr: str, mtu: int) -> JsonObject:
    rule: JsonObject = {
        "name": f"$(vars.deployment_name)-{short}-internal",
        "ranges": [cidr],
        "allow": [{"protocol": "tcp"}, {"protocol": "udp"}, {"protocol": "icmp"}],
    }
    subnet: JsonObject = {
        "subnet_name": f"$(vars.deployment_name)-{short}",
        "subnet_region": "$(vars.region)",
        "subnet_ip": cidr,
        "subnet_private_access": True,
    }
    return {
        "id": name,
        "source": VPC,
        "settings": {
            "network_name": f"$(vars.deployment_name)-{short}",
            "mtu": mtu,
            "enable_internal_traffic": False,
            "subnetworks": [subnet],
            "firewall_rules": [rule],
        },
    }


# ---------------------------------------------------------------- image and cluster


def _docker(family: Family, **more: Json) -> JsonObject:
    """The prolog of TCPXO brings up its daemon, and installs its plugin, by docker."""
    return {"docker": {"enabled": True, **more}} if family.fabric == "tcpxo" else {}


def _build_script(table: Toolkit, family: Family) -> JsonObject:
    settings: JsonObject = {
        "install_ansible": True,
        "enable_gpu_network_wait_online": True,
        **_docker(family),
        "runners": build_runners(table, family),
    }
    return {"id": "build-script", "source": STARTUP, "settings": settings}


def _image(family: Family, spec: RunSpec) -> JsonObject:
    return {
        "id": "node-image",
        "source": "modules/packer/custom-image",
        "kind": "packer",
        "use": ["system-net", "build-script"],
        "settings": {
            "machine_type": family.build_machine,
            "source_image": "$(vars.base_image.image)",
            "source_image_project_id": ["$(vars.base_image.project)"],
            "image_family": "$(vars.image_family)",
            "disk_size": DISK_GB,
            "omit_external_ip": spec.resources.private,
            "metadata": {"user-data": NO_UPGRADES},
        },
    }


def _cluster(table: Toolkit, family: Family, spec: RunSpec) -> list[JsonObject]:
    image: JsonObject = {"project": "$(vars.project_id)", "family": "$(vars.image_family)"}
    public = not spec.resources.private
    startup: JsonObject = {
        "local_ssd_filesystem": {"mountpoint": "$(vars.local_ssd)", "permissions": "1777"},
        **_docker(family, daemon_config='{"data-root": "$(vars.local_ssd)/docker"}'),
        "runners": node_runners(table, family),
    }
    login: JsonObject = {
        "instance_image": image,
        "machine_type": "n2-standard-8",
        "disk_size_gb": 3 * DISK_GB,
        "enable_login_public_ips": public,
    }
    controller: JsonObject = {
        "instance_image": image,
        "machine_type": "n2-standard-16",
        "disk_size_gb": 3 * DISK_GB,
        "enable_controller_public_ips": public,
        # Munge is on its way out of the Toolkit, and a cluster cannot be changed over later.
        "enable_slurm_auth": True,
        "enable_external_prolog_epilog": True,
        "controller_startup_script": "$(controller-startup.startup_script)",
        # The prolog pulls two images: it takes longer than the timeouts of the usual slurm.conf.
        **({"slurm_conf_tpl": LONG_PROLOG} if family.prolog else {}),
    }
    partition: JsonObject = {
        "partition_name": spec.resources.queue or family.partition,
        "is_default": True,
        "exclusive": False,
        # Whole nodes; a node that boots slowly is not abandoned while a job waits for it.
        "partition_conf": {"OverSubscribe": "EXCLUSIVE", "ResumeTimeout": 1200, "SuspendTimeout": 1200},
    }
    name = str(partition["partition_name"])
    return [
        _home(),
        {"id": "node-startup", "source": STARTUP, "settings": startup},
        _nodeset(family, image),
        {"id": "partition", "source": PARTITION, "use": ["nodeset"], "settings": partition},
        {"id": "login", "source": LOGIN, "use": ["system-net"], "settings": login},
        {"id": "controller-startup", "source": STARTUP, "settings": {"runners": controller_runners(family, name)}},
        {
            "id": "controller",
            "source": CONTROLLER,
            "use": ["system-net", "partition", "login", "homefs"],
            "settings": controller,
        },
    ]


def _home() -> JsonObject:
    return {
        "id": "homefs",
        "source": "modules/file-system/filestore",
        "use": ["system-net"],
        "settings": {
            "filestore_tier": "HIGH_SCALE_SSD",
            "size_gb": 10240,
            "local_mount": "/home",
            "mount_options": "defaults,hard",
            "reserved_ip_range": "$(vars.filestore_range)",
            "deletion_protection": {"enabled": True, "reason": "holds checkpoints and runs"},
        },
        "outputs": ["network_storage"],
    }


def _nodeset(family: Family, image: JsonObject) -> JsonObject:
    settings: dict[str, Json] = {
        "instance_image": image,
        "machine_type": family.name,
        "node_count_static": "$(vars.cluster_size)",
        "node_count_dynamic_max": 0,
        "disk_type": family.disk_type,
        "disk_size_gb": DISK_GB,
        "bandwidth_tier": "gvnic_enabled",
        "enable_placement": False,
        "on_host_maintenance": "TERMINATE",
        "node_conf": dict(family.node_conf),
        "advanced_machine_features": {"threads_per_core": None},
        "reservation_name": "$(vars.reservation_name)",
        "enable_spot_vm": "$(vars.enable_spot_vm)",
        "dws_flex": {"enabled": "$(vars.dws_flex_enabled)"},
    }
    uses = ["system-net", "node-startup"]
    if family.fabric == "tcpxo":
        uses.append("data-nets")
    else:
        second = (
            "{network=null, subnetwork=second-net.subnetwork_self_link, subnetwork_project=vars.project_id,"
            ' nic_type="GVNIC", queue_count=null, network_ip="", stack_type=null, access_config=[],'
            " ipv6_access_config=[], alias_ip_range=[]}"
        )
        settings["additional_networks"] = f"$(concat([{second}], rdma-net.subnetwork_interfaces))"
    return {"id": "nodeset", "source": NODESET, "use": uses, "settings": settings}


def _dump(value: JsonObject) -> str:
    from ruamel.yaml import YAML
    from ruamel.yaml.scalarstring import LiteralScalarString

    def literal(node: Json) -> Json:
        if isinstance(node, Mapping):
            return {key: literal(item) for key, item in node.items()}
        if isinstance(node, list):
            return [literal(item) for item in node]
        return LiteralScalarString(node) if isinstance(node, str) and "\n" in node else node

    yaml, out = YAML(), io.StringIO()
    yaml.width, yaml.explicit_start = 1000, True
    yaml.indent(mapping=2, sequence=2, offset=0)
    yaml.dump(literal(value), out)
    return out.getvalue()
