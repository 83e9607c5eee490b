"""Where a run goes on Compute Engine, and what its machines are called: pure functions of the run file."""

from __future__ import annotations

import hashlib
import math
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from muster.backends.bucket_paths import home_filled_in, home_of
from muster.catalog import gce, gke, rows
from muster.catalog import gce as catalogue
from muster.catalog import gke as machines
from muster.catalog.gce import FLEX_START, ON_DEMAND
from muster.catalog.gke import Family, Machine
from muster.catalog.offers import Option
from muster.config.spec import RunSpec
from muster.core.errors import UsageError

SEVEN_DAYS_S = 7 * 86_400
"""Flex-start's longest (API)."""
LONGEST_S = 120 * 86_400
"""The API's own limit of ``maxRunDuration``."""
LEAD_S = 1800
"""What is asked beyond the run's own hours: a machine's time counts from its boot, and the run saves before its end."""
SUPERVISOR_LEAD_S = 86_400
"""How much longer than the hosts' requests and time the supervisor's machine may live."""
START_TIMEOUT_S = 3600.0
"""The driver, the bundle and its installation take 1 to 10 minutes after a machine's boot, and machines come apart."""
RUNS = "/var/lib/muster"
"""On every machine: runs' folders; on the boot disk, which outlives a reboot."""
PREFIX = "muster"
"""Of networks that a project has once, for all runs; GKE's names, so that one set serves both."""
LONGEST_STEM = 63 - len("-supervisor")
NAMESPACE = uuid.UUID("8f6f3a0e-6d2b-5f0c-9a55-2f6b1c9b7a31")
"""Of request ids; any fixed one."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Everything that the requests depend on, in addition to the run file itself."""

    spec: RunSpec
    run_id: str
    home: str
    """Where the run lives: ``gs://BUCKET/...`` (anything else is refused)."""
    family: Family
    machine: Machine
    mode: str
    submission: str = "1"
    files_sha256: str = ""
    """Digest of the run's files as they are in the home (``run_folder``); empty: of those without the user's own code.
    """

    @property
    def project(self) -> str:
        return self.spec.resources.project or ""

    @property
    def zones(self) -> list[str]:
        """Tried in order."""
        return self.spec.resources.locations

    @property
    def hosts(self) -> int:
        """Hosts that train plus spares."""
        return self.spec.resources.hosts + self.spec.resources.spare_hosts

    @property
    def least_hosts(self) -> int:
        """With fewer a request has failed, and releases what it got."""
        return self.spec.resources.min_hosts or self.spec.resources.hosts

    @property
    def stem(self) -> str:
        """What the names of the run's machines begin with: the run's own name where that can be a machine's."""
        return stem_of(self.run_id)

    @property
    def supervisor(self) -> str:
        return supervisor_of(self.run_id)

    @property
    def labels(self) -> dict[str, str]:
        """On every machine and disk of the run: what finds them again."""
        return {"muster-run": self.stem}

    @property
    def run_s(self) -> int | None:
        """The longest life of a host, after which Compute Engine removes it; None: it has no end of its own."""
        hours = self.spec.limits.max_hours
        asked = None if hours is None else math.ceil(hours * 3600) + LEAD_S
        if self.mode == FLEX_START:
            return min(asked or SEVEN_DAYS_S, SEVEN_DAYS_S)
        return None if asked is None else min(asked, LONGEST_S)

    @property
    def supervisor_s(self) -> int:
        """The longest life of the supervisor's machine, which else only ``muster down`` removes."""
        hours = self.spec.limits.max_hours
        if hours is None:
            return LONGEST_S
        waits = self.spec.gce.max_wait_hours * len(self.zones) if self.mode == FLEX_START else 0
        return min(LONGEST_S, math.ceil((hours + waits) * 3600) + LEAD_S + SUPERVISOR_LEAD_S)

    @property
    def max_wait_s(self) -> int:
        """How long a zone may keep a flex-start request waiting."""
        return math.ceil(self.spec.gce.max_wait_hours * 3600)

    @property
    def boot_disk_gb(self) -> int:
        """As asked; else room for temporary files and the model's weights twice."""
        model = self.spec.model
        return self.spec.gce.boot_disk_gb or rows.boot_disk_gb(model.source if model is not None else None)

    @property
    def image(self) -> str:
        return self.spec.gce.image or catalogue.image(self.family).name

    @property
    def token_secret(self) -> str:
        """The secret by which supervisor and agents know each other: made for this run alone, so its first version."""
        return f"projects/{self.project}/secrets/muster-{self.run_id}/versions/1"


def place(spec: RunSpec, *, run_id: str, run_dir: str | None) -> Placement:
    """Find the machine; no checks beyond that (``run_file_rules`` has them).

    Raises:
        UsageError: there is no such machine, or the run file names none.
    """
    family, machine = machine_of(spec)
    modes = catalogue.modes(machine)
    mode = spec.resources.provisioning_model or (FLEX_START if FLEX_START in modes else ON_DEMAND)
    return Placement(
        spec=spec, run_id=run_id, home=home_of(spec, run_id, run_dir), family=family, machine=machine, mode=mode
    )


def machine_of(spec: RunSpec) -> tuple[Family, Machine]:
    """The run file's machine. Raises UsageError as ``catalog.gke.find``."""
    return gke.find(spec.resources.machine, spec.resources.accelerator, cpu=spec.resources.device == "cpu")


def resolved(placement: Placement) -> RunSpec:
    """The run file as hosts read it: what the machine and the home decide is filled in."""
    return home_filled_in(
        placement.spec, home=placement.home, gpus=placement.machine.gpus, start_timeout_s=START_TIMEOUT_S
    )


def stem_of(run: str) -> str:
    """What names of the run's machines begin with; see ``Placement.stem``."""
    if len(run) <= LONGEST_STEM and re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", run):
        return run
    head = re.sub(r"[^a-z0-9-]+", "-", run.lower()).strip("-0123456789") or "run"
    return f"{head[: LONGEST_STEM - 9].strip('-')}-{hashlib.sha256(run.encode()).hexdigest()[:8]}"


def supervisor_of(run: str) -> str:
    """Name of the run's supervisor's machine, in any zone."""
    return f"{stem_of(run)}-supervisor"


def region_of(zone: str) -> str:
    """``us-central1-b`` -> ``us-central1``."""
    return zone.rpartition("-")[0]


def host_names(placement: Placement, request_number: int, count: int) -> list[str]:
    """Names of the machines of request ``request_number`` (1, 2, ...), the same whenever it is repeated.

    No two requests share a name, as that of a machine which is being deleted is taken until it is gone.
    """
    return [f"{placement.stem}-{request_number}-{index}" for index in range(count)]


def request_id(placement: Placement, what: str) -> str:
    """By it Google knows a repeated request for a while; after that the names in it are known."""
    return str(uuid.uuid5(NAMESPACE, f"{placement.run_id}/{what}"))


def rents(options: Sequence[Option]) -> list[Option]:
    """Of ``options`` those that can be asked for here; TPUs are rendered alone."""
    found = []
    for option in options:
        try:
            family, machine = machines.find(option.offer.machine, None)
        except UsageError:  # what GKE has not
            continue
        if not machine.chips and option.offer.mode in gce.modes(machine) and gce.refusal(family) is None:
            found.append(replace(option, offer=replace(option.offer, backend="gce")))
    return found
