"""Is there quota for all hosts of the run? Asked first, and for the right one: each way of buying has its own.

Spot and flex-start draw on the preemptible quota of the GPU, never on the plain one. On demand, L4 and A100 have one
of their own; newer GPUs share one that is split by family. A reservation's nodes draw on neither. Names as they were
seen in the Cloud Quotas API of several projects in 2026; one that is not found is a note, not a refusal.
"""

from __future__ import annotations

from dataclasses import dataclass

from muster.backends.gke.google.http import Call
from muster.backends.gke.google.session import Session
from muster.backends.gke.provision.inventory.resource_names import Site
from muster.core.errors import CapacityError
from muster.core.typed_json import JsonObject, child, children, text, whole

OWN_QUOTA = ("L4", "A100", "A100-80GB")
BY_FAMILY = "gpus_per_gpu_family"


@dataclass(frozen=True, kw_only=True)
class Quota:
    """What the run needs of one quota, and what the project has of it."""

    name: str
    region: str
    needed: int
    limit: int | None
    note: str = ""
    """Why the limit is not known."""

    @property
    def short(self) -> bool:
        return self.limit is not None and 0 <= self.limit < self.needed

    def sentence(self) -> str:
        if self.limit is None:
            return f"quota {self.name} in {self.region}: not known ({self.note}); {self.needed} GPUs are needed"
        has = "no limit" if self.limit < 0 else str(self.limit)
        return f"quota {self.name} in {self.region}: {has}; {self.needed} GPUs are needed"


def quota(site: Site, session: Session) -> Quota | None:
    """The quota that the run's nodes draw on; None where they draw on none. Asks once, changes nothing."""
    call = quota_call(site)
    if call is None:
        return None
    placement = site.placement
    needed = placement.machine.gpus * (placement.options.nodes_in_quota or placement.hosts)
    name, region = _name(site) or "", site.region
    reply = session.send(call)
    if reply.status >= 300:
        return Quota(name=name, region=region, needed=needed, limit=None, note=reply.message)
    result = _limit(reply.body, region, _family(site))
    note = "" if result is not None else "the answer has none for this region"
    return Quota(name=name, region=region, needed=needed, limit=result, note=note)


def check_quota(site: Site, session: Session) -> Quota | None:
    """The same.

    Raises:
        CapacityError: it is too small for the run.
    """
    result = quota(site, session)
    if result is not None and result.short:
        url = f"https://console.cloud.google.com/iam-admin/quotas?project={site.project}"
        raise CapacityError(result.sentence(), hint=f"ask for more at {url}, or name another place or mode")
    return result


def quota_call(site: Site) -> Call | None:
    """The question."""
    name = _name(site)
    if name is None:
        return None
    metric = f"compute.googleapis.com%2F{name}"
    folder = f"projects/{site.project}/services/compute.googleapis.com/consumerQuotaMetrics"
    return Call(method="GET", url=f"https://serviceusage.googleapis.com/v1beta1/{folder}/{metric}?view=FULL")


def _name(site: Site) -> str | None:
    placement = site.placement
    if not placement.machine.gpus:
        return None
    gpu = placement.family.accelerator.lower().replace("-", "_")
    if placement.mode == "spot" or placement.mode.startswith("flex_start"):
        return f"preemptible_nvidia_{gpu}_gpus"
    if placement.mode == "on_demand":
        return f"nvidia_{gpu}_gpus" if placement.family.accelerator in OWN_QUOTA else BY_FAMILY
    return None


def _family(site: Site) -> str:
    return "NVIDIA_" + site.placement.family.accelerator.replace("-", "_")


def _limit(body: JsonObject, region: str, family: str) -> int | None:
    """The bucket that fits most closely: region and family, then the one for everywhere."""
    best: tuple[int, int] | None = None
    for limit in children(body, "consumerQuotaLimits"):
        for bucket in children(limit, "quotaBuckets"):
            dimensions = child(bucket, "dimensions")
            if (
                text(dimensions, "region", default=region) != region
                or text(dimensions, "gpu_family", default=family) != family
            ):
                continue
            if "effectiveLimit" in bucket and (best is None or len(dimensions) > best[0]):
                best = (len(dimensions), whole(bucket, "effectiveLimit"))
    return best[1] if best else None
