"""Where a run goes on Vertex AI and what its machines are: the run file's words turned into a job's limits. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from muster.backends.bucket_paths import home_filled_in, home_of, with_mounted_inputs
from muster.catalog import rows, vertex
from muster.catalog import vertex as catalogue
from muster.catalog.offers import UNKNOWN_REGION, Option
from muster.catalog.rows import Price
from muster.catalog.vertex import FLEX_START, ON_DEMAND, Machine
from muster.config.spec import RunSpec

SEVEN_DAYS_S = 604_800
"""A custom job's running time where nothing is asked (API, ``Scheduling.timeout``), and flex-start's longest."""
LEAD_S = 1800
"""What is asked beyond the run's own hours: Vertex ends a job at its timeout without notice."""
WAIT_HOURS: Mapping[str, float] = {FLEX_START: 24.0}
OTHER_WAIT_HOURS = 2.0
"""A stock-out is tried up to three times by Vertex, in minutes to tens of minutes, before the job fails for it."""
START_TIMEOUT_S = 3600.0
"""Each host's program starts when its machine is there: minutes to a quarter of an hour apart."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Everything that a request depends on, in addition to the run file itself."""

    spec: RunSpec
    run_id: str
    home: str
    """Where the run lives: ``gs://BUCKET/...`` (anything else is refused)."""
    machine: Machine
    mode: str

    @property
    def regions(self) -> list[str]:
        """Tried in order."""
        return self.spec.resources.locations

    @property
    def hosts(self) -> int:
        """Hosts that train plus spares: what a job has is fixed when it is created."""
        return self.spec.resources.hosts + self.spec.resources.spare_hosts

    @property
    def max_wait_s(self) -> int:
        """How long a region may keep the request waiting; never 0, which would be without limit."""
        hours = self.spec.vertex.max_wait_hours or WAIT_HOURS.get(self.mode, OTHER_WAIT_HOURS)
        return max(1, math.ceil(hours * 3600))

    @property
    def timeout_s(self) -> int:
        """The job's longest running time."""
        hours = self.spec.limits.max_hours
        return SEVEN_DAYS_S if hours is None else min(SEVEN_DAYS_S, math.ceil(hours * 3600) + LEAD_S)

    @property
    def boot_disk_gb(self) -> int:
        """As asked; else room for the image, temporary files and the model's weights twice, in steps of 100 GB."""
        model = self.spec.model
        return self.spec.vertex.boot_disk_gb or rows.boot_disk_gb(model.source if model is not None else None)

    @property
    def token_secret(self) -> str:
        """The secret by which supervisor and agents know each other: made for this run alone, so its first version."""
        return f"projects/{self.spec.resources.project}/secrets/muster-{self.run_id}/versions/1"


def place(spec: RunSpec, *, run_id: str, run_dir: str | None) -> Placement:
    """Find the machine; no checks beyond that (``run_file_rules`` has them).

    Raises:
        UsageError: Vertex rents no such machine, or the run file names none.
    """
    machine = machine_of(spec)
    mode = spec.resources.provisioning_model or (FLEX_START if FLEX_START in machine.modes else ON_DEMAND)
    return Placement(spec=spec, run_id=run_id, home=home_of(spec, run_id, run_dir), machine=machine, mode=mode)


def machine_of(spec: RunSpec) -> Machine:
    """The run file's machine. Raises UsageError as ``catalog.vertex.find``."""
    return catalogue.find(spec.resources.machine, spec.resources.accelerator)


def resolved(placement: Placement) -> RunSpec:
    """The run file with what the machine and the home decide: ranks a host, device, how long hosts are waited for, and
    paths as hosts see them (checkpoints by URI, weights and data below ``/gcs``)."""
    spec = home_filled_in(
        placement.spec, home=placement.home, gpus=placement.machine.gpus, start_timeout_s=START_TIMEOUT_S
    )
    return with_mounted_inputs(spec)


def rents(options: Sequence[Option]) -> list[Option]:
    """Of ``options`` those that can be asked for here; the price is the machine's and the fee, None where the fee is
    not known."""
    found = []
    for option in options:
        machine, offer = vertex.machines().get(option.offer.machine), option.offer
        if machine is None or machine.accelerator is None or offer.mode not in machine.modes:
            continue
        regions = machine.accelerator.regions
        if regions is not None and offer.location not in (*regions, UNKNOWN_REGION):
            continue
        price = _with_fee(option.price) if option.price is not None else None
        usd = None if price is None else price.usd_per_gpu_hour * machine.gpus
        found.append(replace(option, price=price, offer=replace(offer, backend="vertex", usd_per_node_hour=usd)))
    return found


def _with_fee(price: Price) -> Price | None:
    fee = vertex.fee(price.machine, price.region)
    if fee is None:
        return None
    kind = "as billed" if fee.billed else "assumed"
    return replace(
        price,
        usd_per_gpu_hour=price.usd_per_gpu_hour + fee.usd_per_gpu_hour,
        low=price.low + fee.usd_per_gpu_hour,
        high=price.high + fee.usd_per_gpu_hour,
        source=f"{price.source}; and Vertex AI's fee of {fee.usd_per_gpu_hour:.4f} ({kind})",
    )
