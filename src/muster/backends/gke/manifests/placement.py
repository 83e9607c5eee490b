"""Where a run goes and how its machines are bought: the run file's words turned into GKE's labels and limits. Pure."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from muster.backends.bucket_paths import as_uri, is_bucket, with_mounted_inputs
from muster.backends.google.rules import slices_of
from muster.catalog import gke as catalogue
from muster.catalog.gke import Family, Machine
from muster.config.spec import Recovery, RunSpec
from muster.core.typed_json import Record

SEVEN_DAYS_S = 604_800
"""The longest flex-start allocation (docs concepts/dws)."""
LEAD_S = 1800
"""What is asked of flex-start beyond the run's own hours, which count from the first host: two thirds for what comes
before it (an image of 20 GB takes 5 to 15 min), the rest is ``END_S``. Time that is not used is not paid."""
END_S = 600
"""Before an allocation's end: it counts from its machines' start, a boot and Kueue's admission before the supervisor
does, and the run saves."""
SPOT_POD_GRACE_S = 15
"""Of Spot's 30 s notice the pods get the first 15 (docs concepts/spot-vms)."""
LONGEST_JOBSET_NAME = 63 - len("-supervisor-0-0-abcde")
"""A pod is called <jobset>-<role>-<job>-<pod>-<5 letters>, which has to be a DNS label."""
LONGEST_RUN_NAME = LONGEST_JOBSET_NAME - len("-c99")
"""So that the run's next allocations (<run>-c2 and on) keep its name too."""
START_TIMEOUT_S = 3600.0
MAX_RUN_DURATION = "provreq.kueue.x-k8s.io/maxRunDurationSeconds"
CLAIM_FOLDER = "/muster-runs"
"""Where a claim for run folders is mounted."""
LOCAL_FOLDER = "/run-local"
"""Where a pod of a run that lives in a bucket has its own run folder, on its node."""
SUPERVISOR = "supervisor"
HOST = "host"
METRICS_PORT = 9464
"""Of the metrics page where the run file leaves it open: Prometheus' habit for programs' own pages."""
SUPERVISOR_PRIORITY = "muster-supervisor"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Everything that the manifests depend on, in addition to the run file itself."""

    spec: RunSpec
    run_id: str
    home: str
    """Where the run lives: a bucket's URI, or its folder on the claim. Anything else is refused (``spec_rules``)."""
    options: Options
    family: Family
    machine: Machine
    mode: str
    model_copies: str | None = None
    """Folder of the home's bucket with the model's copy that hosts read (next to the runs: it stays); None: they
    download it, or it is a path."""

    @property
    def local_dir(self) -> str:
        """The run's folder as each pod sees it: on the claim, or the pod's own."""
        return self.home if self.options.run_claim else f"{LOCAL_FOLDER}/{self.run_id}"

    @property
    def local_ssds(self) -> int:
        """Local SSDs of a node, where its temporary files lie."""
        asked = self.spec.resources.local_ssd
        return asked if asked is not None else self.machine.local_ssd or 0

    @property
    def supervisors(self) -> int:
        """One where the run lives on a claim: its end is written in no place there that the other one would know."""
        return self.options.supervisors if self.in_bucket else 1

    @property
    def supervisor_grace_s(self) -> int:
        """Between the first signal and the last: hosts save meanwhile where all pods go, and have less."""
        return max(60, math.ceil(self.spec.recovery.grace_s) + 30)

    @property
    def metrics_port(self) -> int | None:
        """Where the working supervisor serves the run's metrics page; None: there is none."""
        port = self.spec.metrics.port
        return METRICS_PORT if port == 0 else port

    @property
    def in_bucket(self) -> bool:
        return is_bucket(self.home)

    @property
    def name(self) -> str:
        return object_name(self.run_id)

    @property
    def hosts(self) -> int:
        """Hosts that train plus spares: spares have to be inside the request."""
        return self.spec.resources.hosts + self.spec.resources.spare_hosts

    @property
    def slices(self) -> int:
        """Slices of TPUs, each a node pool and a child Job: one, or as many as there are replicas; 0: no TPUs."""
        return self.spec.parallelism.dp_replicate if self.machine.chips else 0

    @property
    def hosts_of_job(self) -> int:
        """Hosts of a child Job: all of a slice of TPUs; elsewhere one."""
        return slices_of(self.spec, self.machine.name).hosts if self.slices else 1

    @property
    def topology(self) -> str | None:
        """Of a slice: the one with as many hosts; None: there is none, or no TPU."""
        return slices_of(self.spec, self.machine.name).topology if self.slices else None

    @property
    def chips(self) -> tuple[str, int]:
        """What a host asks its node for, and how many of it."""
        machine = self.machine
        return ("google.com/tpu", machine.chips) if machine.chips else ("nvidia.com/gpu", machine.gpus)

    @property
    def kueue(self) -> bool:
        """Whether the run queues. Nodes that are owned already, with no queue named, are used directly."""
        return self.options.kueue and (self.mode != "owned" or self.spec.resources.queue is not None)

    @property
    def queue(self) -> str:
        return self.spec.resources.queue or self.queue_objects

    @property
    def queue_objects(self) -> str:
        """Name of the cluster queue and of the hosts' flavour: one for each kind of machine and way of buying it, of
        TPUs for each topology."""
        kind = self.family.label.removeprefix("nvidia-") or self.family.name
        if self.slices:
            kind = f"{self.family.name}-{self.topology}"
        return f"muster-{kind}-{self.mode}".replace("_", "-")

    @property
    def claims(self) -> bool:
        """Data NICs come by resource claims, not by annotations."""
        fabric = self.machine.fabric
        return fabric.dra_only or (self.options.network == "claims" and fabric.claim_class is not None)

    @property
    def labels(self) -> Mapping[str, str]:
        """On every object of the run: what finds it again."""
        return {
            "app.kubernetes.io/name": "muster",
            "app.kubernetes.io/instance": self.run_id,
            "app.kubernetes.io/managed-by": "muster",
        }


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A way of buying nodes, as pods and queues have to know it."""

    node_selector: Mapping[str, str]
    tolerations: tuple[Mapping[str, str], ...]
    annotations: Mapping[str, str]
    """On the JobSet itself."""
    grace_s: int
    queued: bool


def place(spec: RunSpec, *, run_id: str, run_dir: str, options: Options) -> Placement:
    """Find the machine; no checks beyond that (``spec_rules.findings`` has them).

    Raises:
        UsageError: the machine or accelerator is unknown.
    """
    requested = spec.resources
    family, machine = catalogue.find(requested.machine, requested.accelerator, cpu=requested.device == "cpu")
    home = f"{CLAIM_FOLDER}/{run_id}" if options.run_claim else _home(spec, run_id, run_dir)
    return Placement(
        spec=spec,
        run_id=run_id,
        home=home,
        model_copies=_model_copies(spec, home),
        options=options,
        family=family,
        machine=machine,
        mode=requested.provisioning_model or ("owned" if family.name == "cpu" else "flex_start"),
    )


def mode_of(placement: Placement, mode: str | None = None) -> Mode:
    """What ``mode`` (default: the placement's own) changes in the manifests."""
    mode = mode or placement.mode
    spec = placement.spec
    spot = mode == "spot"
    queued = mode == catalogue.QUEUED
    selector: dict[str, str] = {}
    if placement.slices:
        selector["cloud.google.com/gke-tpu-accelerator"] = placement.family.label
        selector["cloud.google.com/gke-tpu-topology"] = placement.topology or ""
    elif placement.family.label:
        selector["cloud.google.com/gke-accelerator"] = placement.family.label
    if mode.startswith("flex_start"):
        selector["cloud.google.com/gke-flex-start"] = "true"
    if spot:
        selector["cloud.google.com/gke-spot"] = "true"
    if mode in ("reservation", "calendar") and spec.resources.reservation:
        selector["cloud.google.com/reservation-name"] = reservation_name(spec.resources.reservation)
    annotations = {}
    if queued:
        # On the object, not on the pod template: Kueue copies it from the job object alone (jobframework/utils.go:264).
        annotations[MAX_RUN_DURATION] = str(longest_run_s(spec))
    return Mode(
        node_selector=selector,
        tolerations=tuple(_tolerations(placement, spot=spot, queued=queued)),
        annotations=annotations,
        grace_s=SPOT_POD_GRACE_S if spot else max(30, math.ceil(spec.recovery.grace_s) + 5),
        queued=queued,
    )


def resolved(placement: Placement) -> RunSpec:
    """The run file with what the machine and the home decide: ranks a host, device, how long hosts are waited for,
    and paths as the pods see them (checkpoints by URI, weights below their mount)."""
    spec = placement.spec
    resources, recovery, checkpoint = spec.resources, spec.recovery, spec.checkpoint
    gpus = placement.machine.gpus
    # A machine of TPUs has no device here but the one that the run file names (``spec_rules``).
    machine = {
        "ranks_per_host": resources.ranks_per_host or gpus or 1,
        "device": ("cuda" if gpus else "cpu") if resources.device == "auto" else resources.device,
    }
    # The default fits processes; pods pull an image of 20 GB first, and nodes may come one by one.
    start_s = max(recovery.start_timeout_s, START_TIMEOUT_S) if _by_default(recovery) else recovery.start_timeout_s
    directory = as_uri(checkpoint.uri(placement.home)) if checkpoint.dir or placement.in_bucket else None
    changes: dict[str, object] = {
        "run_dir": as_uri(spec.run_dir) if spec.run_dir else None,
        "resources": resources.model_copy(update=machine),
        "recovery": recovery.model_copy(update={"start_timeout_s": start_s}),
        "checkpoint": checkpoint.model_copy(update={"dir": directory}),
    }
    if placement.metrics_port is not None:  # the collector comes from another pod
        page = {"port": placement.metrics_port, "bind": "0.0.0.0"}
        changes["metrics"] = spec.metrics.model_copy(update=page)
    return with_mounted_inputs(spec).model_copy(update=changes)


def longest_run_s(spec: RunSpec) -> int:
    """Seconds asked of queued flex-start: the run's own limit and ``LEAD_S``, at most 7 days."""
    if spec.limits.max_hours is None:
        return SEVEN_DAYS_S
    return min(SEVEN_DAYS_S, math.ceil(spec.limits.max_hours * 3600) + LEAD_S)


def leave_after_s(asked_s: int) -> int:
    """Seconds of the supervisor after which a run saves that has an allocation of ``asked_s`` (``longest_run_s``).

    One that holds the whole run ends ``LEAD_S`` after its hours, so hosts may start ``LEAD_S - END_S`` after the
    supervisor before this falls ahead of ``limits.max_hours``, which then ends the run itself. One of 7 days holds no
    whole run: what is left goes on in the next, and nothing is lost where all of ``LEAD_S`` is kept for the end. At
    least half, as the chart's value may be as short as Google allows (600 s), and 0 would mean never.
    """
    return max(asked_s // 2, asked_s - (LEAD_S if asked_s >= SEVEN_DAYS_S else END_S))


def allocation_ends(spec: RunSpec, mode: str) -> tuple[int, int]:
    """(when the supervisor saves because its allocation ends, 0: never; how many the run may have, 0: any number).

    Nodes of plain flex-start live 7 days at any request, and the supervisor starts before the first of them
    is there: its waiting counts here and must not count against the run's hours, which its own limit holds over all
    allocations.
    """
    if mode == "flex_start":
        return leave_after_s(SEVEN_DAYS_S), 0
    hours = spec.limits.max_hours
    most = math.floor(hours * 3600 / leave_after_s(SEVEN_DAYS_S)) + 1 if hours else 0
    return leave_after_s(longest_run_s(spec)) if mode == catalogue.QUEUED else 0, most


def reservation_name(named: str) -> str:
    """``R`` of ``R``, ``R/reservationBlocks/B`` and ``projects/P/reservations/R[/reservationBlocks/B]``: the pool is
    tied to all of it, and its nodes carry the name alone, as a label has no ``/``."""
    return named.partition("/reservationBlocks/")[0].rpartition("/")[2]


def object_name(run_id: str) -> str:
    """A JobSet name for ``run_id``: itself where it fits, else its head and a hash of the whole."""
    if len(run_id) <= LONGEST_RUN_NAME and re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", run_id):
        return run_id
    head = re.sub(r"[^a-z0-9-]+", "-", run_id.lower()).strip("-0123456789") or "run"
    digest = hashlib.sha256(run_id.encode()).hexdigest()[:8]
    return f"{head[: LONGEST_RUN_NAME - 9].strip('-')}-{digest}"


def _by_default(recovery: Recovery) -> bool:
    return recovery.start_timeout_s == Recovery().start_timeout_s


def _home(spec: RunSpec, run_id: str, run_dir: str) -> str:
    """In a bucket as given, else next to the checkpoints where those are in one."""
    for given in (as_uri(spec.run_dir or ""), as_uri(run_dir)):
        if is_bucket(given):
            return given
    directory = as_uri(spec.checkpoint.dir or "")
    return "/".join([*directory.split("/")[:3], "muster-runs", run_id]) if is_bucket(directory) else run_dir


def _model_copies(spec: RunSpec, home: str) -> str | None:
    model = spec.model
    if model is None or model.weights != "bucket" or model.source is None or not home.startswith("gs://"):
        return None
    from_hub = model.source[:1] not in ("", ".", "/", "~") and "://" not in model.source
    return f"gs://{home.split('/')[2]}/muster-models" if from_hub else None


def _tolerations(placement: Placement, *, spot: bool, queued: bool) -> list[Mapping[str, str]]:
    found: list[Mapping[str, str]] = []
    resource, count = placement.chips
    if count:
        found.append({"key": resource, "operator": "Equal", "value": "present", "effect": "NoSchedule"})
        # GKE puts it on a node an hour before maintenance: a replaced pod may still use that hour, the agent watches.
        found.append(
            {"key": "cloud.google.com/impending-node-termination", "operator": "Exists", "effect": "NoSchedule"}
        )
        found.append({"key": "user-workload", "operator": "Equal", "value": "true", "effect": "NoSchedule"})
    if placement.family.arch == "arm64":
        found.append({"key": "kubernetes.io/arch", "operator": "Equal", "value": "arm64", "effect": "NoSchedule"})
    if spot:
        found.append({"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"})
    if queued:
        found.append(
            {"key": "cloud.google.com/gke-queued", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Options(Record):
    """Settings of the rendering; every one has a default that ``muster up`` makes true."""

    namespace: str = "default"
    service_account: str = "muster"
    """Kubernetes service account, bound to the bucket by Workload Identity."""
    supervisor_pool: str = "muster-cpu"
    """Node pool of small CPU nodes (``cloud.google.com/gke-nodepool``) for the supervisor."""
    supervisors: Literal[1, 2] = 2
    """The second one stands by, on another node where there is one: a node that hangs is otherwise answered in ten
    minutes."""
    supervisor_priority: str | None = SUPERVISOR_PRIORITY
    """PriorityClass of supervisors; None: the cluster's default."""
    kueue: bool = True
    """False: no queue; the JobSet starts at once (a cluster without Kueue)."""
    network: Literal["auto", "annotations", "claims"] = "auto"
    """Data NICs by annotations and Network objects, or by resource claims (DRANET); auto: the family's."""
    nccl: Literal["node", "catalogue"] = "node"
    """NCCL's environment: sourced from Google's script on the node, or the catalogue's values."""
    hugging_face_secret: str = "muster-hugging-face"
    """Secret with key ``token``; absent is allowed."""
    network_prefix: str = "muster"
    """First part of the names of VPCs and subnets."""
    run_claim: str | None = None
    """A ReadWriteMany volume claim (Filestore, NFS) for run folders, in place of a mounted bucket."""
    nodes_in_quota: int | None = None
    """Nodes that the cluster queue admits; default: what this run file asks for."""
