"""Is there quota for everything that the plan needs? Asked before anything is made, and for the right ones.

Each way of buying GPUs has its own: Spot and flex-start draw on the preemptible quota of the GPU, never on the plain
one. On demand, L4 and A100 have one of their own; newer GPUs share one that is split by family. A reservation's nodes
draw on none of them. Names as they were seen in the Cloud Quotas API of several projects in 2026, in Compute's
documents (``Quota.metric``) and in the Toolkit's validator (2026-06-25). A quota that an answer does not have is no
refusal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from muster.backends.gke.manifests.placement import Placement
from muster.backends.gke.provision.inventory.disks import SUPERVISOR_DISK_GB, boot_disk_gb
from muster.backends.gke.provision.inventory.pools import STATIC
from muster.backends.gke.provision.inventory.resource_names import Site
from muster.backends.google.http import Call
from muster.backends.google.session import Session
from muster.core.errors import CapacityError
from muster.core.typed_json import JsonObject, child, children, text, whole

OWN_QUOTA = ("L4", "A100", "A100-80GB")
BY_FAMILY = "gpus_per_gpu_family"
SSD_BY_FAMILY = "local_ssd_total_storage_per_vm_family"
SSD_GB = 375
SUPERVISOR_CPUS = 4
EVERYWHERE = "all regions"
COUNTED = {"networks": "NETWORKS", "subnetworks": "SUBNETWORKS", "firewalls": "FIREWALLS", "routers": "ROUTERS"}
"""Kind of thing that ``up`` makes -> the quota of the whole project, or of the region (routers)."""
BOOT_DISK = {"pd-balanced": ("SSD_TOTAL_GB",), "hyperdisk-balanced": ("HDB_TOTAL_GB", "HYPERDISK_BALANCED_TOTAL_GB")}
MODELS = {"spot": "SPOT", "flex_start": "FLEX_START", "flex_start_queued": "FLEX_START"}


@dataclass(frozen=True, kw_only=True)
class Quota:
    """What the run needs of one quota, and what the project has of it."""

    name: str
    place: str
    """A region, or all of them."""
    needed: int
    limit: int | None
    used: int | None = None
    """Of the limit, by anything in the project; None: not known."""
    what: str = "GPUs"
    at_once: bool = False
    """``up`` itself takes it; what others use now does not become free meanwhile."""
    note: str = ""
    """Why the limit is not known."""

    @property
    def short(self) -> bool:
        """It cannot be enough, even if others release all of theirs."""
        if self.limit is None or self.limit < 0:
            return False
        return self.limit < self.needed or (self.at_once and self.limit - (self.used or 0) < self.needed)

    def sentence(self) -> str:
        head = f"quota {self.name} in {self.place}: "
        if self.limit is None:
            return f"{head}not known ({self.note}); {self.needed} {self.what} are needed"
        has = "no limit" if self.limit < 0 else f"limit {self.limit}"
        used = "" if self.used is None else f", {self.used} in use"
        return f"{head}{has}{used}; {self.needed} {self.what} are needed"


@dataclass(frozen=True, kw_only=True)
class _Need:
    """Of a region's or project's own table: the first of the names that it has counts."""

    names: tuple[str, ...]
    place: str
    needed: int
    what: str
    at_once: bool = False


def check_quotas(site: Site, session: Session, lacking: Collection[str] = ()) -> None:
    """Ask for everything; ``lacking``: keys of what ``up`` is about to make.

    Raises:
        CapacityError: what is too small, each with its limit, what is in use, and what is needed.
    """
    if short := [each for each in quotas(site, session, lacking) if each.short]:
        url = f"https://console.cloud.google.com/iam-admin/quotas?project={site.project}"
        raise CapacityError(
            "; ".join(each.sentence() for each in short),
            hint=f"ask for more at {url}, or name another place or mode",
        )


def quotas(site: Site, session: Session, lacking: Collection[str] = ()) -> list[Quota]:
    """Every quota that the run needs and Google knows, the GPUs' first, which is there even if not known. Three or
    four questions; changes nothing."""
    region, project = (_table(call, session) for call in _tables(site))
    result = []
    if call := _gpu_call(site):
        result.append(_of_service(site, session, call, _gpu_name(site) or "", _gpu_family(site), _gpus(site), region))
    if (call := _ssd_call(site)) and (gb := _local_ssd_gb(site.placement)):
        found = _of_service(site, session, call, SSD_BY_FAMILY, {"vm_family": _vm_family(site)}, gb, {}, what="GB")
        result += [found] if found.limit is not None else []
    for need in (*_needs(site, region), *_counted(site, lacking)):
        rows = project if need.place == EVERYWHERE else region
        if (name := next((name for name in need.names if name in rows), None)) is not None:
            limit, used = rows[name]
            result.append(
                Quota(
                    name=name, place=need.place, needed=need.needed, limit=limit, used=used, what=need.what,
                    at_once=need.at_once,
                )
            )  # fmt: skip
    return result


def quota_calls(site: Site) -> list[Call]:
    return [call for call in (_gpu_call(site), _ssd_call(site)) if call is not None] + _tables(site)


# ---------------------------------------------------------------- what is needed


def _needs(site: Site, region: dict[str, tuple[int, int]]) -> Iterator[_Need]:
    """What supervisors and nodes take of the tables."""
    placement, place = site.placement, site.region
    nodes = _nodes(placement) if placement.machine.gpus else 0
    now, supervisors = placement.mode in STATIC, placement.options.supervisors
    yield _Need(names=("CPUS",), place=place, needed=supervisors * SUPERVISOR_CPUS, what="CPUs of supervisors")
    if nodes and not now:
        yield _Need(names=("GPUS_ALL_REGIONS",), place=EVERYWHERE, needed=_gpus(site), what="GPUs")
    if nodes and placement.mode == "on_demand" and placement.family.name.startswith("a2"):
        yield _Need(names=("A2_CPUS",), place=place, needed=nodes * placement.machine.vcpus, what="CPUs")
    if (gb := _local_ssd_gb(placement)) and not now and (name := _ssd_table(placement, region)):
        yield _Need(names=(name,), place=place, needed=gb, what="GB of local SSD")
    disks = Counter({"pd-balanced": supervisors * SUPERVISOR_DISK_GB})
    disks[placement.family.boot_disk] += nodes * boot_disk_gb(placement)
    for kind, size in disks.items():
        if kind in BOOT_DISK and size:
            yield _Need(names=BOOT_DISK[kind], place=place, needed=size, what=f"GB of {kind}")
    if not placement.spec.resources.private:
        yield _Need(names=("IN_USE_ADDRESSES",), place=place, needed=nodes + supervisors, what="addresses of nodes")


def _counted(site: Site, lacking: Collection[str]) -> Iterator[_Need]:
    """What ``up`` makes of each kind, in addition to what is there."""
    for kind, number in Counter(key.partition("/")[0] for key in lacking).items():
        if kind in COUNTED:
            place = site.region if kind == "routers" else EVERYWHERE
            yield _Need(names=(COUNTED[kind],), place=place, needed=number, what=f"more {kind}", at_once=True)


def _nodes(placement: Placement) -> int:
    return placement.options.nodes_in_quota or placement.hosts


def _gpus(site: Site) -> int:
    return site.placement.machine.gpus * _nodes(site.placement)


def _local_ssd_gb(placement: Placement) -> int:
    return SSD_GB * placement.local_ssds * _nodes(placement) if placement.machine.gpus else 0


def _preemptible(mode: str) -> bool:
    return mode == "spot" or mode.startswith("flex_start")


def _ssd_table(placement: Placement, region: dict[str, tuple[int, int]]) -> str | None:
    """Preemptible machines draw on a quota of their own where the project has any of it, else on the plain one; third
    generation machines on demand on one by family, which is asked for apart."""
    if _preemptible(placement.mode) and region.get("PREEMPTIBLE_LOCAL_SSD_GB", (0, 0))[0]:
        return "PREEMPTIBLE_LOCAL_SSD_GB"
    return "LOCAL_SSD_TOTAL_GB" if placement.family.name in ("a2", "a2-ultra", "g2") else None


# ---------------------------------------------------------------- what the project has


def _tables(site: Site) -> list[Call]:
    """The region's own quotas, and those of the whole project."""
    return [
        Call(method="GET", url=f"{site.compute}/regions/{site.region}"),
        Call(method="GET", url=site.compute),
    ]


def _table(call: Call, session: Session) -> dict[str, tuple[int, int]]:
    """Metric -> (limit, in use); empty where it cannot be read."""
    reply = session.send(call)
    rows = children(reply.body, "quotas") if reply.status < 300 else []
    return {text(row, "metric"): (_number(row, "limit"), _number(row, "usage")) for row in rows if "limit" in row}


def _number(row: JsonObject, key: str) -> int:
    """Compute writes whole numbers as 24.0."""
    return int(float(text(row, key, default="0")))


def _of_service(
    site: Site,
    session: Session,
    call: Call,
    name: str,
    family: dict[str, str],
    needed: int,
    region: dict[str, tuple[int, int]],
    *,
    what: str = "GPUs",
) -> Quota:
    """One of Service Usage's quotas, which says limits alone; what is in use is in the region's table, or unknown."""
    reply = session.send(call)
    if reply.status >= 300:
        return Quota(name=name, place=site.region, needed=needed, limit=None, what=what, note=reply.message)
    limit = _limit(reply.body, site.region, family, exact=name == SSD_BY_FAMILY)
    note = "" if limit is not None else "the answer has none for this region"
    used = region.get(name.upper(), (0, None))[1]
    now = site.placement.mode in STATIC
    return Quota(name=name, place=site.region, needed=needed, limit=limit, used=used, what=what, at_once=now, note=note)


def _gpu_call(site: Site) -> Call | None:
    name = _gpu_name(site)
    return None if name is None else _service_call(site, name)


def _ssd_call(site: Site) -> Call | None:
    """Of machines of the third generation on demand."""
    placement = site.placement
    later = placement.machine.local_ssd and placement.family.name not in ("a2", "a2-ultra", "g2")
    return _service_call(site, SSD_BY_FAMILY) if later and placement.mode == "on_demand" else None


def _service_call(site: Site, name: str) -> Call:
    metric = f"compute.googleapis.com%2F{name}"
    folder = f"projects/{site.project}/services/compute.googleapis.com/consumerQuotaMetrics"
    return Call(method="GET", url=f"https://serviceusage.googleapis.com/v1beta1/{folder}/{metric}?view=FULL")


def _gpu_name(site: Site) -> str | None:
    placement = site.placement
    if not placement.machine.gpus:
        return None
    gpu = placement.family.accelerator.lower().replace("-", "_")
    if _preemptible(placement.mode):
        return f"preemptible_nvidia_{gpu}_gpus"
    if placement.mode == "on_demand":
        return f"nvidia_{gpu}_gpus" if placement.family.accelerator in OWN_QUOTA else BY_FAMILY
    return None


def _gpu_family(site: Site) -> dict[str, str]:
    return {"gpu_family": "NVIDIA_" + site.placement.family.accelerator.replace("-", "_")}


def _vm_family(site: Site) -> str:
    return site.placement.machine.name.partition("-")[0].upper()


def _limit(body: JsonObject, region: str, family: dict[str, str], *, exact: bool) -> int | None:
    """The bucket that fits most closely: region and family, then the one for everywhere. ``exact``: of that family."""
    requested = {"region": region, **family}
    best: tuple[int, int] | None = None
    for limit in children(body, "consumerQuotaLimits"):
        for bucket in children(limit, "quotaBuckets"):
            dimensions = child(bucket, "dimensions")
            fits = all(text(dimensions, key, default=value) == value for key, value in requested.items())
            if not fits or "effectiveLimit" not in bucket or (exact and not family.keys() <= dimensions.keys()):
                continue
            if best is None or len(dimensions) > best[0]:
                best = (len(dimensions), whole(bucket, "effectiveLimit"))
    return best[1] if best else None


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One place. The score is coarse (0.1, 0.5, 0.9 were seen) and is no promise."""

    zone: str
    mode: str
    obtainability: float | None
    note: str = ""
    """Why there is no score, or for Spot how long most machines live."""

    def sentence(self) -> str:
        score = "no score" if self.obtainability is None else f"obtainability {self.obtainability:g}"
        return f"{self.zone} {self.mode}: {score}" + (f" ({self.note})" if self.note else "")


def capacity_advice(sites: Sequence[Site], session: Session) -> list[Advice]:
    """Ask for each place, in order; a refusal is a note, because advice is not needed to go on."""
    return [_one(site, session) for site in sites]


def advice_call(site: Site) -> Call:
    """The question: all hosts of the run in that one zone."""
    placement = site.placement
    body: JsonObject = {
        "size": placement.hosts,
        "distributionPolicy": {"targetShape": "ANY_SINGLE_ZONE", "zones": [{"zone": f"zones/{site.zone}"}]},
        "instanceFlexibilityPolicy": {"instanceSelections": {"hosts": {"machineTypes": [placement.machine.name]}}},
        "instanceProperties": {"scheduling": {"provisioningModel": MODELS[placement.mode]}},
    }
    return Call(method="POST", url=f"{site.compute}/regions/{site.region}/advice/capacity", body=body)


def _one(site: Site, session: Session) -> Advice:
    mode = site.placement.mode
    if mode not in MODELS or not site.placement.machine.gpus:
        return Advice(zone=site.zone, mode=mode, obtainability=None, note="Google advises on Spot and flex-start alone")
    reply = session.send(advice_call(site))
    if reply.status >= 300:
        return Advice(zone=site.zone, mode=mode, obtainability=None, note=reply.message)
    for row in children(reply.body, "recommendations"):
        scores = child(row, "scores")
        if "obtainability" in scores:
            uptime = text(scores, "estimatedUptime")
            note = f"most machines live {uptime}" if uptime else ""
            return Advice(zone=site.zone, mode=mode, obtainability=float(text(scores, "obtainability")), note=note)
    return Advice(zone=site.zone, mode=mode, obtainability=None, note="the answer had none")
