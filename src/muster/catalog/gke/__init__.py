"""GKE's side of each machine family, as data with origin and date: labels, fabrics, NCCL environments, versions.

::

    family("a4-highgpu-8g") -> Family(name="a4", label="nvidia-b200", fabric=Fabric(name="gib", ...), ...)
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from muster.catalog import rows
from muster.core.errors import UsageError
from muster.core.typed_json import JsonObject, at, child, text, whole

QUEUED = "flex_start_queued"
#: Share of a machine's memory that ``/dev/shm`` may take: a full training's snapshots fill it, and what is left holds
#: one staged save (a third of three snapshots), the ranks and the node's own.
SHARED_MEMORY_PERCENT = 65


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A folder of the node (``host``) or of the pod alone (None) at ``path`` in a container."""

    name: str
    path: str
    host: str | None = None


@dataclass(frozen=True, kw_only=True)
class DataNetwork:
    """One NIC of the data network as a pod sees it, and the VPC and subnet (suffixes) behind it."""

    name: str
    interface: str
    mode: str
    """GKENetworkParamSet deviceMode: NetDevice or RDMA."""
    vpc: str
    subnet: str


@dataclass(frozen=True, kw_only=True)
class Sidecar:
    """The daemon that GPUDirect-TCPX and TCPXO need next to each pod's own process."""

    name: str
    image: str
    command: tuple[str, ...]
    args: tuple[str, ...]
    capabilities: tuple[str, ...]
    env: Mapping[str, str]
    mounts: tuple[Mount, ...]
    devices: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """How pods reach the data network, and NCCL's settings."""

    name: str
    env: Mapping[str, str]
    env_when_not_sourced: Mapping[str, str] = field(default_factory=dict)
    forbidden_env: tuple[str, ...] = ()
    source: str | None = None
    """Script on the node that sets NCCL's environment; Google's way, in place of fixed values."""
    wait_for: str | None = None
    """NCCL's plugin for this network, which an installer puts on the node after pods may run there; a rank that starts
    before uses plain sockets. Where the script is sourced, that is waited for instead."""
    mtu: int | None = None
    installers: tuple[str, ...] = ()
    """Paths below ``installers_url``."""
    images: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    capabilities: tuple[str, ...] = ()
    """What the trainer's own container is allowed in addition to the default."""
    networks: tuple[DataNetwork, ...] = ()
    sidecar: Sidecar | None = None
    claim_class: str | None = None
    """Device class of a resource claim (DRANET), where there is one."""
    claim_count: int = 0
    dra_only: bool = False
    tuner_folder: str | None = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine type."""

    name: str
    gpus: int
    vcpus: int
    memory_gb: int
    modes: tuple[str, ...]
    fabric: Fabric
    chips: int = 0
    """TPU chips, which one process drives."""
    local_ssd: int | None = None
    """Local SSDs of 375 GB that the machine always has; None: none, or not known."""

    @property
    def shared_memory_gib(self) -> int:
        """The limit of a host's ``/dev/shm``, which holds snapshots: the rest is for processes and staged saves."""
        return max(1, self.memory_gb * SHARED_MEMORY_PERCENT // 100)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Machines that share an accelerator, a node label and a network."""

    name: str
    accelerator: str
    label: str
    """Value of ``cloud.google.com/gke-accelerator``, of TPUs ``gke-tpu-accelerator``; empty without either."""
    machines: Mapping[str, Machine]
    default_machine: str
    boot_disk: str
    network_profile: str | None = None
    """Suffix of the zone's network profile (``vpc-roce``): the VPC is tied to one zone."""
    topology: bool = False
    """Nodes carry ``cloud.google.com/gce-topology-{block,subblock,host}``."""
    arch: str = "amd64"
    driver: str = "DEFAULT"
    fast_socket: bool = False
    """NCCL Fast Socket of the node pool: where one gVNIC is the whole data network."""
    compact: bool = False
    """Machines bought on demand are placed compactly only where the pool asks for it; queues and reservations do."""
    tuner_config: str | None = None


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """What one kind of thing costs while it stays behind; None and empty: not known."""

    name: str
    how: str = ""
    usd_per_day: float | None = None
    usd_per_gb_month: Mapping[str, float] = field(default_factory=dict)
    usd_per_hour: Mapping[str, float] = field(default_factory=dict)


@cache
def families() -> Mapping[str, Family]:
    """Every family, by name."""
    fabrics = {name: _fabric(name, row) for name, row in _table("fabrics.yaml")["fabrics"].items()}
    return rows.typed(
        Family, {name: _family(row, fabrics) for name, row in _table("families.yaml")["families"].items()}
    )


def find(machine: str | None, accelerator: str | None, *, cpu: bool = False) -> tuple[Family, Machine]:
    """The family and machine type that a run file asks for by machine, by accelerator, or as CPU alone.

    Raises:
        UsageError: nothing named, an unknown name, or a word that fits several machines.
    """
    known = {name: (family, offered) for family in families().values() for name, offered in family.machines.items()}
    if machine is not None:
        if machine not in known:
            raise UsageError(f"unknown machine type {machine!r}", hint=_nearest(machine, known))
        return known[machine]
    if accelerator is None:
        if cpu:
            family = families()["cpu"]
            return family, family.machines[family.default_machine]
        raise UsageError(
            "no machine named", hint="set resources.machine (a4-highgpu-8g) or resources.accelerator (B200)"
        )
    requested = accelerator.upper().replace("NVIDIA-", "").replace(" ", "-")
    if requested in (choices := _table("families.yaml")["ambiguous"]):
        raise UsageError(
            f"accelerator {accelerator!r} comes in several machines",
            hint="resources.machine: " + ", ".join(choices[requested]),
        )
    for family in families().values():
        if family.accelerator and requested == family.accelerator.upper():
            return family, family.machines[family.default_machine]
    names = {family.accelerator: family for family in families().values() if family.accelerator}
    raise UsageError(f"unknown accelerator {accelerator!r}", hint=_nearest(requested, names))


def installers_url() -> str:
    """Prefix of every NCCL installer's address."""
    return str(_table("fabrics.yaml")["installers"])


def versions() -> JsonObject:
    """Releases to install, least GKE versions, and pairs known to work together."""
    return child(_table("versions.yaml"))


@cache
def leftovers() -> Mapping[str, Leftover]:
    """Prices of what stays behind, by kind."""
    table = _table("leftovers.yaml").items()
    return rows.typed(Leftover, {kind: row for kind, row in table if isinstance(row, Mapping)})


def _nearest(name: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    return "did you mean " + " or ".join(near) + "?" if near else "known: " + ", ".join(sorted(known))


def _table(name: str) -> Any:
    return rows.table(name, "gke")


def _family(row: JsonObject, fabrics: Mapping[str, JsonObject]) -> JsonObject:
    """A machine has its family's modes and fabric where it names none of its own."""
    machines = {
        name: {
            "name": name,
            "modes": row["modes"],
            **child(row, "machines", name),
            "fabric": fabrics[text(row, "machines", name, "fabric", default=text(row, "fabric"))],
        }
        for name in child(row, "machines")
    }
    return {**row, "machines": machines}


def _fabric(name: str, row: JsonObject) -> JsonObject:
    sidecar = child(row, "sidecar")
    return {
        **row,
        "name": name,
        "claim_class": at(row, "claim", "device_class"),
        "claim_count": whole(row, "claim", "count"),
        "sidecar": {**sidecar, "image": text(row, "images", text(sidecar, "image"))} if sidecar else None,
    }
